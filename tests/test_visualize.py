"""The drawing of a tree: every node once, in its place, with the accepted path standing out."""

import io

import pytest
from rich.console import Console

from hf_ddtree.tree.draft_tree import DraftTree
from hf_ddtree.visualize import draw_tree


class Words:
    """Enough of a tokenizer to draw with."""

    def decode(self, token_ids):
        return {10: "root", 11: "[bold]", 12: "\n", 13: " leaf", 14: "own"}[token_ids[0]]


def tree():
    return DraftTree.from_parents([10, 11, 12, 13], [-1, 0, 0, 2], [0.0, -0.5, -1.0, -2.0])


def render(drawing, color=False):
    console = Console(file=io.StringIO(), force_terminal=color, color_system="standard" if color else None, width=80)
    console.print(drawing)
    return console.file.getvalue()


def test_draws_every_node_in_its_place():
    lines = render(draw_tree(tree(), Words())).splitlines()
    assert lines == [
        "'root'",
        "├── '[bold]'  60.7%",
        "└── '\\n'  36.8%",
        "    └── ' leaf'  13.5%",
    ]


def test_draws_ids_without_a_tokenizer():
    lines = render(draw_tree(tree())).splitlines()
    assert lines[0] == "10"
    assert lines[1] == "├── 11  60.7%"


def test_draws_what_the_target_picked_below_the_path():
    lines = render(draw_tree(tree(), Words(), accepted_path=[0, 1], next_token_id=14)).splitlines()
    assert lines[1:3] == ["├── '[bold]'  60.7% ✓", "│   └── 'own'  the target's pick"]


def test_the_accepted_path_stands_out():
    text = render(draw_tree(tree(), Words(), accepted_path=[0, 2]), color=True)
    green = "\x1b[1;32m"
    assert f"{green}'root'" in text
    assert f"{green}'\\n'" in text
    assert f"{green}' leaf'" not in text
    assert f"{green}'[bold]'" not in text


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"tree": [tree()]}, TypeError, r"`tree` must be a `DraftTree`, but is a `list`. .*trees\[round\]\[row\]"),
        ({"tokenizer": "gpt2"}, TypeError, "`tokenizer` must have `decode`, as tokenizers do, but is a `str`"),
        ({"accepted_path": [0, 4]}, ValueError, "`accepted_path` holds 4, but the tree has nodes 0 to 3"),
        ({"accepted_path": [[0, 1]]}, ValueError, r"`accepted_path` holds \[0, 1\], but"),
    ],
)
def test_wrong_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        draw_tree(**({"tree": tree(), "tokenizer": Words()} | arguments))


def test_a_root_alone():
    assert render(draw_tree(DraftTree.root_only(10), Words(), accepted_path=[0])).strip() == "'root'"


def test_draws_with_the_characters_that_the_terminal_has():
    output = io.BytesIO()
    console = Console(file=io.TextIOWrapper(output, encoding="ascii"), width=80)
    words = Words()
    words.decode = lambda token_ids: {10: "é", 11: "b", 12: "c", 13: "d"}[token_ids[0]]
    console.print(draw_tree(tree(), words, accepted_path=[0, 2]))
    console.file.flush()
    assert output.getvalue().decode().splitlines() == [
        r"'\xe9'",
        "+-- 'b'  60.7%",
        "`-- 'c'  36.8% *",
        "    `-- 'd'  13.5%",
    ]
