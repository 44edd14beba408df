"""Training drafters: blocks in one forward, losses, evaluations without decoding, and runs that go on."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch
from helpers.families import VOCAB_SIZE, make_model
from helpers.random_drafter import make_drafter
from helpers.training_run import STEPS, make_documents, make_trainer

import hf_ddtree
from hf_ddtree.demo import varied_prompts
from hf_ddtree.drafters.zlab.writing import save_drafter
from hf_ddtree.training import Document, Evaluator, PackedDocuments, TrainingConfig, find_mask_token, new_drafter
from hf_ddtree.training.anchors import labels_behind, possible_anchors, sample_anchors
from hf_ddtree.training.block_loss import BlockLoss
from hf_ddtree.training.checkpoints import latest_checkpoint, save_checkpoint
from hf_ddtree.training.interrupts import deferred_interrupts
from hf_ddtree.training.losses import position_weights, slot_losses
from hf_ddtree.training.optimizers import build_optimizers
from hf_ddtree.training.run_log import RunLog, read_log
from hf_ddtree.training.target_features import TargetFeatures

TESTS = Path(__file__).parent
KINDS = ("dflash", "dflash2", "dspark", "jetspec")


def blocks_of(rows, count=6):
    return sample_anchors(rows, count, [(1, row) for row in range(len(rows.token_ids))])


def random_documents(seed=0, lengths=(30, 11, 7, 25, 4, 18)):
    generator = torch.Generator().manual_seed(seed)
    return [Document(torch.randint(VOCAB_SIZE - 1, (length,), generator=generator).tolist()) for length in lengths]


@pytest.mark.core
def test_rows_hold_every_document_once_in_each_pass():
    documents = [Document([10 * number + place for place in range(5 + number)]) for number in range(9)]
    packed = PackedDocuments(documents, 16, seed=3)
    passes = [packed.rows(range(start, start + len(packed))) for start in (0, len(packed))]
    assert not torch.equal(passes[0].token_ids, passes[1].token_ids)
    for rows in passes:
        found = []
        for tokens, numbers in zip(rows.token_ids, rows.documents):
            found += [tokens[numbers == number].tolist() for number in range(int(numbers.max()) + 1)]
            assert not tokens[numbers < 0].any()
        assert sorted(found) == sorted(document.token_ids.tolist() for document in documents)
    assert len(packed) == math.ceil(sum(map(len, documents)) / 16)
    # What was had before can be had again.
    assert torch.equal(packed.rows([1]).token_ids, passes[0].token_ids[1:2])
    positions = rows.positions()
    for number in range(3):
        here = rows.documents[0] == number
        assert positions[0, here].tolist() == list(range(int(here.sum())))


@pytest.mark.core
def test_what_is_predicted_counts_and_is_of_the_same_document():
    rows = PackedDocuments([Document.answer(range(9), 4), Document(range(20, 25))], 16).rows([0])
    assert possible_anchors(rows)[0].nonzero()[:, 0].tolist() == [3, 4, 5, 6, 7, 10, 11, 12]
    anchors, is_used = torch.tensor([[3, 6, 12, 0]]), torch.tensor([[True, True, True, False]])
    places, labels, counts = labels_behind(rows, anchors, is_used, 4)
    assert labels[0][counts[0]].tolist() == [4, 5, 6, 7, 7, 8, 24]
    assert places[0, 0].tolist() == [4, 5, 6, 7] and counts[0].sum(-1).tolist() == [4, 2, 1, 0]
    anchors, is_used = sample_anchors(rows, 30, [(0, 0)])
    assert anchors[is_used].tolist() == possible_anchors(rows)[0].nonzero()[:, 0].tolist()


SETTINGS = {
    "both ways": {"layer_types": ["full_attention"] * 2},
    "causal": {"layer_types": ["full_attention"] * 2, "is_causal": True},
    "windows": {"layer_types": ["sliding_attention"] * 2, "is_causal": False},
    "mixed layers": {"layer_types": ["full_attention", "sliding_attention"]},
    "windows from the root": {"layer_types": ["sliding_attention", "full_attention"], "window_from_root": True},
    "narrow": {"layer_types": ["sliding_attention"] * 2, "is_causal": False, "sliding_window": 4},
    "version 2": {"version": 2},
    "root's slot predicts": {"sample_from_anchor": True},
}


@pytest.mark.core
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
@pytest.mark.parametrize("name", SETTINGS)
def test_blocks_in_one_forward_are_those_of_decoding(family, name):
    """Each block as while decoding: behind the features of its document's tokens alone, which the target saw alone."""
    target = make_model(family, "sdpa")
    settings = SETTINGS[name]
    drafter = make_drafter(target, **settings)
    documents = random_documents()
    rows = PackedDocuments(documents, 40).rows(range(3))
    anchors, is_used = blocks_of(rows)
    features = TargetFeatures(target, drafter.config.target_layer_ids)
    hidden = BlockLoss(drafter, target, TrainingConfig()).draft(rows, features(rows)[0], anchors)
    compared = 0
    for row, block in is_used.nonzero().tolist():
        place = int(anchors[row, block])
        here = rows.documents[row] == rows.documents[row, place]
        text = rows.token_ids[row, here][None]
        length = int(rows.positions()[row, place])
        packed = PackedDocuments([Document(text[0].tolist())], text.shape[1]).rows([0])
        context = features(packed)[0][:, :length]
        slots = torch.full((1, drafter.config.block_size), drafter.config.mask_token_id)
        slots[0, 0] = text[0, length]
        expected = drafter(drafter.embed(slots, target.get_input_embeddings()), context)
        torch.testing.assert_close(hidden[row, block], expected[0, drafter.config.first_slot :], rtol=1e-4, atol=1e-4)
        compared += 1
    assert compared >= 12
    features.close()


