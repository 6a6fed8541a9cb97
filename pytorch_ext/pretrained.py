"""from_pretrained: a model of transformers from its folder; each rank reads and holds its own part alone."""

import os
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from weft.adapters import need
from weft.checkpoint import CheckpointError, load_safetensors
from weft.checkpoint.on_all_ranks import ranks_of, together
from weft.checkpoint.safetensors_io import Source, dtype_of, source_at
from weft.comm.registry import Group
from weft.parallelization import parallelize
from weft.sharding.quantized import on_meta


def from_pretrained(
    path: str | Path,
    mesh: Group = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    model_class: type | None = None,
    config: Mapping[str, Any] | None = None,
    **options: Any,
) -> nn.Module:
    """Return the model in a folder of transformers, split over the mesh, in evaluation mode. A collective call.

    The model is first built without memory (on the meta device) and split. Then each rank reads its own part of each
    tensor. A rank never holds more than its part of the model and one tensor.

    Args:
        path: a name of the Hugging Face hub ("meta-llama/Llama-3.2-1B"; huggingface_hub keeps its files), or a folder
            with config.json and safetensors, as `save_pretrained` writes it: model.safetensors, or
            model.safetensors.index.json and its files. The model may be one that torchao quantised (TorchAoConfig).
        mesh: a mesh with tp, cp or both, or a group that splits the layers, as for weft.parallelize. With zero=3 among
            the options it may have dp too: each rank then reads and holds its part of its part.
        dtype: type of the parameters. None is the config's, or else that of the stored tensors.
        device: where this rank's parts are.
        model_class: a class of transformers. None is the one that the config names, AutoModelForCausalLM's if none.
        config: values that replace those of the config (`attn_implementation` too).
        options: further options of weft.parallelize.

    Raises:
        CheckpointError: the folder has no config.json, an index names a missing file, a file is torn, or tensors are
            missing, unknown or of another shape. The message names all of them.
        ValueError: the stored weights are quantised, but not by torchao; the mesh has pp, or dp without zero=3; the
            config names no class.
        All of these are raised on every rank, before a weight is read.
        ImportError: transformers is older than 5.23, or torchao is missing for a model that it quantised.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> if dist.get_rank() == 0:
        ...     GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4)).save_pretrained(path)
        >>> weft.barrier()
        >>> model = weft.from_pretrained(path, weft.init_mesh(tp=2))
        >>> model.transformer.h[0].mlp.c_fc.weight.shape
        torch.Size([32, 64])
    """
    need("weft.from_pretrained", "transformers", "5.23")
    _check_mesh(mesh, options.get("zero", 0))
    folder, made = _folder_of(path), []

    def build() -> None:
        found = _config_of(folder, config or {})
        kind = model_class or _class_of(found)
        source = source_at(folder)  # the files' headers, so that a missing or torn file is named now
        kinds = (dtype_of(stored.code) for stored in source.model.values())
        known = dtype or getattr(found, "dtype", None) or next((t for t in kinds if t.is_floating_point), torch.float32)
        with torch.device("meta"):
            model = kind._from_config(found, dtype=known)  # type: ignore[attr-defined]
        if getattr(found, "quantization_config", None) is not None:
            _take_quantized(model, source, known)
        made.append(model)

    together(ranks_of(None), build)
    model = parallelize(made[0].eval(), mesh, **options)
    try:
        load_safetensors(model, folder, device=device, cast=True)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{_RENAMED if 'not stored' in str(error) else ''}") from None
    _load_generation_config(model, folder)
    return model


_RENAMED = (
    "\nSome models of transformers have other names in their files (experts one by one, say). Save such a model once "
    "by model.save_pretrained(path, save_original_format=False)"
)


