"""Modules whose input is this rank's part of the sequence."""

from contextlib import ExitStack

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from weft.comm.communicator import Communicator
from weft.comm.registry import Group, communicator
from weft.metadata import metadata, set_metadata
from weft.rng import own_random_numbers


def sum_gradients(module: nn.Module, group: Group = None) -> nn.Module:
    """Makes a module one of a sequence-parallel region: what it draws at random is this rank's own while it trains, and
    each backward sums the gradients of its parameters over the ranks of the group.

    For a module (a norm, a dropout) between a row and a column layer with sequence_parallel=True: each rank's gradient
    covers its own tokens, and the whole one is their sum (Korthikanti et al. 2022, section 4.2.2). The sum is taken
    before the gradient is accumulated, so gradients of several backwards add up as usual. Once for a parameter, however
    often it is named; copies of the module do the same.
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
    """Whether it may: all but what is known not to."""
    known = isinstance(module, nn.Linear | nn.Sequential | nn.ModuleList | nn.Identity)
    return not known and not type(module).__name__.endswith("Norm")


class _SumGradients:
    """Hooks each parameter once. Before every forward, since a copied or reloaded parameter has lost its hook."""

    def __init__(self, ranks: Communicator):
        self.ranks = ranks

    def __call__(self, module: nn.Module, *_) -> None:
        for parameter in module.parameters():
            if not parameter.requires_grad or self.ranks.world_size == 1 or metadata(parameter, "summed_over"):
                continue
            set_metadata(parameter, "summed_over", self.ranks)
            parameter.register_hook(lambda gradient: self.ranks.all_reduce_(gradient.clone()))


class _SequenceRandomNumbers:
    """A module's forward pre-hook, and, as `leave`, its forward hook, also after an error."""

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
