"""torch's pytree, with a short way through tuples, lists and dicts of tensors and numbers.

These are the usual arguments of functions. Every function of a shared sequence goes through its arguments several
times, and pytree spends most of its time on finding the type of each part.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

ATOMS = {int, float, bool, complex, str, bytes, type(None), type(...), slice, torch.dtype, torch.device, torch.layout}


def leaves(tree) -> list:
    """Return the leaves of the tree in order."""
    kind = type(tree)
    if kind in ATOMS or isinstance(tree, torch.Tensor):
        return [tree]
    if kind is tuple or kind is list:
        return [leaf for part in tree for leaf in leaves(part)]
    if kind is dict:
        return [leaf for part in tree.values() for leaf in leaves(part)]
    return tree_leaves(tree)


def mapped(function: Callable[[Any], Any], tree):
    """Return the same tree with function(leaf) in place of every leaf."""
    kind = type(tree)
    if kind in ATOMS or isinstance(tree, torch.Tensor):
        return function(tree)
    if kind is tuple or kind is list:
        return kind([mapped(function, part) for part in tree])
    if kind is dict:
        return {name: mapped(function, part) for name, part in tree.items()}
    return tree_map(function, tree)
