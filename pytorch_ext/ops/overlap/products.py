"""A product with its communication: at the same time in a communicating kernel, or one after the other.

    all_gather_matmul      act(all_gather(x) @ b + bias)      kernels/all_gather_matmul.py
    matmul_reduce_scatter  reduce_scatter(a @ b)              kernels/matmul_reduce_scatter.py
    matmul_all_reduce      all_reduce(a @ b)                  kernels/all_reduce.py

Both ways compute the same sums. They give the same bits if weft's matmul runs in both and does not split K, so "auto"
does not overlap where the matmul would split K.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from weft import _C
from weft.comm.communicator import Communicator
from weft.ops import kernel_choice, matmul
from weft.ops.activation import Activation
from weft.ops.backward import as_matrix
from weft.ops.invariant import Units

MODES = ("auto", "never", "always")

# "auto" overlaps from this many travelling bytes on. Overlap saves at most the time of the transfer and costs the
# meetings of the ranks, about 20 us of launches and flags. 8 MiB take as long at 450 GB/s, NVLink 4's rate in one
# direction (NVIDIA H100 datasheet). This is an estimate: no machine with several GPUs was measured.
CROSSOVER_BYTES = 8 << 20
_FIRST_WINDOW_BYTES = 1 << 20


class ParallelContext(NamedTuple):
    """The ranks of a layer and its options for communication.

    Attributes:
        sequence_dim: dimension of the sequence in a sequence-parallel region; None outside of one.
        activation: the activation after the layer.
        overlap: whether communication overlaps with products: "auto", "never" or "always".
        share: the largest number of features on one rank. Ranks have different numbers of features, and all decide by
            this one.
        units: the units of the split features of a layer with the same bits on any number of ranks (ops/invariant.py).
    """

    ranks: Communicator
    sequence_dim: int | None = None
    activation: Activation | None = None
    overlap: str = "auto"
    share: int | None = None
    units: Units | None = None


@dataclass(frozen=True)
class Overlap:
    """Whether product and communication overlap, and the reason."""

    fused: bool
    reason: str

    def __str__(self) -> str:
        return f"{'overlapped' if self.fused else 'one after the other'}: {self.reason}"


def all_gather_matmul(
    place: ParallelContext, x: torch.Tensor, sizes, b: torch.Tensor, bias=None, activation: Activation | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (y, z, whole): y = act(z), z = whole @ b + bias, whole = the ranks' x joined along the sequence.

    Args:
        x: [..., K], this rank's shard.
        sizes: sizes of the ranks' shards along the sequence.
        b: [K, N].
        bias: [N].
    """
    ranks, dim = place.ranks, _dim(place, x)
    rows = _rows(x, dim, sizes)
    if not _fuses(place, rows, b, "all_gather", activation):
        whole = ranks.all_gather(x, dim, sizes)
        return *matmul.forward(whole, b.t(), bias, activation), whole
    from weft.kernels.all_gather_matmul import all_gather_matmul

    gathering = _start(place, x, sizes)
    y, z = all_gather_matmul(
        as_matrix(gathering.whole),
        b,
        gathering.arrivals,
        bias=bias,
        activation=activation.name if activation else None,
        keep_z=activation is not None,
    )
    whole = gathering.finish()
    y = y.view(*whole.shape[:-1], b.size(1))
    return y, (y if z is None else z.view(y.shape)), whole


