"""A plan's layers in units, so that no bit depends on the number of ranks."""

from collections.abc import Mapping

from torch import nn

from weft.nn.dropout import SEVERAL
from weft.tensor_parallel.auto import AutomaticPlan
from weft.tensor_parallel.styles import kind_of

_LINEAR = ("nn.Linear", "transformers.Conv1D")
_EXACT = ("vocabulary", "lookup", "attributes")  # no sum over ranks has two terms that are not 0


def in_units(entries: Mapping[str, str | Mapping], model: nn.Module, units: int) -> dict[str, str | Mapping]:
    """Return a plan's entries with every split layer in that many units.

    Raises:
        ValueError: a style or a kind of layer has no such form.
    """
    found: dict[str, str | Mapping] = {}
    for name, entry in entries.items():
        options = {"style": entry} if isinstance(entry, str) else entry
        style, kind = options["style"], kind_of(model.get_submodule(name))
        if options.get("drops") == SEVERAL:
            raise ValueError(
                f"parallelize: {name} drops split features in several places, which is not supported with "
                f"invariant={units}"
            )
        adds = style in ("column", "row") and kind in _LINEAR
        if adds or options.get("own_random_numbers") or (style == "dropout" and kind == "nn.Dropout"):
            found[name] = {**options, "invariant": units}
        elif style in _EXACT:
            found[name] = entry
        else:
            raise ValueError(f"parallelize: {name}: style {style!r} of {kind} is not supported with invariant={units}")
    return found


def check_same_layers(plan: AutomaticPlan, of_units: AutomaticPlan, units: int) -> None:
    """Check that a plan splits the layers that the plan for as many ranks as units splits.

    Raises:
        ValueError: a layer is split in one of them only, or in another way.
    """
    styles, wanted = ({name: _style(entry) for name, entry in p.plan.items()} for p in (plan, of_units))
    for name in {**styles, **wanted}:
        if styles.get(name) != wanted.get(name):
            there, here = wanted.get(name, "whole"), styles.get(name, "whole")
            raise ValueError(
                f"parallelize: invariant={units}: {name} would be {there!r} over {units} ranks and is {here!r} here; "
                "choose fewer units, or a plan of your own"
            )


def _style(entry: str | Mapping) -> str:
    return entry if isinstance(entry, str) else entry["style"]
