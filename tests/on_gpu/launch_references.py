"""References of the kernels' launchers in PyTorch, for calls with any arguments: what `first_launches` compares with.

A reference computes a call's results in arithmetic of a given type. A `fill` gives random arguments the values that
belong together: numbers of classes that exist, the state that queries and keys have.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import attention_reference as attention
import torch

from weft.ops.activation import ACTIVATIONS

TIMES = 50  # calls where programs count, meet or wait: their order differs from call to call
FEW_TIMES = 3
Tensors = Sequence[torch.Tensor]
Given = dict[str, Any]  # a call's arguments by name


@dataclass(frozen=True)
class Reference:
    """What is to be known of a launcher to check it.

    Attributes:
        results: returns the results by PyTorch, in arithmetic of a type, from the call's arguments.
        fill: gives arguments the values that they need: numbers of classes, a state that belongs to the others.
        written: arguments that the call writes to.
        times: as in Check.
        floor: as in Check, from the call's arguments (meta tensors).
    """

    results: Callable[..., Tensors]
    fill: Callable[[Given], None] = lambda given: None
    written: Sequence[str] = ()
    times: int = FEW_TIMES
    floor: Callable[[Given], float] = lambda given: 0.0


def _in(to: torch.dtype, *tensors: torch.Tensor | None) -> list:
    return [None if x is None else x.to(to) for x in tensors]


# Products.


def _smaller_weights(given: Given) -> None:
    given["b"].mul_(given["b"].size(-2) ** -0.5)  # b_up may be the same memory


def _product(
    to, a, b, b_up=None, bias=None, activation=None, addend=None, out=None, keep_z=False, precision="ieee", **_
) -> Tensors:
    if out is not None and to != torch.float64:
        to = out.dtype
    a, b, b_up, bias = _in(to, a, b, b_up, bias)
    if precision == "tf32" and to == torch.float32:
        a, b = map(_tf32, (a, b))
    z = a @ b if b_up is None else torch.cat([a @ b, a @ b_up], 1)
    z = z if bias is None else z + bias
    y = _activated(z, activation, b_up is not None)
    y = y if addend is None else y + addend.to(y.dtype)
    return [y, z] if keep_z else [y]


def _of_one_chain(given: Given) -> float:
    """Return the error of one chain of sums on tensor cores, which truncate, where the result is not rounded to less.

    PyTorch's product may sum in pieces, and so err less than four times as much.
    """
    left = given["a"] if "a" in given else given["dz"].t()
    to = [x.dtype for x in (left, given.get("out"), given.get("main_grad")) if x is not None]
    return left.size(1) / 8 * 2.0**-24 if torch.float32 in (*to, given.get("out_dtype")) else 0.0


def _activated(z: torch.Tensor, activation: str | None, gated: bool) -> torch.Tensor:
    act = (lambda z: z) if activation is None else ACTIVATIONS[activation].apply
    if not gated:
        return act(z)
    gate, up = z.chunk(2, -1)
    return act(gate) * up


def _tf32(x: torch.Tensor) -> torch.Tensor:
    """Return x rounded to 10 bits of mantissa."""
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def _gated(to, z, activation) -> Tensors:
    return [_activated(z.to(to), activation, True)]


def _gated_back(to, dy, z, activation) -> Tensors:
    leaf = z.to(to).detach().requires_grad_()
    return torch.autograd.grad(_activated(leaf, activation, True), leaf, dy.to(to))


def _uneven(given: Given) -> None:
    """Give the groups of rows uneven sizes, one of them none."""
    offsets, rows = given["offsets"], (given["a"] if "a" in given else given["x"]).size(0)
    groups = len(offsets) - 1
    inner = torch.tensor([0, *(rows * (group * group + 1) // (groups * groups) for group in range(1, groups))])
    inner[2] = inner[1]
    offsets.copy_(torch.cat([inner, torch.tensor([rows])]))
    if "b" in given:
        _smaller_weights(given)


def _grouped(to, a, b, offsets, b_up=None, activation=None, keep_z=False, **_) -> Tensors:
    a, b, b_up = _in(to, a, b, b_up)
    parts = [(slice(start, stop), group) for group, (start, stop) in enumerate(_pairs(offsets))]
    z = torch.cat([a[rows] @ b[group] for rows, group in parts])
    if b_up is not None:
        z = torch.cat([z, torch.cat([a[rows] @ b_up[group] for rows, group in parts])], 1)
    y = _activated(z, activation, b_up is not None)
    return [y, z] if keep_z else [y]


def _grouped_back(to, dz, x, offsets, main_grad=None, **_) -> Tensors:
    if main_grad is not None and to != torch.float64:
        to = main_grad.dtype
    dz, x = _in(to, dz, x)
    dw = torch.stack([dz[start:stop].t() @ x[start:stop] for start, stop in _pairs(offsets)])
    return [dw if main_grad is None else main_grad.to(to) + dw]


def _pairs(offsets: torch.Tensor) -> list[tuple[int, int]]:
    return list(pairwise(offsets.tolist()))


# Attention.


def _sharp(given: Given) -> None:
    """Let few keys have most of the weight, so that a lost tile of keys shows; number the documents."""
    given["q"].mul_(4)
    for part in ("query_documents", "key_documents"):
        if given.get(part) is not None:
            length = given[part].size(1)
            given[part].copy_(torch.arange(length) * 5 // length)


def _attention(to, q, k, v, rules, previous=None, out=None, out_dtype=None, **documents) -> Tensors:
    to = torch.float64 if to == torch.float64 else q.dtype
    q, k, v = _in(to, q, k, v)
    new, lse = attention.attention(q, k, v, rules, **documents)
    if previous is None:
        return new, lse
    old, old_lse = _in(torch.promote_types(to, torch.float32), *previous)
    total = torch.logaddexp(old_lse, lse.to(old_lse.dtype))
    shares = [torch.exp(part - total).unsqueeze(-1) for part in (lse, old_lse)]
    return new * shares[0] + (0 if old is None else old * shares[1]), total


def _of_forward(given: Given) -> None:
    """Set lse and delta to those that belong to q, k, v and dout."""
    _sharp(given)
    documents = {part: given[part] for part in ("query_documents", "key_documents") if part in given}
    q, k, v, dout = _in(torch.float64, *(given[part] for part in ("q", "k", "v", "dout")))
    out, lse = attention.attention(q, k, v, given["rules"], **documents)
    given["lse"], given["delta"] = lse.float(), (out * dout).sum(-1).float()


def _attention_back(to, q, k, v, dout, lse, delta, rules, dq=None, dk=None, dv=None, **documents) -> Tensors:
    to = torch.float64 if to == torch.float64 else q.dtype
    leaves = q, k, v = [x.to(to).detach().requires_grad_() for x in (q, k, v)]
    documents = {part: x for part, x in documents.items() if part.endswith("documents")}
    out, _ = attention.attention(q, k, v, rules, **documents)
    gradients = torch.autograd.grad(out, leaves, dout.to(to))
    totals = zip(gradients, (dq, dk, dv), strict=True)
    return [x if total is None else total + x for x, total in totals]


def _delta(to, out, dout) -> Tensors:
    return [(out.to(to) * dout.to(to)).sum(-1)]


# The loss. Half of the targets are of other shards, and some are ignored.


def _targets(given: Given) -> None:
    classes = 2 * given["logits_shard"].size(1) if "logits_shard" in given else given["vocabulary"]
    target = given["target"]
    target.copy_(torch.arange(len(target), device=target.device) * 7919 % classes)
    target[::5] = given["ignore_index"]
    if "offset" in given:
        given["offset"] = given["logits_shard"].size(1)


def _statistics(to, logits_shard, target, offset, ignore_index, smoothing, **_) -> Tensors:
    z = logits_shard.to(torch.promote_types(to, torch.float32))
    highest = z.amax(1)
    inside = (target >= offset) & (target < offset + z.size(1))
    at_target = z.gather(1, (target - offset).clamp(0, z.size(1) - 1).unsqueeze(1)).squeeze(1)
    total = z.sum(1) if smoothing else torch.zeros_like(highest)
    parts = highest, (z - highest.unsqueeze(1)).exp().sum(1), total, torch.where(inside, at_target, 0)
    return [torch.stack(parts)]


def _of_parts(given: Given) -> None:
    _targets(given)
    given["statistics"][:, 1].abs_().add_(1)
    given["statistics"][1:, 3] = 0  # one part has the target


def _losses(to, statistics, target, vocabulary, ignore_index, smoothing, mean) -> Tensors:
    of_parts = statistics.to(to)
    highest = of_parts[:, 0].amax(0)
    log_sum = (of_parts[:, 1] * (of_parts[:, 0] - highest).exp()).sum(0).log()
    kept = target != ignore_index
    loss = log_sum + (1 - smoothing) * (highest - of_parts[:, 3].sum(0))
    loss = torch.where(kept, loss + smoothing * (highest - of_parts[:, 2].sum(0) / vocabulary), 0)
    whole = loss.sum() / (kept.sum() if mean else 1)
    return loss, highest, log_sum, whole, kept.sum().to(to), torch.ones((), dtype=to, device=loss.device)


def _of_losses(given: Given) -> None:
    _targets(given)
    given["logits_shard"].mul_(8)  # else the gradients but the target's lie below the tolerance
    given["vocabulary"] = 2 * given["logits_shard"].size(1)
    z = given["logits_shard"].float()
    given["highest"], given["dlosses"] = z.amax(1), given["dlosses"].clone()
    given["log_sum"] = (z - given["highest"].unsqueeze(1)).exp().sum(1).log() + 0.7


def _loss_back(to, logits_shard, target, highest, log_sum, dlosses, offset, vocabulary, ignore_index, smoothing, **_):
    to = torch.promote_types(to, torch.float32)
    z, highest, log_sum, dlosses = _in(to, logits_shard, highest, log_sum, dlosses)
    dz = (z - (highest + log_sum).unsqueeze(1)).exp() - smoothing / vocabulary
    rows = ((target >= offset) & (target < offset + z.size(1))).nonzero().squeeze(1)
    dz[rows, target[rows] - offset] -= 1 - smoothing
    return [torch.where((target != ignore_index).unsqueeze(1), dz * dlosses.unsqueeze(1), 0)]


# Rows of experts.


def _tokens(given: Given) -> None:
    for part in ("token", "place"):
        if part in given:
            count = given[part].numel()
            rows: torch.Tensor = given["rows" if part == "place" else "x" if "x" in given else "dy"]
            given[part].view(-1).copy_(torch.arange(count) * 7919 % len(rows))


def _permuted(to, x, token, **_) -> Tensors:
    return [x.to(to)[token]]


def _unpermuted(to, rows, place, scale=None, **_) -> Tensors:
    chosen = rows.to(to)[place]
    return [(chosen if scale is None else chosen * scale.to(to)[place].unsqueeze(-1)).sum(1)]


def _unpermuted_back(to, dy, rows, token, scale) -> Tensors:
    dy, rows, scale = _in(to, dy, rows, scale)
    return dy[token] * scale.unsqueeze(1), (dy[token] * rows).sum(1)


def _apart(given: Given) -> None:
    """Set logits whose order no rounding changes, and the experts that they choose."""
    logits = given["logits"]
    tokens, experts = logits.shape
    order = (torch.arange(tokens)[:, None] * 31 + torch.arange(experts) * 37) % experts
    logits.copy_(order / max(8, experts / 16) - 2)
    if given.get("bias") is not None:
        given["bias"].copy_(torch.linspace(0, -1e-3, experts))
    if "index" in given:
        given["index"].copy_(
            logits.double().sort(dim=-1, descending=True, stable=True).indices[:, : given["index"].size(1)]
        )


def _scores(logits, index, softmax, normalize) -> torch.Tensor:
    scores = (logits.softmax(-1) if softmax else logits.sigmoid()).gather(1, index)
    return scores / scores.sum(-1, keepdim=True) if normalize else scores


def _gating(to, logits, k, softmax=True, normalize=False, bias=None) -> Tensors:
    by = logits.double() if bias is None else logits.double().sigmoid() + bias
    index = by.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return _scores(logits.to(to), index, softmax, normalize), index


def _gating_back(to, dw, logits, index, softmax=True, normalize=False) -> Tensors:
    leaf = logits.to(to).detach().requires_grad_()
    return torch.autograd.grad(_scores(leaf, index, softmax, normalize), leaf, dw.to(to))


REFERENCES: Mapping[str, Mapping[str, Reference]] = {
    "matmul": {
        "matmul": Reference(_product, _smaller_weights, ["out"], floor=_of_one_chain),
        "gated_forward": Reference(_gated),
        "gated_backward": Reference(_gated_back),
    },
    "attention": {
        "attention_forward": Reference(_attention, _sharp, ["previous", "out"]),
        "attention_delta": Reference(_delta),
        "attention_backward": Reference(_attention_back, _of_forward, ["dq", "dk", "dv"]),
    },
    "cross_entropy": {
        "cross_entropy_statistics": Reference(_statistics, _targets),
        "cross_entropy_losses": Reference(_losses, _of_parts, times=TIMES),
        "cross_entropy_gradient": Reference(_loss_back, _of_losses, ["logits_shard"], times=TIMES),
    },
    "grouped_matmul": {
        "grouped_matmul": Reference(_grouped, _uneven, floor=_of_one_chain),
        "grouped_wgrad": Reference(_grouped_back, _uneven, ["main_grad"], floor=_of_one_chain),
    },
    "permute": {
        "permute": Reference(_permuted, _tokens),
        "unpermute": Reference(_unpermuted, _tokens),
        "unpermute_backward": Reference(_unpermuted_back, _tokens),
    },
    "topk_gating": {
        "topk_gating": Reference(_gating, _apart),
        "topk_gating_backward": Reference(_gating_back, _apart),
    },
}
