"""Buckets: packing, unpacking and the sum in rank order, to the bit; and what the same pass finds out about the numbers."""

import math

import pytest
import torch

from weft.kernels import bucket as module
from weft.kernels import launch
from weft.kernels.bucket import ALIGNMENT, PackedBucket, Statistics, reduce
from weft.testing import reference

pytestmark = pytest.mark.kernel

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
COUNTS = [1, 0, 7, 8, 4097, 1023, 4096, 12_289, 9]


def draw(device, *shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def gradients(device, seed=0):
    """Of every type in turn, and of sizes around a block's and an access's."""
    return [
        draw(device, count, dtype=DTYPES[number % 3], seed=seed + number)
        for number, count in enumerate([*COUNTS, *COUNTS[::-1]])
    ]


def misaligned(tensor):
    """The same numbers, one element past where an allocation starts."""
    moved = torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)
    assert moved.data_ptr() % 16
    return moved


def poisoned(count, dtype, device):
    """NaNs to write to, amid more NaNs that must stay."""
    whole = torch.full((count + 128,), torch.nan, dtype=dtype, device=device)
    return whole[64 : 64 + count], whole


def untouched(whole, count):
    return bool(whole[:64].isnan().all() and whole[64 + count :].isnan().all())


def written(tensor, scale, dtype):
    """round(scale * tensor), in fp32."""
    return (tensor.float() * torch.tensor(scale, dtype=torch.float32)).to(dtype)


def expected_flat(bucket, tensors, scale, dtype):
    flat = torch.zeros(bucket.elements, dtype=dtype)
    for slot, tensor in zip(bucket.slots, tensors, strict=True):
        if tensor is not None:
            flat[slot.offset : slot.offset + slot.count] = written(tensor.cpu(), scale, dtype)
    return flat.to(bucket.device)


def same_bits(a, b):
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.view(integers), b.view(integers))


def check_statistics(statistics, *results):
    exact = sum(result.double().square().sum().item() for result in results)
    assert statistics.squared_norm.dtype == torch.float64 and statistics.nonfinite.dtype == torch.float32
    if math.isfinite(exact):
        assert statistics.squared_norm.item() == pytest.approx(exact, rel=1e-14)
        assert statistics.nonfinite.item() == 0.0
    else:
        assert not math.isfinite(statistics.squared_norm.item())
        assert statistics.nonfinite.item() == 1.0
    assert statistics._ticket.item() == 0


