"""Tries every language model of Transformers by tree and by standard decoding, and writes docs/models.md.

Each class is built from the smallest configuration that this file knows how to make, in float32 with seeded random
weights. A class works if tree decoding gives standard decoding's tokens, alone and in a batch of two with padding,
with winning branches that are not the first, if the logits of every node, the rejected ones included, are those of the
node's own path in a forward of its own, and if the cache is left as standard decoding leaves it.

    python scripts/model_table.py          # writes the page
    python scripts/model_table.py --check  # fails if the page says otherwise; figures may differ
"""

from __future__ import annotations

import inspect
import math
import os
import re
import signal
import sys
import warnings
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "critical"

import torch
import transformers
import typer
from model_sizes import SIZES, TEXT, TEXT_PARTS, VISION
from rich.progress import track
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_ddtree.interop.versions import CACHE_KEY
from hf_ddtree.target.layers import layer_types
from hf_ddtree.target.requirements import check_target
from hf_ddtree.testing import OracleTreeCandidateGenerator

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
COMMAND = "python scripts/model_table.py"
VOCAB_SIZE = 64
PROMPT_LENGTH = 11
PADDING = 4
NEW_TOKENS = 28
# Largest error of a logit in units of the largest logit, or of 1 if that is less.
TOLERANCE = 1e-4
LARGEST_MODEL = 30_000_000
PROCESSOR_SECONDS = 60


@dataclass(frozen=True)
class Verdict:
    """What became of a class.

    Attributes:
        name: Of the class.
        outcome: "works", "refused", "not built" or "wrong".
        layers: Kinds of the layers.
        attention: The attention implementation.
        reason: Why it does not work.
        error: Largest error of a logit.
    """

    name: str
    outcome: str
    layers: str = ""
    attention: str = ""
    reason: str = ""
    error: float = 0.0


class NotBuilt(Exception):
    """The class cannot be tried here."""


def architectures() -> dict[str, list[str]]:
    """For each class that decodes text, the model types that stand for it."""
    found: dict[str, list[str]] = {}
    for mapping in ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM"):
        for model_type, names in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES").items():
            for name in [names] if isinstance(names, str) else names:
                if model_type not in found.setdefault(name, []):
                    found[name].append(model_type)
    return dict(sorted(found.items()))


# --- building -------------------------------------------------------------------------------------------------------


