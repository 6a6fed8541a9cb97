"""LayerSplit: a model's layers on several devices, one after the other: the plain way to hold what does not fit on one.

One device computes at a time. `weft.Pipeline` is what makes them all compute; this needs no micro-batches, no schedule
and no loss of its own, and a model need not be written for it.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map

from weft.comm.communicator import Communicator
from weft.comm.registry import communicator
from weft.context_parallel.region import share_in_stages, sharing_in
from weft.layer_lists import opened_in
from weft.pipeline.layer_graph import Chain, UncuttableError, chain_of
from weft.pipeline.layer_split_broadcast import Relay
from weft.pipeline.layer_split_p2p import run
from weft.pipeline.placement import placed
from weft.pipeline.stage import Stage, begin
from weft.pipeline.stage_params import StageParams, hold
from weft.replicas import FIRST_CALLS, SameCalls, check_replicas
from weft.sharding.owners import mark


class LayerSplit(nn.Module):
    """The model, its layers spread over devices or ranks by memory; called as the model is, with the model's results.

        split = weft.LayerSplit(model, ["cuda:0", "cuda:1"])  # one process, several devices
        split = weft.LayerSplit(model, weft.init_mesh(pp=2))  # two ranks, each with its layers
        loss(split(inputs), targets).backward()

    Values and gradients are the plain model's, bit for bit. Layers that share a parameter go to one place, so that it
    stays one; activations go there and back. Parameters keep the model's names.

    In one process every layer is called with its arguments on its device, and outputs stay where the last layer is: put
    targets on `output.device`. Any model works, those of transformers included.

    Across ranks each rank keeps its layers only, every rank calls with the same inputs, and every rank gets the whole
    output. The same loss is to be computed on all of them, and backward called on all: it goes back through the ranks.
    Activations go from stage to stage. Where the forward cannot be cut (those of transformers), every rank runs it,
    and each layer's output goes to all of them: that moves more, and works for any model.

    Args:
        model: the same on every rank.
        devices_or_mesh: devices, one of which may be named several times; or a mesh with "pp", or of one dimension.
        layers, arguments, check_calls: across ranks, as of `weft.Pipeline`.

    Raises:
        ValueError: more devices or ranks than layers; across ranks, with layers or arguments given, a forward that
            cannot be cut.
    """

    def __init__(
        self,
        model: nn.Module,
        devices_or_mesh: Sequence[str | torch.device] | DeviceMesh,
        *,
        layers: Sequence[str] | None = None,
        arguments: Sequence[str] | None = None,
        check_calls: int = FIRST_CALLS,
    ):
        super().__init__()
        self._whole: tuple[nn.Module, ...] = ()  # not registered: its children are
        if isinstance(devices_or_mesh, DeviceMesh):
            self._call: Callable = _Uncopied(_across_ranks(self, model, devices_or_mesh, layers, arguments))
            SameCalls({_along(devices_or_mesh): False}, check_calls).install(self, self)
        else:
            if layers is not None or arguments is not None:
                raise ValueError(
                    "LayerSplit: layers and arguments are for a mesh; over devices the model runs as it is"
                )
            _over_devices(model, [torch.device(one) for one in devices_or_mesh])
            hold(self, model, [model])
            self._whole = (model,)
            self._call = model.__call__

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self._call(*inputs, **options)

    def check_replicas(self) -> None:
        """See `weft.check_replicas`."""
        check_replicas(self)

    def train(self, mode: bool = True) -> "LayerSplit":
        for whole in self._whole:  # whose own code may ask
            whole.train(mode)
        return super().train(mode)


class _Uncopied:
    """What runs the layers of a split, and would run those of the original in a copy of it."""

    def __init__(self, call: Callable):
        self._call = call

    def __call__(self, *inputs, **named):
        return self._call(*inputs, **named)

    def __deepcopy__(self, memo):
        raise TypeError("a LayerSplit over ranks cannot be copied: copy the model first, and split both")


def _over_devices(model: nn.Module, devices: list[torch.device]) -> None:
    """Moves every layer to its device, and what it is called with to it."""
    layers = [layer for layer in _layers_of(model).values() if _tensors_of(layer)]
    for tensor in _tensors_outside(model):
        tensor.data = tensor.data.to(devices[0])
    for layer, place in zip(layers, placed([_tensors_of(layer) for layer in layers], len(devices)), strict=True):
        layer.to(devices[place])
        layer.register_forward_pre_hook(_to(devices[place]), with_kwargs=True)


def _layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The elements of the outermost lists of modules, and every other module that has no such list in it."""
    opened = opened_in(model)
    return {
        name: module
        for name, module in model.named_modules()
        if name not in opened and name.rpartition(".")[0] in opened
    }


