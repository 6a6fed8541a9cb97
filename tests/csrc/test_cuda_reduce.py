"""The reduction contract on a GPU: sources in order, fp32 accumulator, one rounding; the bits of the CPU's."""

import pytest
import torch

import weft
from weft import _C
from weft.testing import reference


def rank_order_sum(parts, scale=1.0):
    out = torch.empty_like(parts[0])
    addresses = [part.data_ptr() for part in parts]
    dtype = str(out.dtype).removeprefix("torch.")
    stream = torch.cuda.current_stream().cuda_stream
    _C.cuda.rank_order_sum(addresses, out.data_ptr(), out.numel(), dtype, scale, stream)
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world", [1, 2, 3, 8, 16])
def test_the_sum_on_a_gpu_has_the_bits_of_the_sum_on_a_cpu(world, dtype):
    for count in (0, 1, 7, 8, 1000, 65537, 1_000_003):
        for offset in (0, 1):  # in elements: off by one is not aligned to 16 bytes
            parts = [torch.randn(count + offset, device="cuda").to(dtype)[offset:] for _ in range(world)]
            expected = reference.reduce([part.cpu() for part in parts])
            assert torch.equal(rank_order_sum(parts).cpu(), expected), (count, offset)


@pytest.mark.gpu
def test_the_average_is_scaled_before_it_is_rounded():
    parts = [torch.randn(4097, device="cuda").bfloat16() for _ in range(4)]
    assert torch.equal(rank_order_sum(parts, 0.25).cpu(), reference.reduce([part.cpu() for part in parts], "avg"))


@pytest.mark.gpu
def test_a_launch_error_is_raised_by_name():
    with pytest.raises(ValueError, match="takes 1 to 16 sources, got 17"):
        rank_order_sum([torch.ones(4, device="cuda")] * 17)


def test_the_state_of_the_driver_is_reported_and_never_raised():
    info = weft.build_info()
    if info["cuda"] is None:
        assert info["gpu"] is None and _C.cuda is None
        return
    assert info["gpu"]["devices"] >= 0
    assert (info["gpu"]["error"] is None) == (info["gpu"]["devices"] > 0)
    with pytest.raises(ValueError, match="takes float32, float16 and bfloat16, got int8"):
        _C.cuda.rank_order_sum([16], 16, 0, "int8")
