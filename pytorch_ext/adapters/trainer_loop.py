"""Methods of transformers' Trainer that differ where several ranks hold the model: checkpoints, and batches over dp.

Trainer has no hooks for these, so `register` wraps its methods. Every other Trainer runs as before.

    checkpoint-100/model.safetensors, config.json    the unsplit model; an adapter's files for a PeftModel
    checkpoint-100/trainer_state.json                as Trainer writes it
    checkpoint-100/training/                         optimizer, scheduler and random numbers, of weft.save_checkpoint
"""

import base64
import functools
import random
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import Trainer

from weft.adapters.split_model import has_adapters, mark_of
from weft.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from weft.checkpoint.on_all_ranks import ranks_of, together
from weft.checkpoint.safetensors_io import source_at
from weft.comm.communicator import Communicator
from weft.data_parallel.data_parallel import DataParallel
from weft.pipeline import Pipeline
from weft.rng import own_random_numbers

_TRAINING = "training"
_IGNORED_LABEL = -100  # transformers' losses leave it out of their means


@functools.cache
def register() -> None:
    """Let every Trainer with the callback of split_model.py save, resume and share batches."""
    for name, function in _METHODS.items():
        setattr(Trainer, name, _where_marked(getattr(Trainer, name), function))


def _where_marked(original: Callable, function: Callable) -> Callable:
    @functools.wraps(original)
    def method(self, *args, **kwargs):
        if mark_of(self) is None:
            return original(self, *args, **kwargs)
        return function(functools.partial(original, self), self, *args, **kwargs)

    return method


# Checkpoints


def _save_all(plain: Callable, trainer: Any, model: nn.Module, trial: Any) -> None:
    """Write a checkpoint and remove old ones. If the first rank cannot write, every rank raises."""
    together(ranks_of(None), lambda: plain(model, trial))


def _save_model(plain: Callable, trainer: Any, output_dir: str | None = None, state_dict=None) -> None:
    folder = output_dir or trainer.args.output_dir
    trainer.model.save_pretrained(folder)  # of the whole model, from the first rank

    def write() -> None:
        if dist.get_rank() == 0:
            processor = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
            if processor is not None:
                processor.save_pretrained(folder)
            torch.save(trainer.args, Path(folder) / "training_args.bin")

    together(ranks_of(None), write)


def _save_training(plain: Callable, trainer: Any, output_dir: str) -> None:
    scaler = getattr(trainer.accelerator, "scaler", None)
    extras = {
        "scheduler": trainer.lr_scheduler.state_dict(),
        "scaler": None if scaler is None else scaler.state_dict(),
        "random": _random_state(),
    }
    folder, step = Path(output_dir) / _TRAINING, trainer.state.global_step
    save_checkpoint(_held(trainer), _unwrapped(trainer.optimizer), folder, step=step, extras=extras, weights=False)


def _load_model(plain: Callable, trainer: Any, folder: str, model: nn.Module | None = None) -> None:
    if has_adapters(trainer.model if model is None else model):
        plain(folder, model)
    else:
        load_checkpoint(_held(trainer, model), None, folder, cast=True)


def _load_best(plain: Callable, trainer: Any) -> None:
    _load_model(lambda *_: plain(), trainer, trainer.state.best_model_checkpoint)


def _load_training(plain: Callable, trainer: Any, checkpoint: str | None) -> None:
    if checkpoint is None:
        return
    folder = Path(checkpoint) / _TRAINING
    if not folder.exists():
        raise CheckpointError(
            f"{checkpoint} has no folder {_TRAINING!r}, so it has no optimizer's state for a split model: it was saved "
            "with save_only_model, or by a Trainer without weft.adapters.trainer.settings. Load its model "
            "(weft.from_pretrained) and train without resume_from_checkpoint"
        )
    loaded = load_checkpoint(_held(trainer), _unwrapped(trainer.optimizer), folder, weights=False)
    trainer.lr_scheduler.load_state_dict(loaded.extras["scheduler"])
    if loaded.extras["scaler"] is not None:
        trainer.accelerator.scaler.load_state_dict(loaded.extras["scaler"])
    _restore_random_state(loaded.extras["random"])


def _load_random(plain: Callable, trainer: Any, checkpoint: str | None) -> None:
    if checkpoint is not None:
        _restore_random_state(source_at(Path(checkpoint) / _TRAINING).about["extras"]["random"])


def _nothing(plain: Callable, trainer: Any, *_) -> None:
    """Stand in for a method whose work _save_training and _load_training do."""


