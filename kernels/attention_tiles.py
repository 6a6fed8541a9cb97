"""Tile configurations of the attention kernels."""

from collections.abc import Collection
from dataclasses import asdict, dataclass, replace

import torch

from weft.kernels.attention_rules import Rules
from weft.kernels.config import AttentionConfig
from weft.kernels.language import next_power_of_2

# The tile configurations that exist, by architecture, kind and padded head dimension; the heuristic takes the first.
# They fit the registers of the architecture; `make gate` shows how many are used.
_Table = dict[str, dict[int, tuple[AttentionConfig, ...]]]
_TILES: dict[str, _Table] = {
    "sm_80": {
        "forward": {
            64: (AttentionConfig(128, 64, 8, 3), AttentionConfig(64, 64, 4, 3)),
            128: (AttentionConfig(128, 32, 8, 2), AttentionConfig(64, 32, 4, 2)),
            256: (AttentionConfig(64, 64, 8, 2), AttentionConfig(64, 32, 4, 2)),
        },
        "dkdv": {
            64: (AttentionConfig(32, 64, 8, 2), AttentionConfig(32, 128, 8, 2)),
            128: (AttentionConfig(64, 64, 8, 2), AttentionConfig(32, 64, 8, 2)),
            256: (AttentionConfig(32, 32, 8, 2),),
        },
        "dq": {
            64: (AttentionConfig(64, 64, 8, 2), AttentionConfig(64, 32, 4, 2)),
            128: (AttentionConfig(64, 32, 4, 2),),
            256: (AttentionConfig(32, 32, 8, 2), AttentionConfig(32, 32, 4, 1)),
        },
    },
    "sm_90": {
        "forward": {
            # Tiles with `ahead` are not measured yet, so they stand last. Beside the product run 57 of the 66
            # exponentials of a thread at head dim 64, and 62 of 66 or 32 of 34 at 128. 128 x 64 at head dim 64 is left
            # out: ptxas moves 32 of its 34 before the product. Programs of those with 4 warps share a multiprocessor.
            64: (
                *(AttentionConfig(128, 128, 8, 3), AttentionConfig(128, 64, 8, 3)),
                *(AttentionConfig(128, 128, 8, 3, ahead=True), AttentionConfig(64, 128, 4, 2, ahead=True)),
            ),
            128: (
                *(AttentionConfig(128, 128, 8, 2), AttentionConfig(128, 64, 8, 3), AttentionConfig(64, 64, 4, 3)),
                *(AttentionConfig(128, 128, 8, 2, ahead=True), AttentionConfig(128, 64, 8, 3, ahead=True)),
                AttentionConfig(64, 64, 4, 2, ahead=True),
            ),
            256: (AttentionConfig(128, 64, 8, 2), AttentionConfig(64, 64, 4, 2)),
        },
        "dkdv": {
            64: (AttentionConfig(64, 128, 8, 2), AttentionConfig(32, 128, 8, 2)),
            # 64 queries by 128 keys would spill: 128 registers of sums, 64 of scores, 32 of the queries' lse and delta.
            128: (AttentionConfig(32, 64, 4, 2), AttentionConfig(32, 128, 8, 2), AttentionConfig(64, 64, 8, 2)),
            256: (AttentionConfig(32, 64, 8, 2),),
        },
        "dq": {
            64: (AttentionConfig(128, 64, 8, 2), AttentionConfig(64, 64, 4, 2)),
            128: (AttentionConfig(128, 64, 8, 3), AttentionConfig(64, 64, 4, 2)),
            256: (AttentionConfig(64, 32, 8, 2), AttentionConfig(64, 32, 4, 2)),
        },
    },
    "sm_100": {
        "forward": {
            64: (AttentionConfig(64, 64, 4, 3),),
            128: (AttentionConfig(128, 64, 8, 2), AttentionConfig(64, 64, 4, 2)),
            256: (AttentionConfig(64, 64, 8, 2),),
        },
        "dkdv": {
            64: (AttentionConfig(64, 128, 8, 2), AttentionConfig(32, 128, 8, 2)),
            128: (AttentionConfig(64, 128, 8, 2), AttentionConfig(64, 64, 8, 2)),
            256: (AttentionConfig(64, 64, 8, 1), AttentionConfig(32, 64, 8, 2)),
        },
        "dq": {
            64: (AttentionConfig(128, 64, 8, 2),),
            128: (AttentionConfig(64, 64, 8, 2), AttentionConfig(128, 32, 8, 2)),
            256: (AttentionConfig(64, 32, 8, 2),),
        },
    },
}
_TILES["sm_120"] = _TILES["sm_80"] | {
    "forward": _TILES["sm_80"]["forward"]
    | {64: (AttentionConfig(128, 64, 8, 3), AttentionConfig(64, 64, 4, 2)), 256: (AttentionConfig(64, 32, 4, 2),)}
}  # within 99 KiB, and as ptxas 13.1 does not spill
# Smaller tiles for kernels with other uses for registers: they draw random numbers ("dropout"), compare documents,
# continue a state or cap scores. The first entry that matches counts.
_TIGHT_TILES: dict[str, dict[str, _Table]] = {
    "sm_80": {
        "dropout": {
            "dkdv": {
                64: (AttentionConfig(32, 32, 8, 2),),
                128: (AttentionConfig(32, 64, 8, 2),),
                256: (AttentionConfig(16, 32, 8, 2),),
            },
        },
        "documents": {"dq": {64: (AttentionConfig(64, 32, 4, 2),)}},
    },
    "sm_90": {
        "dropout, state": {"forward": {128: (AttentionConfig(128, 32, 8, 2),)}},
        "dropout": {
            "forward": {64: (AttentionConfig(128, 64, 8, 3),), 128: (AttentionConfig(128, 64, 8, 2),)},
            "dkdv": {
                64: (AttentionConfig(32, 128, 8, 2),),
                128: (AttentionConfig(16, 64, 8, 2),),
                256: (AttentionConfig(16, 64, 8, 2),),
            },
            "dq": {128: (AttentionConfig(64, 32, 4, 2),)},
        },
        "state": {
            "forward": {
                128: (AttentionConfig(128, 64, 8, 3), AttentionConfig(64, 64, 4, 3)),
                256: (AttentionConfig(128, 32, 8, 2),),
            },
        },
        "softcap": {
            "forward": {128: (AttentionConfig(128, 64, 8, 3), AttentionConfig(64, 64, 4, 3))},
            "dkdv": {128: (AttentionConfig(16, 128, 8, 2),)},
        },
        "documents": {
            "forward": {128: (AttentionConfig(128, 64, 8, 3), AttentionConfig(64, 64, 4, 3))},
            "dkdv": {128: (AttentionConfig(16, 128, 8, 2),)},
            "dq": {128: (AttentionConfig(64, 32, 4, 2),)},
        },
    },
    "sm_100": {
        "dropout": {
            "dkdv": {128: (AttentionConfig(64, 64, 8, 2),), 256: (AttentionConfig(32, 64, 8, 2),)},
            "dq": {128: (AttentionConfig(64, 32, 8, 2),)},
        },
    },
}
_TIGHT_TILES["sm_120"] = _TIGHT_TILES["sm_80"] | {
    "documents": {"dkdv": {128: (AttentionConfig(32, 64, 8, 2),)}, "dq": {64: (AttentionConfig(64, 32, 4, 2),)}}
}
KINDS = "forward", "dkdv", "dq"
_INTERPRETED_TILES = (AttentionConfig(16, 32, 4, 1), AttentionConfig(32, 16, 4, 1))
_INTERPRETED_AHEAD = tuple(replace(tile, ahead=True) for tile in _INTERPRETED_TILES)


