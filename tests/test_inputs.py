"""Every form in which a prompt can be given, and every place where a setting can stand."""

import json
import subprocess
import sys

import pytest
import torch
import transformers
from helpers.families import LINEAR_ATTENTION, MROPE, SIZES, VOCAB_SIZE, first_implementation, make_model
from helpers.random_drafter import make_drafter
from helpers.same_output import assert_same_cache
from transformers import GenerationConfig, pipeline

import hf_ddtree
from hf_ddtree import DDTreeConfig
from hf_ddtree.interop.versions import CACHE_KEY
from hf_ddtree.registration import register
from hf_ddtree.target.features import FeatureRecorder
from hf_ddtree.target.inputs import ForwardInputs
from hf_ddtree.testing import OracleTreeCandidateGenerator

FAMILIES = ["llama", "gemma3", "qwen3_5"]
NEW_TOKENS = 24
LENGTH = 12


@pytest.fixture(autouse=True, scope="module")
def registered():
    register()


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return make_model(request.param, first_implementation(request.param))


@pytest.fixture(scope="module")
def pair():
    return hf_ddtree.load_demo()


def make_prompts(batch_size=1, length=LENGTH, seed=0):
    return torch.randint(1, VOCAB_SIZE, (batch_size, length), generator=torch.Generator().manual_seed(seed))


def check(model, *args, branches=True, **kwargs):
    """Standard decoding, an oracle and a drafter give the same tokens and caches; returns the former and the last."""
    arguments = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "return_dict_in_generate": True} | kwargs
    plain = model.generate(*args, **arguments)
    oracle = OracleTreeCandidateGenerator(plain.sequences, VOCAB_SIZE)
    for drafts in ({"candidate_generator": oracle}, {"assistant_model": make_drafter(model), "tree_budget": 40}):
        tree = model.generate(*args, **arguments, generation_strategy="ddtree", **drafts)
        assert tree.sequences.tolist() == plain.sequences.tolist()
        assert_same_cache(tree[CACHE_KEY], plain[CACHE_KEY])
        assert not branches or tree.ddtree_stats.tokens_per_forward > 1.2
        branches = False
    return plain, tree


@pytest.mark.parametrize("batch_size", [1, 2])
def test_the_arguments_of_each_forward_are_those_that_the_model_prepares(model, batch_size, monkeypatch):
    """They are prepared in the first round alone where the model does it as most do."""
    given, makes_inputs = [], ForwardInputs.of

    def recorded(self, batch, attention_mask=None):
        inputs = makes_inputs(self, batch, attention_mask)
        monkeypatch.setattr(self, "_prepared", None)
        given.append((inputs, makes_inputs(self, batch, attention_mask)))
        return inputs

    monkeypatch.setattr(ForwardInputs, "of", recorded)
    prompts = make_prompts(batch_size)
    options = {"max_new_tokens": NEW_TOKENS, "generation_strategy": "ddtree", "assistant_model": make_drafter(model)}
    mask = torch.ones_like(prompts)
    mask[-1, :3] = 0
    model.generate(prompts, attention_mask=mask, **options)
    assert len(given) > 3
    for inputs, prepared in given:
        assert {name for name, value in inputs.items() if value is not None} == {
            name for name, value in prepared.items() if value is not None
        }
        for name, value in prepared.items():
            assert torch.equal(inputs[name], value) if isinstance(value, torch.Tensor) else inputs[name] is value


# --- tokens, embeddings, positions, masks ---------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("batch_size", [1, 2])
def test_embeddings(model, batch_size):
    prompts = make_prompts(batch_size)
    mask = (torch.arange(LENGTH) >= 3 * torch.arange(batch_size)[:, None]).long()
    embeddings = model.get_input_embeddings()(prompts)
    plain, tree = check(model, inputs_embeds=embeddings, attention_mask=mask)
    assert plain.sequences.shape == (batch_size, NEW_TOKENS)
    given_both, _ = check(model, prompts, inputs_embeds=embeddings, attention_mask=mask)
    assert given_both.sequences.tolist() == torch.cat((prompts, plain.sequences), dim=1).tolist()
    # The drafter's context is the whole prompt, though its tokens are not known.
    state = tree.draft_state
    if batch_size == 1:
        assert state.cache.get_seq_length() + sum(state.num_features) == LENGTH + NEW_TOKENS - 1


