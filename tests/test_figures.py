"""The scripts that measure, at their smallest, and the pages that are written from what they find."""

from __future__ import annotations

import importlib
import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
# What z-lab's own loop still calls the cache.
pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")


def script(name: str) -> Any:
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of results: small ones of the scripts, and the committed ones of others."""
    folder = tmp_path_factory.mktemp("results")
    shutil.copytree(FOLDER / "results", folder, dirs_exist_ok=True)
    (folder / "auto_budget.json").unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["benchmarks/some.py", "--output", "elsewhere", "--prompts", "1"])
        patch.setattr(script("context"), "CACHED", 256)
        patch.setattr(script("context"), "LONG", 1024)
        patch.setattr(script("tree_operator"), "NODES", (8, 32))
        patch.setattr(script("auto_budget"), "SETTINGS", ("plain", "chain", "tree:4", "tree:16"))
        patch.setattr(script("tree_building").torch, "set_num_threads", lambda number: None)
        auto_budget = script("auto_budget").main
        for workload in ("random drafter", "code"):
            auto_budget(prompts=1, tokens=6, workloads=[workload], output=folder / "auto_budget.json")
        script("context").main(prompts=1, tokens=6, longest=1024, output=folder / "context.json")
        script("tree_operator").main(repeats=1, output=folder / "tree_operator.json")
        if importlib.util.find_spec("dflash") is not None:
            script("reference").main(prompts=1, tokens=24, output=folder / "reference.json")
        patch.setattr(script("long_context"), "CONTEXTS", (64,))
        patch.setattr(script("long_context"), "BUDGETS", (1, 6))
        patch.setattr(script("long_context"), "SIZES", script("long_context").SIZES | {"hidden_size": 64})
        script("long_context").main(repeats=1, output=folder / "long_context.json")
        script("tree_building").main(repeats=1, output=folder / "tree_building.json")
        script("assisted").main(prompts=1, tokens=16, accuracy=0.5, small=True, output=folder / "assisted.json")
        script("repetition").main(prompts=3, tokens=12, output=folder / "repetition.json")
    return folder


def load(results: Path, name: str) -> Any:
    return json.loads((results / f"{name}.json").read_text())


def test_every_run_is_kept_with_what_it_was(results: Path) -> None:
    names = "auto_budget", "context", "tree_operator", "long_context", "tree_building", "assisted", "repetition"
    for name in names:
        about = load(results, name)["about"]
        assert about["command"] == "python benchmarks/some.py --prompts 1"
        assert set(about["machine"]) >= {"device", "threads", "python", "torch", "transformers"}
    timed = "auto_budget", "context", "assisted", "repetition"
    runs = [run for name in timed for run in load(results, name)["runs"]]
    assert all(run["identical"] and run["seconds"] > 0 for run in runs)
    assert all(0 < run["round_ms"]["target"] < run["round_ms"]["whole"] for run in runs)


def test_methods_rotate_and_are_compared() -> None:
    measure, order = script("measure"), []

    def run(method: str, prompt: int) -> tuple[dict[str, Any], list[list[int]]]:
        order.append(method)
        sequences = {"plain": [[1, 2, 3]], "short": [[1, 2]], "wrong": [[1, 3, 3]], "long": [[1, 2, 3, 4]]}
        seconds = {"plain": 4.0, "short": 2.0, "wrong": 1.0, "long": 4.0}[method] * (prompt + 1)
        parts = {"whole": seconds, "outside": seconds / 4}
        return {"tokens": 8, "rows": 1, "rounds": 4, "seconds": seconds, "round_ms": parts}, sequences[method]

    runs = measure.alternate(["plain", "short", "wrong", "long"], [0, 1, 2], run, "test")
    assert order[:8] == ["plain", "short", "wrong", "long", "short", "wrong", "long", "plain"]
    assert {run["method"] for run in runs if not run["identical"]} == {"wrong", "long"}
    with pytest.raises(SystemExit, match="long, wrong"):
        measure.require_identical(runs)
    summary = measure.summarise(runs)
    assert summary["short"]["tokens_per_second"] == [1.6667, 2.0, 3.0]
    assert summary["short"]["against_plain"] == [2.0, 2.0, 2.0] == measure.against(runs, "wrong", "short")
    assert summary["wrong"]["identical"] == 0 and summary["wrong"]["tokens_per_forward"] == 2
    assert summary["plain"]["round_ms"] == {"whole": 8.0, "outside": 2.0}


def made_up_runs(seconds: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Runs of 100 tokens, a prompt for each number of seconds; standard decoding takes 100 rounds, others 20."""
    return [
        {
            "prompt": prompt,
            "method": method,
            "tokens": 100,
            "rows": 1,
            "rounds": 100 if method == "plain" else 20,
            "seconds": of_prompt,
            "round_ms": {"whole": 1.0, "target": 1.0, "outside": 0.0},
            "identical": True,
        }
        for method, of_method in seconds.items()
        for prompt, of_prompt in enumerate(of_method)
    ]


