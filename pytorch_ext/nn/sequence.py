"""Modules whose input is this rank's part of the sequence."""

from torch import nn

from weft.comm.communicator import communicator


def sum_gradients(module: nn.Module, group=None) -> nn.Module:
    """Makes each backward sum the gradients of the module's parameters over the ranks of the group.

    For a module with whole parameters between a row and a column layer with sequence_parallel=True: each rank's
    gradient covers its own tokens, and the whole one is their sum (Korthikanti et al. 2022, section 4.2.2). The sum is
    taken before the gradient is accumulated, so gradients of several backwards add up as usual.
    """
    ranks = communicator(group)
    for parameter in module.parameters():
        if parameter.requires_grad and ranks.world > 1:
            parameter.register_hook(lambda gradient: ranks.all_reduce_(gradient.clone()))
    return module
