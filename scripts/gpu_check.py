"""Checks by hand what no test of this repository can without a GPU; some minutes on one.

    python scripts/gpu_check.py --output gpu_check.json
    python scripts/gpu_check.py --device cpu --quick      # the same code on tiny models, as the tests run it

1. Every core family in bfloat16 and float16, random weights: tree decoding against standard decoding. Rounding
   depends on how many tokens a forward is fed, so near ties may go either way. At the first difference, the logits of
   the two tokens must lie within twice the noise measured for that model: how far the logits of standard decoding are
   from those of one forward over the same tokens, in the same dtype and in float32.
2. Times that a round makes the host wait for the GPU (PyTorch's `set_sync_debug_mode`). With the pair that ships it
   shall be two: one for the draft, one for the walk, with a repetition penalty or beside a lookup as well, and over a
   static cache, where the commit is in the graph. The drafter of the random hybrids looks at tokens on the host.
3. Memory that a node of the tree takes while it is verified.
4. Trees that are searched on the GPU against those that the host builds of the same candidates, which have to be
   transferred first: whether they are equal, and the time of both.
5. Each `attn_implementation` that is installed, over contexts of 8,192 and 32,768 tokens with 16 query heads and 4 key
   heads of 256: time of a tree's forward and of a token's. The logits must be as close to those in float32 as those
   of Transformers' own attention function, up to a factor of two.
6. Speed: standard decoding, chain, trees of several budgets, on the pair that ships and on random Qwen3.5 hybrids of
   half a billion and of about three billion parameters, whose drafter is right as often as it is told to be; with CUDA
   graphs as well.
7. Each operator over a tree that is one kernel (`fused_operators`): whether it gave what PyTorch's operations give the
   first time that it ran.

Exits with an error if a family fails the first check, if trees differ, if an attention is not close enough, or if such
a kernel is wrong.
"""

from __future__ import annotations

import copy
import json
import math
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_ddtree
from hf_ddtree.attention import attention_dispatch, dispatch, fused
from hf_ddtree.demo import demo_prompts
from hf_ddtree.interop.versions import CACHE_KEY
from hf_ddtree.target.cache_rows import CommittedRows
from hf_ddtree.target.compiled import num_graphs
from hf_ddtree.target.model import CachedModel
from hf_ddtree.target.preallocation import growing
from hf_ddtree.testing import SetAccuracyGenerator
from hf_ddtree.tree.build import build_tree
from hf_ddtree.tree.build_on_device import search_trees
from hf_ddtree.tree.candidates import best_tokens, conditional_candidates, on_host, top_candidates
from hf_ddtree.tree.draft_tree import DraftTree

MOE = {"num_experts": 8, "num_experts_per_tok": 2}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
SLIDING = {"sliding_window": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {"use_sliding_window": True, "max_window_layers": 2, **SLIDING},
    "Qwen3": {},
    "Qwen3Moe": MOE,
    "Mistral": SLIDING,
    "Gemma3Text": SLIDING,
    "GptOss": {"num_local_experts": 8, "num_experts_per_tok": 2, **SLIDING},
    "Qwen3Next": {**MOE, **LINEAR},
    "Qwen3_5Text": LINEAR,
    "Qwen3_5MoeText": {**MOE, **LINEAR},
    "OlmoHybrid": {**LINEAR, "linear_num_key_heads": 4},
}
DTYPES = (torch.bfloat16, torch.float16)
BUDGETS = (16, 32, 64)
IMPLEMENTATIONS = (
    *("sdpa", "eager", "flex_attention", "flash_attention_2", "flash_attention_3"),
    *("kernels-community/flash-attn2", "kernels-community/flash-attn3"),
)
KERNELS = ("triton", "flash-attn", "flash-attn-3", "kernels", "causal-conv1d", "flash-linear-attention", "mamba-ssm")
HORIZON = 15  # of the generator of set accuracy


