"""A target of 55 GB on two GPUs of 48 GB, its drafter next to the output head: the memory first, then the run.

    python examples/two_gpus.py                # the plan alone, for Qwen3.5-27B; no GPU needed
    python examples/two_gpus.py --target Qwen/Qwen3.5-27B --drafter z-lab/Qwen3.5-27B-DFlash --run
    python examples/two_gpus.py --cpu          # the same code, the pair that ships on CPU and disk

Needs Accelerate: pip install accelerate

Left to itself, `device_map="auto"` fills the first GPU with weights, and the cache finds no room. So what grows while
decoding is counted beforehand, and kept free by `max_memory`.
"""

import tempfile
from logging import getLogger
from typing import Annotated

import torch
import typer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, Qwen3_5TextConfig
from transformers.utils import logging

import hf_ddtree
from hf_ddtree.target.weights import execution_device

try:
    from accelerate import infer_auto_device_map, init_empty_weights
    from accelerate.utils import compute_module_sizes
except ModuleNotFoundError as error:
    raise SystemExit("This example needs Accelerate: pip install accelerate") from error

logging.set_verbosity_error()
logging.disable_progress_bar()
# Would warn of each GPU in the plan that is not there.
getLogger("accelerate.utils.modeling").setLevel("ERROR")

GB = 1e9
PROMPT_AT_ONCE = 2048

# Qwen3.5-27B, text only, from its published config.
QWEN3_5_27B = {
    "vocab_size": 248320,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "tie_word_embeddings": False,
}


def layer_bytes(config: PretrainedConfig, layer_type: str, context: int, budget: int, width: int) -> float:
    """What a layer keeps while decoding one sequence: its cache, and the nodes of a tree until the commit.

    Args:
        config: The text config.
        layer_type: An entry of its `layer_types`.
        context: Tokens of prompt and output together.
        budget: Nodes of a tree.
        width: Bytes of a number in the model's dtype.
    """
    if layer_type == "linear_attention":
        heads, key, value = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
        channels = 2 * config.linear_num_key_heads * key + heads * value
        state = 4 * heads * key * value + width * channels * (config.linear_conv_kernel_dim + budget)
        return state + 4 * budget * heads * (key + value + 1)  # the factors of `docs/architecture.md`, in float32
    kept = context if layer_type == "full_attention" else min(context, config.sliding_window)
    return 2 * width * config.num_key_value_heads * config.head_dim * (kept + budget)


