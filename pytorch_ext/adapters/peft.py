"""LoRA of peft on layers that are split over ranks, in both orders.

    weft.parallelize(peft.get_peft_model(model, config), mesh)
    peft.get_peft_model(weft.parallelize(model, mesh), config)

peft chooses a class for each layer that it wraps, and has no registry for classes of other packages. So `register`
wraps this choice, the search for all linear layers, and the loading and saving of adapters. weft.parallelize calls it
if peft is imported.
"""

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import peft.peft_model
import peft.tuners.lora.model
import peft.tuners.tuners_utils
import peft.utils.hotswap
import peft.utils.save_and_load
import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import PeftModel, get_peft_model_state_dict
from peft.tuners.lora import layer as of_peft
from peft.tuners.lora.dora import DoraLinearLayer
from peft.tuners.tuners_utils import _get_in_out_features
from torch import nn
from torch.distributed.tensor import DTensor

from weft.adapters import need
from weft.checkpoint.on_all_ranks import ranks_of, together
from weft.checkpoint.safetensors_io import source_at
from weft.data_parallel.data_parallel import DataParallel
from weft.nn import ParallelConv1D, ParallelEmbedding, ParallelLinear
from weft.nn.lora import Adapter, add_adapters, check_adapter, split_adapter
from weft.nn.sharded import ShardedModule, ShardHolder
from weft.replicas import check_same_draw
from weft.sharding.quantized import is_quantized, values_of
from weft.sharding.shard import shard_of
from weft.tensor_parallel.peft_wrappers import refuse_trained_tokens, without_peft, wrappers_in
from weft.tensor_parallel.ties import keep_parameters

need("weft.adapters.peft", "peft", "0.21")

_DRAWN = (True, False, "gaussian", "orthogonal")  # values of init_lora_weights that do not read the layer's weight


class SplitLoraLinear(ShardedModule, of_peft.Linear):
    """peft's LoRA around a ParallelLinear. `in_features` and `out_features` are those of the whole layer."""

    lora_A: Any
    lora_B: Any
    lora_dropout: Any
    lora_variant: Any
    lora_magnitude_vector: Any
    scaling: Any
    active_adapters: Any
    get_base_layer: Any

    def _get_in_out_features(self, module: nn.Module):
        if isinstance(module, ParallelLinear):
            return module.in_features, module.out_features
        return super()._get_in_out_features(module)

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config, **kwargs) -> None:
        """Make the adapter that an unsplit layer gets, and keep this rank's part of it."""
        base = self.get_base_layer()
        check_adapter(base, r)
        if config.init_lora_weights not in _DRAWN:
            raise ValueError(
                f"init_lora_weights={config.init_lora_weights!r} computes with the whole weight, and each "
                "rank has a part: call get_peft_model before weft.parallelize"
            )
        self.base_layer = _whole_layer(base, with_values=config.use_dora)
        try:
            super().update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)
        finally:
            self.base_layer = base
        drawn = {name: x for name, x in self.named_parameters() if f".{adapter_name}." in f".{name}."}
        check_same_draw(drawn, base.communicator)
        self.install(adapter_name, _parts_of(self, adapter_name, base))

    def install(self, name: str, parts: tuple[Adapter, nn.Module | None]) -> None:
        """Put the parts in the place of the whole adapter, with the same Parameter objects."""
        adapter, magnitudes = parts
        for held, part in ((self.lora_A, adapter.a), (self.lora_B, adapter.b), (self.lora_dropout, adapter.dropout)):
            keep_parameters(held[name], part)
            held[name] = part
        if magnitudes is not None:
            keep_parameters(self.lora_magnitude_vector[name], magnitudes)
            self.lora_magnitude_vector[name] = magnitudes

    def merge(self, *args: Any, **kwargs: Any) -> None:
        if is_quantized(self.get_base_layer().weight):
            raise ValueError(
                "merging needs the whole quantised weight, and each rank has a part: save the adapter, and merge it "
                "into a whole model"
            )
        super().merge(*args, **kwargs)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        base = self.get_base_layer()
        active = [name for name in self.active_adapters if name in self.lora_A]
        through_peft = self.disable_adapters or self.merged or kwargs.get("adapter_names") is not None
        if through_peft or not self.cast_input_dtype_enabled or any(name in self.lora_variant for name in active):
            y = super().forward(base.part_of_input(x), *args, in_parts=True, **kwargs)
            return base.whole_output(y)
        return add_adapters(base, x, [_adapter_of(self, name) for name in active])