def _unwrapped(optimizer):
    return getattr(optimizer, "optimizer", optimizer)  # accelerate's


def _random_state() -> dict[str, Any]:
    """Return the states of the generators on the host, which are the same on all ranks, as JSON takes them."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "torch": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
    }


def _restore_random_state(state: Mapping[str, Any]) -> None:
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(state["torch"])), dtype=torch.uint8))


# Batches over dp. Every rank's Trainer gets the whole batch, as one process does, and runs its own rows.


def _replicas_of(trainer: Any) -> Communicator | None:
    mark = mark_of(trainer)
    return None if mark is None else mark.replicas


def _wrap(plain: Callable, trainer: Any, model: nn.Module, training: bool = True, dataloader=None) -> nn.Module:
    """Let the model's backward reduce gradients over dp, and each step of the trainer take this rank's rows.

    The model stays the object that it is: a trainer's own code looks at its class, its name and its signature.
    """
    mark, model = mark_of(trainer), plain(model, training, dataloader)
    if mark is None or mark.replicas is None or mark.pipeline is not None or not training:
        return model
    if mark.reducing is None or mark.reducing.module is not model:
        mark.reducing = None
        if not isinstance(model, FSDPModule):  # by parallelize(..., zero=3), which reduces gradients itself
            unused = "zero" if trainer.args.ddp_find_unused_parameters else "error"
            group = mark.replicas.group
            mark.reducing = DataParallel(model, group=group, average=False, unused_parameters=unused)
            mark.reducing.follow()
    if "training_step" not in vars(trainer):  # also that of a subclass
        reference, plain_step = weakref.ref(trainer), type(trainer).training_step
        trainer.training_step = lambda *args, **kwargs: _train_on_part(plain_step, reference(), mark, *args, **kwargs)
    return model


def _train_on_part(
    plain: Callable, trainer: Any, mark: Any, model: nn.Module, inputs: Mapping[str, Any], num_items_in_batch=None
) -> torch.Tensor:
    """Run forward and backward on this rank's rows, and return the loss of the whole batch.

    Each rank's loss counts by its part of the labels. One that is divided by the labels of all ranks is divided by
    those of this one instead, so that it may be a mean or not: a trainer's own loss does not say.
    """
    replicas, reducing = mark.replicas, mark.reducing
    shifted = getattr(trainer, "_loss_shifts_labels", False)
    part, weight = part_of_batch(inputs, replicas.rank, replicas.world_size, shifted)
    if num_items_in_batch is not None and weight:
        num_items_in_batch = num_items_in_batch * weight
    backward, backwards = trainer.accelerator.backward, 0
    of_gradients = weight if reducing is not None else weight * replicas.world_size  # zero=3 averages them

    def weighed(loss: torch.Tensor, **options: Any) -> None:
        nonlocal backwards
        backwards += 1
        backward(loss * of_gradients, **options)

    trainer.accelerator.backward = weighed
    try:
        with (
            own_random_numbers(replicas, trainer.args.device),
            nullcontext() if reducing is None or trainer.accelerator.sync_gradients else reducing.no_sync(),
        ):
            loss = plain(trainer, model, part, num_items_in_batch)
    finally:
        del trainer.accelerator.backward
    if not backwards:
        raise ValueError(
            f"Trainer over dp={replicas.world_size}: {type(trainer).__name__}.training_step must call "
            "self.accelerator.backward(loss), where the loss of this rank's rows gets its weight"
        )
    return replicas.all_reduce_(loss * weight)


def _train_in_stages(plain: Callable, trainer: Any, model, inputs, num_items_in_batch=None) -> torch.Tensor:
    """Run a step of the pipeline, and return the loss of the whole batch."""
    if (pipe := _pipeline_of(trainer)) is None:
        return plain(model, inputs, num_items_in_batch)
    replicas = _replicas_of(trainer)
    pipe.train()
    with nullcontext() if replicas is None else own_random_numbers(replicas, trainer.args.device):
        return pipe.step(_staged(trainer, inputs, num_items_in_batch))


def _evaluate(plain: Callable, trainer: Any, model, inputs, prediction_loss_only, ignore_keys=None):
    pipe = _pipeline_of(trainer)
    if pipe is None:
        return plain(model, inputs, prediction_loss_only, ignore_keys)
    if not prediction_loss_only:
        raise ValueError("Trainer on a pipeline evaluates losses alone: no predict and no compute_metrics")
    pipe.eval()
    items = trainer._get_num_items_in_batch([inputs], trainer.args.device)
    return pipe.evaluate(_staged(trainer, inputs, items)), None, None


def _pipeline_of(trainer: Any) -> Pipeline | None:
    mark = mark_of(trainer)
    return None if mark is None else mark.pipeline


def _held(trainer: Any, model: nn.Module | None = None) -> nn.Module:
    """Return what holds this rank's parameters under the names of the whole model."""
    candidates = _pipeline_of(trainer), model, trainer.model
    return next(one for one in candidates if one is not None)


