"""What LARS and LAMB have in common: a step for each parameter in proportion to the norm of the whole parameter.

Under tensor parallelism a rank has a shard of it. The squared norms of all shards of a step are summed over the ranks
that have the others, in one collective, in the order of ranks; parameters that every rank has whole are counted here.
Under data parallelism every rank has the same reduced gradients, and nothing is to be summed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from weft.comm.communicator import Communicator
from weft.gradients.sharding import piece_of
from weft.shard import shard_of


def layerwise_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Parameter groups for LARS and LAMB: weight decay and scaled steps for matrices and kernels; neither for biases
    and the weights of norms, which are vectors (as is usual; Goyal et al. 2017, section 5.1, for the decay)."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [one for one in parameters if one.dim() > 1], "weight_decay": weight_decay, "adapt": True},
        {"params": [one for one in parameters if one.dim() <= 1], "weight_decay": 0.0, "adapt": False},
    ]


@dataclass
class Step:
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
    arithmetic; the result is rounded once."""

    def add_param_group(self, param_group: dict) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if piece_of(parameter) is not None:
                del self.param_groups[-1]
                raise TypeError(
                    f"{type(self).__name__} needs whole parameters or their shards, and a sharded optimizer steps "
                    "pieces that are cut anywhere: make weft.DataParallel with shard_optimizer=False"
                )

    @torch.no_grad()
    def step(self, closure=None):
        """Raises RuntimeError for sparse gradients. Under tensor parallelism a collective call."""
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

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)
        keep_types(self, state_dict)

    def _prepare(self, group: dict) -> Step:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        if any(parameter.grad.is_sparse for parameter in parameters):
            raise RuntimeError(f"{type(self).__name__} takes no sparse gradients")
        weights = [wide(parameter.detach()) for parameter in parameters]
        gradients = [wide(parameter.grad) for parameter in parameters]
        for parameter, weight in zip(parameters, weights, strict=True):
            if not self.state[parameter]:
                self.state[parameter].update(self._first_state(weight))
        states = [self.state[parameter] for parameter in parameters]
        updates, measured = self._direct(group, weights, gradients, states) if parameters else ([], [])
        return Step(group, parameters, weights, updates, measured)

    def _scale(self, steps: list[Step]) -> None:
        parameters = [parameter for step in steps for parameter in step.parameters]
        if not parameters:
            return
        weights = [weight for step in steps for weight in step.weights]
        measured = [one for step in steps for one in step.measured]
        norms = whole_norms([weights, measured], parameters)
        counts = [len(step.parameters) for step in steps]
        for step, (of_weights, of_measured) in zip(steps, norms.split(counts, dim=1), strict=True):
            ratios = self._ratio(step.group, of_weights, of_measured)
            ratios = torch.where((of_weights > 0) & (of_measured > 0), ratios, 1.0)
            torch._foreach_mul_(step.updates, list(ratios.unbind()))

    def _first_state(self, weight: torch.Tensor) -> dict:
        raise NotImplementedError

    def _direct(self, group: dict, weights: list, gradients: list, states: list[dict]) -> tuple[list, list]:
        """The updates, in memory of their own, and what is measured."""
        raise NotImplementedError

    def _ratio(self, group: dict, weight_norms: torch.Tensor, measured_norms: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def _take(self, step: Step) -> None:
        """Takes the scaled updates from the weights, in place."""
        raise NotImplementedError


def whole_norms(rows: Sequence[Sequence[torch.Tensor]], parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """The norms [rows, parameters] of tensors that stand in the whole as the parameters do, in fp32 (fp64 of fp64)."""
    shards = [shard_of(parameter) for parameter in parameters]
    counted = [[x if shard is None else shard.counted(x) for x, shard in zip(row, shards, strict=True)] for row in rows]
    squares = torch.stack([torch.stack(torch._foreach_norm(row)) for row in counted]).square()
    shared: dict[Communicator, list[int]] = {}
    for place, shard in enumerate(shards):
        if shard is not None and shard.communicator.world > 1:
            shared.setdefault(shard.communicator, []).append(place)
    for ranks, places in shared.items():
        squares[:, places] = ranks.all_reduce_(squares[:, places].contiguous())
    return squares.sqrt()


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
