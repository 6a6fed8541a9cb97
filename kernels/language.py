"""What the kernel files are written in: Triton where it is installed, else the least of it that lets them be imported.

Kernels that were compiled ahead of time are launched without it.
"""

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:
    from weft.kernels.without_triton import TensorDescriptor, tl, triton  # type: ignore[assignment]

VERSION: str | None = getattr(triton, "__version__", None)  # None where it is not installed
INTERPRETED: bool = VERSION is not None and bool(triton.knobs.runtime.interpret)
__all__ = ["INTERPRETED", "VERSION", "TensorDescriptor", "tl", "triton"]
