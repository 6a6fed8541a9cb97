"""LoRA on split layers: the outputs and gradients of the whole layers, and no more communication in forward."""

import pytest
import torch
import torch.nn.functional as F

import weft
from weft.testing.ranks import run_ranks


def close(result, expected):
    return torch.allclose(result, expected, rtol=1e-10, atol=1e-10)


def of(shard, whole):
    return whole if shard is None else shard.take(whole)


def check_pair(rank, world, options, region):
    """An MLP of two layers, each with an adapter, in a sequence-parallel region or outside of one."""
    generator = torch.Generator().manual_seed(1)
    inside = {"sequence_parallel": True, "sequence_dim": 1} if region else {}
    torch.manual_seed(2)
    up = weft.ParallelLinear(6, 12, style="column", dtype=torch.float64, **options, **inside)
    down = weft.ParallelLinear(12, 5, style="row", dtype=torch.float64, **options, **inside)
    torch.manual_seed(2)
    whole = torch.nn.Linear(6, 12).double(), torch.nn.Linear(12, 5).double()
    layers = [weft.nn.LoRA(up, 3, alpha=7), weft.nn.LoRA(down, 2, rank_stabilized=True)]
    matrices = []
    for plain, layer, (inputs, outputs, r) in zip(whole, layers, [(6, 12, 3), (12, 5, 2)], strict=True):
        a, b = (torch.randn(shape, generator=generator).double() for shape in ((r, inputs), (outputs, r)))
        for name, parameter in ((n, x) for n, x in layer.base.named_parameters()):
            parameter.data.copy_(of(weft.shard_of(parameter), plain.get_parameter(name).data))
        for part, value in ((layer.a.weight, a), (layer.b.weight, b)):
            part.data.copy_(of(weft.shard_of(part), value))
        matrices.append((a.requires_grad_(), b.requires_grad_()))
    x = torch.randn(2, 7, 6, generator=generator).double().requires_grad_()
    y = x
    for plain, (a, b), scaling in zip(whole, matrices, (7 / 3, 2 / 2**0.5), strict=True):
        y = F.silu(plain(y) + scaling * y @ a.T @ b.T)
    direction = torch.randn(y.shape, generator=generator).double()
    (y * direction).sum().backward()

    sizes = weft.split_sizes(7, world)
    mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1])) if region else slice(None)
    own = x.detach()[:, mine].clone().requires_grad_()
    result = F.silu(layers[1](F.silu(layers[0](own))))
    assert close(result, y.detach()[:, mine])
    (result * direction[:, mine]).sum().backward()
    assert close(own.grad, x.grad[:, mine])
    for layer, (a, b) in zip(layers, matrices, strict=True):
        assert layer.base.weight.grad is None
        for part, value in ((layer.a.weight, a), (layer.b.weight, b)):
            assert close(part.grad.as_subclass(torch.Tensor), of(weft.shard_of(part), value.grad))


def check_replicated_heads(rank):
    """Two KV heads on three ranks: rows of B are on several ranks, and their gradient is the sum."""
    layer = weft.ParallelLinear(5, 4, style="column", unit=2, heads=(4, 2), dtype=torch.float64)
    lora = weft.nn.LoRA(layer, 2)
    a, b = torch.randn(2, 5).double().requires_grad_(), torch.randn(4, 2).double().requires_grad_()
    shard = weft.shard_of(lora.b.weight)
    assert shard.cut.replicated
    lora.a.weight.data.copy_(a.data), lora.b.weight.data.copy_(shard.take(b.data))
    x, factor = torch.randn(3, 5).double(), torch.arange(1.0, 4.0).double()  # of each rank's queries
    (lora(x) * factor[rank]).sum().backward()
    of_rank = torch.zeros(4).double()
    for other, stretches in enumerate(shard.cut.stretches):
        for start, stop in stretches:
            of_rank[start:stop] += factor[other]
    ((x @ a.T @ b.T) * of_rank).sum().backward()
    assert close(lora.b.weight.grad.as_subclass(torch.Tensor), shard.take(b.grad)) and close(lora.a.weight.grad, a.grad)


def check_draws(rank):
    torch.manual_seed(4)
    first = weft.nn.LoRA(weft.ParallelLinear(8, 6, style="row"), 2).a.weight
    torch.manual_seed(4)
    torch.nn.Linear(8, 6)
    whole = torch.nn.Linear(8, 2, bias=False).weight
    torch.nn.Linear(2, 6, bias=False)
    torch.nn.init.kaiming_uniform_(whole, a=5**0.5)
    assert torch.equal(first, weft.shard_of(first).take(whole))


def check_all(rank, world):
    for options in ({}, {"unit": 2}, {"parts": (4, 8)}):
        for region in (False, True):
            check_pair(rank, world, options, region)
    if world == 3:
        torch.manual_seed(3)
        check_replicated_heads(rank)
    check_draws(rank)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_outputs_and_gradients_are_those_of_the_whole_layers(world):
    run_ranks(check_all, world, world)


def check_refused(rank):
    for layer, rank_of_it, message in (
        (weft.ParallelLinear(4, 6, style="column", activation="gelu"), 2, "its activation 'gelu' would come before"),
        (weft.ParallelLinear(4, 6, style="row"), 5, "LoRA of rank 5 on ParallelLinear.4, 6.: .* at most 4"),
        (weft.ParallelLinear(4, 6, style="row"), 0, "at least 1"),
        (weft.ParallelLinear(4, 6, style="column", invariant=2), 2, "not supported with invariant=2"),
    ):
        with pytest.raises(ValueError, match=message):
            weft.nn.LoRA(layer, rank_of_it)


def test_adapters_that_a_layer_cannot_take_are_refused():
    run_ranks(check_refused, 2)
