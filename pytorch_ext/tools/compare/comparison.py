"""Where two recorded runs part first, on which rank, and what the difference looks like."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from weft.tools.compare.alignment import Fit, error_of, take
from weft.tools.compare.rank_recording import (
    BACKWARD,
    FORWARD,
    PARAMETER,
    UPDATED,
    RankRecording,
    calls_of,
    same_place,
)
from weft.tools.compare.seen import Call, Edge, Key, Seen
from weft.tools.compare.symptoms import WrongTensor, symptom_of

FACTOR = 10.0  # times the difference of two runs of the reference that sum in other orders
LATER = 10.0  # times more from the first update on: optimizers divide by gradients that may be nothing but rounding
OF_STEP = 0.01
MOST = 8  # findings: those behind them follow from them


@dataclass(frozen=True)
class Mismatch:
    """A tensor of one rank that is not the reference's.

    Attributes:
        what: the tensor, in words.
        module: the module that it belongs to.
        error: relative difference.
        rounding: relative difference of two runs of the reference that sum in other orders.
        symptom: what the difference looks like; "" if it looks like nothing known.
    """

    what: str
    module: str
    step: int
    rank: int
    error: float
    rounding: float
    symptom: str

    def __str__(self) -> str:
        times = f" ({self.error / self.rounding:.1e} times what rounding allows)" if self.rounding else ""
        looks = f": {self.symptom}" if self.symptom else ""
        return f"step {self.step}, rank {self.rank}: {self.what} differs by {self.error:.1e}{times}{looks}"


@dataclass(frozen=True)
class ComparedRuns:
    """Result of a comparison.

    Attributes:
        findings: in the order of the reference's program; the first is where the runs part.
        compared: number of tensors that were compared.
        unknown: names of modules and parameters of the reference that the other run does not have.
    """

    findings: tuple[Mismatch, ...]
    compared: int
    unknown: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.findings

    def __str__(self) -> str:
        lines = [f"{self.compared} tensors compared"]
        if self.unknown:
            names = ", ".join(self.unknown[:8]) + (", ..." if len(self.unknown) > 8 else "")
            lines.append(f"not in the run, so not compared: {names}")
        if self.ok:
            return "\n".join(["the runs agree", *lines])
        first, others = self.findings[0], len(self.findings) - 1
        more = f"{others} more differ" if others < MOST - 1 else f"{others} more differ, at least"
        return "\n".join([f"the runs part in {first.module or 'the model'}", f"  {first}", *lines, more])


def compare_recordings(
    reference: Sequence[Seen],
    edges: Sequence[Edge],
    reordered: Sequence[Seen],
    run: Sequence[Sequence[Seen]],
    rename: Mapping[str, str],
) -> ComparedRuns:
    """Compare a run on any number of ranks with its reference, a run of one process.

    Args:
        reference: recording of the reference.
        edges: which of its modules' results went into which.
        reordered: recording of the reference with another order of summation.
        run: recording of each rank.
        rename: parts of the run's module names to those of the reference.

    Raises:
        ValueError: no module of the run has a name of the reference's.
    """
    return _Walk(reference, edges, reordered, run, rename).compared()


class _Walk:
    def __init__(self, reference, edges, reordered, run, rename):
        self.expected = {seen.key: seen.tensor for seen in reference}
        other = {seen.key: seen.tensor for seen in reordered}
        self.reordered = {
            key: other[key] for key, x in self.expected.items() if key in other and other[key].shape == x.shape
        }
        self.rounding = {
            key: error_of(self.reordered[key], x, key.kind in UPDATED) if key in self.reordered else 0.0
            for key, x in self.expected.items()
        }
        self.ranks = [RankRecording(number, of_rank, rename) for number, of_rank in enumerate(run)]
        self.calls = calls_of(self.expected)
        self.first_step = min(key.step for key in self.expected)
        self.findings: list[Mismatch] = []
        self.suspects: dict[
            Key, Mismatch
        ] = {}  # sums that are missing, unless a later tensor shows that they were made
        self.before: dict[Call, set[Call]] = defaultdict(set)
        self.after: dict[Call, set[Call]] = defaultdict(set)
        for maker, user in edges:
            self.before[user].add(maker)
            self.after[maker].add(user)
        self.compared_tensors = 0

    def compared(self) -> ComparedRuns:
        roots = self._root_calls(self.expected)
        for rank in self.ranks:
            rank.pair(roots, self.expected)
        usual: dict[str, list[float]] = defaultdict(list)
        absent: dict[str, None] = {}
        for key, whole in self.expected.items():
            direction = "backward" if key.kind.startswith("gradient") else "forward"
            if whole.is_floating_point() and self.rounding[key]:
                usual[direction].append(self.rounding[key])
            typical = median(usual[direction]) if usual[direction] else 0.0
            if key.kind == "loss" and key.item == 0:
                self._compare_losses(key.step)
            if key.kind in ("loss", "dropout"):
                continue
            there = [
                (rank, seen) for rank in self.ranks for seen in rank.of(key) if self._called_alike(key, rank, seen)
            ]
            if not there:
                self._absent(key, absent)
                continue
            self._compare_one(key, whole, there, max(self.rounding[key], typical))
            if len(self.findings) >= MOST:
                break
        self._dropouts()
        if len(absent) == len({key.module for key in self.expected if key.module}):
            theirs = sorted(set().union(*(rank.names for rank in self.ranks)))
            raise ValueError(
                f"no module of the run has a name of the reference's: it has {', '.join(theirs[:4])}, and the "
                f"reference {', '.join(list(absent)[:4])}. Give the names that belong together (rename)"
            )
        findings = sorted(self.findings, key=lambda finding: finding.step)
        return ComparedRuns(tuple(findings), self.compared_tensors, tuple(absent))

    def _called_alike(self, key: Key, rank: "RankRecording", seen: Seen) -> bool:
        """Return whether a module is called as often as in the reference, so that a call's number says which it is.

        A rank calls the activation of its own experts alone, say.
        """
        there = rank.calls[key.step, key.module, seen.key.root]
        return key.kind not in (*FORWARD, *BACKWARD) or there == self.calls[key.step, key.module, key.root]

    def _root_calls(self, seen) -> dict[int, list[Key]]:
        found: dict[int, list[Key]] = defaultdict(list)
        for key in seen:
            if key.kind == "input" and not key.module:
                found[key.step].append(key)
        return found

    def _absent(self, key: Key, absent: dict[str, None]) -> None:
        has_module = any(key.module in rank.names for rank in self.ranks)
        kept = any(
            (other.step, other.kind) == (key.step, key.kind) and other.module  # ZeRO's flat gradients have no name
            for rank in self.ranks
            for other in rank.seen
        )
        if key.kind in ("gradient", "gradient before clipping") and has_module and kept:
            if not any(f.module == key.module for f in self.findings) and self.expected[key].any():
                self.findings.append(Mismatch(_words(key), key.module, key.step, 0, 1.0, 0.0, "it has none"))
        elif not has_module:
            absent[key.module] = None

    def _compare_one(self, key: Key, whole: torch.Tensor, there: list, rounding: float) -> None:
        finding, suspect, fits = None, None, []
        for rank, seen in there:
            self.compared_tensors += 1
            part = seen.tensor
            eps = torch.finfo(part.dtype).eps if part.is_floating_point() else 0.0
            later = key.step > self.first_step or key.kind in UPDATED
            allowed = max(FACTOR * max(rounding, eps) * (LATER if later else 1.0), self._of_update(key, whole))
            target = self._whole(key, rank, seen, whole)
            fit = rank.fit(key, seen, part, target, allowed)
            if fit is not None and (
                fit.error <= allowed or fit.error <= FACTOR * self._rounding_there(key, rank, seen, fit, target)
            ):
                fits.append(fit)
                continue
            sums, due = self._sum_fits(key, rank, seen, target, allowed)
            if due:
                continue
            error = 1.0 if fit is None else fit.error
            bias = self.expected.get(Key(key.step, "parameter", f"{key.module}.bias", 0, 0, 0))
            symptom = symptom_of(WrongTensor(key.kind, part, fit, target, sums), self._stale(key), bias)
            made = Mismatch(_words(key), _module_of(key), key.step, rank.number, error, max(rounding, eps), symptom)
            if sums and key.kind in (*FORWARD, *BACKWARD):
                suspect = suspect or made
            else:
                finding = finding or made
        if finding is None and suspect is None and key.kind in (*FORWARD, "parameter"):
            finding = self._uncovered(key, whole, fits, there)
        if finding is not None:
            self._report(finding)
        elif suspect is not None:
            self.suspects[key] = suspect
        elif whole.is_floating_point():
            self._acquit(key)

    def _rounding_there(self, key: Key, rank: "RankRecording", seen: Seen, fit: Fit, whole: torch.Tensor) -> float:
        """Return the difference of the reference's two runs at the place of a part, which may be nothing but rounding.

        Of keys, queries and values in one weight, say, the queries may have no gradient to speak of.
        """
        other = self.reordered.get(key)
        if other is None or other.shape != whole.shape or fit.expected.shape == whole.shape:
            return 0.0
        if seen.place is None:
            return error_of(take(other, fit.indexes) * fit.scale, fit.expected)
        there = rank.fit(key, seen, seen.tensor, other, float("inf"))
        return 0.0 if there is None else error_of(there.expected, fit.expected)

    def _of_update(self, key: Key, whole: torch.Tensor) -> float:
        """Return the error of what an optimizer has made that may be rounding: a hundredth of its step.

        An optimizer that divides by the root of squared gradients makes a whole step of a gradient that is rounding.
        """
        if key.kind == "state":
            return OF_STEP
        if key.kind not in UPDATED or (key.kind == "parameter" and key.step == self.first_step):
            return 0.0
        before = self.expected.get(Key(self.first_step, "parameter", key.module, 0, 0, 0))
        return 0.0 if before is None else OF_STEP * error_of(before, whole)

    def _acquit(self, key: Key) -> None:
        """Drop the suspicion of sums that went into a tensor that is right."""
        call, forward = (key.module, key.root, key.call), key.kind in FORWARD
        makers = self.before[call] if forward else self.after[call]
        for other in list(self.suspects):
            if (other.kind in FORWARD) == forward and (other.module, other.root, other.call) in makers | {call}:
                del self.suspects[other]

    def _report(self, finding: Mismatch) -> None:
        """Report a finding, after the sums that were missing right before it."""
        self.findings += [*self.suspects.values(), finding]
        self.suspects = {}

    def _whole(self, key: Key, rank: "RankRecording", seen: Seen, whole: torch.Tensor) -> torch.Tensor:
        """Return the reference's tensor, of several calls of the model if the rank made one call for them."""
        roots = rank.roots.get((key.step, seen.key.root), [key.root])
        if len(roots) == 1 or whole.dim() == 0:
            return whole
        return torch.cat(
            [self.expected[key._replace(root=root)] for root in roots if key._replace(root=root) in self.expected]
        )

    def _others(self, key: Key, rank: "RankRecording", seen: Seen) -> list[tuple["RankRecording", torch.Tensor]]:
        at = key._replace(root=seen.key.root)
        return [(other, other.seen[at].tensor) for other in self.ranks if other is not rank and at in other.seen]

    def _sum_fits(
        self, key: Key, rank: "RankRecording", seen: Seen, whole: torch.Tensor, allowed: float
    ) -> tuple[str, bool]:
        """Return what the reference is of this rank's tensor and those of others, and whether the sum is due later.

        Ranks with other parts of the batch or the sequence have parts of the gradients of what all of them share.
        """
        part, others = seen.tensor, self._others(key, rank, seen)
        if not part.is_floating_point():
            return "", False
        world, number = len(self.ranks), rank.number
        groups = [range(world)] if world > 1 else []
        for size in (n for n in range(world - 1, 1, -1) if world % n == 0):
            block, step = number // size * size, world // size
            groups += [range(block, block + size), range(number % step, world, step)]
        sums = [
            (f"ranks {', '.join(map(str, g))}", [x for other, x in others if other.number in g], len(g)) for g in groups
        ]
        calls = [each.tensor for other in self.ranks for each in other.of(key) if each is not seen]
        sums.append(("all ranks and micro-batches", calls, len(calls) + 1))
        apart = key.kind in BACKWARD and not any(
            same_place(*(each.places.get((key.step, "", seen.key.root, 0, 0)) for each in (rank, other)))
            for other in self.ranks
            if other is not rank
        )
        for words, members, size in sums:
            if len(members) != size - 1 or size < 2 or any(x.shape != part.shape for x in members):
                continue
            total = part.double() + sum(x.double() for x in members)
            forms = [(total, f"the sum over {words}"), (total / size, f"the mean over {words}")]
            if key.kind in BACKWARD and part.dim() > 1:
                apart_columns = _columns_that_differ(part, members, allowed)
                mixed = torch.where(apart_columns, total, part.double())
                forms.append((mixed, f"in some columns the sum over {words}"))
            for result, form in forms:
                fit = rank.fit(key, seen, result.to(part.dtype), whole, allowed)
                if fit is not None and fit.error <= allowed:
                    return form, seen.partial or apart
        return "", False

    def _stale(self, key: Key) -> torch.Tensor | None:
        return self.expected.get(key._replace(step=key.step - 1))

    def _uncovered(self, key: Key, whole: torch.Tensor, fits: Sequence[Fit], there: Sequence) -> Mismatch | None:
        """Report that no rank has some part of the whole, though each rank's tensor is a part of it."""
        for dim, size in enumerate(whole.shape):
            indexes = [index for fit in fits if dim < len(fit.indexes) and (index := fit.indexes[dim]) is not None]
            if len(indexes) < len(there):
                continue
            if whole.dim() == 1 and not whole.is_floating_point() and size - 1 == sum(len(i) - 1 for i in indexes):
                continue  # bounds of documents or images, which each rank counts from its first
            missing = sorted(set(range(size)) - set(torch.cat(indexes).tolist()))
            if missing and len(torch.unique(whole, dim=dim).movedim(dim, 0)) == size:
                text = f"no rank has {_stretches(missing)} of its dimension {dim}, and ranks have the others twice"
                return Mismatch(_words(key), _module_of(key), key.step, there[0][0].number, 1.0, 0.0, text)
        return None

    def _compare_losses(self, step: int) -> None:
        """Compare a step's loss: every rank has it, or the ranks' losses have it as their mean or their sum."""
        keys = [key for key in self.expected if (key.step, key.kind) == (step, "loss")]
        losses = [self.expected[key].double().item() for key in keys]
        sums = [sum(of_rank) for rank in self.ranks if (of_rank := rank.losses(step))]
        if not sums:
            return
        rounding = max(*(self.rounding[key] for key in keys), self._eps(), 0.0)
        allowed = FACTOR * rounding * (LATER if step > self.first_step else 1.0)
        total, mean = sum(losses), sum(sums) / len(sums)
        wanted = (total, total / len(losses))  # a sum over micro-batches, or their mean
        if all(abs(x - total) <= allowed * abs(total) for x in sums):
            return
        if any(abs(x - y) <= allowed * abs(y) for x in (mean, sum(sums)) for y in wanted):
            return
        error = abs(mean - total) / abs(total) if total else abs(mean)
        text = f"the mean of the ranks' losses is {mean:.6g}, the reference's loss {total:.6g}"
        self._report(Mismatch("the loss", "loss", step, 0, error, rounding, text))

    def _eps(self) -> float:
        return max((torch.finfo(x.dtype).eps for x in self.expected.values() if x.is_floating_point()), default=0.0)

    def _dropouts(self) -> None:
        """Compare what ranks drop: the same of equal parts, and something else of other parts."""
        drops: dict[Key, list] = defaultdict(list)
        for rank in self.ranks:
            for key, seen in rank.seen.items():
                if key.kind == "dropout" and not bool(seen.tensor.all()):
                    drops[key].append((rank, seen.tensor, rank.places.get((*key[:1], *key[2:5], "dropped"))))
        for key, of_ranks in drops.items():
            for rank, left, place in of_ranks[1:]:
                first, first_left, first_place = of_ranks[0]
                if left.shape != first_left.shape or place is None or first_place is None:
                    continue
                same_part = same_place(place, first_place)
                same_drop = torch.equal(left, first_left)
                if same_part != same_drop and left.numel() >= 16:
                    with_first = f"and rank {first.number} " + (
                        "have the same tensor and drop" if same_part else "have different parts and drop"
                    )
                    text = f"rank {rank.number} {with_first} {'different' if same_part else 'the same'} elements"
                    self.findings.append(Mismatch(_words(key), key.module, key.step, rank.number, 1.0, 0.0, text))
                    break


