"""What ranks drop: the same elements of the same tensor, others of other parts of the batch, sequence or features."""

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import torch

from weft.tools.compare.rank_recording import RankRecording, same_place
from weft.tools.compare.seen import Key

_CHANCE = 1e-5  # probability of two masks that are equal by chance, below which they are not


class _Drop(NamedTuple):
    """One mask.

    Attributes:
        roots: calls of the reference's outermost module that the tensor belongs to.
        place: of the tensor in the reference's.
        of_input: the place of the outermost module's input.
    """

    rank: int
    roots: list[int]
    left: torch.Tensor
    place: tuple | None
    of_input: tuple | None


def drops_that_differ(
    ranks: Sequence[RankRecording], reference: Mapping[Key, torch.Tensor]
) -> Iterator[tuple[Key, int, str]]:
    """Yield each dropout that is wrong on two ranks, with one of them and what is wrong.

    Args:
        reference: the masks of the reference.
    """
    drops: dict[Key, list[_Drop]] = defaultdict(list)
    for rank in ranks:
        for key, seen in rank.seen.items():
            if key.kind == "dropout" and not bool(seen.tensor.all()):
                place = rank.places.get((key.step, key.module, key.root, key.call, "dropped"))
                of_input = rank.place_of_input(key, key.root)
                roots = rank.roots_of(key, key.root)
                drops[key._replace(root=0)].append(_Drop(rank.number, roots, seen.tensor, place, of_input))
    for key, of_ranks in drops.items():
        for first, other in combinations(of_ranks, 2):
            if first.rank != other.rank and (text := _fault(key, first, other, reference)):
                yield key, other.rank, text
                break


def rates_that_differ(
    ranks: Sequence[RankRecording], reference: Mapping[Key, torch.Tensor], called: Collection[tuple[int, str, int]]
) -> Iterator[tuple[Key, int, str]]:
    """Yield each module that drops another share than in the reference, with a rank and both shares.

    Args:
        reference: the rates of the reference.
        called: the reference's calls: step, module, call of the outermost module.
    """
    expected: dict[tuple, set[float]] = defaultdict(set)
    for key, rate in reference.items():
        expected[key.step, key.module, key.root].add(rate.item())
    for rank in ranks:
        rates: dict[tuple, set[float]] = defaultdict(set)
        for key, seen in rank.seen.items():
            if key.kind == "drop rate":
                rates[key.step, key.module, key.root].add(seen.tensor.item())
        for step, module, root in rank.calls:
            key = Key(step, "dropout", module, root, 0, 0)
            roots = [each for each in rank.roots_of(key, root) if (step, module, each) in called]
            there = set().union(*(expected.get((step, module, each), ()) for each in roots))
            here = rates.get((step, module, root), set())
            if roots and here != there:
                yield key, rank.number, f"it drops {_shares(here)}, the reference {_shares(there)}"


def _shares(rates: Collection[float]) -> str:
    return " and ".join(f"{rate:.4g}" for rate in sorted(rates)) or "nothing"


def _fault(key: Key, first: _Drop, other: _Drop, reference: Mapping[Key, torch.Tensor]) -> str:
    if first.left.shape != other.left.shape or first.place is None or other.place is None:
        return ""
    same_rows = first.roots == other.roots and same_place(first.of_input, other.of_input)
    same_tensor = same_rows and same_place(first.place, other.place)
    same_drop = torch.equal(first.left, other.left)
    if same_tensor == same_drop or (same_drop and _is_chance(first.left)):
        return ""
    if not same_tensor and first.roots != other.roots:
        masks = [reference.get(key._replace(root=roots[0])) for roots in (first.roots, other.roots)]
        if all(mask is not None and torch.equal(mask, masks[0]) for mask in masks):  # type: ignore[arg-type]
            return ""  # the reference drops the same in both calls
    what = ("have the same tensor", "different") if same_tensor else ("have different parts", "the same")
    return f"rank {other.rank} and rank {first.rank} {what[0]} and drop {what[1]} elements"


def _is_chance(left: torch.Tensor) -> bool:
    """Return whether another mask of this kind may well be equal."""
    while left.dim() > 1 and bool((left == left[..., :1]).all()):  # whole channels are dropped
        left = left[..., 0]
    kept = left.double().mean().item()
    return left.numel() * math.log(kept**2 + (1 - kept) ** 2) > math.log(_CHANCE)
