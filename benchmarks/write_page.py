"""Writes the figures of the pages from the committed results, so that no figure is typed by hand.

    python benchmarks/write_page.py
    python benchmarks/write_page.py --check   # fails where a page says something else than the results

What stands between `<!-- figures: NAME -->` and `<!-- end of figures -->` in a page is what the function NAME of this
script makes of its file in `benchmarks/results`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = "README.md", "docs/benchmarks.md", "docs/compile.md", "docs/drafters.md", "docs/targets.md", "docs/trees.md"
BLOCK = re.compile(r"(?P<begin><!-- figures: (?P<name>\w+) -->\n).*?(?P<end><!-- end of figures -->)", re.DOTALL)
LABELS = {"plain": "plain `generate()`", "chain": 'chain (`"dflash"`)', "auto": '`"auto"`, warmed'}
LABELS |= {"auto, first use": '`"auto"`, first use'}
Block = Callable[[Any], Iterator[str]]


def rows(columns: Sequence[str], cells: Iterable[Sequence[Any]]) -> Iterator[str]:
    """The lines of a Markdown table."""
    for row in (columns, ["---"] * len(columns), *cells):
        yield f"| {' | '.join(map(str, row))} |"


def source(about: dict[str, Any]) -> Iterator[str]:
    """How the figures were made, and where."""
    yield from ("```sh", about["command"], "```", "", f"{machine_of(about)}.", "")


def machine_of(about: dict[str, Any]) -> str:
    machine = about["machine"]
    threads = "one thread" if machine["threads"] == 1 else f"{machine['threads']} threads"
    names = {"python": "Python", "torch": "PyTorch", "transformers": "Transformers", "bitsandbytes": "bitsandbytes"}
    versions = (f"{label} {machine[name]}" for name, label in names.items() if name in machine)
    return f"{machine['device']}, {threads}; {', '.join(versions)}"


def method_label(name: str) -> str:
    if name.startswith("tree:"):
        return f"tree of {name.removeprefix('tree:')} nodes"
    return LABELS.get(name, name)


def median(values: Sequence[float], digits: int = 2, unit: str = "") -> str:
    """The median of quartiles."""
    return f"{values[1]:.{digits}f}{unit}"


def spread(values: Sequence[float], digits: int = 2) -> str:
    """The outer ones of quartiles."""
    return f"{values[0]:.{digits}f} - {values[2]:.{digits}f}"


def share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}"


def overview(results: Any) -> Iterator[str]:
    """The shortest table of speed, of held-out code."""
    yield f"`{results['about']['command']}`, medians; {machine_of(results['about'])}:"
    yield ""
    methods = results["summary"]["code"]["methods"]
    columns = "", "tokens/s", "against plain", "tokens per forward of the target"
    names = "plain", "chain", "tree:16", "auto, first use", "auto"
    yield from rows(
        columns,
        (
            (
                method_label(name),
                median(methods[name]["tokens_per_second"], 1),
                median(methods[name]["against_plain"], unit="x"),
                f"{methods[name]['tokens_per_forward']:.2f}",
            )
            for name in names
        ),
    )


def auto_budget(results: Any) -> Iterator[str]:
    """Every workload: auto against the fastest fixed setting, and all methods."""
    yield from source(results["about"])
    columns = "workload", "fastest fixed setting", "`auto`, warmed, against it", "quartiles", "first use", "quartiles"
    yield from rows(
        (*columns, "warmed against plain"),
        (
            (
                name,
                method_label(entry["best_fixed"]),
                *(form(entry[f"{use}_against_best"]) for use in ("auto", "first_use") for form in (median, spread)),
                median(entry["methods"]["auto"]["against_plain"], unit="x"),
            )
            for name, entry in results["summary"].items()
        ),
    )
    columns = "method", "tokens/s", "quartiles", "against plain", "tokens per forward", "nodes", "ms a round"
    for name, entry in results["summary"].items():
        yield from ("", f"**{name[0].upper()}{name[1:]}**", "")
        yield from rows((*columns, "outside the forwards"), map(method_cells, entry["methods"].items()))


def method_cells(entry: tuple[str, dict[str, Any]]) -> list[str]:
    name, figures = entry
    times = figures["round_ms"]
    cells = [method_label(name), median(figures["tokens_per_second"], 1), spread(figures["tokens_per_second"], 1)]
    cells += [median(figures["against_plain"], unit="x"), f"{figures['tokens_per_forward']:.2f}"]
    cells += [f"{figures['nodes']:.1f}", f"{times['whole']:.2f}"]
    return [*cells, share(times["outside"], times["whole"])] if "outside" in times else cells


def context(results: Any) -> Iterator[str]:
    """Where a round's time goes at each length."""
    yield from source(results["about"])
    times = results["summary"]["times"]
    methods = {"tree": "the drafter's", "set accuracy": "of set accuracy"}
    parts = "whole", "target", "drafter", "head", "outside"
    columns = "context", "drafts", "plain: ms a token", "tree: ms a round", "target", "drafter", "its head", "outside"
    yield from rows(
        (*columns, "outside, share", "tokens per forward", "against plain", "a round in plain steps"),
        (
            (
                length,
                label,
                f"{of_length['plain']['round_ms']['whole']:.2f}",
                *(f"{of_length[method]['round_ms'][part]:.2f}" for part in parts),
                share(of_length[method]["round_ms"]["outside"], of_length[method]["round_ms"]["whole"]),
                f"{of_length[method]['tokens_per_forward']:.2f}",
                median(of_length[method]["against_plain"], unit="x"),
                f"{of_length[method]['round_ms']['whole'] / of_length['plain']['round_ms']['whole']:.2f}",
            )
            for length, of_length in times.items()
            for method, label in methods.items()
        ),
    )
    shortest, *_, longest = times
    outside = [times[length]["tree"]["round_ms"]["outside"] for length in (longest, shortest)]
    yield ""
    yield f"Outside of the forwards, {longest} tokens take {outside[0] / outside[1]:.2f} times as long as {shortest}."
    short, long = results["summary"]["texts"]
    ratios = [times[long][method]["against_plain"][1] / times[short][method]["against_plain"][1] for method in methods]
    yield f"Against plain decoding, a tree is {ratios[0]:.2f} times as fast at {long} tokens as at {short};"
    yield f"with drafts of set accuracy {ratios[1]:.2f} times."