def test_speeds_of_all_prompts_follow_from_each_other() -> None:
    """Most prompts are faster by chain, and all together by tree, as the slowest prompt is."""
    seconds = {"plain": [4.0, 4.0, 4.0], "chain": [1.0, 1.0, 4.0], "tree:4": [1.25, 1.25, 1.5]}
    found = script("auto_budget").conclude(
        made_up_runs(seconds | {"auto": [1.0, 1.0, 2.0], "auto, first use": [2.0] * 3})
    )
    methods = found["methods"]
    assert methods["chain"]["together"] == {"tokens_per_second": 50.0, "against_plain": 2.0, "round_ms": 100.0}
    assert methods["tree:4"]["together"] == {"tokens_per_second": 75.0, "against_plain": 3.0, "round_ms": 66.667}
    assert methods["chain"]["against_plain"][1] > methods["tree:4"]["against_plain"][1]
    assert found["best_fixed"] == "tree:4" and found["auto_against_best"] == [1.0, 1.25, 1.25]
    assert script("write_page").compared(methods, "auto", "chain") == "1.50"
    for figures in methods.values():
        of_all = figures["together"]
        assert abs(1e3 * figures["tokens_per_forward"] / of_all["round_ms"] - of_all["tokens_per_second"]) < 0.01


def test_the_amount_of_prompts_and_tokens_is_told() -> None:
    amount, runs = script("write_page").amount, made_up_runs({"plain": [1.0, 1.0], "chain": [1.0, 1.0]})
    assert amount(runs) == "2 prompts, 101 tokens each"
    assert amount([run | {"rows": 4} for run in runs]) == "2 batches of 4 prompts, 26 tokens each"
    short = [run | {"tokens": 100 if run["method"] == "plain" else 40} for run in runs if run["prompt"] == 0]
    assert amount(short) == "1 prompt, 101 tokens each, 41 with fixed settings"


def test_a_workload_is_added_to_the_file(results: Path) -> None:
    found = load(results, "auto_budget")
    assert list(found["summary"]) == ["code", "random drafter"]
    for name in found["summary"]:
        runs = [run for run in found["runs"] if run["workload"] == name]
        assert [run["method"] for run in runs] == ["plain", "chain", "tree:4", "tree:16", "auto, first use", "auto"]
        assert {run["tokens"] for run in runs} == {5}


def test_prompts_are_grouped_by_how_repetitive_their_text_is(results: Path) -> None:
    repetition = script("repetition")
    shares = {0: 0.5, 1: 0.1, 2: 0.9, 3: 0.2, 4: 0.9, 5: 0.1}
    runs = [
        {"prompt": prompt, "method": method, "distinct": share}
        for prompt, share in shares.items()
        for method in repetition.METHODS
    ]
    prompts = {name: sorted({run["prompt"] for run in of}) for name, of in repetition.group(runs).items()}
    assert prompts == {"repetitive": [1, 5], "in between": [0, 3], "varied": [2, 4]}
    found = load(results, "repetition")
    assert list(found["summary"]) == list(prompts) and len(found["runs"]) == 3 * len(repetition.METHODS)
    assert all(0 < run["distinct"] <= 1 for run in found["runs"])


def test_equal_drafters_are_right_equally_often(results: Path) -> None:
    for entry in load(results, "assisted")["summary"].values():
        tokens = {method: figures["tokens_per_forward"] for method, figures in entry["methods"].items()}
        assert tokens["chain"] == tokens["Transformers' chain"] > 1
        assert tokens[f"tree of {max(script('assisted').NODES)}"] > tokens["chain"]


