"""as_dtensors: a model's parameters as DTensors, for whoever wants these; the memory is the model's own."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from weft.comm.registry import communicator
from weft.sharding.shard import Shard as Part
from weft.sharding.shard import shard_of


@torch.no_grad()
def as_dtensors(model: nn.Module, mesh: DeviceMesh | None = None) -> dict[str, DTensor]:
    """The model's state_dict as DTensors, which are views: what is written to one is written to the model.

        torch.distributed.checkpoint.save({"model": weft.as_dtensors(model)}, checkpoint_id="run/latest")

    Args:
        model: the model itself, not what it is wrapped in. Of a model in stages, the stages that this rank has.
        mesh: one dimension, of the ranks that split the layers; None makes one of them, or of the default group where
            no layer is split. Tensors that are whole are replicated over it.

    Raises:
        ValueError: a mesh of other ranks; tensors that are cut otherwise than DTensor cuts (torch.chunk, one stretch a
            rank), by name: heads that do not divide, fused projections, some uneven sizes.
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
    """Whether each rank has what torch.chunk would give it."""
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
