"""LoRA on a split linear layer (Hu et al. 2021): y = W x + b + scaling B A x, with A [r, in] and B [out, r]."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from weft.nn.dropout import ShardedDropout
from weft.nn.linear import ParallelLinear
from weft.nn.sequence import sum_gradients
from weft.nn.sharded import ShardedModule
from weft.ops.mappings import used_by_parts


class Adapter(NamedTuple):
    """One low-rank term, with this rank's parts of its matrices.

    Attributes:
        a: x [..., in] -> [..., r].
        b: [..., r] -> [..., out].
        dropout: dropout of x.
        scaling: factor of the term.
    """

    a: Any
    b: Any
    dropout: nn.Module
    scaling: float


def check_adapter(base: ParallelLinear, rank: int) -> None:
    """Raise ValueError for a layer that takes no adapter, or for more rows of A than the layer has features."""
    size = f"{type(base).__name__}({base.in_features}, {base.out_features})"
    if base.place.units is not None:
        raise ValueError(
            f"LoRA of {size} is not supported with invariant={base.place.units.total}; leave invariant out"
        )
    if base.activation is not None:
        raise ValueError(f"LoRA of {size}: its activation {base.activation!r} would come before the sum; call it after")
    most = min(base.in_features, base.out_features)
    if not 1 <= rank <= most:
        raise ValueError(f"LoRA of rank {rank} on {size}: the rank must be at least 1 and at most {most}")


def split_adapter(base: ParallelLinear, adapter: Adapter) -> Adapter:
    """Return this rank's part of an adapter with whole matrices.

    Of a column layer B is split as the layer's weight. Of a row layer A is. The other matrix is whole on every rank,
    with the same whole gradient.

    Raises:
        ValueError: the layer takes no such adapter.
    """
    check_adapter(base, adapter.a.weight.size(0))
    like: dict[str, Any] = {"style": base.style, "group": base.communicator, "overlap": base.place.overlap}
    like |= {"unit": base.unit, "parts": base.parts, "heads": base.heads}
    in_region: dict[str, Any] = {"sequence_parallel": base.sequence_parallel, "sequence_dim": base.sequence_dim}
    if base.style == "column":
        if base.sequence_parallel:
            sum_gradients(adapter.a, base.communicator)
        adapter = adapter._replace(b=ParallelLinear.from_linear(adapter.b, **like, **in_region))
    else:
        if base.sequence_parallel and adapter.b.bias is not None:
            raise ValueError("LoRA: a bias of B (lora_bias) is not supported with sequence_parallel; leave it out")
        adapter = adapter._replace(a=ParallelLinear.from_linear(adapter.a, **like))
    if isinstance(adapter.dropout, nn.Dropout) and (base.style == "row" or base.sequence_parallel):
        return adapter._replace(dropout=ShardedDropout.from_dropout(adapter.dropout, group=base.communicator))
    return adapter


def add_adapters(base: ParallelLinear, x: torch.Tensor, adapters: Iterable[Adapter]) -> torch.Tensor:
    """Return base(x) plus the adapters' terms. The terms communicate nothing in forward.

    column  y_shard_n = W_shard_n x + B_shard_n (A x); the gradient of A x is summed over the ranks
    row     y = sum over ranks of (W_shard_k x_shard_k + B (A_shard_k x_shard_k)); the gradient of B is summed
    """
    x = base.part_of_input(x)
    if base.style == "column":
        y = base(x, in_parts=True)
        dtype = y.dtype
        for adapter in adapters:
            y = y + adapter.b(adapter.a(adapter.dropout(_as(adapter, x)))) * adapter.scaling
        return base.whole_output(y.to(dtype))
    addend, bias = None, None
    for adapter in adapters:
        low = F.linear(adapter.dropout(_as(adapter, x)), adapter.a.operand("weight", whole_use=False))
        term = F.linear(low, used_by_parts(adapter.b.weight, base.communicator)) * adapter.scaling
        addend = term if addend is None else addend + term
        if adapter.b.bias is not None:
            more = adapter.b.bias * adapter.scaling
            bias = more if bias is None else bias + more
    y = base(x, in_parts=True, addend=None if addend is None else addend.to(x.dtype))
    return y if bias is None else y + bias.to(y.dtype)


def _as(adapter: Adapter, x: torch.Tensor) -> torch.Tensor:
    return x.to(adapter.a.weight.dtype)


class LoRA(ShardedModule):
    """A split linear layer, frozen, plus a trainable product of two small matrices (Hu et al. 2021).

    The matrices A and B are those that an unsplit layer with the same random state gets. A model of peft needs no such
    layer: `weft.parallelize` splits peft's own.

    Args:
        base: the layer. Its parameters are frozen.
        rank: rows of A and columns of B.
        alpha: the term is multiplied by alpha / rank; None is `rank`.
        dropout: probability with which elements of x are dropped for the term.
        rank_stabilized: multiply by alpha / sqrt(rank) instead (Kalajdzievski 2023).

    Raises:
        ValueError: the rank is below 1 or above the layer's features; the layer has an activation or invariant.

    Examples:
        >>> layer = weft.nn.LoRA(weft.ParallelLinear(16, 64, style="column"), rank=4)
        >>> layer(torch.ones(2, 16)).shape, layer.a.weight.shape, layer.b.weight.shape
        (torch.Size([2, 32]), torch.Size([4, 16]), torch.Size([32, 4]))
    """

    def __init__(
        self,
        base: ParallelLinear,
        rank: int,
        *,
        alpha: float | None = None,
        dropout: float = 0.0,
        rank_stabilized: bool = False,
    ):
        super().__init__()
        check_adapter(base, rank)
        like: dict[str, Any] = {"bias": False, "device": base.weight.device, "dtype": base.weight.dtype}
        a, b = nn.Linear(base.in_features, rank, **like), nn.Linear(rank, base.out_features, **like)
        nn.init.kaiming_uniform_(a.weight, a=math.sqrt(5))
        nn.init.zeros_(b.weight)
        self.base = base.requires_grad_(False)
        self.scaling = (rank if alpha is None else alpha) / (math.sqrt(rank) if rank_stabilized else rank)
        part = split_adapter(base, Adapter(a, b, nn.Dropout(dropout), self.scaling))
        self.a, self.b, self.dropout = part.a, part.b, part.dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return add_adapters(self.base, x, [Adapter(self.a, self.b, self.dropout, self.scaling)])