def test_a_set_accuracy_and_a_text_do_not_depend_on_the_context(results: Path) -> None:
    found = load(results, "context")
    assert list(found["summary"]["times"]) == list(found["summary"]["texts"]) == ["256", "1024"]
    lengths = {}
    for run in found["runs"]:
        lengths.setdefault(run["method"], []).append(run.get("accepted_lengths"))
    assert lengths["set accuracy"][0] == lengths["set accuracy"][1] and max(lengths["set accuracy"][0]) > 2
    for context, of_context in found["summary"]["times"].items():
        assert found["summary"]["texts"][context][context] == of_context["tree"]["tokens_per_forward"]


def test_a_dictated_text_is_written() -> None:
    context = script("context")
    dictation = context.Dictation(context.torch.tensor([3, 1]), 2)
    for written, token in (([5, 6], 3), ([5, 6, 3], 1)):
        scores = dictation(context.torch.tensor([written]), context.torch.zeros(1, 7))
        assert scores.argmax() == token and scores.isinf().sum() == 6


def test_the_operator_keeps_less_than_the_loop(results: Path) -> None:
    for run in load(results, "tree_operator")["runs"]:
        assert run["error"] < 1e-5
        # In float32: a state has d_k * d_v numbers per node and head, the factors d_v + 1, and d_k per head of keys.
        size = script("tree_operator").SIZES[run["layer"]]
        num_nodes = run["loop_bytes"] / (4 * size.heads * size.key_dim * size.value_dim)
        kept = size.heads * (size.value_dim + 1) + size.key_heads * size.key_dim
        assert run["operator_bytes"] == 4 * num_nodes * kept
        assert run["loop_bytes"] > 10 * run["operator_bytes"]


def test_memory_is_counted_by_storage() -> None:
    context = script("context")
    with context.StorageCounter() as counter:
        kept = [context.torch.zeros(1000, dtype=context.torch.float32) for _ in range(3)]
        view = kept[0][:10] + 1
        del kept[1:]
    assert counter.peak == 3 * 4000 + 40 and counter.steady() == 4000 + 40
    assert len(view) == 10


PAGE = "Before.\n<!-- figures: overview -->\nold\n<!-- end of figures -->\nAfter {1}.\n"


def test_figures_are_those_of_the_file(results: Path) -> None:
    write_page = script("write_page")
    page = write_page.filled(PAGE, results)
    methods = load(results, "auto_budget")["summary"]["code"]["methods"]
    for name, label in (("chain", 'chain (`"dflash"`)'), ("tree:16", "tree of 16 nodes")):
        speed, ratio = (methods[name]["together"][key] for key in ("tokens_per_second", "against_plain"))
        low, _, high = methods[name]["against_plain"]
        tokens = methods[name]["tokens_per_forward"]
        assert f"| {label} | {speed:.1f} | {ratio:.2f}x | {low:.2f} - {high:.2f} | {tokens:.2f} |\n" in page
    assert "1 prompt, 6 tokens each" in page
    assert page.startswith("Before.\n<!-- figures: overview -->\n`python benchmarks/some.py --prompts 1`")
    assert page.endswith("|\n<!-- end of figures -->\nAfter {1}.\n") and "old" not in page
    assert write_page.filled(page, results) == page


@pytest.mark.parametrize("name", sorted(script("write_page").BLOCKS))
def test_tables_are_whole(results: Path, name: str) -> None:
    write_page = script("write_page")
    page = write_page.filled(PAGE.replace("overview", name), results)
    tables = [block.splitlines() for block in page.split("\n\n") if "| --- |" in block]
    assert tables
    for table in tables:
        columns = {line.count("|") for line in table if line.startswith("|")}
        assert len(columns) == 1
    assert f"<!-- figures: {name} -->" in page and "nan" not in page


def test_a_page_that_asks_for_unknown_figures_is_refused(results: Path) -> None:
    with pytest.raises(ValueError, match="'speed', but there are overview"):
        script("write_page").filled(PAGE.replace("overview", "speed"), results)


def test_check_finds_a_stale_page(results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_page = script("write_page")
    monkeypatch.setattr(write_page, "ROOT", tmp_path)
    monkeypatch.setattr(write_page, "PAGES", ("page.md",))
    monkeypatch.setattr(write_page, "RESULTS", results)
    (tmp_path / "page.md").write_text(PAGE)
    with pytest.raises(SystemExit, match=r"page\.md"):
        write_page.main(check=True)
    assert (tmp_path / "page.md").read_text() == PAGE
    write_page.main(check=False)
    write_page.main(check=True)
    assert "old" not in (tmp_path / "page.md").read_text()