def make_config(config_class: type[PretrainedConfig], sizes: dict[str, Any]) -> PretrainedConfig:
    """The class's configuration with all sizes that it has made small."""
    changes = SIZES.get(config_class.model_type, {})
    try:
        default = config_class()
    except Exception:
        default = None
    parts = {}
    for name, part in config_class.sub_configs.items():
        # A configuration that leaves open what its part is has a default.
        part = type(getattr(default, name, None)) if getattr(default, name, None) is not None else part
        if part.model_type and name not in changes:
            parts[name] = make_config(part, TEXT if name in TEXT_PARTS else VISION)
    known = _settings(config_class)
    small = {name: value for name, value in sizes.items() if name in known}
    if "kv_lora_rank" in small:
        # Each head of latent attention has keys of its own.
        small["num_key_value_heads"] = small["num_attention_heads"]
    rope = getattr(default, "rope_parameters", None) or {}
    if "mrope_section" in rope:
        half = int(small["head_dim"] * rope.get("partial_rotary_factor", 1.0)) // 2
        small["rope_parameters"] = {**rope, "mrope_section": [half - half // 3 * 2, half // 3, half // 3]}
    return config_class(**{**small, **parts, **changes})


def _settings(config_class: type[PretrainedConfig]) -> set[str]:
    """What can be set of a configuration."""
    names = set(config_class.attribute_map) | set(inspect.signature(config_class.__init__).parameters)
    for parent in config_class.__mro__:
        names |= set(vars(parent).get("__annotations__", ()))
    return {name for name in names if not isinstance(getattr(config_class, name, None), property)}


def make_model(name: str, model_type: str, attention: str) -> PreTrainedModel:
    """The class's small model in float32, with weights that keep its logits at unit scale."""
    model_class = getattr(transformers, name, None)
    if model_class is None:
        raise NotBuilt("Transformers does not export it.")
    config = make_config(model_class.config_class or CONFIG_MAPPING[model_type], TEXT)
    with torch.device("meta"):
        size = model_class._from_config(config, attn_implementation=attention).num_parameters()
    if size > LARGEST_MODEL:
        raise NotBuilt(f"Its smallest known configuration has {size / 1e6:.0f} million parameters.")
    torch.manual_seed(3)
    model = model_class._from_config(config, attn_implementation=attention, dtype=torch.float32).eval()
    gain = 1.2 if "linear_attention" in layer_types(config.get_text_config()) else 1.5
    for parameter_name, parameter in model.named_parameters():
        _randomise(parameter_name, parameter.data, gain)
    return model.requires_grad_(False)


def _randomise(name: str, weight: Tensor, gain: float) -> None:
    if not weight.is_floating_point():
        return
    if name.endswith("A_log"):
        weight.uniform_(math.log(0.02), math.log(4.0))
    elif weight.ndim == 1:
        # A scale that is stored small stays small.
        weight.add_(torch.randn_like(weight), alpha=0.3 * (float(weight.abs().mean()) or 1.0))
    elif re.search("embed|wte|wpe", name):
        weight.normal_(std=0.3)
    else:
        weight.normal_(std=gain / math.sqrt(weight.shape[-1]))


# --- trying ---------------------------------------------------------------------------------------------------------


class WrongOutput(Exception):
    """Tree decoding differs from standard decoding."""


def try_model(model: PreTrainedModel) -> float:
    """The largest error of a logit.

    Raises:
        WrongOutput: If it is too large, or tokens or caches differ.
        ValueError: If the package refuses the model.
        NotBuilt: If standard decoding does not work.
    """
    prompt = torch.randint(2, VOCAB_SIZE - 4, (2, PROMPT_LENGTH), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(prompt)
    mask[1, :PADDING] = 0
    error = _try_prompt(model, prompt[:1], mask[:1])
    return max(error, _try_prompt(model, prompt * mask, mask))


def _try_prompt(model: PreTrainedModel, prompt: Tensor, mask: Tensor) -> float:
    arguments = {
        "input_ids": prompt,
        "attention_mask": mask,
        "max_new_tokens": NEW_TOKENS,
        "do_sample": False,
        "return_dict_in_generate": True,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    try:
        plain = model.generate(**arguments, output_logits=True)
    except Exception as error:
        raise NotBuilt(f"Standard decoding raises {type(error).__name__}: {error}") from error
    if plain.sequences.shape != (len(prompt), PROMPT_LENGTH + NEW_TOKENS):
        raise NotBuilt(f"Standard decoding returns {tuple(plain.sequences.shape)} tokens.")
    oracle = OracleTreeCandidateGenerator(plain.sequences, VOCAB_SIZE, accuracy=0.85)
    rounds: list[Tensor] = []
    hook = model.register_forward_hook(lambda module, args, output: rounds.append(output.logits.detach()))
    try:
        tree = model.generate(
            **arguments, generation_strategy="ddtree", candidate_generator=oracle, tree_budget=12, return_trees=True
        )
    finally:
        hook.remove()
    stats = tree.ddtree_stats
    if not torch.equal(tree.sequences, plain.sequences):
        raise WrongOutput(f"{(tree.sequences != plain.sequences).sum()} tokens differ")
    if stats.tokens_per_forward < 1.5:
        raise WrongOutput(f"{stats.tokens_per_forward:.2f} tokens per forward with an oracle")
    _compare_caches(tree[CACHE_KEY], plain[CACHE_KEY])
    return _node_error(model, plain, rounds[1:], stats) if len(prompt) == 1 else 0.0


def _node_error(model: PreTrainedModel, plain: Any, rounds: list[Tensor], stats: Any) -> float:
    """Largest difference between a node's logits and standard decoding's, or a forward's without cache over its path.

    Some models compute something else without a cache; of these only the nodes count that standard decoding comes to.
    """
    plain_logits = torch.cat(plain.logits)
    emitted = torch.cat([logits[0, path] for logits, [path] in zip(rounds, stats.accepted_paths)])
    error = float((emitted[: NEW_TOKENS - 1] - plain_logits[1:]).abs().max())
    sequence = plain.sequences[0].tolist()
    length, paths, nodes = PROMPT_LENGTH, [], []
    for number, ([tree], [path]) in enumerate(zip(stats.trees, stats.accepted_paths)):
        leaves = set(range(len(tree))) - set(tree.parents.tolist())
        for leaf in leaves:
            steps = tree.path(leaf)
            paths.append(sequence[:length] + tree.tokens_of(steps))
            nodes.append((number, steps))
        length += len(path)
    paths.append(sequence)
    longest = max(map(len, paths))
    batch = torch.tensor([path + [0] * (longest - len(path)) for path in paths])
    places = torch.arange(longest).expand_as(batch)
    inputs = model.prepare_inputs_for_generation(
        batch, attention_mask=torch.ones_like(batch), position_ids=places, use_cache=False, is_first_iteration=True
    )
    if "logits_to_keep" in inputs:
        inputs["logits_to_keep"] = 0
    logits = model(**inputs, return_dict=True).logits
    limit = TOLERANCE * max(1.0, float(plain_logits.abs().max()))
    if (logits[-1, PROMPT_LENGTH - 1 : len(sequence) - 1] - plain_logits).abs().max() <= limit:
        for row, path, (number, steps) in zip(logits, paths, nodes):
            expected = row[len(path) - len(steps) : len(path)]
            error = max(error, float((rounds[number][0, steps] - expected).abs().max()))
    if not error <= limit:
        raise WrongOutput(f"logits are off by {error:.1e}")
    return error


def _compare_caches(cache: Any, expected: Any) -> None:
    for number, (layer, layer_expected) in enumerate(zip(cache.layers, expected.layers, strict=True)):
        for name in ("keys", "values", "conv_states", "recurrent_states"):
            for value, value_expected in zip(
                _tensors(getattr(layer, name, None)), _tensors(getattr(layer_expected, name, None)), strict=True
            ):
                scale = max(1.0, float(value_expected.abs().max()))
                if value.shape != value_expected.shape or not torch.allclose(
                    value, value_expected, rtol=0.0, atol=10 * TOLERANCE * scale
                ):
                    raise WrongOutput(f"`{name}` of the cache's layer {number} differ")


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    values = value.values() if isinstance(value, dict) else value or []
    return [entry for entry in values if isinstance(entry, Tensor)]


# --- verdicts -------------------------------------------------------------------------------------------------------


def judge(name: str, model_types: list[str]) -> Verdict:
    """Builds and tries a class: with sdpa if it has that, else with eager attention."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    signal.signal(signal.SIGPROF, _give_up)
    signal.setitimer(signal.ITIMER_PROF, PROCESSOR_SECONDS)
    try:
        return min((_judge(name, model_type) for model_type in model_types), key=_rank)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _give_up(*_: Any) -> None:
    raise NotBuilt(f"It takes more than {PROCESSOR_SECONDS} seconds of a processor.")


def _rank(verdict: Verdict) -> int:
    return ("wrong", "works", "refused", "not built").index(verdict.outcome)


def _judge(name: str, model_type: str) -> Verdict:
    layers = attention = ""
    try:
        attention, model = _first_that_builds(name, model_type)
        layers = kinds_of_layers(model.config.get_text_config())
        try:
            check_target(model)
            return Verdict(name, "works", layers, attention, error=try_model(model))
        except ValueError as error:
            if "hf_ddtree" not in _file_of(error):
                raise
            return Verdict(name, "refused", layers, attention, str(error))
        except WrongOutput as error:
            return Verdict(name, "wrong", layers, attention, str(error))
    except NotBuilt as error:
        return Verdict(name, "not built", layers, attention, _one_line(str(error)))
    except Exception as error:
        outcome = "wrong" if layers and "hf_ddtree" in _file_of(error) else "not built"
        return Verdict(name, outcome, layers, attention, _one_line(f"{type(error).__name__}: {error}"))


def _first_that_builds(name: str, model_type: str) -> tuple[str, PreTrainedModel]:
    try:
        return "sdpa", make_model(name, model_type, "sdpa")
    except ValueError as error:
        if "does not support an attention implementation" not in str(error):
            raise
        return "eager", make_model(name, model_type, "eager")


def _file_of(error: BaseException) -> str:
    """The files that an exception came through."""
    files = []
    trace = error.__traceback__
    while trace is not None:
        files.append(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next
    return " ".join(files)


def _one_line(text: str) -> str:
    text = " ".join(re.sub(r"0x[0-9a-f]+|<[^>]*>", "", text).split())
    return text if len(text) <= 160 else text[:157] + "..."


def kinds_of_layers(config: PretrainedConfig) -> str:
    """The kinds of a configuration's layers, each once, in their order."""
    kinds = [kind.removesuffix("_attention") for kind in dict.fromkeys(layer_types(config))]
    if getattr(config, "num_kv_shared_layers", None):
        kinds.append("shared keys")
    if getattr(config, "kv_lora_rank", None):
        kinds.append("latent")
    return ", ".join(kinds)


# --- the page -------------------------------------------------------------------------------------------------------


def page(verdicts: list[Verdict], model_types: dict[str, list[str]]) -> str:
    """docs/models.md."""
    by_outcome: dict[str, list[Verdict]] = {"works": [], "refused": [], "not built": []}
    for verdict in verdicts:
        by_outcome[verdict.outcome].append(verdict)
    works, refused, not_built = by_outcome.values()
    lines = [
        "# Models",
        "",
        f"Written by `{COMMAND}` with Transformers {transformers.__version__}; do not edit. It walks the classes that",
        "`AutoModelForCausalLM`, `AutoModelForImageTextToText` and `AutoModelForMultimodalLM` know and builds each as",
        "small as it can, in float32 with random weights.",
        "",
        f"{len(works)} classes work, {len(refused)} are refused with the reason, and {len(not_built)} are not",
        "built by the script.",
        "",
        "## Works",
        "",
        "Tree decoding gives the tokens and leaves the cache of standard decoding, for one prompt and for two with",
        "padding, with winning branches that are not the first. The error is the largest difference between a logit",
        "of any node, the rejected ones included, and the same logit in a forward over that node's path alone.",
        "",
        "| class | model types | layers | attention | logit error |",
        "|---|---|---|---|---|",
        *(
            f"| `{verdict.name}` | {', '.join(model_types[verdict.name])} | {verdict.layers} | {verdict.attention} "
            f"| {verdict.error:.0e} |"
            for verdict in works
        ),
        "",
        "## Refused",
        "",
        "`generate()` raises this instead of decoding by tree, and works without `generation_strategy` as ever.",
        "",
        "| class | model types | layers | why |",
        "|---|---|---|---|",
        *(
            f"| `{verdict.name}` | {', '.join(model_types[verdict.name])} | {verdict.layers} "
            f"| {_cell(verdict.reason)} |"
            for verdict in refused
        ),
        "",
        "## Not built",
        "",
        "What the script cannot build or standard decoding cannot run on a text prompt, so that nothing is known.",
        "",
        "| class | model types | why |",
        "|---|---|---|",
        *(
            f"| `{verdict.name}` | {', '.join(model_types[verdict.name])} | {_cell(verdict.reason)} |"
            for verdict in not_built
        ),
        "",
    ]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def without_figures(text: str) -> str:
    """The page without the errors, which differ between machines."""
    return re.sub(r"\d+e[+-]\d+ \|$", "|", text, flags=re.MULTILINE)


def main(
    check: Annotated[bool, typer.Option(help="Compare with the page instead of writing it.")] = False,
    jobs: Annotated[int, typer.Option(help="Number of processes.")] = os.cpu_count() or 1,
    only: Annotated[str, typer.Option(help="Print the verdicts on the classes whose names contain this.")] = "",
) -> None:
    """Writes docs/models.md, or fails if it is stale or a class gives wrong tokens."""
    model_types = {name: types for name, types in architectures().items() if only in name}
    verdicts = []
    with get_context("fork").Pool(jobs, maxtasksperchild=16) as pool:
        results = [pool.apply_async(judge, item) for item in model_types.items()]
        for result in track(results, "Trying", disable=not sys.stderr.isatty()):
            verdicts.append(result.get())
            if only or verdicts[-1].outcome == "wrong":
                print(verdicts[-1], flush=True)
    accepted = [verdict for verdict in verdicts if verdict.outcome != "wrong"]
    if not only:
        text = page(accepted, model_types)
        if not check:
            PAGE.write_text(text, encoding="utf-8")
        elif without_figures(text) != without_figures(PAGE.read_text(encoding="utf-8")):
            raise SystemExit(f"{PAGE.name} is stale: run `{COMMAND}` and commit what it writes.")
    if len(accepted) < len(verdicts):
        raise SystemExit("Classes that are accepted give wrong output.")


if __name__ == "__main__":
    typer.run(main)
