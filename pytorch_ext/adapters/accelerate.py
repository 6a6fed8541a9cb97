"""An accelerate mesh as weft.parallelize takes it."""

from torch.distributed.device_mesh import DeviceMesh

from weft.adapters import need

_KNOWN = ("dp_replicate", "dp_shard", "cp", "tp")  # in accelerate's order; tp changes fastest


def mesh_of(parallelism, device_type: str | None = None, *, replicate_shards: bool = False) -> DeviceMesh:
    """Return a mesh with weft's names over accelerate's own groups: "tp", "cp", and "dp" for data parallelism.

        weft.parallelize(model, mesh_of(accelerator.parallelism_config, replicate_shards=True))

    Args:
        parallelism: an accelerate.ParallelismConfig, or the DeviceMesh that one made (accelerator.torch_device_mesh).
        device_type: "cpu" or "cuda", for a ParallelismConfig without a mesh yet. To make it is a collective call.
        replicate_shards: treat the ranks of dp_shard as replicas. With accelerate, FSDP shards the parameters over
            them; weft.parallelize does not.

    Returns:
        A DeviceMesh with the dimensions "dp", "cp" and "tp" that accelerate has. Those of size 1 are left out.

    Raises:
        ValueError: the mesh has dp_shard without replicate_shards, sp, other names, or no dimension larger than 1.
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
    if "dp_shard" in names and not replicate_shards:
        raise ValueError(
            f"mesh_of: dp_shard_size={mesh['dp_shard'].size()}: weft.parallelize does not shard parameters. Pass "
            "replicate_shards=True to have them whole on each of these ranks. To share the optimizer's state, use "
            'weft.DataParallel(model, group=mesh["dp"], shard_optimizer=True)'
        )
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
