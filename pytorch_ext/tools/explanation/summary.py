"""A line about a model on a mesh, and short texts for the reasons why modules stayed whole."""

import logging
import math
import re
import sys
from collections.abc import Mapping

import torch.distributed as dist
from torch import nn

from weft.sharding.shard import shard_of
from weft.sharding.sharded_grad import local

_SHORT = {  # pattern of a reason -> a few words
    "looked up by numbers": "positions, not tokens",
    "counts all of the features": "counts its features",
    "there is no style for": "no such style",
    "fewer than": "too few units",
    "no rule for": "operation without a rule",
    "the model returns": "the model's output",
    "could not be followed|cannot be followed|called with": "could not follow",
    "also that of|also used by": "weight used elsewhere",
    "hooks|a forward of its own": "has own hooks",
    "joins them with": "beside a whole tensor",
    "whole|split|all of its features|sums over": "needs all features",
}
_MOST = 4


def in_three_words(reason: str) -> str:
    """Return a short text for the reason."""
    return next((short for pattern, short in _SHORT.items() if re.search(pattern, reason)), "see weft.explain")


def log_summary(model: nn.Module, sizes: Mapping[str, int], parameters: int, whole: Mapping[str, str]) -> None:
    """Log the line on the first rank; print it if logging is not set up.

    Args:
        sizes: dimension of the mesh -> number of ranks.
        parameters: number of elements of the model's parameters on each rank before.
    """
    if dist.is_initialized() and dist.get_rank():
        return
    mesh = ", ".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "one rank"
    share = sum(local(parameter.detach()).numel() for parameter in model.parameters()) / max(parameters, 1)
    short: dict[str, str] = {}
    for name, reason in whole.items():
        short.setdefault(re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", name), in_three_words(reason))
    named = [f"{name} ({why})" for name, why in list(short.items())[:_MOST]]
    more = [f"{len(short) - _MOST} more"] if len(short) > _MOST else []
    stayed = f"; whole on every rank: {', '.join(named + more)}" if named else ""
    if sizes.get("pp", 1) > 1:
        stayed += (
            "; one rank of pp computes at a time (LayerSplit), because a call has no micro-batches: "
            'pipeline={"microbatches": ...} gives a weft.Pipeline, with step()'
        )
    line = (
        f"parallelize ({mesh}): a rank holds {100 * share:.0f}% of {parameters:,} parameters{stayed}; "
        "weft.explain(model) for the rest"
    )
    logger = logging.getLogger("weft")
    if logger.level == logging.NOTSET and not logger.hasHandlers():
        print(line, file=sys.stderr)
    else:
        logger.info(line)


def share_held(model: nn.Module) -> str:
    """Return, as text, how many elements of its layers' parameters this rank holds, and their total."""
    held = whole = 0
    for parameter in model.parameters():
        shard = shard_of(parameter)
        held += local(parameter.detach()).numel()
        whole += parameter.numel() if shard is None else math.prod(shard.global_shape)
    return f"{held:,} of {whole:,} parameters of its layers"
