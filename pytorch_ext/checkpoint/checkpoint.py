"""Checkpoints that load on any other mesh: safetensors files, and a manifest that is replaced at once.

    path/manifest.json                         the files, checksums, where each tensor's boxes are, the step
    path/weft-<id>/model-00003.safetensors     rank 3's share of the model, under the plain model's names
    path/weft-<id>/training-00003.safetensors  its share of the optimizers' state, and its random numbers

A save writes to a new folder. Once every rank's files are on the disk, rank 0 replaces the manifest, and only then
removes the files of the previous save. So there is one whole checkpoint at any moment, also after a kill.
"""

import json
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from weft.arguments import check_module
from weft.checkpoint import contents, safetensors_io, save_plan, validation
from weft.checkpoint.boxes import TensorPart
from weft.checkpoint.contents import HeldTensor, Optimizers, Tensors
from weft.checkpoint.on_all_ranks import CheckpointError, ranks_of, together
from weft.checkpoint.safetensors_io import Files, Source
from weft.comm.purpose import calls_for
from weft.comm.registry import Group
from weft.metadata import metadata
from weft.rng import restore_rng_state, rng_states

__all__ = ["CheckpointError", "Loaded", "export_safetensors", "load_checkpoint", "save_checkpoint"]

_DATA = "weft-"


@dataclass(frozen=True)
class Loaded:
    """The contents of a checkpoint that are not tensors.

    Attributes:
        step, extras: as they were given to save_checkpoint; 0 and {} of plain safetensors files.
        random_numbers: True if torch's generators continue as on this rank when it saved. That needs an optimizer and
            the same number of ranks; a model made with `invariant` continues with rank 0's on any number.
    """

    step: int
    extras: dict
    random_numbers: bool


@calls_for("weft.save_checkpoint, which every rank calls")
def save_checkpoint(
    model: nn.Module,
    optimizer: Optimizers,
    path: str | Path,
    *,
    step: int = 0,
    extras: Mapping[str, Any] | None = None,
    group: Group = None,
    check_replicas: bool = True,
    weights: bool = True,
) -> None:
    """Save the model and its training under `path`, in place of an earlier save there. A collective call.

        weft.save_checkpoint(model, optimizer, "run/latest", step=step, extras={"schedule": schedule.state_dict()})

    One rank writes each replicated tensor. When this returns, all files are on the disk. Until then the earlier save
    is untouched. Every rank must reach the path (a shared file system).

    Args:
        model: this rank's part of the model, wrapped (weft.DataParallel, torch's DDP, torch.compile) or not.
        optimizer: an optimizer, a sequence of them, or None. A sharded optimizer (`DataParallel.optimizer`) is saved
            like any other.
        path: a folder, created if it does not exist. Use a separate folder for each checkpoint that you keep.
        step: number of the step to continue from.
        extras: further values of rank 0, stored as JSON.
        group: the ranks that hold the model together. None is the default group, or this process if there is none.
            Workers that differ for a while (weft.DiLoCo) save separately, each with group=mesh["tp"] and its own path.
        check_replicas: compare replicated tensors over their ranks, at the cost of reading all of them.
        weights: store the model. False stores the training alone, beside weights in files of another format.

    Raises:
        CheckpointError: a file cannot be written; ranks have different values of a replicated tensor; the ranks do not
            hold all of a tensor.
        ValueError, TypeError: a value cannot be stored; the optimizer has other parameters than the model.
        RankLostError: a rank was lost. Either the earlier save or this one can be loaded.
        All but RankLostError have the same text on every rank.

    Examples:
        >>> model = nn.Linear(4, 4)
        >>> weft.save_checkpoint(weft.DataParallel(model), None, path, step=100)
        >>> weft.load_checkpoint(model, None, path).step
        100
    """
    check_module("save_checkpoint", model)
    ranks, folder = ranks_of(group), Path(path)
    here: dict[str, dict[str, HeldTensor]] = {}

    def describe():
        sections, states = contents.of_training(model, optimizer, weights)
        here.update(sections)
        numbers = {_random_name(ranks.rank, kind): state for kind, state in rng_states(model).items()}
        here["training"] |= {name: contents.whole(name, state) for name, state in numbers.items()}
        json.dumps([step, extras])  # raises TypeError before anything is written
        return secrets.token_hex(8), step, save_plan.described(here), states

    (identity, *_), steps, described, states = zip(*together(ranks, describe), strict=True)
    data = f"{_DATA}{identity}"
    if len(set(steps)) > 1:
        raise CheckpointError(f"the ranks save different steps: {', '.join(map(str, steps))}")
    outlines, owner = save_plan.owners(described, ranks.global_ranks)
    about = {
        "step": step,
        "extras": dict(extras or {}),
        "ranks": ranks.world_size,
        "optimizers": contents.merged(states),
    }

    def commit() -> None:
        if ranks.rank == 0:
            sizes = save_plan.check_seen(folder, written)
            stored = save_plan.entries(written, outlines)
            safetensors_io.sync_folder(folder.resolve().parent)
            safetensors_io.sync_folder(folder)
            safetensors_io.write_manifest(folder, {"id": identity, "files": sizes, "about": about, **stored})
            for other in folder.glob(f"{_DATA}{'[0-9a-f]' * len(identity)}"):
                if other.name != data:
                    shutil.rmtree(other, ignore_errors=True)

    try:
        written = together(ranks, lambda: save_plan.write_share(folder, data, ranks.rank, here, owner, check_replicas))
        save_plan.check_same(written, owner, ranks.global_ranks)
        together(ranks, commit)
    except (CheckpointError, ValueError, TypeError):  # on every rank
        if not safetensors_io.is_manifest_of(folder, identity):
            shutil.rmtree(folder / data, ignore_errors=True)
        raise