def plan(
    config: PretrainedConfig,
    capacity: dict[int | str, float],
    drafter_bytes: float,
    context: int,
    budget: int,
    prompt_at_once: int,
    slack: float,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[dict[int | str, int], dict[str, int | str]]:
    """How much of each device weights may take, and where each module goes then; prints the sums it comes from.

    Args:
        config: The target's config.
        capacity: Bytes of each device, in the order in which layers are placed; the last one takes head and drafter.
        drafter_bytes: The drafter's weights and context.
        context: Tokens of prompt and output together.
        budget: Nodes of a tree.
        prompt_at_once: Prompt tokens that a forward takes (`prefill_chunk_size`).
        slack: Bytes of each device for the CUDA context, kernels' workspaces and fragmentation.
        dtype: Of the weights.

    Returns:
        `max_memory` and `device_map` for `from_pretrained`.
    """
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    text, width = config.get_text_config(), torch.finfo(dtype).bits // 8
    layer_types = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    kept = [layer_bytes(text, kind, context, budget, width) for kind in layer_types]
    sizes = compute_module_sizes(model, dtype=dtype)
    # Whatever the device: activations of a prefill, and a layer's cache a second time while it grows by being copied.
    fixed = slack + max(kept) + width * prompt_at_once * (4 * text.hidden_size + 3 * text.intermediate_size)
    at_the_end = (width + 4) * (budget + 1) * text.vocab_size + drafter_bytes  # logits, also as float32 scores
    fixed_of = {device: fixed + (at_the_end if device == list(capacity)[-1] else 0.0) for device in capacity}
    # A device that takes a layer's weights takes its cache and tree as well.
    with_cache = 1 + sum(kept) / sizes[""]
    max_memory = {device: int((room - fixed_of[device]) / with_cache) for device, room in capacity.items()}
    device_map = infer_auto_device_map(
        model, max_memory=dict(max_memory), no_split_module_classes=model._no_split_modules, dtype=dtype
    )
    print(f"weights {show(sizes[''])}, cache and tree {show(sum(kept))}, drafter {show(drafter_bytes)}")
    for device, room in capacity.items():
        here = [name for name, where in device_map.items() if where == device]
        cached = sum(kept[int(name.rpartition(".layers.")[2])] for name in here if ".layers." in name)
        parts = {"weights": sum(sizes[name] for name in here), "cache and tree": cached, "rest": fixed_of[device]}
        total = sum(parts.values())
        print(f"{device}: {', '.join(f'{name} {show(size)}' for name, size in parts.items())};", end=" ")
        print(f"together {show(total)} of {show(room)}")
        if total > room:
            raise SystemExit(f"Device {device} has too little memory. Choose a smaller context.")
    for device in dict.fromkeys(where for where in device_map.values() if where not in capacity):
        moved = sum(sizes[name] for name, where in device_map.items() if where == device)
        print(f"{device}: weights {show(moved)}")
    return max_memory, device_map


def show(size: float) -> str:
    return f"{size / GB:.1f} GB" if size >= 0.1 * GB else f"{size / 1e6:.2f} MB"


def drafter_size(hidden_size: int, context: int, layers: int = 5) -> float:
    """Bytes of a DFlash drafter in bfloat16, its context included: layers as wide as the target, no embeddings."""
    weights = layers * (4 * hidden_size**2 + 3 * hidden_size * 3 * hidden_size) + layers * hidden_size**2
    return 2 * (weights + layers * context * 2 * hidden_size // 4)


def main(
    target: Annotated[str | None, typer.Option(help="Folder or hub id.")] = None,
    drafter: Annotated[str | None, typer.Option(help="Folder or hub id of its drafter.")] = None,
    gigabytes: Annotated[float, typer.Option(help="Memory of each of the two GPUs, in 10^9 bytes.")] = 48.0,
    context: Annotated[int, typer.Option(help="Tokens of prompt and output together.")] = 32768,
    budget: Annotated[int, typer.Option(help="Nodes of a tree.")] = 64,
    prompt: str = "def read_lines(path):\n",
    run: Annotated[bool, typer.Option(help="Load and decode, after the plan.")] = False,
    cpu: Annotated[bool, typer.Option(help="Run with the shipped pair on CPU and disk.")] = False,
) -> None:
    if cpu:
        run_on_cpu_and_disk(prompt)
        return
    config = Qwen3_5TextConfig(**QWEN3_5_27B) if target is None else AutoConfig.from_pretrained(target)
    capacity: dict[int | str, float] = {0: gigabytes * GB, 1: gigabytes * GB}
    drafter_bytes = drafter_size(config.get_text_config().hidden_size, context)
    max_memory, device_map = plan(config, capacity, drafter_bytes, context, budget, PROMPT_AT_ONCE, slack=1.5 * GB)
    if not set(device_map.values()) <= set(capacity):
        raise SystemExit("The weights do not fit. Choose a smaller context, or let some of them go to the CPU.")
    print(f"It fits: max_memory={max_memory}")
    if run:
        if target is None or drafter is None:
            raise typer.BadParameter("Pass `--target` and `--drafter` to run.")
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16, device_map=device_map)
        draft_model = hf_ddtree.load_drafter(drafter, target_model=model)  # goes where the output head is
        tokenizer = AutoTokenizer.from_pretrained(target)
        print(tokenizer.decode(decode(model, draft_model, tokenizer, prompt, budget)[0]))


def decode(model, draft_model, tokenizer, prompt: str, budget: int) -> torch.Tensor:
    inputs = tokenizer(prompt, return_tensors="pt").to(execution_device(model))
    return model.generate(
        **inputs,
        max_new_tokens=64,
        do_sample=False,
        prefill_chunk_size=PROMPT_AT_ONCE,
        assistant_model=draft_model,
        generation_strategy="ddtree",
        tree_budget=budget,
    )


def run_on_cpu_and_disk(prompt: str) -> None:
    """Plans with the CPU's memory so small that half of the shipped target has to go to the disk, and decodes."""
    whole, drafter, tokenizer = hf_ddtree.load_demo()
    weights, of_drafter = (sum(parameter.nbytes for parameter in model.parameters()) for model in (whole, drafter))
    capacity = {"cpu": 0.8 * weights + of_drafter}
    _, device_map = plan(whole.config, capacity, of_drafter, 256, 16, 64, slack=0.0, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        whole.save_pretrained(f"{folder}/target")
        split = AutoModelForCausalLM.from_pretrained(
            f"{folder}/target", device_map=device_map, offload_folder=f"{folder}/offloaded"
        )
        by_tree = decode(split, drafter, tokenizer, prompt, 16)
        standard = whole.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=64, do_sample=False)
    print(f"{sum(parameter.is_meta for parameter in split.parameters())} tensors are on the disk.")
    assert torch.equal(by_tree, standard)
    print("The tokens are identical to standard decoding's on one device.")


if __name__ == "__main__":
    typer.run(main)
