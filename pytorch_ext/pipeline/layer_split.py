"""LayerSplit: a model's layers on several devices, one after another, for a model that does not fit on one.

One device computes at a time; `weft.Pipeline` makes them all compute. LayerSplit needs no micro-batches, no schedule,
no loss and no change to the model.
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
from weft.forward import ForwardChain
from weft.layer_lists import layers_of, tensors_outside
from weft.pipeline.layer_graph import Chain, UncuttableError, chain_of
from weft.pipeline.layer_split_broadcast import Relay
from weft.pipeline.layer_split_p2p import run
from weft.pipeline.placement import placed
from weft.pipeline.stage import Stage, begin
from weft.pipeline.stage_params import StageParams, hold
from weft.replicas import SameCalls, check_replicas
from weft.sharding.owners import mark


class LayerSplit(nn.Module):
    """The model with its layers spread over devices or ranks by memory; called like the model, with the same results.

        split = weft.LayerSplit(model, ["cuda:0", "cuda:1"])  # one process, several devices
        split = weft.LayerSplit(model, weft.init_mesh(pp=2))  # two ranks, each with its layers
        loss(split(inputs), targets).backward()

    Values and gradients are those of the plain model, bit for bit. Layers that share a parameter go to one place, so
    that the parameter stays one; activations travel there and back. Parameters keep the model's names.

    In one process every layer runs on its device, and its arguments move there. Outputs stay on the device of the last
    layer: put targets on `output.device`. Any model works, also those of transformers.

    Across ranks, each rank keeps its own layers. Every rank calls with the same inputs and gets the whole output. Every
    rank must compute the same loss and call backward, which runs back through the ranks.

    Across ranks, activations go from stage to stage. If the forward cannot be cut (as in transformers), every rank runs
    it, and the output of each layer goes to all ranks. This moves more data and works for any model.

    Args:
        model: the same on every rank.
        devices_or_mesh: devices, which may repeat; or a mesh with "pp", or of one dimension.
        layers, arguments, checks: across ranks, as in `weft.Pipeline`.

    Raises:
        ValueError: more devices or ranks than layers; across ranks, a forward that cannot be cut, if layers or
            arguments are given.

    Examples:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        >>> split = weft.LayerSplit(model, weft.init_mesh(pp=2))
        >>> split(torch.ones(2, 4)).shape
        torch.Size([2, 4])
    """

    def __init__(
        self,
        model: nn.Module,
        devices_or_mesh: Sequence[str | torch.device] | DeviceMesh,
        *,
        layers: Sequence[str] | None = None,
        arguments: Sequence[str] | None = None,
        checks: str = "first",
    ):
        super().__init__()
        self._whole: tuple[nn.Module, ...] = ()  # not registered: its children are
        if isinstance(devices_or_mesh, DeviceMesh):
            self._call: Callable = _Uncopied(_across_ranks(self, model, devices_or_mesh, layers, arguments))
            SameCalls({_along(devices_or_mesh): False}, checks).install(self, self)
        else:
            if layers is not None or arguments is not None:
                raise ValueError(
                    "LayerSplit: layers and arguments are for a mesh; over devices the model runs as it is"
                )
            _over_devices(model, [torch.device(device) for device in devices_or_mesh])
            hold(self, model, [model])
            self._whole = (model,)
            self._call = model.__call__

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self._call(*inputs, **options)

    def generate(self, *inputs: Any, **options: Any) -> Any:
        """Generate with a model of transformers: its `generate`, the same on every rank, with the same arguments.

        Across ranks this sets use_cache=False: each token computes the whole sequence again, since every rank would
        fill the part of a cache that belongs to its own layers.

        Raises:
            TypeError: the model has no `generate`.
            ValueError: a cache is asked for across ranks.
        """
        model = self._whole[0] if self._whole else None
        if not hasattr(model, "generate"):
            raise TypeError("LayerSplit.generate: the model has no generate, or its forward was cut; transformers' do")
        if not isinstance(self._call, _Uncopied):
            return model.generate(*inputs, **options)  # type: ignore[operator, union-attr]
        return _generate(self, model, inputs, {"use_cache": False, **options})  # type: ignore[arg-type]

    def check_replicas(self) -> None:
        """Check that replicas agree, as `weft.check_replicas` does."""
        check_replicas(self)

    def train(self, mode: bool = True) -> "LayerSplit":
        for whole in self._whole:  # its own code may read `training`
            whole.train(mode)
        return super().train(mode)


class _Uncopied:
    """Call that runs the layers of a split; not copied, since a copy would run the layers of the original."""

    def __init__(self, call: Callable):
        self._call = call

    def __call__(self, *inputs, **named):
        return self._call(*inputs, **named)

    def __deepcopy__(self, memo):
        raise TypeError("a LayerSplit over ranks cannot be copied: copy the model first, and split both")


def _generate(split: LayerSplit, model: nn.Module, inputs: Sequence, options: Mapping) -> Any:
    """Run the model's `generate` with calls of the split for its own calls."""
    runs = False

    def through_stages(own: Callable, model: nn.Module, *inputs, **named):
        nonlocal runs
        if runs:  # by the split
            return own(*inputs, **named)
        runs = True
        try:
            with torch.random.fork_rng([]):  # a call draws a seed for its ranks; `generate` samples as without them
                return split(*inputs, **named)
        finally:
            runs = False

    chain = ForwardChain.of(model)
    chain.add("generate", through_stages)
    try:
        return model.generate(*inputs, **options)  # type: ignore[operator]
    finally:
        chain.remove("generate")


