"""`hf_ddtree.check`: the right verdict on configurations of published models, and the memory that a tree takes."""

from __future__ import annotations

import gc
import json
import logging
import re
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from helpers.families import make_config, make_model
from safetensors.torch import save_file
from transformers import AutoConfig, PreTrainedModel, Qwen3Config
from typer.testing import CliRunner

import hf_ddtree
from hf_ddtree.cli import app
from hf_ddtree.drafters import DFlashConfig, DFlashDraftModel
from hf_ddtree.interop.allocations import PeakMemory
from hf_ddtree.interop.versions import CACHE_KEY
from hf_ddtree.target.cache_rows import CommittedRows
from hf_ddtree.target.features import FeatureRecorder
from hf_ddtree.target.model import CachedModel
from hf_ddtree.target.preallocation import preallocate
from hf_ddtree.tree.draft_tree import DraftTree

CONFIGS = Path(__file__).parent / "configs"
PAIR = Path(hf_ddtree.__file__).parent / "demo_pair"
# Public values of each model; what it is loaded with, its attention implementation, and its layers.
SUPPORTED = {
    "Qwen3-8B": ("Qwen3ForCausalLM", "sdpa", {"full_attention": 36}),
    "Qwen3-Next-80B-A3B-Instruct": ("Qwen3NextForCausalLM", "sdpa", {"linear_attention": 36, "full_attention": 12}),
    "Qwen3.5-9B": ("Qwen3_5ForCausalLM", "sdpa", {"linear_attention": 24, "full_attention": 8}),
    "Llama-3.1-8B": ("LlamaForCausalLM", "sdpa", {"full_attention": 32}),
    "gemma-3-27b-it": ("Gemma3ForConditionalGeneration", "sdpa", {"sliding_attention": 52, "full_attention": 10}),
    "gpt-oss-20b": ("GptOssForCausalLM", "eager", {"sliding_attention": 12, "full_attention": 12}),
    "Mistral-7B-v0.1": ("MistralForCausalLM", "sdpa", {"sliding_attention": 32}),
    "DeepSeek-V3": ("DeepseekV3ForCausalLM", "sdpa", {"full_attention": 61}),
    "Olmo-Hybrid-7B": ("OlmoHybridForCausalLM", "sdpa", {"linear_attention": 24, "full_attention": 8}),
    "Nemotron-H-8B-Base-8K": (
        "NemotronHForCausalLM",
        "sdpa",
        {"linear_attention": 24, "mlp": 24, "full_attention": 4},
    ),
    "Phi-3-mini-128k-instruct": ("Phi3ForCausalLM", "sdpa", {"sliding_attention": 32}),
}
REFUSED = {
    "MiniMax-Text-01": ("keeps a state", {"MiniMaxLightningAttention": 70, "MiniMaxAttention": 10}),
    "rwkv-4-7b-pile": ("keeps a state", {"RwkvSelfAttention": 32}),
    "flan-t5-xl": ("encoder-decoder", {"T5Block": 24}),
    "bloom-7b1": ("positions", {"BloomAttention": 30}),
    "gpt-neo-2.7B": ("by their index", {"GPTNeoAttention": 32}),
}
NODES, CONTEXT = 65, 4096


def published(name: str, folder: Path) -> str:
    """A folder with the model's configuration and nothing else."""
    (folder / "config.json").write_text((CONFIGS / f"{name}.json").read_text())
    return str(folder)


@pytest.fixture(scope="module")
def check_published(tmp_path_factory):
    """What `check` says of a published model, asked once."""

    @cache
    def check(name: str) -> hf_ddtree.CheckReport:
        folder = published(name, tmp_path_factory.mktemp(name))
        return hf_ddtree.check(folder, tree_budget=NODES - 1, context_length=CONTEXT)

    return check


@pytest.mark.parametrize("name", SUPPORTED)
def test_published_models_that_work(name, check_published):
    model_class, attention, layers = SUPPORTED[name]
    report = check_published(name)
    assert report.supported and report.reason is None
    assert (report.model_class, report.attn_implementation) == (model_class, attention)
    assert {layer.kind: layer.count for layer in report.layers} == layers
    assert f'attn_implementation="{attention}"' in report.call and report.model in report.call
    compile(report.call, "call", "exec")
    json.dumps(report.to_dict())
    assert not report.notes or name == "Phi-3-mini-128k-instruct"


