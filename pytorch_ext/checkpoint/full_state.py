"""The state_dict of the unsplit model, on every rank."""

from collections import OrderedDict

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from weft.arguments import check_module
from weft.checkpoint.contents import refuse_quantized
from weft.comm.communicator import Communicator
from weft.comm.purpose import calls_for
from weft.data_parallel.data_parallel import DataParallel
from weft.sharding.owners import owners_of
from weft.sharding.shard import shard_of


@calls_for("weft.full_state_dict, which every rank calls")
@torch.no_grad()
def full_state_dict(model: nn.Module, *, device: str | torch.device | None = "cpu") -> OrderedDict[str, torch.Tensor]:
    """Return the state_dict of the unsplit model, the same on every rank. A collective call.

        state = weft.full_state_dict(model)
        if torch.distributed.get_rank() == 0:
            torch.save(state, "model.pt")

    The model must fit into one rank's memory; `weft.save_checkpoint` has no such limit. The result loads with
    `load_state_dict` into a model on any mesh and into the unsplit model.

    Args:
        model: the result of weft.parallelize, weft.DataParallel, weft.LayerSplit or weft.Pipeline.
        device: the device of the copies; None keeps that of each tensor.

    Returns:
        Copies of parameters and buffers, with the shapes and names of the unsplit model.

    Examples:
        >>> model = weft.parallelize(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), weft.init_mesh(tp=2))
        >>> weft.full_state_dict(model)["0.weight"].shape
        torch.Size([8, 4])
    """
    check_module("full_state_dict", model)
    if isinstance(model, DataParallel):
        model = model.module
    refuse_quantized(model)
    tensors = {name: x for name, x in model.state_dict(keep_vars=True).items() if isinstance(x, torch.Tensor)}
    stages = {owners.ranks: None for owners in map(owners_of, tensors.values()) if owners is not None}
    whole = OrderedDict()
    for name, tensor in tensors.items():
        shard, here = shard_of(tensor), tensor.detach()
        here = here.full_tensor() if isinstance(here, DTensor) else here
        gathered = here if shard is None else shard.gather(here)
        whole[name] = gathered.clone() if device is None else gathered.to(device, copy=True)
    for ranks in stages:
        whole = _of_all_stages(whole, ranks)
    return whole


def _of_all_stages(local: OrderedDict[str, torch.Tensor], ranks: Communicator) -> OrderedDict[str, torch.Tensor]:
    """Return the tensors of all stages, in rank order. Of several tensors with one name, take the first rank's."""
    whole: OrderedDict[str, torch.Tensor] = OrderedDict()
    for rank, tensors in enumerate(
        ranks.all_gather_object({name: (x.shape, x.dtype, x.device.type) for name, x in local.items()})
    ):
        for name, (shape, dtype, device) in tensors.items():
            if name not in whole:
                like = local[name] if rank == ranks.rank else torch.empty(shape, dtype=dtype, device=device)
                whole[name] = ranks.broadcast_(like, rank)
    return whole
