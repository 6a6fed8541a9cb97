"""ParallelEmbedding against nn.Embedding: the same bits, and a gradient where the row lives."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from weft.testing import reference
from weft.testing.ranks import run_ranks


def check_table(rank, dtype, padding_idx):
    world = dist.get_world_size()
    for rows, width in ((13, 5), (world, 1), (64, 8)):
        torch.manual_seed(rows)
        whole = nn.Embedding(rows, width, padding_idx, dtype=dtype)
        torch.manual_seed(rows)
        layer = weft.ParallelEmbedding(rows, width, padding_idx, dtype=dtype)
        shard = weft.shard_of(layer.weight)
        assert torch.equal(layer.weight, shard.take(whole.weight))
        tokens = torch.randint(0, rows, (3, 7))
        dy = torch.randn(3, 7, width, dtype=dtype)
        y = layer(tokens)
        assert torch.equal(y, reference.embedding(tokens, whole.weight, whole.padding_idx))
        y.backward(dy)
        reference.embedding(tokens, whole.weight, whole.padding_idx).backward(dy)
        assert torch.equal(layer.weight.grad, shard.take(whole.weight.grad))  # nothing crosses ranks in backward


@pytest.mark.parametrize("padding_idx", [None, 0, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_rows_and_gradients_are_the_whole_tables_to_the_bit(world, dtype, padding_idx):
    run_ranks(check_table, world, dtype, padding_idx)


def check_from_embedding(rank):
    whole = nn.Embedding(9, 4).eval()
    whole.weight.requires_grad_(False)
    layer = weft.ParallelEmbedding.from_embedding(whole)
    assert not layer.training and not layer.weight.requires_grad
    assert torch.equal(layer(torch.arange(9)), whole.weight)
    assert torch.equal(layer(torch.empty(0, 3, dtype=torch.int64)), torch.empty(0, 3, 4))
    twin = copy.deepcopy(layer)
    twin.load_state_dict(whole.state_dict())
    assert torch.equal(twin.weight, layer.weight) and weft.shard_of(twin.weight) is not None
    torch.manual_seed(5)
    layer.reset_parameters()
    torch.manual_seed(5)
    assert torch.equal(layer.weight, weft.shard_of(layer.weight).take(nn.Embedding(9, 4).weight))


def test_an_existing_table_keeps_its_state():
    run_ranks(check_from_embedding, 2)


def check_refusals(rank):
    layer = weft.ParallelEmbedding(8, 2)
    calls = dist.group.WORLD.engine.group.calls
    for error, message, call in (
        (IndexError, "tokens span -1 to 3; they must lie in 0 to 7", lambda: layer(torch.tensor([-1, 3]))),
        (IndexError, "tokens span 0 to 8", lambda: layer(torch.tensor([0, 8]))),
        (TypeError, "tokens must be int64 or int32, got torch.float32", lambda: layer(torch.ones(2))),
        (ValueError, "2 elements cannot be split over 3 ranks", lambda: weft.ParallelEmbedding(2, 4)),
        (
            ValueError,
            "does not take max_norm=1.0",
            lambda: weft.ParallelEmbedding.from_embedding(nn.Embedding(8, 2, max_norm=1.0)),
        ),
        (
            ValueError,
            "does not take sparse=True",
            lambda: weft.ParallelEmbedding.from_embedding(nn.Embedding(8, 2, sparse=True)),
        ),
    ):
        with pytest.raises(error, match=message):
            call()
    assert dist.group.WORLD.engine.group.calls == calls


def test_bad_input_is_refused_before_anything_is_communicated():
    run_ranks(check_refusals, 3)
