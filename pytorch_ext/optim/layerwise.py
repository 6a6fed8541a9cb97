"""What LARS and LAMB have in common: a step for each parameter in proportion to the norm of the whole parameter.

Under tensor parallelism a rank has a shard of it, and of a sharded optimizer a piece. The squared norms of all pieces
of a step are summed over the ranks that have the others, then those of all shards over theirs, in one collective each,
in the order of ranks; parameters that every rank has whole are counted here. Under data parallelism alone every rank
has the same reduced gradients, and nothing is to be summed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weft._C import CollectiveMismatchError
from weft.comm.communicator import Communicator
from weft.data_parallel.grad_norm import counted, gradient_of
from weft.data_parallel.sharded_optimizer import piece_of
from weft.sharding.shard import shard_of


def layerwise_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Parameter groups for LARS and LAMB: weight decay and scaled steps for matrices and kernels; neither for biases
    and the weights of norms, which are vectors (as is usual; Goyal et al. 2017, section 5.1, for the decay)."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [one for one in parameters if one.dim() > 1], "weight_decay": weight_decay, "adapt": True},
        {"params": [one for one in parameters if one.dim() <= 1], "weight_decay": 0.0, "adapt": False},
    ]


@dataclass
class LayerwiseStep:
    """A parameter group's step. Lists have an element for each parameter that has a gradient.

    Attributes:
        weights: the parameters' values, in fp32 where they are of 16 bits.
        updates: what is to be scaled and taken from them; becomes what is taken.
        measured: that whose norm the weight's is compared with.
    """

    group: dict
    parameters: list[nn.Parameter]
    weights: list[torch.Tensor]
    updates: list[torch.Tensor]
    measured: list[torch.Tensor]


class Layerwise(torch.optim.Optimizer):
    """weight -= lr * ratio(|weight|, |measured|) * update. State of 16-bit parameters is in fp32, and so is all
    arithmetic; the result is rounded once. Gradients are in `.grad`, or else in `main_grad`."""

    sums_norms_of_pieces = True  # `DataParallel.optimizer` gives it a piece of every parameter, empty ones too
    _agreed: tuple[str, ...] = ()  # whose pieces every rank is known to scale, in this order

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> Any:
        """A collective call of ranks with shards or pieces.

        Raises:
            RuntimeError: sparse or complex gradients. CollectiveMismatchError: the ranks have pieces of different
                parameters.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        steps = [self._prepare(group) for group in self.param_groups]
        self._scale([step for step in steps if step.group["adapt"] and step.parameters])
        for step in steps:
            self._take(step)
            for parameter, weight in zip(step.parameters, step.weights, strict=True):
                if parameter.dtype != weight.dtype:
                    parameter.copy_(weight)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of main_grads, too, which it steps by."""
        super().zero_grad(set_to_none)
        for group in self.param_groups:
            for parameter in group["params"]:
                if (main_grad := getattr(parameter, "main_grad", None)) is not None:
                    main_grad.zero_()

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)
        keep_types(self, state_dict)

    def _prepare(self, group: dict) -> LayerwiseStep:
        found = {parameter: gradient_of(parameter) for parameter in group["params"]}
        given = {parameter: gradient for parameter, gradient in found.items() if gradient is not None}
        if any(gradient.is_sparse for gradient in given.values()):
            raise RuntimeError(f"{type(self).__name__} takes no sparse gradients")
        if any(gradient.is_complex() for gradient in given.values()):
            raise RuntimeError(f"{type(self).__name__} takes no complex gradients: hold them as torch.view_as_real")
        parameters = list(given)
        weights = [wide(parameter.detach()) for parameter in parameters]
        gradients = [given[parameter].to(weight.dtype) for parameter, weight in zip(parameters, weights, strict=True)]
        for parameter, weight in zip(parameters, weights, strict=True):
            if not self.state[parameter]:
                self.state[parameter].update(self._first_state(weight))
        states = [self.state[parameter] for parameter in parameters]
        updates, measured = self._direct(group, weights, gradients, states) if parameters else ([], [])
        return LayerwiseStep(group, parameters, weights, updates, measured)

    def _scale(self, steps: list[LayerwiseStep]) -> None:
        parameters = [parameter for step in steps for parameter in step.parameters]
        if not parameters:
            return
        self._agree(parameters)
        weights = [weight for step in steps for weight in step.weights]
        measured = [one for step in steps for one in step.measured]
        norms = whole_norms([weights, measured], parameters)
        counts = [len(step.parameters) for step in steps]
        for step, (of_weights, of_measured) in zip(steps, norms.split(counts, dim=1), strict=True):
            ratios = self._ratio(step.group, of_weights, of_measured)
            ratios = torch.where((of_weights > 0) & (of_measured > 0), ratios, 1.0)
            torch._foreach_mul_(step.updates, list(ratios.unbind()))

    def _agree(self, parameters: Sequence[nn.Parameter]) -> None:
        """That norms are summed of the same parameters on every rank; asked once, a collective call."""
        pieces = [piece for piece in map(piece_of, parameters) if piece is not None]
        names = tuple(piece.name for piece in pieces)
        if names == self._agreed:
            return
        told: list[tuple[str, ...]] = pieces[0].ranks.all_gather_object(names)
        for rank, other in enumerate(told):
            if other != told[0]:
                kind = type(self).__name__
                raise CollectiveMismatchError(
                    f"{kind}: rank 0 steps pieces of {', '.join(told[0])}; rank {rank} of {', '.join(other)}. Make it "
                    f"with model.optimizer(weft.{kind}, ...), of the same groups on every rank"
                )
        self._agreed = names

    def _first_state(self, weight: torch.Tensor) -> dict:
        raise NotImplementedError

    def _direct(self, group: dict, weights: list, gradients: list, states: list[dict]) -> tuple[list, list]:
        """The updates, in memory of their own, and what is measured."""
        raise NotImplementedError

    def _ratio(self, group: dict, weight_norms: torch.Tensor, measured_norms: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def _take(self, step: LayerwiseStep) -> None:
        """Takes the scaled updates from the weights, in place."""
        raise NotImplementedError


def whole_norms(rows: Sequence[Sequence[torch.Tensor]], parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """The norms [rows, parameters] of tensors that stand in the whole as the parameters do, in fp32 (fp64 of fp64)."""
    own = [[counted(parameter, x) for parameter, x in zip(parameters, row, strict=True)] for row in rows]
    squares = torch.stack([torch.stack(torch._foreach_norm(row)) for row in own]).square()
    pieces = [piece_of(parameter) for parameter in parameters]
    shards = [
        shard_of(one if piece is None else piece.parameter) for one, piece in zip(parameters, pieces, strict=True)
    ]
    _sum_over_ranks(squares, [None if piece is None else piece.ranks for piece in pieces])
    _sum_over_ranks(squares, [None if shard is None else shard.communicator for shard in shards])
    return squares.sqrt()


def _sum_over_ranks(squares: torch.Tensor, holders: Sequence[Communicator | None]) -> None:
    """Each column over the ranks that hold parts of its parameter: one collective for all that the same ranks hold."""
    together: dict[Communicator, list[int]] = {}
    for place, ranks in enumerate(holders):
        if ranks is not None and ranks.world_size > 1:
            together.setdefault(ranks, []).append(place)
    for ranks, places in together.items():
        squares[:, places] = ranks.all_reduce_(squares[:, places].contiguous())


def wide(x: torch.Tensor) -> torch.Tensor:
    """Itself, or in fp32 where it is of 16 bits."""
    return x.float() if x.dtype.itemsize < 4 else x


def keep_types(optimizer: torch.optim.Optimizer, state_dict: dict) -> None:
    """The loaded state has the types that it was saved in: torch's own loading rounds it to the parameters'."""
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        for key, value in state_dict["state"].get(number, {}).items():
            if isinstance(value, torch.Tensor) and value.dtype != optimizer.state[parameter][key].dtype:
                optimizer.state[parameter][key] = value.to(parameter.device, copy=True)
