"""How often a layer's tensors are read or written between its products.

On a GPU norms, activations and rotations are fused kernels. On a CPU they run as PyTorch writes them out: each
operation reads what it takes and writes what it gives (the counts below; a vector that is broadcast is not counted).
"""

from dataclasses import dataclass

from weft.planner.job import GRADIENT_BYTES, OPTIMIZERS, Job
from weft.planner.model import Model


@dataclass(frozen=True)
class Passes:
    """Of one direction: over tensors as wide as the model, as the MLP, and as queries and keys."""

    outer: float
    inner: float
    rotated: float


def passes_of(job: Job) -> tuple[Passes, Passes]:
    """Forward's and backward's."""
    return _operations(job.model) if job.eager else _kernels(job.model)


def _kernels(model: Model) -> tuple[Passes, Passes]:
    """Two norms (read, write; backward reads x and dy, writes dx) and two residual sums (read two, write one)."""
    masks = 0.5 if model.dropout else 0
    rotated = 0 if model.positions else 2
    forward = Passes(2 * (2 + 3 + masks), 3 if model.gated_mlp else 2, rotated)
    return forward, Passes(2 * (3 + 2 + 3 * masks), 5 if model.gated_mlp else 3, rotated)


def _operations(model: Model) -> tuple[Passes, Passes]:
    """LayerNorm is one operation (2 passes; 5 in backward). RMSNorm is not: x^2 2, mean 1, by the weight 2, by the
    deviation 2; in backward of both products 5, their sums' 8, of the mean 1, of x^2 5, and their sum 3. Residual sums
    are 3 in both directions; so is the sum of the gradients of what several products take: query, key and value 6, gate
    and up 3. Dropout: 2 and the mask's quarter, in both.

    Rotation, of q and of k: q cos 2, half negated 1, put together 2, by sin 2, sum 3; in backward two products 4, taken
    apart 4, negated 1, sum 3. What attention gives in backward is laid out anew, 2.

    The activation's own passes are in its measured time. With a gate, its product 3; of it 6.
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
    """Read and written by the optimizer, a parameter. A kernel reads gradient, weight and states once and writes the
    last two, and clipping reads the gradient; operations go over each state several times (AdamW: decay 2, first moment
    3, second 2 and 3, its root 2 and 2, epsilon 2, update 4)."""
    if job.eager:
        return GRADIENT_BYTES * (4 + 8 * OPTIMIZERS[job.optimizer])
    return 2 * GRADIENT_BYTES + 2 * job.optimizer_bytes + job.element_bytes
