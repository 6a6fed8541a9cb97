"""peft's wrappers in a model. A plan sees through them: it is that of the model without adapters.

A wrapped layer stands inside of its wrapper, as `base_layer` or `original_module`, and the plan has entries for it.
adapters/peft.py then splits the adapters as their layers.
"""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from weft.tensor_parallel.styles import kind_of

_SPLIT_BASES = {"Linear": ("nn.Linear", "transformers.Conv1D"), "Embedding": None}
_SPLIT_VARIANTS = {"Linear": ("DoraLinearVariant",), "Embedding": ()}


def _from_peft(module: str, name: str) -> Any:
    """Return a class of peft; one without instances if it is not imported."""
    return getattr(sys.modules.get(module), name, _Nothing)


class _Nothing:
    pass


def without_peft(model: nn.Module) -> nn.Module:
    """Return the model inside of a PeftModel; any other model itself."""
    return model.get_base_model() if isinstance(model, _from_peft("peft.peft_model", "PeftModel")) else model


def wrappers_in(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the name and module of each layer of peft that wraps another."""
    layer = _from_peft("peft.tuners.tuners_utils", "BaseTunerLayer")
    trained = _from_peft("peft.utils.other", "AuxiliaryTrainingWrapper")
    if layer is not _Nothing:
        yield from ((name, m) for name, m in model.named_modules() if isinstance(m, layer | trained))


def disable_adapters(twin: nn.Module) -> None:
    """Make the wrappers in a copy of a model compute what they wrap, and drop the adapters."""
    for _, wrapper in list(wrappers_in(twin)):
        wrapper._disable_adapters = True  # type: ignore[assignment]
        wrapper._modules = {_wrapped(wrapper): wrapper._modules[_wrapped(wrapper)]}


def is_of_adapter(name: str, wrappers: Mapping[str, nn.Module]) -> bool:
    """Return whether a module belongs to an adapter: it is in a wrapper, and not in the wrapped module."""
    around = [(f"{place}.".lstrip("."), one) for place, one in wrappers.items()]
    inside = ((name.removeprefix(place), one) for place, one in around if name.startswith(place) and name != place)
    return any(rest.partition(".")[0] != _wrapped(one) for rest, one in inside)


def _wrapped(wrapper: nn.Module) -> str:
    return "base_layer" if "base_layer" in wrapper._modules else "original_module"


def inseparable(model: nn.Module) -> dict[str, str]:
    """Return the modules in wrappers without a split form, to the reason; they stay whole."""
    found: dict[str, str] = {}
    for name, wrapper in wrappers_in(model):
        reason = _why_whole(wrapper)
        if reason is not None:
            inside = (inner for inner, _ in wrapper.named_modules())
            found |= {".".join(filter(None, (name, inner))): reason for inner in inside}
    return found


def _why_whole(wrapper: nn.Module) -> str | None:
    kind = type(wrapper)
    if isinstance(wrapper, _from_peft("peft.utils.other", "ModulesToSaveWrapper")):
        return None
    of_lora = kind.__module__ in ("peft.tuners.lora.layer", "peft.tuners.lora.torchao", "weft.adapters.peft")
    name = kind.__name__.removeprefix("SplitLora").removeprefix("TorchaoLora")
    if not of_lora or name not in _SPLIT_BASES:
        return f"{kind.__module__.removeprefix('peft.')}.{kind.__name__} around it has no split form"
    variants = {type(variant).__name__ for variant in wrapper.lora_variant.values()}  # type: ignore[union-attr, operator]
    odd = sorted(variants - set(_SPLIT_VARIANTS[name]))
    if odd:
        return f"the {odd[0]} of its LoRA has no split form"
    bases, base = _SPLIT_BASES[name], kind_of(wrapper.base_layer)  # type: ignore[arg-type]
    return None if bases is None or base in bases else f"LoRA around a {base} has no split form"


def refuse_trained_tokens(config: Any, splits: bool) -> None:
    """Raise ValueError if an adapter trains rows of an embedding that ranks split."""
    if splits and getattr(config, "trainable_token_indices", None):
        raise ValueError(
            "trainable_token_indices are rows of the whole embedding, and each rank has a part of it: leave them out "
            'and train the embedding (modules_to_save=["embed_tokens"]), or use a mesh without tp'
        )


def refuse_other_tuners(model: nn.Module, splits: bool, experts: bool) -> None:
    """Raise ValueError if the model has adapters that are not LoRA's, or ones that cannot be split.

    Args:
        splits: several ranks split the layers.
        experts: ranks split the experts.
    """
    known = getattr(model, "peft_config", None)
    for name, config in known.items() if isinstance(known, dict) else ():
        kind = getattr(config.peft_type, "value", config.peft_type)
        if kind != "LORA":
            raise ValueError(
                f"parallelize: the adapter {name!r} is of peft's {kind}, and only those of LORA can be split. Merge it "
                "first (merge_and_unload), or leave the model on one rank"
            )
        refuse_trained_tokens(config, splits)
        if experts and getattr(config, "target_parameters", None):
            raise ValueError(
                f"parallelize: the adapter {name!r} has target_parameters, matrices of experts, and ranks of ep have "
                "other experts each: leave them out, or use a mesh without ep"
            )
        if getattr(config, "ensure_weight_tying", False):
            raise ValueError(
                f"parallelize: the adapter {name!r} has ensure_weight_tying, and the tied matrices would have "
                "different cuts: set it to False"
            )


def through_wrappers(entries: Mapping[str, str | Mapping], model: nn.Module) -> dict[str, str | Mapping]:
    """Return a plan's entries for wrapped layers in place of those for wrappers, and the same for trained copies.

    Raises:
        ValueError: a split layer is in a wrapper without a split form.
    """
    wrappers, whole = dict(wrappers_in(model)), inseparable(model)
    if not wrappers:
        return dict(entries)
    found: dict[str, str | Mapping] = {}
    for name, entry in entries.items():
        if name in wrappers:
            name = f"{name}.{_wrapped(wrappers[name])}"
        if name in whole and entry not in ("sequence", "tokenwise"):
            raise ValueError(f"parallelize: {name} cannot be split: {whole[name]}")
        found[name] = entry
        for around, wrapper in wrappers.items():
            original = f"{around}.original_module"
            if "modules_to_save" in wrapper._modules and f"{name}.".startswith(f"{original}."):
                rest, copies = name.removeprefix(original), wrapper._modules["modules_to_save"]
                found |= {f"{around}.modules_to_save.{copy}{rest}": entry for copy in copies._modules}  # type: ignore[union-attr]
    return found