@pytest.mark.core
def test_a_chat_that_begins_with_embeddings(model):
    """What follows is given as tokens, the mask telling how much there was."""
    prompts, said = make_prompts(), make_prompts(length=5, seed=1)
    embeddings = model.get_input_embeddings()(prompts)
    plain, tree = check(model, inputs_embeds=embeddings)
    new = torch.cat((plain.sequences[:, -1:], said), dim=1)
    mask = torch.ones(1, LENGTH + NEW_TOKENS + 5, dtype=torch.long)
    arguments = {"attention_mask": mask, "max_new_tokens": NEW_TOKENS, "do_sample": False}
    expected = model.generate(new, **arguments, **{CACHE_KEY: plain[CACHE_KEY]})
    drafter = {"assistant_model": make_drafter(model), "draft_state": tree.draft_state, "tree_budget": 40}
    got = model.generate(new, generation_strategy="ddtree", **drafter, **arguments, **{CACHE_KEY: tree[CACHE_KEY]})
    assert got.tolist() == expected.tolist()
    context = tree.draft_state.cache.get_seq_length() + sum(tree.draft_state.num_features)
    assert context == LENGTH + 2 * NEW_TOKENS + 5 - 1


@pytest.mark.core
@pytest.mark.parametrize("mask", [[0, 0, 1, 0, 0, 1], [1, 0, 1, 0, 1, 1], [0, 1, 1, 0, 1, 1]])
def test_holes_at_the_left(model, mask):
    mask = torch.tensor([mask + [1] * (LENGTH - len(mask))])
    check(model, make_prompts() * mask, attention_mask=mask)
    check(model, make_prompts(2), attention_mask=torch.cat((mask, torch.ones_like(mask))))


@pytest.mark.core
@pytest.mark.parametrize("start, step", [(0, 1), (7, 1), (3, 2)])
def test_positions(model, start, step):
    positions = start + step * torch.arange(LENGTH)[None]
    plain, _ = check(model, make_prompts(), position_ids=positions)
    shifted = positions + torch.tensor([[0], [9]])
    check(model, make_prompts(2), position_ids=shifted)
    unlike = check(model, make_prompts())[0].sequences.tolist() != plain.sequences.tolist()
    assert unlike == (step != 1), "rotary positions are relative"


@pytest.mark.core
@pytest.mark.parametrize("chunk", [1, 5, 100])
def test_prefill_in_chunks(model, chunk):
    _, tree = check(model, make_prompts(), prefill_chunk_size=chunk)
    state = tree.draft_state
    assert state.cache.get_seq_length() + sum(state.num_features) == LENGTH + NEW_TOKENS - 1
    mask = (torch.arange(LENGTH) >= torch.tensor([[0], [4]])).long()
    check(model, make_prompts(2) * mask, attention_mask=mask, prefill_chunk_size=chunk)


@pytest.mark.core
def test_one_token_and_none(model):
    check(model, make_prompts(length=1))
    check(model, bos_token_id=5)
    plain, _ = check(model, bos_token_id=5, do_sample=True, num_return_sequences=2, top_k=1)
    assert plain.sequences.shape == (2, 1 + NEW_TOKENS)


@pytest.mark.core
def test_the_inputs_stay_as_they_are(model):
    prompts, mask, positions = make_prompts(2), torch.ones(2, LENGTH, dtype=torch.long), torch.arange(LENGTH)[None]
    inputs = {"input_ids": prompts, "attention_mask": mask, "position_ids": positions}
    before = {name: value.clone() for name, value in inputs.items()}
    check(model, **inputs)
    assert all(torch.equal(inputs[name], before[name]) for name in inputs)


