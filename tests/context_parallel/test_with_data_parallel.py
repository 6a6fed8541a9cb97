"""Data and context parallelism together: weft.DataParallel over the ranks of dp and cp steps as one process does."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import weft
from weft.testing import tolerance
from weft.testing.ranks import run_ranks

LENGTH, VOCABULARY, HEADS, WIDTH = 13, 11, 3, 12  # a length that is cut unevenly
STEPS = 4


class Decoder(nn.Module):
    """One block. Its attention is torch's; or, over a group, each rank has a part of the sequence."""

    def __init__(self, group=None):
        super().__init__()
        torch.manual_seed(0)
        self.group = group
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.norm, self.qkv, self.output = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.logits = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.logits.weight = self.tokens.weight

    def forward(self, tokens, positions):
        x = self.tokens(tokens) + self.positions(positions)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1))
        if self.group is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = weft.context_attention(q, k, v, group=self.group, causal=True)
        return self.logits(x + self.output(y.transpose(1, 2).flatten(-2)))


def batch_of(step, rows=4):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (rows, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def summed_loss(model, tokens, labels, positions):
    return F.cross_entropy(model(tokens, positions).flatten(0, 1), labels.flatten(), reduction="sum")


def alone(dtype):
    """One process with the whole batch: the first gradients, and the parameters after all steps."""
    model = Decoder().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    first = None
    for step in range(STEPS):
        tokens, labels = batch_of(step)
        optimizer.zero_grad()
        (summed_loss(model, tokens, labels, torch.arange(LENGTH)) / labels.numel()).backward()
        first = first or [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
    return first, list(model.parameters())


def assert_same_bits_everywhere(values):
    for value in values:
        parts = [torch.empty_like(value) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, value.detach())
        assert all(torch.equal(part, value) for part in parts)


def check(found, which):
    for mine, plain, exact in zip(found, alone(torch.float32)[which], alone(torch.float64)[which], strict=True):
        tolerance.assert_close(mine.detach(), plain.detach(), exact.detach())
    assert_same_bits_everywhere(found)


def parts_of_sequences(rank, dp, cp, shards):
    """Each rank has a part of its replica's sequences: sums over dp x cp, of losses over the number of all tokens."""
    mesh = weft.init_mesh(dp=dp, cp=cp, device_type="cpu")
    model = weft.DataParallel(
        Decoder(mesh["cp"]), group=mesh["dp", "cp"]._flatten("dp_cp"), average=False, shard_optimizer=shards
    )
    options = dict(lr=0.5, momentum=0.9)
    optimizer = (
        model.optimizer(torch.optim.SGD, **options) if shards else torch.optim.SGD(model.parameters(), **options)
    )
    replica = mesh["dp"].get_local_rank()
    for step in range(STEPS):
        tokens, labels = (whole.chunk(dp)[replica] for whole in batch_of(step))
        here = [weft.shard_sequence(x, dim=1, group=mesh["cp"]) for x in (tokens, labels)]
        positions = weft.shard_sequence(torch.arange(LENGTH), dim=0, group=mesh["cp"])
        optimizer.zero_grad()
        (summed_loss(model, *here, positions) / batch_of(step)[1].numel()).backward()
        if step == 0 and not shards:
            check([parameter.grad for parameter in model.parameters()], 0)
        optimizer.step()
    check(list(model.parameters()), 1)


@pytest.mark.parametrize(("dp", "cp", "shards"), [(2, 2, False), (2, 2, True), (1, 3, False), (4, 1, False)])
def test_sums_over_dp_and_cp_are_the_whole_batchs_gradients(dp, cp, shards):
    run_ranks(parts_of_sequences, dp * cp, dp, cp, shards)


def shared_by_parallelize(rank, shards):
    """weft.parallelize has summed over cp already: DataParallel averages over dp."""
    mesh = weft.init_mesh(dp=2, cp=2, device_type="cpu")
    module = weft.parallelize(copy.deepcopy(Decoder()), mesh["cp"])
    model = weft.DataParallel(module, group=mesh["dp"], shard_optimizer=shards)
    options = dict(lr=0.5, momentum=0.9)
    optimizer = (
        model.optimizer(torch.optim.SGD, **options) if shards else torch.optim.SGD(model.parameters(), **options)
    )
    for step in range(STEPS):
        tokens, labels = (whole.chunk(2)[mesh["dp"].get_local_rank()] for whole in batch_of(step))
        optimizer.zero_grad()
        (summed_loss(model, tokens, labels, torch.arange(LENGTH)) / labels.numel()).backward()
        if step == 0 and not shards:
            check([parameter.grad for parameter in model.parameters()], 0)
        optimizer.step()
    check(list(model.parameters()), 1)


@pytest.mark.parametrize("shards", [False, True])
def test_a_model_that_shares_its_sequence_is_averaged_over_dp(shards):
    run_ranks(shared_by_parallelize, 4, shards)


def left_out(rank):
    mesh = weft.init_mesh(dp=2, cp=2, device_type="cpu")
    model = weft.DataParallel(Decoder(mesh["cp"]), group=mesh["dp"])  # nobody sums over cp
    tokens, labels = (whole.chunk(2)[mesh["dp"].get_local_rank()] for whole in batch_of(0))
    here = [weft.shard_sequence(x, dim=1, group=mesh["cp"]) for x in (tokens, labels)]
    positions = weft.shard_sequence(torch.arange(LENGTH), dim=0, group=mesh["cp"])
    (summed_loss(model, *here, positions) / labels.numel()).backward()
    with pytest.raises(AssertionError, match="off by"):
        check([parameter.grad for parameter in model.parameters()], 0)


def test_gradients_that_are_not_summed_over_cp_would_be_noticed():
    run_ranks(left_out, 4)
