"""Norms of gradients that lie on several ranks: each element of the whole model's gradient counts once."""

import math
from collections.abc import Sequence

import torch

from weft.comm.communicator import Communicator
from weft.metadata import metadata, set_metadata
from weft.sharding.owners import owners_of
from weft.sharding.sharded_grad import is_elsewhere, local, over_ranks, place_for

BLOCK = 1 << 15  # elements; a block in fp64 stays in the second-level cache
# Squares below 1 are rounded to multiples of 2^-20, and what remains (at most 2^-21) to multiples of 2^-41. Adding one
# of these numbers and subtracting it rounds so, because it has 52 bits behind its first. Sums of up to 2^32 such
# multiples are exact in fp64.
_STEPS = (1.5 * 2.0**32, 1.5 * 2.0**11)


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the parameter's `.grad`, or else its `main_grad`, as a plain tensor.

    None means that it has neither, for example because its pieces have the gradients.
    """
    if parameter.grad is None or is_elsewhere(parameter.grad):
        return getattr(parameter, "main_grad", None)
    return local(parameter.grad)


def mark_invariant(module: torch.nn.Module, units: int) -> None:
    """Record that the norm of these parameters' gradients must not depend on the number of ranks."""
    for parameter in module.parameters():
        set_metadata(parameter, "invariant", units)


def norm_of(parameters: Sequence[torch.Tensor], norm_type: float, stages: Communicator | None = None) -> torch.Tensor:
    """Return the norm of the whole model's gradient, a float64 scalar with the same bits on every rank.

    A collective call. If a parameter is marked as invariant, the bits do not depend on the number of ranks either.

    Args:
        parameters: all parameters, each once. A gradient on several ranks counts once.
        norm_type: p of the p-norm, above 0.
        stages: the ranks that have the other stages of the model.

    Raises:
        ValueError: an invariant norm of another type than 2 and inf.
    """
    device = parameters[0].device if parameters else torch.device("cpu")
    together: dict[tuple[Communicator, ...], list[torch.Tensor]] = {}
    for parameter in parameters:
        owners, gradient = owners_of(parameter), gradient_of(parameter)
        same = together.setdefault(place_for(parameter).ranks, [])  # also without a gradient
        if gradient is not None and (owners is None or owners.counted_here):
            same.append(counted(parameter, gradient))

    def joined(function, like: torch.Tensor, largest: bool = False) -> torch.Tensor:
        parts = [(function(same) if same else torch.zeros_like(like), groups) for groups, same in together.items()]
        return over_ranks(parts, [] if stages is None else [stages], like, largest)

    zero = torch.zeros((), dtype=torch.float64, device=device)
    if math.isinf(norm_type) or not any(metadata(parameter, "invariant") for parameter in parameters):
        total = joined(lambda same: powers(same, norm_type), zero, math.isinf(norm_type))
        return total if math.isinf(norm_type) else total.pow(1 / norm_type)
    if norm_type != 2:
        raise ValueError(f"norm_type={norm_type}: with invariant the norm is 2 or inf")
    largest = joined(lambda same: powers(same, math.inf), zero, largest=True)
    if largest == 0 or not largest.isfinite():
        return largest
    exponent = max(-1000, int(torch.frexp(largest).exponent))
    sums = joined(lambda same: _squares(same, exponent), zero.new_zeros(2))
    return sums.sum().sqrt() * math.ldexp(1.0, exponent - 1) * 2


def _squares(gradients: Sequence[torch.Tensor], exponent: int) -> torch.Tensor:
    """Return two sums that make the sum of (g / 2^exponent)^2 over all elements, float64 [2].

    Both are exact, so they do not depend on the order (Demmel and Nguyen 2015, "Parallel reproducible summation"). Each
    element is below 2^exponent.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=gradients[0].device)
    for block in (block for gradient in gradients for block in gradient.reshape(-1).split(BLOCK)):
        rest = (block.double() * math.ldexp(1.0, -exponent)).square_()
        for i, step in enumerate(_STEPS):
            rounded = (rest + step).sub_(step)
            sums[i] += rounded.sum()
            rest -= rounded
    return sums


def counted(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return the elements of a gradient that no lower rank of the shard's group has too.

    Args:
        parameter: a parameter, or a piece of one.
        gradient: its gradient.
    """
    return place_for(parameter).counted(gradient)


def powers(gradients: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return the sum of |g|^norm_type over all elements, or the largest |g| if norm_type is inf.

    Args:
        gradients: tensors of any types on any devices, at least one.
        norm_type: above 0.

    Returns:
        A float64 scalar. The sum over each tensor is in fp32, or in fp64 if the tensor is.
    """
    norms = [torch.zeros((), device=gradients[0].device)]
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        wide = torch.promote_types(dtype, torch.float32)
        same = [gradient for gradient in gradients if gradient.dtype == dtype and gradient.numel()]
        if same:
            norms += torch._foreach_norm(same, norm_type, dtype=wide)
    together = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device).double() for norm in norms]), norm_type)
    return together if math.isinf(norm_type) else together.pow(norm_type)