def _columns_that_differ(part: torch.Tensor, others: Sequence[torch.Tensor], allowed: float) -> torch.Tensor:
    """Return which columns (last dimension) are not the same on all ranks: of a layer for several uses, say."""
    columns = [x.double().flatten(0, -2) for x in (part, *others)]
    differences = torch.stack([(x - columns[0]).norm(dim=0) for x in columns])
    return (differences > allowed * columns[0].norm(dim=0)).any(0)


def _stretches(numbers: Sequence[int]) -> str:
    ends = [n for n in numbers if n - 1 not in set(numbers)], [n for n in numbers if n + 1 not in set(numbers)]
    return " and ".join(f"{start} to {stop}" for start, stop in zip(*ends, strict=True))


def _module_of(key: Key) -> str:
    """Return the module whose code has made a tensor: what a module is given, its parent has made."""
    if key.kind in ("input", "gradient of output"):
        return key.module.rpartition(".")[0]
    return key.module or key.kind


def _words(key: Key) -> str:
    if key.kind in ("norm", "loss", "learning rate"):
        return f"the {key.kind}"
    if key.kind == "state":
        return f"the optimizer's {key.item} of {key.module}"
    if key.kind in PARAMETER or key.kind == "dropout":
        return f"the {key.kind} of {key.module}"
    of = key.module or "the model"
    which = "" if key.item in (0, "0") else f" {key.item}"
    call = f", call {key.call}" if key.call else ""
    return f"the {key.kind}{which} of {of}{call}"