def _over_devices(model: nn.Module, devices: list[torch.device]) -> None:
    """Move every layer to its device, and its arguments in every call."""
    layers = [layer for layer in layers_of(model).values() if _tensors_of(layer)]
    for tensor in tensors_outside(model):
        tensor.data = tensor.data.to(devices[0])
    for layer, place in zip(layers, placed([_tensors_of(layer) for layer in layers], len(devices)), strict=True):
        layer.to(devices[place])
        layer.register_forward_pre_hook(_to(devices[place]), with_kwargs=True)


def _tensors_of(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


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
    """Keep this rank's layers; return the function that runs all layers."""
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
        (place, Stage(stage, number, len(runs)) if place == ranks.rank else None)  # None: on another rank
        for number, ((place, _), stage) in enumerate(zip(runs, stages, strict=True))
    ]
    own = [segment for _, segment in segments if segment is not None]
    hold(split, model, own)
    mark({parameter: {ranks.rank} for segment in own for parameter in segment.parameters()}, ranks)
    taken = [str(node.target) for node in chain.inputs]
    held = StageParams(split, (segment.stage for segment in own))
    settings = chain.settings  # `call` must not keep the chain, which has all layers

    def call(*inputs, **named):
        values = _in_order(taken, inputs, named)
        settings.check()
        held.renew(split)
        begun = begin("LayerSplit", sharing, values)
        for segment in own:
            segment.begin(*begun)
        return run(segments, values, ranks, device)

    return call


def _relayed(split: LayerSplit, model: nn.Module, ranks: Communicator, device: torch.device):
    """Keep this rank's layers of a model that cannot be cut; return the call of the model, which every rank runs."""
    owners = _owners(model, ranks.world_size)
    layers = layers_of(model)
    own = [layer for name, layer in layers.items() if owners.get(name, ranks.rank) == ranks.rank]
    outside = nn.ParameterList(x for x in tensors_outside(model) if isinstance(x, nn.Parameter))
    mark({parameter: {ranks.rank} for layer in own for parameter in layer.parameters()}, ranks)
    mark({parameter: set(range(ranks.world_size)) for parameter in outside}, ranks)
    others = nn.Module()
    for number, tensor in enumerate(tensors_outside(model)):
        if not isinstance(tensor, nn.Parameter):
            others.register_buffer(str(number), tensor)
    hold(split, model, [*own, outside, others])
    relay = Relay(ranks, device)
    relay.take(model, owners)
    split._whole = (model,)
    held = StageParams(split, [model])

    def call(*inputs, **named):
        held.renew(split)
        return relay.run(model, inputs, named)

    return call


def _owners(model: nn.Module, ranks: int) -> dict[str, int]:
    """Return the rank of each layer that has parameters.

    Raises:
        ValueError: more ranks than layers, or a layer's parameter is also used outside of layers.
    """
    layers = {name: layer for name, layer in layers_of(model).items() if any(True for _ in layer.parameters())}
    outside = {id(tensor) for tensor in tensors_outside(model)}
    for name, layer in layers.items():
        if any(id(parameter) in outside for parameter in layer.parameters()):
            raise ValueError(
                f"LayerSplit: a parameter of {name} is also used outside of any layer, which every rank runs: make "
                "that use a module of its own"
            )
    places = placed([_tensors_of(layer) for layer in layers.values()], ranks)
    return dict(zip(layers, places, strict=True))


def _in_order(names: Sequence[str], inputs: Sequence, named: Mapping) -> list:
    """Return a call's arguments in the order of `names`.

    Raises:
        TypeError: the model was cut for other arguments; on every rank with this call.
    """
    left = names[len(inputs) :]
    if len(inputs) > len(names) or set(named) != set(left):
        given = f"{len(inputs)} by their place and {', '.join(named) or 'none'} by name"
        raise TypeError(
            f"LayerSplit: the model was cut for the arguments {', '.join(names)}, and got {given}: name further ones "
            "in LayerSplit(arguments=[...])"
        )
    return [*inputs, *(named[name] for name in left)]


def check_layers(model: nn.Module, ranks: int) -> None:
    """Raise ValueError if the model has fewer layers than ranks, or none."""
    try:
        _places_of(chain_of("LayerSplit", model, None, None), ranks)
    except UncuttableError:
        _owners(model, ranks)


def _places_of(chain: Chain, places: int) -> list[int]:
    return placed([[*layer.parameters, *layer.buffers] for layer in chain.layers], places)
