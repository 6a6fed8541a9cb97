"""What an all_reduce does in its own pass: cast, scale, squared norm; the bits of separate passes, on every path."""

import pytest
import torch
import torch.distributed as dist

import weft
from weft.testing import reference
from weft.testing.ranks import run_ranks

CASES = [  # of the tensor, on the wire
    (torch.float32, None),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, None),
    (torch.float16, None),
    (torch.float64, None),
]
COUNTS = [0, 1, 7, 5000, 70_001, 200_003]  # less than a block, one exchange, several chunks


def check_bits(rank):
    world = dist.get_world_size()
    dist.group.WORLD.engine.group.inject_faults(seed=rank + 1, longest_delay_us=200)
    norm = torch.zeros(1, dtype=torch.float64)
    for dtype, wire in CASES:
        for count in COUNTS:
            torch.manual_seed(count)
            parts = [(torch.randn(count, dtype=torch.float64) * 3).to(dtype) for _ in range(world)]
            for op, scale in (("sum", 0.3), ("avg", 1.0), ("avg", 1 / 1024)):
                expected = reference.fused_sum(parts, wire, scale, op == "avg")
                symmetric = weft.empty_symmetric(count, dtype=dtype)
                for x in (symmetric.copy_(parts[rank]), parts[rank].clone(), parts[rank].repeat(2, 1).t()[:, 1]):
                    y = weft.all_reduce(x, op=op, wire_dtype=wire, scale=scale, squared_norm=norm)
                    assert y is x and torch.equal(x, expected), (dtype, wire, count, op, scale)
                    exact = expected.double().square().sum()
                    assert torch.allclose(norm, exact, rtol=1e-12, atol=0), (norm, exact)
                    norms = [torch.empty_like(norm) for _ in range(world)]
                    dist.all_gather(norms, norm)
                    assert all(torch.equal(norm, other) for other in norms), "the same bits on every rank"


@pytest.mark.parametrize(
    "world", [1, 3, *(pytest.param(x, marks=pytest.mark.slow("csrc/shm", "pytorch_ext/comm")) for x in (2, 5))]
)
def test_a_fused_pass_has_the_bits_of_separate_ones(world):
    run_ranks(check_bits, world)


def check_not_finite(rank):
    norm = torch.zeros((), dtype=torch.float64)
    for count in (100, 100_000):
        for bad in (float("inf"), float("nan"), 3e38):
            x = torch.full((count,), 1.0)
            weft.all_reduce(x, squared_norm=norm)
            assert norm.item() == count * 9
            x = torch.full((count,), 1e19)  # squares overflow fp32, not the norm
            weft.all_reduce(x, squared_norm=norm)
            assert norm.isfinite()
            if rank == 1 or bad == 3e38:  # 3e38 + 3e38 overflows in the sum
                x[-1] = bad
            weft.all_reduce(x, squared_norm=norm)
            assert not norm.isfinite() and not x[-1].isfinite()


def test_the_norm_is_finite_exactly_where_the_result_is():
    run_ranks(check_not_finite, 3)


def check_gradient(rank):
    x = torch.full((5,), rank + 1.0, requires_grad=True)
    y = weft.all_reduce(x, scale=0.5, wire_dtype=torch.bfloat16)
    assert torch.equal(y, torch.full((5,), 1.5))
    (y * (rank + 1)).sum().backward()
    assert torch.equal(x.grad, torch.full((5,), 1.5))
    with pytest.raises(ValueError, match="squared_norm is not differentiable"):
        weft.all_reduce(x, squared_norm=torch.zeros(1, dtype=torch.float64))


def test_a_scale_is_differentiated():
    run_ranks(check_gradient, 2)


def check_refusals(rank):
    x = torch.ones(4)
    with pytest.raises(ValueError, match="float32 can travel as bfloat16 or float16"):
        weft.all_reduce(x.double(), wire_dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="floating-point tensors, got torch.int32"):
        weft.all_reduce(x.int(), scale=2.0)
    with pytest.raises(ValueError, match="float64 CPU tensor of one element"):
        weft.all_reduce(x, squared_norm=torch.zeros(1))
    with pytest.raises(ValueError, match="'max' takes no wire_dtype"):
        weft.all_reduce(x, op="max", scale=2.0)
    with pytest.raises(weft.CollectiveMismatchError, match=r"rank 0 called .*scaled by 1\), .* scaled by 2\)"):
        weft.all_reduce(x, scale=1.0 + rank, wire_dtype=torch.bfloat16)
    assert torch.equal(weft.all_reduce(x), torch.full((4,), 2.0)), "nothing moved, and the group stays usable"


def test_what_cannot_be_fused_is_refused():
    run_ranks(check_refusals, 2)


def check_other_backend(rank):
    parts = [torch.arange(100.0) * (r + 1) / 7 for r in range(2)]
    norm = torch.zeros(1, dtype=torch.float64)
    x = weft.all_reduce(parts[rank].clone(), scale=0.25, squared_norm=norm)
    assert torch.equal(x, reference.fused_sum(parts, None, 0.25))
    assert torch.allclose(norm, x.double().square().sum())


def test_another_backend_does_the_same_in_passes_of_its_own():
    run_ranks(check_other_backend, 2, backend="gloo")
