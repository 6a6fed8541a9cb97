"""Modules whose input is this rank's part of the sequence."""

from torch import nn

from weft.comm.communicator import Communicator, communicator


def sum_gradients(module: nn.Module, group=None) -> nn.Module:
    """Makes each backward sum the gradients of the module's parameters over the ranks of the group.

    For a module with whole parameters between a row and a column layer with sequence_parallel=True: each rank's
    gradient covers its own tokens, and the whole one is their sum (Korthikanti et al. 2022, section 4.2.2). The sum is
    taken before the gradient is accumulated, so gradients of several backwards add up as usual. Once for a parameter,
    however often it is named; copies of the module do the same.
    """
    hook = _SumGradients(communicator(group))
    hook(module)
    module.register_forward_pre_hook(hook)
    return module


class _SumGradients:
    """Hooks each parameter once. Before every forward, since a copied or reloaded parameter has lost its hook."""

    def __init__(self, ranks: Communicator):
        self.ranks = ranks

    def __call__(self, module: nn.Module, *_) -> None:
        for parameter in module.parameters():
            if not parameter.requires_grad or self.ranks.world == 1 or hasattr(parameter, "_weft_summed_over"):
                continue
            parameter._weft_summed_over = self.ranks  # type: ignore[attr-defined]
            parameter.register_hook(lambda gradient: self.ranks.all_reduce_(gradient.clone()))
