"""all_reduce: y = all_reduce(a @ b), the forward of a row-parallel layer and the dgrad of a column-parallel one.

    a [M, K_r]    b [K_r, N]    partial sums a @ b [M, N], rounded to a's type    y [M, N], the same on every rank

    1, 2. As in matmul_reduce_scatter.py: each rank owns M / W of the rows and sums them, here into its own window; then
          it posts the chunk's second flag at every rank.
    3. Each rank waits for a chunk's second flag and copies the rows from their owner's window to y.
    4. Each rank sets its flags back to 0, and all ranks meet.

Bytes over the links: 2 (M - M_r) N elements out, as many in. This is the minimum of an all-reduce (two-shot).

The bits are those of matmul and then all_reduce. Tests: tests/kernels/test_all_reduce.py.
"""

import torch

from weft.kernels import launch, signal
from weft.kernels.chunks import Rows
from weft.kernels.config import MatmulConfig
from weft.kernels.language import cdiv, tl, triton
from weft.kernels.matmul import matmul_to_peers
from weft.kernels.matmul_reduce_scatter import Inbox, check_rows, sum_parts

_ROWS, _COLUMNS = 16, 256  # size of a copied tile


def matmul_all_reduce(
    a: torch.Tensor,
    b: torch.Tensor,
    peers: signal.Peers,
    rows: Rows,
    *,
    precision: str = "ieee",
    config: MatmulConfig | None = None,
) -> torch.Tensor:
    """Return the sum over ranks of a @ b.

    Args:
        a: [M, K_r]; K_r may differ between ranks.
        b: [K_r, N].
        peers: a window of at least `Inbox(rows, N, a.dtype).window_bytes(True)` bytes.
        rows: the rank that sums each of the M rows; the same on every rank.
        precision, config: as in `matmul`.

    Returns:
        [M, N] of a's type, the same bits on every rank.

    Raises:
        ValueError, TypeError: the kernels do not take an argument. Raised before any launch.
    """
    op = "matmul_all_reduce"
    inbox = Inbox(rows, b.size(-1), a.dtype)
    check_rows(op, a, rows)
    inbox.check(op, peers, sums=True)
    agreed = signal.signature(op, inbox)
    matmul_to_peers(a, b, inbox.departures(peers, agreed), precision=precision, config=config)
    sum_parts(inbox, peers, inbox.sums(peers), agreed, signal.MATMUL_ALL_REDUCE, notify=True)
    out = torch.empty(a.size(0), inbox.columns, dtype=a.dtype, device=a.device)
    _fetch(inbox, peers, out, agreed)
    inbox.flags(peers).zero_()
    signal.meet(peers, agreed, signal.MATMUL_ALL_REDUCE, signal.DONE)
    return out


def _fetch(inbox: Inbox, peers: signal.Peers, out: torch.Tensor, agreed: int) -> None:
    """Copy the sums from the owners' windows to `out` (step 3)."""
    (table,) = peers.keep(inbox.rows.table(out.device))
    units = table.size(0) * cdiv(inbox.columns, _COLUMNS)
    programs = min(units, peers.processors)
    launch.launch(
        _fetch_kernel,
        (programs,),
        peers.addresses,
        inbox.flags(peers)[peers.world * table.size(0) :],
        table,
        out.view({2: torch.int16, 4: torch.int32}[out.element_size()]),
        inbox.sums_offset,
        inbox.columns,
        table.size(0),
        peers.rank * table.size(0) // peers.world,
        programs,
        agreed,
        *peers.waits(),
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        ALIGNED=inbox.aligned,
    )


@triton.jit(do_not_specialize=["flags", "sums_offset", "chunks", "begin", "programs", "agreed", "timeout_us", "rank"])
def _fetch_kernel(
    addresses,  # [W]
    flags,  # [chunks]
    table,  # [chunks, 4]: owner, its first row, rows, first row of all
    out,  # [M, columns], as integers of the same size
    sums_offset,
    columns,
    chunks,
    begin,  # the first chunk to fetch: ranks differ in it, so that they do not all read from one owner
    programs,
    agreed,
    spoiled,
    record,
    timeout_us,
    rank,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    blocks = tl.cdiv(columns, COLUMNS)
    for unit in range(tl.program_id(0), chunks * blocks, programs):
        chunk = (begin + unit // blocks) % chunks
        owner = tl.load(table + 4 * chunk)
        first = tl.load(table + 4 * chunk + 1)
        count = tl.load(table + 4 * chunk + 2)
        target = tl.load(table + 4 * chunk + 3)
        c = (unit % blocks) * COLUMNS + tl.arange(0, COLUMNS)

        # 1. Wait until the owner has summed the chunk.
        signal.wait(flags + chunk, agreed, spoiled, record, timeout_us, rank, owner,
                    signal.MATMUL_ALL_REDUCE, signal.SUMMED)  # fmt: skip
        sound = signal.is_sound(spoiled)

        # 2. Copy its rows.
        source = signal.at(addresses, owner, sums_offset)
        if ALIGNED:
            source = tl.multiple_of(source, 16)
        sums = source.to(tl.pointer_type(out.dtype.element_ty))
        for start in range(0, count, ROWS):
            r = (start + tl.arange(0, ROWS)).to(tl.int64)[:, None]
            inside = (r < count) & (c < columns)[None, :]
            row = tl.load(sums + (first + r) * columns + c[None, :], mask=inside, other=0)
            row = tl.where(sound, row, -1)  # all bits one: NaN
            tl.store(out + (target + r) * columns + c[None, :], row, mask=inside)


def variants(architecture: str) -> None:
    """Call the launcher once for each variant to check, on meta tensors; use inside `launch.recording`.

    The product has the variants of matmul_reduce_scatter.
    """
    peers, m, n = signal.unlaunched(), 4096, 2048
    rows = Rows.of((m, n), 0, (m // peers.world,) * peers.world)
    for dtype in (torch.bfloat16, torch.float16):
        for columns in (n, n - 1):
            inbox = Inbox(rows, columns, dtype)
            sum_parts(inbox, peers, inbox.sums(peers), 1, signal.MATMUL_ALL_REDUCE, notify=True)
            _fetch(inbox, peers, torch.empty(m, columns, dtype=dtype, device="meta"), 1)