def _staged(trainer: Any, inputs: Mapping[str, Any], num_items: torch.Tensor | int | None) -> dict[str, Any]:
    """Return this rank's rows of a batch for a pipeline: each micro-batch divides its sum by the labels of all."""
    own = not type(trainer).compute_loss.__module__.startswith(("transformers.", "trl."))  # TRL's adds metrics alone
    if num_items is None or own or trainer.compute_loss_func is not None or trainer.label_smoother is not None:
        raise ValueError(
            "Trainer on a pipeline needs labels, and a model that takes num_items_in_batch for its own loss; "
            f"{type(trainer.model).__name__} does not, or there is a compute_loss, a compute_loss_func or a "
            "label_smoothing_factor"
        )
    inputs = trainer._prepare_inputs(inputs)
    if (replicas := _replicas_of(trainer)) is not None:
        rows = len(inputs["labels"])
        if rows % replicas.world_size:
            raise ValueError(
                f"Trainer on a pipeline: a batch of {rows} rows has no equal parts for dp={replicas.world_size}; "
                "set dataloader_drop_last, and a batch size that dp and the micro-batches divide"
            )
        inputs, _ = part_of_batch(inputs, replicas.rank, replicas.world_size)
    return {**inputs, "num_items_in_batch": int(num_items)}


def part_of_batch(
    inputs: Mapping[str, Any], rank: int, ranks: int, shifted: bool = False
) -> tuple[dict[str, Any], float]:
    """Return this rank's rows of a batch, and their part of the labels that count, or of the rows without labels.

    Args:
        inputs: the whole batch. The first dimension of each tensor is the rows'.
        rank: this rank.
        ranks: number of ranks that share the batch. A rank without a row or a label gets another's row, with weight 0.
        shifted: the loss compares a position with the label of the next, so that the first label of a row counts not.

    Raises:
        ValueError: the tensors have different first dimensions, or the batch has lists.
    """
    sizes = {name: list(x.shape) for name, x in inputs.items() if isinstance(x, torch.Tensor) and x.dim()}
    others = [name for name, x in inputs.items() if isinstance(x, list | tuple | dict)]
    if len({size[0] for size in sizes.values()}) != 1 or others:
        raise ValueError(
            f"Trainer over dp={ranks}: the rows of the batch are unknown: its tensors are {sizes}"
            f"{', and it has ' + ', '.join(others) if others else ''}. Give tensors whose first dimension is the "
            "number of rows, or a mesh without dp"
        )
    rows = next(iter(sizes.values()))[0]
    counts = torch.ones(rows, dtype=torch.int64)
    labels = inputs.get("shift_labels", inputs.get("labels"))
    if isinstance(labels, torch.Tensor) and not labels.is_floating_point():
        labels = labels[..., 1:] if shifted and "shift_labels" not in inputs else labels
        counts = (labels != _IGNORED_LABEL).view(rows, -1).sum(1).cpu()
    start, stop = (rows * edge // ranks for edge in (rank, rank + 1))
    own = slice(start, stop)
    if not counts[own].any():  # a mean over nothing is not a number
        own = slice(first := int(counts.argmax()), first + 1)
    weight = int(counts[start:stop].sum()) / max(1, int(counts.sum()))
    return {name: x[own] if name in sizes else x for name, x in inputs.items()}, weight


_METHODS: dict[str, Callable] = {
    "_save_checkpoint": _save_all,
    "_save": _save_model,
    "_save_optimizer_and_scheduler": _save_training,
    "_save_scaler": _nothing,
    "_save_rng_state": _nothing,
    "_load_from_checkpoint": _load_model,
    "_load_best_model": _load_best,
    "_load_optimizer_and_scheduler": _load_training,
    "_load_scaler": _nothing,
    "_load_rng_state": _load_random,
    "_wrap_model": _wrap,
    "training_step": _train_in_stages,
    "prediction_step": _evaluate,
}
