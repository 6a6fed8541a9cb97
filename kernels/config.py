"""Choice of the tile configuration: the explicit one, else the tuned table's, else the heuristic's.

Tables are `configs/<architecture>/<op>.json`, and `weft tune` writes them. A table holds the fastest configurations
only, each with its time and the time of the library's op, and the device and versions of the measurement.
`weft.warm_up` adds what one rank measured on all ranks: ranks that tuned for themselves would run different kernels.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, Generic, Protocol, TypeVar

from weft.kernels.language import VERSION


@dataclass(frozen=True)
class MatmulConfig:
    """A tile of block_m x block_n outputs, block_k deep; tiles run in columns of group_m, with K in split_k pieces.

    group_m and split_k are arguments of the compiled kernel, so one variant serves all their values. If block_n is no
    power of two, the tile has two sums, since Triton's blocks are powers of two: see `rest_n`.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    group_m: int = 8
    split_k: int = 1

    @property
    def rest_n(self) -> int:
        """The columns beyond the largest power of two in block_n: 64 of 192."""
        return self.block_n - (1 << self.block_n.bit_length() - 1)

    def compiled(self) -> "MatmulConfig":
        return replace(self, group_m=8, split_k=1)


@dataclass(frozen=True)
class AttentionConfig:
    """block_m queries against block_n keys at a time.

    With `ahead`, forward issues the product with the next keys before the exponentials of these, so that both run at
    once. The bits are the same, and backward has no such kernels.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    ahead: bool = False

    def compiled(self) -> "AttentionConfig":
        return self


class Config(Protocol):
    """A tile configuration; compiled() returns its compile-time part, as in the list of existing configurations."""

    def compiled(self) -> Any: ...


C = TypeVar("C", bound=Config)


@dataclass(frozen=True)
class Entry(Generic[C]):
    """A row of a table: the problem, its fastest configuration, the configuration's median and the library's, in us."""

    problem: dict[str, Any]
    config: C
    ours_us: float
    peer_us: float


@dataclass(frozen=True)
class Choice(Generic[C]):
    """A configuration and its source: "explicit", "table" or "heuristic"."""

    config: C
    source: str
    entry: Entry[C] | None = None


def choose(
    op: str, architecture: str, problem: Mapping[str, Any], explicit: C | None, listed: Sequence[C], heuristic: C
) -> Choice[C]:
    """Return the configuration to run.

    Args:
        problem: sizes (integers, which a row of the table may miss by a factor of two) and kinds (anything
            else, which must be equal).
        explicit: the caller's configuration, or None.
        listed: the configurations that exist; `make gate` compiles them.
        heuristic: the configuration where the table has none.

    Raises:
        ValueError: the explicit configuration does not exist.
    """
    if explicit is not None:
        if explicit.compiled() not in listed:
            raise ValueError(
                f"{op}: {explicit} does not exist on {architecture}; there are {', '.join(map(str, listed))}"
            )
        return Choice(explicit, "explicit")
    entry = measured(op, architecture, problem, type(heuristic))
    return Choice(entry.config, "table", entry) if entry else Choice(heuristic, "heuristic")


def chosen(choice: Choice[C], listed: Sequence[C], heuristic: C) -> C:
    """Return the choice's configuration; the heuristic's where that of a table cannot run.

    It may have been measured for a plainer kernel, which has other tiles; and without Triton only the heuristic's is
    sure to be compiled.
    """
    runs = choice.source != "table" or (choice.config in listed and VERSION is not None)
    return choice.config if runs else heuristic


def measured(op: str, architecture: str, problem: Mapping[str, Any], config_type: type[C]) -> Entry[C] | None:
    """Return the measurement of the most similar problem, or None; see `nearest`."""
    return nearest((*_added.get((op, architecture), ()), *table(op, architecture, config_type)), problem)


# Measurements that this process was given, by op and architecture; they come before those of the table.
_added: dict[tuple[str, str], tuple[Entry, ...]] = {}


def add_entries(op: str, architecture: str, entries: Iterable[Entry]) -> None:
    """Let `choose` take these measurements too, before older ones of the same problem."""
    _added[op, architecture] = (*entries, *_added.get((op, architecture), ()))


def nearest(entries: Sequence[Entry[C]], problem: Mapping[str, Any]) -> Entry[C] | None:
    """Return the row with equal kinds and the nearest sizes in ratio, all within a factor of two, or None."""

    def distance(entry: Entry[C]) -> float:
        total = 0.0
        for name, value in problem.items():
            there = entry.problem.get(name)
            if not isinstance(value, int) or isinstance(value, bool):
                if there != value:
                    return math.inf
                continue
            if not there or not value:
                return math.inf
            ratio = abs(math.log2(value / there))
            if ratio > 1:
                return math.inf
            total += ratio
        return total

    best = min(entries, key=distance, default=None)
    return best if best is not None and distance(best) < math.inf else None


@lru_cache
def table(op: str, architecture: str, config_type: type[C]) -> tuple[Entry[C], ...]:
    """Return the rows of configs/<architecture>/<op>.json; none if the file does not exist."""
    file = resources.files("weft.kernels").joinpath("configs", architecture, f"{op}.json")
    return read_table(file, config_type) if file.is_file() else ()


def read_table(file: Traversable, config_type: type[C]) -> tuple[Entry[C], ...]:
    """Return the rows of a file that `table_text` made."""
    rows = json.loads(file.read_text())["rows"]
    return tuple(Entry(row["problem"], config_type(**row["config"]), row["ours_us"], row["peer_us"]) for row in rows)


def table_text(entries: Sequence[Entry], measured_on: Mapping[str, Any]) -> str:
    """Return the text of a table's file, as `table` reads it."""
    return json.dumps({"measured_on": dict(measured_on), "rows": [asdict(entry) for entry in entries]}, indent=1) + "\n"