# --- images and videos ----------------------------------------------------------------------------------------------

IMAGE, VIDEO, VISION_START, VISION_END = 60, 61, 58, 59


@pytest.fixture(scope="module")
def vision_model():
    text = {**SIZES, **LINEAR_ATTENTION, "rope_parameters": MROPE | {"mrope_section": [1, 1, 0]}}
    text["layer_types"] = ["linear_attention", "full_attention", "linear_attention"]
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": SIZES["hidden_size"],
        "num_position_embeddings": 16,
    }
    config = transformers.Qwen3_5Config(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
    )
    with torch.random.fork_rng():
        torch.manual_seed(8)
        model = transformers.Qwen3_5ForConditionalGeneration(config).eval().requires_grad_(False)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=1.2 * parameter.shape[-1] ** -0.5)
    # No image may be emitted, as it would have no pixels.
    model.generation_config.suppress_tokens = [IMAGE, VIDEO, VISION_START, VISION_END]
    return model


def make_vision_inputs(rows):
    """Rows of text tokens and of `"image"` and `"video"`, padded at the left to the longest."""
    generator = torch.Generator().manual_seed(3)
    tokens, types, pixels = [], [], {IMAGE: [], VIDEO: []}
    for row in rows:
        tokens.append([])
        for part in row:
            token = {"image": IMAGE, "video": VIDEO}.get(part, part)
            is_vision = token != part
            frames = 2 if token == VIDEO else 1
            tokens[-1] += ([VISION_START] + [token] * 4 + [VISION_END]) * frames if is_vision else [token]
            if is_vision:
                pixels[token].append((frames, torch.randn(16 * frames, 3 * 2 * 4 * 4, generator=generator)))
    length = max(map(len, tokens))
    types = {IMAGE: 1, VIDEO: 2}
    padded = torch.tensor([[0] * (length - len(row)) + row for row in tokens])
    inputs = {
        "input_ids": padded,
        "attention_mask": torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in tokens]),
        "mm_token_type_ids": torch.tensor([[types.get(token, 0) for token in row] for row in padded.tolist()]),
    }
    for token, values, grid in ((IMAGE, "pixel_values", "image"), (VIDEO, "pixel_values_videos", "video")):
        if pixels[token]:
            inputs[values] = torch.cat([pixel for _, pixel in pixels[token]])
            inputs[f"{grid}_grid_thw"] = torch.tensor([[frames, 4, 4] for frames, _ in pixels[token]])
    return inputs


VISION_PROMPTS = {
    "text": [[1, 2, 3, 4]],
    "image": [[1, 2, "image", 5, 6]],
    "two images": [[1, "image", 2, "image", 5]],
    "video": [["video", 7]],
    "image and video": [[3, "image", 1, "video", 7, 8]],
    "batch": [[1, 2, "image", 5, 6, 9, 9, 9], ["image", 4]],
    "batch of images, a video and text": [[1, "image", 5], ["video", 3], [8, 9]],
}


@pytest.mark.parametrize("name", VISION_PROMPTS)
def test_images_and_videos(vision_model, name):
    inputs = make_vision_inputs(VISION_PROMPTS[name])
    plain, _ = check(vision_model, **inputs)
    assert len(plain.sequences.unique()) > 5
    if name != "text":
        # They matter, and so do their positions, which lag behind the number of tokens.
        assert (vision_model.model.rope_deltas < 0).any()
        for values in ("pixel_values", "pixel_values_videos"):
            if values in inputs:
                inputs[values] = -inputs[values]
        others = vision_model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
        assert others.tolist() != plain.sequences.tolist()


