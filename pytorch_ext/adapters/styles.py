"""ParallelStyles for torch.distributed.tensor.parallel.parallelize_module that make weft's layers, as in torchtitan.

parallelize_module(model, mesh["tp"], {"layers.*.up": ColumnParallel(), "layers.*.down": RowParallel()})
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from weft.adapters import need
from weft.comm.communicator import Communicator
from weft.comm.registry import communicator
from weft.nn import sum_gradients
from weft.sharding.shard import shard_of
from weft.tensor_parallel.styles import part_of
from weft.tensor_parallel.ties import keep_parameters

need("weft.adapters.styles", "torch", "2.11")


class _SplitInPlace(ParallelStyle):
    """Style that changes the layer in place, as parallelize_module drops the module that a style returns for a part."""

    style: str

    def __init__(self, **options):
        self.options = options

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        parameters = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
        held = {name: parameter.data for name, parameter in parameters.items()}
        try:
            for parameter in parameters.values():
                self._make_whole(parameter, communicator(device_mesh))
            part = part_of(type(module).__name__, module, {"style": self.style, **self.options}, device_mesh)
            for name, parameter in parameters.items():
                _check_tie(parameter, getattr(part, name), f"{type(self).__name__}: {name}")
        except Exception:
            for name, parameter in parameters.items():
                parameter.data = held[name]
            raise
        keep_parameters(module, part)
        vars(module).update(vars(part))
        module.__class__ = type(part)
        return module

    def _make_whole(self, parameter: nn.Parameter, ranks: Communicator) -> None:
        """Make a parameter whole: from the source rank, or from shards if an earlier split layer shares it."""
        shard = shard_of(parameter)
        if shard is not None:
            local = parameter.data
            parameter.data = local.new_empty(shard.global_shape) if local.is_meta else shard.gather(local)
        elif self.src_data_rank is not None and not parameter.is_meta:
            parameter.data = ranks.broadcast_(parameter.data.clone(), self.src_data_rank)


class ColumnParallel(_SplitInPlace):
    """Style for nn.Linear, nn.Conv2d or transformers' Conv1D, split by outputs.

    The weights are taken from the rank that parallelize_module's src_data_rank names.

    Args:
        options: those of `weft.ParallelLinear.from_linear` and its like.

    Raises:
        ValueError: parallelize_module raises this if a split layer shares the weight and cuts it in another way.
    """

    style = "column"


class RowParallel(_SplitInPlace):
    """Style for the same layers, split by inputs."""

    style = "row"


class VocabularyParallel(_SplitInPlace):
    """Style that makes an nn.Embedding a `weft.ParallelEmbedding`."""

    style = "vocabulary"


class SequenceParallel(ParallelStyle):
    """Style for modules between a RowParallel and a ColumnParallel with sequence_parallel; sums their gradients."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return sum_gradients(module, device_mesh)


def _check_tie(parameter: nn.Parameter, part: nn.Parameter, name: str) -> None:
    before = shard_of(parameter)
    if before is not None and before != shard_of(part):
        raise ValueError(
            f"{name} is shared with a layer that is split along dimension {before.dim} over "
            f"{before.communicator.world_size} ranks, and "
            "would be cut in another way here; split both along the same dimension, over the same ranks"
        )