@pytest.mark.parametrize("name", REFUSED)
def test_published_models_that_do_not(name, check_published):
    reason, modules = REFUSED[name]
    report = check_published(name)
    assert not report.supported and reason in report.reason
    assert report.memory is None and report.call is None
    assert {layer.modules[0]: layer.count for layer in report.layers} == modules


# What tree attention adds to scores, in two bytes, for each query head of a group; rows begin at multiples of eight.
PACKED = 2 * NODES * -(-(CONTEXT + NODES) // 8) * 8
# Worked out by hand from the values in the configurations, with two bytes a number but four in recurrences.
BY_HAND = {
    # 36 layers with keys and values of 8 heads of 128; a mask of bytes and the ancestor mask.
    "Qwen3-8B": {
        "keys_and_values": 36 * 2 * 8 * 128 * 2 * NODES,
        "recurrent": 0,
        "logits": 151936 * 2 * NODES,
        "masks": NODES * (CONTEXT + NODES) + NODES * NODES + 4 * PACKED,
    },
    # 12 layers of 2 heads of 256. The other 36: the convolution's inputs, and for each of 32 heads the decay, the
    # updates (128), and for each of 16 the keys (128). The ancestor mask also as two matrices of four bytes.
    "Qwen3-Next-80B-A3B-Instruct": {
        "keys_and_values": 12 * 2 * 2 * 256 * 2 * NODES,
        "recurrent": 36 * NODES * ((2 * 16 + 32) * 128 * 2 + (32 * (1 + 128) + 16 * 128) * 4),
        "logits": 151936 * 2 * NODES,
        "masks": NODES * (CONTEXT + NODES) + NODES * NODES + 2 * 4 * NODES * (NODES + 1) + 8 * PACKED,
    },
    # Masks that are added to scores, in two bytes; the sliding ones see 127 cached keys.
    "gpt-oss-20b": {
        "keys_and_values": 24 * 2 * 8 * 64 * 2 * NODES,
        "recurrent": 0,
        "logits": 201088 * 2 * NODES,
        "masks": (1 + 8) * 2 * NODES * (CONTEXT + NODES + 127 + NODES) + NODES * NODES,
    },
}


@pytest.mark.parametrize("name", BY_HAND)
def test_memory_worked_out_by_hand(name, check_published):
    report = check_published(name)
    for part, expected in BY_HAND[name].items():
        assert getattr(report.memory, part) == pytest.approx(expected, rel=0.02), part
    assert report.memory.total == pytest.approx(sum(BY_HAND[name].values()), rel=0.02)
    assert report.memory.per_node == report.memory.total // NODES


@pytest.mark.core
@pytest.mark.parametrize(
    ("budget", "attention", "length"),
    [(16, "sdpa", 300), (64, "sdpa", 300), (16, "eager", 300), (64, "eager", 300), (64, "sdpa", 2000)],
)
def test_memory_is_what_the_shipped_pair_takes(budget, attention, length):
    """Against all memory of tensors that is there after a verification and was not there before, and the masks; and
    against the most that is there in a round."""
    model, drafter, _ = hf_ddtree.load_demo()
    model.set_attn_implementation(attention)
    report = hf_ddtree.check(model, drafter, tree_budget=budget, context_length=length)
    assert report.drafter_fits

    tokens = torch.randint(3, 500, (1, length), generator=torch.Generator().manual_seed(0))
    masks = []
    with torch.no_grad():
        filled = model(tokens, use_cache=True)[CACHE_KEY]
        context = sum(
            value.nbytes
            for layer in filled.layers
            for part in vars(layer).values()
            for value in (part.values() if isinstance(part, dict) else [part])
            if isinstance(value, torch.Tensor)
        )
        positions = torch.arange(length + 1)[None]
        rows = CommittedRows(length, {"position_ids": positions}, 1, model.device)
        recorder = FeatureRecorder(model, drafter.config.target_layer_ids)
        tree = DraftTree.from_parents(list(range(budget + 1)), [-1] + [0] * budget)
        kwargs = {CACHE_KEY: filled, "use_cache": True, "position_ids": positions, "attention_mask": None}
        hook = model.register_forward_pre_hook(lambda *call: masks.append(call[2]["attention_mask"]), with_kwargs=True)
        cached_model = CachedModel(model, kwargs, rows, recorder)
        with cached_model.recording_past():
            before = allocated_bytes()
            verification = cached_model.verify([tree])
            hook.remove()
            mask = next(mask for mask in masks.pop().values() if mask is not None)
            measured = allocated_bytes() - before
            cached_model.commit(verification.tree_pass, [[0]])
            preallocate(filled)
            for _ in range(2):
                with PeakMemory() as memory:
                    cached_model.commit(cached_model.verify([tree]).tree_pass, [[0]])
    assert verification.outputs.logits.shape[1] == budget + 1
    assert mask.nbytes == (budget + 1) * (length + budget + 1) * (1 if attention == "sdpa" else 4)
    assert report.memory.total == pytest.approx(measured, rel=0.15)
    assert report.memory.features == verification.features.nbytes
    assert report.memory.logits == verification.outputs.logits.nbytes
    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    assert report.memory.peak == pytest.approx(weights + context + memory.peak, rel=0.15)


def allocated_bytes() -> int:
    """Bytes of all memory on the CPU that tensors lie in; those of a compiler's traces lie in none."""
    gc.collect()
    tensors = [value for value in gc.get_objects() if type(value) in (torch.Tensor, torch.nn.Parameter)]
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors
        if tensor.device.type == "cpu"
    }
    return sum(storages.values())


