"""LayerSplit: a model's layers on several devices, one after the other: the plain way to hold what does not fit on one.

One device computes at a time. `weft.Pipeline` is what makes them all compute; this needs no micro-batches, no schedule
and no loss of its own, and a model need not be written for it.
"""

from collections.abc import Callable, Sequence
from itertools import groupby

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map

from weft.comm.communicator import communicator
from weft.stages.chain import chain_of, opened_in
from weft.stages.holding import hold
from weft.stages.placement import placed
from weft.stages.route import run


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

    Args:
        model: the same on every rank.
        devices_or_mesh: devices, one of which may be named several times; or a mesh with "pp", or of one dimension.
        layers, arguments: across ranks, as of `weft.Pipeline`.

    Raises:
        ValueError: more devices or ranks than layers; across ranks, a forward that cannot be cut.
    """

    def __init__(
        self,
        model: nn.Module,
        devices_or_mesh: Sequence[str | torch.device] | DeviceMesh,
        *,
        layers: Sequence[str] | None = None,
        arguments: Sequence[str] | None = None,
    ):
        super().__init__()
        self._whole: tuple[nn.Module, ...] = ()  # not registered: its children are
        if isinstance(devices_or_mesh, DeviceMesh):
            self._call: Callable = _across_ranks(self, model, devices_or_mesh, layers, arguments)
        else:
            if layers is not None or arguments is not None:
                raise ValueError(
                    "LayerSplit: layers and arguments are for a mesh; over devices the model runs as it is"
                )
            _over_devices(model, [torch.device(one) for one in devices_or_mesh])
            hold(self, model, [model])
            self._whole = (model,)
            self._call = model.__call__

    def forward(self, *inputs, **options):
        return self._call(*inputs, **options)

    def train(self, mode: bool = True):
        for whole in self._whole:  # whose own code may ask
            whole.train(mode)
        return super().train(mode)


def _over_devices(model: nn.Module, devices: list[torch.device]) -> None:
    """Moves every layer to its device, and what it is called with to it."""
    opened = opened_in(model)
    layers: dict[int, nn.Module] = {}
    for name, module in model.named_modules():
        if name not in opened and name.rpartition(".")[0] in opened:
            layers.setdefault(id(module), module)
    held = [[*layer.parameters(), *layer.buffers()] for layer in layers.values()]
    heavy = [layer for layer, tensors in zip(layers.values(), held, strict=True) if tensors]
    places = placed([tensors for tensors in held if tensors], len(devices))
    for name in opened:  # parameters outside of any layer, used by the model's own code
        module = model.get_submodule(name)
        for tensor in [*module._parameters.values(), *module._buffers.values()]:
            if tensor is not None:
                tensor.data = tensor.data.to(devices[0])
    for layer, place in zip(heavy, places, strict=True):
        layer.to(devices[place])
        layer.register_forward_pre_hook(_to(devices[place]), with_kwargs=True)


def _to(device: torch.device):
    def move(layer, inputs, options):
        return tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, (inputs, options))

    return move


def _across_ranks(split: nn.Module, model: nn.Module, mesh: DeviceMesh, layers, arguments):
    """Keeps this rank's layers; returns what runs all of them."""
    names = mesh.mesh_dim_names or ()
    if mesh.ndim > 1 and "pp" not in names:
        raise ValueError(
            f'LayerSplit: the mesh has the dimensions {names}; it needs a "pp", or to be one dimension alone'
        )
    ranks = communicator(mesh["pp"] if mesh.ndim > 1 else mesh)
    device = torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")
    chain = chain_of("LayerSplit", model, layers, arguments)
    places = placed([[*layer.parameters, *layer.buffers] for layer in chain.layers], ranks.world)
    runs = [(place, len(list(layers_there))) for place, layers_there in groupby(places)]
    segments = [
        (place, segment if place == ranks.rank else None)  # what others hold is theirs
        for (place, _), segment in zip(runs, chain.stages([size for _, size in runs]), strict=True)
    ]
    hold(split, model, [segment for _, segment in segments if segment is not None])

    def call(*inputs):
        output = run(segments, inputs, ranks, device)
        return output[0] if len(output) == 1 else output

    return call
