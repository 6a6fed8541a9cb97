"""The norm of gradients that lie on several ranks: each element of the whole model's gradient counts once."""

import math
from collections.abc import Iterable, Sequence

import torch

from weft.comm.communicator import Communicator
from weft.gradients.sharding import piece_of
from weft.shard import shard_of


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """Its `.grad`, or else its `main_grad`."""
    return getattr(parameter, "main_grad", None) if parameter.grad is None else parameter.grad


def counted(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Of a parameter's gradient, or of that of a piece of one, what no rank of the shard's before has as well."""
    piece = piece_of(parameter)
    base = parameter if piece is None else piece.parameter
    shard = shard_of(base)
    if shard is None or not shard.cut.replicated:
        return gradient
    if piece is None:
        return shard.counted(gradient)
    mine = torch.zeros_like(base, dtype=torch.bool)
    for start, stop in shard.cut.owned(shard.communicator.rank):
        mine.narrow(shard.dim, start, stop - start).fill_(True)
    in_memory = mine.as_strided((mine.numel(),), (1,))
    return gradient[in_memory[piece.start : piece.stop]]


def powers(gradients: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """float64 scalar: the sum of |g|^p over all elements; for p = inf the largest |g|. Of sums in fp32, or in fp64 of
    fp64, over a tensor each."""
    norms = [torch.zeros((), device=gradients[0].device)]
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        wide = torch.promote_types(dtype, torch.float32)
        same = [gradient for gradient in gradients if gradient.dtype == dtype and gradient.numel()]
        if same:
            norms += torch._foreach_norm(same, norm_type, dtype=wide)
    together = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device).double() for norm in norms]), norm_type)
    return together if math.isinf(norm_type) else together.pow(norm_type)


def over_ranks(
    parts: Iterable[tuple[torch.Tensor, Communicator | None]],
    then: Sequence[Communicator],
    like: torch.Tensor,
    largest: bool = False,
) -> torch.Tensor:
    """The sum of the parts, or the largest; the same on every rank. A collective call.

    Args:
        parts: numbers, each with the ranks that have others of the same tensors; None: every rank has the same.
        then: over whose ranks all of it is summed in the end.
        like: of the type and device of the result, where there are no parts.
        largest: of infinite norms. NaN stays NaN.
    """

    def joined(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.maximum(x, y) if largest else x + y

    def crossed(x: torch.Tensor, ranks: Communicator) -> torch.Tensor:
        if not largest:
            return ranks.all_reduce_(x)
        return ranks.all_gather(x.reshape(1), 0, [1] * ranks.world).amax().reshape(x.shape)

    total = torch.zeros_like(like)
    of_shards: dict[Communicator, torch.Tensor] = {}
    for part, ranks in parts:
        if ranks is None:
            total = joined(total, part)
        else:
            of_shards[ranks] = joined(of_shards.get(ranks, torch.zeros_like(like)), part)
    for ranks, part in of_shards.items():
        total = joined(total, crossed(part, ranks))
    for ranks in then:
        total = crossed(total, ranks)
    return total
