"""all_gather_matmul: y = act(all_gather(x_shard_m) @ w.T + b) and dx = all_gather(dz_shard_m) @ w.

The first is the forward of a column-parallel layer with its input split along the sequence, the second the dgrad of a
row-parallel layer with its output split so.

    x_shard_m [M_r, K]    x [M, K], filled while the product runs    w [N, K]    y [M, N]

    1. Each rank copies its rows into its window, and all ranks meet.
    2. The copy engine, on a stream of its own, fetches the other ranks' rows in chunks, from rank r + 1 on. After each
       chunk it sets the chunk's flag, in this rank's own memory.
    3. The product (the kernel of matmul.py) starts with this rank's own rows. Each tile waits for the flags of its
       rows, and tiles run in the order in which chunks come.
    4. After the copies all ranks meet again: no rank reads windows any more.

Bytes over the links: (M - M_r) K elements in, as many out; device memory and operations are those of the product. The
kernel fills the device, so it may only wait for work that needs no multiprocessor, like the copies and their flags.

Each element of y is the same sum in the same order, regardless of its tile's turn. So the bits are those of all_gather
and then matmul with the same tile configuration. Tests: tests/kernels/test_all_gather_matmul.py.
"""

import torch

from weft.kernels import launch, signal
from weft.kernels.activation import ACTIVATIONS
from weft.kernels.chunks import Rows
from weft.kernels.config import MatmulConfig
from weft.kernels.matmul import Arrivals, matmul
from weft.kernels.matmul_tiles import listed


def all_gather_matmul(
    x: torch.Tensor,
    b: torch.Tensor,
    arrivals: Arrivals,
    *,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    keep_z: bool = False,
    precision: str = "ieee",
    config: MatmulConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute act(x @ b + bias) while x is being filled (step 3).

    Args:
        x: [M, K]; a chunk of its rows is valid once its flag is set.
        b: [K, N].
        arrivals: the rows' chunks and flags.
        bias: [N].
        activation, keep_z, precision, config: as in `matmul`.

    Returns:
        y [M, N], and z [M, N] or None.

    Raises:
        ValueError, TypeError: the kernel does not take an argument. Raised before any launch.
    """
    rows, flags = arrivals.rows, arrivals.flags
    if x.size(0) != rows.total:
        raise ValueError(f"all_gather_matmul: x has {x.size(0)} rows; the ranks have {rows.sizes}, {rows.total} in all")
    launch.check_memory("all_gather_matmul", x=x, flags=flags)
    launch.check_dtype("all_gather_matmul", (torch.int32,), flags=flags)
    launch.check_shape("all_gather_matmul", (len(rows.chunks),), flags=flags)
    return matmul(
        x,
        b,
        bias=bias,
        activation=activation,
        keep_z=keep_z,
        precision=precision,
        config=config,
        arrivals=arrivals,
    )


def variants(architecture: str) -> None:
    """Call the launcher once for each variant to check, on meta tensors; use inside `launch.recording`."""
    peers, m, n, k = signal.unlaunched(), 4096, 2048, 1024
    rows = Rows.of((m, k), 0, (m // peers.world,) * peers.world)
    arrivals = Arrivals(peers, rows, torch.empty(len(rows.chunks), dtype=torch.int32, device="meta"))
    for dtype in (torch.bfloat16, torch.float16):
        x, w, dz = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((m, k), (n, k), (m, n)))
        for tile in listed(architecture, dtype):
            all_gather_matmul(x, w.t(), arrivals, config=tile)
            all_gather_matmul(x, w.t(), arrivals, bias=w.new_empty(n), config=tile)
            all_gather_matmul(dz, w, arrivals, config=tile)
            if dtype == torch.bfloat16:
                bias = w.new_empty(n)
                all_gather_matmul(x, w.t(), arrivals, bias=bias, activation="gelu_tanh", keep_z=True, config=tile)
        for activation in ACTIVATIONS:
            all_gather_matmul(x, w.t(), arrivals, bias=w.new_empty(n), activation=activation, keep_z=True)
        odd_x, odd_w = (torch.empty(size, k + 1, dtype=dtype, device="meta") for size in (m, n))
        all_gather_matmul(odd_x, odd_w.t(), arrivals)
        all_gather_matmul(dz, odd_w, arrivals)
