"""Row-split embeddings for subclasses of nn.Embedding (for example one that scales its rows)."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from weft.comm.communicator import Communicator
from weft.context_parallel.function_rules import used
from weft.context_parallel.shared_sequence import SharedSequence, by_part
from weft.forward import FunctionMode
from weft.nn.sharded import ShardHolder
from weft.ops import parallel_embedding
from weft.sharding.shard import Shard


def split_lookup(embedding: nn.Module, *, group: Communicator) -> nn.Module:
    """Return an embedding that has this rank's part of the rows and looks up all ranks' rows.

    Its class derives from the embedding's class and does the same with the rows. That class may use the weight only in
    nn.Embedding.forward (or F.embedding).

    Raises:
        TypeError: the module is not derived from nn.Embedding.
        ValueError: there are more ranks than rows, or the embedding has max_norm, scale_grad_by_freq or sparse.
    """
    if not isinstance(embedding, nn.Embedding):
        raise TypeError(f'style "lookup" takes a class derived from nn.Embedding, not {type(embedding).__name__}')
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(embedding, option):
            raise ValueError(f"{option}={getattr(embedding, option)} is not taken; keep this embedding whole")
    part: Any = copy.copy(embedding)
    part.__class__ = _derived(type(embedding))
    part._parameters, part._buffers, part.shards = dict(part._parameters), dict(part._buffers), {}
    part.register_part("weight", embedding.weight, Shard.of_shape(tuple(embedding.weight.shape), 0, group))
    return part


def _derived(kind: type[nn.Embedding]) -> type:
    if kind not in _DERIVED:
        _DERIVED[kind] = type(f"Split{kind.__name__}", (_SplitLookup, kind), {"__module__": kind.__module__})
    return _DERIVED[kind]


_DERIVED: dict[type, type] = {}


class _SplitLookup(ShardHolder):
    def forward(self, *args, **kwargs):
        with FunctionMode({F.embedding: self._look_up}):
            return super().forward(*args, **kwargs)

    def _look_up(self, func, args, kwargs):
        """Look up the rows of all ranks, if it is the module's own weight."""
        named = dict(zip(("input", "weight", "padding_idx"), args, strict=False), **kwargs)
        weight = self._parameters["weight"]  # not always a Parameter: a unit of the batch has weights of its own
        if weight is None or named["weight"] is not weight:
            return func(*args, **kwargs)
        tokens, of_shard = named["input"], (self.shards["weight"], named.get("padding_idx"))
        if isinstance(tokens, SharedSequence):
            return by_part(_of_part, tokens, weight, *of_shard)
        return parallel_embedding(tokens, weight, *of_shard)


def _of_part(tokens: SharedSequence, weight: torch.Tensor, *of_shard) -> SharedSequence:
    return tokens.like(parallel_embedding(tokens.local, used(weight, tokens.cut.sharing.ranks), *of_shard))
