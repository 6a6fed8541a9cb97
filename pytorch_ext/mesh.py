"""init_mesh: the device mesh of a run."""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def init_mesh(*, pp: int = 1, dp: int = 1, cp: int = 1, tp: int = 1, device_type: str | None = None) -> DeviceMesh:
    """Return a mesh with the dimensions pp (pipeline), dp (data), cp (context) and tp (tensor); tp changes fastest.

    The call starts the process group if none is up: from torchrun's environment, or with one rank if there is no such
    environment. The backend is "weft" on CPU and "nccl" on CUDA.

    Args:
        pp, dp, cp, tp: ranks along each dimension; their product must be the number of ranks.
        device_type: "cpu" or "cuda"; None is "cuda" if torch has it, else "cpu".

    Returns:
        The DeviceMesh. Layers take mesh["tp"] as their group.

    Raises:
        ValueError: a size is below 1, or the product is not the number of ranks.

    Examples:
        >>> mesh = weft.init_mesh(tp=2)
        >>> mesh["tp"].size()
        2
    """
    sizes = {"pp": pp, "dp": dp, "cp": cp, "tp": tp}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"init_mesh: {name}={size} must be at least 1; 1 leaves the dimension out")
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))
    product = pp * dp * cp * tp
    if product != world:
        text = " x ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(
            f"init_mesh: {text} makes {product} ranks, and this run has {world}. "
            f"Start {product} ranks (torchrun --nproc-per-node {product} ...) or change the sizes."
        )
    if not dist.is_initialized():
        _start(device_type)
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def _start(device_type: str) -> None:
    backend = "weft" if device_type == "cpu" else "nccl"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