@dataclass(frozen=True)
class AttentionProblem:
    """The properties of a chunk of attention that its speed depends on.

    Attributes:
        head_dim, value_dim: padded to the width of a tile.
        bounded: some keys are hidden by their positions.
    """

    queries: int
    keys: int
    head_dim: int
    value_dim: int
    bounded: bool
    dropout: bool
    dtype: str

    @classmethod
    def of(cls, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: Rules) -> "AttentionProblem":
        return cls(
            q.size(2),
            k.size(2),
            padded(q.size(3)),
            padded(v.size(3)),
            rules.left is not None or rules.right is not None,
            rules.dropout > 0,
            str(q.dtype).removeprefix("torch."),
        )

    def key(self) -> dict[str, int | str | bool]:
        """Return the key for the lookup in a tuned table."""
        return asdict(self)


def listed(kind: str, architecture: str, head_dim: int, features: Collection[str] = ()) -> tuple[AttentionConfig, ...]:
    """Return the configurations that exist for a kind of kernel.

    Args:
        kind: one of KINDS.
        head_dim: the larger one of the head dimensions.
        features: the kernel's uses of more registers, of "dropout", "documents", "state" and "softcap".
    """
    if architecture == "interpreter":
        return (*_INTERPRETED_TILES, *_INTERPRETED_AHEAD) if kind == "forward" else _INTERPRETED_TILES
    width = max(64, padded(head_dim))
    for needs, tiles in _TIGHT_TILES[architecture].items():
        found = tiles.get(kind, {}).get(width)
        if found and set(needs.split(", ")) <= set(features):
            return found
    return _TILES[architecture][kind][width]


def padded(head_dim: int) -> int:
    """Return the width of a tile: a power of two, and at least the 16 that a tensor core needs."""
    return max(16, next_power_of_2(head_dim))
