"""Rates of a device and its links: datasheet presets, or a machine measured by `weft bench --save hw.json`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from sys import float_info
from typing import Any

VERSION = 2  # of the file format
_GIB = 1024**3


@dataclass(frozen=True)
class Hardware:
    """A node of equal devices. Rates are sustained rates, in bytes and operations per second.

    Args:
        name: name in the output.
        memory_bytes: memory of a device, as the framework sees it.
        peak_flops: peak rate by precision ("fp32", "fp16", "bf16"), from the datasheet. MFU is a share of it.
        matmul_fraction: share of the peak that large square products reach.
        attention_fraction: share of the rate of large products that a fused attention kernel's products reach.
        attention_score_s: additional time of a fused attention kernel for each score: its exponential.
        attention_block: positions in a block of that kernel; it also computes the hidden half of the blocks on the
            diagonal.
        activation_forward_s, activation_backward_s: time of the MLP's activation for each element, memory included; 0
            if memory alone counts.
        elementwise_bytes_s: rate at which an operation reads and writes tensors of a layer; 0 takes memory_bytes_s.
        memory_bytes_s: rate of a device's memory.
        node_bytes_s, node_latency_s: rate of one direction of a device's link inside of a node, and latency of a hop.
        network_bytes_s, network_latency_s: the same between nodes, per device.
        processors: units that work on tiles of a product at the same time (SMs); 0 if tiles do not matter (CPUs).
        devices_per_node: devices that share a node's links.
        launch_s: time of the host for a kernel or an operation; added to the operation's time if processors is 0.
        context_launch_s: the same if ranks share a sequence, with their synchronization; 0 takes launch_s.
        reserved_bytes: memory taken on each device before the first tensor (context, libraries).
        fragmentation: share of the allocated memory that the allocator loses.
        full_speed_ranks: ranks of a node that run at these rates at once; further ranks share them (CPU cores). 0: as
            many as there are devices.
        turn_s: additional time of a collective of two ranks if ranks outnumber the cores. One of the two
            waits until the scheduler takes a core from another rank, then the other waits for the first.
        link_fraction: share of the datasheet's link rates in node_bytes_s and network_bytes_s.
    """

    name: str
    memory_bytes: float
    peak_flops: Mapping[str, float]
    memory_bytes_s: float
    node_bytes_s: float
    network_bytes_s: float
    matmul_fraction: float = 1.0
    attention_fraction: float = 1.0
    attention_score_s: float = 0.0
    attention_block: float = 0.0
    activation_forward_s: float = 0.0
    activation_backward_s: float = 0.0
    elementwise_bytes_s: float = 0.0
    processors: int = 0
    devices_per_node: int = 8
    node_latency_s: float = 3e-6
    network_latency_s: float = 10e-6
    launch_s: float = 4e-6
    context_launch_s: float = 0.0
    reserved_bytes: float = 0.0
    fragmentation: float = 0.0
    full_speed_ranks: int = 0
    turn_s: float = 0.0
    link_fraction: float = 1.0

    @staticmethod
    def of(source: Any) -> "Hardware":
        """Return a Hardware from a Hardware, a preset's name or a file.

        Raises:
            ValueError: the name is neither a preset nor a file, or the file is of another version or lacks fields.
            TypeError: source is anything else.
        """
        if isinstance(source, Hardware):
            return source
        if not isinstance(source, str | Path):
            raise TypeError(
                f"hardware for the planner is a preset's name, a file or a weft.tools.planner.Hardware(...), and not a "
                f"{type(source).__name__}"
            )
        name = str(source).strip().lower().replace("_", "-").replace(" ", "-")
        known = presets().get(name)
        if known:
            return known
        path = Path(source)
        if not path.is_file():
            raise ValueError(f"hardware {str(source)!r} is neither a file nor one of {', '.join(presets())}")
        try:
            values = json.loads(path.read_text())
        except (ValueError, RecursionError) as error:  # not JSON, not text, or nested too deep
            raise ValueError(f"{path} is not JSON: {error}") from None
        return _from_file(path, values)

    def with_nodes_of(self, devices: int) -> "Hardware":
        """Return the same devices in nodes of another size.

        Raises:
            ValueError: devices is not a whole number of at least one.
        """
        check_count("gpus_per_node", devices)
        return replace(self, devices_per_node=devices)

    def with_network_of(self, gb_s: float) -> "Hardware":
        """Return the same devices behind another network, with a datasheet rate of gb_s GB/s."""
        return replace(self, network_bytes_s=gb_s * 1e9 * self.link_fraction)


def check_count(name: str, value: Any) -> None:
    """Raise ValueError unless value is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}={value!r} must be a whole number")
    if value < 1:
        raise ValueError(f"{name}={value} must be at least 1")


