"""as_dtensors: a model's parameters as DTensors that share the model's memory."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from weft.comm.registry import communicator
from weft.sharding.shard import Shard as Part
from weft.sharding.shard import shard_of


@torch.no_grad()
def as_dtensors(model: nn.Module, mesh: DeviceMesh | None = None) -> dict[str, DTensor]:
    """Return the model's state_dict as DTensors. They are views: a write to one is a write to the model.

        torch.distributed.checkpoint.save({"model": weft.as_dtensors(model)}, checkpoint_id="run/latest")

    Args:
        model: the model itself, not its wrapper. For a model in stages, this rank's stages.
        mesh: one dimension with the ranks that split the layers. None makes a mesh of these ranks, or of the default
            group if no layer is split. Whole tensors are replicated over it.

    Raises:
        ValueError: the mesh has other ranks; or DTensor cannot represent the cut of some tensors, which the message
            names. DTensor cuts like torch.chunk, one stretch per rank. Heads that do not divide, fused projections and
            some uneven sizes are cut differently.

    Examples:
        >>> model = weft.parallelize(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), weft.init_mesh(tp=2))
        >>> weft.as_dtensors(model)["0.weight"].placements
        (Shard(dim=0),)
    """
    mesh = _mesh_of(model) if mesh is None else mesh
    if mesh.ndim != 1:
        raise ValueError(f'as_dtensors: mesh must be one dimension, mesh["tp"], got {mesh.mesh_dim_names}')
    ranks = communicator(mesh)
    tensors = model.state_dict(keep_vars=True)
    odd = []
    for name, tensor in tensors.items():
        part = shard_of(tensor)
        if part is not None and part.communicator != ranks:
            raise ValueError(
                f"as_dtensors: {name} is split over {part.communicator.world_size} other ranks than the mesh's"
            )
        if part is not None and not _is_chunked(part):
            odd.append(f"{name} ({list(part.sizes)} of {part.global_shape[part.dim]})")
    if odd:
        raise ValueError(
            f"as_dtensors: DTensor cannot say how these are cut: {', '.join(odd)}. weft.save_checkpoint stores them; "
            "or use a number of ranks that divides them"
        )
    return {name: _view(tensor, mesh) for name, tensor in tensors.items()}


def _mesh_of(model: nn.Module) -> DeviceMesh:
    parts = [part for part in map(shard_of, model.parameters()) if part is not None]
    group = parts[0].group if parts else communicator(None).group
    return DeviceMesh.from_group(group, next(model.parameters()).device.type)


def _is_chunked(part: Part) -> bool:
    """Return whether torch.chunk would give each rank the same part."""
    if part.across is not None:
        return False
    count, world = part.global_shape[part.dim], part.communicator.world_size
    size = -(-count // world)
    starts = [min(rank * size, count) for rank in range(world)]
    expected = [((start, min(start + size, count)),) for start in starts]
    return list(part.cut.stretches) == expected


def _view(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    part = shard_of(tensor)
    if part is None:
        return DTensor.from_local(tensor.detach(), mesh, [Replicate()], run_check=False)
    shape = torch.Size(part.global_shape)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(tensor.detach(), mesh, [Shard(part.dim)], run_check=False, shape=shape, stride=stride)
