"""How close is close enough: as close as the unsharded op itself comes in that type, within a small factor."""

import torch

FACTOR = 4.0  # a split sum is rounded once a rank more than the plain one


def tolerance(plain: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype | None = None) -> float:
    """The largest absolute error to accept of a result of type `dtype`.

    FACTOR times the error that the plain op makes in its own type against the exact one (fp64), and at least FACTOR
    roundings of the largest value, since the plain op may be exact by luck.

    Of fp64 there is no finer reference: give plain in fp32. Then both are scaled by the ratio of the two types'
    roundings, and doubled, since the "exact" result is rounded as often as the one compared with it.
    """
    fine, coarse = torch.finfo(dtype or plain.dtype).eps, torch.finfo(plain.dtype).eps
    error = _largest(plain.double() - exact.double())
    rounding = coarse / 2 * _largest(exact)
    scale = 2 * fine / coarse if fine < coarse else 1.0
    return FACTOR * max(error, rounding) * scale


def error_in_tolerances(result: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest error of `result` against `exact`, in tolerances; at most 1 is right, NaN counts as infinite.

    Raises:
        AssertionError: the shape differs from the exact result's.
    """
    result = result.as_subclass(torch.Tensor)  # of a gradient that is split over ranks, this rank's part
    if result.shape != exact.shape:
        raise AssertionError(f"expected shape {tuple(exact.shape)}, got {tuple(result.shape)}")
    difference = result.double() - exact.double()
    if not torch.isfinite(difference).all():
        return float("inf")
    largest, allowed = _largest(difference), tolerance(plain, exact, result.dtype)
    if largest == 0:
        return 0.0
    return largest / allowed if allowed > 0 else float("inf")


def assert_close(result: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor, what: str = "result") -> None:
    """Raises AssertionError, naming `what`, where the result is further from the exact one than the tolerance."""
    error = error_in_tolerances(result, plain, exact)
    if error > 1:
        allowed = tolerance(plain, exact, result.dtype)
        raise AssertionError(f"{what} {tuple(result.shape)} {result.dtype}: off by {error:.3g} x {allowed:.3g}")


def plain_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which to run the plain op for results of `dtype`: its own, but fp32 for fp64."""
    return torch.float32 if dtype == torch.float64 else dtype


def _largest(x: torch.Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0
