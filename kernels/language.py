"""Triton for the kernel files, or where it is not installed the minimum that lets them be imported.

Kernels that were compiled ahead of time need no Triton at launch.
"""

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:
    from weft.kernels.without_triton import TensorDescriptor, tl, triton  # type: ignore[assignment]

VERSION: str | None = getattr(triton, "__version__", None)  # None if Triton is not installed
INTERPRETED: bool = VERSION is not None and bool(triton.knobs.runtime.interpret)
__all__ = ["INTERPRETED", "VERSION", "TensorDescriptor", "cdiv", "next_power_of_2", "tl", "triton"]


def cdiv(x: int, y: int) -> int:
    """Return x / y rounded up, on the host. Triton's own takes microseconds for each call."""
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
