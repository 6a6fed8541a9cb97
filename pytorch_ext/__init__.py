"""weft: kernels and one-sided collectives that let a PyTorch user run one model on many devices.

Importing this package imports nothing else: names are resolved when they are first used, and the "weft" backend is
registered with torch.distributed as soon as somebody imports that.
"""

if __name__ != "weft":
    raise ImportError(
        f"this folder is the source of the package weft and was imported as {__name__!r}: install it "
        "(pip install -e .), import weft, and keep the repository's root off sys.path (PYTHONSAFEPATH=1)"
    )

import importlib
import sys
import types

from weft.comm.register import register_backend_when_torch_is_imported

_HOMES = {
    "weft._C": ["CommError", "RankLostError", "CollectiveMismatchError", "CollectiveTimeoutError"],
    "weft.build_info": ["build_info"],
    "weft.split": ["split_sizes"],
    "weft.shard": ["Shard", "shard_of"],
    "weft.mesh": ["init_mesh"],
    "weft.nn": [
        *("ParallelLinear", "ColumnParallelLinear", "RowParallelLinear", "ParallelEmbedding", "ParallelConv2d"),
    ],
    "weft.ops": ["parallel_cross_entropy"],
    "weft.ops.collectives": ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier"],
    "weft.ops.context_attention": ["context_attention"],
    "weft.ops.layout": ["shard_sequence", "unshard_sequence"],
    "weft.ops.attention_chunk": ["merge_attention"],
    "weft.comm.symmetric": ["empty_symmetric"],
    "weft.comm.device": ["check_waits"],
    "weft.parallelize": ["parallelize"],
    "weft.replicas": ["check_replicas"],
    "weft.data_parallel": ["DataParallel"],
    "weft.pipeline": ["Pipeline"],
    "weft.layer_split": ["LayerSplit"],
    "weft.gradient_norm": ["clip_grad_norm_"],
    "weft.dtensors": ["as_dtensors"],
    "weft.full_state_dict": ["full_state_dict"],
    "weft.gradients.hooks": ["ddp_hook", "HookState", "FSDPReduceScatter", "FSDPAllGather"],
    "weft.splitting.loading": ["load_safetensors"],
    "weft.checkpoint": ["save_checkpoint", "load_checkpoint", "export_safetensors", "CheckpointError"],
    "weft.optim": ["LARS", "LAMB", "DiLoCo", "linear_scaling", "layerwise_groups"],
    "weft.explain": ["explain"],
    "weft.doctor": ["doctor"],
    "weft.planner": ["plan"],
    "weft.verify": ["verify", "causal_probe"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str):
    if name == "__version__":
        return importlib.import_module("weft._C").build["version"]
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'weft' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


class _Package(types.ModuleType):
    def __setattr__(self, name: str, value) -> None:
        """weft.explain is the function, also once somebody has imported the module of that name."""
        if isinstance(value, types.ModuleType) and _HOME_OF.get(name) == value.__name__:
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__():
    return [*globals(), *__all__]


register_backend_when_torch_is_imported()
