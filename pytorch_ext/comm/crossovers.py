"""Sizes at which collectives of CUDA tensors change their algorithm: measured for this device, else published ones.

`weft tune collectives` measures them on the GPUs of a machine and writes `crossovers/<architecture>.json`: a row for
each number of ranks, and the device and versions of the measurement.
"""

import json
from dataclasses import asdict, dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

import torch

NEVER = 1 << 62


@dataclass(frozen=True)
class Crossovers:
    """The first sizes, in bytes, of an algorithm.

    Attributes:
        one_shot: of one-shot all_reduce. Smaller tensors are low_latency if they fit its boxes.
        two_shot: of two-shot all_reduce.
        nccl: of NCCL, for sums in any order and for gathered tensors outside of symmetric memory.
        copies: of copy engines, for gathered tensors in symmetric memory.
    """

    one_shot: int
    two_shot: int
    nccl: int
    copies: int


# None of the defaults has been measured with these kernels, because that takes several GPUs.
# two_shot: vLLM's custom all-reduce (csrc/custom_all_reduce.cuh, tuned on A100 and smaller) is one-shot at every size
# with 2 ranks, below 512 KiB with up to 4, and below 256 KiB with up to 8. For more than 8 ranks the limit is that of
# torch's Inductor, 128 KiB (torch._inductor.config._collective.one_shot_all_reduce_threshold_bytes).
# nccl: the default limit of vLLM's custom all-reduce (max_size in custom_all_reduce.py). all_gather has no published
# limit and uses the same one. So do copies.
# one_shot: what fits the boxes of low_latency.
_TWO_SHOT = {2: NEVER, 4: 512 << 10, 8: 256 << 10}
_TWO_SHOT_OF_MORE = 128 << 10
_LARGEST = 8 << 20


def default_crossovers(world: int) -> Crossovers:
    two_shot = next((bytes for most, bytes in _TWO_SHOT.items() if world <= most), _TWO_SHOT_OF_MORE)
    return Crossovers((64 << 10) + 1, two_shot, _LARGEST + 1, _LARGEST + 1)


def crossovers(architecture: str, world: int, folder: Traversable | None = None) -> Crossovers:
    """Return the row of the architecture's table with the least ranks that are at least `world`, else the defaults."""
    table = (folder or _installed()) / f"{architecture}.json"
    if not table.is_file():
        return default_crossovers(world)
    rows = {int(ranks): row for ranks, row in json.loads(table.read_text())["ranks"].items() if int(ranks) >= world}
    return Crossovers(**rows[min(rows)]) if rows else default_crossovers(world)


def architecture_of(device: torch.device) -> str:
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device)) if device.type == "cuda" else device.type


def table_text(found: dict[int, Crossovers], measured_on: dict[str, Any]) -> str:
    """Return a table's text; `found` has crossovers by number of ranks."""
    rows = {str(world): asdict(row) for world, row in sorted(found.items())}
    return json.dumps({"measured_on": measured_on, "ranks": rows}, indent=1) + "\n"


def _installed() -> Traversable:
    return resources.files("weft.comm") / "crossovers"