def test_a_loaded_model_with_attention_that_cannot_mask_a_tree():
    model = make_model("llama", "eager")
    model.config._attn_implementation = "paged|eager"
    try:
        report = hf_ddtree.check(model)
    finally:
        model.config._attn_implementation = "eager"
    assert not report.supported and "paged|eager" in report.reason
    assert report.attn_implementation == "sdpa"
    assert model.config._attn_implementation == "eager"


@pytest.mark.core
def test_a_configuration_stays_as_it_is():
    config = make_config("qwen3_next")
    before = config.to_dict()
    report = hf_ddtree.check(config)
    assert report.supported and report.family == "qwen3_next"
    assert config.to_dict() == before


@pytest.mark.core
def test_drafters(tmp_path):
    target = str(PAIR / "target")
    assert hf_ddtree.check(target, str(PAIR / "drafter")).drafter_fits is True
    report = hf_ddtree.check(make_config("qwen3_5"), PAIR / "drafter")
    assert report.supported and report.drafter_fits is False
    assert "hidden_size" in report.drafter_reason and report.call is None

    config = DFlashConfig(
        **{**Qwen3Config(hidden_size=32, num_hidden_layers=1, vocab_size=64).to_dict(), "model_type": "x"},
        target_layer_ids=[0, 2],
        mask_token_id=1,
        num_target_layers=3,
    )
    with torch.device("meta"):
        loaded = DFlashDraftModel(config)
    report = hf_ddtree.check(make_config("llama"), loaded, tree_budget=4)
    assert report.drafter_fits and report.memory.features == 5 * 2 * 32 * 4
    assert "load_drafter" not in report.call and "from_pretrained" not in report.call  # neither has a name
    report = hf_ddtree.check(make_model("llama", "sdpa"), loaded)
    assert report.call.splitlines()[1:] == [
        'inputs = tokenizer("A prompt of yours", return_tensors="pt").to(model.device)',
        'out = model.generate(**inputs, assistant_model=drafter, generation_strategy="ddtree", tree_budget="auto", '
        "max_new_tokens=128)",
        "print(tokenizer.decode(out[0], skip_special_tokens=True))",
    ]

    for drafter in (PAIR / "drafter", loaded, config):
        report = hf_ddtree.check(drafter)
        assert not report.supported and report.reason.startswith("It is a drafter.")

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertModel"]}))
    report = hf_ddtree.check(target, tmp_path)
    assert report.drafter_fits is False and "is no drafter" in report.drafter_reason


def test_without_a_drafter_it_says_what_can_draft(tmp_path):
    report = hf_ddtree.check(published("Qwen3-8B", tmp_path))
    assert 'tree_lookup=True, generation_strategy="ddtree", tree_budget="auto"' in report.call
    assert [bool(suggestion.call) for suggestion in report.suggestions] == [False, True, False]
    assert "Qwen/Qwen3-0.6B" in report.suggestions[1].call
    report = hf_ddtree.check(make_config("llama"))
    assert "SMALL_MODEL" in report.suggestions[1].call and "SMALL_MODEL" in report.suggestions[1].what
    assert not hf_ddtree.check(PAIR / "target", PAIR / "drafter").suggestions


