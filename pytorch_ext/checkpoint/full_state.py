"""full_state_dict: the whole model's, on every rank."""

from collections import OrderedDict

import torch
from torch import nn

from weft.comm.communicator import Communicator
from weft.data_parallel.data_parallel import DataParallel
from weft.sharding.owners import owners_of
from weft.sharding.shard import shard_of


@torch.no_grad()
def full_state_dict(model: nn.Module, *, device: str | torch.device | None = "cpu") -> OrderedDict[str, torch.Tensor]:
    """The state_dict of the unsplit model, the same on every rank. A collective call: all ranks call it, one may save.

        state = weft.full_state_dict(model)
        if torch.distributed.get_rank() == 0:
            torch.save(state, "model.pt")

    For models that fit into one rank's memory; `weft.save_checkpoint` needs no rank that holds all. `load_state_dict`
    of a model on any mesh takes it, and so does the unsplit model's.

    Args:
        model: what weft.parallelize, weft.DataParallel, weft.LayerSplit or weft.Pipeline returned.
        device: of the copies; None leaves each where the model has it.
    """
    if isinstance(model, DataParallel):
        model.wait_for_parameters()
        model = model.module
    tensors = {name: x for name, x in model.state_dict(keep_vars=True).items() if isinstance(x, torch.Tensor)}
    stages = {owners.ranks: None for owners in map(owners_of, tensors.values()) if owners is not None}
    whole = OrderedDict()
    for name, tensor in tensors.items():
        shard = shard_of(tensor)
        gathered = tensor.detach() if shard is None else shard.gather(tensor.detach())
        whole[name] = gathered.clone() if device is None else gathered.to(device, copy=True)
    for ranks in stages:
        whole = _of_all_stages(whole, ranks)
    return whole


def _of_all_stages(mine: OrderedDict[str, torch.Tensor], ranks: Communicator) -> OrderedDict[str, torch.Tensor]:
    """Every stage's tensors, in the order of ranks; a name that several have is the first one's."""
    whole: OrderedDict[str, torch.Tensor] = OrderedDict()
    for rank, tensors in enumerate(
        ranks.all_gather_object({name: (x.shape, x.dtype, x.device.type) for name, x in mine.items()})
    ):
        for name, (shape, dtype, device) in tensors.items():
            if name not in whole:
                like = mine[name] if rank == ranks.rank else torch.empty(shape, dtype=dtype, device=device)
                whole[name] = ranks.broadcast_(like, rank)
    return whole
