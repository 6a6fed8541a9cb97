"""Parameters sharded over the ranks of "dp" (ZeRO stage 3, Rajbhandari et al. 2020), by torch's FSDP2.

FSDP2 cuts the parameters, gathers those of a block before it runs, and reduces its gradients behind it. This module
chooses the blocks and their ranks, gives FSDP2 weft's collectives, and marks the cut parameters. Each is a DTensor, and
a Piece of the parameter that the other kinds of parallelism left on this rank.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from weft.comm.registry import communicator
from weft.context_parallel.shared_sequence import SharedSequence
from weft.data_parallel.comm_hooks import FSDPAllGather, FSDPReduceScatter
from weft.data_parallel.consensus import mark_of_batch, warn_of_same_batch
from weft.data_parallel.module_state import broadcast_buffers, broadcast_first
from weft.data_parallel.sharded_optimizer import Piece, piece_of
from weft.data_parallel.wrap_checks import check_same
from weft.forward import remove_hooks
from weft.metadata import ATTRIBUTE, metadata, set_metadata
from weft.sharding.shard import shard_of
from weft.sharding.sharded_grad import watch_gradient

_GONE = object()  # in a copy, in the place of FSDP2's states
_LOST = ("watched", "place", "summed_over")  # marks of what was done to the parameter itself


_OPTIONS = ("mp_policy", "offload_policy", "reshard_after_forward")


def zero_options(
    zero: int | Mapping[str, Any], sizes: Mapping[str, int], invariant: int | None
) -> tuple[int, dict[str, Any]]:
    """Check parallelize's `zero` and return the stage, and the options of fully_shard.

    Args:
        sizes: number of ranks by mesh dimension.

    Raises:
        ValueError: there is no such stage here, or no "dp" to share parameters over.
    """
    options = {"stage": zero} if isinstance(zero, int) else dict(zero)
    stage = options.pop("stage", 3)
    if stage not in (0, 1, 3):
        raise ValueError(
            f"parallelize: zero={stage!r} must be 0 (every rank of dp has the whole optimizer), 1 (its part of the "
            "optimizer's state) or 3 (its part of the parameters, gradients and state). Stage 2 lies between 1 and 3: "
            "with 1, the gradients stay in buckets of the whole size"
        )
    replicas = sizes.get("dp", 1) * (sizes.get("cp", 1) if stage == 3 else 1)
    if stage and replicas == 1:
        raise ValueError(f'parallelize: zero={stage} needs a mesh with "dp" larger than 1; this one has {dict(sizes)}')
    if stage and invariant is not None:
        raise ValueError(
            f"parallelize: zero={stage} is not supported with invariant={invariant}: leave out one of the two"
        )
    if unknown := sorted(set(options) - set(_OPTIONS if stage == 3 else ())):
        raise ValueError(f"parallelize: zero has no option {unknown[0]!r}; with stage 3 it has {', '.join(_OPTIONS)}")
    return stage, options


class ShardedParameters:
    """The sharding of a model's parameters over ranks, and the model's forward pre-hook.

    Args:
        model: what the other kinds of parallelism made of the model; changed in place.
        mesh: the ranks that share the parameters: those of "dp", and of "cp", which have equal gradients.
        experts: the ranks that share those of experts over "ep".
        replicas: size of "dp".
        options: further options of `torch.distributed.fsdp.fully_shard`.
        average: average gradients over "dp"; False adds them up.
        layers: the modules that are called, by name, of a model that is not called itself. None: the model is.

    Raises:
        ValueError: the model cannot be wrapped; raised on every rank.
        CollectiveMismatchError: the ranks have different models; raised on every rank.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        experts: DeviceMesh | None,
        replicas: int,
        options: Mapping[str, Any],
        average: bool = True,
        layers: Mapping[str, nn.Module] | None = None,
    ):
        self.ranks, self._divisor = communicator(mesh), replicas if average else 1
        self._copies = self.ranks.world_size // replicas  # equal gradients of ranks of "cp"
        check_same(model, self.ranks, {"zero": 3}, obstacle_of(model, layers))
        broadcast_first(model, self.ranks)
        options = {"reshard_after_forward": True, **options}  # else optimizers and norms could meet gathered parameters
        apart, self._alone = _experts_in(model), list[nn.Module]()
        if experts is not None and experts.size() == 1:
            apart, self._alone = {}, list(apart.values())
        self._marks = {
            name: {key: value for key, value in vars(x).get(ATTRIBUTE, {}).items() if key not in _LOST}
            for name, x in model.named_parameters(remove_duplicate=False)
        }
        before = [(module, name, x) for module in model.modules() for name, x in module._parameters.items()]
        called = {**_blocks_alone(model), "": model} if layers is None else layers
        for name, module in {**apart, **called}.items():
            of_module = experts if experts is not None and name in apart else mesh
            fully_shard(module, mesh=of_module, ignored_params=set(self._whole()), **options)
            self._connect(module, of_module, name)
        sharded = {x: now for module, name, x in before if (now := module._parameters[name]) is not x}
        for module, name, x in before:  # FSDP2 knows no names outside of the modules that are called
            if x in sharded:
                module._parameters[name] = sharded[x]
        self._mark(model)
        model.register_load_state_dict_pre_hook(_reshard)
        for module in model.modules():
            module.register_load_state_dict_pre_hook(_cut_loaded)
        model.register_load_state_dict_post_hook(self._mark)
        model.register_forward_pre_hook(self, with_kwargs=True)
        model.register_forward_hook(_recover, always_call=True)
        self._again = partial(ShardedParameters, mesh=mesh, experts=experts, replicas=replicas, options=options)
        self._copyable, self._compared = layers is None, replicas == 1
        self._override(model)

    def _override(self, model: Any) -> None:
        model._apply = partial(self._applied, model)
        if self._copyable:
            model.__deepcopy__ = partial(self._copied, model)

    def _connect(self, module: Any, mesh: DeviceMesh, name: str) -> None:
        """Give a module of FSDP2 weft's collectives, and let it see parts of a sequence."""
        kind = type(module)
        kind.__name__ = kind.__mro__[kind._orig_cls_mro_index].__name__  # by which transformers know a model
        gather = FSDPAllGather(mesh)
        gather.module = name or "the whole model"
        module.set_custom_all_gather(gather)
        module.set_custom_reduce_scatter(FSDPReduceScatter(mesh))
        of_all = communicator(mesh) == self.ranks
        divisor = self._divisor * self._copies if of_all else self._divisor  # experts get tokens of several ranks of dp
        if divisor != mesh.size():
            module.set_gradient_divide_factor(divisor)
            module.set_force_sum_reduction_for_comms(True)
        state = _state_of(module)
        state._register_pre_backward_hook = partial(_of_parts, state._register_pre_backward_hook)
        groups = getattr(state, "_fsdp_param_groups", None)
        for group in [state._fsdp_param_group] if groups is None else groups:  # torch before 2.13 has one, or None
            if group is not None:
                group._register_post_backward_hook = partial(_of_call_parts, group._register_post_backward_hook)
        module.register_forward_pre_hook(_mark_gathered)
        module.register_forward_hook(_without_views, prepend=True)

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if not self._compared and torch.is_grad_enabled():
            self._compared = True
            warn_of_same_batch(self.ranks, mark_of_batch((args, kwargs)))
        if module.training:
            broadcast_buffers(module, self.ranks)
        self.average_whole()

    def average_whole(self) -> None:
        """Let backward average the gradients of experts that no other rank has."""
        for x in self._whole():
            if x.requires_grad and not metadata(x, "averaged"):
                set_metadata(x, "averaged", True)
                x.register_hook(lambda gradient: gradient / self._divisor)

    def _whole(self) -> Iterator[nn.Parameter]:
        """Yield the experts' parameters that no other rank has. They get tokens of all ranks of dp."""
        yield from (x for module in self._alone for x in module._parameters.values() if x is not None)

    def _mark(self, model: nn.Module, *_) -> None:
        """Mark each DTensor as the piece that it is. Conversions, and loads with assign=True, replace parameters."""
        for name, x in model.named_parameters(remove_duplicate=False):
            if not isinstance(x, DTensor) or piece_of(x) is not None:
                continue
            stand_in = nn.Parameter(torch.empty(x.shape, dtype=x.dtype, device="meta"), x.requires_grad)
            vars(stand_in)[ATTRIBUTE] = vars(x)[ATTRIBUTE] = self._marks[name]
            local, ranks, row = x.to_local(), communicator(x.device_mesh), x.stride(0)
            start = min(-(-len(x) // ranks.world_size) * ranks.rank, len(x)) * row
            set_metadata(x, "piece", Piece(name, stand_in, start, start + local.numel(), ranks))
            watch_gradient(x)

    def _applied(self, model: nn.Module, *args: Any, **options: Any) -> nn.Module:
        type(model)._apply(model, *args, **options)
        self._mark(model)
        return model

    def _copied(self, model: Any, memo: dict) -> nn.Module:
        """Return a copy that is sharded too (AveragedModel makes one). A collective call, which FSDP2 has none for.

        For a moment the copy has whole parameters.
        """
        _reshard(model)
        units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for unit in units:
            memo[id(_state_of(unit))] = _GONE
        memo[id(self)] = _GONE
        for parameter in model.parameters():
            if isinstance(parameter, DTensor) and (piece := piece_of(parameter)) is not None:
                memo[id(parameter)] = whole = nn.Parameter(parameter.full_tensor(), parameter.requires_grad)
                vars(whole)[ATTRIBUTE] = vars(piece.parameter)[ATTRIBUTE]
        del model._apply, model.__deepcopy__
        kinds = [type(unit) for unit in units]
        try:
            for unit, kind in zip(units, kinds, strict=True):
                unit.__class__ = kind.__mro__[kind._orig_cls_mro_index]
            made = copy.deepcopy(model, memo)
        finally:
            for unit, kind in zip(units, kinds, strict=True):
                unit.__class__ = kind
            self._override(model)
        for module in made.modules():
            _remove_sharding(module)
        self._again(made)
        return made


def _state_of(module: Any) -> Any:
    return fully_shard.state(module)  # type: ignore[attr-defined]


def _remove_sharding(module: nn.Module) -> None:
    """Remove what a copy of a module has of FSDP2 and of this module."""
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    remove_hooks(module, *(x for x in hooks if _GONE in (x, getattr(x, "__self__", None)) or x in _HOOKS))
    loads = module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks
    for registered in (module._state_dict_pre_hooks, *loads):
        for key, hook in list(registered.items()):
            function = getattr(hook, "hook", hook)
            ours = function in _HOOKS or getattr(function, "__self__", None) is _GONE
            if ours or "FSDPParamGroup" in getattr(function, "__qualname__", ""):
                del registered[key]
    for key in (STATE_KEY, REGISTRY_KEY):
        vars(module).pop(key, None)


def obstacle_of(model: nn.Module, layers: Mapping[str, nn.Module] | None) -> str:
    """Return why FSDP2 cannot shard the model; "" if it can."""
    if layers is not None:
        found = Counter(id(x) for layer in layers.values() for x in layer.parameters())
        for name, x in model.named_parameters():
            if found[id(x)] != 1:
                where = "is shared by layers of one rank" if found[id(x)] else "is outside of the layers"
                return f"{name!r} {where}, which a Pipeline with zero=3 gathers layer by layer"
    if any(isinstance(x, DTensor) for x in model.parameters()):
        return "a parameter is a DTensor already: pass the model before fully_shard"
    trained: dict[torch.dtype, str] = {}
    for name, x in model.named_parameters():
        if x.dim() == 0:
            return f"{name!r} has no dimension to cut with zero=3: hold it as a tensor of one element, shape (1,)"
        if not x.is_contiguous():
            return f"{name!r} is not contiguous, and zero=3 cuts its rows: make it so before weft.parallelize"
        if x.requires_grad:
            trained.setdefault(x.dtype, name)
    tables = {name: x for name, x in model.named_modules() if isinstance(x, nn.Embedding | nn.EmbeddingBag)}
    if sparse := [name for name, table in tables.items() if table.sparse]:
        return f"{sparse[0]!r} has sparse gradients, which zero=3 does not reduce: make it with sparse=False"
    for name, module in _experts_in(model).items():
        if not all((shard := shard_of(x)) is not None and shard.replicas for x in module.parameters()):
            return (
                f"{name!r} has experts over ep beside parameters that all ranks have, and zero=3 shares each otherwise"
            )
    if len(trained) > 1:
        kinds = ", ".join(f"{name!r} is {dtype}" for dtype, name in trained.items())
        return f"trained parameters have several types ({kinds}), and zero=3 reduces them together: convert the model"
    return ""


def _experts_in(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules with parameters of experts over "ep", which fewer ranks share."""
    return {
        name: module
        for name, module in model.named_modules()
        if any(shard.replicas for x in module._parameters.values() if (shard := shard_of(x)) is not None)
    }


def _blocks_alone(model: nn.Module) -> dict[str, nn.Module]:
    """Return the model's blocks that share no parameter with another part of it (tied weights).

    Blocks are elements of the outermost lists that have modules in them. A container that has no forward is opened.
    """
    uses = Counter(id(x) for _, x in model.named_parameters(remove_duplicate=False))
    found = {}

    def look(module: nn.Module, prefix: str, listed: bool) -> None:
        for name, child in module.named_children():
            inside = Counter(id(x) for _, x in child.named_parameters(remove_duplicate=False))
            if listed and not isinstance(child, nn.ModuleList | nn.ModuleDict):
                if any(True for _ in child.children()) and inside and all(uses[x] == inside[x] for x in inside):
                    found[prefix + name] = child
            else:
                look(child, f"{prefix}{name}.", isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential))

    look(model, "", isinstance(model, nn.Sequential | nn.ModuleList))
    return found


def _recover(model: Any, _: Any, output: Any) -> None:
    """Let FSDP2 begin anew after a forward that has failed; then there is no output."""
    if output is None:
        getattr(model, "reset_iter_state", lambda: None)()  # of torch 2.13
        _reshard(model)


def _without_views(module: nn.Module, _: Any, output: Any) -> Any:
    """Copy the views among a block's outputs: what writes to one loses the memory of FSDP2 (pytorch#181832).

    A linear layer with a bias gives a view of its product.
    """
    if not torch.is_grad_enabled():
        return output
    return tree_map_only(torch.Tensor, lambda x: x.clone() if x.grad_fn is not None and x._is_view() else x, output)


def _reshard(model: nn.Module, *_) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _mark_gathered(module: nn.Module, *_) -> None:
    """Mark the gathered parameters of a block, which FSDP2 makes in its first forward and keeps."""
    remove_hooks(module, _mark_gathered)
    for part in module.modules():
        for name, x in part._parameters.items():
            if type(x) is nn.Parameter and ATTRIBUTE not in vars(x):
                vars(x)[ATTRIBUTE] = {"watched": True}  # FSDP2 takes its gradient
                if (shard := getattr(part, "shards", {}).get(name)) is not None:
                    set_metadata(x, "shard", shard)


def _cut_loaded(module: nn.Module, state: dict, prefix: str, *_) -> None:
    """Cut this rank's part from plain tensors of a state_dict, before they are loaded."""
    for name, x in module._parameters.items():
        value = state.get(prefix + name)
        if isinstance(x, DTensor) and isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
            piece = piece_of(x)
            if piece is not None and value.shape == x.shape:
                flat = value.reshape(-1)[piece.start : piece.stop]
                local = flat.view(x.to_local().shape).to(x.device)
                state[prefix + name] = DTensor.from_local(
                    local, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
                )


_HOOKS = (_mark_gathered, _without_views, _recover, _reshard, _cut_loaded)

# FSDP2 hooks the tensors that enter and leave a block. Of a shared sequence these are its parts.


def _of_parts(register: Callable, tree: Any) -> Any:
    leaves, structure = tree_flatten(tree)
    if not any(isinstance(x, SharedSequence) for x in leaves):
        return register(tree)
    apart = [x.apart() if isinstance(x, SharedSequence) else (x, None) for x in leaves]
    parts = register([part for part, _ in apart])
    return tree_unflatten(
        [x if make is None else make(*x) for x, (_, make) in zip(parts, apart, strict=True)], structure
    )


def _of_call_parts(register: Callable, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    return _of_parts(lambda call: register(tuple(call), {})[0], (args, kwargs))