def start_all_gather(place: ParallelContext, x: torch.Tensor, sizes, b: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Start to gather x along the sequence, while `matmul_reduce_scatter` computes a product with b.

    Where that product does not overlap, the gathering starts only with the call of the result.

    Returns:
        A function that waits for the whole and returns it.
    """
    ranks, dim = place.ranks, _dim(place, x)
    rows = _rows(x, dim, sizes)
    if not _fuses(place, rows, b, "reduce_scatter"):
        return lambda: ranks.all_gather(x, dim, sizes)
    return _start(place, x, sizes).finish


def _start(place: ParallelContext, x: torch.Tensor, sizes):
    from weft.ops.overlap.peer_copies import start_gathering, window_bytes
    from weft.ops.overlap.workspace import workspace

    dim = _dim(place, x)
    return start_gathering(workspace(place.ranks, "gather", window_bytes(x, dim, sizes), x.device), x, dim, sizes)


def _dim(place: ParallelContext, x: torch.Tensor) -> int:
    assert place.sequence_dim is not None
    return place.sequence_dim % x.dim()


def _rows(x: torch.Tensor, dim: int, sizes) -> int:
    """Return the number of rows of the whole, with all dimensions but the last flattened."""
    rows = sum(sizes)
    for at, size in enumerate(x.shape[:-1]):
        rows *= size if at != dim else 1
    return rows


def matmul_reduce_scatter(
    place: ParallelContext, a: torch.Tensor, b: torch.Tensor, sizes, addend: torch.Tensor | None = None
) -> torch.Tensor:
    """Return this rank's shard, along the sequence, of the sum over ranks of a @ b + addend.

    Args:
        a: [..., K_r], whole along the sequence.
        b: [K_r, N].
        sizes: sizes of the ranks' shards along the sequence.
        addend: [..., N], whole along the sequence.
    """
    ranks, dim = place.ranks, _dim(place, a)
    if addend is not None:
        return ranks.reduce_scatter(matmul.multiply(a, b).add_(addend), dim, sizes)
    if not _fuses(place, a.numel() // a.size(-1), b, "reduce_scatter"):
        return ranks.reduce_scatter(matmul.multiply(a, b), dim, sizes)
    from weft.kernels.chunks import Rows
    from weft.kernels.matmul_reduce_scatter import Inbox, matmul_reduce_scatter
    from weft.ops.overlap.workspace import workspace

    rows = Rows.of(a.shape, dim, sizes, most=256)
    peers = workspace(ranks, "reduce", Inbox(rows, b.size(1), a.dtype).window_bytes(sums=False), a.device)
    shape = [*a.shape[:-1], b.size(1)]
    shape[dim] = sizes[ranks.rank]
    return matmul_reduce_scatter(as_matrix(a), b, peers, rows).view(shape)


def matmul_all_reduce(
    place: ParallelContext, a: torch.Tensor, b: torch.Tensor, addend: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the sum over ranks of a @ b + addend.

    Args:
        a: [..., K_r].
        b: [K_r, N].
        addend: [..., N].
    """
    ranks = place.ranks
    if addend is not None:
        return ranks.all_reduce_(matmul.multiply(a, b).add_(addend))
    if not _fuses(place, a.numel() // a.size(-1), b, "all_reduce"):
        return ranks.all_reduce_(matmul.multiply(a, b))
    from weft.kernels.all_reduce import matmul_all_reduce
    from weft.kernels.chunks import Rows
    from weft.kernels.matmul_reduce_scatter import Inbox
    from weft.ops.overlap.workspace import workspace

    matrix = as_matrix(a)
    each, more = divmod(matrix.size(0), ranks.world_size)  # not split_sizes: some ranks may get no rows
    rows = Rows.of(matrix.shape, 0, [each + (rank < more) for rank in range(ranks.world_size)], most=256)
    peers = workspace(ranks, "reduce", Inbox(rows, b.size(1), a.dtype).window_bytes(sums=True), a.device)
    return matmul_all_reduce(matrix, b, peers, rows).view(*a.shape[:-1], b.size(1))


def decide(place: ParallelContext, m: int, b: torch.Tensor, how: str, activation: Activation | None = None) -> Overlap:
    """Decide whether a product of m rows with b [K, N] overlaps; alike on every rank, without communication.

    Args:
        how: "all_gather" (the operand's rows travel and N is split), or "reduce_scatter" or "all_reduce" (the result's
            rows travel and K is split).

    Raises:
        ValueError: overlap="always" where overlap is impossible.
    """
    cannot = _why_not(place.ranks, b.device, b.dtype) or place.ranks.unreached.get(b.device)
    if cannot:
        if place.overlap == "always" and place.ranks.world_size > 1:
            raise ValueError(f'overlap="always": {cannot}; use overlap="auto"')
        return Overlap(False, cannot)
    if place.overlap != "auto":
        return Overlap(place.overlap == "always", f'overlap="{place.overlap}"')
    from weft.kernels.matmul_tiles import Problem, choose_tile, is_turned

    k, n = b.shape
    if how == "all_gather":
        n = place.share or n
    else:
        k = place.share or k
    turned = is_turned(b)
    aligned = all(size * b.element_size() % 16 == 0 for size in (k, k if turned else n))
    name = activation.name if activation else "none"
    problem = Problem(m, n, k, "nt" if turned else "nn", aligned, b.dtype, name)
    algorithm = kernel_choice.algorithm(problem, b.device)
    if not algorithm.kernel:
        return Overlap(False, f"the product is not our kernel's ({algorithm})")
    pieces = choose_tile(problem, b.device).config.split_k
    if pieces > 1:
        return Overlap(False, f"the product splits K in {pieces}, which it could not do as it communicates")
    travelling = {"all_gather": m * k, "reduce_scatter": m * n, "all_reduce": 2 * m * n}[how] * b.element_size()
    size = f"{travelling / (1 << 20):.1f} MiB travel, the crossover is {CROSSOVER_BYTES >> 20} MiB (estimated)"
    if travelling >= CROSSOVER_BYTES and b.device not in place.ranks.unreached:
        size += "; if the ranks reach each other's memory, which the first such call finds out"
    return Overlap(travelling >= CROSSOVER_BYTES, size)


def _fuses(place: ParallelContext, rows: int, b: torch.Tensor, how: str, activation=None) -> bool:
    if place.ranks.world_size == 1 or place.overlap == "never" or rows == 0:
        return False
    if place.overlap == "auto" and not kernel_choice.on_kernel(b.device):  # a quick exit, the usual case on a CPU
        return False
    return decide(place, rows, b, how, activation).fused and _reach(place, b.device)


def _why_not(ranks: Communicator, device: torch.device, dtype: torch.dtype) -> str | None:
    if ranks.world_size == 1:
        return "there is one rank"
    if not kernel_choice.can_run(device):
        return kernel_choice.excluded(device).reason
    if device.type == "cuda" and _C.cuda is None:
        return "this weft was built without CUDA"
    from weft.kernels.matmul import COMMUNICATING_DTYPES

    return None if dtype in COMMUNICATING_DTYPES else f"the communicating kernels do not take {dtype}"


def _reach(place: ParallelContext, device: torch.device) -> bool:
    """Return True if the ranks reach each other's memory. The first call finds out, on all ranks together."""
    unreached = place.ranks.unreached
    if device not in unreached:
        from weft.ops.overlap.workspace import workspace

        try:
            workspace(place.ranks, "reduce", _FIRST_WINDOW_BYTES, device)
            unreached[device] = ""
        except (ValueError, OSError) as error:  # the same on every rank
            unreached[device] = str(error)
    if unreached[device] and place.overlap == "always":
        raise ValueError(f'overlap="always": {unreached[device]}; use overlap="auto"')
    return not unreached[device]
