"""A tensor that says more than its data: a rule decides what functions of torch do with it.

It is this rank's part of a gradient, of a state_dict, of norms. See PyTorch docs, "Extending torch with a Tensor-like
type".
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor


class TensorRule:
    """What functions of torch do with a tensor."""

    def function(self, function, types: Sequence[type], arguments: Sequence, options: dict) -> Any:
        """Return what a function gives for arguments with the tensor among them."""
        raise NotImplementedError(f"{type(self).__name__} has no rule for functions")

    def refuse_to_join(self, operation: str, members: Iterable[int]) -> None:
        """Raise if the tensor must not be summed over these members. The backend calls this.

        Args:
            operation: the collective, for the message.
            members: global ranks.
        """

    def is_pickled(self, x: "RuledTensor") -> None:
        """Note that torch.save or another pickler writes the tensor's data."""

    def refuse_to_write(self, x: "RuledTensor", name: str) -> None:
        """Raise ValueError if the tensor must not be written to a file. torch.distributed.checkpoint has it called."""
        raise ValueError(f"{name} is a tensor with a rule for functions: write {name}.as_subclass(torch.Tensor)")


class RuledTensor(torch.Tensor):
    """Tensor with a rule, on the memory of a plain one.

    Attributes:
        rule: that of the first such tensor among a function's arguments decides.
    """

    rule: Any

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        options = options or {}
        return _first_in((arguments, options)).rule.function(function, types, arguments, options)

    def refuse_to_join(self, operation: str, members: Iterable[int]) -> None:
        self.rule.refuse_to_join(operation, members)

    # Of torch.distributed.checkpoint, which would store one rank's part under the whole tensor's name.

    def __create_write_items__(self, name: str, _: Any):
        self.rule.refuse_to_write(self, name)

    def __create_chunk_list__(self):
        self.rule.refuse_to_write(self, "a tensor")

    def __reduce_ex__(self, protocol):
        self.rule.is_pickled(self)
        return plain(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo):
        return ruled(plain(self).clone(), self.rule)


class RuledDTensor(DTensor):
    """DTensor with a rule: the gradient of a parameter that FSDP2 shards. FSDP2 adds to its memory."""

    rule: Any
    __torch_function__: Any = classmethod(RuledTensor.__torch_function__.__func__)  # type: ignore[attr-defined]


def ruled(x: torch.Tensor, rule: Any) -> RuledTensor:
    """Return a tensor on the memory of x, with a rule."""
    if isinstance(x, DTensor):
        made: Any = RuledDTensor(x._local_tensor, x._spec, requires_grad=False)
    else:
        made = x.as_subclass(RuledTensor)
    made.rule = rule
    return made


def plain(x: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor on the memory of x, of this rank's part if x is a DTensor."""
    if isinstance(x, DTensor):
        return x._local_tensor
    return x.as_subclass(torch.Tensor)


def in_dtensor(x: Any) -> DTensor:
    """Return a DTensor without its rule."""
    return DTensor(x._local_tensor, x._spec, requires_grad=False)


def unruled(function, arguments: Sequence, options: dict) -> Any:
    """Return what a function of torch gives for the tensors without their rules."""
    with torch._C.DisableTorchFunctionSubclass():
        return function(*arguments, **options)


def rule_of(x: Any, kind: type) -> Any:
    """Return the rule of x if it is of this kind; None for other tensors and values."""
    return x.rule if type(x) in (RuledTensor, RuledDTensor) and type(x.rule) is kind else None


def _first_in(tree) -> RuledTensor:
    waiting = [tree]
    while waiting:
        part = waiting.pop()
        if type(part) in (RuledTensor, RuledDTensor):
            return part
        if isinstance(part, list | tuple):
            waiting += reversed(part)
        elif isinstance(part, dict):
            waiting += reversed(part.values())
    raise AssertionError("torch called the rule of no tensor")
