"""Whether all ranks have the same model."""

import torch
from torch import nn

from weft.comm.communicator import Communicator
from weft.context.region import sum_of_bits


def check_same_model(model: nn.Module, group: Communicator) -> None:
    """Ranks that drew different weights would train a model that is none of theirs, and nothing else would tell."""
    names, sums = [], []
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            names.append(name)
            sums.append(sum_of_bits(parameter))
    if not sums or group.world == 1:
        return
    ranks = group.all_gather(torch.stack(sums).unsqueeze(0), 0, [1] * group.world)
    for rank in range(1, group.world):
        different = (ranks[rank] != ranks[0]).nonzero()
        if len(different):
            raise ValueError(
                f"parallelize: {names[int(different[0])]} differs between rank 0 and rank {rank} ({len(different)} of "
                f"{len(names)} parameters do). Every rank must have the same whole model: seed all ranks alike "
                "(torch.manual_seed), or load the same weights, before you build it"
            )