@pytest.mark.core
@pytest.mark.parametrize("family", ["mistral", "qwen3_5", "bamba", "lfm2"])
def test_the_target_sees_each_document_alone(family):
    target = make_model(family, "sdpa")
    documents = random_documents()
    rows = PackedDocuments(documents, 40).rows(range(3))
    with closing(TargetFeatures(target, [0, 2])) as run_target:
        features, logits = run_target(rows, with_logits=True)
    for row in range(3):
        for number in range(int(rows.documents[row].max()) + 1):
            here = rows.documents[row] == number
            with torch.no_grad():
                expected = target(rows.token_ids[row, here][None]).logits[0]
            torch.testing.assert_close(logits[row, here], expected, rtol=1e-4, atol=1e-4)
    assert features.shape == (3, 40, 2 * target.config.hidden_size)
    assert not features[rows.documents < 0].any()


@pytest.mark.core
def test_losses_are_their_formulas():
    generator = torch.Generator().manual_seed(0)
    logits, truth = (torch.randn(5, 7, generator=generator, requires_grad=True) for _ in range(2))
    labels = torch.randint(7, (5,), generator=generator)
    q, share = logits.softmax(-1), 0.3
    for s in (0.0, share, 1.0):
        p = s * truth.softmax(-1) + (1 - s) * torch.nn.functional.one_hot(labels, 7)
        overlap = torch.minimum(p, q).sum(-1)
        weight = torch.exp(-3.0 * overlap.detach())
        divergence = (torch.xlogy(p, p) - p * q.log()).sum(-1)
        expected = {
            "cross_entropy": -(p * q.log()).sum(-1),
            "total_variation": (p - q).abs().sum(-1) / 2,
            "lk": weight * divergence + (1 - weight) * (p - q).abs().sum(-1) / 2,
        }
        for loss, value in expected.items():
            got, accepted = slot_losses(logits, labels, truth.detach(), loss, s)
            torch.testing.assert_close(got, value)
            torch.testing.assert_close(accepted, overlap.detach())
            gradients = [torch.autograd.grad(one.sum(), logits, retain_graph=True)[0] for one in (got, value)]
            torch.testing.assert_close(*gradients)


