"""weft bench communicating: costs and savings of the communicating kernels, as far as one GPU can show.

    flags          a product after all its rows have arrived, against the same kernel without flags and torch.matmul
    departures     a product that sends its rows to the ranks' windows, all on this GPU, against the same two
    beside_a_copy  a product beside k blocks that copy, for k from 0 to 32
    host_memory    a product that overlaps with a copy from pinned host memory, which stands for the peer
    host_time      the host's time for a call, against torch's async tensor parallelism

`bucket`, and in `make gpu` also `rank_order_sum`, measures the sum of W buffers in the order of ranks.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from weft.bench import copy_interference, device_time, flag_tax, from_host_memory, host_time
from weft.bench.device_time import LIMIT
from weft.bench.table import Row

__all__ = ["LIMIT", "PARTS", "add_arguments", "run", "tax_rows"]

PARTS: dict[str, Callable[[int], Iterable[Row]]] = {
    "flags": partial(flag_tax.lines, flag_tax.COLUMN),
    "departures": partial(flag_tax.lines, flag_tax.ROW),
    "beside_a_copy": copy_interference.lines,
    "host_memory": from_host_memory.lines,
    "host_time": host_time.lines,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", action="append", choices=PARTS, help="all by default")


def run(options) -> list[Row]:
    device_time.ceilings()  # ends the bench at once where there is no device
    found = [row for part in options.part or PARTS for row in PARTS[part](options.rounds)]
    return [*found, *tax_rows(found)]


def tax_rows(rows: list[Row]) -> Iterator[Row]:
    """Return a row for each kernel with a tax: the geometric means of the tax and of the ratio to the library."""
    for op in dict.fromkeys(row.of["op"] for row in rows):
        taxed = [row for row in rows if row.of["op"] == op and row.facts.get("tax") and row.ratio]
        if taxed:
            tax = device_time.geometric_mean(row.facts["tax"] for row in taxed)
            ratio = device_time.geometric_mean(row.ratio for row in taxed if row.ratio)
            remark = f"{ratio:.2f}x {taxed[0].peer}; both are geometric means"
            yield Row({"op": op, "shape": f"all {len(taxed)} shapes"}, facts={"tax": tax}, remark=remark)