class SplitDora(ShardHolder, DoraLinearLayer):
    """The magnitudes of DoRA (Liu et al. 2024) for a split layer, one for each output feature.

    Of a column layer they are split as the outputs. Of a row layer every rank has all of them, and the norms of the
    whole weight's rows are a sum over the ranks.
    """

    def __init__(self, fan_in_fan_out: bool, base: ParallelLinear, weight: nn.Parameter):
        super().__init__(fan_in_fan_out)
        self.communicator = base.communicator if base.style == "row" else None
        shard = None if base.style == "row" else base.shard_of_outputs()
        self.register_part("weight", weight, shard)

    def get_weight_norm(self, weight, lora_weight, scaling, adapter_name: str | None = None) -> torch.Tensor:
        norm = super().get_weight_norm(weight, lora_weight, scaling, adapter_name=adapter_name)
        return norm if self.communicator is None else self.communicator.all_reduce_(norm.detach().square()).sqrt()

    def forward(self, x, *, lora_A, lora_B, scaling, base_layer, base_result=None, adapter_name="default"):
        """Return the term that is added to the layer's output, this rank's part of it. Norms get no gradient."""
        with torch.no_grad():
            product = (lora_B.weight @ lora_A.weight).to(x.dtype)
            weight = values_of(base_layer.weight).to(x.dtype)
            norm = self.get_weight_norm(weight, product, scaling, adapter_name=adapter_name)
        factor = (self.operand("weight", whole_use=False) / norm).view(1, -1)
        if base_result is None:
            base_result = base_layer.without_bias(x)
        elif base_layer.bias is not None:
            base_result = base_result - base_layer.operand("bias", whole_use=False)
        return (factor - 1) * base_result + factor * lora_B(lora_A(x)) * scaling


class SplitLoraEmbedding(ShardedModule, of_peft.Embedding):
    """peft's LoRA around an embedding with split rows. Its two matrices are whole on every rank."""

    lora_embedding_A: Any
    lora_embedding_B: Any
    get_base_layer: Any

    def _get_in_out_features(self, module: nn.Module):
        return module.num_embeddings, module.embedding_dim

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config, **kwargs) -> None:
        if config.use_dora:
            raise ValueError("DoRA of an embedding with split rows is not supported: leave the embedding out of it")
        if config.init_lora_weights not in _DRAWN:
            raise ValueError(f"init_lora_weights={config.init_lora_weights!r} is not supported for split embeddings")
        super().update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)
        drawn = self.lora_embedding_A[adapter_name], self.lora_embedding_B[adapter_name]
        check_same_draw(dict(zip("AB", drawn, strict=True)), self._shard.communicator)

    @property
    def _shard(self):
        return self.get_base_layer().shards["weight"]

    def get_delta_weight(self, adapter) -> torch.Tensor:
        return self._shard.take(super().get_delta_weight(adapter))

    def _embed(self, input: torch.Tensor, weight: torch.Tensor, **_) -> torch.Tensor:
        return F.embedding(input, weight, padding_idx=self.get_base_layer().padding_idx)


def _whole_layer(base: ParallelLinear, with_values: bool) -> nn.Module:
    """Return a module with the whole layer's weight and bias.

    Args:
        with_values: gather them; otherwise they are zeros without memory.
    """
    whole = nn.Module()
    for name in ("weight", "bias"):
        part = getattr(base, name)
        shard = None if part is None else shard_of(part)
        if part is None or shard is None:
            whole.register_parameter(name, part)
        elif with_values:
            setattr(whole, name, nn.Parameter(shard.gather(values_of(part.detach())), requires_grad=False))
        else:
            zeros = torch.zeros((), dtype=part.dtype, device=part.device).expand(shard.global_shape)
            setattr(whole, name, nn.Parameter(zeros, requires_grad=False))
    return whole