@pytest.mark.core
@pytest.mark.parametrize("has_drafter", [False, True])
def test_the_call_runs_as_it_is_printed(has_drafter, tmp_path):
    shutil.copytree(PAIR, tmp_path / "pair")
    config = tmp_path / "pair" / "target" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "float32"}))
    drafter = ["--drafter", tmp_path / "pair" / "drafter"] if has_drafter else []
    output = TestCommand().run(tmp_path / "pair" / "target", *drafter).stdout
    code = output[output.index("import hf_ddtree") :].split("\nA drafter gains more")[0]
    names = {}
    exec(code, names)
    plain = names["model"].generate(**names["inputs"], max_new_tokens=128)
    assert torch.equal(names["out"], plain) and ("drafter" in names) == has_drafter


@pytest.mark.parametrize(
    "names, fits, reason",
    [
        (["model.embed_tokens.weight", "mtp.fc.weight"], True, None),
        (["model.embed_tokens.weight"], False, "holds no `mtp.*` tensors"),
        (None, None, "as its family does, is not known"),
    ],
)
def test_multi_token_prediction_layers_from_the_index_alone(names, fits, reason, tmp_path):
    folder = published("Qwen3-Next-80B-A3B-Instruct", tmp_path)
    if names is not None:
        index = {"metadata": {}, "weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    report = hf_ddtree.check(folder, "mtp")
    assert report.drafter_fits is fits
    assert report.drafter_reason is None if reason is None else reason in report.drafter_reason
    assert (report.call is None) == (fits is False)
    calls = [suggestion.call for suggestion in hf_ddtree.check(folder).suggestions]
    assert ("drafter = hf_ddtree.load_drafter('mtp', target_model=model)" in calls) == (fits is not False)
    if fits:
        assert hf_ddtree.check(folder, folder).drafter_fits


def test_multi_token_prediction_layers_from_the_header_of_one_file(tmp_path):
    folder = published("Qwen3.5-9B", tmp_path)
    for name, fits in (("mtp.fc.weight", True), ("model.norm.weight", False)):
        save_file({name: torch.zeros(1)}, tmp_path / "model.safetensors")
        assert hf_ddtree.check(folder, "mtp").drafter_fits is fits


def test_what_loading_refuses_by_the_configuration_does_not_fit():
    model = make_model("llama", "sdpa")
    with pytest.raises(ValueError) as raised:
        hf_ddtree.load_drafter("mtp", target_model=model)
    report = hf_ddtree.check(model, "mtp")
    assert report.drafter_fits is False and report.drafter_reason == str(raised.value)
    result = TestCommand().run("demo", "--drafter", "mtp")
    assert result.exit_code == 1 and "does not fit" in result.output and "load_drafter" not in result.output


@pytest.mark.parametrize("is_loaded", [True, False])
def test_a_drafter_as_large_as_its_target_cannot_pay(is_loaded, tmp_path):
    target = make_model("llama", "sdpa")
    drafter = target
    if not is_loaded:
        target.save_pretrained(tmp_path)
        drafter = tmp_path
    (note,) = hf_ddtree.check(target, drafter).notes
    assert "makes decoding slower, however well it drafts" in note
    assert not hf_ddtree.check(PAIR / "target", PAIR / "drafter").notes


def test_models_that_transformers_does_not_know(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nothing-like-it"}))
    report = hf_ddtree.check(tmp_path)
    assert not report.supported and "does not know" in report.reason
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "siglip_vision_model"}))
    report = hf_ddtree.check(tmp_path)
    assert not report.supported and "no class that generates text" in report.reason
    with pytest.raises(OSError):
        hf_ddtree.check(tmp_path / "missing")
    with pytest.raises(TypeError, match="`model` must be"):
        hf_ddtree.check(3)
    with pytest.raises(ValueError, match="context_length"):
        hf_ddtree.check(make_config("llama"), context_length=0)


@pytest.mark.parametrize(
    "quantization, note",
    [
        ({"load_in_8bit": True}, "outlier columns"),
        ({"load_in_8bit": True, "llm_int8_threshold": 0.0}, None),
        ({"load_in_4bit": True}, "in_proj_a, in_proj_b"),
        ({"load_in_4bit": True, "llm_int8_skip_modules": ["in_proj_a", "in_proj_b", "lm_head"]}, None),
    ],
)
def test_notes_on_quantization(quantization, note):
    config = AutoConfig.from_pretrained(PAIR / "target")
    config.quantization_config = {"quant_method": "bitsandbytes", **quantization}
    notes = hf_ddtree.check(config).notes
    assert len(notes) == (note is not None)
    assert note is None or note in notes[0]


