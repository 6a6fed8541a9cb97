"""Base classes of layers with split parameters: they know their shards, also after copies and loads."""

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.distributed import _composable_state
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils.parametrize import is_parametrized

import weft.sharding.optimizer_check  # noqa: F401 - checks every optimizer once there are split parameters
from weft.metadata import ATTRIBUTE
from weft.ops.sharded_param import operand
from weft.sharding.part_of_state import is_part, part_of_state
from weft.sharding.quantized import is_quantized, values_of
from weft.sharding.shard import Shard
from weft.sharding.sharded_grad import mark_gradient

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PARTS = "weft_parts"  # key in a state_dict's metadata: global shape, dimension and stretches of each shard
_HOOKS_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def lost_with(module: nn.Module) -> str | None:
    """Return the first thing that a replacement of the module and its parameters would lose ("hooks", say), or None."""
    if any(getattr(module, hooks) for hooks in _HOOKS):
        return "hooks"
    if "forward" in vars(module):
        return "a forward of its own"
    of_parameters = (getattr(p, hooks, None) or {} for p in module.parameters() for hooks in _HOOKS_OF_PARAMETERS)
    if any(hook is not mark_gradient for hooks in of_parameters for hook in hooks.values()):
        return "hooks of its parameters"
    return "parametrizations" if any(is_parametrized(part) for part in module.modules()) else None


def checked_forward(forward: Callable) -> Callable:
    """Return a forward that marks replaced parameters.

    torch.compile leaves it out of its graphs: it communicates, which a graph cannot record. That is
    context_parallel.uncompiled.outside_of_graphs, in the same Python call.
    """
    eager = _disable_dynamo(forward)  # as torch.compiler.disable, which would import Dynamo here: two seconds

    @wraps(forward)
    def called(self, *inputs, **options):
        if torch.compiler.is_dynamo_compiling():
            return eager(self, *inputs, **options)
        for name in self.shards:
            tensor = self._parameters.get(name)
            if type(tensor) is nn.Parameter and ATTRIBUTE not in tensor.__dict__:  # it was replaced
                self._mark()
                _warn_of_fully_shard(self)
        return forward(self, *inputs, **options)

    return called


def _warn_of_fully_shard(layer: nn.Module) -> None:
    """Warn if torch's `fully_shard`, called past `weft.parallelize`, gathers the layer's parameters."""
    if any(isinstance(m, FSDPModule) and layer in m.modules() for m in _composable_state._module_state_mapping):
        warnings.warn(
            "fully_shard of split layers: each parameter learns what it should, but the gradients no longer know the "
            "other ranks' parts, so torch's clip_grad_norm_ and other norms count this rank's parts alone: use "
            "weft.parallelize(model, mesh, zero=3) instead",
            stacklevel=3,
        )


