"""Activations that are computed again in backward instead of kept: of whole blocks, or of the parts of each block.

torch.utils.checkpoint without reentrance does the work. It restores the random numbers, so that dropout drops the same,
and backward comes to the blocks in the same order on every rank, so that the collectives in them meet.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import count

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from weft.arguments import check_choice
from weft.context_parallel.shared_sequence import SharedSequence, localized
from weft.layer_lists import lists_in, opened_in, refuse_caches

KINDS = ("none", "full", "selective")


def recomputed_in(model: nn.Module, kind: str) -> dict[str, nn.Module]:
    """The modules, by name, whose forwards run again in backward.

    "full": each block: an element of the outermost lists (nn.ModuleList, nn.Sequential) that has modules in it.
    "selective": of each block the outermost modules in it with several matrices (an attention, an MLP). What stands
    between them, the norms and the residual stream, is kept.

    Raises:
        ValueError: no such kind; a model with no such modules.
    """
    check_choice("recompute", kind, KINDS)
    if kind == "none":
        return {}
    blocks = _blocks(model)
    if not blocks:
        raise ValueError(
            f'recompute={kind!r}: the model has no nn.ModuleList or nn.Sequential of blocks; use recompute="none", and '
            "torch.utils.checkpoint in its forward"
        )
    if kind == "full":
        return blocks
    inner = {name: module for block in blocks for name, module in _inner(block, blocks[block])}
    if not inner:
        raise ValueError(
            'recompute="selective": no block has a module of several matrices in it (an attention, an MLP); use "full"'
        )
    return inner


def recompute(modules: Mapping[str, nn.Module]) -> None:
    """Makes the forwards of these modules run again in backward. One that stands in several places is made so once."""
    for module in modules.values():
        if not isinstance(module.forward, Recomputed):
            module.forward = Recomputed(module)  # type: ignore[method-assign]


def recomputes(model: nn.Module) -> bool:
    return any(isinstance(module.forward, Recomputed) for module in model.modules())


class Recomputed:
    """The forward of a module that is not kept."""

    def __init__(self, module: nn.Module):
        self.module, self.forward = module, module.forward

    def __call__(self, *args, **kwargs):
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        refuse_caches(self.module, args, kwargs, "to which recomputation would add a second time")
        leaves, structure = tree_flatten((args, kwargs))
        shared = [(x.axis, x.cut) if isinstance(x, SharedSequence) else None for x in leaves]

        runs = count()

        def again(*values):
            given = [SharedSequence(x, *how) if how else x for x, how in zip(values, shared, strict=True)]
            args, kwargs = tree_unflatten(given, structure)
            with _buffers_of_its_own(self.module) if next(runs) else nullcontext():
                return self.forward(*args, **kwargs)

        # What is kept are plain tensors, which any hooks of saved tensors take.
        return checkpoint(again, *localized(leaves), use_reentrant=False)


@contextmanager
def _buffers_of_its_own(module: nn.Module) -> Iterator[None]:
    """Runs on copies of the buffers: a norm's running means have counted this batch already."""
    held = [
        (part._buffers, name, buffer)
        for part in module.modules()
        if part.training
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]
    try:
        for buffers, name, buffer in held:
            buffers[name] = buffer.clone()
        yield
    finally:
        for buffers, name, buffer in held:
            buffers[name] = buffer


def _blocks(model: nn.Module) -> dict[str, nn.Module]:
    opened, lists = opened_in(model), lists_in(model)
    return {
        name: module
        for name, module in model.named_modules()
        if name not in opened and name.rpartition(".")[0] in lists and any(True for _ in module.children())
    }


def _inner(name: str, block: nn.Module):
    for child_name, child in block.named_children():
        if _matrices(child) > 1:
            yield f"{name}.{child_name}", child
        else:
            yield from _inner(f"{name}.{child_name}", child)


def _matrices(module: nn.Module) -> int:
    return sum(parameter.dim() > 1 for parameter in module.parameters())
