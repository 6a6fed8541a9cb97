"""LARS: layer-wise adaptive rate scaling (You, Gitman and Ginsburg 2017, arXiv:1708.03888, algorithm 1)."""

from collections.abc import Iterable

import torch

from weft.optim.layerwise import Layerwise, LayerwiseStep
from weft.sharding.sharded_grad import local


class LARS(Layerwise):
    """Stochastic gradient descent with momentum and, for each parameter, a rate in proportion to its norm.

        local = trust * |w| / (|g| + weight_decay * |w| + eps)
        v = momentum * v + lr * local * (g + weight_decay * w)
        w = w - v

    The rate is inside the momentum, as in the paper, so a change of lr needs no correction. `local` is 1 where |w| or
    |g| is 0, and in groups with adapt=False.

    Args:
        params: parameters, or groups with options of their own. `weft.layerwise_groups(model, weight_decay)` exempts
            biases and the weights of norms. For a shard of ParallelLinear the norms are those of the whole parameter.
            The same holds for pieces of a sharded optimizer: `model.optimizer(weft.LARS, groups, ...)`.
        lr: global learning rate.
        momentum: factor of the last step in v.
        weight_decay: factor of w in the step.
        trust: factor of the local rate; the paper's eta.
        eps: added to the denominator of the local rate.
        adapt: False makes the step that of plain momentum.

    Raises:
        ValueError: an option is negative.

    Examples:
        >>> model = nn.Linear(4, 2)
        >>> before = model.weight.detach().clone()
        >>> optimizer = weft.LARS(weft.layerwise_groups(model, weight_decay=0.0), lr=1.0, trust=0.01)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
        >>> torch.allclose((model.weight - before).norm(), 0.01 * before.norm())
        True
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
        momenta = [local(self.state[parameter]["momentum_buffer"]) for parameter in step.parameters]
        torch._foreach_mul_(momenta, step.group["momentum"])
        torch._foreach_add_(momenta, step.updates, alpha=float(step.group["lr"]))
        torch._foreach_sub_(step.weights, momenta)
