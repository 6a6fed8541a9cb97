"""matmul_reduce_scatter: y_shard_m = reduce_scatter(a @ b).

This is the forward of a row-parallel layer with its output split along the sequence, and the dgrad of a column-parallel
layer with its input split so.

    a [M, K_r]    b [K_r, N]    partial sums a @ b [M, N], rounded to a's type    y_shard_m [M_r, N]

    1. The product (the kernel of matmul.py) writes each tile to the window of the rank that owns its rows, into this
       rank's part of the [W, M_r, N] there. Rows of other ranks come first, its own rows last. The program that
       completes a chunk of rows posts the chunk's flag at the owner.
    2. The owner waits for a chunk's W flags and sums the W parts in rank order, in fp32, rounded once.
    3. It sets its flags back to 0, and all ranks meet. Then the windows may be written again.

Bytes over the links: (M - M_r) N elements out, as many in; device memory (W + 1) M_r N elements more than the product.
Before its sum a rank runs only its own matmul, so no program waits for one that cannot run.

The partial sums have matmul's bits, and their sum follows the reduction contract. So the bits are those of matmul and
then reduce_scatter. Tests: tests/kernels/test_matmul_reduce_scatter.py.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch

from weft.kernels import launch, signal
from weft.kernels.chunks import Rows
from weft.kernels.config import MatmulConfig
from weft.kernels.language import cdiv, tl, triton
from weft.kernels.matmul import Departures, matmul_to_peers
from weft.kernels.matmul_tiles import listed

_ROWS, _COLUMNS = 8, 256  # size of a tile of the sum: one access of 16 bytes for each thread and rank


@dataclass(frozen=True)
class Inbox:
    """Layout of the ranks' partial sums in a window.

    The window of rank r has [W, rows of r, columns] from DATA_OFFSET on. For an all-reduce the sums follow, [rows of r,
    columns].
    """

    rows: Rows
    columns: int
    dtype: torch.dtype

    @property
    def _row_bytes(self) -> int:
        return self.columns * self.dtype.itemsize

    @property
    def aligned(self) -> bool:
        return self._row_bytes % 16 == 0

    @property
    def sums_offset(self) -> int:
        """Offset of the sums in a window, in bytes; the same on every rank."""
        parts = len(self.rows.sizes) * self.rows.largest * self._row_bytes
        return signal.DATA_OFFSET + -(-parts // 16) * 16

    def window_bytes(self, sums: bool) -> int:
        """Return the bytes that the window must have, with or without the sums."""
        return self.sums_offset + (self.rows.largest * self._row_bytes if sums else 0)

    def parts(self, peers: signal.Peers) -> torch.Tensor:
        """Return this rank's partial sums, [W, rows, columns]."""
        return self._view(peers, signal.DATA_OFFSET, peers.world * self.rows.of_rank(peers.rank)).view(
            peers.world, -1, self.columns
        )

    def sums(self, peers: signal.Peers) -> torch.Tensor:
        """Return this rank's sums, [rows, columns]."""
        return self._view(peers, self.sums_offset, self.rows.of_rank(peers.rank))

    def flags(self, peers: signal.Peers) -> torch.Tensor:
        """Return this rank's flags: [W, chunks] of partial sums, then [chunks] of sums."""
        count = (peers.world + 1) * len(self.rows.chunks)
        return peers.memory[signal.MEETING_BYTES :][: 4 * count].view(torch.int32)

    def departures(self, peers: signal.Peers, agreed: int) -> Departures:
        destinations, flags = _addresses(self, peers.rank, peers.at, peers.addresses.device)
        return Departures(peers, self.rows, destinations, self.aligned, flags, agreed)

    def check(self, op: str, peers: signal.Peers, sums: bool) -> None:
        needed, flags = self.window_bytes(sums), (peers.world + 1) * len(self.rows.chunks)
        if flags > signal.FLAGS:
            raise ValueError(f"{op}: {flags} flags are needed and a window has {signal.FLAGS}; make the chunks longer")
        if len(self.rows.sizes) != peers.world:
            raise ValueError(f"{op}: rows are shared by {len(self.rows.sizes)} ranks, the window by {peers.world}")
        if peers.memory.numel() < needed:
            raise ValueError(
                f"{op}: the window has {peers.memory.numel()} bytes, {needed} are needed; open a larger one"
            )

    def _view(self, peers: signal.Peers, offset: int, rows: int) -> torch.Tensor:
        return peers.memory[offset:][: rows * self._row_bytes].view(self.dtype).view(rows, self.columns)


