"""Passes over a layer's tensors between its products: reads and writes.

On a GPU norms, activations and rotations are fused kernels. On a CPU they run as PyTorch writes them: each operation
reads its inputs and writes its output. The counts below leave out vectors that are broadcast.
"""

from dataclasses import dataclass

from weft.tools.planner.job import GRADIENT_BYTES, OPTIMIZERS, Job
from weft.tools.planner.model import Model


@dataclass(frozen=True)
class Passes:
    """Passes of one direction over tensors as wide as the model, as the MLP, and as queries and keys."""

    outer: float
    inner: float
    rotated: float


def passes_of(job: Job) -> tuple[Passes, Passes]:
    """Return the passes of forward and of backward."""
    return _operations(job.model) if job.eager else _kernels(job.model)


def _kernels(model: Model) -> tuple[Passes, Passes]:
    """Return the passes of fused kernels.

    There are two norms (read, write; backward reads x and dy, writes dx) and two residual sums (read two, write one).
    """
    masks = 0.5 if model.dropout else 0
    rotated = 0 if model.positions else 2
    forward = Passes(2 * (2 + 3 + masks), 3 if model.gated_mlp else 2, rotated)
    return forward, Passes(2 * (3 + 2 + 3 * masks), 5 if model.gated_mlp else 3, rotated)


def _operations(model: Model) -> tuple[Passes, Passes]:
    """Return the passes of separate operations.

    LayerNorm is one operation: 2 passes, 5 in backward. RMSNorm is several. Forward: x^2 2, mean 1, times the weight 2,
    times the deviation 2. Backward: both products 5, their sums 8, the mean 1, x^2 5, and their sum 3.

    A residual sum takes 3 in both directions. A tensor that several products take needs a sum of its gradients, at 3
    each: query, key and value 6, gate and up 3. Dropout takes 2 and a quarter of the mask in both directions.

    Rotation of q and of k, forward: q cos 2, half negated 1, joined 2, times sin 2, sum 3. Backward: two products 4,
    split 4, negated 1, sum 3. The gradients from attention are copied to a new layout, 2.

    The measured time of the activation includes its own passes. A gate adds a product: 3, in backward 6.
    """
    norm = (2, 5) if model.bias else (7, 22)
    dropped = 2.5 if model.dropout else 0
    sums = 6 + (3 if model.gated_mlp else 0)
    rotated = (0, 2) if model.positions else (10, 14)
    gate = (3, 6) if model.gated_mlp else (0, 0)
    return (
        Passes(2 * (norm[0] + 3 + dropped), gate[0], rotated[0]),
        Passes(2 * (norm[1] + 3 + dropped) + sums, gate[1], rotated[1]),
    )


def update_bytes(job: Job) -> float:
    """Return the bytes per parameter that the optimizer reads and writes.

    A kernel reads gradient, weight and states once and writes the last two, and clipping reads the gradient. Operations
    go over each state several times (AdamW: decay 2, first moment 3, second 2 and 3, its root 2 and 2, epsilon 2,
    update 4).
    """
    if job.eager:
        return GRADIENT_BYTES * (4 + 8 * OPTIMIZERS[job.optimizer])
    return 2 * GRADIENT_BYTES + 2 * job.optimizer_bytes + job.element_bytes
