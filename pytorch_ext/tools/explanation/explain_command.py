"""`weft explain`: the automatic plan for the model of a config.json. Needs no weights and no ranks."""

import argparse
import math
import os
import sys

import torch
from torch import nn

from weft.tensor_parallel.auto import AutomaticPlan, automatic_plan
from weft.tools.explanation.reports import Explanation

USAGE_ERROR = 2


def run(options: argparse.Namespace) -> int:
    """Print the report and return 0; if that fails, print a message and return 2."""
    try:
        found = explain_config(options.config, options.tp)
    except (ValueError, OSError, KeyError) as error:
        print(f"weft explain: {error}", file=sys.stderr)
        return USAGE_ERROR
    if options.json:
        print(found.json())
    else:
        found.show()
    return 0


def explain_config(path: str, tp: int) -> Explanation:
    """Return the automatic plan (plan="auto") on `tp` ranks for the model of a config.json, or of a folder with one.

    Raises:
        ValueError: tp is below 1, or transformers has no model for the configuration.
        OSError: there is no such file.
    """
    import transformers

    if tp < 1:
        raise ValueError(f"--tp {tp} must be at least 1")
    if not os.path.exists(path):
        raise FileNotFoundError(f"there is no {path!r}: give a config.json, or the folder that has it")
    config = transformers.AutoConfig.from_pretrained(path)
    architecture = getattr(transformers, (getattr(config, "architectures", None) or [""])[0], None)
    with torch.device("meta"):
        make = architecture or transformers.AutoModelForCausalLM.from_config
        model = make(config)
    plan = automatic_plan(model, tp)
    ranks = (f"tp: {tp} ranks", f"every rank holds about {100 * share_of_plan(model, plan, tp):.0f}% of the parameters")
    entries = {name: _words(entry, plan.gathered.get(name)) for name, entry in plan.plan.items()}
    return Explanation(None, (), (), plan.whole, ranks, entries)


def _words(entry, reason: str | None) -> str:
    if isinstance(entry, str):
        return entry
    options = ", ".join(f"{name}={value}" for name, value in entry.items() if name != "style")
    return f"{entry['style']} ({options})" + (f": {reason}" if reason else "")


def share_of_plan(model: nn.Module, found: AutomaticPlan, tp: int) -> float:
    """Return a rank's share of the parameters, if split layers are shared evenly."""
    styles = {name: entry if isinstance(entry, str) else entry["style"] for name, entry in found.plan.items()}
    split = {name for name, style in styles.items() if style not in ("attributes", "sequence", "dropout")}
    held = whole = 0.0
    for name, parameter in model.named_parameters():
        count = math.prod(parameter.shape)
        whole += count
        above = [name.rsplit(".", cut)[0] for cut in range(1, name.count(".") + 1)]
        held += count / tp if split & set(above) else count
    return held / max(whole, 1)
