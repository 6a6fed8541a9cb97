"""How close is close enough: as close as the unsharded op itself comes in that type, within a small factor."""

import torch

FACTOR = 4.0  # a split sum is rounded once a rank more than the plain one


def tolerance(plain: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest absolute error to accept, for results of plain's type.

    FACTOR times the error that the plain op makes in its own type against the exact one (fp64), and at least FACTOR
    roundings of the largest value, since the plain op may be exact by luck.
    """
    error = _largest(plain.double() - exact.double())
    rounding = torch.finfo(plain.dtype).eps / 2 * _largest(exact)
    return FACTOR * max(error, rounding)


def error_in_tolerances(result: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest error of `result` against `exact`, in tolerances; at most 1 is right, NaN counts as infinite.

    Raises:
        AssertionError: shape or type differ from the plain op's.
    """
    if result.shape != plain.shape or result.dtype != plain.dtype:
        raise AssertionError(f"expected {tuple(plain.shape)} {plain.dtype}, got {tuple(result.shape)} {result.dtype}")
    difference = result.double() - exact.double()
    if not torch.isfinite(difference).all():
        return float("inf")
    largest, allowed = _largest(difference), tolerance(plain, exact)
    if largest == 0:
        return 0.0
    return largest / allowed if allowed > 0 else float("inf")


def assert_close(result: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor, what: str = "result") -> None:
    """Raises AssertionError, naming `what`, where the result is further from the exact one than the tolerance."""
    error = error_in_tolerances(result, plain, exact)
    if error > 1:
        raise AssertionError(
            f"{what} {tuple(result.shape)} {result.dtype}: off by {error:.3g} tolerances "
            f"of {tolerance(plain, exact):.3g}"
        )


def _largest(x: torch.Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0
