"""Options of TrainingArguments that do not work with shards, each with the way out."""

from collections.abc import Mapping
from typing import Any

_SHARDING = "would shard what is split already: call Trainer without it"
_REFUSED: dict[str, tuple[Any, str]] = {
    "push_to_hub": (False, "has not been tried: upload the folder that is saved"),
    "fsdp": (None, _SHARDING),
    "deepspeed": (None, _SHARDING),
    "parallelism_config": (None, _SHARDING),
    "use_liger_kernel": (False, "would compute with this rank's shards as if they were whole: call Trainer without it"),
    "auto_find_batch_size": (False, "could choose another batch on each rank: give per_device_train_batch_size"),
}


def check_options(options: Mapping[str, Any], device_type: str) -> None:
    """Raise ValueError for an option that does not work with shards."""
    on_cpu = device_type == "cpu"
    device = {"use_cpu": (on_cpu, f"is not possible with a mesh of {device_type}: leave it out")}
    for name, (value, why) in {**device, **_REFUSED}.items():
        given = options.get(name, value)
        if given != value and (given or value):
            raise ValueError(f"settings: {name}={given!r} {why}")