def _base_of(layer: nn.Module) -> nn.Module:
    """Return the layer inside of peft's wrapper; any other layer itself."""
    return layer.get_base_layer() if isinstance(layer, of_peft.BaseTunerLayer) else layer


def _adapter_of(layer: of_peft.Linear, name: str) -> Adapter:
    return Adapter(layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name], layer.scaling[name])


def _parts_of(layer: of_peft.Linear, name: str, base: ParallelLinear) -> tuple[Adapter, nn.Module | None]:
    """Return this rank's part of an adapter whose matrices are whole, and of its magnitudes (DoRA) if it has any.

    Args:
        layer: peft's layer.
        name: the adapter.
        base: the split layer.
    """
    adapter = split_adapter(base, _adapter_of(layer, name))
    if name not in layer.lora_magnitude_vector:
        return adapter, None
    if base.sequence_parallel:
        raise ValueError("DoRA is not supported with sequence_parallel: leave one of them out")
    return adapter, SplitDora(layer.fan_in_fan_out, base, layer.lora_magnitude_vector[name].weight)


def split_wrappers(model: nn.Module, replacements: Mapping[str, nn.Module]) -> Iterator[Callable[[], None]]:
    """Yield a function for each LoRA layer around a layer that is replaced; it splits the adapters.

    The parts are made here, so errors come before anything is replaced.

    Args:
        model: the model with whole layers.
        replacements: the split layers, by the name of the layer that they replace.
    """
    for name, wrapper in wrappers_in(model):
        base = replacements.get(f"{name}.base_layer")
        if base is None or not hasattr(base, "shards"):
            continue
        if isinstance(wrapper, of_peft.Embedding):
            yield functools.partial(_become, wrapper, SplitLoraEmbedding, {})
        elif isinstance(wrapper, of_peft.Linear) and isinstance(base, ParallelLinear):
            try:
                parts = {adapter: _parts_of(wrapper, adapter, base) for adapter in wrapper.lora_A}
            except ValueError as error:
                raise ValueError(f"parallelize: {name}: {error}") from None
            yield functools.partial(_become, wrapper, SplitLoraLinear, parts)


def _become(wrapper: Any, kind: type, parts: Mapping[str, tuple[Adapter, nn.Module | None]]) -> None:
    wrapper.__class__, wrapper.shards = kind, {}
    for name, part in parts.items():
        wrapper.install(name, part)


# What peft calls.


@functools.cache
def register() -> None:
    """Let peft's LoRA wrap split layers and save whole adapters."""
    lora, tuners = peft.tuners.lora.model, peft.tuners.tuners_utils
    lora.dispatch_torchao = _passing_split_layers(lora.dispatch_torchao)
    lora.dispatch_default = _dispatching(lora.dispatch_default)
    tuners._maybe_include_all_linear_layers = _finding_split_layers(tuners._maybe_include_all_linear_layers)
    files = peft.utils.save_and_load
    files.has_valid_embedding_base_layer = _knowing_split_layers(files.has_valid_embedding_base_layer)
    PeftModel.save_pretrained = _saving_whole(PeftModel.save_pretrained)
    lora.LoraModel.add_weighted_adapter = _refusing_whole_matrices(lora.LoraModel.add_weighted_adapter)
    swap = peft.utils.hotswap
    swap.hotswap_adapter_from_state_dict = _refusing_swaps(swap.hotswap_adapter_from_state_dict)
    PeftModel.load_adapter = _checking_first(PeftModel.load_adapter)
    PeftModel.from_pretrained = classmethod(_checking_first(PeftModel.from_pretrained.__func__))


