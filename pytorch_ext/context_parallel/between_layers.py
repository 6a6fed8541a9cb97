"""Sequence-parallel regions of automatic plans: ranks share the sequence between the layers that they split.

A row layer gives each rank its part of the sequence as a SharedSequence (Korthikanti et al. 2022, section 4.2.2). The
residual stream, norms and dropout then work on the part, by the rules for functions of a shared sequence, and the next
column layer gathers it. Shapes are the whole's, so a model's own code needs no change. A tensor that every rank has
whole is cut where it meets a part. A function without a rule, another kind of layer, and the end of the model get the
whole, gathered.

Per column or row layer the bytes are those of the two all_reduces that the reduce_scatter and the all_gather replace.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from weft.comm.communicator import Communicator
from weft.context_parallel.region import leave, of_whole
from weft.context_parallel.shared_sequence import (
    SequenceCut,
    SharedSequence,
    Sharing,
    note_gathering,
    refuse_results_of_custom_functions,
)
from weft.context_parallel.uncompiled import leave_out_of_graphs, uncompile
from weft.forward.chain import ForwardChain
from weft.forward.running import followed
from weft.nn import LoRA, ParallelLinear
from weft.nn.sharded import ShardHolder
from weft.ops.sequence_layout import SequenceLayout


def share_between_layers(model: nn.Module, ranks: Communicator, strict: bool = False) -> None:
    """Make the ranks that split a model's layers share the sequence between these layers.

    The model takes and returns whole tensors, as before.

    Args:
        strict: raise ValueError if the sequence is gathered for anything but a column layer or the model's output.
    """
    sharing = Sharing(ranks, layout="contiguous", strict=strict)
    for module in model.modules():
        if isinstance(module, ParallelLinear):
            ForwardChain.of(module).add("sequence", _LinearAtRegion(sharing))
        elif isinstance(module, ShardHolder):
            ForwardChain.of(module).add("sequence", of_whole)
    leave_out_of_graphs(model)
    ForwardChain.of(model).add("sequence", partial(_at_edge, sharing))


def refuse_adapters(model: nn.Module) -> None:
    """Raise ValueError for adapters: their terms of a part of the sequence would meet features of the whole."""
    if any(isinstance(part, LoRA) or hasattr(part, "lora_A") for part in model.modules()):
        raise ValueError(
            f"{type(model).__name__}: sequence_parallel=True of an automatic plan does not follow the terms that LoRA "
            "adds to split layers: leave sequence_parallel out"
        )


class _LinearAtRegion:
    """Forward of a split linear layer: a row layer begins a sequence-parallel region, a column layer ends one.

    Dimension -2 of a row layer's output is shared if it has at least one position for each rank.
    """

    def __init__(self, sharing: Sharing):
        self.sharing = sharing

    def __call__(self, forward: Callable, layer: ParallelLinear, x: torch.Tensor) -> torch.Tensor:
        ranks = self.sharing.ranks
        if isinstance(x, SharedSequence):
            refuse_results_of_custom_functions(x)
            if layer.style == "column" and x.back == -2 and x.cut.blocks == 1:
                return forward(x.local, sequence_dim=-2)
            note_gathering(f"{layer.style} layer", x)
            return forward(x.whole())
        if layer.style != "row" or layer.split_input or x.dim() < 3 or x.size(-2) < ranks.world_size:
            return forward(x)
        part = forward(x, sequence_dim=-2)
        layout = SequenceLayout(x.size(-2), ranks.world_size, self.sharing.layout)
        return SharedSequence(part, x.dim() - 2, SequenceCut(self.sharing, layout))


def _at_edge(sharing: Sharing, forward: Callable, model: nn.Module, *args, **kwargs):
    """Run the model's forward, and return whole tensors."""
    refuse_adapters(model)
    uncompile(model)
    with followed(model):
        output = forward(*args, **kwargs)
    return leave(output, sharing)
