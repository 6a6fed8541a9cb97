"""LayerSplit: a model's layers on several devices, one after another, for a model that does not fit on one.

One device computes at a time; `weft.Pipeline` makes them all compute. LayerSplit needs no micro-batches, no schedule,
no loss and no change to the model.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from weft.arguments import check_module
from weft.comm.communicator import Communicator
from weft.comm.registry import communicator
from weft.context_parallel.region import agreed, share_in_stages, sharing_in
from weft.forward import ForwardChain
from weft.layer_lists import layers_of, tensors_outside
from weft.pipeline.balance import placed
from weft.pipeline.forward_cut import ForwardCut, cut_layers, device_of
from weft.pipeline.model_stage import outside_of_inference
from weft.pipeline.stage_params import HeldLayers, StageParams, hold, outside_of
from weft.pipeline.transfers import Transfers
from weft.pipeline.transformers_stages import refuse_records
from weft.pipeline.walk import walk
from weft.replicas import SameCalls, check_replicas
from weft.sharding.owners import mark


class LayerSplit(nn.Module):
    """The model with its layers spread over devices or ranks by memory; called like the model, with the same results.

        split = weft.LayerSplit(model, ["cuda:0", "cuda:1"])  # one process, several devices
        split = weft.LayerSplit(model, weft.init_mesh(pp=2))  # two ranks, each with its layers
        loss(split(inputs), targets).backward()

    Outputs are those of the plain model, bit for bit; gradients are, up to the order in which those of several uses of
    a value are added. Layers that share a parameter go to one place, so that it stays one; activations travel
    there and back. Parameters keep the model's names.

    In one process every layer runs on its device, and its arguments move there. Outputs stay on the device of the last
    layer: put targets on `output.device`. Any model works, also those of transformers.

    Across ranks, each rank keeps its own layers. Every rank calls with the same inputs and gets the whole output. Every
    rank must compute the same loss and call backward, which runs back through the ranks.

    Across ranks, every rank runs the model's own forward up to its last layer, and gets the values of other ranks that
    it needs. Random numbers are those of the first rank.

    Args:
        model: the same on every rank. Across ranks it is changed: it becomes this rank's part, without the parameters
            of other ranks.
        devices_or_mesh: devices, which may repeat; or a mesh with "pp", or of one dimension.
        checks: across ranks, as in `weft.Pipeline`.

    Raises:
        ValueError: more devices or ranks than layers.

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
        checks: str = "first",
    ):
        super().__init__()
        check_module("LayerSplit", model)
        self._whole = (model,)  # not registered: its children are
        if isinstance(devices_or_mesh, DeviceMesh):
            self._call: Callable = _AcrossRanks(self, model, devices_or_mesh)
            SameCalls({_along(devices_or_mesh): False}, checks).install(self, self)
        else:
            _over_devices(model, [torch.device(device) for device in devices_or_mesh])
            hold(self, model, [model])
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
        (model,) = self._whole
        if not hasattr(model, "generate"):
            raise TypeError("LayerSplit.generate: the model has no generate; those of transformers do")
        if not isinstance(self._call, _AcrossRanks):
            return model.generate(*inputs, **options)  # type: ignore[operator]
        return _generate(self._call, model, inputs, {"use_cache": False, **options})

    def check_replicas(self) -> None:
        """Check that replicas agree, as `weft.check_replicas` does."""
        check_replicas(self)

    def train(self, mode: bool = True) -> "LayerSplit":
        for whole in self._whole:  # its own code may read `training`
            whole.train(mode)
        return super().train(mode)


def _generate(call: "_AcrossRanks", model: nn.Module, inputs: Sequence, options: Mapping) -> Any:
    """Run the model's `generate` with calls through the stages for its own calls, and for those of its encoder."""

    def through_stages(own: Callable, part: nn.Module, *inputs, **named):
        if call.cut.run is not None:  # by the stages
            return own(*inputs, **named)
        with torch.random.fork_rng([]):  # a call draws a seed for its ranks; `generate` samples as without them
            return call.run(part, inputs, named)

    pair = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    chains = [ForwardChain.of(part) for part in ([model, model.get_encoder()] if pair else [model])]  # type: ignore[operator]
    try:
        for chain in chains:
            chain.add("generate", through_stages)
        return model.generate(*inputs, **options)  # type: ignore[operator]
    finally:
        for chain in chains:
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