def _dispatching(default: Callable) -> Callable:
    @functools.wraps(default)
    def dispatch(target, adapter_name, config, parameter_name=None, **kwargs):
        base = _base_of(target)
        if not isinstance(base, ShardHolder):
            return default(target, adapter_name, config=config, parameter_name=parameter_name, **kwargs)
        if parameter_name is None and target is base and isinstance(base, ParallelLinear):
            config.fan_in_fan_out = base.transposed
            conv1d = isinstance(base, ParallelConv1D)
            return SplitLoraLinear(target, adapter_name, config=config, is_target_conv_1d_layer=conv1d, **kwargs)
        if parameter_name is None and target is base and isinstance(base, ParallelEmbedding | nn.Embedding):
            return SplitLoraEmbedding(target, adapter_name, config=config, **kwargs)
        raise ValueError(f"LoRA around a split {type(base).__name__} is not supported: leave it out of target_modules")

    return dispatch


def _passing_split_layers(dispatch: Callable) -> Callable:
    """Leave split layers with quantised weights to the default."""

    @functools.wraps(dispatch)
    def passing(target, adapter_name, **kwargs):
        return None if isinstance(_base_of(target), ShardHolder) else dispatch(target, adapter_name, **kwargs)

    return passing


def _finding_split_layers(find: Callable) -> Callable:
    """Make target_modules="all-linear" find split layers: each passes for an nn.Linear while peft looks."""

    @functools.wraps(find)
    def finding(peft_config, model):
        if isinstance(model, DataParallel):
            raise ValueError(
                "get_peft_model of a weft.DataParallel, which has wrapped other parameters: add the adapters "
                "before weft.parallelize, or before weft.DataParallel"
            )
        refuse_trained_tokens(peft_config, any(isinstance(module, ParallelEmbedding) for module in model.modules()))
        split = [module for module in model.modules() if isinstance(module, ParallelLinear)]
        kinds = [type(module) for module in split]
        try:
            for module, kind in zip(split, kinds, strict=True):
                module.__class__ = type(kind.__name__, (kind, nn.Linear), {})
            return find(peft_config, model)
        finally:
            for module, kind in zip(split, kinds, strict=True):
                module.__class__ = kind

    return finding


def _refusing_whole_matrices(add: Callable) -> Callable:
    @functools.wraps(add)
    def add_weighted_adapter(self, adapters, weights, adapter_name, combination_type="svd", *args, **kwargs):
        if combination_type not in ("linear", "cat") and any(isinstance(x, ShardHolder) for x in self.modules()):
            raise ValueError(
                f"add_weighted_adapter: combination_type={combination_type!r} looks at whole matrices, and each rank "
                'has parts: use "linear" or "cat", or combine them on the whole model and load the result'
            )
        return add(self, adapters, weights, adapter_name, combination_type, *args, **kwargs)

    return add_weighted_adapter


def _refusing_swaps(swap: Callable) -> Callable:
    @functools.wraps(swap)
    def hotswap_adapter_from_state_dict(model, *args, **kwargs):
        if any(isinstance(x, ShardHolder) for x in model.modules()):
            raise ValueError(
                "hotswap_adapter puts whole matrices in the place of this rank's parts: use model.load_adapter and "
                "model.set_adapter"
            )
        return swap(model, *args, **kwargs)

    return hotswap_adapter_from_state_dict


def _knowing_split_layers(is_valid: Callable) -> Callable:
    @functools.wraps(is_valid)
    def valid(layer):
        return is_valid(layer) or isinstance(getattr(layer, "base_layer", None), ParallelEmbedding | ParallelLinear)

    return valid


