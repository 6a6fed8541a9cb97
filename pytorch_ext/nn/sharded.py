"""What every layer with split parameters has in common: it knows its shards, through copies and state_dicts."""

import torch
from torch import nn

from weft.shard import Shard


class ShardedModule(nn.Module):
    """A module some of whose parameters are this rank's shards. `state_dict()` holds the shards.

    `load_state_dict` takes a shard or the whole parameter, of which it takes this rank's part; another shape is an
    error that names both.
    """

    def __init__(self):
        super().__init__()
        self.shards: dict[str, Shard] = {}

    def adopt(self, name: str, whole: nn.Parameter, shard: Shard) -> None:
        """Holds this rank's part of a whole parameter under `name`."""
        self.shards[name] = shard
        self.register_parameter(name, shard.parameter(whole))

    def reset_parameters(self) -> None:
        """This rank's part of what the whole layer's constructor draws."""
        whole = self._draw_whole()
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if parameter is not None:
                    shard = self.shards.get(name)
                    parameter.copy_(shard.take(getattr(whole, name)) if shard else getattr(whole, name))

    def _draw_whole(self) -> nn.Module:
        """A whole layer like this one, with parameters drawn as torch draws them."""
        raise NotImplementedError

    def _mark(self) -> None:
        for name, shard in self.shards.items():
            shard.mark(self._parameters[name])

    # What replaces a Parameter loses what it knew: copies, moves between devices, and assigning loads.

    def __setstate__(self, state):
        super().__setstate__(state)
        self._mark()

    def _apply(self, function, recurse=True):
        super()._apply(function, recurse)
        self._mark()
        return self

    def _load_from_state_dict(self, state_dict, prefix, metadata, strict, missing, unexpected, errors):
        wrong = []
        for name, shard in self.shards.items():
            key = prefix + name
            value = state_dict.get(key)
            if not isinstance(value, torch.Tensor) or tuple(value.shape) == shard.shape:
                continue
            if tuple(value.shape) == shard.global_shape:
                state_dict[key] = shard.take(value).clone(memory_format=torch.contiguous_format)
                continue
            errors.append(
                f"{key} has shape {tuple(value.shape)}; expected {shard.shape}, the shard of rank "
                f"{shard.communicator.rank} of {shard.communicator.world}, or the whole {shard.global_shape}"
            )
            del state_dict[key]
            wrong.append(key)
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)
        for key in wrong:  # it is not missing: it is wrong, and that is said
            if key in missing:
                missing.remove(key)
        self._mark()
