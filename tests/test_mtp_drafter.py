"""A target's own multi-token-prediction layers as drafter: loading, the tree against a plain step, the same tokens."""

from __future__ import annotations

import functools
import itertools
import json
import math

import pytest
import torch
import transformers
from helpers.families import EXPERTS, MROPE, SIZES, VOCAB_SIZE, first_implementation, make_model
from helpers.generator_grid import CALLS, check_call, random_tokens
from helpers.side_by_side import make_prompt
from safetensors.torch import save_file
from torch.nn import functional as F
from transformers.modeling_layers import MtpModel

import hf_ddtree
from hf_ddtree import DDTreeConfig, DraftContext, MTPTreeCandidateGenerator
from hf_ddtree.candidate_generators import mtp
from hf_ddtree.candidate_generators.levelwise import DEFAULT_DRAFT_LENGTH
from hf_ddtree.drafters.mtp.model import MTPDrafter
from hf_ddtree.target.features import FeatureRecorder

FAMILIES = ("qwen3_5", "qwen3_next", "qwen3_5_moe")
H, HEADS, KV_HEADS, HEAD_DIM = (
    SIZES[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
)


def model_of(family):
    return make_model(family, first_implementation(family))


def mtp_tensors(family, seed=0):
    """Random weights in the published layout."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "pre_fc_norm_embedding": (H,),
        "pre_fc_norm_hidden": (H,),
        "fc": (H, 2 * H),
        "norm": (H,),
        "layers.0.input_layernorm": (H,),
        "layers.0.post_attention_layernorm": (H,),
        "layers.0.self_attn.q_proj": (2 * HEADS * HEAD_DIM, H),
        "layers.0.self_attn.k_proj": (KV_HEADS * HEAD_DIM, H),
        "layers.0.self_attn.v_proj": (KV_HEADS * HEAD_DIM, H),
        "layers.0.self_attn.o_proj": (H, HEADS * HEAD_DIM),
        "layers.0.self_attn.q_norm": (HEAD_DIM,),
        "layers.0.self_attn.k_norm": (HEAD_DIM,),
    }
    if family == "qwen3_5":
        shapes |= mlp_shapes("layers.0.mlp", SIZES["intermediate_size"])
    else:
        shapes |= mlp_shapes("layers.0.mlp.shared_expert", EXPERTS["shared_expert_intermediate_size"])
        shapes |= {"layers.0.mlp.gate": (EXPERTS["num_experts"], H), "layers.0.mlp.shared_expert_gate": (1, H)}
        for expert in range(EXPERTS["num_experts"]):
            shapes |= mlp_shapes(f"layers.0.mlp.experts.{expert}", EXPERTS["moe_intermediate_size"])
    return {
        f"mtp.{name}.weight": torch.randn(shape, generator=generator) * (0.3 if len(shape) == 1 else shape[1] ** -0.5)
        for name, shape in shapes.items()
    }


def mlp_shapes(name, size):
    return {f"{name}.gate_proj": (size, H), f"{name}.up_proj": (size, H), f"{name}.down_proj": (H, size)}


def stack_experts(tensors):
    """The layout with all experts of a matrix in one tensor."""
    prefix = "mtp.layers.0.mlp.experts"
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}

    def stack(part):
        return torch.stack([tensors[f"{prefix}.{expert}.{part}.weight"] for expert in range(EXPERTS["num_experts"])])

    kept[f"{prefix}.gate_up_proj"] = torch.cat((stack("gate_proj"), stack("up_proj")), dim=1)
    kept[f"{prefix}.down_proj"] = stack("down_proj")
    return kept


def load_target(folder, family, tensors, sharded=True):
    """A target whose checkpoint holds the tensors."""
    model = model_of(family)
    model.save_pretrained(folder)
    if sharded:
        save_file(tensors, folder / "mtp.safetensors", metadata={"format": "pt"})
        weight_map = dict.fromkeys(model.state_dict(), "model.safetensors")
        weight_map |= dict.fromkeys(tensors, "mtp.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    else:
        save_file({**model.state_dict(), **tensors}, folder / "model.safetensors", metadata={"format": "pt"})
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """For each family the target and its drafter, made once."""

    @functools.cache
    def make(family):
        target = load_target(tmp_path_factory.mktemp(family), family, mtp_tensors(family), family == "qwen3_5")
        return target, hf_ddtree.load_drafter("mtp", target_model=target)

    return make


# --- one step, written out ------------------------------------------------------------------------------------------


def norm(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (1 + weight)


def mlp(x, tensors, name):
    gate, up, down = (tensors[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def rotate(x, config):
    parameters = config.rope_parameters
    size = int(HEAD_DIM * parameters.get("partial_rotary_factor", 1.0))
    angles = torch.arange(len(x))[:, None] * parameters["rope_theta"] ** (-torch.arange(0, size, 2) / size)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second, rest = x[..., : size // 2], x[..., size // 2 : size], x[..., size:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def run_layer(tensors, config, hidden_states, embeddings):
    """The layer's normalised outputs for all pairs, `(length, hidden_size)`."""
    weights = {name.removeprefix("mtp."): tensor for name, tensor in tensors.items()}
    of_layer = {name.removeprefix("layers.0."): tensor for name, tensor in weights.items()}
    eps, length = config.rms_norm_eps, len(hidden_states)
    normed = (
        norm(embeddings, weights["pre_fc_norm_embedding.weight"], eps),
        norm(hidden_states, weights["pre_fc_norm_hidden.weight"], eps),
    )
    x = torch.cat(normed, dim=-1) @ weights["fc.weight"].T
    y = norm(x, of_layer["input_layernorm.weight"], eps)
    query, gate = (y @ of_layer["self_attn.q_proj.weight"].T).view(length, HEADS, 2 * HEAD_DIM).chunk(2, dim=-1)
    key, value = (
        (y @ of_layer[f"self_attn.{part}_proj.weight"].T).view(length, KV_HEADS, HEAD_DIM) for part in ("k", "v")
    )
    query = rotate(norm(query, of_layer["self_attn.q_norm.weight"], eps), config)
    key = rotate(norm(key, of_layer["self_attn.k_norm.weight"], eps), config)
    key, value = (part.repeat_interleave(HEADS // KV_HEADS, dim=1) for part in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(HEAD_DIM)
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value) * gate.sigmoid()
    x = x + attended.reshape(length, -1) @ of_layer["self_attn.o_proj.weight"].T
    y = norm(x, of_layer["post_attention_layernorm.weight"], eps)
    if "mlp.gate.weight" not in of_layer:
        x = x + mlp(y, of_layer, "mlp")
    else:
        routed = (y @ of_layer["mlp.gate.weight"].T).softmax(-1).topk(config.num_experts_per_tok)
        chosen = routed.values / routed.values.sum(-1, keepdim=True)
        outputs = torch.stack([mlp(y, of_layer, f"mlp.experts.{expert}") for expert in range(config.num_experts)], 1)
        picked = outputs.gather(1, routed.indices[..., None].expand(-1, -1, H))
        shared = mlp(y, of_layer, "mlp.shared_expert") * (y @ of_layer["mlp.shared_expert_gate.weight"].T).sigmoid()
        x = x + (picked * chosen[..., None]).sum(1) + shared
    return norm(x, weights["norm.weight"], eps)


@torch.no_grad()
def log_probs_after(target, tensors, tokens, drafted):
    """What the layer says of each drafted token, given a sequence with its root and the drafted tokens before."""
    decoder, embed = target.get_decoder(), target.get_input_embeddings()
    states = list(decoder(torch.tensor([tokens[:-1]])).last_hidden_state[0])
    said = []
    for place, token in enumerate(drafted):
        fed = torch.tensor([*tokens[1:], *drafted[:place]])
        output = run_layer(tensors, target.config, torch.stack(states), embed(fed))[-1]
        said.append(float(target.lm_head(output).log_softmax(-1)[token]))
        states.append(output)
    return said


@pytest.mark.core
@pytest.mark.parametrize("family", FAMILIES)
def test_the_tree_against_a_plain_step(pair, family):
    """After a prompt, and after rounds in which tokens other than the drafted ones were taken."""
    (target, drafter), tensors = pair(family), mtp_tensors(family)
    config = DDTreeConfig(tree_shape="best_first", draft_length=3, tree_top_k=2)
    generator = MTPTreeCandidateGenerator(drafter, target, config)
    ids = random_tokens(4, (2, 15), VOCAB_SIZE)
    recorder = FeatureRecorder(target, generator.feature_layers)
    generator.start(ids[:, :0], 0)
    seen = 0
    for length in (9, 10, 14):
        with recorder.recording(), torch.no_grad():
            target(ids[:, : length - 1])
        features = recorder.take()[:, seen:]
        counts, seen = [length - 1 - seen] * 2, length - 1
        context = DraftContext(ids[:, :length], [length - 1] * 2, generator.reduce_features(features), counts)
        trees = generator.propose(context, 10)
        for tree, row in zip(trees, ids[:, :length].tolist()):
            assert tree.num_drafted == 10 and int(tree.depths.max()) >= 2
            for node in range(1, 11):
                said = log_probs_after(target, tensors, row, tree.tokens_of(tree.path(node))[1:])
                assert float(tree.log_probs[node]) == pytest.approx(sum(said), rel=1e-5, abs=1e-5)
    assert generator.num_forwards <= 9
    recorder.close()


@pytest.mark.core
@pytest.mark.parametrize("case", [(family, call) for family in FAMILIES for call in CALLS], ids=" - ".join)
def test_same_tokens(pair, case):
    family, call = case
    target, drafter = pair(family)
    index = list(CALLS).index(call) + FAMILIES.index(family)
    knobs = {"tree_budget": 8, "draft_length": 3, "tree_shape": ("best_first", "spine_first", "chain")[index % 3]}
    check_call(target, call, lambda model: {"assistant_model": drafter, **knobs})


@pytest.mark.parametrize("family", FAMILIES[:2])
def test_a_row_drafts_what_it_drafts_alone(pair, family, monkeypatch):
    """Rows apart and padded, prompts in pieces."""
    target, drafter = pair(family)
    ids = random_tokens(8, (3, 12), VOCAB_SIZE)
    mask = (torch.arange(12) >= torch.tensor([[0], [5], [2]])).long()
    arguments = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True, "pad_token_id": 0}
    arguments |= {"generation_strategy": "ddtree", "assistant_model": drafter, "return_trees": True, "tree_budget": 6}
    alone = []
    for row, is_token in zip(ids, mask.bool()):
        stats = target.generate(row[None, is_token], **arguments).ddtree_stats
        emitted = itertools.accumulate(stats.accepted_lengths, initial=1)
        # Near its end a row is not drafted for as deep as one that has more room.
        deep = [tree for (tree,), so_far in zip(stats.trees, emitted) if 20 - so_far > DEFAULT_DRAFT_LENGTH]
        assert len(deep) > 5
        alone.append([tree.token_ids.tolist() for tree in deep])
    monkeypatch.setattr(mtp, "TOKENS_AT_ONCE", 4)
    out = target.generate(ids * mask, attention_mask=mask, **arguments)
    for row, expected in enumerate(alone):
        got = [trees[row].token_ids.tolist() for trees in out.ddtree_stats.trees]
        assert got[: len(expected)] == expected


@pytest.mark.parametrize("num_layers", [1, 2])
def test_the_caches_grow_in_place(num_layers, monkeypatch):
    target, layers = transformers_pair(num_layers)
    places = []
    propose = MTPTreeCandidateGenerator.propose

    def watched(self, context, budget):
        trees = propose(self, context, budget)
        places.append([stream.cache.layers[0].keys.data_ptr() for stream in self.state.streams])
        return trees

    monkeypatch.setattr(MTPTreeCandidateGenerator, "propose", watched)
    arguments = {"max_new_tokens": 60, "do_sample": False}
    target.generate(make_prompt(), **arguments, generation_strategy="ddtree", assistant_model=layers, tree_budget=8)
    # The first token of a layer finds nothing to be written behind.
    assert len(places) > 15 and len(places[1]) == num_layers and all(now == places[1] for now in places[1:])


@pytest.mark.parametrize("at_once", [4, 512])
@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("batch", [1, 2])
def test_rows_of_padding_alone(num_layers, at_once, batch, monkeypatch):
    """Nothing is known of their first root, as an empty prompt in a batch has no token before it."""
    monkeypatch.setattr(mtp, "TOKENS_AT_ONCE", at_once)
    target, layers = transformers_pair(num_layers)
    ids = random_tokens(8, (batch, 9), VOCAB_SIZE)
    mask = torch.ones_like(ids)
    mask[0] = 0
    arguments = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    plain = target.generate(ids * mask, **arguments)
    tree = target.generate(ids * mask, **arguments, generation_strategy="ddtree", assistant_model=layers)
    assert tree.tolist() == plain.tolist()


def test_training_mode():
    target, layers = transformers_pair(1)
    with pytest.raises(ValueError, match="MTP layers, is in training mode"):
        target.generate(make_prompt(), generation_strategy="ddtree", assistant_model=layers.train(), max_new_tokens=4)


def transformers_pair(num_layers):
    """A target and its layers of a kind that Transformers loads."""
    sizes = {**SIZES, **EXPERTS, "num_hidden_layers": 2, "num_nextn_predict_layers": num_layers, "n_routed_experts": 4}
    sizes |= {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
    with torch.random.fork_rng():
        torch.manual_seed(1)
        target = transformers.Glm4MoeForCausalLM(transformers.Glm4MoeConfig(**sizes)).eval()
        layers = MtpModel(target, num_layers).eval()
        for parameter in [*target.parameters(), *layers.layers.parameters()]:
            if parameter.ndim > 1:
                parameter.data.normal_(std=1.2 / math.sqrt(parameter.shape[-1]))
    return target, layers


@pytest.mark.core
@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_what_transformers_drafts(num_layers, monkeypatch):
    """Layers that Transformers loads: the chain holds the tokens that `use_mtp` drafts."""
    target, layers = transformers_pair(num_layers)
    monkeypatch.setattr(MtpModel, "from_pretrained", classmethod(lambda cls, *args, **kwargs: layers))
    drafted = []
    generator_class = transformers.generation.candidate_generator.MTPCandidateGenerator
    get_candidates = generator_class.get_candidates

    def recording(self, input_ids, *args, **kwargs):
        candidates, logits = get_candidates(self, input_ids, *args, **kwargs)
        drafted.append(candidates[0, input_ids.shape[1] - 1 :].tolist())
        return candidates, logits

    monkeypatch.setattr(generator_class, "get_candidates", recording)
    arguments = {"max_new_tokens": 24, "do_sample": False}
    native = target.generate(make_prompt(), **arguments, use_mtp=True)
    by_chain = {"tree_shape": "chain", "tree_budget": 16, "return_trees": True, "return_dict_in_generate": True}
    for drafter in (layers, hf_ddtree.load_drafter("mtp", target_model=loaded_from(target, "here"))):
        out = target.generate(
            make_prompt(),
            **arguments,
            **by_chain,
            generation_strategy="ddtree",
            assistant_model=drafter,
            draft_length=num_layers,
        )
        assert out.sequences.tolist() == native.tolist()
        got = [tree.token_ids.tolist() for (tree,) in out.ddtree_stats.trees]
        assert got[:-num_layers] == drafted[1:][: len(got) - num_layers]
        assert len(got) > 10
    tree = target.generate(make_prompt(), **arguments, generation_strategy="ddtree", assistant_model=layers)
    assert tree.tolist() == native.tolist()


def loaded_from(target, name):
    target.config._name_or_path = name
    return target


# --- loading --------------------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize(("family", "sharded", "stacked"), [("qwen3_5", False, False), ("qwen3_next", True, True)])
def test_load(tmp_path, family, sharded, stacked):
    tensors = mtp_tensors(family)
    target = load_target(tmp_path, family, stack_experts(tensors) if stacked else tensors, sharded)
    for drafter in (
        hf_ddtree.load_drafter("mtp", target_model=target),
        hf_ddtree.load_drafter(tmp_path, target_model=target),
        hf_ddtree.load_drafter(str(tmp_path), target_model=model_of(family)),
    ):
        assert type(drafter) is MTPDrafter and not drafter.training and drafter.dtype == torch.float32
        state = drafter.layers[0].state_dict()
        assert torch.equal(state["eh_proj.weight"], tensors["mtp.fc.weight"])
        assert torch.equal(state["enorm.weight"], tensors["mtp.pre_fc_norm_embedding.weight"])
        assert torch.equal(state["post_norm.weight"], tensors["mtp.norm.weight"])
        if stacked:
            gate = tensors["mtp.layers.0.mlp.experts.3.gate_proj.weight"]
            assert torch.equal(state["mtp_block.mlp.experts.gate_up_proj"][3, : len(gate)], gate)
    assert hf_ddtree.load_drafter("mtp", target_model=target, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_load_for_a_multimodal_target(tmp_path):
    text = {**SIZES, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    text |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8}
    text |= {"linear_value_head_dim": 8, "rope_parameters": MROPE}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": H}
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision)
    target = transformers.Qwen3_5ForConditionalGeneration(config).eval()
    save_file(mtp_tensors("qwen3_5"), tmp_path / "model.safetensors", metadata={"format": "pt"})
    drafter = hf_ddtree.load_drafter("mtp", target_model=loaded_from(target, str(tmp_path)))
    arguments = {"max_new_tokens": 12, "do_sample": False}
    plain = target.generate(make_prompt(), **arguments)
    tree = target.generate(make_prompt(), **arguments, generation_strategy="ddtree", assistant_model=drafter)
    assert tree.tolist() == plain.tolist()


def without(tensors, name):
    return {key: tensor for key, tensor in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: {"mtp_": tensors["mtp.fc.weight"]}, "holds no `mtp.*` tensors"),
        (lambda tensors: without(tensors, "mtp.norm.weight"), "lacks 'post_norm.weight' .1 missing, 0 unknown"),
        (lambda tensors: tensors | {"mtp.fc.weight_scale_inv": torch.ones(1)}, "holds 'eh_proj.weight_scale_inv'"),
        (lambda tensors: tensors | {"mtp.fc.weight": torch.ones(3, 3)}, "has another 'eh_proj.weight'"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path, change, message):
    save_file(change(mtp_tensors("qwen3_5")), tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = model_of("qwen3_5").config
    target = transformers.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ValueError, match=message):
        hf_ddtree.load_drafter("mtp", target_model=loaded_from(target, str(tmp_path)))


def test_targets_without_mtp_layers():
    with pytest.raises(ValueError, match="no target is given"):
        hf_ddtree.load_drafter("mtp")
    fresh = transformers.AutoModelForCausalLM.from_config(model_of("qwen3_5").config).eval()
    with pytest.raises(ValueError, match="was not loaded from a checkpoint"):
        hf_ddtree.load_drafter("mtp", target_model=loaded_from(fresh, ""))
    llama = transformers.AutoModelForCausalLM.from_config(model_of("llama").config).eval()
    with pytest.raises(ValueError, match="a LlamaForCausalLM, has no MTP layers"):
        hf_ddtree.load_drafter("mtp", target_model=loaded_from(llama, "somewhere"))


def test_drafter_of_another_target(pair):
    with pytest.raises(ValueError, match="'qwen3_5_text'.*the target of 'llama'"):
        model_of("llama").generate(
            make_prompt(), generation_strategy="ddtree", assistant_model=pair("qwen3_5")[1], max_new_tokens=4
        )


def test_state_of_another_kind(pair):
    target, drafter = pair("qwen3_5")
    with pytest.raises(TypeError, match="`draft_state` must be .* but is a `list`"):
        MTPTreeCandidateGenerator(drafter, target, state=[1])