@pytest.mark.core
def test_weights_are_their_formulas():
    q = torch.tensor([[0.9, 0.2, 0.7, 0.4], [0.1, 1.0, 0.5, 0.5]])
    counts = torch.tensor([[True] * 4, [True, True, False, False]])
    weights = position_weights(q, counts, "d_pace", smoothing=0.5)
    for block, num_slots in enumerate((4, 2)):
        smoothed = [0.5 * float(value) + 0.5 for value in q[block][:num_slots]]
        reached = [math.prod(smoothed[: place + 1]) for place in range(num_slots)]
        expected = [sum(reached[place:]) for place in range(num_slots)]
        assert weights[block].tolist() == pytest.approx(expected + [0.0] * (4 - num_slots))
    assert position_weights(q, counts, "decay", decay=2.0)[1].tolist() == pytest.approx([1, math.exp(-0.5), 0, 0])
    assert position_weights(q, counts, "uniform").tolist() == counts.float().tolist()


@pytest.mark.core
@pytest.mark.parametrize("kind", KINDS)
def test_logits_in_chunks_change_nothing(kind):
    trainer = make_trainer(None, kind)
    drafter, target = trainer.drafter, make_model("qwen3_5", "sdpa")
    for parameter in drafter.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    rows = PackedDocuments(make_documents(), 48).rows(range(2))
    with closing(TargetFeatures(target, drafter.config.target_layer_ids)) as run_target:
        features, logits = run_target(rows, with_logits=True)
    anchors, is_used = blocks_of(rows)
    results = []
    for at_once in (2**26, 2 * drafter.config.draft_length * VOCAB_SIZE):
        config = TrainingConfig(logits_at_once=at_once, loss="lk", distribution_share=0.5)
        loss, statistics = BlockLoss(drafter, target, config)(rows, features, anchors, is_used, logits)
        gradients = torch.autograd.grad(loss, list(drafter.parameters()))
        results.append((loss, statistics.packed(), *gradients))
    for one, other in zip(*results):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert all(gradient.any() for gradient in results[0][2:] if gradient.numel() > 1)


@pytest.mark.core
@pytest.mark.parametrize("kind", KINDS)
def test_training_learns_and_its_drafter_loads(kind, tmp_path):
    entries = []
    trainer = make_trainer(None, kind, entries.append, steps=40, learning_rate=1e-2, log_every=10)
    trainer.train()
    nll = [entry["negative_log_likelihood"] for entry in entries]
    assert nll[-1] < 0.9 * nll[0]
    save_drafter(trainer.drafter, tmp_path, torch.float32)
    loaded = hf_ddtree.load_drafter(tmp_path, target_model=make_model("qwen3_5", "sdpa"))
    assert type(loaded) is type(trainer.drafter)
    for name, tensor in trainer.drafter.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name
    settings = {"block_size", "is_causal", "mask_token_id", "sample_from_anchor", "sliding_window", "layer_types"}
    for setting in settings | {"target_layer_ids", "selector_top_k", "markov_rank"}:
        expected, got = (getattr(one.config, setting, None) for one in (trainer.drafter, loaded))
        assert got == expected, setting
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_evaluations_give_what_decoding_gives():
    target, drafter, tokenizer = hf_ddtree.load_demo()
    documents, decoded = [], {"chain": [], "tree:8": []}
    for entry in varied_prompts()[:2]:
        ids = tokenizer(entry["prompt"], return_tensors="pt").input_ids
        for name, lengths in decoded.items():
            strategy = {"generation_strategy": "dflash" if name == "chain" else "ddtree"}
            budget = 11 if name == "chain" else 8
            out = target.generate(
                *(ids,), max_new_tokens=60, do_sample=False, assistant_model=drafter, tree_budget=budget,
                calibrate=False, return_dict_in_generate=True, **strategy,
            )  # fmt: skip
            lengths.append(out.ddtree_stats.accepted_lengths)
        documents.append(Document.answer(out.sequences[0].tolist(), ids.shape[1]))
    evaluations = [Evaluator(target, [document], budgets=(8,))(drafter) for document in documents]
    for number, evaluation in enumerate(evaluations):
        for name, lengths in decoded.items():
            rounds = evaluation.rounds[name]
            flat = [length[0] if isinstance(length, list) else length for length in lengths[number]]
            assert rounds > 5
            assert evaluation.tokens_per_forward[name] == pytest.approx(sum(flat[:rounds]) / rounds)
    assert drafter.training is False
    # Of both texts: the rounds of each.
    both = Evaluator(target, documents, budgets=(8,))(drafter)
    assert both.rounds["tree:8"] == sum(evaluation.rounds["tree:8"] for evaluation in evaluations)


