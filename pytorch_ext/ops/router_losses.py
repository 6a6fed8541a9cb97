"""Auxiliary losses of a router over the tokens of all ranks."""

import torch

from weft.comm.communicator import Communicator
from weft.comm.registry import Group, communicator
from weft.ops.collectives import all_reduce


def load_balancing_loss(
    probabilities: torch.Tensor, index: torch.Tensor, *, mask: torch.Tensor | None = None, group: Group = None
) -> torch.Tensor:
    """Return E * sum over experts e of (share of tokens that chose e) * (mean probability of e).

    The loss of Switch Transformers (Fedus et al. 2022, equations 4 to 6), for any number of chosen experts: the shares
    add up to k. Shares and means are those of all tokens of the group, so the loss is that of the whole batch. A mean
    of the ranks' own losses is another number, because the loss is a product.

    Every rank gets the same value. Its gradients, averaged over the ranks of the group (as `weft.DataParallel` does),
    are those of the whole batch. Ranks with the same tokens ("tp") leave the group out of it: they compute alike.

    Args:
        probabilities: [..., E], of the router for each expert, usually a softmax.
        index: [..., k], the chosen experts.
        mask: [...], True for tokens that count; None counts all.
        group: the ranks with tokens of their own, mesh["dp"]; None is the default group.

    Returns:
        A scalar; 1 * k where all experts are equally likely.

    Examples:
        >>> probabilities = torch.full((3, 4), 0.25)
        >>> weft.load_balancing_loss(probabilities, torch.tensor([[0, 1], [2, 3], [0, 2]]))
        tensor(2.)
    """
    experts = probabilities.size(-1)
    probabilities, index = probabilities.reshape(-1, experts), index.reshape(-1, index.size(-1))
    if len(index) != len(probabilities):
        raise ValueError(
            f"load_balancing_loss: {len(probabilities)} tokens have probabilities and {len(index)} chose experts"
        )
    counted = _counted(mask, probabilities)
    chosen = torch.zeros_like(probabilities).scatter_add(1, index, torch.ones_like(index, dtype=probabilities.dtype))
    counts = (chosen * counted.unsqueeze(-1)).sum(0).detach()
    ranks = communicator(group)
    number = _over(torch.cat([counts, counted.sum().reshape(1)]), ranks)
    share, tokens = number[:-1] / number[-1].clamp(min=1), number[-1].clamp(min=1)
    mean = _over((probabilities * counted.unsqueeze(-1)).sum(0), ranks) / tokens
    return experts * (share * mean).sum()


def router_z_loss(logits: torch.Tensor, *, mask: torch.Tensor | None = None, group: Group = None) -> torch.Tensor:
    """Return the mean over all tokens of logsumexp(logits)^2 (Zoph et al. 2022, equation 5).

    Values and gradients over the ranks are as in `load_balancing_loss`.

    Args:
        logits: [..., E], the router's scores before the softmax.
        mask: [...], True for tokens that count; None counts all.
        group: the ranks with tokens of their own, mesh["dp"]; None is the default group.

    Returns:
        A scalar.

    Examples:
        >>> weft.router_z_loss(torch.zeros(3, 4))  # log(4) ** 2
        tensor(1.9218)
    """
    logits = logits.reshape(-1, logits.size(-1))
    counted = _counted(mask, logits)
    ranks = communicator(group)
    tokens = _over(counted.sum().reshape(1), ranks).clamp(min=1)
    return (_over((logits.logsumexp(-1).square() * counted).sum().reshape(1), ranks) / tokens).squeeze(0)


def _counted(mask: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
    if mask is None:
        return rows.new_ones(len(rows))
    if mask.numel() != len(rows):
        raise ValueError(f"a mask of shape {tuple(mask.shape)} does not match {len(rows)} tokens")
    return mask.reshape(-1).to(rows.dtype)


def _over(x: torch.Tensor, ranks: Communicator) -> torch.Tensor:
    """Return the sum over the ranks. Backward sums the ranks' equal gradients, which an average makes one again."""
    return x if ranks.world_size == 1 else all_reduce(x, group=ranks)
