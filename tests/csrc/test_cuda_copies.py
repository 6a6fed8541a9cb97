"""Copies that set a flag behind each, by the copy engine and the stream alone."""

import pytest
import torch

from weft import _C

needs_cuda = pytest.mark.skipif(_C.cuda is None, reason="built without CUDA")


@needs_cuda
def test_lists_that_do_not_go_together_are_refused():
    with pytest.raises(ValueError, match="1 destinations, 1 sources, 1 sizes and 0 flags; there must be as many"):
        _C.cuda.copy_and_mark([1], [1], [1], [], 0)


@needs_cuda
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_without_a_driver_the_error_has_a_name():
    with pytest.raises(RuntimeError, match="cuda|CUDA"):
        _C.cuda.copy_and_mark([1], [1], [1], [1], 0)


@pytest.mark.gpu
def test_each_flag_is_set_once_its_bytes_are_there():
    source = torch.randn(3, 1 << 20).pin_memory()
    target = torch.zeros(3, 1 << 20, device="cuda")
    flags = torch.zeros(3, dtype=torch.int32, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    of_rows = ([x[i].data_ptr() for i in range(3)] for x in (target, source))
    _C.cuda.copy_and_mark(*of_rows, [4 << 20] * 3, [flags[i].data_ptr() for i in range(3)], stream.cuda_stream)
    stream.synchronize()
    assert torch.equal(target.cpu(), source) and flags.tolist() == [1, 1, 1]