def matmul_reduce_scatter(
    a: torch.Tensor,
    b: torch.Tensor,
    peers: signal.Peers,
    rows: Rows,
    *,
    precision: str = "ieee",
    config: MatmulConfig | None = None,
) -> torch.Tensor:
    """Return this rank's rows of the sum over ranks of a @ b.

    Args:
        a: [M, K_r]; K_r may differ between ranks.
        b: [K_r, N].
        peers: a window of at least `Inbox(rows, N, a.dtype).window_bytes(False)` bytes.
        rows: the split of the M rows over the ranks; the same on every rank.
        precision, config: as in `matmul`.

    Returns:
        [M_r, N] of a's type.

    Raises:
        ValueError, TypeError: the kernels do not take an argument. Raised before any launch.
    """
    op = "matmul_reduce_scatter"
    inbox = Inbox(rows, b.size(-1), a.dtype)
    check_rows(op, a, rows)
    inbox.check(op, peers, sums=False)
    agreed = signal.signature(op, inbox)
    matmul_to_peers(a, b, inbox.departures(peers, agreed), precision=precision, config=config)
    out = torch.empty(rows.of_rank(peers.rank), inbox.columns, dtype=a.dtype, device=a.device)
    sum_parts(inbox, peers, out, agreed, signal.MATMUL_REDUCE_SCATTER)
    inbox.flags(peers).zero_()
    signal.meet(peers, agreed, signal.MATMUL_REDUCE_SCATTER, signal.DONE)
    return out


def check_rows(op: str, a: torch.Tensor, rows: Rows) -> None:
    if a.dim() != 2 or a.size(0) != rows.total:
        raise ValueError(f"{op}: a is {tuple(a.shape)}; the ranks share {rows.total} rows: {rows.sizes}")


def sum_parts(
    inbox: Inbox, peers: signal.Peers, out: torch.Tensor, agreed: int, operation: int, notify: bool = False
) -> None:
    """Sum the parts into `out` as they come (step 2); with `notify`, post a flag at every rank for each chunk."""
    (own,) = peers.keep(inbox.rows.own_chunks(peers.rank, out.device))
    columns = own.size(0) * cdiv(inbox.columns, _COLUMNS)
    rows = cdiv(max(chunk.rows for chunk in inbox.rows.chunks), _ROWS)
    pieces = min(rows, cdiv(peers.processors, max(columns, 1)))  # of the rows of a chunk
    # One program a multiprocessor leaves room for other ranks' products while these programs wait.
    programs = min(columns * pieces, peers.processors)
    launch.launch(
        _sum_kernel,
        (programs,),
        inbox.parts(peers),
        inbox.flags(peers),
        own,
        out,
        peers.addresses if notify else None,
        peers.counters if notify else None,
        inbox.columns,
        out.numel(),
        own.size(0),
        pieces,
        len(inbox.rows.chunks),
        peers.world,
        programs,
        agreed,
        *peers.waits(),
        OPERATION=operation,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        warps=8,
    )


@lru_cache(maxsize=256)
def _addresses(inbox: Inbox, rank: int, at: tuple[int, ...], device: torch.device):
    """Return int64 [M] and [chunks]: addresses of this rank's partial sums of each row, and of each chunk's flag."""
    rows, row_bytes = inbox.rows, inbox._row_bytes
    destinations = torch.empty(rows.total, dtype=torch.int64)
    flags = torch.empty(len(rows.chunks), dtype=torch.int64)
    for number, chunk in enumerate(rows.chunks):
        first = rank * rows.of_rank(chunk.rank) + chunk.local_start
        start = at[chunk.rank] + signal.DATA_OFFSET + first * row_bytes
        destinations[chunk.start :][: chunk.rows] = start + row_bytes * torch.arange(chunk.rows)
        flags[number] = at[chunk.rank] + signal.MEETING_BYTES + 4 * (rank * len(rows.chunks) + number)
    return destinations.to(device), flags.to(device)


