"""The cost of flags to a product: kernels that never wait, against the kernel without flags and torch.matmul.

Rows that arrive: all flags are set before the call. Rows that depart: the other ranks' windows lie on this GPU, so that
links cost nothing. The remaining cost is that of flags, the order of tiles and addresses.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from weft.bench.device_time import Contest, measure
from weft.bench.table import Row
from weft.kernels import launch, signal
from weft.kernels.all_gather_matmul import all_gather_matmul
from weft.kernels.chunks import Rows
from weft.kernels.config import MatmulConfig
from weft.kernels.matmul import Arrivals, matmul, matmul_to_peers
from weft.kernels.matmul_reduce_scatter import Inbox
from weft.kernels.matmul_tiles import choose_tile, problem_of
from weft.sharding.sizes import split_sizes
from weft.testing import cases
from weft.testing.peers import virtual_peers
from weft.testing.tolerance import assert_close

MODELS, TENSOR_PARALLEL, TOKENS = ("llama-3-8b", "llama-3-70b"), (4, 8), (4096, 8192)
COLUMN, ROW = ("qkv", "rise"), ("attention out", "fall")  # by how the layer is split
WITHOUT, LIBRARY = "matmul without flags", "torch.matmul"

_RANK = 1  # its tiles begin in the middle
_CHECKED = slice(0, 64)  # rows compared with fp64


def lines(names: tuple[str, ...], rounds: int) -> Iterator[Row]:
    """Yield the rows of the named layers."""
    for contest in contests(names, torch.device("cuda"), torch.bfloat16):
        (row,) = measure([contest], rounds)
        yield replace(row, peer=LIBRARY, facts={**row.facts, "tax": tax_of(row)})


def tax_of(row: Row) -> float:
    """Return our time over that of the same work without flags.

    The times are those of replays of CUDA graphs, which exclude the host's time, if both calls could be captured.
    """
    paid, free = (row.facts["graph_us"][name] for name in ("ours", WITHOUT))
    return paid / free if paid and free else row.times["ours"].p50_us / row.times[WITHOUT].p50_us


def contests(names: tuple[str, ...], device: torch.device, dtype: torch.dtype) -> Iterator[Contest]:
    for model in MODELS:
        for tp in TENSOR_PARALLEL:
            for layer in cases.linear_layers(cases.MODELS[model], tp):
                for m in TOKENS:
                    if layer.name in names:
                        n = layer.n * (1 + layer.gated)  # both halves of a gated weight in one product
                        label = f"{model} tp={tp} {layer.name} {m}x{n}x{layer.k}"
                        contest = arriving if layer.name in COLUMN else departing
                        yield contest(label, m, n, layer.k, tp, device, dtype)


def arriving(label: str, m: int, n: int, k: int, world: int, device: torch.device, dtype: torch.dtype) -> Contest:
    """Return the contest of x @ w.T, x [M, K] being the rows of `world` ranks, which have all arrived."""
    x, w = _operands(m, n, k, device, dtype)
    arrivals = arrived(x, world)
    config = unsplit(x, w.t())

    def ours():
        return all_gather_matmul(x, w.t(), arrivals, config=config)[0]

    def without():
        return matmul(x, w.t(), config=config)[0]

    def check():
        y = ours()
        _check_bits(y, without(), label)
        _check_values(y, x, w, label)

    return _contest("flags are waited for", label, ours, without, x, w, check)


def departing(label: str, m: int, n: int, k: int, world: int, device: torch.device, dtype: torch.dtype) -> Contest:
    """Return the contest of x @ w.T [M, N], with each row sent to the window of the rank that sums it."""
    x, w = _operands(m, n, k, device, dtype)
    sizes = split_sizes(m, world)
    rows = Rows.of((m, n), 0, sizes)
    inbox = Inbox(rows, n, dtype)
    peers = virtual_peers(world, inbox.window_bytes(sums=False), device)
    departures = inbox.departures(everywhere(peers[_RANK]), signal.signature(label))
    config = unsplit(x, w.t())

    def ours():
        matmul_to_peers(x, w.t(), departures, config=config)

    def without():
        return matmul(x, w.t(), config=config)[0]

    def check():
        for peer in peers:
            inbox.parts(peer).fill_(torch.nan)
            inbox.flags(peer).zero_()
        ours()
        y = torch.cat([inbox.parts(peer)[_RANK] for peer in peers])
        _check_bits(y, without(), label)
        _check_values(y, x, w, label)
        posted = sum(int((inbox.flags(peer) == departures.agreed).sum()) for peer in peers)
        if posted != len(rows.chunks):
            raise AssertionError(f"{label}: {posted} of {len(rows.chunks)} flags were posted")

    return _contest("rows depart", label, ours, without, x, w, check)


def arrived(x: torch.Tensor, world: int, processors: int | None = None) -> Arrivals:
    """Return arrivals of all rows of x with set flags, for a kernel on `processors` multiprocessors (default: all)."""
    rows = Rows.of(x.shape, 0, split_sizes(x.size(0), world))
    peers = virtual_peers(world, signal.DATA_OFFSET, x.device)[_RANK]
    flags = torch.ones(len(rows.chunks), dtype=torch.int32, device=x.device)
    return Arrivals(everywhere(peers, processors), rows, flags)


def everywhere(peers: signal.Peers, processors: int | None = None) -> signal.Peers:
    """Return a virtual peer that has the whole device, or `processors` multiprocessors, to itself."""
    return replace(peers, processors=processors or launch.multiprocessors(peers.memory.device))


def unsplit(a: torch.Tensor, b: torch.Tensor) -> MatmulConfig:
    """Return the configuration that the communicating kernel takes, without split K."""
    return replace(choose_tile(problem_of(a, b), a.device, communicates=True).config, split_k=1)


def _operands(m: int, n: int, k: int, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x [M, K] and w [N, K]."""
    return torch.randn(m, k, device=device).to(dtype), (torch.randn(n, k, device=device) / k**0.5).to(dtype)


def _contest(op, label, ours, without, x, w, check) -> Contest:
    (m, k), n = x.shape, w.size(0)
    peers = {WITHOUT: without, LIBRARY: lambda: x @ w.t()}
    moved = (m * k + n * k + m * n) * x.element_size()
    return Contest(op, label, ours, peers, check, 2.0 * m * n * k, moved)


def _check_bits(y: torch.Tensor, expected: torch.Tensor, label: str) -> None:
    if not torch.equal(y, expected):
        raise AssertionError(f"{label}: the bits are not those of matmul with the same configuration")


def _check_values(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor, label: str) -> None:
    some = x[_CHECKED]
    assert_close(y[_CHECKED], some @ w.t(), some.double() @ w.double().t(), label)
