"""LAMB: layer-wise adaptive moments (You et al. 2019, arXiv:1904.00962, algorithm 2)."""

import math
from collections.abc import Iterable

import torch

from weft.optim.layerwise import Layerwise, LayerwiseStep
from weft.sharding.sharded_grad import local


class LAMB(Layerwise):
    """Adam with decoupled weight decay and, for each parameter, a step in proportion to the parameter's norm.

        m = beta1 * m + (1 - beta1) * g             v = beta2 * v + (1 - beta2) * g^2
        u = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay * w
        w = w - lr * phi(|w|) / |u| * u             phi(x) = min(max(x, bounds[0]), bounds[1])

    The ratio phi(|w|) / |u| is 1 where |w| or |u| is 0, and in groups with adapt=False.

    Args:
        params: parameters, or groups with options of their own. `weft.layerwise_groups(model, weight_decay)` exempts
            biases and the weights of norms. For a shard of ParallelLinear the norms are those of the whole parameter.
            The same holds for pieces of a sharded optimizer: `model.optimizer(weft.LAMB, groups, ...)`.
        lr: learning rate.
        betas: decay rates of the means of g and of g^2, each at least 0 and less than 1.
        eps: added to the root of the mean of g^2.
        weight_decay: factor of w in u.
        bounds: lower and upper bound of phi.
        adapt: False makes the step that of AdamW, with a decay in proportion to lr.

    Raises:
        ValueError: an option is out of its range.

    Examples:
        >>> model = nn.Linear(4, 2)
        >>> before = model.weight.detach().clone()
        >>> optimizer = weft.LAMB(weft.layerwise_groups(model, weight_decay=0.01), lr=0.1)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
        >>> torch.allclose((model.weight - before).norm(), 0.1 * before.norm())
        True
    """

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        bounds: tuple[float, float] = (0.0, math.inf),
        adapt: bool = True,
    ):
        options = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
        for name, value in options.items():
            if not value >= 0:
                raise ValueError(f"LAMB: {name}={value} must not be negative")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"LAMB: betas={betas} must be at least 0 and less than 1")
        if not 0 <= bounds[0] <= bounds[1]:
            raise ValueError(f"LAMB: bounds={bounds} must be a lower and an upper bound, neither negative")
        super().__init__(params, {**options, "betas": betas, "bounds": bounds, "adapt": adapt})

    def _first_state(self, weight: torch.Tensor) -> dict:
        return {"step": 0, "exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}

    def _direct(self, group, weights, gradients, states):
        beta1, beta2 = group["betas"]
        means, squares = ([local(state[key]) for state in states] for key in ("exp_avg", "exp_avg_sq"))
        for state in states:
            state["step"] += 1
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        updates = torch._foreach_sqrt(squares)
        torch._foreach_div_(updates, [math.sqrt(1 - beta2 ** state["step"]) for state in states])
        torch._foreach_add_(updates, group["eps"])
        updates = torch._foreach_div(means, updates)
        torch._foreach_div_(updates, [1 - beta1 ** state["step"] for state in states])
        torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
        return updates, updates

    def _ratio(self, group, weight_norms, measured_norms):
        return weight_norms.clamp(*group["bounds"]) / measured_norms

    def _take(self, step: LayerwiseStep) -> None:
        torch._foreach_add_(step.weights, step.updates, alpha=-float(step.group["lr"]))