def _tensors_of(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _tensors_outside(model: nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers of no layer, used by the model's own code."""
    opened = [model.get_submodule(name) for name in opened_in(model)]
    tensors = [one for module in opened for one in (*module._parameters.values(), *module._buffers.values())]
    return [tensor for tensor in tensors if tensor is not None]


def _to(device: torch.device):
    def move(layer, inputs, options):
        return tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, (inputs, options))

    return move


def _along(mesh: DeviceMesh) -> Communicator:
    names = mesh.mesh_dim_names or ()
    if mesh.ndim > 1 and "pp" not in names:
        raise ValueError(
            f'LayerSplit: the mesh has the dimensions {names}; it needs a "pp", or to be one dimension alone'
        )
    return communicator(mesh["pp"] if mesh.ndim > 1 else mesh)


def _across_ranks(split: LayerSplit, model: nn.Module, mesh: DeviceMesh, layers, arguments):
    """Keeps this rank's layers; returns what runs all of them."""
    ranks = _along(mesh)
    device = torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")
    sharing = sharing_in(model).get("")
    share_in_stages(split, sharing)
    try:
        chain = chain_of("LayerSplit", model, layers, arguments)
    except UncuttableError:
        if layers is not None or arguments is not None:
            raise
        return _relayed(split, model, ranks, device)
    places = _places_of(chain, ranks.world_size)
    runs = [(place, len(list(layers_there))) for place, layers_there in groupby(places)]
    stages = chain.stages([size for _, size in runs])
    segments = [
        (place, Stage(stage, number, len(runs)) if place == ranks.rank else None)  # what others hold is theirs
        for number, ((place, _), stage) in enumerate(zip(runs, stages, strict=True))
    ]
    mine = [segment for _, segment in segments if segment is not None]
    hold(split, model, mine)
    mark({parameter: {ranks.rank} for segment in mine for parameter in segment.parameters()}, ranks)
    taken = [str(node.target) for node in chain.inputs]
    held = StageParams(split, (segment.stage for segment in mine))
    settings = chain.settings  # not the chain, which has all layers

    def call(*inputs, **named):
        values = _in_order(taken, inputs, named)
        settings.check()
        held.renew(split)
        begun = begin("LayerSplit", sharing, values)
        for segment in mine:
            segment.begin(*begun)
        return run(segments, values, ranks, device)

    return call


def _relayed(split: LayerSplit, model: nn.Module, ranks: Communicator, device: torch.device):
    """Of a model that cannot be cut: every rank runs its forward, and of each layer one has the parameters."""
    owners = _owners(model, ranks.world_size)
    layers = _layers_of(model)
    mine = [layer for name, layer in layers.items() if owners.get(name, ranks.rank) == ranks.rank]
    outside = nn.ParameterList(one for one in _tensors_outside(model) if isinstance(one, nn.Parameter))
    mark({one: {ranks.rank} for layer in mine for one in layer.parameters()}, ranks)
    mark({one: set(range(ranks.world_size)) for one in outside}, ranks)
    others = nn.Module()
    for number, tensor in enumerate(_tensors_outside(model)):
        if not isinstance(tensor, nn.Parameter):
            others.register_buffer(str(number), tensor)
    hold(split, model, [*mine, outside, others])
    relay = Relay(ranks, device)
    relay.take(model, owners)
    split._whole = (model,)
    held = StageParams(split, [model])

    def call(*inputs, **named):
        held.renew(split)
        return relay.run(model, inputs, named)

    return call


def _owners(model: nn.Module, ranks: int) -> dict[str, int]:
    """The rank of each layer with parameters. ValueError: more ranks than layers, a parameter also used outside."""
    layers = {name: layer for name, layer in _layers_of(model).items() if any(True for _ in layer.parameters())}
    outside = {id(tensor) for tensor in _tensors_outside(model)}
    for name, layer in layers.items():
        if any(id(parameter) in outside for parameter in layer.parameters()):
            raise ValueError(
                f"LayerSplit: a parameter of {name} is also used outside of any layer, which every rank runs: make "
                "that use a module of its own"
            )
    places = placed([_tensors_of(layer) for layer in layers.values()], ranks)
    return dict(zip(layers, places, strict=True))


def _in_order(names: Sequence[str], inputs: Sequence, named: Mapping) -> list:
    """A call's arguments. TypeError, on every rank that is called so, where they are not those that it was cut for."""
    left = names[len(inputs) :]
    if len(inputs) > len(names) or set(named) != set(left):
        given = f"{len(inputs)} by their place and {', '.join(named) or 'none'} by name"
        raise TypeError(
            f"LayerSplit: the model was cut for the arguments {', '.join(names)}, and got {given}: name further ones "
            "in LayerSplit(arguments=[...])"
        )
    return [*inputs, *(named[name] for name in left)]


def check_layers(model: nn.Module, ranks: int) -> None:
    """Raises ValueError where the model has fewer layers than ranks, or none."""
    try:
        _places_of(chain_of("LayerSplit", model, None, None), ranks)
    except UncuttableError:
        _owners(model, ranks)


def _places_of(chain: Chain, places: int) -> list[int]:
    return placed([[*layer.parameters, *layer.buffers] for layer in chain.layers], places)
