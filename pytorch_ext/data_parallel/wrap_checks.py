"""Checks of the module and options of DataParallel. A module that cannot be wrapped is refused on every rank."""

import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from weft.arguments import check_choice, check_module
from weft.comm.communicator import Communicator
from weft.data_parallel.consensus import check_same_module
from weft.sharding.owners import owners_of
from weft.sharding.quantized import is_quantized
from weft.sharding.shard import Shard, shard_of

_WIRES = (None, torch.bfloat16, torch.float16)
_SUMMED = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_wrapper_of = WeakTensorKeyDictionary()  # by parameter, weakly; an attribute would keep the module from being pickled


def check_wrap(module: nn.Module, ranks: Communicator, options: dict) -> torch.device:
    """Check the module and the options, and return the module's device. A collective call.

    Raises:
        ValueError: as documented at DataParallel.
        CollectiveMismatchError: as documented at DataParallel.
    """
    check_module("DataParallel", module)
    _check_options(options)
    check_same(module, ranks, options)
    return next(x.device for x in module.parameters() if x.requires_grad)


def check_same(module: nn.Module, ranks: Communicator, options: dict, obstacle: str = "") -> None:
    """Check that the module can be wrapped, and that all ranks wrap the same one. A collective call.

    Args:
        obstacle: another reason why it cannot be wrapped; "" if there is none.
    """
    obstacle = _obstacle(module, ranks) or obstacle
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    tensors = [*module.named_parameters(), *module.named_buffers()]
    others = {name: tensor for name, tensor in tensors if name not in trained}
    check_same_module(ranks, obstacle, trained, others, options)


def mark_wrapped(module: nn.Module, wrapper: nn.Module) -> None:
    """Record the wrapper of the module's parameters, so that they are not wrapped a second time."""
    for parameter in module.parameters():
        _wrapper_of[parameter] = weakref.ref(wrapper)


def _check_options(options: dict) -> None:
    check_choice("unused_parameters", options["unused_parameters"], ("error", "zero"))
    if not options["bucket_mb"] > 0:
        raise ValueError(f"bucket_mb={options['bucket_mb']} must be more than 0")
    check_choice("wire_dtype", options["wire_dtype"], _WIRES)
    if options["invariant"] is not None:
        for name in ("shard_optimizer", "main_grad", "wire_dtype"):
            if options[name]:
                raise ValueError(f"{name}={options[name]} is not supported with invariant={options['invariant']}")
    if options["main_grad"] and not options["average"]:
        raise ValueError("main_grad=True needs average=True: a sum that is added to again would be counted W times")


def _obstacle(module: nn.Module, ranks: Communicator) -> str:
    """Return why the module cannot be wrapped; "" if it can."""
    devices: dict[torch.device, str] = {}
    for name, parameter in module.named_parameters():
        if _wrapper_of.get(parameter, lambda: None)() is not None:
            return f"{name!r} is wrapped already: its gradient would be reduced twice. Wrap once"
        if is_quantized(parameter):
            return f"{name!r} is quantised, and replicas of such weights are not made equal: use a mesh without dp"
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            return f"{name!r} has no shape yet: run the module once, then wrap it"
        if parameter.is_inference():
            return f"{name!r} was made inside of torch.inference_mode, and has no gradient: make the module outside"
        if parameter.requires_grad and parameter.dtype not in _SUMMED:
            types = ", ".join(map(str, _SUMMED))
            return f"{name!r} is {parameter.dtype}, and gradients are summed in {types}: hold it as torch.view_as_real"
        if partners := _partners(parameter, ranks):
            return (
                f"{name!r} is split over ranks {partners} of this group, which have different parts of the model and "
                'would all get rank 0\'s: pass group=mesh["dp"], or let weft.parallelize wrap it by a mesh with "dp"'
            )
        devices.setdefault(parameter.device, name)
    if len(devices) > 1:
        places = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
        return f"the module is on several devices ({places}); a rank has one"
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return (
            "no parameter of the module requires a gradient: there is nothing to reduce. Freeze behind the wrap what "
            'will train later; for a model that never trains leave dp out, mesh["cp", "tp"]'
        )
    return ""


def _lies_among(shard: Shard, ranks: Communicator) -> bool:
    """Return whether the group's ranks have all experts equally often, as `shard.replicas` says."""
    if shard.replicas is None:
        return False
    wrapped = set(dist.get_process_group_ranks(ranks.group))
    holders, same = (set(dist.get_process_group_ranks(x.group)) for x in (shard.communicator, shard.replicas))
    return same <= wrapped and len(holders & wrapped) * len(same) == len(wrapped)


def _partners(parameter: torch.Tensor, ranks: Communicator) -> list[int]:
    """Return the ranks of the group that have other shards of a parameter, or other stages of its model."""
    shard, owners = shard_of(parameter), owners_of(parameter)
    groups = [shard.communicator] if shard is not None and not _lies_among(shard, ranks) else []
    groups += [owners.ranks] if owners is not None else []
    wrapped = set(dist.get_process_group_ranks(ranks.group))
    for group in groups:
        common = wrapped & set(dist.get_process_group_ranks(group.group))
        if len(common) > 1:
            return sorted(common)
    return []
