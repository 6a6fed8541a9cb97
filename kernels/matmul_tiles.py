"""Tile configurations of the matmul, and the choice among them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import torch

from weft.kernels import launch
from weft.kernels.config import Choice, MatmulConfig, choose
from weft.kernels.language import cdiv

MOST_SPLITS = 16
_LEAST_DEPTH = 512  # smallest depth of a piece of K: less does not fill the pipeline

# The tile configurations that exist, by the product's use of registers. "narrow": two sums (gated), or the addresses of
# operands that are not aligned. "fp32": operands take twice the room, and in ieee precision no tensor core
# holds the sums.
_TILES: dict[str, dict[str, tuple[MatmulConfig, ...]]] = {
    "sm_80": {
        "wide": (
            MatmulConfig(128, 256, 32, warps=8, stages=3),
            MatmulConfig(128, 128, 32, warps=8, stages=4),
            MatmulConfig(64, 128, 32, warps=4, stages=4),
            MatmulConfig(64, 64, 32, warps=4, stages=4),
        ),
        "narrow": (MatmulConfig(64, 128, 32, warps=4, stages=3), MatmulConfig(64, 64, 32, warps=4, stages=3)),
        "fp32": (MatmulConfig(64, 64, 16, warps=8, stages=3),),
        "fp32 narrow": (MatmulConfig(64, 32, 16, warps=8, stages=3),),
    },
    "sm_90": {
        "wide": (
            MatmulConfig(128, 256, 64, warps=8, stages=3),
            MatmulConfig(128, 256, 128, warps=8, stages=2),
            # Two sums, of 128 and 64 columns. 132 of it make the wgrad 768 x 4096 on 132 multiprocessors; 128 x 256
            # makes 96, and took 86 us over 8192 tokens where cuBLAS takes 69 (H200).
            MatmulConfig(128, 192, 64, warps=8, stages=4),
            MatmulConfig(128, 128, 64, warps=8, stages=4),
            MatmulConfig(64, 128, 64, warps=4, stages=4),
            MatmulConfig(64, 64, 64, warps=4, stages=5),
        ),
        "narrow": (
            MatmulConfig(128, 128, 64, warps=8, stages=3),
            MatmulConfig(64, 128, 64, warps=8, stages=3),
            MatmulConfig(64, 64, 64, warps=4, stages=3),
        ),
        "fp32": (MatmulConfig(64, 64, 16, warps=8, stages=4),),
        "fp32 narrow": (MatmulConfig(64, 32, 16, warps=8, stages=3),),
    },
    "sm_100": {
        "wide": (
            MatmulConfig(128, 256, 64, warps=8, stages=3),
            MatmulConfig(128, 256, 128, warps=8, stages=2),
            MatmulConfig(128, 128, 64, warps=8, stages=4),
            MatmulConfig(128, 64, 64, warps=8, stages=4),
        ),
        "narrow": (MatmulConfig(128, 128, 64, warps=8, stages=3), MatmulConfig(128, 64, 64, warps=8, stages=3)),
        "narrow communicating": (MatmulConfig(128, 32, 64, warps=8, stages=3),),
        "fp32": (MatmulConfig(64, 64, 16, warps=8, stages=3),),
        "fp32 narrow": (MatmulConfig(64, 32, 16, warps=8, stages=3),),
    },
}
_TILES["sm_120"] = _TILES["sm_80"] | {  # with at most 96 KiB of shared memory, and as ptxas 13.1 does not spill
    "wide": tuple(
        replace(tile, warps=8) if (tile.block_m, tile.block_n) == (64, 128) else tile
        for tile in _TILES["sm_80"]["wide"]
    ),
}
_INTERPRETED_TILES = (
    MatmulConfig(32, 16, 16, warps=4, stages=1),
    MatmulConfig(16, 32, 32, warps=4, stages=1),
    MatmulConfig(32, 48, 16, warps=4, stages=1),  # wide only, as on the device
)
# Share of the tensor cores' peak that a tile reaches: from the times in configs/sm_90/matmul.json (H200, bf16), less
# 6 us a launch and 1000 cycles a tile. 128 x 256 and 128 x 128 have the medians of 35 and 6 products. 64 x 128 has 0.78
# in the two where it is the fastest, but must be below 0.67 for the others. 128 x 192 and 64 x 64 were not measured.
# The heuristic takes the tile of 59 of the 64 rows with these shares, and of 55 with the estimate by bytes.
_EFFICIENCIES: dict[str, dict[tuple[int, int], float]] = {
    "sm_90": {(128, 256): 0.86, (128, 128): 0.78, (64, 128): 0.6, (128, 192): 0.82, (64, 64): 0.5},
}


@dataclass(frozen=True)
class Problem:
    """The properties of a product [m, k] times [k, n] that its speed depends on.

    Attributes:
        layout: BLAS's letters for the two operands, n if rows are contiguous and t if columns are.
        aligned: rows (columns) of both operands lie at multiples of 16 bytes.
        fused: the fused work of the kernel: "none", "main_grad" for a product that is added to one, or an activation,
            with "_gated" after it where there is a gate.
    """

    m: int
    n: int
    k: int
    layout: str
    aligned: bool
    dtype: torch.dtype
    fused: str = "none"
    precision: str = "ieee"

    @property
    def narrow(self) -> bool:
        return not self.aligned or self.fused.endswith("_gated")

    def key(self) -> dict[str, int | str | bool]:
        """Return the key for the lookup in a tuned table."""
        dtype = str(self.dtype).removeprefix("torch.")
        if self.dtype == torch.float32:
            dtype += "_" + self.precision
        sizes = {"m": self.m, "n": self.n, "k": self.k}
        return {**sizes, "layout": self.layout, "aligned": self.aligned, "dtype": dtype, "fused": self.fused}


def is_turned(matrix: torch.Tensor) -> bool:
    """Return True if the matrix has contiguous columns and not contiguous rows."""
    return matrix.stride(0) == 1 and matrix.stride(1) != 1


def are_aligned(*matrices: torch.Tensor | None) -> bool:
    """Return True if the tensor copy engine can read all matrices: their rows (or columns) lie at 16 bytes."""
    given = [matrix for matrix in matrices if matrix is not None]
    return all(launch.describable(matrix.t() if is_turned(matrix) else matrix) for matrix in given)


def problem_of(a, b, b_up=None, *, activation: str = "none", precision: str = "ieee", adds: bool = False) -> Problem:
    """Return the problem of the product a @ b; `adds` if it is added to an fp32 main_grad."""
    layout = "".join("t" if is_turned(matrix) else "n" for matrix in (a, b))
    fused = "main_grad" if adds else activation + ("_gated" if b_up is not None else "")
    aligned = are_aligned(a, b, b_up)
    return Problem(a.size(0), b.size(1), a.size(1), layout, aligned, a.dtype, fused, precision)


def choose_tile(
    problem: Problem, device: torch.device, explicit: MatmulConfig | None = None, communicates: bool = False
) -> Choice[MatmulConfig]:
    """Return the configuration that runs, with its source; raise ValueError if an explicit one does not exist."""
    return _choose_tile(problem, launch.architecture_of(device), launch.multiprocessors(device), explicit, communicates)


def forget_choices() -> None:
    """Choose anew, by measurements that were added."""
    _choose_tile.cache_clear()


@lru_cache(maxsize=4096)
def _choose_tile(
    problem: Problem, architecture: str, processors: int, explicit: MatmulConfig | None, communicates: bool
) -> Choice[MatmulConfig]:
    tiles = listed(architecture, problem.dtype, problem.narrow, communicates)
    if explicit is not None and explicit.split_k not in range(1, MOST_SPLITS + 1):
        raise ValueError(f"matmul: split_k={explicit.split_k} must be 1 to {MOST_SPLITS}")
    guess = _heuristic(problem.m, problem.n, problem.k, tiles, processors, architecture)
    choice = choose("matmul", architecture, problem.key(), explicit, tiles, guess)
    exists = choice.config.compiled() in tiles  # tables hold products that do not communicate
    return choice if exists else Choice(guess, "heuristic", choice.entry)


def tile_of_any_size(a: torch.Tensor, b: torch.Tensor) -> MatmulConfig:
    """Return the tile for products a @ b of this type whose bits must not depend on their sizes and alignment.

    Operands that are not aligned have tiles of their own; it is the largest block that both kinds have. In fp32 there
    is none: every element is one chain of multiply-adds in any block.
    """
    return _tile_of_any_size(launch.architecture_of(a.device), a.dtype, not are_aligned(a, b))


@lru_cache
def _tile_of_any_size(architecture: str, dtype: torch.dtype, narrow: bool) -> MatmulConfig:
    def blocks(tiles: Sequence[MatmulConfig]) -> list[tuple[int, int, int]]:
        return [(tile.block_m, tile.block_n, tile.block_k) for tile in tiles]

    tiles, others = (listed(architecture, dtype, kind) for kind in (narrow, not narrow))
    return next((tile for tile in tiles if blocks([tile])[0] in blocks(others)), tiles[0])


def listed(
    architecture: str, dtype: torch.dtype, narrow: bool = False, communicates: bool = False
) -> tuple[MatmulConfig, ...]:
    """Return the tile configurations that exist.

    `make gate` compiles them, and tuning picks among them. The flags and the ranks' addresses of a
    communicating product take registers too, so a narrow one gets only its smallest tile, or a still smaller one.
    """
    if architecture == "interpreter":
        return _INTERPRETED_TILES[: 2 if narrow else 3]
    kinds = _TILES[architecture]
    if narrow and communicates and dtype != torch.float32:
        return kinds.get("narrow communicating", kinds["narrow"][-1:])
    if dtype == torch.float32:
        return kinds["fp32 narrow" if narrow else "fp32"]
    return kinds["narrow" if narrow else "wide"]


def candidates(tiles: Sequence[MatmulConfig], k: int) -> list[MatmulConfig]:
    """Return each tile with K whole, and with K in as many pieces as its depth permits."""
    splits = [s for s in (1, 2, 4, 8, MOST_SPLITS) if s == 1 or k >= s * _LEAST_DEPTH]
    return [replace(tile, split_k=s) for tile, s in product(tiles, splits)]


def _heuristic(
    m: int, n: int, k: int, tiles: Sequence[MatmulConfig], processors: int, architecture: str
) -> MatmulConfig:
    """Return the configuration with the least estimated time, in cycles of one multiprocessor.

    A tile's rate was measured, or falls with the bytes it loads for each operation. Waves are rounded up, which slows
    thin products. Split sums write and read 8 bytes per element for each piece. Tables replace the estimate.
    """
    measured = _EFFICIENCIES.get(architecture, {})

    def cycles(config: MatmulConfig) -> float:
        area = config.block_m * config.block_n
        intensity = area / (config.block_m + config.block_n)
        estimate = intensity / (intensity + 16)
        rate = 4096 * measured.get((config.block_m, config.block_n), estimate)  # operations per cycle
        units = cdiv(m, config.block_m) * cdiv(n, config.block_n) * config.split_k
        work = cdiv(units, processors) * (2 * area * cdiv(k, config.split_k) / rate + 1000)
        partials = 8 * m * n * config.split_k / (processors * 12) + 5000 if config.split_k > 1 else 0
        return work + partials

    return min(candidates(tiles, k), key=cycles)
