"""The generator that is as accurate as it is told to be."""

import torch

from hf_ddtree import DraftContext
from hf_ddtree.testing import SetAccuracyGenerator

SEQUENCE = torch.randint(0, 40, (6000,), generator=torch.Generator().manual_seed(1))


def propose(generator, length, budget):
    return generator.propose(DraftContext(SEQUENCE[None, :length], [length - 1]), budget)[0]


def test_ranks_come_as_often_as_stated():
    generator = SetAccuracyGenerator(SEQUENCE, 40, accuracy=0.6, horizon=3, top_k=4)
    right = torch.zeros(4)
    for position in range(len(SEQUENCE) - 3):
        log_probs, token_ids = generator.candidates(position)
        assert all(len(set(tokens)) == 4 for tokens in token_ids.tolist())
        right += token_ids[0] == SEQUENCE[position]
    torch.testing.assert_close(right / (len(SEQUENCE) - 3), log_probs[0].exp(), atol=0.02, rtol=0)
    torch.testing.assert_close(log_probs[2].exp(), torch.tensor([0.6, 0.24, 0.096, 0.0384]))


def test_chain_and_tree_are_right_at_the_same_positions():
    chains = SetAccuracyGenerator(SEQUENCE, 40, accuracy=0.7, shape="chain", horizon=5)
    trees = SetAccuracyGenerator(SEQUENCE, 40, accuracy=0.7, horizon=5)
    num_right = 0
    for length in range(1, 300):
        chain, tree = propose(chains, length, 5), propose(trees, length, 32)
        assert chain.is_chain and len(chain) == 6 and int(tree.token_ids[0]) == int(SEQUENCE[length - 1])
        # A tree has as its best chain what the chain is: right where that is right.
        matches = [drafted[1] == SEQUENCE[length] for drafted in (chain.token_ids, tree.best_chain().token_ids)]
        assert matches[0] == matches[1]
        num_right += int(matches[0])
    assert 0.6 < num_right / 299 < 0.8


def test_off_the_sequence_nothing_is_known():
    generator = SetAccuracyGenerator(SEQUENCE, 40, accuracy=1 - 1e-9, horizon=4)
    assert propose(generator, 50, 4).token_ids[1:].tolist() == SEQUENCE[50:54].tolist()
    emitted = SEQUENCE[None, :50].clone()
    emitted[0, 3] += 1
    drafts = [generator.propose(DraftContext(emitted, [49]), 4)[0].token_ids[1:].tolist() for _ in range(3)]
    assert all(draft != SEQUENCE[50:54].tolist() for draft in drafts)
