"""Values of a state_dict that know that they are parts, so that nobody writes one rank's part as the whole."""

import warnings
from dataclasses import dataclass
from typing import Any

import torch

from weft.sharding.ruled_tensor import TensorRule, rule_of, ruled, unruled
from weft.sharding.shard import Shard

_INSTEAD = (
    "weft.full_state_dict(model), called on every rank, is the whole; weft.save_checkpoint writes it from all ranks; "
    "torch.save(model.state_dict(), a file of each rank's own) keeps parts"
)
_T = torch.Tensor
# What safetensors, huggingface_hub and transformers ask for before they write a tensor.
_WRITTEN = {_T.untyped_storage, _T.storage}
_ALIKE = {_T.detach, _T.clone, _T.contiguous, _T.cpu, _T.cuda, _T.to, _T.float, _T.double, _T.half, _T.bfloat16}


@dataclass(frozen=True)
class PartOfState(TensorRule):
    """Rule of this rank's part of a parameter or buffer. Functions of torch take it as a plain tensor.

    Attributes:
        shard: place in the whole tensor.
    """

    shard: Shard

    def function(self, function, types, arguments, options):
        if function in _WRITTEN:
            self.refuse_to_write(arguments[0])
        result = unruled(function, arguments, options)
        if function in _ALIKE and rule_of(arguments[0], PartOfState) and result.shape == arguments[0].shape:
            return ruled(result, arguments[0].rule)
        return result

    def is_pickled(self, x: torch.Tensor) -> None:
        warnings.warn(
            f"the state_dict() of a split model is saved, which has this rank's part of it: {_INSTEAD}",
            stacklevel=3,
        )

    def refuse_to_write(self, x: torch.Tensor, name: str = "a tensor of state_dict()") -> None:
        shape, whole = tuple(x.shape), self.shard.global_shape
        raise ValueError(
            f"{name} is this rank's part {shape} of {whole}, and would be written as if it was the whole: {_INSTEAD}; "
            "weft.as_dtensors(model) is for torch.distributed.checkpoint"
        )


def is_part(x: Any) -> bool:
    """Return whether a value of a state_dict is this rank's part."""
    return rule_of(x, PartOfState) is not None


def part_of_state(tensor: torch.Tensor, shard: Shard) -> torch.Tensor:
    """Return a tensor as a part, on its memory."""
    return ruled(tensor, PartOfState(shard))
