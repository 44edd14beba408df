"""Benchmarks: what is run, what is compared, what is kept, and what the figures say."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.families import make_model
from helpers.native_pair import make_native_drafter, make_native_target
from rich.console import Console
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from typer.testing import CliRunner

import hf_ddtree
from hf_ddtree.benchmark import Method, Report, benchmark, compare, load_prompts, make_methods, sign_test
from hf_ddtree.cli import app
from hf_ddtree.cli.bench import _labels
from hf_ddtree.demo import demo_folders, demo_prompts

PROMPTS = [entry["prompt"] for entry in demo_prompts()[:3]]
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def demo() -> tuple[Any, Any, Any]:
    return hf_ddtree.load_demo()


def methods_of(demo: tuple[Any, Any, Any], *names: str) -> list[Method]:
    return make_methods(names, {"shipped": demo[1]})


def measure(demo: tuple[Any, Any, Any], methods: list[Method], **settings: Any) -> Report:
    return benchmark(demo[0], demo[2], PROMPTS, methods, **{"max_new_tokens": NEW_TOKENS, **settings})


def test_every_method_runs_on_every_batch_and_is_compared(demo: tuple[Any, Any, Any]) -> None:
    counts = []
    report = measure(
        demo,
        methods_of(demo, "chain", "tree:4", "spine:4", "auto"),
        temperatures=(0.0, 0.7),
        batch_size=2,
        on_run=lambda done, total: counts.append((done, total)),
    )
    names = ["plain", "chain", "tree:4", "spine:4", "auto"]
    sampled = report.summaries()[len(names) :]
    # The last batch has a single row.
    assert all(entry.identical == entry.compared == 1 < entry.runs for entry in sampled)
    assert "not compared: several rows that sample make a seed's" in str(report.table().caption)
    assert counts == [(done, 20) for done in range(21)]
    assert {(run["temperature"], run["batch"], run["method"]) for run in report.runs} == {
        (temperature, batch, name) for temperature in (0.0, 0.7) for batch in (0, 1) for name in names
    }
    greedy = report.summaries()[: len(names)]
    assert [entry.method for entry in greedy] == names
    assert all(entry.identical == entry.compared == entry.runs == 2 and not entry.differs for entry in greedy)
    assert greedy[0].speedup is None and all(entry.speedup is not None for entry in greedy[1:])
    assert all(sum(entry.accepted_lengths.values()) > 0 for entry in greedy[1:])
    tree = [run for run in report.runs if run["method"] == "tree:4" and run["temperature"] == 0]
    assert max(size for run in tree for size in run["tree_sizes"]) == 4
    assert sum(run["tokens"] for run in tree) <= len(PROMPTS) * NEW_TOKENS
    assert report.table().row_count == 2 * len(names)


def test_other_draws_are_not_compared(demo: tuple[Any, Any, Any]) -> None:
    report = measure(demo, [Method("plain"), Method("other", {"top_k": 1})], max_new_tokens=2, temperatures=(0.7,))
    assert [entry.compared for entry in report.summaries()] == [3, 0]


class WrongTokens:
    """A decoding method that changes the last token."""

    def __call__(self, model: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        out = model.generate(input_ids, max_new_tokens=NEW_TOKENS, do_sample=False, return_dict_in_generate=True)
        out.sequences[0, -1] += 1
        return out


WRONG = {"custom_generate": WrongTokens()}


def test_a_wrong_token_is_noticed(demo: tuple[Any, Any, Any]) -> None:
    report = measure(demo, [Method("plain"), Method("wrong", WRONG)])
    assert [entry.identical for entry in report.summaries()] == [3, 0]
    assert [entry.differs for entry in report.summaries()] == [False, True]


def test_the_command_names_the_temperature_of_a_wrong_token(demo: tuple[Any, Any, Any], monkeypatch: Any) -> None:
    monkeypatch.setattr("hf_ddtree.benchmark.make_methods", lambda *_: [Method("plain"), Method("wrong", WRONG)])
    arguments = ["bench", "--limit", "1", "--max-new-tokens", str(NEW_TOKENS), "--temperature", "0.5"]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 1 and "Not identical to standard decoding: wrong @ 0.5." in result.output
    result = CliRunner().invoke(app, [*arguments, "--limit", "2", "--batch-size", "2"], env={"COLUMNS": "200"})
    assert result.exit_code == 0 and "Not identical" not in result.output


def test_the_table_fits_into_80_columns(demo: tuple[Any, Any, Any]) -> None:
    report = measure(demo, methods_of(demo, "tree:4"), temperatures=(0.7,))
    console = Console(width=200, file=StringIO())
    console.print(report.table())
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert re.match(r"tree:4 @ 0.7 +3/3 +[\d.]+ +\d\.\d\d +\d/3 +[\d.]+ +[\d.]+ +[\d.]+", lines[5]), lines


def test_plain_decoding_is_plain_whatever_the_model_is_configured_for(demo: tuple[Any, Any, Any]) -> None:
    model = copy.copy(demo[0])
    model.generation_config = GenerationConfig(generation_strategy="ddtree", tree_budget=4)
    report = benchmark(model, demo[2], PROMPTS, methods_of(demo, "tree:4"), max_new_tokens=NEW_TOKENS)
    assert [entry.refused for entry in report.summaries()] == [None, None]
    assert all("accepted_lengths" not in run for run in report.runs if run["method"] == "plain")


def test_without_plain_decoding_there_are_no_figures(demo: tuple[Any, Any, Any]) -> None:
    lookup = methods_of(demo, "lookup")[1]
    methods = [Method("plain", {"num_beams": 2, **lookup.arguments}), *methods_of(demo, "tree:4")[1:]]
    report = measure(demo, methods)
    assert [bool(entry.refused) for entry in report.summaries()] == [True, True]
    assert "None" not in str(report.table().caption) and "`num_beams` is 2" in str(report.table().caption)


def test_a_refusal_is_reported_with_its_reason(demo: tuple[Any, Any, Any]) -> None:
    methods = [Method("plain"), Method("beams", {"generation_strategy": "ddtree", "assistant_model": demo[1]})]
    report = measure(demo, methods, num_beams=2)
    plain, beams = report.summaries()
    assert plain.refused is None and "`num_beams` is 2" in beams.refused and beams.tokens_per_second is None


def test_it_goes_on_where_it_was_stopped(demo: tuple[Any, Any, Any], tmp_path: Path) -> None:
    class Stopped(Exception):
        pass

    def stop_at(done: int, total: int) -> None:
        if done == 3:
            raise Stopped

    methods = methods_of(demo, "tree:4")
    with pytest.raises(Stopped):
        measure(demo, methods, output_dir=tmp_path, on_run=stop_at)
    before = (tmp_path / "runs-0.jsonl").read_text()
    written = [json.loads(line) for line in before.splitlines()]
    # Of the second batch, the run that standard decoding's is still to be compared with.
    assert [(run["batch"], run["method"]) for run in written] == [(0, "plain"), (0, "tree:4"), (1, "tree:4")]
    assert not (tmp_path / "report.json").exists()
    (tmp_path / "runs-0.jsonl").write_text(before + '{"temperature": 0.0, "bat')
    counts: list[tuple[int, int]] = []
    report = measure(demo, methods, output_dir=tmp_path, on_run=lambda *count: counts.append(count))
    assert counts == [(3, 6), (4, 6), (5, 6), (6, 6)] and len(report.runs) == 6
    assert all(run["identical"] is True for run in report.runs)
    after = (tmp_path / "runs-0.jsonl").read_text()
    assert after.startswith(before) and len([json.loads(line) for line in after.splitlines()]) == 6
    assert Report.load(tmp_path / "report.json").runs == report.runs
    wrong = written[-1] | {"tokens_of_rows": [[0] * NEW_TOKENS]}
    with (tmp_path / "runs-0.jsonl").open("a") as file:
        file.write(json.dumps(wrong))
    report = measure(demo, methods, output_dir=tmp_path)
    assert [run["batch"] for run in report.runs if run["identical"] is False] == [1]
    with pytest.raises(ValueError, match="other settings \\(`max_new_tokens`\\)"):
        measure(demo, methods, output_dir=tmp_path, max_new_tokens=NEW_TOKENS + 1)
    drafter = copy.copy(demo[1])
    drafter.config = copy.copy(drafter.config)
    drafter.config.name_or_path = "another"
    with pytest.raises(ValueError, match="other settings \\(`drafters`\\)"):
        measure(demo, make_methods(["tree:4"], {"shipped": drafter}), output_dir=tmp_path)
    with pytest.raises(ValueError, match="other settings \\(`prompts`\\)"):
        benchmark(demo[0], demo[2], ["a", "b", "c"], methods, max_new_tokens=NEW_TOKENS, output_dir=tmp_path)


def test_the_command_tells_what_it_measured(tmp_path: Path) -> None:
    arguments = ["--limit", "2", "--max-new-tokens", "2", "--method", "tree:2", "--dtype", "bfloat16"]
    command = ["bench", *arguments, "--batch-size", "2", "--output", str(tmp_path)]
    first, again = (CliRunner().invoke(app, command, env={"COLUMNS": "80"}) for _ in range(2))
    assert first.exit_code == 0, first.output
    machine = Report.load(tmp_path / "report.json").about["machine"]
    for expected in (
        "demo_pair/target in bfloat16; drafter demo_pair/drafter; ",
        f"; {machine['device']}, {machine['threads']} thread",
        "; 2 prompts, 2 at a time; 2 new tokens\n",
        f"\nResults in {tmp_path}\n",
    ):
        assert expected in first.stdout.replace(" \n", " ").replace("\n2", "2")
    assert max(len(line) for line in first.stdout.splitlines() if str(tmp_path) not in line) <= 80
    assert again.stderr == f"All 2 runs are in {tmp_path} already.\n"
    assert first.stderr.splitlines() == ["0 of 2 runs", "2 of 2 runs"]
    assert again.stdout == first.stdout


def test_the_command_says_that_nothing_is_drawn_without_matplotlib(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("hf_ddtree.cli.bench.find_spec", lambda name: None)
    arguments = ["--limit", "1", "--max-new-tokens", "2", "--method", "tree:2", "--output", str(tmp_path)]
    result = CliRunner().invoke(app, ["bench", *arguments], env={"COLUMNS": "80"})
    message = "No report.png is drawn, as matplotlib is not installed: pip install 'hf-ddtree[plots]'"
    assert message in " ".join(result.stderr.split())
    assert not (tmp_path / "report.png").exists()


@pytest.mark.parametrize("keeps", [True, False])
def test_the_command_says_how_to_go_on(keeps: bool, tmp_path: Path, monkeypatch: Any) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_ddtree.benchmark.benchmark", interrupt)
    arguments = ["bench", *(["--output", str(tmp_path)] if keeps else [])]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 130
    expected = f"The same command goes on with what is in {tmp_path}." if keeps else "with `--output FOLDER` the same"
    assert expected in " ".join(result.output.split())


def test_processes_share_the_batches(tmp_path: Path) -> None:
    """Two processes, as `torchrun` starts them; the last one to end reports on all."""
    command = [
        sys.executable,
        "-c",
        "from hf_ddtree.cli import app; app()",
        "bench",
        "--limit",
        "4",
        "--max-new-tokens",
        "4",
    ]
    for rank in range(2):
        environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "PYTHONPATH": os.pathsep.join(sys.path)}
        arguments = ["--method", "tree:2", "--output", str(tmp_path)]
        run = subprocess.run([*command, *arguments], env=environment, check=True, capture_output=True, text=True)
        assert ("tree:2" in run.stdout) == (rank == 1)
    by_rank = [
        {json.loads(line)["batch"] for line in (tmp_path / f"runs-{rank}.jsonl").read_text().splitlines()}
        for rank in range(2)
    ]
    assert by_rank == [{0, 2}, {1, 3}]
    assert len(Report.load(tmp_path / "report.json").runs) == 8


def report_of(seconds: dict[str, list[float]]) -> Report:
    runs = [
        {"temperature": 0.0, "batch": batch, "method": name, "seconds": value, "tokens": 100, "identical": True}
        for name, values in seconds.items()
        for batch, value in enumerate(values)
    ]
    return Report({"settings": {"methods": list(seconds)}, "machine": {}}, runs)


def test_figures_are_medians_of_pairs() -> None:
    report = report_of({"plain": [1.0, 2.0, 4.0, 8.0, 10.0], "fast": [0.5, 1.0, 1.0, 4.0, 20.0]})
    plain, fast = report.summaries()
    assert plain.tokens_per_second == (12.5, 25.0, 50.0)
    assert fast.speedup == (2.0, 2.0, 2.0) and fast.faster == 4
    assert fast.p_value == pytest.approx(2 * (1 + 5) / 32)


def test_what_a_round_is_made_of(tmp_path: Path) -> None:
    stages = {"draft": 0.02, "verify": 0.1}
    lengths = [1] * 8 + [2] * 4 + [4] + [16, 40]
    rounds = {"accepted_lengths": lengths, "target_forwards": 11, "stage_seconds": stages, "peak_memory": 3 * 2**20}
    report = report_of({"plain": [1.0], "tree:8": [0.5]})
    report.runs[1] |= rounds
    table = report.rounds_table()
    cells = [list(map(str, column.cells)) for column in table.columns]
    assert cells == [["tree:8"], ["2.00"], ["10.00"], ["█▄ ▁           ▂"], ["3"]]
    report.save(tmp_path / "report.json")
    plain, tree = json.loads((tmp_path / "report.json").read_text())["summary"]
    assert plain["tokens_per_second"] == [100.0] * 3 and tree["round_ms"] == {"draft": 2.0, "verify": 10.0}
    assert tree["accepted_lengths"] == {"1": 8, "2": 4, "4": 1, "16": 1, "40": 1}


def test_sign_test() -> None:
    assert sign_test(0, 0) == 1.0 and sign_test(5, 5) == 1.0
    assert sign_test(10, 0) == sign_test(0, 10) == 2 / 2**10


def test_compare(tmp_path: Path) -> None:
    report_of({"plain": [1.0] * 3, "tree:8": [0.5] * 3}).save(tmp_path / "a.json")
    report_of({"plain": [1.0] * 3, "tree:8": [0.4] * 3, "new": [0.1] * 3}).save(tmp_path / "b.json")
    table = compare(Report.load(tmp_path / "a.json"), Report.load(tmp_path / "b.json"))
    assert list(table.columns[0].cells) == ["plain", "tree:8"] and [str(cell) for cell in table.columns[3].cells] == [
        "+0.0%",
        "+25.0%",
    ]
    assert list(table.columns[4].cells) == ["0/3", "3/3"] and list(table.columns[5].cells) == ["1", "0.2"]
    assert str(table.caption) == "new is only in the report after."
    back = compare(Report.load(tmp_path / "b.json"), Report.load(tmp_path / "a.json"))
    assert str(back.caption) == "new is only in the report before."
    paths = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    assert "+25.0%" in CliRunner().invoke(app, ["bench", "--compare", *paths]).output
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        shutil.copy(tmp_path / f"{name}.json", tmp_path / name / "report.json")
    folders = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert "+25.0%" in CliRunner().invoke(app, ["bench", "--compare", *folders]).output
    assert "There is no report" in said("bench", "--compare", paths[0], str(tmp_path / "missing"))
    (tmp_path / "b" / "report.json").rename(tmp_path / "b" / "runs-0.jsonl")
    assert "The benchmark is not finished: its command goes on" in said("bench", "--compare", *folders)
    (tmp_path / "c.json").write_text("{}")
    refused = CliRunner().invoke(app, ["bench", "--compare", paths[0], str(tmp_path / "c.json")])
    assert refused.exit_code == 2 and "of a benchmark" in " ".join(refused.output.split())


def test_changes_are_of_the_same_prompts() -> None:
    """What is slow on every prompt is told from noise, however much the prompts themselves differ."""
    seconds = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    before, after = report_of({"plain": seconds}), report_of({"plain": [1.25 * value for value in seconds[:-1]]})
    after.runs[0]["seconds"] = 1.6
    table = compare(before, after)
    assert str(list(table.columns[3].cells)[0]) == "-20.0%"
    assert list(table.columns[4].cells) == ["0/5"] and list(table.columns[5].cells) == ["0.06"]
    for run, value in zip(after.runs, (1.6, 1.0, 4.0, 10.0, 20.0)):
        run["seconds"] = value
    table = compare(before, after)
    assert str(list(table.columns[3].cells)[0]) == "-20.0%\n-20.0% .. +0.0%"
    assert list(table.columns[4].cells) == ["1/5"]
    console = Console(width=200, file=StringIO())
    console.print(table)
    assert max(map(len, console.file.getvalue().splitlines())) <= 80


def test_compare_tells_what_differs() -> None:
    before, after = report_of({"plain": [1.0]}), report_of({"plain": [2.0]})
    before.about["machine"] |= {"torch": "2.6", "threads": 1}
    after.about["machine"] |= {"torch": "2.7", "threads": 1}
    before.about["settings"] |= {"model": "x", "batch_size": 1}
    after.about["settings"] |= {"model": "y"}
    assert str(compare(before, after).caption).splitlines() == [
        "model is 'x' before, 'y' after",
        "torch is '2.6' before, '2.7' after",
    ]
    after.about["settings"] |= {"batch_size": 4}
    with pytest.raises(ValueError, match="not of the same work .batch_size is 1 before, 4 after"):
        compare(before, after)


def test_plot(demo: tuple[Any, Any, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    measure(demo, methods_of(demo, "tree:4")).plot(tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_prompts_from_files(tmp_path: Path) -> None:
    lines = [{"prompt": "a"}, {"question": "b"}, {"turns": ["c", "d"]}, {"text": "e\u2028", "other": 1}]
    texts = [json.dumps(line, ensure_ascii=False) for line in lines]
    (tmp_path / "p.jsonl").write_text("\ufeff" + "\r\n".join(texts) + "\n\n", encoding="utf-8")
    (tmp_path / "p.txt").write_text("one\n\ntwo\n")
    assert load_prompts(str(tmp_path / "p.jsonl")) == ["a", "b", "c", "e\u2028"]
    assert load_prompts(str(tmp_path / "p.txt"), 1) == ["one"]
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(ValueError, match="holds no prompts"):
        load_prompts(str(tmp_path / "empty.txt"), 9)
    with pytest.raises(ValueError, match="no file. Give a JSONL or text file, or one of gsm8k"):
        load_prompts("gsm9k", 9)


WRONG_LINES = {
    '{"prompt": ""}': "'prompt' is empty.",
    '{"turns": [" "]}': "'turns' is empty.",
    '{"turns": []}': "'turns' must be a text, or a list that begins with one, but is [].",
    '{"text": null}': "'text' must be a text, or a list that begins with one, but is None.",
    '{"answer": 1}': "the object has none of 'prompt', 'text', 'question', 'turns', but 'answer'.",
    "{}": "the object has none of 'prompt', 'text', 'question', 'turns', but nothing.",
    "[1]": "[1] is no object with one of 'prompt', 'text', 'question', 'turns'.",
    '{"prompt"': "no JSON (Expecting ':' delimiter at column 10).",
    '{"prompt": "\udcff"}': "no UTF-8 (byte 0xff at place 13).",
}


@pytest.mark.parametrize("line", WRONG_LINES)
def test_wrong_lines_are_named_before_anything_is_loaded(line: str, tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(f'{{"prompt": "a"}}\n\n{line}\n{{"prompt": "b"}}'.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError) as raised:
        load_prompts(str(path))
    assert str(raised.value) == f"{path}, line 3: {WRONG_LINES[line]}"
    assert load_prompts(str(path), 1) == ["a"]
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", None)
    assert "line 3: " in said("bench", "--prompts", str(path))


def test_of_many_wrong_lines_some_are_shown(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text("{}\n" * 8)
    with pytest.raises(ValueError, match="line 5: .*\nand 3 more lines.$"):
        load_prompts(str(tmp_path / "p.jsonl"))


def test_empty_prompts_are_refused(demo: tuple[Any, Any, Any]) -> None:
    for prompts, reason in (([], "`prompts` is empty"), (["a", " "], r"empty texts at \[1\]")):
        with pytest.raises(ValueError, match=reason):
            benchmark(demo[0], demo[2], prompts, methods_of(demo))


@pytest.mark.parametrize("name", ["tree", "tree:0", "spine:x", "lookup+tree:-1"])
def test_nodes_are_at_least_one(name: str) -> None:
    kind = name.partition(":")[0].removeprefix("lookup+")
    with pytest.raises(ValueError, match=f"its NODES must be an integer of at least 1, as in '{kind}:16'"):
        make_methods([name], {"drafter": object()})


@pytest.mark.parametrize("name", ["fast", "lookup+fast", "auto:3"])
def test_unknown_methods_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="`methods` has .* must hold names from: plain"):
        make_methods([name], {"drafter": object()})


def test_assisted_decoding_is_named_only_where_it_sampled() -> None:
    report = report_of({"plain": [1.0], "assisted": [1.0]})
    assert report.table().caption is None
    for rows, reason in ((1, "assisted decoding"), (2, "several rows that sample")):
        for run in report.runs:
            run |= {"temperature": 0.5, "rows": rows, "identical": None}
        assert f"not compared: {reason} make" in str(report.table().caption)


def said(*arguments: str) -> str:
    """What the command says of wrong arguments, on a line."""
    result = CliRunner().invoke(app, [*arguments], env={"COLUMNS": "100"})
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), result.output
    return " ".join(result.output.replace("│", "").split())


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--dtype", "flot"], "for '--dtype': 'flot' is none of auto, float32, bfloat16"),
        (
            ["--device-map", "gpu"],
            "for '--device-map': 'gpu' is neither auto, balanced, balanced_low_0, sequential nor",
        ),
        (["--device-map", "cuda:99"], "for '--device-map': 'cuda:99' is neither"),
        (["--method", "fast"], "`--method` has 'fast'"),
        (["--method", "tree:0"], "`--method` has 'tree:0', but its NODES must be"),
        (["--prompts", "gsm9k"], "`--prompts` is 'gsm9k'"),
        (["/no/such/folder"], "for TARGET: The target '/no/such/folder' does not exist."),
        (["./such"], "for TARGET: The target './such' does not exist."),
        ([demo_folders()[1]], "is a drafter. Name its target first"),
        ([demo_folders()[0], "--method", "auto"], "`--method` has 'auto', which needs a drafter, but `--drafter` is"),
        (["--json", "--compare", "a", "b"], "`--json` is for measurements"),
        (["--drafter", "a/b/c"], "for --drafter: The drafter 'a/b/c' does not exist."),
        (
            ["--drafter", "no/such"],
            "The drafter 'no/such' is no folder, nor a repository that could be had from the Hub",
        ),
        (["--output", __file__], "for '--output'"),
    ],
)
def test_the_command_names_the_options_that_are_wrong(arguments: list[str], expected: str, monkeypatch: Any) -> None:
    def offline(name: str) -> None:
        raise OSError(f"{name} cannot be reached")

    if "no/such" in arguments:
        look_up = PreTrainedConfig.get_config_dict
        monkeypatch.setattr(
            PreTrainedConfig, "get_config_dict", lambda name: offline(name) if name == "no/such" else look_up(name)
        )
    assert expected in said("bench", *arguments)


def test_a_folder_without_a_configuration_or_of_other_settings(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text("{}")
    assert "has no config.json" in said("bench", str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    assert "config.json that cannot be read" in said("bench", str(tmp_path))
    assert "`--output` is" in (of_others := said("bench", "--limit", "1", "--output", str(tmp_path)))
    assert "`--drafter`" in of_others and "`--max-new-tokens`" in of_others


def test_methods_whose_draws_are_those_of_plain_decoding(demo: tuple[Any, Any, Any]) -> None:
    methods = [*methods_of(demo, "chain", "auto", "lookup"), Method("assisted", {"assistant_model": demo[0]})]
    assert [method.keeps_draws for method in methods] == [True, True, True, True, False]


def test_assisted_decoding_with_a_drafter_of_transformers_own_class() -> None:
    target, drafter = make_native_target(), make_native_drafter()
    method = make_methods(["assisted"], {"native": drafter})[1]
    ids = torch.arange(2, 12)[None]
    plain, assisted = (
        target.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, **arguments)
        for arguments in ({}, method.arguments)
    )
    assert torch.equal(plain, assisted)


def test_drafters_with_one_last_name_are_told_apart(tmp_path: Path) -> None:
    for parent in "ab":
        shutil.copytree(demo_folders()[1], tmp_path / parent / "drafter")
    drafters = [part for parent in "ab" for part in ("--drafter", str(tmp_path / parent / "drafter"))]
    arguments = ["bench", *drafters, "--limit", "1", "--max-new-tokens", "2", "--method", "tree:2"]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert all(f"tree:2 {name}/drafter" in result.output for name in ("demo_pair", "a", "b"))


@pytest.mark.parametrize(
    "names, labels",
    [
        (["z-lab/x"], ["x"]),
        (["z-lab/x", "mtp"], ["x", "mtp"]),
        (["a/x", "b/x", "y"], ["a/x", "b/x", "y"]),
        (["x", "a/b/x", "/a/b/x"], ["x", "a/b/x", "//a/b/x"]),
        (["a/x/", "a/x"], ["x"]),
    ],
)
def test_labels_of_drafters(names: list[str], labels: list[str]) -> None:
    assert list(_labels(names)) == labels


def test_methods_that_draft_need_a_drafter(demo: tuple[Any, Any, Any]) -> None:
    with pytest.raises(ValueError, match="'auto', which needs a drafter, but `drafters` is empty"):
        make_methods(["auto"], {})
    with pytest.raises(ValueError, match="Transformers' own assisted decoding, which cannot draft with a `DFlash"):
        make_methods(["assisted"], {"drafter": demo[1]})
    names = [method.name for method in make_methods(["lookup", "auto"], {"a": demo[1], "b": demo[1]})]
    assert names == ["plain", "lookup", "auto a", "auto b"]


def test_a_folder_alone_is_measured_with_lookup_on_the_prompts_that_ship(tmp_path: Path) -> None:
    """A chat model without a drafter, and without a token to pad with."""
    folder = tmp_path / "target"
    make_model("llama", "sdpa", vocab_size=512).save_pretrained(folder)
    tokenizer = hf_ddtree.load_demo()[2]
    tokenizer.pad_token = None
    tokenizer.chat_template = "{% for message in messages %}<{{ message['content'] }}>{% endfor %}"
    tokenizer.save_pretrained(folder)
    command = ["bench", str(folder), "--limit", "2", "--batch-size", "2", "--max-new-tokens", "6", "--json"]
    result = CliRunner().invoke(app, [*command, "--dtype", "float32"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["about"]["settings"]["methods"] == ["plain", "lookup", "assisted:lookup"]
    assert report["about"]["settings"]["prompts"] == 2 and report["about"]["settings"]["drafters"] == []
    plain, lookup, assisted = report["summary"]
    assert lookup["identical"] == lookup["compared"] == 1
    assert "batch_size = 1" in assisted["refused"]
    result = CliRunner().invoke(app, [*command, "--dtype", "float32", "--batch-size", "1"])
    assert [entry["identical"] for entry in json.loads(result.stdout)["summary"]] == [2, 2, 2]


def test_without_a_terminal_there_are_lines_in_place_of_a_bar(tmp_path: Path) -> None:
    arguments = ["--limit", "1", "--max-new-tokens", "2", "--method", "tree:2", "--output", str(tmp_path), "--json"]
    result = CliRunner().invoke(app, ["bench", *arguments], env={"COLUMNS": "80"})
    assert json.loads(result.stdout) == json.loads((tmp_path / "report.json").read_text())
    assert result.stderr.splitlines() == ["0 of 2 runs", "2 of 2 runs"]