@pytest.mark.parametrize("name", ["image", "video", "batch"])
def test_a_second_turn_after_images(vision_model, name):
    inputs = make_vision_inputs(VISION_PROMPTS[name])
    batch_size = len(inputs["input_ids"])
    arguments = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "return_dict_in_generate": True}
    plain, tree = check(vision_model, **inputs)
    said = make_prompts(batch_size, length=4) % VISION_START
    seconds = []
    for drafts in ({}, {"generation_strategy": "ddtree", "assistant_model": make_drafter(vision_model)}):
        vision_model.generate(**inputs, **arguments)  # The model itself keeps how far positions lag behind.
        first = tree if drafts else plain
        history = torch.cat((first.sequences, said), dim=1)
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, NEW_TOKENS + 4), value=1)
        kwargs = {"attention_mask": mask, CACHE_KEY: first[CACHE_KEY], **arguments, **drafts}
        seconds.append(vision_model.generate(history, **kwargs).sequences.tolist())
    assert seconds[0] == seconds[1]


# --- where settings stand -------------------------------------------------------------------------------------------


@pytest.mark.core
def test_a_saved_generation_config(tmp_path):
    model = make_model("llama", "sdpa")
    knobs = {"tree_budget": 5, "tree_shape": "spine_first", "tree_top_k": 3, "draft_length": 2, "return_trees": True}
    assert set(knobs) <= set(DDTreeConfig.knobs())
    config = GenerationConfig(max_new_tokens=NEW_TOKENS, generation_strategy="ddtree", **knobs)
    config.return_dict_in_generate = True
    config.save_pretrained(tmp_path)
    loaded = GenerationConfig.from_pretrained(tmp_path)
    saved = json.loads((tmp_path / "generation_config.json").read_text())
    assert all(saved[name] == getattr(loaded, name) == value for name, value in knobs.items())
    plain = model.generate(make_prompts(), max_new_tokens=NEW_TOKENS)
    out = model.generate(make_prompts(), loaded, assistant_model=make_drafter(model))
    assert out.sequences.tolist() == plain.tolist()
    trees = [tree for [tree] in out.ddtree_stats.trees]
    assert len(trees) > 1 and all(len(tree) <= 6 and int(tree.depths.max()) <= 2 for tree in trees)
    assert max(tree.parents[1:].bincount().max() for tree in trees if tree.num_drafted) <= 3
    assert any(len(tree) == 6 for tree in trees)


@pytest.mark.core
def test_defaults_of_the_model(tmp_path):
    """What the model's own generation config says, saved and loaded with it, unless the call says otherwise."""
    model = make_model("qwen3_5", "sdpa")
    prompts, drafter = make_prompts(), make_drafter(model)
    model.save_pretrained(tmp_path)
    model = type(model).from_pretrained(tmp_path)
    expected = model.generate(prompts, max_new_tokens=10, repetition_penalty=1.3, do_sample=False)
    # A new one: what Transformers made of the model's config is saved as such, and loses what it does not know.
    model.generation_config = GenerationConfig(
        max_new_tokens=10,
        repetition_penalty=1.3,
        return_dict_in_generate=True,
        generation_strategy="ddtree",
        tree_budget=4,
    )
    model.save_pretrained(tmp_path)
    model = type(model).from_pretrained(tmp_path)
    out = model.generate(prompts, assistant_model=drafter)
    assert out.sequences.tolist() == expected.tolist()
    assert max(out.ddtree_stats.tree_sizes) == 4
    wider = model.generate(prompts, assistant_model=drafter, tree_budget=9, max_new_tokens=8)
    assert max(wider.ddtree_stats.tree_sizes) == 9
    assert wider.sequences.tolist() == expected[:, : LENGTH + 8].tolist()


