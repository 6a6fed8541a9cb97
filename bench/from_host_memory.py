"""A product that starts with the rows on the device while the copy engine brings the others from pinned host memory.

Host memory stands for the peer: one GPU has no other to copy from. The row shows whether copy and product run at the
same time. Both take equally long at its size, where overlapping saves most.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from weft import _C
from weft.bench.device_time import Contest, alternate, measure
from weft.bench.flag_tax import everywhere, unsplit
from weft.bench.table import Row, not_measured
from weft.kernels import signal
from weft.kernels.all_gather_matmul import all_gather_matmul
from weft.kernels.chunks import Rows
from weft.kernels.matmul import Arrivals, matmul
from weft.sharding.sizes import split_sizes
from weft.testing.peers import virtual_peers
from weft.testing.tolerance import assert_close

OP, SERIAL = "rows come from pinned host memory", "copy, then torch.matmul"
ROWS, DEPTH = 8192, 4096
_ROUNDS, _UNIT = 11, 256  # rounds of the search for a width; widths are multiples of the unit


def lines(rounds: int, m: int = ROWS, k: int = DEPTH) -> list[Row]:
    if _C.cuda is None:
        return [not_measured(OP, f"{m}xNx{k}", "this weft was built without CUDA")]
    x = torch.randn(m, k).bfloat16().pin_memory()
    n, copy_us, product_us = equally_long(x)
    case = Case.of(x, n)
    contest = Contest(
        OP,
        f"{m}x{n}x{k}, half of the rows",
        case.overlapped,
        {SERIAL: case.serial},
        case.check,
        2.0 * m * n * k,
        (m * k + n * k + m * n) * x.element_size(),
    )
    (row,) = measure([contest], rounds)
    return [replace(row, remark=f"copy {copy_us:.0f} us, torch.matmul {product_us:.0f} us")]


def equally_long(x: torch.Tensor) -> tuple[int, float, float]:
    """Return the n at which torch.matmul of x takes as long as the copy of half of x, and both times in us."""

    def measured(n: int) -> tuple[float, float]:
        case = Case.of(x, n)
        found = alternate({"copy": case.copy, "product": case.product}, _ROUNDS)
        return found["copy"].p50_us, found["product"].p50_us

    n = 4096
    copy_us, product_us = measured(n)
    for _ in range(2):  # the product's rate changes with its width
        n = max(_UNIT, round(n * copy_us / product_us / _UNIT) * _UNIT)
        copy_us, product_us = measured(n)
    return n, copy_us, product_us


@dataclass(frozen=True)
class Case:
    """x [M, K] times w.T with w [N, K], where the second half of x is in host memory.

    Attributes:
        overlapped: Our kernel, while the rows arrive.
        serial: `copy`, then `product`.
        copy: The copy of the second half.
        product: torch.matmul of the whole x.
        check: Raises AssertionError if the overlapped result is wrong.
    """

    overlapped: Callable[[], torch.Tensor]
    serial: Callable[[], torch.Tensor]
    copy: Callable[[], object]
    product: Callable[[], torch.Tensor]
    check: Callable[[], None]

    @classmethod
    def of(cls, x: torch.Tensor, n: int) -> "Case":
        """Return the case for a pinned x."""
        assert _C.cuda is not None
        copy_and_mark, device = _C.cuda.copy_and_mark, torch.device("cuda", torch.cuda.current_device())
        (m, k), world = x.shape, 2
        rows = Rows.of(x.shape, 0, split_sizes(m, world))
        peers = everywhere(virtual_peers(world, signal.DATA_OFFSET, device)[0])
        w = (torch.randn(n, k, device=device) / k**0.5).to(x.dtype)
        whole = x.to(device)
        there = torch.tensor([int(chunk.rank == 0) for chunk in rows.chunks], dtype=torch.int32, device=device)
        flags, stream, config = there.clone(), torch.cuda.Stream(), unsplit(whole, w.t())
        coming = [(number, chunk) for number, chunk in enumerate(rows.chunks) if chunk.rank == 1]
        row_bytes = k * x.element_size()
        plan = (
            [whole.data_ptr() + chunk.start * row_bytes for _, chunk in coming],
            [x.data_ptr() + chunk.start * row_bytes for _, chunk in coming],
            [chunk.rows * row_bytes for _, chunk in coming],
            [flags.data_ptr() + 4 * number for number, _ in coming],
        )
        arrivals = Arrivals(peers, rows, flags)
        half = rows.of_rank(0)

        def overlapped():
            flags.copy_(there)
            stream.wait_stream(torch.cuda.current_stream())
            copy_and_mark(*plan, stream.cuda_stream)
            y = all_gather_matmul(whole, w.t(), arrivals, config=config)[0]
            torch.cuda.current_stream().wait_stream(stream)
            return y

        def copy():
            whole[half:].copy_(x[half:], non_blocking=True)

        def product():
            return whole @ w.t()

        def serial():
            copy()
            return product()

        def check():
            whole[half:].fill_(torch.nan)
            y = overlapped()
            if not torch.equal(whole, x.to(device)):
                raise AssertionError("the rows that came are not those that were sent")
            if not torch.equal(y, matmul(whole, w.t(), config=config)[0]):
                raise AssertionError("the bits are not those of matmul after the copy")
            some = whole[half : half + 64]
            assert_close(y[half : half + 64], some @ w.t(), some.double() @ w.double().t(), "overlapped product")

        return cls(overlapped, serial, copy, product, check)
