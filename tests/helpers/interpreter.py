"""Kernels in Triton's interpreter, and processes that compile them instead."""

import os
import sys
from contextlib import contextmanager
from unittest import mock

import pytest

from weft.ops import kernel_choice

in_the_interpreter = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="ranks are processes in the interpreter"
)


@contextmanager
def by_kernels():
    """Prefer weft's kernels; in Triton's interpreter every element of a tile is one chain of additions over the depth.

    The interpreter's own tl.dot is BLAS's, where an element's place in a tile changes its bits.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def dot(self, a, b, d, *_):
        total = d.data.copy()
        for k in range(a.data.shape[1]):
            total += a.data[:, k, None].astype(total.dtype) * b.data[None, k].astype(total.dtype)
        return TensorHandle(total, d.dtype.scalar)

    with mock.patch.object(InterpreterBuilder, "create_dot", dot), kernel_choice.prefer("kernel"):
        yield


def compiling():
    """Return the environment of a process that compiles kernels instead of interpreting them."""
    outside = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return {**outside, "PYTHONPATH": os.pathsep.join(sys.path)}
