"""An accelerate mesh as weft.parallelize takes it."""

from torch.distributed.device_mesh import DeviceMesh

from weft.adapters import need

_KNOWN = ("dp_replicate", "dp_shard", "cp", "tp")  # in accelerate's order; tp changes fastest


def mesh_of(
    parallelism, device_type: str | None = None, *, zero: int = 0, replicate_shards: bool = False
) -> DeviceMesh:
    """Return a mesh with weft's names over accelerate's own groups: "tp", "cp", and "dp" for data parallelism.

        weft.parallelize(model, mesh_of(accelerator.parallelism_config, zero=3), zero=3)

    Args:
        parallelism: an accelerate.ParallelismConfig, or the DeviceMesh that one made (accelerator.torch_device_mesh).
        device_type: "cpu" or "cuda", for a ParallelismConfig without a mesh yet. To make it is a collective call.
        zero: as for `weft.parallelize`. With 3, the ranks of dp_shard share the parameters, as with accelerate.
        replicate_shards: without zero=3, let the ranks of dp_shard have whole parameters.

    Returns:
        A DeviceMesh with the dimensions "dp", "cp" and "tp" that accelerate has. Those of size 1 are left out.

    Raises:
        ValueError: the mesh has dp_shard without zero=3 or replicate_shards; dp_shard and dp_replicate with zero=3; sp,
            other names, or no dimension larger than 1.
        ImportError: accelerate is older than 1.15.
    """
    need("weft.adapters.accelerate", "accelerate", "1.15")
    mesh = parallelism if isinstance(parallelism, DeviceMesh) else _built(parallelism, device_type)
    names = mesh.mesh_dim_names or ()
    odd = [name for name in names if name not in _KNOWN]
    if odd or not names:
        raise ValueError(
            f"mesh_of: the mesh has {f'the dimensions {names}' if names else 'no names'}; weft.parallelize takes "
            f"{', '.join(_KNOWN)}"
        )
    if "dp_shard" in names and zero != 3 and not replicate_shards:
        raise ValueError(
            f"mesh_of: dp_shard_size={mesh['dp_shard'].size()}: pass zero=3, here and to weft.parallelize, to share "
            "parameters over these ranks, or replicate_shards=True to have them whole on each"
        )
    if zero == 3 and "dp_shard" in names and "dp_replicate" in names and mesh["dp_replicate"].size() > 1:
        raise ValueError("mesh_of: with zero=3 all ranks of dp share the parameters: pass dp_replicate_size=1")
    data = tuple(name for name in names if name.startswith("dp_"))
    along = {"dp": mesh[data]._flatten("dp") if len(data) > 1 else mesh[data[0]]} if data else {}
    along |= {name: mesh[name] for name in names if name not in data}
    groups, ours = [part.get_group() for part in along.values()], tuple(along)
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], mesh.device_type, mesh_dim_names=ours)
    ranks = mesh.mesh.reshape([part.size() for part in along.values()])
    return DeviceMesh.from_group(groups, mesh.device_type, mesh=ranks, mesh_dim_names=ours)


def _built(parallelism, device_type: str | None) -> DeviceMesh:
    if parallelism.sp_size > 1:
        raise ValueError(
            f"mesh_of: sp_size={parallelism.sp_size} is DeepSpeed's; to share the sequence, pass this number as cp_size"
        )
    mesh = parallelism.get_device_mesh(device_type)
    if mesh is None:
        raise ValueError(f"mesh_of: {parallelism!r} has nothing larger than 1; call weft.parallelize without it")
    return mesh
