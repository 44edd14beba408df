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
from auto_budget import conclude
from measure import against, summarise
from repetition import group

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = "README.md", "docs/benchmarks.md", "docs/compile.md", "docs/drafters.md", "docs/no_drafter.md"
PAGES += "docs/targets.md", "docs/trees.md", "docs/clients.md"
BLOCK = re.compile(r"(?P<begin><!-- figures: (?P<name>\w+) -->\n).*?(?P<end><!-- end of figures -->)", re.DOTALL)
LABELS = {"plain": "standard decoding", "chain": 'chain (`"dflash"`)', "auto": '`"auto"`, warmed'}
SERVERS = {"ddtree": "`hf-ddtree serve`", "standard": "`transformers serve`"}
LABELS |= {"auto, first use": '`"auto"`, first use', "lookup": "prompt lookup"}
Block = Callable[[Any], Iterator[str]]


def rows(columns: Sequence[str], cells: Iterable[Sequence[Any]]) -> Iterator[str]:
    """The lines of a Markdown table."""
    for row in (columns, ["---"] * len(columns), *cells):
        yield f"| {' | '.join(map(str, row))} |"


def source(about: dict[str, Any], seconds: float | None = None) -> Iterator[str]:
    """How the figures were made, where, and how many seconds the runs took."""
    duration = "" if seconds is None else f" What is timed took {max(1, round(seconds / 60))} minutes."
    yield from ("```sh", about["command"], "```", "", f"{machine_of(about)}.{duration}", "")


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
    runs = runs_by(results, "workload")["code"]
    methods = summarise(runs)
    yield f"`{results['about']['command']}`, {amount(runs)}; {machine_of(results['about'])}:"
    yield ""
    columns = "", "tokens/s", "against plain", "quartiles over prompts", "tokens per forward of the target"
    names = "plain", "chain", "tree:16", "auto, first use", "auto"
    yield from rows(
        columns, ([method_label(name), *speed_cells(methods[name]), tokens_cell(methods[name])] for name in names)
    )


def auto_budget(results: Any) -> Iterator[str]:
    """Every workload: auto against the fastest fixed setting, and all methods."""
    yield from source(results["about"], seconds_of(results["runs"]))
    workloads = runs_by(results, "workload")
    summary = {name: conclude(runs) for name, runs in workloads.items()}
    columns = "workload", "fastest fixed setting", "`auto`, warmed, against it", "quartiles", "first use", "quartiles"
    yield from rows(
        (*columns, "warmed against plain"),
        (
            (
                name,
                method_label(entry["best_fixed"]),
                compared(entry["methods"], "auto", entry["best_fixed"]),
                spread(entry["auto_against_best"]),
                compared(entry["methods"], "auto, first use", entry["best_fixed"]),
                spread(entry["first_use_against_best"]),
                f"{entry['methods']['auto']['together']['against_plain']:.2f}x",
            )
            for name, entry in summary.items()
        ),
    )
    columns = "method", "tokens/s", "against plain", "quartiles", "tokens per forward", "nodes", "ms per round"
    for name, entry in summary.items():
        yield from ("", f"**{name[0].upper()}{name[1:]}**: {amount(workloads[name])}.", "")
        yield from rows(
            (*columns, "typical round, ms", "target, ms", "outside the forwards"),
            map(method_cells, entry["methods"].items()),
        )
    methods = summary["code"]["methods"]
    target_ms = {name: figures["round_ms"]["target"] for name, figures in methods.items() if name.startswith("tree:")}
    nodes = ", ".join(name.removeprefix("tree:") for name in target_ms)
    times = ", ".join(f"{of_tree / methods['plain']['round_ms']['target']:.2f}" for of_tree in target_ms.values())
    yield ""
    yield f"On code, the target's forward over trees of {nodes} nodes takes {times} times as long as over a token."


def repetition(results: Any) -> Iterator[str]:
    """Tokens per forward and speed of each method, by how repetitive standard decoding's text is."""
    runs = results["runs"]
    yield f"`{results['about']['command']}`, {amount(runs)}; {machine_of(results['about'])}:"
    yield ""
    groups = group(runs)
    names = [name for name in dict.fromkeys(run["method"] for run in runs) if name != "plain"]
    columns = [column for name in names for column in (f"{method_label(name)}: tokens per forward", "speed")]

    def cells(of_group: list[dict[str, Any]]) -> Iterator[str]:
        methods = summarise(of_group)
        for name in names:
            yield tokens_cell(methods[name])
            yield f"{methods[name]['together']['against_plain']:.2f}x"

    yield from rows(
        ("text", "prompts", "distinct 6-grams", *columns),
        (
            (
                name,
                len({run["prompt"] for run in of_group}),
                f"{min(run['distinct'] for run in of_group):.2f} - {max(run['distinct'] for run in of_group):.2f}",
                *cells(of_group),
            )
            for name, of_group in groups.items()
        ),
    )


