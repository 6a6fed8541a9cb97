"""Choice of a mesh: memory and time of a training step, by arithmetic. Imports the standard library only."""

from typing import Any

from weft.tools.planner.hardware import Hardware
from weft.tools.planner.job import Job, Layout
from weft.tools.planner.layout_search import Candidates, Plan, Rejection, search, searched, too_big
from weft.tools.planner.model import Model
from weft.tools.planner.step import Clock, Step
from weft.tools.planner.step_memory import Memory, MemoryModel
from weft.tools.planner.validate import Comparison, mean_error, validate

__all__ = [
    "Candidates",
    "Clock",
    "Comparison",
    "Hardware",
    "Job",
    "Layout",
    "Memory",
    "MemoryModel",
    "Model",
    "Plan",
    "Rejection",
    "Step",
    "mean_error",
    "plan",
    "search",
    "too_big",
    "validate",
]


def plan(
    model: Any,
    *,
    gpus: int,
    hardware: Any,
    sequence_length: int,
    global_batch: int,
    precision: str = "bf16",
    optimizer: str = "adamw",
    recompute: str | None = None,
    gpus_per_node: int | None = None,
    overlap: str = "some",
    imbalance: float = 1.1,
) -> list[Plan]:
    """Return the ways to train a model on the devices, the fastest first: the best layout of each mesh that fits.

    Args:
        model: a preset's name, a Hugging Face config.json (path or content), a module with a .config, or a Model.
        gpus: number of devices (ranks).
        hardware: a preset's name, a file of `weft bench --save`, or a Hardware.
        sequence_length: tokens of a sequence.
        global_batch: sequences of an optimizer step.
        precision: "bf16", "fp16" or "fp32".
        optimizer: "adamw", "adam", "lamb", "lars", "momentum" or "sgd".
        recompute: "none", "selective" or "full"; None tries each.
        gpus_per_node: devices in a node, if it differs from the hardware's number.
        overlap: "none", "some" or "all"; see Job.
        imbalance: of a mixture of experts: tokens of the rank with the most, over the mean.

    Raises:
        ValueError: an argument is unknown or impossible. Or nothing fits; the message says by how much, and which
            changes would make it fit.

    Source: memory by Korthikanti et al. 2022, time by a roofline and alpha-beta model; docs/planner.md has both.

    Examples:
        >>> plans = weft.plan("llama-3-8b", gpus=8, hardware="h100", sequence_length=8192, global_batch=64)
        >>> plans[0].mesh
        {'pp': 1, 'dp': 2, 'cp': 4, 'tp': 1}
    """
    batch = sequence_length, global_batch, precision, optimizer
    _, found = searched(model, hardware, gpus, recompute, gpus_per_node, *batch, overlap=overlap, imbalance=imbalance)
    return found.plans
