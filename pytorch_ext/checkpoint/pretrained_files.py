"""Safetensors files of a model that holds only this rank's parts, as transformers writes and reads them."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from weft.checkpoint.checkpoint import load_checkpoint
from weft.checkpoint.full_state import full_state_dict
from weft.checkpoint.on_all_ranks import ranks_of, together
from weft.comm.purpose import calls_for
from weft.comm.registry import Group
from weft.data_parallel.sharded_optimizer import piece_of
from weft.metadata import set_metadata
from weft.sharding.part_of_state import is_part
from weft.sharding.quantized import is_quantized, with_numbers
from weft.sharding.shard import shard_of
from weft.sharding.sharded_grad import watch_gradient


def load_safetensors(
    model: nn.Module,
    path: str | Path,
    *,
    device: torch.device | str = "cpu",
    strict: bool = True,
    cast: bool = False,
    group: Group = None,
) -> nn.Module:
    """Load safetensors files into a model. A rank reads only its own part of each tensor. A collective call.

        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        model = weft.load_safetensors(weft.parallelize(model, mesh), "path/of/the/model")

    Parameters and buffers on the meta device first get memory for this rank's part. Tied weights stay tied; the files
    may store them under any of their names.

    Args:
        model: the result of `weft.parallelize`, or a whole model.
        path: a file; a folder with model.safetensors, or with model.safetensors.index.json and its files; or the path
            of a weft.save_checkpoint.
        device: the device for parameters and buffers that are on the meta device.
        strict: raise for tensors that only the model or only the files have.
        cast: convert stored tensors to the model's types. False raises for another type.
        group: the ranks that hold the model together. None is the default group, or this process if there is none.

    Returns:
        The model.

    Raises:
        CheckpointError: a file is missing or torn; tensors are missing or unexpected, or have other shapes or types.
            The message names all of them.
        ValueError: no file has a buffer that is on the meta device, and the model's own code cannot compute it again.
        After an error the model is unchanged.

    Examples:
        >>> weft.save_checkpoint(weft.DataParallel(nn.Linear(4, 4)), None, path)
        >>> with torch.device("meta"):
        ...     model = nn.Linear(4, 4)
        >>> weft.load_safetensors(model, path).weight.device
        device(type='cpu')
    """
    places = list(_on_meta(model))
    parts: dict[int, torch.Tensor] = {}
    try:
        for module, _, name, tensor in places:
            _hold(module, name, parts.setdefault(id(tensor), _with_memory(tensor, device)))
        _compute_unstored(model, {id(part) for part in parts.values()})
        load_checkpoint(model, None, path, strict=strict, cast=cast, group=group)
    except BaseException:
        for module, _, name, tensor in places:
            _hold(module, name, tensor)
        raise
    return model


def save_pretrained(
    model: Any,
    held: nn.Module,
    save_directory: str | Path,
    is_main_process: bool = True,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    *more: Any,
    **options: Any,
) -> None:
    """Write the unsplit model with the model's own save_pretrained, from the first rank. A collective call.

    With a state_dict that has no parts of ranks, as `weft.full_state_dict` returns, it is the model's own: each rank
    that calls it writes, and the others need not call.

    Args:
        model: the split model of transformers, on every rank.
        held: what holds its parameters: the model, or its pipeline.
        save_directory, is_main_process, state_dict, more, options: arguments of the model's own. The first rank takes
            the place of the main process, and the whole model's values that of a state_dict with parts.

    Raises:
        CheckpointError, ValueError: the first rank could not write; raised on every rank.
    """
    own = type(model).save_pretrained
    if state_dict is not None and not any(is_part(value) for value in state_dict.values()):
        own(model, save_directory, is_main_process, state_dict, *more, **options)
        return
    with calls_for("save_pretrained of a split model, which every rank calls"):
        whole = full_state_dict(held)

        def write() -> None:
            if dist.get_rank() == 0:
                Path(save_directory).mkdir(parents=True, exist_ok=True)  # transformers returns where this raises
                own(model, save_directory, True, whole, *more, **options)

        together(ranks_of(None), write)


def _on_meta(model: nn.Module) -> Iterator[tuple[nn.Module, str, str, torch.Tensor]]:
    """Yield (module, name of the module, name of the tensor in it, tensor) for each tensor on the meta device."""
    for prefix, module in model.named_modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    yield module, prefix, name, tensor


def _hold(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    tensors: Mapping = module._parameters if name in module._parameters else module._buffers
    tensors[name] = tensor  # type: ignore[index]


def _with_memory(tensor: torch.Tensor, device) -> torch.Tensor:
    """Return a tensor on `device` with the shape and the marks of a tensor on the meta device."""
    if is_quantized(tensor):
        made = with_numbers(tensor, lambda numbers: torch.empty_like(numbers, device=device))
    else:
        made = torch.empty_like(tensor, device=device)
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, requires_grad=tensor.requires_grad)
    if (piece := piece_of(tensor)) is not None:
        set_metadata(made, "piece", piece)
        watch_gradient(made)
    shard = shard_of(tensor)
    return made if shard is None else shard.mark(made)


def _compute_unstored(model: nn.Module, made: set[int]) -> None:
    """Compute the buffers that no state_dict holds with the model's own code, as transformers' models allow."""
    lacking = []
    for prefix, module in model.named_modules():
        names = [
            name
            for name, buffer in module._buffers.items()
            if buffer is not None and id(buffer) in made and name in module._non_persistent_buffers_set
        ]
        if names and not _computed(model, prefix, module, names, made):
            lacking += [f"{prefix}.{name}".lstrip(".") for name in names]
    if lacking:
        raise ValueError(
            f"load_safetensors: {', '.join(lacking)}: no file holds them, and the model's code does not compute them "
            'again. Build these modules outside of torch.device("meta"), or give them their values before this call: '
            "module.register_buffer(name, values, persistent=False)"
        )


def _computed(model: nn.Module, prefix: str, module: nn.Module, names: list[str], made: set[int]) -> bool:
    """Let the transformers model around a module compute these buffers; return True if it did.

    The transformers model also initializes the module's parameters, so the files must fill them afterwards.
    """
    parts = prefix.split(".") if prefix else []
    around = (model.get_submodule(".".join(parts[:count])) for count in range(len(parts), -1, -1))
    owner = next((m for m in around if hasattr(m, "_init_weights") and hasattr(m, "main_input_name")), None)
    buffers = [module.get_buffer(name) for name in names]
    known = all(id(parameter) in made for parameter in module.parameters(recurse=False))
    if owner is None or not known or any(buffer.is_complex() or buffer.dtype == torch.bool for buffer in buffers):
        return False
    with torch.no_grad(), torch.random.fork_rng([]):
        for buffer in buffers:
            buffer.fill_(float("nan") if buffer.is_floating_point() else torch.iinfo(buffer.dtype).min)
        owner._init_weights(module)  # type: ignore[operator]
    return not any(_is_unset(buffer).any() for buffer in buffers)


def _is_unset(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.isnan() if buffer.is_floating_point() else buffer == torch.iinfo(buffer.dtype).min