@pytest.mark.sanitize
@pytest.mark.parametrize("scale", [1.0, 1 / 3, -2.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packing_writes_every_tensor_and_zeros_between(device, dtype, scale):
    tensors = gradients(device)
    bucket, statistics = PackedBucket(tensors), Statistics(device)
    flat, whole = poisoned(bucket.elements, dtype, device)
    bucket.pack(tensors, flat, scale, statistics)
    assert same_bits(flat, expected_flat(bucket, tensors, scale, dtype))
    assert untouched(whole, bucket.elements)
    check_statistics(statistics, flat)


@pytest.mark.sanitize
@pytest.mark.parametrize("scale", [1.0, 1 / 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unpacking_writes_every_tensor_and_nothing_else(device, dtype, scale):
    like = gradients(device)
    bucket, statistics = PackedBucket(like), Statistics(device)
    flat = draw(device, bucket.elements, dtype=dtype, seed=9)
    before = flat.clone()
    for shift in (0, 1):  # aligned, and not
        results, wholes = zip(*(poisoned(t.numel() + shift, t.dtype, device) for t in like), strict=True)
        results = [result[shift:] for result in results]
        bucket.unpack(flat, results, scale, statistics)
        for slot, result, whole in zip(bucket.slots, results, wholes, strict=True):
            expected = written(flat[slot.offset : slot.offset + slot.count], scale, slot.dtype)
            assert same_bits(result, expected)
            assert untouched(whole, slot.count + shift) and whole[64 : 64 + shift].isnan().all()
        check_statistics(statistics, *results)
    assert same_bits(flat, before)


def test_a_round_trip_through_fp32_changes_nothing(device):
    tensors = gradients(device)
    bucket = PackedBucket(tensors)
    flat, results = bucket.empty(torch.float32), [torch.full_like(tensor, torch.nan) for tensor in tensors]
    bucket.pack(tensors, flat)
    bucket.unpack(flat, results)
    for tensor, result in zip(tensors, results, strict=True):
        assert same_bits(tensor, result)


def test_tensors_start_at_multiples_of_the_alignment_in_their_order(device):
    bucket = PackedBucket(gradients(device))
    ends = [0, *(slot.offset + slot.count for slot in bucket.slots)]
    for slot, end in zip(bucket.slots, ends, strict=False):
        assert slot.offset % ALIGNMENT == 0 and 0 <= slot.offset - end < ALIGNMENT
    assert bucket.elements % ALIGNMENT == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_may_have_their_own_places_with_zeros_up_to_the_next(device, dtype):
    """Gaps of less than an access, of more than a block, and before and after a tensor of no elements."""
    tensors = [draw(device, count, seed=count) for count in (5, 4097, 0, 9)]
    offsets = [0, 16, 9600, 9600 + 8200, 9600 + 8200 + 64]
    bucket, statistics = PackedBucket(tensors, offsets=offsets), Statistics(device)
    assert [slot.offset for slot in bucket.slots] == offsets[:-1] and bucket.elements == offsets[-1]
    flat, whole = poisoned(bucket.elements, dtype, device)
    bucket.pack(tensors, flat, 1 / 3, statistics)
    assert same_bits(flat, expected_flat(bucket, tensors, 1 / 3, dtype))
    assert untouched(whole, bucket.elements)
    check_statistics(statistics, flat)
    results, wholes = zip(*(poisoned(t.numel(), t.dtype, device) for t in tensors), strict=True)
    bucket.unpack(flat, results)
    for slot, result, whole in zip(bucket.slots, results, wholes, strict=True):
        assert same_bits(result, flat[slot.offset : slot.offset + slot.count].float())
        assert untouched(whole, slot.count)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_that_are_not_aligned_are_packed_as_well(device, dtype):
    tensors = [misaligned(draw(device, 9000, dtype=of, seed=seed)) for seed, of in enumerate(DTYPES)]
    bucket = PackedBucket(tensors)
    flat = bucket.empty(dtype).fill_(torch.nan)
    bucket.pack(tensors, flat)
    assert same_bits(flat, expected_flat(bucket, tensors, 1.0, dtype))


def test_memory_order_is_kept_where_a_tensor_is_dense_but_not_contiguous(device):
    tensors = [
        draw(device, 2, 3, 5, 7).to(memory_format=torch.channels_last),
        draw(device, 31, 17).t(),
        draw(device, 5, 1, 4),
    ]
    bucket = PackedBucket(tensors)
    flat = bucket.empty(torch.float32)
    bucket.pack(tensors, flat)
    in_memory = [tensor.as_strided((tensor.numel(),), (1,)) for tensor in tensors]
    assert same_bits(flat, expected_flat(bucket, in_memory, 1.0, torch.float32))
    results = [torch.full_like(tensor, torch.nan) for tensor in tensors]
    bucket.unpack(flat, results)
    for tensor, result in zip(tensors, results, strict=True):
        assert torch.equal(tensor, result)


def test_addresses_are_followed_and_uploaded_only_when_they_change(device):
    first, second = gradients(device), gradients(device, seed=50)
    bucket = PackedBucket(first)
    flat = bucket.empty(torch.float32)

    def uploads(tensors):
        before = module._uploaded.cache_info().misses
        bucket.pack(tensors, flat.fill_(torch.nan))
        assert same_bits(flat, expected_flat(bucket, tensors, 1.0, torch.float32))
        return module._uploaded.cache_info().misses - before

    assert uploads(first) == 1
    assert uploads(first) == 0
    assert uploads(second) == 1
    mixed = [*first[:3], *second[3:]]
    assert uploads(mixed) == 1
    assert uploads(first) == 0  # still known


def test_a_missing_tensor_counts_as_zeros_and_is_passed_over(device):
    tensors = gradients(device)
    bucket, statistics = PackedBucket(tensors), Statistics(device)
    some = [None if number % 2 else tensor for number, tensor in enumerate(tensors)]
    flat = bucket.empty(torch.float32).fill_(torch.nan)
    bucket.pack(some, flat, statistics=statistics)
    assert same_bits(flat, expected_flat(bucket, some, 1.0, torch.float32))
    check_statistics(statistics, flat)
    results = [tensor if tensor is None else torch.full_like(tensor, torch.nan) for tensor in some]
    bucket.unpack(flat, results, statistics=statistics)
    present = [(t, result) for t, result in zip(some, results, strict=True) if t is not None]
    assert all(same_bits(tensor, result) for tensor, result in present)
    check_statistics(statistics, *(result for _, result in present))


def test_tensors_that_are_views_of_the_flat_buffer_are_scaled_in_place(device):
    bucket = PackedBucket([draw(device, 4097), draw(device, 9)])
    flat = draw(device, bucket.elements)
    views = [flat[slot.offset : slot.offset + slot.count] for slot in bucket.slots]
    expected = expected_flat(bucket, views, 0.25, torch.float32)
    bucket.pack(views, flat, 0.25)
    assert same_bits(flat, expected)


def test_empty_buckets_and_buffers_have_norm_zero(device):
    for tensors in ([], [draw(device, 0)]):
        statistics = Statistics(device)
        statistics.squared_norm.fill_(7.0)
        bucket = PackedBucket(tensors, device=device)
        bucket.pack(tensors, bucket.empty(torch.float32), statistics=statistics)
        assert statistics.squared_norm.item() == statistics.nonfinite.item() == 0.0
    statistics.nonfinite.fill_(1.0)
    reduce([draw(device, 0)], draw(device, 0), statistics=statistics)
    assert statistics.nonfinite.item() == 0.0


@pytest.mark.parametrize("place", [0, 4095, 4096, 9999])
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_one_infinity_or_nan_anywhere_is_flagged(device, bad, place):
    tensor = draw(device, 10_000)
    bucket, statistics = PackedBucket([tensor]), Statistics(device)
    flat = bucket.empty(torch.float32)
    tensor[place] = bad
    bucket.pack([tensor], flat, statistics=statistics)
    check_statistics(statistics, flat)
    assert statistics.nonfinite.item() == 1.0
    tensor[place] = 1.0
    bucket.pack([tensor], flat, statistics=statistics)  # and the flag falls again
    check_statistics(statistics, flat)
    assert statistics.nonfinite.item() == 0.0


def test_huge_numbers_are_finite_and_what_rounding_makes_infinite_is_not(device):
    tensor = torch.full((5000,), 1e30, device=device)
    bucket, statistics = PackedBucket([tensor]), Statistics(device)
    bucket.pack([tensor], bucket.empty(torch.float32), statistics=statistics)
    assert statistics.squared_norm.item() == pytest.approx(5000 * tensor[0].double().item() ** 2, rel=1e-14)
    assert statistics.nonfinite.item() == 0.0
    bucket.pack([tensor], bucket.empty(torch.float16), statistics=statistics)
    assert statistics.nonfinite.item() == 1.0
    bucket.pack([tensor], bucket.empty(torch.float16), 1e-30, statistics)
    assert statistics.nonfinite.item() == 0.0
    assert statistics.squared_norm.item() == pytest.approx(5000, rel=1e-2)


def test_the_norm_is_of_what_was_written_not_of_what_was_read(device):
    """256 + 1/2 becomes 256 in bf16."""
    tensor = torch.full((4097,), 256.5, device=device)
    bucket, statistics = PackedBucket([tensor]), Statistics(device)
    bucket.pack([tensor], bucket.empty(torch.bfloat16), statistics=statistics)
    assert statistics.squared_norm.item() == 4097 * 256**2


def test_the_norm_has_the_same_bits_each_time_and_the_ticket_returns_to_zero(device):
    tensors = gradients(device)
    bucket, statistics = PackedBucket(tensors), Statistics(device)
    flat = bucket.empty(torch.bfloat16)
    norms = []
    for _ in range(5):
        bucket.pack(tensors, flat, 0.1, statistics)
        norms.append(statistics.squared_norm.clone())
        assert statistics._ticket.item() == 0
    assert all(same_bits(norm, norms[0]) for norm in norms)
    buffer = draw(device, 50_000)
    bucket_of_one = PackedBucket([buffer])
    bucket_of_one.pack([buffer], bucket_of_one.empty(torch.float32), statistics=statistics)
    assert not same_bits(statistics.squared_norm, norms[0])
    packed = statistics.squared_norm.clone()
    reduce([buffer], torch.empty_like(buffer), statistics=statistics)  # the same blocks, hence the same sum
    assert statistics.squared_norm.item() == pytest.approx(packed.item(), rel=1e-14)


@pytest.mark.parametrize("count", [1, 4096, 4097, 10_001])
@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sum_is_the_reduction_contract_to_the_bit(device, dtype, world, count):
    buffers = [draw(device, count, dtype=dtype, seed=rank) * 10**rank for rank in range(world)]
    kept = [buffer.clone() for buffer in buffers]
    out, whole = poisoned(count, dtype, device)
    statistics = Statistics(device)
    reduce(buffers, out, statistics=statistics)
    assert same_bits(out, reference.reduce(buffers))
    assert untouched(whole, count)
    assert all(same_bits(buffer, before) for buffer, before in zip(buffers, kept, strict=True))
    check_statistics(statistics, out)
    reduce(buffers, out, 1 / world, statistics)
    assert same_bits(out, reference.fused_sum(buffers, scale=1 / world))


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_result_is_rounded_once_whatever_its_type(device, dtype, out_dtype):
    buffers = [draw(device, 5000, dtype=dtype, seed=rank) for rank in range(3)]
    out = torch.full((5000,), torch.nan, dtype=out_dtype, device=device)
    reduce(buffers, out, 1 / 3)
    wide = reference.reduce([buffer.float() for buffer in buffers])
    assert same_bits(out, written(wide, 1 / 3, out_dtype))
    if out_dtype == torch.bfloat16 and dtype == torch.float32:  # rounding on the way would show
        assert not same_bits(out, written(wide.to(torch.float16), 1 / 3, out_dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_pass_that_writes_nothing_measures_what_it_reads(device, dtype):
    buffers = [draw(device, 9000, dtype=dtype, seed=rank) for rank in range(2)]
    kept = [buffer.clone() for buffer in buffers]
    statistics = Statistics(device)
    reduce(buffers[:1], None, statistics=statistics)
    check_statistics(statistics, buffers[0])
    reduce(buffers, None, 1 / 3, statistics)
    check_statistics(statistics, written(buffers[0].float() + buffers[1].float(), 1 / 3, torch.float32))
    assert all(same_bits(buffer, before) for buffer, before in zip(buffers, kept, strict=True))


def test_the_sum_may_stand_right_before_and_right_behind_a_buffer(device):
    """Of another size of element, so that the two lengths differ."""
    memory = draw(device, 30)
    buffer = memory[10:20]
    for out in (memory.view(torch.bfloat16)[10:20], memory.view(torch.bfloat16)[40:50]):
        reduce([buffer], out)
        assert same_bits(out, buffer.bfloat16())


def sums(device, dtype, *numbers):
    """Return the sum over ranks; each rank's buffer is filled with one of the numbers."""
    buffers = [torch.full((9,), number, dtype=dtype, device=device) for number in numbers]
    out = torch.empty_like(buffers[0])
    reduce(buffers, out)
    assert same_bits(out, reference.reduce(buffers))
    assert (out == out[0]).all()
    return out[0].item()


def test_the_sum_is_in_fp32_and_in_the_order_of_ranks(device):
    """Each of these would come out otherwise with a 16-bit accumulator, or in another order."""
    large = 2.0**24
    assert sums(device, torch.bfloat16, 1.0, *[2.0**-9] * 8) == 1.015625  # in bf16, 1 each time
    assert sums(device, torch.float16, 2048.0, 1.0, 1.0) == 2050.0  # in fp16, 2048
    assert sums(device, torch.float32, large, 1.0, -large, 1.0) == 1.0
    assert sums(device, torch.float32, 1.0, 1.0, large, -large) == 2.0
    assert sums(device, torch.float32, large, -large, 1.0, 1.0) == 2.0
    assert sums(device, torch.float32, 1.0, large, 1.0, -large) == 0.0
    assert sums(device, torch.bfloat16, large, 1.0, -large, 1.0) == 1.0
    assert math.copysign(1, sums(device, torch.float32, -0.0, -0.0)) == -1


def test_sixty_four_ranks(device):
    buffers = [draw(device, 100, dtype=torch.bfloat16, seed=rank) for rank in range(64)]
    out = torch.empty_like(buffers[0])
    reduce(buffers, out)
    assert same_bits(out, reference.reduce(buffers))


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sum_may_replace_a_buffer_and_buffers_need_no_alignment(device, dtype):
    buffers = [misaligned(draw(device, 5001, dtype=dtype, seed=rank)) for rank in range(3)]
    buffers[1] = buffers[1].clone()
    expected = reference.reduce(buffers)
    reduce(buffers, buffers[2])
    assert same_bits(buffers[2], expected)


def test_bad_tensors_are_refused_before_anything_is_written(device):
    tensors = [draw(device, 6, 4), draw(device, 10, dtype=torch.bfloat16)]
    bucket = PackedBucket(tensors)
    flat = bucket.empty(torch.float32).fill_(7.0)
    a, b = tensors
    wide = draw(device, 6, 8)
    own = draw(device, 100)
    for error, text, call in [
        (ValueError, "got 1 tensors for a bucket of 2", lambda: bucket.pack([a], flat)),
        (ValueError, r"tensors\[1\] is torch.float32, 10 elements.*made for torch.bfloat16, 10 elements", lambda: bucket.pack([a, b.float()], flat)),
        (ValueError, r"tensors\[0\] is torch.float32, 20 elements.*Make another PackedBucket", lambda: bucket.pack([a[:5], b], flat)),
        (ValueError, r"has strides \(8, 1\); the bucket was made for a contiguous one", lambda: bucket.pack([wide[:, :4], b], flat)),
        (ValueError, "has strides", lambda: bucket.unpack(flat, [draw(device, 4, 6).t(), b])),
        (ValueError, "on meta; the bucket was made for", lambda: bucket.pack([a.to("meta"), b], flat)),
        (ValueError, r"flat has shape \(39,\); it must be \(40,\)", lambda: bucket.pack(tensors, flat[1:])),
        (ValueError, "start at a multiple of 16 bytes: make it with .empty", lambda: bucket.pack(tensors, own[1:41])),
        (ValueError, "flat has stride 2", lambda: bucket.pack(tensors, own[:80:2])),
        (TypeError, "flat is torch.float64", lambda: bucket.pack(tensors, flat.double())),
        (ValueError, "scale=inf must be finite in fp32", lambda: bucket.pack(tensors, flat, math.inf)),
        (ValueError, "scale=nan must be finite", lambda: bucket.pack(tensors, flat, math.nan)),
        (ValueError, "scale=1e.39 must be finite", lambda: bucket.unpack(flat, tensors, 1e39)),
        (ValueError, r"tensors\[0\] shares memory with flat at another place than its own", lambda: bucket.pack([own[8:32].view(6, 4), b], own[:40])),
        (ValueError, "statistics are on meta", lambda: bucket.pack(tensors, flat, statistics=Statistics("meta"))),
        (TypeError, r"tensors\[0\] is torch.float64; it must be one of", lambda: PackedBucket([a.double()])),
        (ValueError, "its elements must fill their memory", lambda: PackedBucket([wide[:, :4]])),
        (ValueError, "its elements must fill their memory", lambda: PackedBucket([a[:, :1].expand(6, 4)])),
        (ValueError, "the device must be given", lambda: PackedBucket([])),
        (ValueError, r"got offsets \[0, 24\] for 2 tensors; expected 0 first", lambda: PackedBucket(tensors, offsets=[0, 24])),
        (ValueError, "all multiples of 8", lambda: PackedBucket(tensors, offsets=[0, 25, 40])),
        (ValueError, "got offsets .8, 32, 48.", lambda: PackedBucket(tensors, offsets=[8, 32, 48])),
        (ValueError, r"tensors\[1\] has 10 elements, and its offsets 24 and 32 leave room for 8", lambda: PackedBucket(tensors, offsets=[0, 24, 32])),
    ]:  # fmt: skip
        with pytest.raises(error, match=text):
            call()
    assert (flat == 7.0).all()


def test_bad_buffers_are_refused_before_anything_is_written(device):
    x, y = draw(device, 10), draw(device, 10, seed=1)
    out = torch.full((10,), 7.0, device=device)
    memory = draw(device, 20)
    for error, text, call in [
        (ValueError, "got 0 buffers; it takes 1 to 64", lambda: reduce([], out)),
        (ValueError, "got 65 buffers; it takes 1 to 64, sum more in several calls", lambda: reduce([x] * 65, out)),
        (TypeError, r"buffers\[1\] is torch.bfloat16; it must be one of torch.float32", lambda: reduce([x, y.bfloat16()], out)),
        (TypeError, r"buffers\[0\] is torch.int32", lambda: reduce([x.int()], out)),
        (ValueError, r"buffers\[1\] has shape \(9,\); it must be \(10,\)", lambda: reduce([x, y[1:]], out)),
        (ValueError, r"buffers\[0\] has stride 2; make it contiguous", lambda: reduce([memory[::2]], out)),
        (ValueError, "out has stride 2", lambda: reduce([x], memory[::2])),
        (ValueError, r"out has shape \(2, 5\)", lambda: reduce([x], out.view(2, 5))),
        (ValueError, r"buffers\[1\] and out share memory, but not element by element", lambda: reduce([x, memory[1:11]], memory[:10])),
        (ValueError, "share memory", lambda: reduce([memory[:10].bfloat16(), memory.view(torch.bfloat16)[:10]], memory[:10])),
        (ValueError, "share memory", lambda: reduce([memory[:10]], memory.view(torch.bfloat16)[19:29])),
        (ValueError, "one device", lambda: reduce([x, y.to("meta")], out)),
        (ValueError, "scale=inf", lambda: reduce([x], out, math.inf)),
    ]:  # fmt: skip
        with pytest.raises(error, match=text):
            call()
    assert (out == 7.0).all()


def test_every_type_and_switch_is_listed_for_the_static_gate():
    with launch.recording("sm_90") as launches:
        module.variants("sm_90")
    assert len(launches) == 3 * (2 * 2 + 3 + 1 + 1)
    assert {launched.kernel.__name__ for launched in launches} == {"_pack_kernel", "_unpack_kernel", "_reduce_kernel"}
