"""What ranks must have alike besides gradients: parameters at the start, buffers before each forward."""

from collections.abc import Callable, Iterable

import torch
from torch import nn

from weft.comm.communicator import Communicator


@torch.no_grad()
def broadcast(tensors: Iterable[torch.Tensor], ranks: Communicator, root: int = 0) -> None:
    """Every tensor becomes the root's: one collective for all of a type and device that are not large themselves."""
    small: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() >= 1 << 16:
            ranks.broadcast_(tensor.detach(), root)
        elif tensor.numel():
            small.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for together in small.values():
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in together])
        ranks.broadcast_(flat, root)
        for tensor, part in zip(together, flat.split([tensor.numel() for tensor in together]), strict=True):
            tensor.copy_(part.view(tensor.shape))


class OfWrapper:
    """A hook of the wrapper's on the module inside. A copy of the module (copy.deepcopy, pickle) has no wrapper, and
    there the hook does nothing."""

    def __init__(self, call: Callable | None = None):
        self._call = call

    def __call__(self, *arguments) -> None:
        if self._call is not None:
            self._call(*arguments)

    def __deepcopy__(self, memo):
        return OfWrapper()

    def __reduce__(self):
        return OfWrapper, ()


class Trained:
    """The parameters that were wrapped, and a cheap look at whether the module still has just those."""

    def __init__(self, module: nn.Module):
        self._module = module
        self._sizes = [(one, len(one._parameters), len(one._modules)) for one in module.modules()]
        self._layers = [(one._modules, name, layer) for one in module.modules() for name, layer in one.named_children()]
        self._places = [
            (one._parameters, name, parameter)
            for one in module.modules()
            for name, parameter in one._parameters.items()
            if parameter is not None
        ]
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._kinds = self._kinds_now()

    def _kinds_now(self) -> list[tuple[bool, torch.dtype]]:
        return [(parameter.requires_grad, parameter.dtype) for _, _, parameter in self._places]

    def check(self) -> bool:
        """Whether other parameters are trained than when last asked (frozen, unfrozen).

        Raises:
            ValueError: a parameter was added, taken away, replaced or converted since the module was wrapped.
        """
        same = all(parameters.get(name) is parameter for parameters, name, parameter in self._places)
        same = same and all(layers.get(name) is layer for layers, name, layer in self._layers)
        if not same or any(len(one._parameters) != p or len(one._modules) != m for one, p, m in self._sizes):
            self._refuse()
        kinds = self._kinds_now()
        if kinds == self._kinds:
            return False
        for (_, _, parameter), (_, before), (_, now) in zip(self._places, self._kinds, kinds, strict=True):
            if before != now:
                raise ValueError(
                    f"DataParallel: the parameter {self._names[id(parameter)]!r} is {now}, and was {before} when it "
                    "was wrapped: convert the module first, then wrap it"
                )
        self._kinds = kinds
        return True

    def _refuse(self) -> None:
        now = dict(self._module.named_parameters())
        new = [name for name, parameter in now.items() if id(parameter) not in self._names]
        held = {id(parameter) for parameter in now.values()}
        gone = [name for known, name in self._names.items() if known not in held]
        if new or gone:
            what = [f"{word} {', '.join(map(repr, names))}" for word, names in (("new", new), ("gone", gone)) if names]
            raise ValueError(
                f"DataParallel: the module's parameters are not those that were wrapped ({'; '.join(what)}): their "
                "gradients would not be summed. Change the module first, then wrap it"
            )
