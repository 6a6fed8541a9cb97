"""Tolerance of results: the error of the unsharded op in the same type, times a small factor."""

import torch

FACTOR = 4.0  # a split sum has one more rounding a rank than the plain one


def tolerance(plain: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype | None = None) -> float:
    """Return the largest acceptable absolute error of a result of type `dtype`.

    It is FACTOR times the error of the plain op in its own type against the exact result (fp64). It is at least FACTOR
    roundings of the largest value, since the plain op may be exact by chance.

    fp64 has no finer reference: pass `plain` in fp32. The tolerance is then scaled by the ratio of the two types'
    roundings, and doubled, since the "exact" result is rounded as often as the one compared with it.

    Args:
        plain: Result of the unsharded op in its own type.
        exact: Result of the unsharded op in fp64.
        dtype: Type of the result to judge; None for the type of `plain`.
    """
    fine, coarse = torch.finfo(dtype or plain.dtype).eps, torch.finfo(plain.dtype).eps
    error = _largest(plain.double() - exact.double())
    rounding = coarse / 2 * _largest(exact)
    scale = 2 * fine / coarse if fine < coarse else 1.0
    return FACTOR * max(error, rounding) * scale


def error_in_tolerances(result: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the largest error of `result` against `exact` in tolerances: at most 1 is right, NaN is infinite.

    Raises:
        AssertionError: The shape differs from the exact result's.
    """
    result = result.as_subclass(torch.Tensor)  # this rank's part of a gradient that is split over ranks
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
    """Raise AssertionError, naming `what`, if the result is further from the exact one than the tolerance."""
    error = error_in_tolerances(result, plain, exact)
    if error > 1:
        allowed = tolerance(plain, exact, result.dtype)
        raise AssertionError(f"{what} {tuple(result.shape)} {result.dtype}: off by {error:.3g} x {allowed:.3g}")


def plain_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type of the plain op for results of `dtype`: fp32 for fp64, else `dtype`."""
    return torch.float32 if dtype == torch.float64 else dtype


def _largest(x: torch.Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0
