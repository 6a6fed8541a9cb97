"""torch's pytree, with a short way through what functions are called with: tuples, lists and dicts of tensors and
numbers. It is gone through several times for every function of a shared sequence, and pytree takes most of its time to
find out what things are."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

_ATOMS = {int, float, bool, complex, str, bytes, type(None), type(...), slice, torch.dtype, torch.device, torch.layout}


def leaves(tree) -> list:
    kind = type(tree)
    if kind in _ATOMS or isinstance(tree, torch.Tensor):
        return [tree]
    if kind is tuple or kind is list:
        return [leaf for part in tree for leaf in leaves(part)]
    if kind is dict:
        return [leaf for part in tree.values() for leaf in leaves(part)]
    return tree_leaves(tree)


def mapped(function: Callable[[Any], Any], tree):
    """The same tree with function(leaf) in the place of every leaf."""
    kind = type(tree)
    if kind in _ATOMS or isinstance(tree, torch.Tensor):
        return function(tree)
    if kind is tuple or kind is list:
        return kind([mapped(function, part) for part in tree])
    if kind is dict:
        return {name: mapped(function, part) for name, part in tree.items()}
    return tree_map(function, tree)
