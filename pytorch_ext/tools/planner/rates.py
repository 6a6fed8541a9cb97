"""Seconds of one product, one attention, one pass over memory and one collective on given hardware."""

import math

from weft.tools.planner.hardware import Hardware

TILE_M, TILE_N = 128, 256  # output tile of a processor: the libraries' usual large tile
PROLOGUE_K = 128  # a tile's start and end cost as much as this many further elements of the summed dimension


def matmul_s(
    hardware: Hardware, flops: float, element_bytes: int, m: float, n: int, k: float, groups: int = 1
) -> float:
    """Return the seconds of an [m, k] x [k, n] product: the larger of arithmetic and memory traffic (roofline).

    With groups, so many of these products run in one kernel, and share its waves.

    Arithmetic runs at flops (the device's peak), less the losses of large products, of the last, partly filled wave of
    tiles, and of each tile's start and end.
    """
    arithmetic = 2 * groups * m * n * k / (flops * hardware.matmul_fraction)
    if hardware.processors:
        waves = groups * math.ceil(m / TILE_M) * math.ceil(n / TILE_N) / hardware.processors
        # Libraries split the tiles of a short last wave along k: half of its idle time is left.
        arithmetic *= (1 + math.ceil(waves) / waves) / 2 * (1 + PROLOGUE_K / k)
    return max(arithmetic, memory_s(hardware, element_bytes * groups * (m * k + k * n + m * n)))


def memory_s(hardware: Hardware, moved_bytes: float) -> float:
    """Return the seconds of a kernel that moves so many bytes and computes little."""
    return moved_bytes / hardware.memory_bytes_s


def elementwise_s(hardware: Hardware, moved_bytes: float) -> float:
    """Return the seconds of operations between products on the tensors of a layer.

    On a CPU these tensors may be in a cache.
    """
    return moved_bytes / (hardware.elementwise_bytes_s or hardware.memory_bytes_s)


def attention_s(hardware: Hardware, flops: float, rows: float, keys: float, head_dim: int) -> float:
    """Return the seconds of the forward of fused causal attention.

    Half of the scores are hidden, but the kernel computes the hidden half of the blocks on the diagonal. A score costs
    its two products and its exponential.

    Args:
        rows: rows of queries, over all heads.
        keys: keys of each row.
    """
    scores = rows * (keys + hardware.attention_block) / 2
    product = 4 * head_dim / (flops * hardware.matmul_fraction * hardware.attention_fraction)
    return scores * (product + hardware.attention_score_s)


def gather_s(hardware: Hardware, whole_bytes: float, ranks: int, stride: int) -> float:
    """Return the seconds of an all-gather or reduce-scatter of whole_bytes (alpha-beta). An all-reduce takes two.

    Inside of a node each rank has its link. Between nodes a ring uses, in each node, the network devices of all its
    members there; its message takes every hop (Thakur et al. 2005, section 4).

    Args:
        stride: distance between two members of the group, in ranks.
    """
    if ranks == 1:
        return 0.0
    here = members_in_a_node(hardware, ranks, stride)
    nodes = -(-ranks // here)
    latency = nodes * (here - 1) * hardware.node_latency_s + (nodes - 1) * hardware.network_latency_s
    rate = hardware.node_bytes_s if here > 1 else math.inf
    if nodes > 1:
        rate = min(rate, here * hardware.network_bytes_s)
    return latency + whole_bytes * (ranks - 1) / ranks / rate


def exchange_s(hardware: Hardware, sent_bytes: float, ranks: int, stride: int) -> float:
    """Return the seconds of an all-to-all in which each rank sends sent_bytes, an equal part to each rank.

    What leaves the node goes through the rank's own network device, at the same time as the rest over its link.

    Args:
        stride: distance between two members of the group, in ranks.
    """
    if ranks == 1:
        return 0.0
    here = members_in_a_node(hardware, ranks, stride)
    inside = sent_bytes * (here - 1) / ranks / hardware.node_bytes_s + (here - 1) * hardware.node_latency_s
    away = ranks - here
    outside = sent_bytes * away / ranks / hardware.network_bytes_s + away * hardware.network_latency_s
    return max(inside, outside)


def members_in_a_node(hardware: Hardware, ranks: int, stride: int) -> int:
    """Return the number of a group's ranks in one node, if members are stride apart."""
    return max(1, min(ranks, hardware.devices_per_node // stride))


def send_s(hardware: Hardware, sent_bytes: float, stride: int) -> float:
    """Return the seconds of a message to the rank at distance stride."""
    if stride < hardware.devices_per_node:
        return hardware.node_latency_s + sent_bytes / hardware.node_bytes_s
    return hardware.network_latency_s + sent_bytes / hardware.network_bytes_s