def texts(results: Any) -> Iterator[str]:
    """Tokens per forward by context and by where the text is from."""
    by_context = results["summary"]["texts"]
    yield from rows(
        ("context", *(f"texts written after {origin}" for origin in by_context)),
        ((length, *(f"{tokens:.2f}" for tokens in of.values())) for length, of in by_context.items()),
    )


def compiled(results: Any) -> Iterator[str]:
    """Plain decoding and trees over dynamic, static and compiled static caches."""
    yield from source(results["about"])
    labels = {"plain": LABELS["plain"], "tree": f"tree of {results['about']['budget']} nodes"}
    columns = "method", "tokens/s", "quartiles", "against plain", "tokens per forward", "ms a round"
    yield from rows(
        (*columns, "first call, s", "graphs in it", "later"),
        (
            (
                labels[way] + (f", {cache}" if cache else ""),
                *(cell for place, cell in enumerate(method_cells((name, figures))) if place in (1, 2, 3, 4, 6)),
                f"{figures['first_call_seconds']:.1f}",
                figures["graphs"],
                figures["graphs_later"],
            )
            for name, figures in results["summary"].items()
            for way, _, cache in [name.partition(", ")]
        ),
    )


def cache(results: Any) -> Iterator[str]:
    """Memory of a cache, for each byte of its keys and values."""
    yield from rows(
        ("cache", "steady", "peak"),
        (
            (name, *(f"{entry[when] / entry['needed']:.4f}" for when in ("steady", "peak")))
            for name, entry in results["summary"]["memory"].items()
        ),
    )


def tree_operator(results: Any) -> Iterator[str]:
    """Time and memory of the operator and the loop."""
    yield from source(results["about"])
    columns = "layer", "nodes", "loop, ms", "quartiles", "operator, ms", "quartiles", "faster", "states", "factors"
    yield from rows(
        (*columns, "largest difference"),
        (
            (
                run["layer"],
                run["nodes"],
                *(form(run[f"{which}_ms"]) for which in ("loop", "operator") for form in (median, spread)),
                f"{run['times']:.1f}x",
                *(f"{run[f'{which}_bytes'] / 1e6:.2f} MB" for which in ("loop", "operator")),
                f"{run['error']:.0e}",
            )
            for run in results["runs"]
        ),
    )


def quantized(results: Any) -> Iterator[str]:
    """How far a target in few bits, or in half precision, is from itself, and how often outputs part."""
    about = results["about"]
    *lines, _ = source(about | {"machine": about["machine"] | {"bitsandbytes": about["bitsandbytes"]}})
    is_in_bfloat16 = about["avx512_bf16"] and not about["dequantize"]
    dtype = "bfloat16, by AVX512-BF16" if is_in_bfloat16 else "float32"
    yield from (
        *lines,
        f"{about['prompts']} prompts, {about['tokens']} tokens each; 4-bit weights multiplied in {dtype}.",
        "",
    )
    columns = "target", "identical", "near ties", "largest gap", "noise", "tree against plain"
    yield from rows(
        (*columns, "tokens per target forward"),
        (
            (
                name,
                f"{entry['identical']} of {entry['prompts']}",
                entry["near_ties"],
                "" if entry["largest_gap"] is None else f"{entry['largest_gap']:.2g}",
                *(f"{entry[measure]:.2g}" for measure in ("noise", "deviation")),
                f"{entry['tokens_per_forward']:.2f}",
            )
            for name, entry in results["summary"].items()
        ),
    )


