"""Equal parameters on all ranks at the start, equal buffers before each forward, and changes to the module."""

from collections.abc import Callable, Iterable

import torch
from torch import nn

from weft.comm.communicator import Communicator


@torch.no_grad()
def broadcast(tensors: Iterable[torch.Tensor], ranks: Communicator, root: int = 0) -> None:
    """Copy the root's tensors to every rank. A collective call.

    Tensors below 65536 elements share one collective for each type and device; each larger tensor has its own.

    Args:
        tensors: tensors to overwrite, in the same order on every rank.
        ranks: ranks that take part.
        root: rank that has the values.
    """
    small: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() >= 1 << 16:
            ranks.broadcast_(tensor.detach(), root)
            if ranks.rank != root:
                torch.autograd.graph.increment_version(tensor)
        elif tensor.numel():
            small.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for together in small.values():
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in together])
        ranks.broadcast_(flat, root)
        parts = flat.split([tensor.numel() for tensor in together])
        for tensor, part in zip(together, parts, strict=True) if ranks.rank != root else ():
            tensor.copy_(part.view(tensor.shape))


def broadcast_buffers(module: nn.Module, ranks: Communicator, root: int) -> None:
    """Copy the root's buffers to every rank. A collective call.

    A buffer that the graph of an earlier forward holds is replaced by another tensor, so that its backward finds the
    values of that forward.
    """
    held: dict[int, torch.Tensor] = {}
    for each in module.modules() if ranks.rank != root else ():
        for name, buffer in each._buffers.items():
            if buffer is not None and buffer._use_count() > 1:  # type: ignore[attr-defined]
                each._buffers[name] = held.setdefault(id(buffer), buffer.clone())
    broadcast(module.buffers(), ranks, root)


class OfWrapper:
    """Hook of a wrapper on the module inside it.

    A copy of the module (copy.deepcopy, pickle) has no wrapper, and its copy of the hook does nothing.
    """

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
    """Record of the wrapped parameters, with a cheap check that the module still has exactly those."""

    def __init__(self, module: nn.Module):
        self._module = module
        modules = list(module.modules())
        self._sizes = [(each, len(each._parameters), len(each._modules)) for each in modules]
        self._layers = [(each._modules, name, layer) for each in modules for name, layer in each.named_children()]
        self._places = [
            (each._parameters, name, parameter)
            for each in modules
            for name, parameter in each._parameters.items()
            if parameter is not None
        ]
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._kinds = self._kinds_now()

    def _kinds_now(self) -> list[tuple[bool, torch.dtype]]:
        return [(parameter.requires_grad, parameter.dtype) for _, _, parameter in self._places]

    def check(self) -> bool:
        """Return whether parameters were frozen or unfrozen since the last check.

        Raises:
            ValueError: a parameter was added, taken away, replaced or converted since the module was wrapped.
        """
        same = all(parameters.get(name) is parameter for parameters, name, parameter in self._places)
        same = same and all(layers.get(name) is layer for layers, name, layer in self._layers)
        if not same or any(len(each._parameters) != p or len(each._modules) != m for each, p, m in self._sizes):
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
            changes = [
                f"{word} {', '.join(map(repr, names))}" for word, names in (("new", new), ("gone", gone)) if names
            ]
            raise ValueError(
                f"DataParallel: the module's parameters are not those that were wrapped ({'; '.join(changes)}): their "
                "gradients would not be summed. Change the module first, then wrap it"
            )
