"""Base of LARS and LAMB: each parameter's step is in proportion to the norm of the whole parameter.

Under tensor parallelism a rank has a shard of a parameter, and with a sharded optimizer it has a piece. A step sums the
squared norms of all pieces over the ranks that have the other pieces, then those of all shards over the ranks that have
the other shards. Each sum is one collective, in the order of ranks.

A rank counts a parameter by itself if every rank has it whole. Under data parallelism alone every rank has the same
reduced gradients, and no sum is needed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from weft._C import CollectiveMismatchError
from weft.comm.communicator import Communicator
from weft.data_parallel.grad_norm import gradient_of
from weft.data_parallel.sharded_optimizer import piece_of
from weft.sharding.sharded_grad import local, place_for


def layerwise_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Return parameter groups for LARS and LAMB that exempt vectors from weight decay and scaled steps.

    Matrices and kernels get both. Vectors (biases and the weights of norms) get neither, as is usual; for the decay see
    Goyal et al. 2017, section 5.1.

    Args:
        model: its parameters that require gradients are grouped.
        weight_decay: weight decay of matrices and kernels.

    Returns:
        The group of parameters with more than one dimension, then the group of the others.

    Examples:
        >>> matrices, vectors = weft.layerwise_groups(nn.Linear(4, 2), weight_decay=0.01)
        >>> matrices["weight_decay"], [tuple(parameter.shape) for parameter in matrices["params"]]
        (0.01, [(2, 4)])
        >>> vectors["weight_decay"], [tuple(parameter.shape) for parameter in vectors["params"]]
        (0.0, [(2,)])
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in parameters if parameter.dim() > 1]
    vectors = [parameter for parameter in parameters if parameter.dim() <= 1]
    return [
        {"params": matrices, "weight_decay": weight_decay, "adapt": True},
        {"params": vectors, "weight_decay": 0.0, "adapt": False},
    ]


@dataclass
class LayerwiseStep:
    """Step of one parameter group. Each list has one element for each parameter that has a gradient.

    Attributes:
        weights: values of the parameters; 16-bit values are widened to fp32.
        updates: tensors to subtract from the weights; they are scaled in place first.
        measured: tensors to compare the weights with, by norm.
    """

    group: dict
    parameters: list[nn.Parameter]
    weights: list[torch.Tensor]
    updates: list[torch.Tensor]
    measured: list[torch.Tensor]


class OfWholeParameters(torch.optim.Optimizer):
    """Base of optimizers that need whole parameters, and bring the ranks' parts of them together.

    Gradients are read from `.grad`, or else from `main_grad`.
    """

    sums_norms_of_pieces = True  # `DataParallel.optimizer` passes a piece of every parameter, empty ones too

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> Any:
        """Step every parameter that has a gradient. A collective call of the ranks that have parts of them.

        Args:
            closure: computes the loss and its gradients before the step.

        Returns:
            The closure's loss, or None without a closure.

        Raises:
            RuntimeError: a gradient is sparse or complex.
            CollectiveMismatchError: the ranks have parts of different parameters.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    def _step(self) -> None:
        raise NotImplementedError

    def _given(self, group: dict) -> dict[nn.Parameter, torch.Tensor]:
        """Return the parameters of a group that have a gradient, and their gradients."""
        found = {parameter: gradient_of(parameter) for parameter in group["params"]}
        given = {parameter: gradient for parameter, gradient in found.items() if gradient is not None}
        if any(gradient.is_sparse for gradient in given.values()):
            raise RuntimeError(f"{type(self).__name__} takes no sparse gradients")
        if any(gradient.is_complex() for gradient in given.values()):
            raise RuntimeError(f"{type(self).__name__} takes no complex gradients: hold them as torch.view_as_real")
        return given

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, `main_grad` included.

        Args:
            set_to_none: set `.grad` to None instead of zeros. A `main_grad` is always zeroed.
        """
        super().zero_grad(set_to_none)
        for group in self.param_groups:
            for parameter in group["params"]:
                if (main_grad := getattr(parameter, "main_grad", None)) is not None:
                    main_grad.zero_()

    def load_state_dict(self, state_dict: dict) -> None:
        """Load the state in the types in which it was saved."""
        super().load_state_dict(state_dict)
        keep_types(self, state_dict)


class Layerwise(OfWholeParameters):
    """Base of optimizers with the step weight -= lr * ratio(|weight|, |measured|) * update.

    State and arithmetic of 16-bit parameters are in fp32; the result is rounded once.
    """

    _agreed: tuple[str, ...] = ()  # parameters with pieces that every rank is known to scale, in this order

    def _step(self) -> None:
        steps = [step for step in map(self._prepare, self.param_groups) if step.parameters]
        self._scale([step for step in steps if step.group["adapt"]])
        for step in steps:
            self._take(step)
            for parameter, weight in zip(step.parameters, step.weights, strict=True):
                if parameter.dtype != weight.dtype:
                    local(parameter.detach()).copy_(weight)

    def _prepare(self, group: dict) -> LayerwiseStep:
        given = self._given(group)
        parameters = list(given)
        weights = [wide(local(parameter.detach())) for parameter in parameters]
        gradients = [given[parameter].to(weight.dtype) for parameter, weight in zip(parameters, weights, strict=True)]
        for parameter, weight in zip(parameters, weights, strict=True):
            if not self.state[parameter]:
                like = parameter.detach().to(weight.dtype) if isinstance(parameter, DTensor) else weight
                self.state[parameter].update(self._first_state(like))
        states = [self.state[parameter] for parameter in parameters]
        updates, measured = self._direct(group, weights, gradients, states) if parameters else ([], [])
        return LayerwiseStep(group, parameters, weights, updates, measured)

    def _scale(self, steps: list[LayerwiseStep]) -> None:
        parameters = [parameter for step in steps for parameter in step.parameters]
        if not parameters:
            return
        self._agree(parameters)
        weights = [weight for step in steps for weight in step.weights]
        measured = [x for step in steps for x in step.measured]
        norms = whole_norms([weights, measured], parameters)
        counts = [len(step.parameters) for step in steps]
        for step, (of_weights, of_measured) in zip(steps, norms.split(counts, dim=1), strict=True):
            ratios = self._ratio(step.group, of_weights, of_measured)
            ratios = torch.where((of_weights > 0) & (of_measured > 0), ratios, 1.0)
            torch._foreach_mul_(step.updates, list(ratios.unbind()))

    def _agree(self, parameters: Sequence[nn.Parameter]) -> None:
        """Check that every rank sums norms of the same parameters; a collective call, made once for these pieces."""
        pieces = [piece for piece in map(piece_of, parameters) if piece is not None]
        names = tuple(piece.name for piece in pieces)
        if names == self._agreed:
            return
        ranks = pieces[0].ranks
        gathered: list[tuple[str, ...]] = ranks.all_gather_object(names)
        for rank, other in zip(ranks.global_ranks, gathered, strict=True):
            if other != gathered[0]:
                kind = type(self).__name__
                raise CollectiveMismatchError(
                    f"{kind}: rank {ranks.global_ranks[0]} steps pieces of {', '.join(gathered[0])}; rank {rank} steps "
                    f"pieces of {', '.join(other)}. Make the optimizer with model.optimizer(weft.{kind}, ...), and "
                    "with the same groups on every rank"
                )
        self._agreed = names

    def _first_state(self, weight: torch.Tensor) -> dict:
        raise NotImplementedError

    def _direct(self, group: dict, weights: list, gradients: list, states: list[dict]) -> tuple[list, list]:
        """Return the updates, in memory of their own, and the tensors to measure."""
        raise NotImplementedError

    def _ratio(self, group: dict, weight_norms: torch.Tensor, measured_norms: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def _take(self, step: LayerwiseStep) -> None:
        """Subtract the scaled updates from the weights, in place."""
        raise NotImplementedError


def whole_norms(rows: Sequence[Sequence[torch.Tensor]], parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """Return the norms of whole tensors, each summed over the ranks that hold parts of it.

    Args:
        rows: lists with one tensor for each parameter, split over the ranks like the parameter.
        parameters: parameters, shards or pieces.

    Returns:
        [rows, parameters] in fp32, or in fp64 for fp64 tensors.
    """
    places = [place_for(parameter) for parameter in parameters]
    own = [[place.counted(x) for place, x in zip(places, row, strict=True)] for row in rows]
    squares = torch.stack([torch.stack(torch._foreach_norm(row)) for row in own]).square()
    for holders in zip_longest(*(place.ranks for place in places)):  # of each parameter's pieces, then of its shards
        together: dict[Communicator, list[int]] = {}
        for column, ranks in enumerate(holders):
            if ranks is not None and ranks.world_size > 1:
                together.setdefault(ranks, []).append(column)
        for ranks, columns in together.items():
            squares[:, columns] = ranks.all_reduce_(squares[:, columns].contiguous())
    return squares.sqrt()


def wide(x: torch.Tensor) -> torch.Tensor:
    """Return `x` in fp32 if it has 16 bits, else `x` itself."""
    return x.float() if x.dtype.itemsize < 4 else x


def keep_types(optimizer: torch.optim.Optimizer, state_dict: dict) -> None:
    """Restore the saved types of loaded state, because torch's loading rounds it to the parameters' types."""
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        for key, value in state_dict["state"].get(number, {}).items():
            if isinstance(value, torch.Tensor) and value.dtype != optimizer.state[parameter][key].dtype:
                optimizer.state[parameter][key] = value.to(parameter.device, copy=True)