def test_pipeline(pair):
    model, drafter, tokenizer = pair
    generate = pipeline("text-generation", model=model, tokenizer=tokenizer)
    texts = ["def add(first, second):\n    return", "import os\n", "class Point:\n    def __init__(self, x, y):"]
    arguments = {"max_new_tokens": 12, "do_sample": False}
    plain = generate(texts, **arguments)
    tree = {"generation_strategy": "ddtree", "assistant_model": drafter}
    assert generate(texts, **arguments, **tree) == plain
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer.padding_side = "left"
    assert generate(texts, batch_size=3, **arguments, **tree) == generate(texts, batch_size=3, **arguments)
    tokens = generate(texts[0], return_tensors=True, **arguments, **tree)
    assert tokens == generate(texts[0], return_tensors=True, **arguments)
    drafts = pipeline("text-generation", model=model, tokenizer=tokenizer, assistant_model=drafter)
    forwards = []
    hook = drafter.register_forward_hook(lambda *_: forwards.append(1))
    assert drafts(texts, **arguments, generation_strategy="ddtree") == plain
    hook.remove()
    assert len(forwards) >= len(texts)


# --- long prompts ---------------------------------------------------------------------------------------------------

LONG_PROMPT = """
import json, resource, sys
import torch
from torch.utils._python_dispatch import TorchDispatchMode
import hf_ddtree
from hf_ddtree.demo import demo_prompts

torch.set_num_threads(1)
LENGTH, NEW_TOKENS = int(sys.argv[1]), 8


class Largest(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        outputs = result if isinstance(result, (tuple, list)) else (result,)
        sizes = [output.untyped_storage().nbytes() for output in outputs if isinstance(output, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return result


def run(**kwargs):
    with Largest() as largest:
        out = model.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None,
                             return_dict_in_generate=True, **kwargs)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {"tokens": out.sequences[0, LENGTH:].tolist(), "largest": largest.elements, "peak": peak}


model, drafter, tokenizer = hf_ddtree.load_demo()
text = "".join(entry["prompt"] for entry in demo_prompts())
prompt = tokenizer(text, return_tensors="pt").input_ids.repeat(1, 1 + LENGTH // 4000)[:, :LENGTH]
assert prompt.shape[1] == LENGTH
plain = run()
tree = run(generation_strategy="ddtree", assistant_model=drafter)
print(json.dumps({"plain": plain, "tree": tree}))
"""


def test_a_prompt_of_8000_tokens_in_bounded_memory():
    """On top of standard decoding: the hooked layers' outputs, twice while they are joined, and the drafter's context.

    That is 2 * 4 layers * 128 and 3 layers * 2 * 192 floats per token, 71 MB in all, but not all at once. A mask of
    all pairs of tokens would be 268 MB in float32. No tensor may be larger than the largest one of standard decoding
    or than the buffer of the context of one of the drafter's layers.
    """
    length = 8192
    script = subprocess.run(
        [sys.executable, "-c", LONG_PROMPT, str(length)], capture_output=True, text=True, timeout=900
    )
    assert script.returncode == 0, script.stderr
    result = json.loads(script.stdout.splitlines()[-1])
    plain, tree = result["plain"], result["tree"]
    assert tree["tokens"] == plain["tokens"]
    context_and_room = 2 * 2 * 192 * length * 4 * 1.01
    assert tree["largest"] <= max(plain["largest"], context_and_room)
    assert tree["peak"] - plain["peak"] < 80e6


def test_only_the_hooked_layers_are_recorded():
    model = make_model("llama", "sdpa")
    recorder = FeatureRecorder(model, (0, 2))
    try:
        with recorder.recording():
            for length in (5, 3):
                model(make_prompts(length=length))
        assert set(recorder._outputs) == {0, 2}
        assert recorder.take().shape == (1, 8, 2 * model.config.hidden_size)
        assert not any(recorder._outputs.values()), "nothing is kept once taken"
        model(make_prompts())
        assert not any(recorder._outputs.values()), "nothing is recorded outside"
    finally:
        recorder.close()


def test_an_empty_prompt_is_refused_by_name():
    model = make_model("llama", "sdpa")
    with pytest.raises(ValueError, match=r"The prompt is empty: `input_ids` has the shape \(1, 0\)"):
        model.generate(
            torch.empty((1, 0), dtype=torch.long), max_new_tokens=2, generation_strategy="ddtree", tree_lookup=True
        )