def test_a_model_that_does_not_run_without_weights(monkeypatch):
    """What cannot be told is not taken for a no."""

    def ask_for_values(*args, **kwargs):
        return torch.ones(1, device="meta").item()

    monkeypatch.setattr(CachedModel, "verify", ask_for_values)
    report = hf_ddtree.check(make_config("llama"))
    assert report.supported and report.memory is None and report.call is not None
    assert "memory is not known" in report.notes[0]


def test_no_weights_are_read_and_none_are_made(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("Weights were read.")

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", refuse)
    before = allocated_bytes()
    assert hf_ddtree.check(PAIR / "target", PAIR / "drafter").supported
    assert allocated_bytes() - before < 2**20


class TestCommand:
    def run(self, *arguments, columns=120):
        before = logging.getLogger("transformers").level
        try:
            return CliRunner().invoke(app, ["check", *map(str, arguments)], env={"COLUMNS": str(columns)})
        finally:
            logging.getLogger("transformers").setLevel(before)

    def test_table(self):
        result = self.run(PAIR / "target", "--drafter", PAIR / "drafter", "--tree-budget", "64")
        assert result.exit_code == 0, result.output
        for text in ("supported", "9 linear_attention (Qwen3_5GatedDeltaNet)", "64 nodes", "fits", "load_drafter"):
            assert text in result.output
        # To be pasted.
        assert hf_ddtree.check(PAIR / "target", PAIR / "drafter", tree_budget=64).call in result.output

    def test_without_a_drafter(self):
        result = self.run(PAIR / "target", columns=80)
        assert result.exit_code == 0, result.output
        assert hf_ddtree.check(PAIR / "target").call in result.output
        assert "load_drafter('SMALL_MODEL', target_model=model)" in result.output

    def test_json(self):
        result = self.run(PAIR / "target", "--json", "--tree-budget", "64")
        report = json.loads(result.stdout)
        assert report == json.loads(json.dumps(hf_ddtree.check(PAIR / "target", tree_budget=64).to_dict()))
        assert report["memory"]["nodes"] == 65 and report["memory"]["total"] > 64 * report["memory"]["per_node"]

    def test_not_supported(self, tmp_path):
        result = self.run(published("rwkv-4-7b-pile", tmp_path))
        assert result.exit_code == 1 and "not supported" in result.output and "RwkvSelfAttention" in result.output
        assert self.run(tmp_path, "--json").exit_code == 1

    def test_a_drafter_that_does_not_fit(self, tmp_path):
        result = self.run(published("Mistral-7B-v0.1", tmp_path), "--drafter", PAIR / "drafter")
        assert result.exit_code == 1 and "does not fit" in result.output and "generate(" not in result.output

    def test_nothing_there(self, tmp_path):
        result = self.run(tmp_path / "missing")
        assert result.exit_code == 2 and "Invalid value for TARGET" in result.output
        result = self.run("demo", "--drafter", tmp_path / "missing")
        assert result.exit_code == 2 and "Invalid value for --drafter" in result.output

    def test_a_drafter_in_place_of_a_target(self, tmp_path):
        result = self.run(PAIR / "drafter")
        assert result.exit_code == 2 and "is a drafter. Name its target first" in " ".join(result.output.split())
        # As z-lab publishes them, with the type of the target's family.
        config = json.loads((CONFIGS / "Qwen3-8B.json").read_text()) | {"architectures": ["DFlashDraftModel"]}
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert self.run(tmp_path).exit_code == 2

    @pytest.mark.parametrize("arguments, nodes", [([], "64 nodes and the root"), (["16"], "16 nodes and the root")])
    def test_the_demo(self, arguments, nodes):
        result = self.run("demo", *(["--tree-budget", *arguments] if arguments else []), columns=80)
        assert result.exit_code == 0, result.output
        assert nodes in result.output and f"{PAIR / 'drafter'}" in result.output.replace("\n", "")
        assert re.search(r"\d MiB  in all, [\d.]+ KiB per node +│", result.output)
        budget = arguments[0] if arguments else '"auto"'
        assert f"tree_budget={budget}, " in result.output

    @pytest.mark.parametrize("value", ["0", "-1", "many", "1.5"])
    def test_budgets_that_are_none(self, value):
        result = self.run("demo", f"--tree-budget={value}")
        assert result.exit_code == 2 and "Invalid value for '--tree-budget'" in result.output
