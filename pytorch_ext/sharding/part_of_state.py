"""Values of a state_dict that know that they are parts, so that nobody writes one rank's part as the whole."""

from typing import Any

import torch

from weft.sharding.shard import Shard

_INSTEAD = (
    "weft.full_state_dict(model), called on every rank, is the whole; weft.save_checkpoint writes it from all ranks; "
    "torch.save(model.state_dict(), a file of each rank's own) keeps parts"
)
_T = torch.Tensor
# What safetensors, huggingface_hub and transformers ask for before they write a tensor.
_WRITTEN = {_T.untyped_storage, _T.storage}
_ALIKE = {_T.detach, _T.clone, _T.contiguous, _T.cpu, _T.cuda, _T.to, _T.float, _T.double, _T.half, _T.bfloat16}


class PartOfState(torch.Tensor):
    """This rank's part of a parameter or buffer, on the model's memory. Functions of torch take it as a plain tensor.

    Attributes:
        shard: place in the whole tensor.
    """

    shard: Shard

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        if function in _WRITTEN:
            _refuse_to_write(arguments[0])
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*arguments, **(options or {}))
        if function in _ALIKE and type(arguments[0]) is PartOfState and result.shape == arguments[0].shape:
            return part_of_state(result, arguments[0].shard)
        return result

    # Of torch.distributed.checkpoint, which would store one rank's part under the whole tensor's name.

    def __create_write_items__(self, name: str, _: Any):
        _refuse_to_write(self, name)

    def __create_chunk_list__(self):
        _refuse_to_write(self)

    def __deepcopy__(self, memo):
        return part_of_state(self.as_subclass(torch.Tensor).clone(), self.shard)

    def __reduce_ex__(self, protocol):
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


def part_of_state(tensor: torch.Tensor, shard: Shard) -> PartOfState:
    """Return a tensor as a part, on its memory."""
    made = tensor.as_subclass(PartOfState)
    made.shard = shard
    return made


def _refuse_to_write(part: PartOfState, name: str = "a tensor of state_dict()") -> None:
    """Raise ValueError: this rank has a part of the tensor that is to be written."""
    shape, whole = tuple(part.shape), part.shard.global_shape
    raise ValueError(
        f"{name} is this rank's part {shape} of {whole}, and would be written as if it was the whole: {_INSTEAD}; "
        "weft.as_dtensors(model) is for torch.distributed.checkpoint"
    )