@pytest.mark.core
def test_muon_takes_matrices_and_no_tables():
    drafter = make_trainer(None, "dspark").drafter
    by_optimizer = {}
    for optimizer in build_optimizers(drafter.named_parameters(), 1e-3, 0.1):
        chosen = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        names = {name for name, parameter in drafter.named_parameters() if id(parameter) in chosen}
        by_optimizer[type(optimizer).__name__] = names
        assert {group["lr"] for group in optimizer.param_groups} == {1e-3}
    assert {"fc.weight", "layers.0.mlp.up_proj.weight"} <= by_optimizer["Muon"]
    assert {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight", "norm.weight"} <= by_optimizer["AdamW"]
    assert len(by_optimizer["Muon"]) + len(by_optimizer["AdamW"]) == len(list(drafter.parameters()))


def weights_of(folder):
    return {path.name: path.read_bytes() for path in latest_checkpoint(folder / "checkpoints").iterdir()}


def test_a_killed_run_goes_on_as_if_nothing_had_been(tmp_path):
    dies_at = 5

    def run(folder, dies_at):
        command = [sys.executable, "-m", "helpers.training_run", str(folder), "2", str(dies_at)]
        return subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=300)

    killed = run(tmp_path / "killed", dies_at)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    assert latest_checkpoint(tmp_path / "killed" / "checkpoints").name == f"step-{dies_at - 1:08d}"
    resumed = run(tmp_path / "killed", 0)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    make_trainer(tmp_path / "whole", checkpoint_every=2).train()
    one, other = weights_of(tmp_path / "killed"), weights_of(tmp_path / "whole")
    for name in ("weights.safetensors", "optimizers.safetensors"):
        assert one[name] == other[name], name
    logs = [read_log(tmp_path / name / "log.jsonl") for name in ("killed", "whole")]
    assert [[entry["loss"] for entry in log] for log in logs][0] == [entry["loss"] for entry in logs[1]]
    assert [entry["step"] for entry in logs[0]] == list(range(1, STEPS + 1))


@pytest.mark.core
def test_a_run_that_is_interrupted_loses_no_step(tmp_path):
    """Ctrl-C as step 3 is logged, long before a checkpoint is due."""

    def interrupt(entry):
        if entry["step"] == 3 and trainer.step == 3:
            signal.raise_signal(signal.SIGINT)

    trainer = make_trainer(tmp_path / "interrupted", on_log=interrupt, checkpoint_every=100)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    # The signal came while step 3 was reported, so the next one was the last.
    assert latest_checkpoint(tmp_path / "interrupted" / "checkpoints").name == "step-00000004"
    make_trainer(tmp_path / "interrupted", checkpoint_every=100).train()
    make_trainer(tmp_path / "whole", checkpoint_every=100).train()
    one, other = weights_of(tmp_path / "interrupted"), weights_of(tmp_path / "whole")
    for name in ("weights.safetensors", "optimizers.safetensors"):
        assert one[name] == other[name], name


def test_a_second_interrupt_raises_at_once():
    with pytest.raises(KeyboardInterrupt), deferred_interrupts() as was_interrupted:
        assert not was_interrupted()
        signal.raise_signal(signal.SIGINT)
        assert was_interrupted()
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_two_processes_learn_what_one_learns_from_twice_the_rows(tmp_path):
    finished = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        + ["--module", "helpers.training_run", str(tmp_path / "two"), "2", "0"],
        cwd=TESTS,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stderr[-6000:]
    alone = make_trainer(tmp_path / "one", rows=4, checkpoint_every=2)
    alone.train()
    in_parts = make_trainer(tmp_path / "parts", rows=2, accumulation=2, checkpoint_every=2)
    in_parts.train()
    curves = [[entry["loss"] for entry in read_log(tmp_path / name / "log.jsonl")] for name in ("one", "two", "parts")]
    assert len(curves[0]) == STEPS
    assert curves[1] == pytest.approx(curves[0], rel=1e-4)
    assert curves[2] == pytest.approx(curves[0], rel=1e-4)


