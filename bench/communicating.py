"""weft bench communicating: what the communicating kernels cost and save, as far as one GPU can tell.

    flags          a product whose rows have all arrived, beside the same kernel without flags and torch.matmul
    departures     a product whose rows go to the ranks' windows, all of them on this GPU, beside the same
    beside_a_copy  a product beside k blocks that copy, for k from 0 to 32
    host_memory    a product that overlaps with a copy from pinned host memory, which stands for the peer
    host_time      the host's time for a call, beside torch's async tensor parallelism

The sum of W buffers in the order of ranks is measured by `bucket` and, in `make gpu`, by `rank_order_sum`.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator

from weft.bench import beside_a_copy, device_time, flag_tax, from_host_memory, host_time
from weft.bench.device_time import LIMIT, Ceilings, ceilings
from weft.bench.line import Line, cells, columns
from weft.bench.measure import ROUNDS

__all__ = ["LIMIT", "PARTS", "add_arguments", "cells", "columns", "rows", "run", "tax_lines"]

PARTS: dict[str, Callable[[Ceilings, int], Iterable[Line]]] = {
    "flags": lambda limits, rounds: flag_tax.lines(flag_tax.COLUMN, limits, rounds),
    "departures": lambda limits, rounds: flag_tax.lines(flag_tax.ROW, limits, rounds),
    "beside_a_copy": lambda limits, rounds: beside_a_copy.lines(rounds),
    "host_memory": lambda limits, rounds: [from_host_memory.line(limits, rounds)],
    "host_time": lambda limits, rounds: host_time.lines(rounds),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", action="append", choices=PARTS, help="all by default")


def run(options) -> list[Line]:
    limits = ceilings()
    return _lines(options.part or PARTS, limits, options.rounds)


def rows(limits: Ceilings) -> list[Line]:
    return _lines(PARTS, limits, rounds=ROUNDS)


def _lines(parts: Iterable[str], limits: Ceilings, rounds: int) -> list[Line]:
    found = [line for part in parts for line in PARTS[part](limits, rounds)]
    return [*found, *tax_lines(found)]


def tax_lines(lines: list[Line]) -> Iterator[Line]:
    """The geometric means of what flags cost and of the ratio to the library, for each kernel that pays it."""
    for op in dict.fromkeys(line.op for line in lines):
        taxed = [line for line in lines if line.op == op and line.tax is not None and line.ratio is not None]
        if taxed:
            tax = device_time.geometric_mean(line.tax for line in taxed if line.tax)
            ratio = device_time.geometric_mean(line.ratio for line in taxed if line.ratio)
            remark = f"{ratio:.2f}x {taxed[0].best_peer}; both are geometric means"
            yield Line(op, f"all {len(taxed)} shapes", tax=tax, remark=remark)
