"""A product and its communication: at the same time by a communicating kernel, or one after the other.

    all_gather_matmul      act(all_gather(x) @ b + bias)      kernels/all_gather_matmul.py
    matmul_reduce_scatter  reduce_scatter(a @ b)              kernels/matmul_reduce_scatter.py
    matmul_all_reduce      all_reduce(a @ b)                  kernels/all_reduce.py

Either way the sums are the same; with our matmul in both, and K not split in it, the bits too. So "auto" does not
overlap where our matmul would split K.
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

MODES = ("auto", "never", "always")

# What must travel before the two are done at the same time. Overlapping saves at most the time that the bytes take, and
# costs the meetings of the ranks, about 20 us of launches and flags: 8 MiB take as long at 450 GB/s, NVLink 4's rate in
# one direction (NVIDIA H100 datasheet). An estimate: no machine with several GPUs was measured.
CROSSOVER_BYTES = 8 << 20
_FIRST_WINDOW_BYTES = 1 << 20


class ParallelContext(NamedTuple):
    """Where a layer stands.

    Attributes:
        sequence_dim: of a sequence-parallel region; None outside of one.
        activation: what follows the layer.
        overlap: "auto", "never" or "always": whether its communication overlaps with its products.
        share: the features of the rank that has most of them: what all ranks decide by, each having its own number.
    """

    ranks: Communicator
    sequence_dim: int | None = None
    activation: Activation | None = None
    overlap: str = "auto"
    share: int | None = None


@dataclass(frozen=True)
class Overlap:
    """Whether they overlap, and why."""

    fused: bool
    reason: str

    def __str__(self) -> str:
        return f"{'overlapped' if self.fused else 'one after the other'}: {self.reason}"


def all_gather_matmul(
    place: ParallelContext, x: torch.Tensor, sizes, b: torch.Tensor, bias=None, activation: Activation | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y, z, whole): y = act(z), z = whole @ b + bias, whole = the ranks' x along the sequence.

    Args:
        x: [..., K], this rank's shard; sizes: every rank's along the sequence. b: [K, N]; bias: [N].
    """
    ranks, dim = place.ranks, _dim(place, x)
    rows = _rows(x, dim, sizes)
    if not _fuses(place, x, rows, b, "all_gather", activation):
        whole = ranks.all_gather(x, dim, sizes)
        return *matmul.product(whole, b, bias, activation), whole
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
    """Begin to gather x along the sequence, while `matmul_reduce_scatter` computes a product with b. Call the result to
    have the whole. Where that product does not overlap, nothing begins before the call."""
    ranks, dim = place.ranks, _dim(place, x)
    rows = _rows(x, dim, sizes)
    if not _fuses(place, x, rows, b, "reduce_scatter"):
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
    """Of the whole, all dimensions but the last flattened."""
    rows = sum(sizes)
    for at, size in enumerate(x.shape[:-1]):
        rows *= size if at != dim else 1
    return rows


def matmul_reduce_scatter(
    place: ParallelContext, a: torch.Tensor, b: torch.Tensor, sizes, activation: Activation | None = None, z=None
) -> torch.Tensor:
    """This rank's shard along the sequence of the sum over ranks of a @ b.

    Args:
        a: [..., K_r], whole along the sequence; b: [K_r, N]; sizes: of the shards.
        activation, z: on one rank alone, a is act'(z) a.
    """
    ranks, dim = place.ranks, _dim(place, a)
    if not _fuses(place, a, a.numel() // a.size(-1), b, "reduce_scatter"):
        return ranks.reduce_scatter(matmul.multiply(a, b, activation, z), dim, sizes)
    from weft.kernels.chunks import Rows
    from weft.kernels.matmul_reduce_scatter import Inbox, matmul_reduce_scatter
    from weft.ops.overlap.workspace import workspace

    rows = Rows.of(a.shape, dim, sizes, most=256)
    peers = workspace(ranks, "reduce", Inbox(rows, b.size(1), a.dtype).window_bytes(sums=False), a.device)
    shape = [*a.shape[:-1], b.size(1)]
    shape[dim] = sizes[ranks.rank]
    return matmul_reduce_scatter(as_matrix(a), b, peers, rows).view(shape)


def matmul_all_reduce(
    place: ParallelContext, a: torch.Tensor, b: torch.Tensor, activation: Activation | None = None, z=None
) -> torch.Tensor:
    """The sum over ranks of a @ b, a [..., K_r], b [K_r, N]; activation and z as in `matmul_reduce_scatter`."""
    ranks = place.ranks
    if not _fuses(place, a, a.numel() // a.size(-1), b, "all_reduce"):
        return ranks.all_reduce_(matmul.multiply(a, b, activation, z))
    from weft.kernels.all_reduce import matmul_all_reduce
    from weft.kernels.chunks import Rows
    from weft.kernels.matmul_reduce_scatter import Inbox
    from weft.ops.overlap.workspace import workspace

    matrix = as_matrix(a)
    each, more = divmod(matrix.size(0), ranks.world_size)  # some may have none, where split_sizes would refuse
    rows = Rows.of(matrix.shape, 0, [each + (rank < more) for rank in range(ranks.world_size)], most=256)
    peers = workspace(ranks, "reduce", Inbox(rows, b.size(1), a.dtype).window_bytes(sums=True), a.device)
    return matmul_all_reduce(matrix, b, peers, rows).view(*a.shape[:-1], b.size(1))


def decide(place: ParallelContext, m: int, b: torch.Tensor, how: str, activation: Activation | None = None) -> Overlap:
    """What a product of m rows with b [K, N] does. The same on every rank, without asking the others.

    Args:
        how: "all_gather" (its operand's rows travel, N is split), "reduce_scatter" or "all_reduce" (its result's, K is
            split).

    Raises:
        ValueError: overlap="always" where it cannot be.
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


def _fuses(place: ParallelContext, x, rows: int, b, how: str, activation=None) -> bool:
    if place.ranks.world_size == 1 or place.overlap == "never" or rows == 0:
        return False
    if place.overlap == "auto" and not kernel_choice.on_kernel(x.device):  # the usual case on a CPU, told quickly
        return False
    return decide(place, rows, b, how, activation).fused and _reach(place, x.device)


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
    """Whether the ranks reach each other's memory. Found out once, by all of them together."""
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