def assisted(results: Any) -> Iterator[str]:
    """Transformers' chain, ours and trees, for each pair."""
    yield from source(results["about"])
    titles = {"oracle": "Qwen3, drafts for nothing", "native": "Muse Glimmer and its native DFlash drafter"}
    columns = "method", "tokens/s", "quartiles", "against plain", "tokens per forward", "ms a round"
    for pair, entry in results["summary"].items():
        compared = {name: (median(of), spread(of)) for name, of in entry["against_transformers"].items()}

        def cells(item: tuple[str, dict[str, Any]]) -> list[str]:
            figures = method_cells(item)
            return [*figures[:5], figures[6], *compared.get(item[0], ("", ""))]  # noqa: B023

        yield from (f"**{titles[pair]}**", "")
        yield from rows((*columns, "against Transformers' chain", "quartiles"), map(cells, entry["methods"].items()))
        yield ""


def tree_building(results: Any) -> Iterator[str]:
    """Milliseconds of building trees, and of calibration."""
    yield from source(results["about"])
    columns = (
        "trees",
        "nodes",
        "depths",
        "candidates",
        "deepest node",
        "candidates, ms",
        "calibration, ms",
        "build, ms",
    )
    yield from rows(
        (*columns, "quartiles", "mask, ms"),
        (
            (
                run["what"],
                *(run[name] for name in ("nodes", "depth", "top_k", "deepest")),
                *(median(run[name], 3) if name in run else "" for name in ("candidates", "calibration", "build")),
                spread(run["build"], 3),
                median(run["mask"], 3),
            )
            for run in results["runs"]
        ),
    )


def drafters(results: Any) -> Iterator[str]:
    """Each kind of drafter on each kind of text."""
    summary = results["summary"]
    texts = list(summary["plain"])
    columns = [column for text in texts for column in (f"{text}: tokens per forward", "speed")]

    def cells(of_text: dict[str, Any]) -> Iterator[str]:
        for text in texts:
            entry = of_text.get(text)
            yield "" if entry is None else f"{entry['tokens_per_forward']:.2f}"
            yield "" if entry is None else f"{entry['speedup'][1]:.2f}x"

    yield from rows(["drafter", *columns], ([name, *cells(of_text)] for name, of_text in summary.items()))


def tree_probabilities(results: Any) -> Iterator[str]:
    """Conditional trees against marginal ones, end to end."""
    yield from by_budget(results["tokens_per_forward"], "marginal", "conditional")


def demo_replay(results: Any) -> Iterator[str]:
    """The same without the target, and calibrated trees."""
    kinds = "marginal", "calibrated", "conditional", "marginal_spine", "conditional_spine"
    yield from by_budget(results, *kinds)


def by_budget(figures: dict[str, float], *kinds: str) -> Iterator[str]:
    """Tokens per forward of each kind of tree, each but the first one next to it."""
    budgets = [name.split("_")[1] for name in figures if name.startswith(f"{kinds[0]}_") and name.count("_") == 1]
    first = [figures[f"{kinds[0]}_{budget}"] for budget in budgets]

    def cells() -> Iterator[list[str]]:
        for name, label in (("chain", "chain"), ("selector_chain", "chain of the selector")):
            yield [label, f"{figures[name]:.2f}", *[""] * (len(budgets) - 1)]
        for kind in kinds:
            of_kind = [figures[f"{kind}_{budget}"] for budget in budgets]
            gains = ["" if kind == kinds[0] else f" ({of / base - 1:+.0%})" for of, base in zip(of_kind, first)]
            label, _, shape = kind.partition("_")
            yield [
                f"{label} tree{', spine first' if shape else ''}",
                *(f"{value:.2f}{gain}" for value, gain in zip(of_kind, gains)),
            ]

    yield from rows(["nodes", *budgets], cells())


BLOCKS: dict[str, tuple[str, Block]] = {
    "overview": ("auto_budget", overview),
    "cache": ("context", cache),
    "texts": ("context", texts),
    "tree_probabilities_9_minutes": ("tree_probabilities_9_minutes", tree_probabilities),
} | {
    block.__name__: (block.__name__, block)
    for block in (
        auto_budget,
        context,
        compiled,
        tree_operator,
        quantized,
        assisted,
        tree_building,
        drafters,
        tree_probabilities,
        demo_replay,
    )
}


def filled(page: str, results: Path) -> str:
    """The page with the figures of a folder of results.

    Raises:
        ValueError: If it asks for figures that there are none of.
    """

    def fill(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in BLOCKS:
            raise ValueError(f"The page asks for figures {name!r}, but there are {', '.join(BLOCKS)}.")
        file, block = BLOCKS[name]
        lines = "\n".join(block(json.loads((results / f"{file}.json").read_text(encoding="utf-8"))))
        return f"{match['begin']}{lines.rstrip()}\n{match['end']}"

    return BLOCK.sub(fill, page)


def main(
    check: Annotated[bool, typer.Option("--check", help="Write nothing, and fail if a page would change.")] = False,
) -> None:
    stale = []
    for name in PAGES:
        page = (ROOT / name).read_text(encoding="utf-8")
        written = filled(page, RESULTS)
        if page != written:
            stale.append(name)
            if not check:
                (ROOT / name).write_text(written, encoding="utf-8")
    if check and stale:
        raise SystemExit(f"Stale: {', '.join(stale)}. Run `python benchmarks/write_page.py`.")


if __name__ == "__main__":
    typer.run(main)
