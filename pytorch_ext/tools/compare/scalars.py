"""Losses and settings of optimizers, which are compared as numbers; and gradients that only the run has."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch

from weft.tools.compare.alignment import error_of
from weft.tools.compare.rank_recording import RankRecording
from weft.tools.compare.report import Mismatch, words_of
from weft.tools.compare.seen import Key

NEAR_LOSS = 1e-4  # relative; a difference of large terms has more rounding than its two samples show
SAME_SETTING = 1e-6


def wrong_loss(
    step: int, losses: Sequence[float], of_ranks: Sequence[Sequence[float]], rounding: float, allowed: float
) -> tuple[Mismatch | None, float]:
    """Return what is wrong with a step's loss, and the factor of a sum over micro-batches whose mean is right, or 0.

    Every rank has the loss, or the ranks' losses have it as their mean or their sum, the latter in equal copies too.

    Args:
        losses: the reference's in this step, one for each backward.
        of_ranks: those of each rank that has any.
    """
    allowed = max(allowed, NEAR_LOSS)
    total, sums = sum(losses), [sum(of_rank) for of_rank in of_ranks]
    mean = sum(sums) / len(sums)

    def near(x: float, *others: float) -> bool:
        return any(abs(x - other) <= allowed * abs(other) for other in others)

    wanted = (total, total / len(losses))  # a sum over micro-batches, or their mean
    in_order = sorted(sums)
    copies = [  # of each share: ranks of tp have the same one
        n
        for n in range(1, len(sums))
        if len(sums) % n == 0 and all(near(x, in_order[i - i % n]) for i, x in enumerate(in_order))
    ]
    if all(near(x, total) for x in sums) or near(mean, *wanted) or any(near(sum(sums) / n, *wanted) for n in copies):
        return None, 0.0
    error = abs(mean - total) / abs(total) if total else abs(mean)
    text = f"the mean of the ranks' losses is {mean:.6g}, the reference's loss {total:.6g}"
    finding = Mismatch("the loss", "loss", step, 0, error, rounding, text)
    means = sum(sum(of_rank) / len(of_rank) for of_rank in of_ranks) / len(of_ranks)
    return finding, mean / total if near(means, *wanted) else 0.0


def wrong_settings(
    step: int, expected: Mapping[Key, torch.Tensor], ranks: Sequence[RankRecording]
) -> Iterator[Mismatch]:
    """Yield each difference of the optimizers' settings once, with the parameters that have it."""
    theirs = {key: x for key, x in expected.items() if (key.step, key.kind) == (step, "setting")}
    found: dict[tuple, list[tuple[Key, int, float]]] = defaultdict(list)  # by setting and both values
    named = any(key.module for rank in ranks for key in rank.seen if key.kind == "setting")
    for rank in ranks:
        for key, seen in rank.seen.items():
            if (key.step, key.kind) != (step, "setting") or (named and not key.module):
                continue
            # Flat parameters of FSDP have no names: any parameter of the reference may be in one.
            alike = [key] if key.module else [other for other in theirs if other.item == key.item]
            values = [theirs[other] for other in alike if other in theirs]
            errors = [error_of(seen.tensor, x) if x.shape == seen.tensor.shape else 1.0 for x in values]
            if values and min(errors) > SAME_SETTING:
                found[key.item, tuple(seen.tensor.tolist()), tuple(values[0].tolist())].append(
                    (key, rank.number, min(errors))
                )
    for (name, here, there), differing in found.items():
        key, number, error = differing[0]
        others = len({each.module for each, *_ in differing}) - 1
        of = (key.module or "all parameters") + (f" and {others} other parameters" if others else "")
        text = f"it is {_plain(here)}, the reference's {_plain(there)}"
        yield Mismatch(f"the optimizer's {name} of {of}", "optimizer", step, number, error, 0.0, text)


def gradients_of_frozen(
    step: int, expected: Mapping[Key, torch.Tensor], ranks: Sequence[RankRecording]
) -> Iterator[Mismatch]:
    """Yield gradients that the reference has not, of parameters that it has."""
    known = {key.module for key in expected if key.kind == "parameter"}
    have = {key.module for key in expected if (key.step, key.kind) == (step, "gradient")}
    for rank in ranks:
        for key, seen in rank.seen.items():
            if (key.step, key.kind) == (step, "gradient") and key.module in known - have and seen.tensor.any():
                have.add(key.module)
                text = "the reference has none: it is frozen there, or in no optimizer"
                yield Mismatch(words_of(key), key.module, step, rank.number, 1.0, 0.0, text)


def _plain(numbers: tuple[float, ...]) -> str:
    return ", ".join(f"{number:.6g}" for number in numbers)
