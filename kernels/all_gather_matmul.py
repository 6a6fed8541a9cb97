"""all_gather_matmul: y = act(all_gather(x_shard_m) @ w.T + b), the forward of a column-parallel layer whose input is
split along the sequence; and dx = all_gather(dz_shard_m) @ w, the dgrad of a row-parallel one.

    x_shard_m [M_r, K]    x [M, K], filled while the product runs    w [N, K]    y [M, N]

    1. Each rank puts its rows into its window, and all meet.
    2. Copies (the copy engine's, on a stream of their own) fetch the other ranks' rows, from rank r + 1 on, in chunks;
       behind each chunk they set its flag, in this rank's own memory.
    3. The product (the kernel of matmul.py) begins with the rows that were here before; each tile waits for the flags
       of its rows. Tiles are taken in the order in which chunks come.
    4. Behind the copies, all meet again: nobody reads windows any more.

Bytes over the links: (M - M_r) K elements in, as many out; device memory and operations are those of the product. The
kernel fills the device, so nothing that it waits for may need a multiprocessor: copies and their flags do not.

Each element of y is the same sum in the same order whatever its tile's turn: the bits are those of all_gather and then
matmul with the same tile configuration. Held by tests/kernels/test_all_gather_matmul.py.
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
    """Steps 3: act(x @ b + bias) of an x that is being filled.

    Args:
        x: [M, K], whose chunks are valid once their flags are set.
        b: [K, N]; bias: [N]. Others as in `matmul`.
        arrivals: the rows' chunks and flags.

    Returns:
        (y [M, N], z [M, N] where kept).

    Raises:
        ValueError, TypeError: what the kernel does not take, before anything is launched.
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
    """Calls the launcher once for each variant to check, on meta tensors; for inside `launch.recording`."""
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
