"""The reduction contract in one process: order, accumulator, rounding; the same bits on every instruction set."""

import pytest
import torch

from weft import _C
from weft.testing import reference

INSTRUCTION_SETS = _C.instruction_sets()
DTYPES = [getattr(torch, name) for name in _C.dtypes]
FLOATING = [dtype for dtype in DTYPES if dtype.is_floating_point]


def reduce(parts, op, instruction_set="baseline"):
    out = torch.empty_like(parts[0])
    name = str(parts[0].dtype).removeprefix("torch.")
    addresses = [part.data_ptr() for part in parts]
    code = _C.dtypes["bool" if name == "boolean" else name]
    _C.reduce(addresses, out.data_ptr(), out.numel(), code, _C.reduce_ops[op], instruction_set)
    return out


def same_bits(a, b):
    return a.dtype == b.dtype and bool(
        ((a == b) | (a.isnan() & b.isnan())).all() if a.is_floating_point() else (a == b).all()
    )


def operators(dtype):
    common = ["sum", "min", "max", "product"]
    average = ["avg"] if dtype != torch.bool else []
    bitwise = ["bitwise_and", "bitwise_or", "bitwise_xor"] if not dtype.is_floating_point else []
    return [*common, *average, *bitwise]


def random_parts(dtype, count, world):
    if dtype == torch.bool:
        return [torch.rand(count) < 0.5 for _ in range(world)]
    if dtype.is_floating_point:
        return [(torch.randn(count, dtype=torch.float64) * 3).to(dtype) for _ in range(world)]
    limits = torch.iinfo(dtype)
    return [torch.randint(limits.min, limits.max, (count,), dtype=dtype) for _ in range(world)]


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_operator_is_the_reference_to_the_bit(dtype, instruction_set):
    for world in (1, 2, 3, 5):
        for count in (0, 1, 7, 64, 2047, 2048, 5000):
            parts = random_parts(dtype, count, world)
            for op in operators(dtype):
                assert same_bits(reduce(parts, op, instruction_set), reference.reduce(parts, op)), (op, world, count)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_half_precision_number_survives_and_every_sum_rounds_as_torch_does(dtype, instruction_set):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    assert same_bits(reduce([every], "sum", instruction_set), every)
    for _ in range(8):
        other = every[torch.randperm(len(every))]
        exact = (every.float() + other.float()).to(dtype)
        assert same_bits(reduce([every, other], "sum", instruction_set), exact)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_half_precision_does_not_depend_on_flush_to_zero(instruction_set):
    denormals = torch.arange(1, 1024, dtype=torch.int16).view(torch.float16)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no flush-to-zero mode")
    try:
        assert same_bits(reduce([denormals], "sum", instruction_set).view(torch.int16), denormals.view(torch.int16))
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_the_sum_is_in_the_order_of_ranks(dtype):
    """Large, minus large, small: only the order given keeps the small one; only fp32 keeps it in 16 bits."""
    large = torch.tensor([1e4], dtype=dtype)
    small = torch.tensor([0.25], dtype=dtype)
    assert reduce([large, -large, small], "sum").item() == 0.25
    exact = torch.tensor([1e8], dtype=torch.float32)
    assert reduce([exact, small.float(), -exact], "sum").item() == 0.0


def test_16_bit_types_accumulate_in_32_bits():
    parts = [torch.tensor([1.0], dtype=torch.bfloat16)] + [torch.tensor([2**-9], dtype=torch.bfloat16)] * 4
    assert reduce(parts, "sum").item() == 1.0078125  # accumulated in bf16 it would stay 1.0


def test_the_destination_may_be_a_source():
    parts = random_parts(torch.float32, 5000, 3)
    expected = reference.reduce(parts)
    _C.reduce([part.data_ptr() for part in parts], parts[1].data_ptr(), 5000, 0, 0, INSTRUCTION_SETS[0])
    assert same_bits(parts[1], expected)


def test_an_average_of_integers_drops_what_is_left_over():
    parts = [torch.tensor([-7, 7, 1, 120], dtype=torch.int8), torch.tensor([-4, 4, 1, 1], dtype=torch.int8)]
    assert reduce(parts, "avg").tolist() == [-5, 5, 1, 60]
    many = [torch.ones(3, dtype=torch.int8)] * 200  # more than the type's largest number
    assert reduce(many, "avg").tolist() == [0, 0, 0], "200 ones are -56 in 8 bits, and -56 / 200 is 0"


def test_an_average_of_booleans_and_bits_of_floats_are_refused():
    whole, real = [torch.ones(4, dtype=torch.bool)], [torch.ones(4)]
    with pytest.raises(ValueError, match='"avg" of bool'):
        reduce(whole, "avg")
    with pytest.raises(ValueError, match='"bitwise_or" of float32'):
        reduce(real, "bitwise_or")


def test_an_instruction_set_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="does not run here; this machine runs .*baseline"):
        reduce([torch.ones(1)], "sum", "avx1024")


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 1000, 100_003])
@pytest.mark.parametrize(("source_start", "start"), [(0, 0), (1, 0), (0, 3), (5, 61)])
def test_a_copy_past_the_cache_copies_its_bytes_and_no_others(count, source_start, start):
    source = torch.randint(256, (count + 128,), dtype=torch.uint8)
    target = torch.randint(256, (count + 256,), dtype=torch.uint8)
    expected = target.clone()
    expected[start : start + count] = source[source_start : source_start + count]
    _C.copy_past_cache(source.data_ptr() + source_start, target.data_ptr() + start, count)
    assert torch.equal(target, expected)
