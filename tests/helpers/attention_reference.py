"""Reference for the attention kernels: attention of a chunk in plain PyTorch, with all probabilities."""

import torch

from weft.kernels.attention_rules import Positions, Rules
from weft.ops.dropout import dropout_mask


def attention(
    q,
    k,
    v,
    rules: Rules,
    *,
    query_positions: Positions | None = None,
    key_positions: Positions | None = None,
    query_documents=None,
    key_documents=None,
    sinks=None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out [B, H, Sq, Dv] and lse [B, H, Sq] in the inputs' type, differentiable; arguments as for the kernel."""
    repeats = q.size(1) // k.size(1)
    k, v = (t.repeat_interleave(repeats, 1) for t in (k, v))
    query = expand_positions(query_positions or Positions(0, q.size(2)), q.device)
    key = expand_positions(key_positions or Positions(0, k.size(2)), q.device)
    scores = q @ k.transpose(-1, -2) * (q.size(-1) ** -0.5 if rules.scale is None else rules.scale)
    if rules.softcap is not None:
        scores = rules.softcap * torch.tanh(scores / rules.softcap)
    ahead = key[None, :] - query[:, None]
    hidden = torch.zeros_like(ahead, dtype=torch.bool)
    if rules.left is not None:
        hidden = hidden | (ahead < -rules.left)
    if rules.right is not None:
        hidden = hidden | (ahead > rules.right)
    if query_documents is not None:
        hidden = hidden | (query_documents[:, None, :, None] != key_documents[:, None, None, :])
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        sinks = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], -1)
    if scores.size(-1) == 0:
        return scores @ v, q.new_full(q.shape[:3], -torch.inf)  # without keys the sum is empty
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1))[..., : k.size(2)]
    if rules.dropout:
        kept = dropout_mask(rules, q.size(0), q.size(1), query, key)
        weights = weights * kept.to(weights.dtype) / (1 - rules.dropout)
    return weights @ v, lse


def expand_positions(positions: Positions, device=None) -> torch.Tensor:
    """Return the position of each row as a tensor."""
    start, length, second_start, second_length = positions
    runs = [torch.arange(start, start + length), torch.arange(second_start, second_start + second_length)]
    return torch.cat(runs).to(device)