class _LayersByRank(ForwardCut):
    """A model each of whose layers is on one rank; a stage ends where the forward calls a layer of another rank.

    Args:
        owners: the rank of each layer.
    """

    def __init__(self, model: nn.Module, device: torch.device, owners: Mapping[str, int]):
        super().__init__("LayerSplit", model, device, {name: model.get_submodule(name) for name in owners})
        self.owners = owners

    def stage_of_new(self, name: str, running: int) -> int:
        return running + (self.owners[name] != self.rank_of(running))

    def rank_of(self, stage: int) -> int:
        # The first rank begins, even if the first layer is on another one.
        return self.owners[self.names[self.stages.index(stage)]] if stage in self.stages else 0


class _AcrossRanks:
    """Call of a model whose layers are on several ranks."""

    def __init__(self, split: LayerSplit, model: nn.Module, mesh: DeviceMesh):
        self.ranks, self.split, self.model = _along(mesh), split, model
        self.device = device_of(mesh)
        self.sharing = sharing_in(model).get("")
        share_in_stages(split, self.sharing)
        owners = _owners(model, self.ranks.world_size)
        self.cut = cut = _LayersByRank(model, self.device, owners)
        self.outside = outside_of(cut)
        own = HeldLayers([cut.layers[name] for name, rank in owners.items() if rank == self.ranks.rank], self.outside)
        self.held = StageParams(split, cut, [own])
        everywhere = set(range(self.ranks.world_size))
        mark(
            dict.fromkeys(own.parameters(), everywhere) | {x: {self.ranks.rank} for x in own.layers.parameters()},
            self.ranks,
        )

    def __call__(self, *inputs, **named):
        return self.run(self.model, inputs, named)

    def run(self, model: nn.Module, inputs: Sequence, named: Mapping) -> Any:
        """Run the forward of the model, or of a part of it."""
        with outside_of_inference((tuple(inputs), dict(named))) as call:
            return self._run(model, *call)

    def _run(self, model: nn.Module, inputs: tuple, named: dict) -> Any:
        refuse_records(self.cut.of_transformers, named)
        self.held.renew()
        cut, ranks = self.cut, self.ranks
        cut.names, cut.stages, cut.runs = [], [], 0
        if self.sharing is not None:
            cut.shared = agreed("LayerSplit", self.sharing, (inputs, named))
        own = torch.randint(2**62, (1,)) if cut.shared is None else torch.tensor([cut.shared.seed])
        seed = int(ranks.broadcast_(own.to(ranks.device_of_numbers(self.device)), 0))
        transfers = Transfers(ranks, self.device)
        with self._entered(transfers, (inputs, named)) as call:
            _, output = walk(cut, lambda run: cut.forward(run, call, seed, model), transfers)
        return transfers.shared(output, cut.rank_of(cut.stages[-1] if cut.stages else 0))

    @contextmanager
    def _entered(self, transfers: Transfers, call: tuple) -> Iterator[tuple]:
        """Give the arguments, and the parameters around the layers, the gradients of all ranks in backward.

        On every rank the arguments may come from its own parameters, or from another model that is split.
        """
        leaves, structure = tree_flatten(call)
        slots = [(module._parameters, name) for module, name in self.outside]
        given = [*leaves, *(parameters.get(name) for parameters, name in slots)]
        needing = {id(x): x for x in given if isinstance(x, torch.Tensor) and x.requires_grad}
        entered = dict(zip(needing, transfers.entered(list(needing.values())), strict=True))
        before = [
            (parameters, name, parameters[name]) for parameters, name in slots if id(parameters.get(name)) in entered
        ]
        try:
            for parameters, name, x in before:
                parameters[name] = entered[id(x)]  # type: ignore[assignment]
            yield tree_unflatten([entered.get(id(x), x) for x in leaves], structure)
        finally:
            for parameters, name, x in before:
                parameters[name] = x

    def __deepcopy__(self, memo):
        raise TypeError("a LayerSplit over ranks cannot be copied: copy the model first, and split both")


def _owners(model: nn.Module, ranks: int) -> dict[str, int]:
    """Return the rank of each layer that has parameters.

    Raises:
        ValueError: more ranks than layers, or a layer's parameter is also used outside of layers.
    """
    layers = cut_layers(model)
    outside = {id(tensor) for tensor in tensors_outside(model)}
    for name, layer in layers.items():
        if any(id(parameter) in outside for parameter in layer.parameters()):
            raise ValueError(
                f"LayerSplit: a parameter of {name} is also used outside of any layer, which every rank runs: make "
                "that use a module of its own"
            )
    places = placed([_tensors_of(layer) for layer in layers.values()], ranks)
    return dict(zip(layers, places, strict=True))


def check_layers(model: nn.Module, ranks: int) -> None:
    """Raise ValueError if the model has fewer layers than ranks, or none."""
    _owners(model, ranks)