@triton.jit(do_not_specialize=["own_chunks", "pieces", "chunks", "world", "programs", "agreed", "timeout_us", "rank"])
def _sum_kernel(
    parts,  # [W, rows, columns]
    flags,  # [W, chunks] of the parts, [chunks] of the sums
    own,  # [own chunks, 3]: number among all, first row, rows
    out,  # [rows, columns]
    addresses,  # [W] or None: then no flags are posted
    counters,  # [chunks] or None
    columns,
    elements,  # of a part: rows times columns
    own_chunks,
    pieces,  # into which the rows of a chunk are cut
    chunks,
    world,
    programs,
    agreed,
    spoiled,
    record,
    timeout_us,
    rank,
    OPERATION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    blocks = tl.cdiv(columns, COLUMNS)
    units = blocks * pieces  # of a chunk
    for unit in range(tl.program_id(0), own_chunks * units, programs):
        entry = own + 3 * (unit // units)
        chunk = tl.load(entry)
        first = tl.load(entry + 1)
        count = tl.load(entry + 2)
        piece = (unit % units) // blocks
        length = tl.cdiv(count, pieces * ROWS) * ROWS
        c = (unit % blocks) * COLUMNS + tl.arange(0, COLUMNS)

        # 1. Wait for every rank's part of the chunk.
        for source in range(world):
            signal.wait(flags + source * chunks + chunk, agreed, spoiled, record, timeout_us, rank, source,
                        OPERATION, signal.PARTIAL)  # fmt: skip
        sound = signal.is_sound(spoiled)
        factor = signal.poison(spoiled)

        # 2. Sum the parts in rank order, in fp32, rounded once.
        for start in range(piece * length, tl.minimum(count, (piece + 1) * length), ROWS):
            r = start + tl.arange(0, ROWS)
            inside = (r < count)[:, None] & (c < columns)[None, :]
            places = (first + r).to(tl.int64)[:, None] * columns + c[None, :]
            part = parts + places
            total = tl.load(part, mask=inside, other=0.0).to(tl.float32)
            for _ in tl.range(1, world, loop_unroll_factor=4):
                part += elements
                total += tl.load(part, mask=inside, other=0.0).to(tl.float32)
            if addresses is not None:
                inside = inside & (r < tl.where(sound, count, 0))[:, None]  # other ranks read these rows
            tl.store(out + places, launch.rounded(total * factor, out.dtype.element_ty), mask=inside)

        # 3. The program that completes the chunk posts its flag at every rank, this one too.
        if addresses is not None:
            if signal.last(counters + chunk, units) & sound:
                for peer in range(world):
                    ready = signal.flag_at(addresses, peer, world * chunks + chunk)
                    signal.post(ready, agreed)


def variants(architecture: str) -> None:
    """Call the launcher once for each variant to check, on meta tensors; use inside `launch.recording`."""
    peers, m, n, k = signal.unlaunched(), 4096, 2048, 1024
    rows = Rows.of((m, n), 0, (m // peers.world,) * peers.world)
    for dtype in (torch.bfloat16, torch.float16):
        x, w = (torch.empty(size, k, dtype=dtype, device="meta") for size in (m, n))
        for tile in listed(architecture, dtype):
            matmul_reduce_scatter(x, w.t(), peers, rows, config=tile)
            matmul_reduce_scatter(x, w.view(k, n), peers, rows, config=tile)
        odd_x, odd_w = (torch.empty(size, k + 1, dtype=dtype, device="meta") for size in (m, n))
        matmul_reduce_scatter(odd_x, odd_w.t(), peers, rows)
        matmul_reduce_scatter(odd_x, odd_w.new_empty(k + 1, n), peers, rows)
