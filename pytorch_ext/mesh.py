"""init_mesh: the device mesh of a run, and the groups of ranks along it."""

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from weft.arguments import check_choice
from weft.comm.communicator import Communicator
from weft.comm.registry import communicator
from weft.metadata import metadata, set_metadata

DIMENSIONS = ("pp", "dp", "cp", "tp")


def init_mesh(
    *, pp: int = 1, dp: int = 1, cp: int = 1, tp: int = 1, ep: int = 1, device_type: str | None = None
) -> DeviceMesh:
    """Return a mesh with the dimensions pp (pipeline), dp (data), cp (context) and tp (tensor); tp changes fastest.

    With ep, the ranks of dp also hold experts. Every `ep` consecutive ones hold the experts of a mixture together, one
    part each, and tokens travel between them. If ep does not divide dp, it must be cp times a divisor of dp, and all
    ranks of cp hold experts too. All other parameters see these ranks as ranks of dp and cp. The mesh has no further
    dimension; `expert_mesh` returns the ranks in this order.

    The call starts the process group if none is up: from torchrun's environment, or with one rank if there is no such
    environment. The backend is "weft" on CPU and "cpu:weft,cuda:nccl" on CUDA.

    Args:
        pp, dp, cp, tp: ranks along each dimension; their product must be the number of ranks.
        ep: ranks among which experts are split: a divisor of dp, or cp times one.
        device_type: "cpu" or "cuda"; None is "cuda" if torch has it, else "cpu".

    Returns:
        The DeviceMesh. Layers take mesh["tp"] as their group.

    Raises:
        ValueError: a size is no whole number or below 1; the device type is none of these or is not here; the product
            is not the number of ranks, or ep does not fit dp and cp.

    Examples:
        >>> mesh = weft.init_mesh(tp=2)
        >>> mesh["tp"].size()
        2
    """
    sizes = {"pp": pp, "dp": dp, "cp": cp, "tp": tp}
    for name, size in {**sizes, "ep": ep}.items():
        if type(size) is not int:
            raise ValueError(f"init_mesh: {name}={size!r} must be a whole number")
        if size < 1:
            raise ValueError(f"init_mesh: {name}={size} must be at least 1; 1 leaves the dimension out")
    on_gpu = torch.cuda.is_available()
    device_type = device_type or ("cuda" if on_gpu else "cpu")
    check_choice("init_mesh: device_type", device_type, ("cpu", "cuda"))
    if device_type == "cuda" and not on_gpu:
        raise ValueError('init_mesh: device_type="cuda", and torch sees no GPU here: use device_type="cpu"')
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))
    product = pp * dp * cp * tp
    if product != world:
        text = " x ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(
            f"init_mesh: {text} makes {product} ranks, and this run has {world}. "
            f"Start {product} ranks (torchrun --nproc-per-node {product} ...) or change the sizes."
        )
    # Ranks of dp alone, or ranks of cp and of as many of dp as it takes.
    over_dp, over_cp = (ep, 1) if dp % ep == 0 else (max(1, ep // cp), cp)
    if over_dp * over_cp != ep or dp % over_dp:
        raise ValueError(
            f"init_mesh: ep={ep} must divide dp={dp}, or be cp={cp} times a divisor of it, because the ranks of dp, "
            "and with them those of cp, hold the experts together"
        )
    if not dist.is_initialized():
        _start(device_type)
    mesh = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    if ep > 1:
        shape = {"pp": pp, "edp": dp // over_dp, "ep": ep, "cp": cp // over_cp, "tp": tp}
        ranks = init_device_mesh(device_type, tuple(shape.values()), mesh_dim_names=tuple(shape))
        together = ranks["ep"]
        if tp > 1:
            rows = ranks.mesh.permute(0, 1, 3, 2, 4).reshape(-1, ep * tp).tolist()
            together, _ = dist.new_subgroups_by_enumeration(rows)
        set_metadata(mesh, "experts", (ranks, together))
    return mesh


def expert_mesh(mesh: DeviceMesh) -> DeviceMesh | None:
    """Return the ranks of a mesh of init_mesh as ("pp", "edp", "ep", "cp", "tp"); None if its ep is 1.

    Ranks along "ep" have different experts; ranks along "edp" have the same ones and are replicas of each other.
    """
    known = metadata(mesh._get_root_mesh(), "experts")
    return None if known is None else known[0]


def ranks_of_experts(mesh: DeviceMesh):
    """Return the group of "ep" and "tp" together, ep changing slowest, for a mesh with ep."""
    return metadata(mesh._get_root_mesh(), "experts")[1]


@dataclass(frozen=True)
class MeshRanks:
    """Groups of ranks by kind of parallelism. `stages` and `replicas` are None for a single rank."""

    tp: Communicator | None
    cp: Communicator | None
    stages: DeviceMesh | None
    replicas: DeviceMesh | None
    experts: dict[str, Any] | None = None  # options of ParallelExperts, where ranks of dp hold experts

    @property
    def sizes(self) -> dict[str, int]:
        """Number of ranks by mesh dimension."""
        split = {name: comm.world_size for name, comm in (("cp", self.cp), ("tp", self.tp)) if comm is not None}
        outer = {name: mesh.size() for name, mesh in (("pp", self.stages), ("dp", self.replicas)) if mesh is not None}
        return {**outer, **split}


def ranks_along(mesh, in_units: bool) -> MeshRanks:
    """Return the groups of a mesh, or of a group that splits the layers.

    Args:
        in_units: the batch is in units, on one rank of "dp" too.

    Raises:
        ValueError: the mesh has other dimensions than those of init_mesh.
    """
    names = (mesh.mesh_dim_names or ()) if isinstance(mesh, DeviceMesh) else ()
    if not isinstance(mesh, DeviceMesh) or (mesh.ndim == 1 and not set(names) & set(DIMENSIONS)):
        return MeshRanks(communicator(mesh), None, None, None)
    if not names or not set(names) <= set(DIMENSIONS):
        raise ValueError(
            f"parallelize: the mesh has the dimensions {names or 'without names'}; it takes those of weft.init_mesh, "
            f"{', '.join(DIMENSIONS)}, or one dimension alone"
        )
    along = {name: mesh if mesh.ndim == 1 else mesh[name] for name in names}
    tp, cp = (communicator(along[name]) if name in along else None for name in ("tp", "cp"))
    stages = along["pp"] if "pp" in along and along["pp"].size() > 1 else None
    replicas = along["dp"] if "dp" in along and (along["dp"].size() > 1 or in_units) else None
    apart = expert_mesh(mesh)
    experts: dict[str, Any] | None = None
    if apart is not None:
        experts = {"ep_group": apart["ep"], "replica_group": apart["edp"]}
        if tp is not None and tp.world_size > 1:
            experts["all_group"] = ranks_of_experts(mesh)
    return MeshRanks(tp, cp, stages, replicas, experts)


def _start(device_type: str) -> None:
    # The hosts' own group carries sizes, seeds and errors; over NCCL each exchange would wait for the GPU.
    backend = "weft" if device_type == "cpu" else "cpu:weft,cuda:nccl"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
