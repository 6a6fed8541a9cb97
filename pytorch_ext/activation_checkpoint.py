"""Activation checkpointing: backward recomputes the activations of whole blocks, or of the parts of each block.

torch.utils.checkpoint without reentrance does the work. It restores the random state, so dropout drops the same
elements. Backward reaches the blocks in the same order on every rank, so their collectives match.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import count, islice

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from weft.arguments import check_choice
from weft.context_parallel.shared_sequence import SharedSequence
from weft.forward import ForwardChain, chains_in
from weft.layer_lists import lists_in, opened_in, refuse_caches

KINDS = ("none", "full", "selective")


def recomputed_in(model: nn.Module, kind: str) -> dict[str, nn.Module]:
    """Return the modules to recompute in backward, by name.

    Args:
        kind: "none";
            "full": each block, an element of the outermost lists (nn.ModuleList, nn.Sequential) that contains modules;
            "selective": in each block, the outermost modules with several matrices (an attention, an MLP). The norms
            and the residual stream between them are kept.

    Raises:
        ValueError: the kind is unknown, or the model has no such modules.
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
    """Recompute the forwards of these modules in backward. A module with several names is wrapped once."""
    for module in modules.values():
        ForwardChain.of(module).add("recompute", recomputed)


def recomputes(model: nn.Module) -> bool:
    return any("recompute" in chain.steps for _, chain in chains_in(model))


def recomputed(forward: Callable, module: nn.Module, *args, **kwargs):
    """Run a forward that keeps no activations and runs again in backward."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    refuse_caches(module, args, kwargs, "to which recomputation would add a second time")
    leaves, structure = tree_flatten((args, kwargs))
    apart = [x.apart() if isinstance(x, SharedSequence) else ((x,), _itself) for x in leaves]
    makers = [(len(parts), together) for parts, together in apart]
    runs = count()

    def again(*values):
        coming = iter(values)
        given = [together(*islice(coming, size)) for size, together in makers]
        args, kwargs = tree_unflatten(given, structure)
        with _buffers_of_its_own(module) if next(runs) else nullcontext():
            return forward(*args, **kwargs)

    # Plain tensors are kept, because any saved-tensor hook takes them.
    return checkpoint(again, *(x for parts, _ in apart for x in parts), use_reentrant=False)


def _itself(x):
    return x


@contextmanager
def _buffers_of_its_own(module: nn.Module) -> Iterator[None]:
    """Run on copies of the buffers, because a norm's running means have counted this batch already."""
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