def runs_by(results: Any, name: str) -> dict[str, list[dict[str, Any]]]:
    """All runs, by what they have as `name`."""
    by_name: dict[str, list[dict[str, Any]]] = {}
    for run in results["runs"]:
        by_name.setdefault(str(run[name]), []).append(run)
    return by_name


def seconds_of(runs: Iterable[dict[str, Any]]) -> float:
    """How long all of them took, prefill included."""
    return sum(run.get("call_seconds", run["seconds"] + run.get("prefill_seconds", 0.0)) for run in runs)


def amount(runs: Sequence[dict[str, Any]]) -> str:
    """How many prompts and tokens they are of."""
    tokens: dict[bool, int] = {}
    for run in runs:
        is_fixed = run["method"] not in ("plain", "auto, first use", "auto")
        tokens[is_fixed] = max(tokens.get(is_fixed, 0), run["tokens"] // run["rows"] + 1)
    size, count = runs[0]["rows"], len({run["prompt"] for run in runs})
    prompts = f"{count} {'prompt' if count == 1 else 'prompts'}" if size == 1 else f"{count} batches of {size} prompts"
    fixed = f", {tokens[True]} with fixed settings" if tokens[True] != tokens[False] else ""
    return f"{prompts}, {tokens[False]} tokens each{fixed}"


def compared(methods: dict[str, Any], name: str, other: str) -> str:
    """A method's speed over another's, of all prompts together."""
    mine, its = (methods[method]["together"]["tokens_per_second"] for method in (name, other))
    return f"{mine / its:.2f}"


def speed_cells(figures: dict[str, Any]) -> list[str]:
    """Tokens a second and against standard decoding, of all prompts together, and quartiles of each prompt's ratio."""
    of_all = figures["together"]
    return [
        f"{of_all['tokens_per_second']:.1f}",
        f"{of_all['against_plain']:.2f}x",
        spread(figures["against_plain"]),
    ]


def tokens_cell(figures: dict[str, Any]) -> str:
    return f"{figures['tokens_per_forward']:.2f}"


def method_cells(entry: tuple[str, dict[str, Any]]) -> list[str]:
    name, figures = entry
    times = figures["round_ms"]
    cells = [method_label(name), *speed_cells(figures), tokens_cell(figures)]
    cells += [f"{figures['nodes']:.1f}", f"{figures['together']['round_ms']:.2f}"]
    if "outside" not in times:
        return cells
    return [*cells, f"{times['whole']:.2f}", f"{times['target']:.2f}", share(times["outside"], times["whole"])]


def context(results: Any) -> Iterator[str]:
    """Speed at each length, and where a round's time goes."""
    yield from source(results["about"], seconds_of(results["runs"]))
    runs = runs_by(results, "context")
    times = {length: summarise(of_length) for length, of_length in runs.items()}
    drafts = {"tree": "the drafter's", "set accuracy": "of set accuracy"}
    columns = "context", "prompts", "drafts", "plain: ms per token", "tree: ms per round", "a round in plain steps"
    together = {
        (length, name): figures["together"] for length, methods in times.items() for name, figures in methods.items()
    }
    yield from rows(
        (*columns, "tokens per forward", "against plain", "quartiles"),
        (
            (
                length,
                methods[method]["runs"],
                label,
                f"{together[length, 'plain']['round_ms']:.2f}",
                f"{together[length, method]['round_ms']:.2f}",
                f"{together[length, method]['round_ms'] / together[length, 'plain']['round_ms']:.2f}",
                tokens_cell(methods[method]),
                *speed_cells(methods[method])[1:],
            )
            for length, methods in times.items()
            for method, label in drafts.items()
        ),
    )
    yield from ("", "Medians of a round of a tree and of its parts, in ms:", "")
    parts = "whole", "target", "drafter", "head", "outside"
    yield from rows(
        ("context", "drafts", "round", "target", "drafter", "its head", "outside", "outside, share"),
        (
            (
                length,
                label,
                *(f"{methods[method]['round_ms'][part]:.2f}" for part in parts),
                share(methods[method]["round_ms"]["outside"], methods[method]["round_ms"]["whole"]),
            )
            for length, methods in times.items()
            for method, label in drafts.items()
        ),
    )
    shortest, *_, longest = times
    first, last = (times[length] for length in (shortest, longest))
    outside = [last[method]["round_ms"]["outside"] / first[method]["round_ms"]["outside"] for method in drafts]
    short, long = results["summary"]["texts"]
    speeds = [together[long, method]["against_plain"] / together[short, method]["against_plain"] for method in drafts]
    yield ""
    yield f"Outside of the forwards, rounds at {longest} tokens take {outside[0]:.2f} times as long as at {shortest},"
    yield f"with drafts of set accuracy {outside[1]:.2f} times."
    yield f"The speed against standard decoding is at {long} tokens {speeds[0]:.2f} times what it is at {short},"
    yield f"with drafts of set accuracy {speeds[1]:.2f} times."


def texts(results: Any) -> Iterator[str]:
    """Tokens per forward by context and by where the text is from."""
    by_context = results["summary"]["texts"]
    yield from rows(
        ("context", *(f"texts written after {origin}" for origin in by_context)),
        ((length, *(f"{tokens:.2f}" for tokens in of.values())) for length, of in by_context.items()),
    )


def compiled(results: Any) -> Iterator[str]:
    """Standard decoding and trees over dynamic, static and compiled static caches."""
    of_first_calls = [figures["first_call_seconds"] for figures in results["summary"].values()]
    yield from source(results["about"], sum(of_first_calls) + seconds_of(results["runs"]))
    labels = {"plain": LABELS["plain"], "tree": f"tree of {results['about']['budget']} nodes"}
    columns = "method", "tokens/s", "against plain", "quartiles", "tokens per forward", "ms per round"
    methods = summarise(results["runs"])
    yield from rows(
        (*columns, "first call, s", "graphs in it", "later"),
        (
            (
                labels[way] + (f", {cache}" if cache else ""),
                *(cell for place, cell in enumerate(method_cells((name, methods[name]))) if place in (1, 2, 3, 4, 6)),
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


def long_context(results: Any) -> Iterator[str]:
    """Cost of a tree's forward from short to long contexts."""
    yield from source(results["about"])
    columns = "model", "context", "nodes", "token, ms", "tree, ms", "quartiles", "Transformers' attention, ms"
    yield from rows(
        (*columns, "faster", "tree in tokens"),
        (
            (
                run["model"],
                run["context"],
                run["nodes"],
                median(run["token_ms"]),
                *(form(run["tree_ms"]) for form in (median, spread)),
                median(run["original_ms"]) if "original_ms" in run else "",
                f"{run['faster']:.1f}x" if run["faster"] else "",
                f"{run['tokens']:.2f}",
            )
            for run in results["runs"]
        ),
    )


def reference(results: Any) -> Iterator[str]:
    """Time of whole calls next to loops that do nothing else."""
    about = results["about"]
    *lines, _ = source(about)
    yield from (*lines, f"{about['prompts']} prompts, {about['tokens']} tokens each.", "")
    yield from rows(
        (
            "method",
            "ms per call",
            "quartiles",
            "against its reference",
            "quartiles",
            "ms per round around forwards",
        ),
        (
            (
                name,
                *(form(entry["ms"]) for form in (median, spread)),
                f"{entry['ratio'][1]:.2f}",
                spread(entry["ratio"]),
                median(entry["around_ms"]) if "around_ms" in entry else "",
            )
            for name, entry in results["summary"].items()
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
    yield from source(results["about"], seconds_of(results["runs"]))
    titles = {"oracle": "Qwen3, drafts for nothing", "native": "Muse Glimmer and its native DFlash drafter"}
    theirs = "Transformers' chain"
    columns = "method", "tokens/s", "against plain", "quartiles", "tokens per forward", "ms per round"
    for pair, runs in runs_by(results, "pair").items():
        methods = summarise(runs)
        yield from (f"**{titles[pair]}**: {amount(runs)}.", "")
        yield from rows(
            (*columns, f"against {theirs}", "quartiles"),
            (
                [
                    *(cell for place, cell in enumerate(method_cells((name, figures))) if place in (0, 1, 2, 3, 4, 6)),
                    *(
                        ("", "")
                        if name in ("plain", theirs)
                        else (compared(methods, name, theirs), spread(against(runs, name, theirs)))
                    ),
                ]
                for name, figures in methods.items()
            ),
        )
        yield ""


def tree_building(results: Any) -> Iterator[str]:
    """Milliseconds of building trees, and of calibration."""
    yield from source(results["about"])
    columns = (
        "trees",
        "logits times",
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
                f"{run['scale']:g}",
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
    seconds: dict[tuple[str, str], float] = {}
    for run in results["runs"]:
        place = run["method"], run["text"]
        seconds[place] = seconds.get(place, 0.0) + run["seconds"]
    columns = [column for text in texts for column in (f"{text}: tokens per forward", "speed")]

    def cells(name: str) -> Iterator[str]:
        for text in texts:
            entry = summary[name].get(text)
            yield "" if entry is None else tokens_cell(entry)
            yield "" if entry is None else f"{seconds['plain', text] / seconds[name, text]:.2f}x"

    yield from rows(["drafter", *columns], ([name, *cells(name)] for name in summary))


def tree_probabilities(results: Any) -> Iterator[str]:
    """Conditional trees, and those of a learned power, against marginal ones, end to end."""
    figures = results["tokens_per_forward"]
    kinds = {name.rpartition("_")[0] for name in figures}
    yield from by_budget(figures, "marginal", "conditional", *(["learned"] if "learned" in kinds else []))


def branch_trees(results: Any) -> Iterator[str]:
    """Tokens per forward of trees of marginals that know what the target said, against calibrated ones."""
    settings = results["settings"]
    versions = settings["versions"]
    yield (
        f"{settings['prompts']} prompts, {settings['new_tokens']} tokens each, from the second prompt on; PyTorch "
        f"{versions['torch']}, Transformers {versions['transformers']}:"
    )
    yield ""
    table = []
    for text, budgets in results["tokens_per_forward"].items():
        for budget, rates in budgets.items():
            base = rates["calibrated"]
            gains = [f"{rates[name]:.2f} ({rates[name] / base - 1:+.1%})" for name in ("first call", "memory")]
            table.append((text, budget, f"{base:.2f}", *gains))
    yield from rows(("text", "nodes", "calibrated", "and what the target said in the call", "with a memory"), table)


def markov_head(results: Any) -> Iterator[str]:
    """Tokens per forward of chains and trees, with a head along the branch and without it."""
    figures = {(row["method"], row["budget"]): row["tokens_per_forward"] for row in results["results"]}
    methods, budgets = (list(dict.fromkeys(column)) for column in zip(*figures))
    yield (
        f"{results['prompts']} prompts, {results['max_new_tokens']} tokens each; "
        f"{results['train_prompts']} prompts to train on, {results['seconds_to_write_and_train']:.0f} s; "
        f"PyTorch {results['torch']}, Transformers {results['transformers']}:"
    )
    yield ""
    yield from rows(
        ["nodes", *methods],
        ([budget, *(f"{figures[method, budget]:.2f}" for method in methods)] for budget in budgets),
    )


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
            named = "conditional tree, learned power" if label == "learned" else f"{label} tree"
            yield [
                f"{named}{', spine first' if shape else ''}",
                *(f"{value:.2f}{gain}" for value, gain in zip(of_kind, gains)),
            ]

    yield from rows(["nodes", *budgets], cells())


def undrafted(results: Any) -> Iterator[str]:
    """Tokens per forward without a drafter, by method, nodes and kind of prompt; greedy, then sampled."""
    settings = results["about"]["settings"]
    kinds = ["all kinds", *dict.fromkeys(run["kind"] for run in results["runs"])]
    kinds = kinds if len(kinds) > 2 else kinds[:1]
    labels = {
        "all": "text and target",
        "text": "text alone",
        "one token": "target alone, one token",
        "transformers": "lookup of Transformers",
        "changed": "changed prompts, no memory",
        "memory": "changed prompts, memory of the first",
    }
    groups: dict[tuple[str, str], list[list[str]]] = {}
    names = [name.split(", ") for name in results["summary"]]
    for dtype, temperature, method, nodes in sorted(names, key=lambda name: (float(name[1]), int(name[3]))):
        figures = results["summary"][f"{dtype}, {temperature}, {method}, {nodes}"]
        if method in labels:
            cells = [
                labels[method],
                nodes if method != "transformers" else "",
                *(f"{figures[kind]:.2f}" for kind in kinds),
            ]
            groups.setdefault((dtype, temperature), []).append(cells)
    about = f"{settings['prompts']} prompts, up to {settings['max_new_tokens']} tokens each"
    for (dtype, temperature), table in groups.items():
        decoding = "Greedy" if float(temperature) == 0 else f"At temperature {temperature}"
        yield f"{decoding}, {dtype}, {about}; tokens per forward:"
        yield ""
        yield from rows(("drafts from", "nodes", *kinds), table)
        yield ""
    outputs: dict[tuple[Any, ...], set[str]] = {}
    for run in results["runs"]:
        if run["method"] not in ("changed", "memory"):
            outputs.setdefault((run["prompt"], run["dtype"], run["temperature"]), set()).add(run["output"])
    equal = sum(len(of_prompt) == 1 for of_prompt in outputs.values())
    yield f"All methods gave the same output on {equal} of {len(outputs)} prompts."


def undrafted_speed(results: Any) -> Iterator[str]:
    """Speed without a drafter, with `auto`, by kind of prompt."""
    about, speeds = results["about"], results["summary"]["auto"]
    *lines, _ = source(about)
    equal = sum(run["identical"] for run in results["runs"]) == len(results["runs"])
    outputs = "every output is" if equal else "not every output is"
    yield from (*lines, f"{about['prompts']} prompts, {about['tokens']} tokens each, {about['dtype']}; {outputs}")
    yield 'standard decoding\'s. Its seconds over those of `tree_lookup=True, tree_budget="auto"`:'
    yield ""
    yield from rows(list(speeds), [[f"{speed:.2f}x" for speed in speeds.values()]])


def serving(results: Any) -> Iterator[str]:
    """The server with and without drafting under the same load."""
    about, summary = results["about"], results["summary"]
    counted = f"{about['clients']} clients, {summary['requests']} requests of {about['new_tokens']} tokens"
    yield f"{counted}, all answers equal; {machine_of(about)}:"
    yield ""
    yield from rows(
        ("server", "seconds", "seconds to the first token", "MiB before and after", "threads before and after"),
        (
            (
                label,
                summary[name]["seconds"],
                median(summary[name]["first"]),
                " - ".join(
                    f"{summary['states'][name][when]['memory_kib'] / 1024:.0f}" for when in ("before", "after")
                ),
                " - ".join(str(summary["states"][name][when]["threads"]) for when in ("before", "after")),
            )
            for name, label in SERVERS.items()
        ),
    )


def serving_memory(results: Any) -> Iterator[str]:
    """What the server keeps from request to request."""
    about = results["about"]
    runs = {name: [run for run in results["runs"] if run["server"] == name and run["requests"]] for name in SERVERS}
    yield f"`{about['command']}`, {about['clients']} clients at once; {machine_of(about)}:"
    yield ""
    yield from rows(
        ("server", "keeps", *(f"after {run['requests']} requests" for run in runs["ddtree"])),
        (
            (label, what, *(format(run[key] / size, form) for run in runs[name]))
            for name, label in SERVERS.items()
            for what, key, size, form in (("MiB", "memory_kib", 1024, ".0f"), ("objects", "objects", 1, ",.0f"))
        ),
    )


def rollouts(results: Any) -> Iterator[str]:
    """Forwards of a policy that is trained, with a drafter that is trained as well and with one that is not."""
    about, summary = results["about"], results["summary"]
    counted = f"four rollouts of {about['new_tokens']} tokens per step, runs: {about['seeds']}"
    yield f"`{about['command']}`, {counted}; {machine_of(about)}:"
    yield ""
    yield from rows(
        ("drafter", *(f"steps {steps}" for steps in summary["steps"])),
        (
            (f"trained on every {about['every']} steps", *summary["refreshed"]),
            ("as it was", *summary["as it was"]),
        ),
    )


def clients(results: Any) -> Iterator[str]:
    """Programs that call `generate()`, with drafting switched on and without."""
    yield f"`{results['about']['command']}`; {machine_of(results['about'])}:"
    yield ""
    columns = "program", "packages", "drafter", "output", "forwards, plain", "with drafting"
    yield from rows(
        columns,
        (
            (
                run["title"],
                ", ".join(run["packages"]),
                run["drafter"],
                client_outcome(run),
                run.get("plain_forwards", ""),
                run.get("forwards", ""),
            )
            for run in results["runs"]
        ),
    )


def client_outcome(run: dict[str, Any]) -> str:
    if "not_run" in run:
        return f"not run: {run['not_run']}"
    return "fails" if "failed" in run else "equal" if run["equal"] else "differs"


BLOCKS: dict[str, tuple[str, Block]] = {
    "overview": ("auto_budget", overview),
    "cache": ("context", cache),
    "texts": ("context", texts),
    "tree_probabilities_9_minutes": ("tree_probabilities_9_minutes", tree_probabilities),
    "undrafted_demo": ("undrafted_demo", undrafted),
    "tree_probabilities_sampled": ("tree_probabilities_sampled", tree_probabilities),
} | {
    block.__name__: (block.__name__, block)
    for block in (
        auto_budget,
        context,
        compiled,
        tree_operator,
        long_context,
        reference,
        quantized,
        assisted,
        tree_building,
        drafters,
        repetition,
        tree_probabilities,
        branch_trees,
        markov_head,
        demo_replay,
        undrafted,
        undrafted_speed,
        serving,
        serving_memory,
        rollouts,
        clients,
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
