"""Writes the table of formats in `docs/drafters.md` from the registry of drafters; `--check` compares alone."""

from __future__ import annotations

import sys
from pathlib import Path

from hf_ddtree.drafter_kinds import DRAFTER_KINDS
from hf_ddtree.drafters.speculators.layout import UNSUPPORTED_TYPES

PAGE = Path(__file__).parents[1] / "docs" / "drafters.md"
BEGIN, END = "<!-- formats -->\n", "<!-- end of formats -->\n"
COLUMNS = ("kind", "format of", "recognised by", "what must be there", "trees", "compared in")


def table() -> str:
    """One row per format that is read, and one per known one that is refused."""
    rows = [COLUMNS, ("---",) * len(COLUMNS)]
    for kind in DRAFTER_KINDS:
        for publisher, recognised_by, needs, parity in kind.formats:
            rows.append((kind.name, publisher, recognised_by, needs, kind.tree, f"`{parity}`"))
    for name, reason in UNSUPPORTED_TYPES.items():
        rows.append((name, "speculators", f"`speculators_model_type` `{name}`", f"refused: {reason}", "", ""))
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def page_with(text: str) -> str:
    """The page with the table between its marks."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    if "--check" not in sys.argv:
        PAGE.write_text(page_with(text), encoding="utf-8")
    elif page_with(text) != text:
        sys.exit(f"{PAGE} is out of date: run `python scripts/drafter_table.py`.")


if __name__ == "__main__":
    main()
