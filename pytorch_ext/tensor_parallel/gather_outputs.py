"""Gathering of outputs that split modules return in parts (attention weights), so that models return the whole."""

import torch
from torch import nn

from weft.context_parallel.shared_sequence import SharedSequence, by_part
from weft.metadata import metadata
from weft.ops.mappings import gather
from weft.tensor_parallel.auto.trace import tensors_in
from weft.tensor_parallel.local_sizes import InParts
from weft.tensor_parallel.transformers_calls import is_transformers

_OBJECTS = 3


def return_whole(model: nn.Module) -> None:
    """Make the model, and the models of transformers in it, return whole tensors if their modules return parts."""
    if not any(isinstance(hook, InParts) for part in model.modules() for hook in part._forward_hooks.values()):
        return
    for part in model.modules():
        if part is model or is_transformers(part):
            part.register_forward_hook(whole_results)


def whole_results(model: nn.Module, args, output):
    """Gather the parts in a model's output. This is a forward hook."""
    if not _parts_in(output):
        return output
    whole = _whole(output)
    left = _parts_in(whole)
    if left:
        raise ValueError(
            f"{type(model).__name__} returns a {type(output).__name__} with attention weights of this rank's heads "
            f"alone ({tuple(left[0].shape)}), which cannot be made whole in it: call it with output_attentions=False, "
            "or split it over one rank (tp=1)"
        )
    return whole


def _parts_in(tree) -> list[torch.Tensor]:
    return [x for x in tensors_in(tree, _OBJECTS) if metadata(x, "part")]


def _whole(tree, objects: int = _OBJECTS):
    if isinstance(tree, torch.Tensor):
        if not metadata(tree, "part"):
            return tree
        dim, sizes, ranks = metadata(tree, "part")
        if isinstance(tree, SharedSequence):
            return by_part(lambda x: x.like(gather(x.local, dim, ranks, sizes)), tree)
        return gather(tree, dim, ranks, sizes)
    if type(tree) in (tuple, list):
        return type(tree)(_whole(part, objects) for part in tree)
    if isinstance(tree, dict):
        for name, part in list(tree.items()):
            tree[name] = _whole(part, objects)
    elif objects and hasattr(tree, "__dict__") and not isinstance(tree, type):
        vars(tree).update({name: _whole(part, objects - 1) for name, part in vars(tree).items()})
    return tree
