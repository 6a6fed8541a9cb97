"""Modules of a sequence-parallel region: their input is this rank's part of the sequence."""

from contextlib import ExitStack

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from weft.comm.communicator import Communicator
from weft.comm.registry import Group, communicator
from weft.metadata import metadata, set_metadata
from weft.rng import own_random_numbers


def sum_gradients(module: nn.Module, group: Group = None) -> nn.Module:
    """Prepare a module for a sequence-parallel region and return it.

    Each backward then sums the gradients of the module's parameters over the ranks of the group. While the module
    trains, each rank draws its own random numbers in it.

    Use it for a module (a norm, a dropout) between a row and a column layer with sequence_parallel=True. There, each
    rank's gradient covers its own tokens and the whole gradient is their sum (Korthikanti et al. 2022, section 4.2.2).

    The sum comes before the gradient is accumulated, so gradients of several backwards add up as usual. A parameter is
    summed once even if it is named several times. Copies of the module behave the same.

    Args:
        group: a ProcessGroup, a one-dimensional DeviceMesh, or None for the default group.
    """
    ranks = communicator(group)
    hook = _SumGradients(ranks)
    hook(module)
    module.register_forward_pre_hook(hook)
    if any(_draws(part) for part in module.modules()):
        own = _SequenceRandomNumbers(ranks)
        module.register_forward_pre_hook(own)
        module.register_forward_hook(own.leave, always_call=True)
    return module


def _draws(module: nn.Module) -> bool:
    """Return False for modules that are known to draw no random numbers, True for all others."""
    known = isinstance(module, nn.Linear | nn.Sequential | nn.ModuleList | nn.Identity)
    return not known and not type(module).__name__.endswith("Norm")


class _SumGradients:
    """Forward pre-hook that hooks each parameter once; a copied or reloaded parameter has lost its hook."""

    def __init__(self, ranks: Communicator):
        self.ranks = ranks

    def __call__(self, module: nn.Module, *_) -> None:
        for parameter in module.parameters():
            if not parameter.requires_grad or self.ranks.world_size == 1 or metadata(parameter, "summed_over"):
                continue
            set_metadata(parameter, "summed_over", self.ranks)
            parameter.register_hook(lambda gradient: self.ranks.all_reduce_(gradient.clone()))


class _SequenceRandomNumbers:
    """Forward pre-hook of a module; `leave` is its forward hook and also runs after an error."""

    def __init__(self, ranks: Communicator):
        self.ranks = ranks
        self.under_way: list[ExitStack] = []

    def __deepcopy__(self, memo):
        return _SequenceRandomNumbers(self.ranks)

    def __call__(self, module: nn.Module, inputs) -> None:
        frame = ExitStack()
        if module.training and self.ranks.world_size > 1:
            device = next((x.device for x in tree_leaves(inputs) if isinstance(x, torch.Tensor)), torch.device("cpu"))
            frame.enter_context(own_random_numbers(self.ranks, device))
        self.under_way.append(frame)

    def leave(self, *_) -> None:
        self.under_way.pop().close()