class ShardHolder(nn.Module):
    """A module that holds some of its parameters and buffers as this rank's shards.

    `state_dict()` holds the shards. `load_state_dict` takes a shard, or the whole tensor and cuts this rank's part from
    it; the error for another shape names both shapes. The metadata of a state_dict describes its parts, so a load of
    another rank's parts fails, also after torch.save.
    """

    transposed = False  # whether matrices are stored as [in, out], the transpose of the product's operand

    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        if "forward" in vars(cls):
            cls.forward = checked_forward(cls.forward)

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.shards: dict[str, Shard] = {}
        # In eval mode torch's TransformerEncoderLayer and MultiheadAttention have a fast path that reads the weights of
        # their parts without calling them. With split parts its result is wrong.
        torch.backends.mha.set_fastpath_enabled(False)

    @classmethod
    def _part_of(cls, whole: Any, *sizes: Any, **options: Any) -> Any:
        """Return the layer of these sizes and options, with this rank's parts of a whole layer's parameters."""
        layer: Any = cls(*sizes, device="meta", dtype=whole.weight.dtype, **options)
        layer.register_parts(whole)
        return layer.train(whole.training)

    def register_parts(self, whole: nn.Module) -> None:
        """Register this rank's parts of a whole layer's parameters and buffers, cut as `shards` says.

        Raises:
            ValueError: the layer is parametrized, so some of them are not its own.
        """
        tensors = {**whole._parameters, **whole._buffers}
        names = [*self._parameters, *self._buffers] or list(tensors)  # a constructor has registered none yet
        if is_parametrized(whole) or not tensors.keys() >= set(names):
            raise ValueError(f"{type(whole).__name__}: its part would lose its parametrizations: remove them first")
        for name in names:
            self.register_part(name, tensors[name], self.shards.get(name))

    def register_part(self, name: str, whole: torch.Tensor | None, shard: Shard | None) -> None:
        """Register this rank's part of a whole parameter or buffer under `name`; all of it if `shard` is None."""
        if whole is None:
            self.shards.pop(name, None)
            if not hasattr(self, name):
                self.register_parameter(name, None)
        elif isinstance(whole, nn.Parameter):
            copy = nn.Parameter(whole.detach().clone(), whole.requires_grad)
            self.register_parameter(name, None)  # accelerate's init_empty_weights makes marked parameters anew
            self._parameters[name] = copy if shard is None else shard.parameter(whole)
        else:
            self.register_buffer(name, whole.clone() if shard is None else shard.mark(shard.take(whole).clone()))
        if whole is not None and shard is not None:
            self.shards[name] = shard

    def operand(self, name: str, whole_use: bool = True):
        """Return a parameter for use in a product: [out, in], with its gradient summed over ranks with the same rows.

        Args:
            whole_use: one product of ours takes the whole parameter, not pieces of it.
        """
        if name not in self._parameters:
            raise ValueError(
                f"{name} of a split {type(self).__name__} was made something else by a parametrization or a pruning, "
                "which would see this rank's part alone: apply it before weft.parallelize and make it permanent "
                "(remove_parametrizations, prune.remove)"
            )
        parameter, shard = self._parameters[name], self.shards.get(name)
        if parameter is None or shard is None:
            return parameter
        if whole_use and not self.transposed and not shard.cut.replicated and type(parameter) is nn.Parameter:
            return parameter  # in few calls: each layer asks in each forward
        if is_quantized(parameter):
            return values_of(parameter)
        return operand(parameter, shard, self.transposed and parameter.dim() == 2, whole_use=whole_use)

    def reset_parameters(self) -> None:
        """Draw the whole layer's parameters as its constructor does and keep this rank's part."""
        whole = self._draw_whole()
        with torch.no_grad():
            for name, tensor in [*self._parameters.items(), *self._buffers.items()]:
                if tensor is not None:
                    shard = self.shards.get(name)
                    tensor.copy_(shard.take(getattr(whole, name)) if shard else getattr(whole, name))

    def _draw_whole(self) -> nn.Module:
        """Return a whole layer like this one, with parameters drawn as torch draws them."""
        raise NotImplementedError

    def _mark(self) -> None:
        for name, shard in self.shards.items():
            parameter = self._parameters.get(name)
            tensor = self._buffers.get(name) if parameter is None else parameter
            if tensor is not None:
                shard.mark(tensor)

    # Copies, moves between devices, loads with assign=True and users replace a Parameter, and the new one has no marks.

    def register_parameter(self, name, param):
        super().register_parameter(name, param)
        shard = vars(self).get("shards", {}).get(name)
        if shard is not None and param is not None:
            if tuple(param.shape) != shard.shape:
                raise ValueError(
                    f"{name} has shape {tuple(param.shape)}, and rank {shard.communicator.rank} of "
                    f"{shard.communicator.world_size} has the part {shard.shape} of {shard.global_shape}"
                )
            shard.mark(param)

    def __setstate__(self, state):
        super().__setstate__(state)
        self._mark()

    def _apply(self, function, recurse=True):
        super()._apply(function, recurse)
        self._mark()
        return self

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        self._mark()
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, shard in () if keep_vars else self.shards.items():
            value = destination.get(prefix + name)
            if type(value) is torch.Tensor and shard.shape != shard.global_shape:
                destination[prefix + name] = part_of_state(value, shard)
        metadata = getattr(destination, "_metadata", None)
        if metadata is not None:
            parts = {name: _place(shard) for name, shard in self.shards.items()}
            metadata.setdefault(prefix[:-1], {})[_PARTS] = parts

    def _load_from_state_dict(self, state_dict, prefix, metadata, strict, missing, unexpected, errors):
        wrong = []
        for name, shard in self.shards.items():
            key = prefix + name
            value = state_dict.get(key)
            if not isinstance(value, torch.Tensor):
                continue
            if is_part(value):
                state_dict[key] = value = value.as_subclass(torch.Tensor)
            own = _place(shard)
            saved = metadata.get(_PARTS, {}).get(name, own)
            if tuple(value.shape) == shard.shape and saved == own:
                continue
            if tuple(value.shape) == shard.global_shape:
                state_dict[key] = shard.take(value).clone(memory_format=torch.contiguous_format)
                continue
            if tuple(value.shape) == shard.shape:
                errors.append(
                    f"{key} was saved by another rank: it is {list(saved[2])} along dimension {saved[1]} of the whole "
                    f"{tuple(saved[0])}, and this rank has {list(shard.stretches)} along {shard.dim}: let every rank "
                    "save and load a file of its own, or use weft.full_state_dict or weft.save_checkpoint"
                )
            else:
                errors.append(
                    f"{key} has shape {tuple(value.shape)}; expected {shard.shape}, the shard of rank "
                    f"{shard.communicator.rank} of {shard.communicator.world_size}, or the whole {shard.global_shape}"
                )
            del state_dict[key]
            wrong.append(key)
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)
        for key in wrong:  # it is not missing: `errors` has it
            if key in missing:
                missing.remove(key)
        self._mark()


def _place(shard: Shard) -> tuple:
    """Return the global shape, the dimension and the stretches of a shard; for two cuts, also those of the second."""
    place = shard.global_shape, shard.dim, shard.stretches
    if shard.across is None:
        return place
    dim, cut = shard.across
    return (*place, dim, cut.stretches[shard.communicator.rank])


class ShardedModule(ShardHolder):
    """A ShardHolder that treats every position alone: where ranks share a sequence, it gets this rank's part."""
