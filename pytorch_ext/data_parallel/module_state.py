"""Equal parameters on all ranks at the start, equal buffers before each forward, and changes to the module."""

from collections.abc import Callable, Iterable

import torch
from torch import nn

from weft.comm.communicator import Communicator
from weft.data_parallel.buckets import ranks_that_reduce
from weft.forward.members import Members


@torch.no_grad()
def broadcast(tensors: Iterable[torch.Tensor], ranks: Communicator) -> None:
    """Copy the first rank's tensors to every rank. A collective call.

    Tensors below 65536 elements share one collective for each type and device; each larger tensor has its own.

    Args:
        tensors: tensors to overwrite, in the same order on every rank.
        ranks: ranks that take part.
    """
    small: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() >= 1 << 16:
            ranks.broadcast_(tensor.detach(), 0)
            if ranks.rank:
                torch.autograd.graph.increment_version(tensor)
        elif tensor.numel():
            small.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for together in small.values():
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in together])
        ranks.broadcast_(flat, 0)
        parts = flat.split([tensor.numel() for tensor in together])
        for tensor, part in zip(together, parts, strict=True) if ranks.rank else ():
            tensor.copy_(part.view(tensor.shape))


def broadcast_first(module: nn.Module, ranks: Communicator) -> None:
    """Copy the first rank's parameters and buffers to every rank; those of experts to the ranks that have them.

    Tensors on the meta device have no values to copy.
    """
    of_ranks: dict[Communicator, list[torch.Tensor]] = {ranks: list(module.buffers())}
    for parameter in module.parameters():
        of_ranks.setdefault(ranks_that_reduce(parameter, ranks), []).append(parameter)
    for those, tensors in of_ranks.items():
        broadcast((x for x in tensors if not x.is_meta), those)


def broadcast_buffers(module: nn.Module, ranks: Communicator) -> None:
    """Copy the first rank's buffers to every rank. A collective call.

    A buffer that the graph of an earlier forward holds is replaced by another tensor, so that its backward finds the
    values of that forward.
    """
    held: dict[int, torch.Tensor] = {}
    for each in module.modules() if ranks.rank else ():
        for name, buffer in each._buffers.items():
            if buffer is not None and buffer._use_count() > 1:  # type: ignore[attr-defined]
                each._buffers[name] = held.setdefault(id(buffer), buffer.clone())
    broadcast(module.buffers(), ranks)


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
    """Record of the wrapped parameters, with a check in few calls that the module still has exactly those."""

    def __init__(self, module: nn.Module):
        self._module = module
        self._parameters = list(module.parameters())
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._kinds, self.members = self._kinds_now(), Members(module, buffers=False)

    def _kinds_now(self) -> list[tuple[bool, tuple]]:
        return [(parameter.requires_grad, (parameter.dtype, parameter.shape)) for parameter in self._parameters]

    def check(self) -> bool:
        """Return whether parameters were frozen or unfrozen since the last check.

        Raises:
            ValueError: a parameter was added, taken away, replaced or converted since the module was wrapped.
        """
        if self.members.changed():
            self._refuse_other_parameters()
            self.members.record()
        kinds = self._kinds_now()
        if kinds == self._kinds:
            return False
        for parameter, (_, before), (_, now) in zip(self._parameters, self._kinds, kinds, strict=True):
            if before != now:
                is_now, was = (f"{dtype} {list(shape)}" for dtype, shape in (now, before))
                raise ValueError(
                    f"DataParallel: the parameter {self._names[id(parameter)]!r} is {is_now}, and was {was} when it "
                    "was wrapped: convert or resize the module first, then wrap it"
                )
        self._kinds = kinds
        return True

    def _refuse_other_parameters(self) -> None:
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
