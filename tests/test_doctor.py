"""The doctor finds each fault that is planted in the shipped pair, and none where there is none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging
from typer.testing import CliRunner

import hf_ddtree
from hf_ddtree.cli import app
from hf_ddtree.demo import demo_folders, load_demo, varied_prompts
from hf_ddtree.training import doctor
from hf_ddtree.training.doctor import diagnose

SHIPPED = Path(demo_folders()[1])


@pytest.fixture(autouse=True)
def verbosity():
    before = logging.get_verbosity()
    yield
    logging.set_verbosity(before)
    logging.enable_progress_bar()


@pytest.fixture(scope="module")
def pair():
    return load_demo()


@pytest.fixture(scope="module")
def prompts(pair):
    return [pair[2](entry["prompt"]).input_ids for entry in varied_prompts()[:2]]


def plant(folder, change_weights=None, drop=(), **settings):
    """A copy of the shipped drafter with other weights, or other settings in its config."""
    folder.mkdir(exist_ok=True)
    config = json.loads((SHIPPED / "config.json").read_text())
    (config if "is_causal" in settings else config["dflash_config"]).update(settings)
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(SHIPPED / "model.safetensors")
    weights |= {} if change_weights is None else change_weights(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def diagnosis(pair, prompts, folder=SHIPPED, **options):
    target, _, tokenizer = pair
    drafter = hf_ddtree.load_drafter(folder, target_model=target)
    return diagnose(target, drafter, tokenizer, prompts, max_new_tokens=64, **options)


@pytest.fixture(scope="module")
def healthy(pair, prompts):
    return diagnosis(pair, prompts)


def test_the_shipped_drafter_is_well(healthy):
    assert healthy.is_well and healthy.fault is None and healthy.decoded == pytest.approx(healthy.teacher_forced)
    assert healthy.teacher_forced > 4 and not healthy.notes
    assert len(healthy.trials) > 8 and healthy.hit_rates[0] > 0.5


@pytest.mark.parametrize(
    "settings, fault",
    [
        ({"target_layer_ids": [0, 4, 7, 10]}, "`target_layer_ids` are one too low"),
        ({"mask_token_id": 300}, "the mask token is 2 ('<|mask|>'), not 300"),
        ({"is_causal": True}, "blocks are not causal"),
    ],
)
def test_settings(settings, fault, pair, prompts, healthy, tmp_path):
    found = diagnosis(pair, prompts, plant(tmp_path, **settings))
    assert found.negative_log_likelihood > 1.01 * healthy.negative_log_likelihood
    assert found.fault is not None and found.fault.fault.startswith(fault), found.findings()
    assert found.fault.negative_log_likelihood == pytest.approx(healthy.negative_log_likelihood, rel=0.01)
    assert not found.is_well and not found.parts
    assert found.notes == (
        ["The mask token, 300, is the word 'Ġp', which texts hold as well."] * (300 in settings.values())
    )


def test_positions(pair, prompts, healthy):
    target, _, tokenizer = pair
    drafter = hf_ddtree.load_drafter(SHIPPED, target_model=target)

    def shifted(module, args, kwargs):
        block = args[0] if args else kwargs["inputs_embeds"]
        positions = (args[2] if args else kwargs["position_ids"]).clone()
        positions[:, -block.shape[1] :] -= 1
        return ((*args[:2], positions), kwargs) if args else (args, kwargs | {"position_ids": positions})

    drafter.register_forward_pre_hook(shifted, with_kwargs=True)
    found = diagnose(target, drafter, tokenizer, prompts, max_new_tokens=64)
    assert found.fault.fault == "positions of the block are one too low" and not found.parts
    assert found.fault.negative_log_likelihood == pytest.approx(healthy.negative_log_likelihood)


def test_an_untied_head(pair, prompts, healthy, tmp_path):
    signs = torch.randint(2, (128,), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    head = pair[0].get_output_embeddings().weight

    def change(weights):
        return {
            "norm.weight": weights["norm.weight"] * signs.to(weights["norm.weight"]),
            "lm_head.weight": head * signs,
        }

    found = diagnosis(pair, prompts, plant(tmp_path, change))
    assert found.fault.fault == "its output head is not the target's" and found.teacher_forced < 1.5
    assert found.fault.accepted_length > 3


def test_embeddings_of_another_target(pair, prompts, tmp_path):
    target, _, tokenizer = load_demo()
    embeddings = target.get_input_embeddings().weight
    own = embeddings.detach().clone()
    folder = plant(tmp_path, lambda weights: {"embed_tokens.weight": own})
    with torch.no_grad():  # those of the mask token alone, so that the target writes what it wrote before
        embeddings[2] = own[[260, 300, 340]].mean(dim=0)
    found = diagnosis((target, None, tokenizer), prompts, folder)
    assert found.fault.fault == "its embeddings are not the target's", found.findings()


def test_decoding_that_feeds_something_else(pair, prompts):
    target, _, tokenizer = pair
    drafter = hf_ddtree.load_drafter(SHIPPED, target_model=target)
    drafter.register_forward_pre_hook(
        lambda module, args, kwargs: (
            args,
            kwargs | ({} if args else {"context": torch.zeros_like(kwargs["context"])}),
        ),
        with_kwargs=True,
    )
    found = diagnose(target, drafter, tokenizer, prompts[:1], max_new_tokens=64)
    assert found.parts and found.fault is None and not found.is_well
    assert "while decoding, the drafter is fed something else" in found.findings()[0]


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_another_template_and_the_command(tmp_path):
    """The drafter learnt code without a template, and is asked in one."""
    target = tmp_path / "target"
    shutil.copytree(demo_folders()[0], target)
    (target / "chat_template.jinja").write_text(TEMPLATE)
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": entry["prompt"]}) + "\n" for entry in varied_prompts()[:2]))
    arguments = ["doctor", str(target), str(SHIPPED), "--prompts", str(prompts), "--max-new-tokens", "64"]
    result = CliRunner().invoke(app, [*arguments, "--dtype", "float32", "--json"])
    assert result.exit_code == 1, result.output
    found = json.loads(result.stdout)
    assert not found["is_well"]
    assert found["findings"][0].startswith("It seems that the drafter was trained on texts without the chat template.")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([str(demo_folders()[0])], "there is no drafter to look at"),
        (["demo", "--max-new-tokens", "5", "--count", "1"], "The answers are shorter than a block of 11 tokens"),
    ],
)
def test_what_is_wrong_is_said(arguments, message):
    result = CliRunner().invoke(app, ["doctor", *arguments])
    assert result.exit_code == 2 and message in " ".join(result.output.replace("│", " ").split()), result.output


def test_a_drafter_of_another_target(pair, prompts):
    drafter = hf_ddtree.training.new_drafter(pair[0], 2, layers=1)
    found = diagnose(pair[0], drafter, pair[2], prompts[:1], max_new_tokens=64)
    assert not found.is_well and "train it on" in " ".join(found.findings())


@pytest.mark.parametrize(
    ("empty", "message"),
    [([], "`prompts` is empty"), ([[5, 6], []], r"`prompts` has prompts without a token, at \[1\]")],
)
def test_prompts_without_a_token(pair, empty, message):
    target, drafter, tokenizer = pair
    with pytest.raises(ValueError, match=message):
        diagnose(target, drafter, tokenizer, empty)
    with pytest.raises(ValueError, match=message.replace("`prompts`", "`in another mode`")):
        diagnose(target, drafter, tokenizer, [[5, 6]], {"in another mode": empty})


def test_a_mode_with_short_answers_is_left_out(pair, prompts, monkeypatch):
    target, _, tokenizer = pair
    decode = doctor._decode

    def cut_short(model, drafter, prompt, max_new_tokens):
        return decode(model, drafter, prompt, 4 if list(prompt) == [5, 6] else max_new_tokens)

    monkeypatch.setattr(doctor, "_decode", cut_short)
    found = diagnosis(pair, prompts[:1], other_modes={"in another mode": [[5, 6]]})
    assert found.is_well
    assert found.notes[0].startswith(
        "Asked in another mode, nothing can be told: The answers are shorter than a block"
    )
