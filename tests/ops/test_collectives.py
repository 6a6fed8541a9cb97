"""The collectives as functions: values and gradients against the same arithmetic in one process."""

import pytest
import torch
import torch.distributed as dist

import weft
from weft.testing.ranks import run_ranks


def inputs(world, rows, seed=0):
    torch.manual_seed(seed)
    return [torch.randn(rows, 3, dtype=torch.float64, requires_grad=True) for _ in range(world)]


def check(rank, name):
    world = dist.get_world_size()
    if name == "all_gather":
        torch.manual_seed(0)
        xs = [torch.randn(r + 1, 3, dtype=torch.float64, requires_grad=True) for r in range(world)]
        ys, call = [torch.cat(xs)] * world, weft.all_gather
    elif name == "reduce_scatter":
        xs = inputs(world, 7)
        ys, call = sum(xs).split(weft.split_sizes(7, world)), weft.reduce_scatter
    elif name == "broadcast":
        xs = inputs(world, 4)
        ys, call = [xs[1]] * world, lambda x: weft.broadcast(x, src=1)
    elif name == "average":
        xs = inputs(world, 4)
        ys, call = [sum(xs) / world] * world, lambda x: weft.all_reduce(x, op="avg")
    else:
        xs = inputs(world, 4)
        ys, call = [sum(xs)] * world, weft.all_reduce
    weights = [torch.linspace(r + 1, 2, y.numel(), dtype=torch.float64).view(y.shape) for r, y in enumerate(ys)]
    sum((y * weight).sum() for y, weight in zip(ys, weights, strict=True)).backward()
    x = xs[rank].detach().clone().requires_grad_()
    y = call(x)
    torch.testing.assert_close(y, ys[rank], rtol=1e-12, atol=1e-13)
    assert torch.equal(x, xs[rank]), "what takes part in autograd is left as it is"
    (y * weights[rank]).sum().backward()
    expected = torch.zeros_like(x) if xs[rank].grad is None else xs[rank].grad  # not broadcast: no gradient
    torch.testing.assert_close(x.grad, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("backend", ["weft", "gloo"])
@pytest.mark.parametrize("name", ["all_reduce", "average", "all_gather", "reduce_scatter", "broadcast"])
def test_values_and_gradients(name, backend):
    if (name, backend) == ("average", "gloo"):
        pytest.skip("gloo has no average")
    run_ranks(check, 3, name, backend=backend)


def check_all_to_all(rank):
    world = dist.get_world_size()
    torch.manual_seed(rank)
    parts = [torch.randn(rank + r, 2, dtype=torch.float64, requires_grad=True) for r in range(world)]
    got = weft.all_to_all(parts)
    assert [len(part) for part in got] == [rank + r for r in range(world)]
    back = weft.all_to_all(got)
    assert all(map(torch.equal, back, parts))
    sum((part * (rank + 1)).sum() for part in got).backward()
    assert all((part.grad == r + 1).all() for r, part in enumerate(parts))


def check_all_to_all_of_some(rank):
    group = dist.new_group([0, 2])
    if rank == 1:
        return
    here = rank // 2
    got = weft.all_to_all([torch.full((r + 1,), 10.0 * here + r) for r in range(2)], group=group)
    assert [part.tolist() for part in got] == [[10.0 * r + here] * (here + 1) for r in range(2)]


def test_all_to_all_of_a_group():
    run_ranks(check_all_to_all_of_some, 3)


@pytest.mark.parametrize("backend", ["weft", "gloo"])
def test_all_to_all_sends_gradients_back(backend):
    run_ranks(check_all_to_all, 3, backend=backend)


def check_wire(rank):
    x = torch.tensor([1.0 + 2**-12, 3.0]) * (rank + 1)
    expected = (
        sum((torch.tensor([1.0 + 2**-12, 3.0]) * (r + 1)).bfloat16().float() for r in range(3)).bfloat16().float()
    )
    y = weft.all_reduce(x, wire_dtype=torch.bfloat16)
    assert y is x and y.dtype == torch.float32 and torch.equal(y, expected)
    with pytest.raises(ValueError, match="op='mul' is not one of"):
        weft.all_reduce(x, op="mul")
    with pytest.raises(ValueError, match="has no gradient here"):
        weft.all_reduce(x.requires_grad_(), op="max")
    with pytest.raises(ValueError, match="expected 3 parts"):
        weft.all_to_all([x])
    weft.barrier()


def test_a_wire_type_rounds_what_travels_and_bad_input_is_refused():
    run_ranks(check_wire, 3)


def check_norm(rank):
    world = dist.get_world_size()
    torch.manual_seed(0)
    residual, weight = torch.randn(2, 5, 7, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    parts = [torch.randn(2, 5, 7, dtype=torch.float64) for _ in range(world)]
    normalised, total = weft.all_reduce_rms_norm(parts[rank].clone(), residual, weight, 1e-3)
    torch.testing.assert_close(total, residual + sum(parts), rtol=1e-12, atol=1e-13)
    expected = total / (total.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight
    torch.testing.assert_close(normalised, expected, rtol=1e-12, atol=1e-13)
    x = torch.ones(2, 3)
    for bad, error, complaint in (
        ((x, x[:1], x[0]), ValueError, r"partial \[2, 3\], residual \[1, 3\], weight \[3\]; expected .* one shape"),
        ((x, x, x[:, 0]), ValueError, r"weight \[2\]; expected"),
        ((x, x, x), ValueError, r"weight \[2, 3\]; expected"),
        ((x, x, x[0].double()), TypeError, "weight torch.float64; expected one floating-point type"),
        ((x.int(), x.int(), x[0].int()), TypeError, "expected one floating-point type"),
        ((x, x.to("meta"), x[0]), ValueError, "residual on meta, weight on cpu; expected one device"),
        ((x, x, torch.nn.Parameter(x[0])), ValueError, "weight needs one; call it under torch.no_grad"),
    ):
        with pytest.raises(error, match=complaint):
            weft.all_reduce_rms_norm(*bad, 1e-5)
    with torch.no_grad():
        weft.all_reduce_rms_norm(x, x, torch.nn.Parameter(x[0].clone()), 1e-5)


@pytest.mark.parametrize("backend", ["weft", "gloo"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_norm_is_of_the_residual_and_the_sum(world, backend):
    run_ranks(check_norm, world, backend=backend)
