"""Rounding, scaling and norm that an all_reduce of floating-point numbers does in its own pass over the data."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

_NARROWER = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Fusion:
    """Further steps of an all_reduce in its pass over the data.

    Inputs are rounded to the wire type, summed (or averaged) in fp32, scaled, rounded to the wire type, and widened, in
    this order. The squared norm is that of the result, in fp64.

    Attributes:
        wire_dtype: bfloat16 or float16 for float32 tensors; None is the tensor's own type.
        scale: factor on the result before it is rounded.
        squared_norm: a float64 CPU tensor of one element that receives the sum of squares of the result, the same bits
            on every rank. It is finite exactly if every element is; for fp64 tensors, if no square overflows.
    """

    wire_dtype: torch.dtype | None = None
    scale: float = 1.0
    squared_norm: torch.Tensor | None = None

    @classmethod
    def of(cls, x: torch.Tensor, wire_dtype=None, scale=1.0, squared_norm=None) -> "Fusion | None":
        """Return the Fusion for x, or None if the arguments ask for nothing.

        Raises:
            TypeError: x is not a floating-point tensor.
            ValueError: x cannot travel as wire_dtype, or squared_norm is not as described above.
        """
        if wire_dtype in (None, x.dtype) and scale == 1.0 and squared_norm is None:
            return None
        if not x.is_floating_point():
            raise TypeError(f"wire_dtype, scale and squared_norm are for floating-point tensors, got {x.dtype}")
        if wire_dtype not in (None, x.dtype) and (x.dtype != torch.float32 or wire_dtype not in _NARROWER):
            raise ValueError(
                f"wire_dtype={wire_dtype} for a tensor of {x.dtype}: float32 can travel as bfloat16 or float16, "
                "every other type as it is (sums of 16-bit types are in fp32 anyway); use wire_dtype=None"
            )
        if squared_norm is not None and (
            squared_norm.dtype != torch.float64 or squared_norm.numel() != 1 or not squared_norm.is_cpu
        ):
            raise ValueError(
                f"squared_norm must be a float64 CPU tensor of one element, got {squared_norm.dtype} of shape "
                f"{tuple(squared_norm.shape)} on {squared_norm.device}"
            )
        return cls(wire_dtype if wire_dtype != x.dtype else None, scale, squared_norm)

    def around(self, reduce: Callable[[torch.Tensor], object], x: torch.Tensor, divisor: int = 1) -> None:
        """Run the in-place reduction `reduce` on x, with the same steps in passes of their own.

        Args:
            reduce: the reduction.
            x: the tensor.
            divisor: number of ranks, if the reduction is the sum of an average.
        """
        sent = x if self.wire_dtype is None else x.to(self.wire_dtype)
        reduce(sent)
        if divisor != 1 or self.scale != 1.0:
            sent.copy_(sent.double() / divisor * self.scale)
        if sent is not x:
            x.copy_(sent)
        if self.squared_norm is not None:
            self.squared_norm.fill_(x.double().square().sum())