def test_other_settings_do_not_go_on(tmp_path):
    make_trainer(tmp_path, steps=2).train()
    with pytest.raises(ValueError, match="`learning_rate` 0.001, but now it is 0.01"):
        make_trainer(tmp_path, steps=2, learning_rate=1e-2)
    again = make_trainer(tmp_path, steps=2, log_every=7)
    assert again.step == 2 and again.progress == 1


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path, steps=2)
    trainer.train()
    before = weights_of(tmp_path)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hf_ddtree.training.checkpoints.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(tmp_path / "checkpoints", trainer.drafter, [], {"step": 9})
    assert weights_of(tmp_path) == before
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]


def test_a_log_goes_on_at_the_checkpoint(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    RunLog(path, 2).add({"step": 3, "again": True})
    assert read_log(path) == [{"step": 1}, {"step": 2}, {"step": 3, "again": True}]


def test_a_loss_that_is_no_number_ends_the_run():
    trainer = make_trainer(None)
    with torch.no_grad():
        trainer.drafter.fc.weight[0, 0] = float("nan")
    with pytest.raises(FloatingPointError, match="step 1 is nan"):
        trainer.train()


def test_refusals():
    target = make_model("qwen3_5", "sdpa")
    with pytest.raises(ValueError, match="in torch.bfloat16, in which small steps are lost"):
        hf_ddtree.training.DrafterTrainer(target, new_drafter(target, 63).bfloat16(), None)
    with pytest.raises(ValueError, match="`draft_vocab_size`"):
        BlockLoss(make_drafter(target, draft_vocab_size=20), target, TrainingConfig())
    with pytest.raises(ValueError, match="`window_from_root` True"):
        save_drafter(make_drafter(target, window_from_root=True), "nowhere")
    for version in (1, 2):
        with pytest.raises(ValueError, match="`sample_from_anchor`, which z-lab's layout has no key for"):
            save_drafter(make_drafter(target, version=version, sample_from_anchor=True), "nowhere")
    with pytest.raises(ValueError, match="a `Linear`, but only drafters of the DFlash family"):
        hf_ddtree.training.DrafterTrainer(target, torch.nn.Linear(1, 1), None)
    with pytest.raises(ValueError, match="None of the 1 documents has a token to predict"):
        PackedDocuments([Document.answer(range(9), 9)], 8)
    with pytest.raises(ValueError, match="`kind` must be one of 'dflash', 'dflash2'"):
        new_drafter(target, 63, "eagle")
    for settings, message in (
        ({"steps": None}, "`steps` is None and `minutes` is None"),
        ({"loss": "l2"}, "`loss` must be one of 'cross_entropy'"),
        ({"rows": 0}, "`rows` must be an integer of at least 1"),
        ({"smoothing": 2}, "`smoothing` must be between 0 and 1"),
        ({"steps": None, "minutes": -1}, "`minutes` must be above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            TrainingConfig(**settings)


def test_mask_tokens():
    tokenizer = hf_ddtree.load_demo()[2]
    assert tokenizer.convert_ids_to_tokens(find_mask_token(tokenizer, 512)) == "<|mask|>"


def test_without_accelerate_the_error_names_what_to_install():
    code = "import sys; sys.modules['accelerate'] = None\nfrom hf_ddtree.training import TrainingConfig\n"
    code += "try: from hf_ddtree.training import DrafterTrainer\nexcept ImportError as error: print(error)"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=TESTS.parent)
    for command in ("pip install 'hf-ddtree[train]'", "in a clone pip install '.[train]'"):
        assert command in finished.stdout, finished.stderr[-2000:]