def _saving_whole(save: Callable) -> Callable:
    @functools.wraps(save)
    def save_pretrained(self, save_directory, *args, **kwargs):
        """Write the adapter of the unsplit model, from the first rank. A collective call of all ranks."""
        parts = any(isinstance(x, DTensor) or shard_of(x) is not None for x in self.parameters())
        if kwargs.get("state_dict") is not None or not parts:
            return save(self, save_directory, *args, **kwargs)
        names = kwargs.get("selected_adapters") or list(self.peft_config)
        whole = _whole_adapters(self, names, kwargs.get("save_embedding_layers", "auto"))
        kwargs |= {"state_dict": whole, "is_main_process": dist.get_rank() == 0}
        together(ranks_of(None), lambda: save(self, save_directory, *args, **kwargs))
        return None

    return save_pretrained


@torch.no_grad()
def _whole_adapters(model: PeftModel, names: Sequence[str], embeddings) -> dict[str, torch.Tensor]:
    """Return the tensors of the model's state_dict that belong to the adapters, whole."""
    state = model.state_dict(keep_vars=True)
    wanted = set()
    for name in names:
        own = get_peft_model_state_dict(model, state_dict=state, adapter_name=name, save_embedding_layers=embeddings)
        wanted |= {id(x) for x in own.values()}
    whole = {name: x for name, x in state.items() if id(x) in wanted}
    shards = {name: shard_of(x) for name, x in whole.items()}
    values = {name: x.full_tensor() if isinstance(x, DTensor) else x.detach() for name, x in whole.items()}
    return {name: x if (shard := shards[name]) is None else shard.gather(x) for name, x in values.items()}


def _checking_first(load: Callable) -> Callable:
    """Make a load into a split model compare the adapter's file with the model on all ranks before it changes anything.

    Args:
        load: load_adapter(model, folder, ...), or from_pretrained(class, model, folder, ...).
    """

    @functools.wraps(load)
    def checked(first, *args, **kwargs):
        names = ("model", "model_id") if isinstance(first, type) else ("model_id",)
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        model = named.get("model", first)
        split = isinstance(model, nn.Module) and any(shard_of(x) is not None for x in model.parameters())
        if split and "model_id" in named:
            folder = Path(named["model_id"]) / (named.get("subfolder") or "")
            together(ranks_of(None), lambda: check_file(without_peft(model), folder))
        return load(first, *args, **kwargs)

    return checked


def check_file(model: nn.Module, folder: Path) -> None:
    """Check that an adapter's file is whole and of this model.

    Args:
        model: the model without peft's own wrapper around it.
        folder: a folder of save_pretrained. A name on a hub, or a file of another format, is not checked.

    Raises:
        ValueError: a layer of the adapter does not exist in the model or has another size.
        CheckpointError: the file is torn.
    """
    path = folder / "adapter_model.safetensors"
    if not path.exists():
        return
    wrong, modules = [], dict(model.named_modules(remove_duplicate=False))
    for key, stored in source_at(path).model.items():
        name, kind, *_ = [*re.split(r"\.(lora_\w+|base_layer)\b", key), None]
        if kind is None:  # a parameter of a module that is trained whole
            name = name.rpartition(".")[0]
        layer = modules.get(name.removeprefix("base_model.model."))
        if layer is None:
            wrong.append(f"the model has no {name}")
        elif kind in _SIDE and (size := _size_at(layer, kind)) not in (None, stored.shape[_SIDE[kind][0]]):
            wrong.append(f"{key} is {list(stored.shape)}, and the layer has {size} features there")
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(f"{path} is the adapter of another model: {'; '.join(wrong[:3])}{more}")


# Of a matrix: the dimension that is the layer's, and which of the layer's (input, output) features it is.
_SIDE = {"lora_A": (1, 0), "lora_B": (0, 1), "lora_embedding_A": (1, 0), "lora_embedding_B": (0, 1)}


def _size_at(layer: nn.Module, kind: str) -> int | None:
    layer = _base_of(layer)
    if isinstance(layer, ParallelLinear):
        sizes: tuple = layer.in_features, layer.out_features
    elif isinstance(layer, ParallelEmbedding):
        sizes = layer.num_embeddings, layer.embedding_dim
    else:
        sizes = _get_in_out_features(layer)
    return sizes[_SIDE[kind][1]]
