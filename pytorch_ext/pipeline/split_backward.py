"""Which backwards torch can take in two halves, first for the inputs of a stage and then for its weights.

torch starts the half of the weights at the operations where a weight meets a value that depends on the stage's inputs.
It loses gradients or counts them twice if a weight is used at several places (a bias table of all layers, a shared
layer), or for an output that does not depend on the inputs. Such a stage runs its whole backward in the first half.
"""

from collections.abc import Iterable, Sequence

import torch
from torch.autograd.graph import GradientEdge, Node


def can_be_halved(
    outputs: Iterable[torch.Tensor | GradientEdge], inputs: Iterable, parameters: Iterable[torch.Tensor]
) -> bool:
    """Check that every parameter meets the inputs' values in one operation, and that all its gradient comes from there.

    Args:
        outputs: outputs of a stage or their gradient edges, or its loss.
        inputs: inputs of the stage, leaves; values that are not tensors do not matter.
        parameters: the stage's parameters.
    """
    ends = [x.node if isinstance(x, GradientEdge) else x.grad_fn for x in outputs]
    roots = [node for node in ends if node is not None]
    leaves = {_accumulator(x) for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad}
    weights = {_accumulator(x) for x in parameters if x.requires_grad}
    order = _in_order(roots)
    of_inputs: set[Node] = set(leaves)
    for node in order:
        if any(child in of_inputs for child in _children(node)):
            of_inputs.add(node)
    users: dict[Node, Node] = {}
    for start in [*(node for node in order if node in of_inputs), *(root for root in roots if root not in of_inputs)]:
        waiting = [child for child in _children(start) if child not in of_inputs]
        seen: set[Node] = set()
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            if node in weights and (start not in of_inputs or users.setdefault(node, start) is not start):
                return False
            waiting += _children(node)
    return True


def uses_of(parameter: torch.Tensor, outputs: torch.Tensor | Sequence[torch.Tensor]) -> int:
    """Return the number of gradients that backward of these outputs adds up for a parameter."""
    given = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
    leaf = _accumulator(parameter)
    return sum(_children(node).count(leaf) for node in _in_order([x.grad_fn for x in given if x.grad_fn is not None]))


def _accumulator(leaf: torch.Tensor) -> Node:
    node = leaf.view_as(leaf).grad_fn
    assert node is not None
    return node.next_functions[0][0]  # type: ignore[return-value]


def _children(node: Node) -> list[Node]:
    return [child for child, _ in node.next_functions if child is not None]


def _in_order(roots: Sequence[Node]) -> list[Node]:
    """Return the nodes under the roots, each after its children."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack = [(root, False) for root in roots]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(child, False) for child in _children(node)]
    return order