@cache
def presets() -> dict[str, Hardware]:
    """Return the known devices, under each of their names."""
    stored = json.loads(files(__package__).joinpath("data/hardware.json").read_text())
    devices = {name: _build(name, {**stored["every"], **values}) for name, values in stored["hardware"].items()}
    return devices | {other: devices[name] for other, name in stored["also_called"].items()}


# Key of a file -> field and unit: {"memory_gb_s": 40} is memory_bytes_s=40e9.
_REQUIRED = {
    "memory_gib": ("memory_bytes", _GIB),
    "memory_gb_s": ("memory_bytes_s", 1e9),
    "node_gb_s": ("node_bytes_s", 1e9),
    "network_gb_s": ("network_bytes_s", 1e9),
}
_OPTIONAL = {
    "matmul_fraction": ("matmul_fraction", 1),
    "attention_fraction": ("attention_fraction", 1),
    "attention_score_ns": ("attention_score_s", 1e-9),
    "attention_block": ("attention_block", 1),
    "activation_forward_ns": ("activation_forward_s", 1e-9),
    "activation_backward_ns": ("activation_backward_s", 1e-9),
    "elementwise_gb_s": ("elementwise_bytes_s", 1e9),
    "processors": ("processors", 1),
    "devices_per_node": ("devices_per_node", 1),
    "node_latency_us": ("node_latency_s", 1e-6),
    "network_latency_us": ("network_latency_s", 1e-6),
    "launch_us": ("launch_s", 1e-6),
    "context_launch_us": ("context_launch_s", 1e-6),
    "reserved_gib": ("reserved_bytes", _GIB),
    "fragmentation": ("fragmentation", 1),
    "full_speed_ranks": ("full_speed_ranks", 1),
    "turn_us": ("turn_s", 1e-6),
}


_POSITIVE = ("matmul_fraction", "attention_fraction", "devices_per_node")
_WHOLE = ("processors", "devices_per_node", "full_speed_ranks")
_NOT_RATES = ("weft_hardware", "name", "peak_tflops", "date", "environment", "measured", "command")


def _build(name: str, values: Mapping) -> Hardware:
    fields: dict[str, Any] = {"peak_flops": {key: rate * 1e12 for key, rate in values["peak_tflops"].items()}}
    for key, (field, unit) in {**_REQUIRED, **_OPTIONAL}.items():
        if key in values:
            fields[field] = values[key] * unit
    if "link_fraction" in values:  # presets from datasheets; measured rates are sustained already
        fields["link_fraction"] = values["link_fraction"]
        fields["memory_bytes_s"] *= values["memory_fraction"]
        fields["node_bytes_s"] *= values["link_fraction"]
        fields["network_bytes_s"] *= values["link_fraction"]
    return Hardware(name=name, **fields)


def _from_file(path: Path, values: Any) -> Hardware:
    version = values.get("weft_hardware") if isinstance(values, dict) else None
    if version != VERSION:
        raise ValueError(
            f"{path}: weft_hardware is {version!r}, and this weft reads version {VERSION}: "
            f"measure again (weft bench --save {path.name})"
        )
    lacking = [key for key in (*_REQUIRED, "peak_tflops") if key not in values]
    if lacking:
        raise ValueError(f"{path}: lacks {', '.join(lacking)}")
    unknown = [key for key in values if key not in {*_REQUIRED, *_OPTIONAL, *_NOT_RATES}]
    if unknown:
        known = ", ".join((*_REQUIRED, *_OPTIONAL))
        raise ValueError(f"{path}: {', '.join(unknown)}: no such field; there are {known}")
    numbers = {key: value for key, value in values.items() if key in _REQUIRED or key in _OPTIONAL}
    rates = values["peak_tflops"] if isinstance(values["peak_tflops"], dict) else {"peak_tflops": None}
    for key, value in {**numbers, **rates}.items():
        positive = key in _REQUIRED or key in rates or key in _POSITIVE
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 <= value <= float_info.max or (positive and value == 0):
            raise ValueError(f"{path}: {key}={value!r} must be a {'positive ' if positive else ''}number")
        if key in _WHOLE and value != int(value):
            raise ValueError(f"{path}: {key}={value!r} must be a whole number")
    return _build(str(values.get("name", path.stem)), {**numbers, "peak_tflops": rates})
