"""A chain of layers on ranks, one whole batch at a time: autograd functions send activations on and gradients back.

Of two functions on a rank the later one in forward must come first in backward, and each must come, whatever becomes of
the activations: each returns a token that the next one takes.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from weft.comm.communicator import Communicator
from weft.stages.stage import Stage


class Send(torch.autograd.Function):
    """token = (values -> to);  backward: dvalues <- to. Values that are no floating point have no gradient."""

    @staticmethod
    def forward(ctx, token, to, ranks, *values):
        ctx.to, ctx.ranks = to, ranks
        ctx.likes = [torch.empty_like(x, device="meta", memory_format=torch.contiguous_format) for x in values]
        ctx.device = values[0].device
        for x in values:
            dist.send(x.contiguous(), group=ranks.group, group_dst=to)
        return torch.zeros_like(token)

    @staticmethod
    def backward(ctx, _):
        gradients: list[torch.Tensor | None] = []
        for number, like in enumerate(ctx.likes):
            if not like.is_floating_point():
                gradients.append(None)
                continue
            gradient = torch.empty(like.shape, dtype=like.dtype, device=ctx.device)
            dist.recv(gradient, group=ctx.ranks.group, group_src=ctx.to)
            gradients.append(gradient if ctx.needs_input_grad[3 + number] else None)
        return torch.zeros(()), None, None, *gradients


class Receive(torch.autograd.Function):
    """token, values <- source;  backward: dvalues -> source, zeros for those that nothing has used."""

    @staticmethod
    def forward(ctx, token, source, ranks, device, kinds):
        ctx.source, ctx.ranks = source, ranks
        values = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in kinds]
        for x in values:
            dist.recv(x, group=ranks.group, group_src=source)
        ctx.mark_non_differentiable(*(x for x in values if not x.is_floating_point()))
        ctx.differentiable = [x.is_floating_point() for x in values]
        return torch.zeros_like(token), *values

    @staticmethod
    def backward(ctx, _, *gradients):
        for gradient, differentiable in zip(gradients, ctx.differentiable, strict=True):
            if differentiable:
                dist.send(gradient.contiguous(), group=ctx.ranks.group, group_dst=ctx.source)
        return torch.zeros(()), None, None, None, None


class Share(torch.autograd.Function):
    """output = the root's values, on every rank;  backward: the root's own dvalues; on the others the token alone.

    Every rank computes the same loss of the same output, so that the root's gradient is everyone's.
    """

    @staticmethod
    def forward(ctx, token, root, ranks, device, *values):
        ctx.differentiable = [x.is_floating_point() for x in values]
        about = ranks.notes([(x.shape, x.dtype) for x in values])[root]
        outputs = [x.clone() for x in values] or [
            torch.empty(shape, dtype=dtype, device=device) for shape, dtype in about
        ]
        for x in outputs:
            ranks.broadcast_(x, root)
        ctx.mark_non_differentiable(*(x for x in outputs if not x.is_floating_point()))
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *gradients):
        own = [dy if needed else None for dy, needed in zip(gradients, ctx.differentiable, strict=False)]
        return torch.zeros(()), None, None, None, *own  # none on the other ranks, which gave no values


def run(
    segments: Sequence[tuple[int, Stage | None]], values: Sequence, ranks: Communicator, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """The segments (rank, and the stage if it is ours) one after the other; the output, whole, on every rank."""
    token = torch.zeros((), requires_grad=True)
    for number, (owner, segment) in enumerate(segments):
        if owner != ranks.rank:
            continue
        assert segment is not None
        if number > 0:
            before = segments[number - 1][0]
            box: list = [None]
            dist.recv_object_list(box, group=ranks.group, group_src=before)
            kinds, segment.arriving = box[0]
            token, *values = Receive.apply(token, before, ranks, device, kinds)
        output = segment(*values)
        values = output if isinstance(output, tuple) else (output,)
        if number + 1 < len(segments):
            after = segments[number + 1][0]
            about = [(x.shape, x.dtype) for x in values], segment.leaving
            dist.send_object_list([about], group=ranks.group, group_dst=after)
            token = Send.apply(token, after, ranks, *values)
    root = segments[-1][0]
    return Share.apply(token, root, ranks, device, *(values if root == ranks.rank else ()))
