"""Argument lists that tests and benches share."""

from collections.abc import Iterable
from dataclasses import dataclass


def covering(*values: Iterable) -> list[tuple]:
    """Return as many combinations as the longest list has values, so that each value of each list occurs."""
    lists = [list(each) for each in values]
    return [tuple(each[number % len(each)] for each in lists) for number in range(max(map(len, lists)))]


@dataclass(frozen=True)
class Mlp:
    """Sizes of a two-layer perceptron on `tokens` tokens."""

    hidden: int
    intermediate: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.hidden}/{self.intermediate}/{self.tokens}"


MLPS = [Mlp(64, 256, 16), Mlp(256, 1024, 64), Mlp(255, 1021, 63), Mlp(1024, 4096, 512)]
SMALL_MLPS = [Mlp(8, 16, 6), Mlp(7, 11, 5), Mlp(5, 4, 4), Mlp(33, 66, 9)]

# Elements of a collective: nothing, less than one a rank, around a cache line, around one staging buffer, several.
COUNTS = [0, 1, 2, 3, 17, 1023, 65536, 65537, 200_003]

# m, n, k of a product: one element, less than a tile, a tile, its odd neighbours, thin, deep, several tiles each way.
MATMULS = [(1, 1, 1), (5, 3, 7), (32, 32, 32), (33, 31, 65), (3, 70, 40), (67, 5, 130), (80, 48, 64), (70, 67, 129)]

# world, batch, m, n, k of a product with m rows (in each of `batch` blocks) shared by the ranks: less than a tile each,
# tiles with rows of several ranks, several chunks, uneven shares, odd widths.
COMMUNICATING = [(2, 1, 64, 32, 32), (2, 3, 7, 24, 16), (3, 1, 100, 33, 21), (4, 2, 30, 72, 40), (5, 1, 83, 16, 8)]


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a published decoder."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    gated: bool


# From the models' own config.json files and, for GPT-3, Brown et al. 2020, table 2.1.
MODELS = {
    "llama-3-8b": ModelShape(4096, 14336, 32, 8, 128, 128256, gated=True),
    "llama-3-70b": ModelShape(8192, 28672, 64, 8, 128, 128256, gated=True),
    "qwen3-32b": ModelShape(5120, 25600, 64, 8, 128, 151936, gated=True),
    "gpt-3-175b": ModelShape(12288, 49152, 96, 96, 128, 51200, gated=False),
}
TENSOR_PARALLEL = [1, 2, 4, 8]
TOKENS = [1024, 2048, 4096, 8192, 16384]


@dataclass(frozen=True)
class LinearLayer:
    """One rank's shard of a model's linear layer: a weight [n, k] (two if gated) and the activation after it."""

    name: str
    n: int
    k: int
    activation: str | None = None
    gated: bool = False


def linear_layers(model: ModelShape, tp: int) -> list[LinearLayer]:
    """Return the four products of a decoder block, split over `tp` ranks."""
    attention, mlp = model.heads * model.head_dim // tp, model.intermediate // tp
    keys = 2 * model.kv_heads * model.head_dim // tp
    rise = LinearLayer("rise", mlp, model.hidden, "silu" if model.gated else "gelu_tanh", model.gated)
    return [
        LinearLayer("qkv", attention + keys, model.hidden),
        LinearLayer("attention out", model.hidden, attention),
        rise,
        LinearLayer("fall", model.hidden, mlp),
    ]


@dataclass(frozen=True)
class AttentionCase:
    """Sizes of a causal or full attention: heads of queries and of keys, positions, head dimension."""

    heads: int
    kv_heads: int
    sequence: int
    head_dim: int
    causal: bool

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        return f"{self.heads}:{self.kv_heads} heads, {self.sequence} x {self.head_dim}, {mask}"


ATTENTIONS = [
    AttentionCase(heads, kv_heads, sequence, head_dim, causal)
    for heads, kv_heads in [(64, 8), (16, 16)]
    for head_dim in (64, 128)
    for sequence in (2048, 8192, 32768)
    for causal in (True, False)
]
