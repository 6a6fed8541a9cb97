"""A figure of the communicating kernels, or why there is none, and how it is printed."""

from dataclasses import asdict, dataclass, field

from weft.bench.device_time import ContestRow
from weft.bench.measure import Quantiles


@dataclass(frozen=True)
class Line:
    """One row. Times in us.

    Attributes:
        ours: None where it was not measured; the remark says why.
        graph_us: as replays of a CUDA graph; None where that cannot be captured.
        best_peer: what `ratio` is to.
        tax: our time over that of the same work without what is paid for: without flags, without a copy beside it.
        share_of_ceiling: of what the device reaches.
        remark: what else was measured, or why something was not.
    """

    op: str
    shape: str
    ours: Quantiles | None = None
    peers: dict[str, Quantiles] = field(default_factory=dict)
    graph_us: dict[str, float | None] = field(default_factory=dict)
    best_peer: str | None = None
    tax: float | None = None
    share_of_ceiling: float | None = None
    remark: str = ""

    @property
    def ratio(self) -> float | None:
        """The best peer's median over ours."""
        return self.peers[self.best_peer].p50_us / self.ours.p50_us if self.ours and self.best_peer else None

    def as_dict(self) -> dict:
        return {**asdict(self), "ratio": self.ratio}


def line_of(row: ContestRow, peer: str | None = None, untaxed: str | None = None, remark: str = "") -> Line:
    """A row of the other GPU benches as a line.

    Args:
        peer: the one to be compared with; the fastest by default.
        untaxed: the one that does the same work for nothing. The tax is of replays of CUDA graphs, which leave the
            host's time out, where both could be captured.
    """
    tax = None
    if untaxed:
        paid, free = row.graph_us["ours"], row.graph_us[untaxed]
        tax = paid / free if paid and free else row.ours.p50_us / row.peers[untaxed].p50_us
    return Line(
        row.op,
        row.shape,
        row.ours,
        row.peers,
        row.graph_us,
        peer or row.best_peer,
        tax,
        row.share_of_ceiling,
        remark,
    )


def not_measured(op: str, shape: str, reason: str) -> Line:
    return Line(op, shape, remark=f"not measured: {reason}")


def columns() -> list[str]:
    return ["op", "shape", "ours us", "p20-p80", "graph us", "peer", "its us", "ratio", "tax", "of ceiling", "remark"]


def cells(line: Line) -> list[str]:
    ours, graph = line.ours, line.graph_us.get("ours")
    return [
        line.op,
        line.shape,
        f"{ours.p50_us:.1f}" if ours else "-",
        f"{ours.p20_us:.1f}-{ours.p80_us:.1f}" if ours else "-",
        f"{graph:.1f}" if graph is not None else "-",
        line.best_peer or "-",
        f"{line.peers[line.best_peer].p50_us:.1f}" if line.best_peer else "-",
        f"{line.ratio:.2f}x" if line.ratio is not None else "-",
        f"{line.tax:.3f}" if line.tax is not None else "-",
        f"{line.share_of_ceiling:.0%}" if line.share_of_ceiling is not None else "-",
        line.remark,
    ]