@calls_for("weft.load_checkpoint, which every rank calls")
def load_checkpoint(
    model: nn.Module,
    optimizer: Optimizers,
    path: str | Path,
    *,
    strict: bool = True,
    cast: bool = False,
    group: Group = None,
    weights: bool = True,
) -> Loaded:
    """Load the model and its optimizer from `path`. A collective call.

    The mesh may differ from the mesh of the save: each rank reads and holds only the slices that it needs. The ranks
    first share the check of all checksums. After an error the model and the optimizer are unchanged.

    Args:
        model, optimizer, group: as for save_checkpoint. None for an optimizer loads the model alone.
        path: the path of a save_checkpoint. Or plain safetensors: a file, or a folder with model.safetensors or
            model.safetensors.index.json; these have no checksums.
        strict: raise for tensors that only the model or only the checkpoint has.
        cast: convert stored tensors to the model's types. False raises for another type.
        weights: load the model. False loads the training alone.

    Returns:
        A Loaded, with the step and the extras of the save.

    Raises:
        CheckpointError: a file is missing, torn or altered; the message names it. Or the checkpoint is of another model
            or optimizer; the message lists all differences.
        ValueError, TypeError: as in save_checkpoint.
        All of these have the same text on every rank.

    Examples:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
        >>> weft.save_checkpoint(weft.parallelize(model, weft.init_mesh(tp=2)), None, path, step=100)
        >>> whole = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
        >>> weft.load_checkpoint(whole, None, path).step
        100
    """
    check_module("load_checkpoint", model)
    ranks, folder = ranks_of(group), Path(path)
    here: list[tuple[Source, Tensors, list[Optimizer]]] = []

    def compare():
        source = safetensors_io.source_at(folder)
        tensors, optimizers = contents.of_model(model, source.model), contents.optimizers_in(optimizer)
        contents.check_optimizers(optimizers, source.optimizers, tensors.name_of)
        if not weights:
            tensors, source = replace(tensors, held={}), replace(source, model={})
        here.append((source, tensors, optimizers))
        names = {name for held in tensors.held.values() for name in held.names}
        return source.identity, *validation.differences(tensors.held, source, cast), names

    gathered = together(ranks, compare)
    ((source, tensors, optimizers),) = here
    if any(identity != source.identity for identity, *_ in gathered):
        raise CheckpointError(f"the ranks read different checkpoints at {folder}: do they share it?")
    wrong = [line for _, misfits, _, _ in gathered for line in misfits]
    if strict:
        wrong += [f"{name} is not stored" for _, _, missing, _ in gathered for name in missing]
        known = {name for *_, names in gathered for name in names}
        wrong += [f"{name} is stored, and the model has no such tensor" for name in source.model if name not in known]
    if wrong:
        raise CheckpointError("\n".join([f"{folder} is not of this model:", *dict.fromkeys(wrong)]))

    with Files(source.folder, source.files) as opened, torch.no_grad():
        restored = []

        def check() -> None:
            for target, stored in zip(optimizers, source.optimizers, strict=False):
                restored.append(contents.restored(target, stored["state"], source.training, tensors.name_of))
            boxes = validation.boxes_of(source, with_training=bool(optimizers))
            for box, code in list(boxes.items())[ranks.rank :: ranks.world_size]:
                opened.check(box, code)
            for held in tensors.held.values():
                validation.check_tied(held, source, opened)

        def fill() -> None:
            for held in tensors.held.values():
                for entry in validation.entries_of(held, source)[:1]:
                    for part in held.parts:
                        opened.fill(part, entry)
            if weights:
                model.load_state_dict(model.state_dict())  # wrappers then update their copies of the parameters
            for target, stored, (state, fills) in zip(optimizers, source.optimizers, restored, strict=False):
                for part, entry in fills:
                    opened.fill(part, entry)
                contents.adopt(target, state, stored["groups"])

        together(ranks, check)
        together(ranks, fill)
        in_units = any(metadata(parameter, "invariant") for parameter in model.parameters())
        resumes = bool(optimizers) and (in_units or source.about["ranks"] == ranks.world_size)
        for kind in rng_states(model) if resumes else ():
            entry = source.training.get(_random_name(0 if in_units else ranks.rank, kind))
            if entry is not None:  # None for a GPU's generator if the checkpoint was saved on CPU ranks
                restore_rng_state(kind, opened.read(entry.boxes[0]).clone(), model)
    return Loaded(source.about.get("step", 0), dict(source.about.get("extras", {})), resumes)