def _folder_of(path: str | Path) -> Path:
    """Return the folder: the path, or where huggingface_hub keeps a model of that name. A collective call.

    One process of each machine downloads what the hub's cache lacks.
    """
    if Path(path).exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) or find_spec("huggingface_hub") is None:
        return Path(path)
    from huggingface_hub import snapshot_download

    files, ranks = ["*.json", "*.safetensors"], ranks_of(None)

    def cached() -> str | None:
        try:
            folder = Path(snapshot_download(str(path), allow_patterns=files, local_files_only=True))
            source_at(folder)
        except Exception:  # a file is missing: the hub's own errors, CheckpointError
            return None
        return str(folder) if (folder / "config.json").exists() else None

    def download() -> None:
        if int(os.environ.get("LOCAL_RANK", ranks.rank)) == 0:
            try:
                snapshot_download(str(path), allow_patterns=files)
            except Exception as error:
                raise CheckpointError(
                    f"no folder {path}, and the hub's model of that name could not be had: {error}. "
                    f"huggingface_hub.snapshot_download({str(path)!r}) fetches one and returns its folder"
                ) from error

    found = together(ranks, cached)
    if None in found:
        together(ranks, download)
        found = together(ranks, cached)
    return Path(found[ranks.rank] or path)


def _check_mesh(mesh: Group, zero: int | Mapping) -> None:
    names = (mesh.mesh_dim_names or ()) if isinstance(mesh, DeviceMesh) else ()
    wrapping = ("pp",) if zero == 3 or isinstance(zero, Mapping) else ("dp", "pp")
    large = [f"{name}={mesh[name].size()}" for name in names if name in wrapping and mesh[name].size() > 1]  # type: ignore[index]
    if large:
        raise ValueError(
            f"from_pretrained: the mesh has {', '.join(large)}; it takes tp and cp, and dp with zero=3. Or wrap the "
            'result: weft.DataParallel(weft.from_pretrained(path, mesh["tp"]), group=mesh["dp"])'
        )


def _config_of(folder: Path, changes: Mapping[str, Any]):
    from transformers import AutoConfig

    if not (folder / "config.json").exists():
        there = "the folder has no config.json" if folder.exists() else "there is no such folder"
        raise CheckpointError(f"no model of transformers at {folder}: {there}")
    try:
        config = AutoConfig.from_pretrained(folder, **changes)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder / 'config.json'} cannot be read: {error}") from error
    method = getattr(config, "quantization_config", None)
    if method is not None:
        kind = method.get("quant_method") if isinstance(method, dict) else getattr(method, "quant_method", method)
        if kind != "torchao":
            raise ValueError(
                f"from_pretrained: the weights at {folder} are quantised ({kind}), and only plain ones and those of "
                "torchao can be read part by part: save the model without quantisation, or quantised by torchao"
            )
        need("weft.from_pretrained of a model that torchao quantised", "torchao", "0.18")
    return config


def _take_quantized(model: nn.Module, source: Source, dtype: torch.dtype) -> None:
    """Give a model on the meta device the quantised weights of a folder, without their values."""
    if "tensor_names" not in source.metadata:
        raise CheckpointError(f"the config of {source.folder} names torchao, and the files have no metadata of torchao")
    stored = {
        name: torch.empty(entry.shape, dtype=dtype_of(entry.code), device="meta")
        for name, entry in source.model.items()
    }
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, weight in on_meta(source.metadata, stored).items():
        if name not in parameters or parameters[name].shape != weight.shape:
            known = f"{list(parameters[name].shape)} in the model" if name in parameters else "not in the model"
            raise CheckpointError(
                f"{source.folder} is not of this model: {name} is {known}, {list(weight.shape)} stored"
            )
        if weight.dtype != dtype:
            raise ValueError(
                f"from_pretrained: {name} is quantised and stands for {weight.dtype}, so dtype={dtype} would mix "
                "types: leave dtype out"
            )
        owner, _, key = name.rpartition(".")
        setattr(model.get_submodule(owner), key, nn.Parameter(weight, requires_grad=False))


def _class_of(config) -> type:
    import transformers

    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    mapping = transformers.AutoModelForCausalLM._model_mapping
    if type(config) not in mapping:
        raise ValueError(f"from_pretrained: {config.architectures} of the config is no class of transformers: pass one")
    kind: Any = mapping[type(config)]
    return kind


def _load_generation_config(model: nn.Module, folder: Path) -> None:
    from transformers import GenerationConfig

    if (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)  # type: ignore[assignment]
