"""How long one product, one attention, one pass over memory and one collective take on given hardware."""

import math

from weft.planner.hardware import Hardware

TILE_M, TILE_N = 128, 256  # of the output, per processor at a time: the libraries' usual large tile
PROLOGUE_K = 128  # a tile's start and end cost as much as this many further elements of the summed dimension


def matmul_s(hardware: Hardware, flops: float, element_bytes: int, m: int, n: int, k: int) -> float:
    """Seconds of an [m, k] x [k, n] product: the larger of arithmetic and memory traffic (roofline).

    Arithmetic runs at flops (the device's peak), less what large products lose, less what the last, partly filled wave
    of tiles and each tile's start and end lose.
    """
    arithmetic = 2 * m * n * k / (flops * hardware.matmul_fraction)
    if hardware.processors:
        waves = math.ceil(m / TILE_M) * math.ceil(n / TILE_N) / hardware.processors
        # Libraries split the tiles of a short last wave along k; half of what it would idle is left.
        arithmetic *= (1 + math.ceil(waves) / waves) / 2 * (1 + PROLOGUE_K / k)
    return max(arithmetic, memory_s(hardware, element_bytes * (m * k + k * n + m * n)))


def memory_s(hardware: Hardware, moved_bytes: float) -> float:
    """Seconds of a kernel that reads and writes so many bytes and computes little."""
    return moved_bytes / hardware.memory_bytes_s


def elementwise_s(hardware: Hardware, moved_bytes: float) -> float:
    """Seconds of operations between products on the tensors of a layer, which on a CPU may be in a cache."""
    return moved_bytes / (hardware.elementwise_bytes_s or hardware.memory_bytes_s)


def attention_s(hardware: Hardware, flops: float, rows: float, keys: float, head_dim: int) -> float:
    """Seconds of the forward of fused causal attention: rows of queries, over the heads, against so many keys.

    Half of them are hidden; of the block on the diagonal what is hidden is computed. A score takes its two products and
    its exponential.
    """
    scores = rows * (keys + hardware.attention_block) / 2
    product = 4 * head_dim / (flops * hardware.matmul_fraction * hardware.attention_fraction)
    return scores * (product + hardware.attention_score_s)


def gather_s(hardware: Hardware, whole_bytes: float, ranks: int, stride: int) -> float:
    """Seconds of an all-gather or reduce-scatter of whole_bytes over ranks that stand stride apart (alpha-beta).

    An all-reduce is two of them. Inside of a node each rank has its link; between nodes a ring passes through each node
    over the network devices of all its members there, and its message takes every hop (Thakur et al. 2005, section 4).
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


def members_in_a_node(hardware: Hardware, ranks: int, stride: int) -> int:
    """How many of a group's ranks share a node, where members stand stride apart."""
    return max(1, min(ranks, hardware.devices_per_node // stride))


def send_s(hardware: Hardware, sent_bytes: float, stride: int) -> float:
    """Seconds of a message to the rank stride further on."""
    if stride < hardware.devices_per_node:
        return hardware.node_latency_s + sent_bytes / hardware.node_bytes_s
    return hardware.network_latency_s + sent_bytes / hardware.network_bytes_s