def export_safetensors(path: str | Path, file: str | Path) -> None:
    """Write the model of a checkpoint to one plain safetensors file: whole tensors under the plain model's names.

    `model.load_state_dict(safetensors.torch.load_file(file))` loads the file. Call this in one process; it holds one
    tensor at a time. The file has tied parameters under each of their names.

    Args:
        path: the path of a save_checkpoint.
        file: the file to write; an existing file is replaced.

    Raises:
        CheckpointError: a file of the checkpoint is missing, torn or altered.

    Examples:
        >>> weft.save_checkpoint(weft.DataParallel(nn.Linear(4, 4)), None, path)
        >>> if dist.get_rank() == 0:
        ...     weft.export_safetensors(path, f"{path}.safetensors")
    """
    source, file = safetensors_io.source_at(Path(path)), Path(file)
    temporary = file.with_name(f"{file.name}.{secrets.token_hex(8)}.tmp")
    with Files(source.folder, source.files) as opened:
        for box, code in validation.boxes_of(source, with_training=False).items():
            opened.check(box, code)

        def whole(name: str) -> torch.Tensor:
            entry = source.model[name]
            tensor = torch.empty(entry.shape, dtype=safetensors_io.dtype_of(entry.code))
            opened.fill(TensorPart((0,) * tensor.dim(), tensor), entry)
            return tensor

        kinds = {name: (safetensors_io.dtype_of(entry.code), entry.shape) for name, entry in source.model.items()}
        try:
            safetensors_io.write_tensors(temporary, kinds, whole)
            safetensors_io.rename(temporary, file)
        finally:
            temporary.unlink(missing_ok=True)


def _random_name(rank: int, kind: str) -> str:
    return f"random/{rank}/{kind}"
