"""load_safetensors: weights straight from safetensors files into a model that has only this rank's parts."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import nn

from weft.checkpoint.checkpoint import load_checkpoint
from weft.comm.registry import Group
from weft.sharding.shard import shard_of


def load_safetensors(
    model: nn.Module,
    path: str | Path,
    *,
    device: torch.device | str = "cpu",
    strict: bool = True,
    cast: bool = False,
    group: Group = None,
) -> nn.Module:
    """Fills a model with what safetensors files hold: a rank reads its own part of each tensor, and never has more.

        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        model = weft.load_safetensors(weft.parallelize(model, mesh), "path/of/the/model")

    A collective call. Parameters and buffers of the meta device get memory first, one rank's part of it. Tied weights
    are one, and may be stored under any of their names.

    Args:
        model: as `weft.parallelize` left it, or whole.
        path: a file, or a folder with model.safetensors or with model.safetensors.index.json and its files; or what
            weft.save_checkpoint wrote.
        device: of what is on the meta device now.
        strict: also tensors that only one of model and files has are an error.
        cast: convert what is stored to the model's types; otherwise another type is an error.
        group: the ranks that have the model together; None is the default group, or this process where there is none.

    Returns:
        The model.

    Raises:
        CheckpointError: files that are missing or torn; tensors of other shapes or types, missing and unexpected ones,
            all by name. ValueError: a buffer of the meta device that no file holds and that the model's own code does
            not compute again. The model is unchanged then.
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


def _on_meta(model: nn.Module) -> Iterator[tuple[nn.Module, str, str, torch.Tensor]]:
    """(module, its name, the tensor's name in it, the tensor)."""
    for prefix, module in model.named_modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    yield module, prefix, name, tensor


def _hold(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    tensors: Mapping = module._parameters if name in module._parameters else module._buffers
    tensors[name] = tensor  # type: ignore[index]


def _with_memory(tensor: torch.Tensor, device) -> torch.Tensor:
    """A tensor like one of the meta device, that knows its place as that does."""
    made = torch.empty_like(tensor, device=device)
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, requires_grad=tensor.requires_grad)
    shard = shard_of(tensor)
    return made if shard is None else shard.mark(made)


def _compute_unstored(model: nn.Module, made: set[int]) -> None:
    """Buffers that no state_dict holds follow from the configuration: transformers' models can compute theirs again."""
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
    """Whether the model around a module, of transformers, gives these buffers values. It draws the module's parameters
    too, so they must be among what is filled afterwards."""
    parts = prefix.split(".") if prefix else []
    around = (model.get_submodule(".".join(parts[:count])) for count in range(len(parts), -1, -1))
    owner = next((one for one in around if hasattr(one, "_init_weights") and hasattr(one, "main_input_name")), None)
    buffers = [module.get_buffer(name) for name in names]
    known = all(id(parameter) in made for parameter in module.parameters(recurse=False))
    if owner is None or not known or not all(buffer.is_floating_point() for buffer in buffers):
        return False
    with torch.no_grad(), torch.random.fork_rng([]):
        for buffer in buffers:
            buffer.fill_(float("nan"))
        owner._init_weights(module)  # type: ignore[operator]
    return not any(buffer.isnan().any() for buffer in buffers)
