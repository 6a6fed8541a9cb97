"""LARS: layer-wise adaptive rate scaling (You, Gitman and Ginsburg 2017, arXiv:1708.03888, algorithm 1)."""

from collections.abc import Iterable

import torch

from weft.optim.layerwise import Layerwise, LayerwiseStep


class LARS(Layerwise):
    """Stochastic gradient descent with momentum, each parameter at a rate in proportion to its norm.

        local = trust * |w| / (|g| + weight_decay * |w| + eps)
        v = momentum * v + lr * local * (g + weight_decay * w)
        w = w - v

    The rate is inside of the momentum, as in the paper: a change of lr needs no correction. Where |w| or |g| is 0, and
    in groups with adapt=False, local is 1.

    Args:
        params: parameters or groups, which may have options of their own; `weft.layerwise_groups(model, weight_decay)`
            leaves biases and norms out. Shards of ParallelLinear count as the whole, and so do the pieces of a sharded
            optimizer: `model.optimizer(weft.LARS, groups, ...)`.
        lr: global rate. momentum, weight_decay: as above.
        trust: the paper's eta.
        adapt: False is plain momentum.

    Raises:
        ValueError: an option is negative.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
        eps: float = 0.0,
        adapt: bool = True,
    ):
        options = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust, "eps": eps}
        for name, value in options.items():
            if not value >= 0:
                raise ValueError(f"LARS: {name}={value} must not be negative")
        super().__init__(params, {**options, "adapt": adapt})

    def _first_state(self, weight: torch.Tensor) -> dict:
        return {"momentum_buffer": torch.zeros_like(weight)}

    def _direct(self, group, weights, gradients, states):
        return torch._foreach_add(gradients, weights, alpha=group["weight_decay"]), gradients

    def _ratio(self, group, weight_norms, measured_norms):
        return group["trust"] * weight_norms / (measured_norms + group["weight_decay"] * weight_norms + group["eps"])

    def _take(self, step: LayerwiseStep) -> None:
        if step.parameters:
            momenta = [self.state[parameter]["momentum_buffer"] for parameter in step.parameters]
            torch._foreach_mul_(momenta, step.group["momentum"])
            torch._foreach_add_(momenta, step.updates, alpha=float(step.group["lr"]))
            torch._foreach_sub_(step.weights, momenta)