def make_model(family: str, device: str, dtype: torch.dtype, layers: int, hidden: int, vocab: int) -> PreTrainedModel:
    """A model of a family with seeded random weights that keep activations at unit scale."""
    config_class = getattr(transformers, f"{family}Config")
    linear = "linear_num_key_heads" in FAMILIES[family]
    if linear or family in ("Gemma3Text", "GptOss"):
        other = "linear_attention" if linear else "sliding_attention"
        layer_types = {"layer_types": [other if i % 4 != 3 else "full_attention" for i in range(layers)]}
    else:
        layer_types = {}
    torch.manual_seed(0)
    config = config_class(
        **{
            "vocab_size": vocab,
            "hidden_size": hidden,
            "intermediate_size": 7 * hidden // 2,
            "moe_intermediate_size": hidden,
            "shared_expert_intermediate_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": max(4, hidden // 128),
            "num_key_value_heads": 2,
            "head_dim": max(16, min(128, hidden // 4)),
            "linear_key_head_dim": max(16, min(128, hidden // 4)),
            "linear_value_head_dim": max(16, min(128, hidden // 4)),
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "max_position_embeddings": 8192,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": 0,
        }
        | layer_types
        | FAMILIES[family]
    )
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and "conv1d" not in name:
            parameter.data.normal_(std=0.3 if "embed_tokens" in name else 1.3 / math.sqrt(parameter.shape[-1]))
    return model


def compare(model: PreTrainedModel, prompt: Tensor, new_tokens: int) -> dict[str, Any]:
    """Tree decoding against standard decoding: where they part, and whether that is a near tie."""
    options = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    plain = model.generate(prompt, max_new_tokens=new_tokens, **options)
    start, vocab_size = prompt.shape[1], model.config.get_text_config().vocab_size
    generator = SetAccuracyGenerator(plain.sequences[0], vocab_size, accuracy=0.6)
    tree = model.generate(
        prompt,
        max_new_tokens=new_tokens,
        **options,
        generation_strategy="ddtree",
        tree_budget=24,
        candidate_generator=generator,
    )
    logits, by_tree = torch.cat(plain.logits).float(), torch.cat(tree.logits).float()
    at_once = [
        one(plain.sequences[:, :-1]).logits[0, start - 1 :].float() for one in (model, copy.deepcopy(model).float())
    ]
    noise = max(float((logits - other).abs().max()) for other in at_once)
    same = (plain.sequences == tree.sequences)[0, start:]
    first = new_tokens if bool(same.all()) else int(same.int().argmin())
    seen = min(first + 1, new_tokens)
    result = {
        "first_difference": None if first == new_tokens else first,
        "noise": noise,
        "largest_error": float((logits[:seen] - by_tree[:seen]).abs().max()),
        "tokens_per_forward": tree.ddtree_stats.tokens_per_forward,
        "gap": 0.0,
    }
    if first < new_tokens:
        one, other = (int(output.sequences[0, start + first]) for output in (plain, tree))
        result["gap"] = float(logits[first, one] - logits[first, other])
    # Standard decoding and tree decoding may be off by the noise each, wherever one logit is compared with another.
    result["passed"] = result["gap"] <= 2 * noise and result["largest_error"] <= 2 * noise
    return result


def check_families(device: str, quick: bool) -> list[dict[str, Any]]:
    layers, hidden, vocab, new_tokens = (4, 64, 128, 16) if quick else (8, 512, 4096, 96)
    rows = []
    for family in FAMILIES:
        for dtype in DTYPES:
            model = make_model(family, device, dtype, layers, hidden, vocab)
            prompt = torch.arange(1, 41, device=device)[None] % vocab
            rows.append({"family": family, "dtype": str(dtype).split(".")[1], **compare(model, prompt, new_tokens)})
    return rows


def waits_in(call: Callable[[], Any]) -> int | None:
    """How often a call makes the host wait for the GPU; None without one."""
    if not torch.cuda.is_available():
        call()
        return None
    call()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)


def peak_memory_of(call: Callable[[], Any]) -> int | None:
    """Bytes that a call allocates on the GPU at most; None without one."""
    if not torch.cuda.is_available():
        call()
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    return torch.cuda.max_memory_allocated() - before


class Bench:
    """A target, what it is asked, and each way to decode it."""

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: list[Tensor],
        new_tokens: int,
        drafter: Any = None,
        accuracy: float = 0.7,
    ) -> None:
        self._model = model
        self.prompts = prompts
        self.new_tokens = new_tokens
        self._drafter = drafter
        self._accuracy = accuracy
        self._plain = [self.decode("plain", index).sequences[0] for index in range(len(prompts))]

    def decode(self, method: str, index: int, new_tokens: int | None = None, **settings: Any) -> Any:
        """Decodes a prompt by `"plain"`, `"chain"`, or `"tree B"` with a budget of `B` nodes; with `" static"` after
        it over a static cache, where Transformers compiles forwards on a GPU, with CUDA graphs."""
        arguments: dict[str, Any] = {}
        method, *static = method.split(" static")
        if method != "plain":
            budget = HORIZON if method == "chain" else int(method.split()[1])
            arguments = {"generation_strategy": "dflash" if method == "chain" else "ddtree", "tree_budget": budget}
            if self._drafter is not None:
                arguments["assistant_model"] = self._drafter
            else:
                shape = "chain" if method == "chain" else "best_first"
                vocab_size = self._model.config.get_text_config().vocab_size
                arguments["candidate_generator"] = SetAccuracyGenerator(
                    self._plain[index], vocab_size, self._accuracy, shape
                )
        if static:
            arguments["cache_implementation"] = "static"
        return self._model.generate(
            self.prompts[index],
            max_new_tokens=new_tokens or self.new_tokens,
            eos_token_id=-1,
            pad_token_id=0,
            return_dict_in_generate=True,
            **{"do_sample": False, **arguments, **settings},
        )

    def speed(self) -> list[dict[str, Any]]:
        """Tokens a second of every method, methods alternating."""
        methods = ["plain", "chain", *(f"tree {budget}" for budget in BUDGETS)]
        if torch.cuda.is_available():
            methods += ["plain static", "chain static", "tree 32 static"]
        seconds: dict[str, list[float]] = {method: [] for method in methods}
        lengths: dict[str, list[int]] = {method: [] for method in methods}
        agreeing = dict.fromkeys(methods, 0)
        for method in methods:
            # A graph belongs to a length of the static cache, and so to a whole call.
            self.decode(method, 0, new_tokens=self.new_tokens if "static" in method else min(16, self.new_tokens))
        for index, expected in enumerate(self._plain):
            shift = index % len(methods)
            for method in methods[shift:] + methods[:shift]:
                start = time.perf_counter()
                output = self.decode(method, index)
                sequence = output.sequences[0].tolist()  # waits for the GPU
                seconds[method].append(time.perf_counter() - start)
                lengths[method] += [1] if method.startswith("plain") else output.ddtree_stats.accepted_lengths
                agreeing[method] += sequence == expected.tolist()
        return [
            {
                "method": method,
                "tokens_per_second": self.new_tokens / statistics.median(seconds[method]),
                "speedup": statistics.median(p / s for p, s in zip(seconds["plain"], seconds[method])),
                "tokens_per_forward": statistics.mean(lengths[method]),
                "identical": f"{agreeing[method]}/{len(self._plain)}",
            }
            for method in methods
        ]

    def waits(self) -> dict[str, float | None]:
        """Waits per round of several methods and settings."""
        cases: dict[str, tuple[str, dict[str, Any]]] = {
            "chain": ("chain", {}),
            "tree 32": ("tree 32", {}),
            "tree 32, sampled": ("tree 32", {"do_sample": True}),
            "tree 32, repetition penalty": ("tree 32", {"repetition_penalty": 1.2}),
            "tree 32, static": ("tree 32 static", {}),
        }
        if self._drafter is not None:
            cases["tree 32, lookup"] = ("tree 32", {"tree_lookup": True})
        return {name: self.waits_per_round(method, **settings) for name, (method, settings) in cases.items()}

    def waits_per_round(self, method: str, **settings: Any) -> float | None:
        """Waits of a long call less those of a short one, for each round in between."""
        rounds, waits = [], []
        for new_tokens in (2, self.new_tokens):
            outputs: list[Any] = []

            def call(new_tokens: int = new_tokens, outputs: list[Any] = outputs) -> None:
                torch.manual_seed(0)
                outputs.append(self.decode(method, 0, new_tokens, **settings))

            waits.append(waits_in(call))
            rounds.append(outputs[-1].ddtree_stats.target_forwards)
        return None if None in waits else (waits[1] - waits[0]) / max(1, rounds[1] - rounds[0])

    def bytes_per_node(self, small: int = 32, large: int = 256) -> float | None:
        """Memory of a round of many nodes less that of one of few, for each node in between."""
        few, many = (peak_memory_of(lambda n=n: self.decode(f"tree {n}", 0, 4)) for n in (small, large))
        return None if few is None or many is None else (many - few) / (large - small)


def milliseconds(call: Callable[[], Any], device: str, repeats: int) -> float:
    """Median time of a call that ends on the host, after one that does not count."""
    seconds = []
    for _ in range(1 + repeats):
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return 1000 * statistics.median(seconds[1:])


def check_tree_search(device: str, quick: bool) -> list[dict[str, Any]]:
    """Trees of marginal and of conditional candidates, searched where they are and built on the host."""
    torch.manual_seed(0)
    vocab, repeats = (500, 2) if quick else (150000, 20)
    rows = []
    for batch_size, budget in ((1, 16), (1, 64), (4, 64), (1, 256)):
        logits = 4 * torch.randn(batch_size, HORIZON, vocab, device=device)
        pair_scores = torch.randn(batch_size, HORIZON, 16, 16, device=device)
        roots = [1] * batch_size
        for name, candidates in (
            ("marginal", best_tokens(logits, budget)),
            ("conditional", conditional_candidates(*best_tokens(logits, 16), pair_scores)),
        ):

            def search(candidates: Any = candidates, roots: Any = roots, budget: int = budget) -> Any:
                log_probs, token_ids, *next_state = candidates
                return search_trees(
                    log_probs, token_ids, roots, budget, next_state=next_state[0] if next_state else None
                )

            def build(candidates: Any = candidates, roots: Any = roots, budget: int = budget) -> Any:
                of_rows = zip(*on_host(*candidates))
                return [
                    build_tree(log_probs, token_ids, root, budget, next_state=next_state[0] if next_state else None)
                    for root, (log_probs, token_ids, *next_state) in zip(roots, of_rows)
                ]

            rows.append(
                {
                    "candidates": name,
                    "rows": batch_size,
                    "budget": budget,
                    "equal": all(
                        torch.equal(one.token_ids, other.token_ids)
                        and torch.equal(one.parents, other.parents)
                        and torch.equal(one.log_probs, other.log_probs)
                        for one, other in zip(search(), build(), strict=True)
                    ),
                    "search_ms": milliseconds(search, device, repeats),
                    "build_ms": milliseconds(build, device, repeats),
                }
            )
    return rows


def versions_of_kernels() -> dict[str, str | None]:
    """The installed version of each package that has kernels for layers, None if it is not installed."""
    installed = {distribution.name.lower(): distribution.version for distribution in metadata.distributions()}
    return {name: installed.get(name) for name in KERNELS}


def make_attention(device: str, dtype: torch.dtype, quick: bool) -> PreTrainedModel:
    """Two layers of full attention whose query heads share key heads four by four."""
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 16 if quick else 256}
    config = transformers.LlamaConfig(
        vocab_size=1024, hidden_size=64 if quick else 2048, num_hidden_layers=2, intermediate_size=512, **heads
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(std=parameter.shape[-1] ** -0.5)
    return model.eval().requires_grad_(False)


def over_random_context(model: PreTrainedModel, num_cached: int) -> CachedModel:
    """The model with a cache of random keys and values."""
    cache = transformers.DynamicCache(config=model.config)
    model(torch.arange(8, device=model.device)[None], use_cache=True, **{CACHE_KEY: cache})
    torch.manual_seed(1)
    for layer in cache.layers:
        shape = (*layer.keys.shape[:2], num_cached, layer.keys.shape[3])
        # The same in each dtype.
        layer.keys, layer.values = (torch.randn(shape).bfloat16().to(layer.keys) for _ in range(2))
    positions = torch.arange(num_cached + 1, device=model.device)[None]
    arguments = {CACHE_KEY: cache, "position_ids": positions, "use_cache": True}
    return CachedModel(model, arguments, CommittedRows(num_cached, arguments, 1, model.device))


@torch.no_grad()
def check_attention(device: str, quick: bool) -> list[dict[str, Any]]:
    """Every implementation over long contexts, by time and by how far logits are from those in float32."""
    dtype = torch.float32 if quick else torch.bfloat16
    logits = 4.0 * torch.randn(HORIZON, 512, generator=torch.Generator().manual_seed(0))
    tree = build_tree(*top_candidates(logits, 32), 0, 32)
    rows = []

    def by_tree(cached: CachedModel) -> Tensor:
        verification = cached.verify([tree])
        cached.commit(verification.tree_pass, [[]])
        return verification.logits.float().cpu()

    def by_token(cached: CachedModel) -> Tensor:
        return cached.step([DraftTree.root_only(1)]).logits.cpu()

    for context in (64, 9000) if quick else (8192, 32768):
        exact = make_attention(device, dtype, quick).to(torch.float64 if quick else torch.float32)
        dispatch.install(exact)
        expected = by_tree(over_random_context(exact, context))
        del exact
        own = mock.patch.object(attention_dispatch, "current_pass", lambda: None)
        for implementation in IMPLEMENTATIONS:
            if quick and implementation == "flex_attention":
                continue  # takes half a minute to compile
            row: dict[str, Any] = {"attention": implementation, "context": context}
            model = make_attention(device, dtype, quick)
            try:
                model.set_attn_implementation(implementation)
                cached = over_random_context(model, context)
            except Exception as error:
                rows.append(row | dict.fromkeys(("token_ms", "tree_ms", "error", "own_error")) | {"why": str(error)})
                continue
            dispatch.install(model)
            with cached.recording_past(), growing(cached.cache):
                row["token_ms"] = milliseconds(lambda cached=cached: by_token(cached), device, 2 if quick else 10)
            cached = over_random_context(model, context)
            with cached.recording_past(), growing(cached.cache):
                row["tree_ms"] = milliseconds(lambda cached=cached: by_tree(cached), device, 2 if quick else 10)
                row["error"] = float((by_tree(cached) - expected).abs().max())
                row["own_error"] = None
                if implementation in ("sdpa", "eager"):
                    with own:
                        row["own_error"] = float((by_tree(cached) - expected).abs().max())
            rows.append(row | {"why": ""})
    return rows


def attention_is_close(rows: list[dict[str, Any]]) -> bool:
    """Whether each attention that ran is as close as Transformers' own functions over as long a context."""
    noise = {row["context"]: row["own_error"] for row in rows if row["attention"] == "sdpa"}
    return all(row["error"] <= 2 * noise[row["context"]] + 1e-5 for row in rows if row["error"] is not None)


def make_benches(device: str, quick: bool) -> Iterator[tuple[str, Bench]]:
    """One at a time, so that no two models take memory at once."""
    dtype = torch.float32 if quick else torch.bfloat16
    model, drafter, tokenizer = hf_ddtree.load_demo(dtype=dtype)
    texts = [entry["prompt"] for entry in demo_prompts()[: 2 if quick else 12]]
    prompts = [tokenizer(text, return_tensors="pt").input_ids.to(device) for text in texts]
    new_tokens = 16 if quick else 256
    yield "the pair that ships", Bench(model.to(device), prompts, new_tokens, drafter.to(device))
    for size in [(4, 64, 128)] if quick else [(24, 1024, 32000), (32, 2560, 64000)]:
        hybrid = make_model("Qwen3_5Text", device, dtype, *size)
        random_prompts = [torch.randint(1, size[2], (1, 64), device=device) for _ in range(1 if quick else 3)]
        yield f"a random hybrid, {hybrid.num_parameters() / 1e9:.2g} B", Bench(hybrid, random_prompts, new_tokens)


def show(title: str, rows: list[dict[str, Any]]) -> None:
    table = Table(*rows[0], title=title)
    for row in rows:
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=120).print(table)


def main(
    device: Annotated[str, typer.Option(help="Where to run.")] = "cuda",
    quick: Annotated[bool, typer.Option(help="Tiny models and few tokens, to see that the script works.")] = False,
    output: Annotated[Path | None, typer.Option(help="Where to write the figures as JSON.")] = None,
) -> None:
    transformers.logging.set_verbosity_error()
    start = time.perf_counter()
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else platform.machine(),
        "quick": quick,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_ddtree": hf_ddtree.__version__,
        "kernels": versions_of_kernels(),
        "families": check_families(device, quick),
        "tree_search": check_tree_search(device, quick),
        "attention": check_attention(device, quick),
        "rounds": [],
        "speed": {},
    }
    show("tree against standard decoding", report["families"])
    show("trees where the candidates are, and on the host", report["tree_search"])
    show("attention over long contexts", report["attention"])
    for name, bench in make_benches(device, quick):
        report["rounds"].append(
            {
                "target": name,
                **{f"waits_per_round ({case})": waits for case, waits in bench.waits().items()},
                "bytes_per_node": bench.bytes_per_node(),
            }
        )
        report["speed"][name] = bench.speed()
        show(f"speed, {name}", report["speed"][name])
    show("rounds", report["rounds"])
    report["compiled_graphs"] = num_graphs()
    report["fused_operators"] = {" ".join(map(str, form)): right for form, right in fused.verdicts().items()}
    report["seconds"] = time.perf_counter() - start
    print(f"{report['device']}: {report['seconds']:.0f} s")
    if output is not None:
        output.write_text(json.dumps(report, indent=1) + "\n")
    if not all(row["equal"] for row in report["tree_search"]):
        raise SystemExit("Trees that are searched on the device differ from those that are built on the host.")
    if not all(report["fused_operators"].values()):
        raise SystemExit('A kernel over a tree fails, or differs from PyTorch\'s operations: see "fused_operators".')
    if not attention_is_close(report["attention"]):
        raise SystemExit("An attention over a tree is further from float32 than Transformers' own function.")
    failed = [f"{row['family']} in {row['dtype']}" for row in report["families"] if not row["passed"]]
    if failed:
        raise SystemExit(f"Tree decoding differs from standard decoding by more than noise: {', '.join(failed)}.")


if __name__ == "__main__":
    typer.run(main)
