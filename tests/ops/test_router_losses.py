"""Losses of a router over ranks: the value and the averaged gradients are those of the whole batch."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from weft.testing.ranks import run_ranks


def losses(router, x, mask, group):
    logits = router(x)
    probabilities = logits.softmax(-1)
    index = probabilities.topk(2, -1).indices
    balance = weft.load_balancing_loss(probabilities, index, mask=mask, group=group)
    return balance + 0.1 * weft.router_z_loss(logits, mask=mask, group=group), probabilities, index


def check_whole_batch(rank):
    alone = [dist.new_group([other]) for other in range(dist.get_world_size())][rank]
    torch.manual_seed(0)
    router = nn.Linear(4, 5).double()
    counts = [3, 6, 2]
    x, mask = torch.randn(sum(counts), 4).double(), torch.rand(sum(counts)) > 0.3
    expected, probabilities, index = losses(router, x, mask, alone)
    expected.backward()
    gradient, router.weight.grad = router.weight.grad, None

    kept, chosen = probabilities[mask], torch.nn.functional.one_hot(index[mask], 5).double()
    by_hand = 5 * (chosen.mean(0).sum(0) * kept.mean(0)).sum()  # transformers' formula
    by_hand = by_hand + 0.1 * router(x[mask]).logsumexp(-1).square().mean()
    assert torch.allclose(expected, by_hand)

    mine = x.split(counts)[rank], mask.split(counts)[rank]
    loss, _, _ = losses(router, *mine, dist.group.WORLD)
    assert torch.allclose(loss, expected)
    loss.backward()
    averaged = weft.all_reduce(router.weight.grad, op="avg")
    assert torch.allclose(averaged, gradient), (averaged - gradient).abs().max()


def test_values_and_averaged_gradients_are_those_of_the_whole_batch():
    run_ranks(check_whole_batch, 3)


def check_refusals(rank):
    with pytest.raises(ValueError, match="3 tokens have probabilities and 2 chose experts"):
        weft.load_balancing_loss(torch.ones(3, 4), torch.zeros(2, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match="does not match 3 tokens"):
        weft.router_z_loss(torch.ones(3, 4), mask=torch.ones(2, dtype=torch.bool))


def test_tokens_that_do_not_match_are_refused():
    run_ranks(check_refusals, 1)
