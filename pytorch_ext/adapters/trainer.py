"""transformers' Trainer on a model that several ranks hold together.

By default accelerate treats the ranks of a tensor-parallel model as data-parallel: it gives each another batch, and
puts DistributedDataParallel around their different weights. Here each rank's Trainer runs as a single process, and all
of them do the same. trainer_loop.py makes Trainer save and resume the whole model, and share batches over dp. Options
that would give wrong results are refused.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from weft.adapters import need
from weft.pipeline import Pipeline

# Environment variables by which accelerate detects other processes.
_LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_DIMENSIONS = "dp", "cp", "tp"
_SHARDING = "would shard what is split already: call Trainer without it"
# Options of TrainingArguments that do not work with shards: the value that is possible, and the way out of others.
_REFUSED: dict[str, tuple[Any, str]] = {
    "push_to_hub": (False, "has not been tried: upload the folder that is saved"),
    "fsdp": (None, 'is weft.parallelize(model, mesh["dp", "cp", "tp"], zero=3) here: call Trainer without it'),
    "deepspeed": (None, _SHARDING),
    "parallelism_config": (None, _SHARDING),
    "use_liger_kernel": (False, "would compute with this rank's shards as if they were whole: call Trainer without it"),
    "auto_find_batch_size": (False, "could choose another batch on each rank: give per_device_train_batch_size"),
}


def settings(
    mesh: DeviceMesh, *, arguments: type | None = None, pipeline: Pipeline | None = None, **options
) -> dict[str, Any]:
    """Return the arguments of a Trainer except its model and data: `args` and `callbacks`.

        model = weft.parallelize(model, mesh["cp", "tp"])  # or with zero=3, on a mesh with dp
        trainer = Trainer(model, train_dataset=data, **settings(mesh, output_dir="out", max_steps=1000))
        trainer.train(resume_from_checkpoint=True)

    With stages Trainer gets the model, which has this rank's part after it was cut, and here the pipeline:

        pipe = weft.Pipeline(model, mesh, microbatches=4, reduction="sum", example=batch)
        trainer = Trainer(model, train_dataset=data, **settings(mesh, pipeline=pipe, output_dir="out"))

    Args:
        mesh: a mesh of weft.init_mesh with tp, cp and dp. Every rank reads the same batches, of
            `per_device_train_batch_size` rows in all; ranks along dp share the rows.
        arguments: the class of the arguments, TrainingArguments or derived from it (TRL's SFTConfig).
        pipeline: of a mesh with pp, dp and tp; the model computes its loss, and reduction is "sum". Every batch must be
            a multiple of dp times its micro-batches (`dataloader_drop_last`). Evaluation gives losses alone.
        options: options of that class.

    Returns:
        "args", an object of that class, and "callbacks", a list of one callback.

    Raises:
        ValueError: the mesh has pp without a pipeline or beside cp, the pipeline's loss is another one, an option
            does not work with shards, or this rank sees several GPUs.
        ImportError: transformers is older than 5.23, or accelerate is older than 1.15.
    """
    need("weft.adapters.trainer", "transformers", "5.23")
    need("weft.adapters.trainer", "accelerate", "1.15")
    from transformers import TrainingArguments

    from weft.adapters.split_model import SplitModel
    from weft.adapters.trainer_loop import register

    _check_mesh(mesh, pipeline)
    _check_options(options, mesh.device_type)
    register()
    on_cpu = mesh.device_type == "cpu"
    configured = {**(options.pop("accelerator_config", None) or {}), "use_configured_state": True}
    _be_alone(on_cpu)
    made = (arguments or TrainingArguments)(**{**options, "use_cpu": on_cpu, "accelerator_config": configured})
    return {"args": made, "callbacks": [SplitModel(mesh, pipeline)]}


def _check_mesh(mesh: DeviceMesh, pipeline: Pipeline | None) -> None:
    names, possible = mesh.mesh_dim_names or (), _DIMENSIONS if pipeline is None else ("pp", "dp", "tp")
    large = [f"{name}={mesh[name].size()}" for name in names if mesh[name].size() > 1 and name not in possible]
    if large or not names:
        raise ValueError(
            f"settings: the mesh has {', '.join(large) or 'no names'}; it is for {', '.join(possible[:-1])} and "
            f"{possible[-1]}. Stages (pp) need settings(mesh, pipeline=weft.Pipeline(...)), and no cp"
        )
    if pipeline is not None and not (pipeline.reduction == "sum" and pipeline.own_loss):
        raise ValueError(
            "settings: Trainer divides the loss by the labels of a whole batch: give the pipeline no loss of its own, "
            'and reduction="sum"'
        )
    gpus = 0 if mesh.device_type == "cpu" else torch.cuda.device_count()
    if gpus > 1:
        raise ValueError(
            f"settings: this rank sees {gpus} GPUs, and Trainer would use the first, or all: start each rank with "
            "CUDA_VISIBLE_DEVICES set to its own"
        )


def _check_options(options: Mapping[str, Any], device_type: str) -> None:
    """Raise ValueError for an option that does not work with shards."""
    on_cpu = device_type == "cpu"
    device = {"use_cpu": (on_cpu, f"is not possible with a mesh of {device_type}: leave it out")}
    for name, (value, why) in {**device, **_REFUSED}.items():
        given = options.get(name, value)
        if given != value and (given or value):
            raise ValueError(f"settings: {name}={given!r} {why}")


def _be_alone(on_cpu: bool) -> None:
    """Set accelerate's state to a single process. Only the first rank logs."""
    from accelerate.state import AcceleratorState, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    with _unlaunched():
        state = PartialState(cpu=on_cpu)
    state.process_index = state.local_process_index = torch.distributed.get_rank()


@contextmanager
def _unlaunched() -> Iterator[None]:
    hidden = {name: os.environ.pop(name) for name in _LAUNCHED if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)
