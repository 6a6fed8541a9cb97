"""What a wrong tensor looks like: a factor, a sum that is missing, a shift, another rank's part."""

from typing import NamedTuple

import torch

from weft.tools.compare.alignment import Fit, as_rows, error_of

_CLOSE = 1e-3


class WrongTensor(NamedTuple):
    """A tensor that is not the reference's.

    Attributes:
        part: the rank's tensor.
        fit: the best place in the reference's; None if no place has its shape.
        whole: the reference's.
        summed_over: what the reference's is of the ranks' tensors, in words: a sum, a mean; "" if neither.
    """

    kind: str
    part: torch.Tensor
    fit: Fit | None
    whole: torch.Tensor
    summed_over: str


def symptom_of(case: WrongTensor, stale: torch.Tensor | None, bias: torch.Tensor | None) -> str:
    """Return what the difference looks like; "" if it looks like nothing known.

    Args:
        stale: the reference's tensor one step before.
        bias: the bias of the module.
    """
    part, fit = case.part, case.fit
    if fit is None:
        return f"its shape is {tuple(part.shape)}, the reference's {tuple(case.whole.shape)}"
    if case.summed_over:
        return f"it is a part: {case.summed_over} is the reference's, and nothing has taken it"
    if part.shape != fit.expected.shape or not part.numel():
        return ""
    expected = fit.expected
    if not part.is_floating_point():
        return _shift(part, expected) or _other_rows(part, expected)
    part, expected = part.double(), expected.double()
    if not part.isfinite().all() and expected.isfinite().all():
        return "it is not finite"
    if not part.any():
        return "it is zero"
    if stale is not None and stale.shape == part.shape and error_of(part, stale.double()) < _CLOSE:
        return "it is that of the step before"
    if scale := factor_of(part, fit):
        return "" if abs(scale - 1) < _CLOSE else f"it is {scale:.4g} times the reference's"
    return (
        _added_bias(part, expected, bias)
        or _shift(part, expected)
        or _other_rows(part, expected)
        or _some_rows(part, expected)
    )


def factor_of(part: torch.Tensor, fit: Fit | None) -> float:
    """Return the factor of a tensor to the reference's; 0 if it has none."""
    if fit is None or part.shape != fit.expected.shape or not part.is_floating_point():
        return 0.0
    part, expected = part.double(), fit.expected.double()
    factor = (part.flatten().dot(expected.flatten()) / expected.norm().square().clamp_min(1e-300)).item()
    return factor if part.numel() == 1 or error_of(part, expected * factor) < _CLOSE else 0.0


def _added_bias(part: torch.Tensor, expected: torch.Tensor, bias: torch.Tensor | None) -> str:
    difference = part - expected
    if bias is None or bias.shape[-1] != difference.shape[-1] or not bias.any():
        return ""
    bias = bias.double()
    times = (difference * bias).sum() / (bias.square().sum() * difference[..., 0].numel())
    if error_of(difference, (bias * times).expand_as(difference)) < 1e-2:
        return f"its bias is added {times.item() + 1:.3g} times"
    return ""


def _shift(part: torch.Tensor, expected: torch.Tensor) -> str:
    for dim in range(part.dim()):
        size = part.size(dim)
        for by in (1, -1):
            ours = part.narrow(dim, max(by, 0), size - 1) if size > 2 else part[:0]
            theirs = expected.narrow(dim, max(-by, 0), size - 1) if size > 2 else part[:0]
            if ours.numel() and error_of(ours, theirs) < _CLOSE:
                return f"it is shifted by {by} along dimension {dim}"
        if (
            not (part.is_floating_point() or part.dtype == torch.bool)
            and size > 1
            and (part - expected).unique().numel() == 1
        ):
            return f"it is the reference's plus {(part - expected).flatten()[0].item()}"
    return ""


def _other_rows(part: torch.Tensor, expected: torch.Tensor) -> str:
    for dim in range(part.dim()):
        rows, others = (as_rows(x, dim).double() for x in (part, expected))
        if 1 < len(rows) <= 4096:
            nearest = torch.cdist(rows, others).argmin(1)
            if len(nearest.unique()) == len(rows) and error_of(rows, others[nearest]) < _CLOSE:
                return f"its rows along dimension {dim} are in another order"
    return ""


def _some_rows(part: torch.Tensor, expected: torch.Tensor) -> str:
    """Say at which indices of a dimension it differs, if they are few."""
    for dim in range(part.dim()):
        rows, others = (as_rows(x, dim) for x in (part, expected))
        size = others.norm(dim=1).clamp_min(others.norm().item() / max(len(others), 1) ** 0.5 * 1e-3)
        wrong = ((rows - others).norm(dim=1) > _CLOSE * 0.1 * size).nonzero().flatten().tolist()
        if wrong and len(wrong) <= len(rows) // 2:
            first = ", ".join(map(str, wrong[:6])) + (", ..." if len(wrong) > 6 else "")
            return f"it differs at {first} of dimension {dim} alone ({len(wrong)} of {len(rows)})"
    return ""
