"""Where two recorded runs part first, on which rank, and what the difference looks like."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median

import torch

from weft.tools.compare.alignment import Fit, bits_of_rows, error_of, take
from weft.tools.compare.drops import drops_that_differ, rates_that_differ
from weft.tools.compare.findings import SUMMED_LATER, Findings
from weft.tools.compare.rank_recording import (
    BACKWARD,
    BUFFERS,
    FORWARD,
    PARAMETER,
    UPDATED,
    RankRecording,
    calls_of,
    calls_of_outermost,
    same_place,
)
from weft.tools.compare.report import MOST, ComparedRuns, Mismatch, words_of
from weft.tools.compare.scalars import gradients_of_frozen, wrong_loss, wrong_settings
from weft.tools.compare.seen import Edge, Key, Seen
from weft.tools.compare.symptoms import WrongTensor, factor_of, symptom_of

FACTOR = 10.0  # times the difference of two runs of the reference that sum in other orders
LATER = 10.0  # times more from the first update on: optimizers divide by gradients that may be nothing but rounding
OF_STEP = 0.01
ANOTHER = 0.1  # difference of the reference's two runs that is no rounding
NEAR_NORM = 1e-5  # relative; the two runs of the reference are one sample of its rounding


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
        rename: parts of the run's module names to those of the reference; "1:layers.0" is that of rank 1.

    Raises:
        ValueError: no module of the run has a name of the reference's, or the reference does not repeat itself.
    """
    return _Walk(reference, edges, reordered, run, rename).compared()


class _Walk:
    def __init__(self, reference, edges, reordered, run, rename):
        self.expected = {seen.key: seen.tensor for seen in reference}
        self.other = {seen.key: seen.tensor for seen in reordered}
        self.rounding = {
            key: error_of(other, x, key.kind in UPDATED)
            if (other := self.other.get(key)) is not None and other.shape == x.shape
            else 0.0
            for key, x in self.expected.items()
        }
        self.ranks = [RankRecording(number, of_rank, rename) for number, of_rank in enumerate(run)]
        self.calls = calls_of(self.expected)
        self.outermost: dict[str, str] = {}  # of each module that is called
        for seen in reference:
            if seen.key.kind in FORWARD:
                self.outermost.setdefault(seen.key.module, seen.outermost)
        self.first_step = min(key.step for key in self.expected)
        self.findings = Findings(edges, self.expected, self.ranks)
        self.compared_tensors = 0
        self.stages: set[tuple[int, str]] = set()  # ranks, and modules that they have a stage of
        self.dispatched: set[tuple[int, str]] = set()  # the same, where they have some of the experts
        self._note_cuts()

    def compared(self) -> ComparedRuns:
        self._check_that_it_repeats()
        for rank in self.ranks:
            rank.pair(self.outermost, self.expected)
        usual: dict[str, list[float]] = defaultdict(list)
        absent: dict[str, None] = {}
        done: set[tuple[int, str]] = set()  # steps and kinds of numbers
        for key, whole in self.expected.items():
            direction = "backward" if key.kind.startswith("gradient") else "forward"
            if whole.is_floating_point() and self.rounding[key]:
                usual[direction].append(self.rounding[key])
            typical = median(usual[direction]) if usual[direction] else 0.0
            if key.kind != "gradient":
                self.findings.end_gradients()
            self._compare_numbers(key, done)
            if key.kind in ("loss", "dropout", "drop rate", "setting"):
                continue
            there = [
                (rank, seen) for rank in self.ranks for seen in rank.of(key) if self._called_alike(key, rank, seen)
            ]
            if not there:
                self._absent(key, absent)
                continue
            self._compare_one(key, whole, there, max(self.rounding[key], typical))
            if len(self.findings.found) >= MOST:
                break
        self.findings.end()
        masks, rates = (
            {key: x for key, x in self.expected.items() if key.kind == kind} for kind in ("dropout", "drop rate")
        )
        wrong = [*rates_that_differ(self.ranks, rates, self.calls), *drops_that_differ(self.ranks, masks)]
        self.findings.found += [
            Mismatch(words_of(key), key.module, key.step, rank, 1.0, 0.0, text) for key, rank, text in wrong[:MOST]
        ]
        if absent and len(absent) == len({key.module for key in self.expected if key.module}):
            theirs = sorted(set().union(*(rank.names for rank in self.ranks)))
            raise ValueError(
                f"no module of the run has a name of the reference's: it has {', '.join(theirs[:4])}, and the "
                f"reference {', '.join(list(absent)[:4])}. Give the names that belong together (rename)"
            )
        findings = sorted(self.findings.found, key=lambda finding: finding.step)
        return ComparedRuns(tuple(findings), self.compared_tensors, tuple(absent))

    def _compare_numbers(self, key: Key, done: set[tuple[int, str]]) -> None:
        """Compare the losses behind the last of a step; settings, and which gradients there are, before the first."""
        step, kind = at = key[:2]
        if kind == "loss" and key._replace(item=int(key.item) + 1) not in self.expected:
            self._compare_losses(step)
        if kind in ("setting", "gradient") and at not in done:
            done.add(at)
            wrong = wrong_settings if kind == "setting" else gradients_of_frozen
            for finding in wrong(step, self.expected, self.ranks):
                self.findings.report(finding)

    def _compare_losses(self, step: int) -> None:
        keys = [key for key in self.expected if (key.step, key.kind) == (step, "loss")]
        of_ranks = [of_rank for rank in self.ranks if (of_rank := rank.losses(step))]
        if not of_ranks:
            return
        eps = max((torch.finfo(x.dtype).eps for x in self.expected.values() if x.is_floating_point()), default=0.0)
        rounding = max(*(self.rounding[key] for key in keys), eps, 0.0)
        allowed = FACTOR * rounding * (LATER if step > self.first_step else 1.0)
        losses = [self.expected[key].double().item() for key in keys]
        for key in [key for key in self.findings.suspects if key.step == step and self.expected[key].numel() == 1]:
            del self.findings.suspects[key]  # a criterion's output, of the rank's own batch
        finding, times = wrong_loss(step, losses, of_ranks, rounding, allowed)
        if finding is not None and times:
            self.findings.undivided[step] = finding, times
        elif finding is not None:
            self.findings.report(finding)

    def _called_alike(self, key: Key, rank: "RankRecording", seen: Seen) -> bool:
        """Return whether a module is called as often as in the reference, so that a call's number says which it is.

        A rank calls the activation of its own experts alone, say.
        """
        there = rank.calls[key.step, key.module, seen.key.root]
        return key.kind not in (*FORWARD, *BACKWARD) or there == self.calls[key.step, key.module, key.root]

    def _check_that_it_repeats(self) -> None:
        """Raise ValueError if the two runs of the reference read, start from or compute something else."""
        for key, x in self.expected.items():
            if key.step != self.first_step or key.kind not in (*FORWARD, "parameter"):
                continue
            if key.kind in FORWARD and key.module != self.outermost[key.module]:
                continue
            other = self.other.get(key)
            limit = ANOTHER if x.is_floating_point() else 0.0 if key.kind == "input" else 1.0
            if other is None or other.shape != x.shape or error_of(other, x) > limit:
                raise ValueError(
                    f"the reference does not repeat itself: {words_of(key)} is another one in its second run. Seed it, "
                    "and give it the same data in each run (no time, no unseeded generator)"
                )

    def _note_cuts(self) -> None:
        """Note modules that a rank has in part: a stage, if all modules around are cut as well."""
        around = {name: self._around(name) for name in self.outermost if name != self.outermost[name]}
        around = {name: x if x in self.outermost else self.outermost[name] for name, x in around.items()}
        inside: dict[str, set[str]] = defaultdict(set)
        for name, owner in around.items():
            inside[owner].add(name)
        of_any = set().union(*(rank.names for rank in self.ranks))
        for rank in self.ranks:
            lacking = {owner: names - rank.names for owner, names in inside.items()}
            cut = {owner for owner, names in lacking.items() if names and names <= of_any}
            for name in cut:
                outer = name
                while outer in around and around[outer] in cut:
                    outer = around[outer]
                (self.dispatched if outer in around else self.stages).add((rank.number, name))

    def _around(self, name: str) -> str:
        """Return the module around, of those that are called: a list has no code."""
        owner = name.rpartition(".")[0]
        while owner and owner not in self.outermost:
            owner = owner.rpartition(".")[0]
        return owner

    def _absent(self, key: Key, absent: dict[str, None]) -> None:
        has_module = any(key.module in rank.names for rank in self.ranks)
        if key.kind == "input" and self.outermost[key.module] == key.module and has_module:
            self._absent_call(key)
        kept = any(
            (other.step, other.kind) == (key.step, key.kind) and other.module  # ZeRO's flat gradients have no name
            for rank in self.ranks
            for other in rank.seen
        )
        if key.kind in ("gradient", "gradient before clipping") and has_module and kept:
            if not any(f.module == key.module for f in self.findings.found) and self.expected[key].any():
                self.findings.found.append(Mismatch(words_of(key), key.module, key.step, 0, 1.0, 0.0, "it has none"))
        elif not has_module:
            absent[key.module] = None

    def _absent_call(self, key: Key) -> None:
        """Report a call of the whole model that no rank makes, if the inputs say which calls they make instead."""
        paired = [roots for rank in self.ranks for at, roots in rank.roots.items() if at[:2] == (key.step, key.module)]
        count = len(calls_of_outermost(self.expected, self.outermost)[key.step, key.module])
        certain = all((key.step, key.module) not in rank.uncertain for rank in self.ranks) and len(paired) >= count
        made = any(key.root in roots for roots in paired)
        reported = any(f.module == key.module and f.step == key.step for f in self.findings.found)
        if certain and not made and not reported:
            text = f"no rank has the reference's call {key.root}, and ranks make others twice"
            self.findings.report(Mismatch(words_of(key), key.module, key.step, 0, 1.0, 0.0, text))

    def _compare_one(self, key: Key, whole: torch.Tensor, there: list, rounding: float) -> None:
        finding, suspect, laid_out, fits, factor = None, None, False, [], 0.0
        once = self.calls.get((key.step, key.module, key.root), 1) == 1  # else calls may be for others of its experts
        once &= not any(self._holds_experts(key, rank) for rank, _ in there)
        for rank, seen in list(there):
            part = seen.tensor
            eps = torch.finfo(part.dtype).eps if part.is_floating_point() else 0.0
            later = key.step > self.first_step or key.kind in UPDATED
            allowed = max(FACTOR * max(rounding, eps) * (LATER if later else 1.0), self._of_update(key, whole))
            allowed = max(allowed, NEAR_NORM) if key.kind == "norm" else allowed
            target = self._whole(key, rank, seen, whole)
            fit = rank.fit(key, seen, part, target, allowed)
            if (fit is None or fit.error > allowed) and (wider := self._of_all_ranks(key, rank, seen)) is not None:
                target, fit = wider, rank.fit(key, seen, part, wider, allowed)
            if fit is not None and (
                fit.error <= allowed or fit.error <= FACTOR * self._rounding_there(key, rank, seen, fit, target)
            ):
                self.compared_tensors += 1
                fits.append(fit)
                continue
            of_stage = (rank.number, key.module) in self.stages
            if of_stage or (fit is None and key.kind in BUFFERS):  # a stage's own input; a cache
                there.remove((rank, seen))
                continue
            if key.kind in PARAMETER and self._is_idle(key, rank):
                there.remove((rank, seen))
                continue
            self.compared_tensors += 1
            sums, due = self._sum_fits(key, rank, seen, target, allowed)
            if due:
                continue
            error = 1.0 if fit is None else fit.error
            bias = self.expected.get(Key(key.step, "parameter", f"{key.module}.bias", 0, 0, 0))
            symptom = symptom_of(WrongTensor(key.kind, part, fit, target, sums), self._stale(key), bias)
            if sums and key.kind in SUMMED_LATER and self._averages_parameters(key):
                symptom += ". Ranks average parameters after their steps: another algorithm than the reference's"
            made = Mismatch(
                words_of(key), self._module_of(key), key.step, rank.number, error, max(rounding, eps), symptom
            )
            if fit is not None and fit.rescaled and not sums:
                self.findings.rescaled.setdefault(key.step, made)
                continue
            if (sums and key.kind in SUMMED_LATER) or (
                key.kind in (*FORWARD, *BACKWARD) and (sums or self._may_be_right(key, rank, part, fit))
            ):
                suspect, laid_out = suspect or made, laid_out or not sums
            elif finding is None:
                finding, factor = made, factor_of(part, fit)
        if there and once and finding is None and suspect is None and key.kind in (*FORWARD, "parameter"):
            finding = self._uncovered(key, whole, fits, there)
        if finding is not None:
            self.findings.add(key, finding, factor)
        elif suspect is not None:
            self.findings.suspect(key, suspect, laid_out)
        elif whole.is_floating_point() or key.kind in BUFFERS:
            self.findings.acquit(key)

    def _rounding_there(self, key: Key, rank: "RankRecording", seen: Seen, fit: Fit, whole: torch.Tensor) -> float:
        """Return the difference of the reference's two runs at the place of a part, which may be nothing but rounding.

        Of keys, queries and values in one weight, say, the queries may have no gradient to speak of.
        """
        other = self.other.get(key)
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

    def _is_idle(self, key: Key, rank: RankRecording) -> bool:
        """Return whether a rank never calls a parameter's module, as others do, and does not update it."""
        if any((at.kind, at.module) == ("setting", key.module) for at in rank.seen):
            return False
        owner = key.module.rpartition(".")[0]
        called = [any(module == owner for _, module, _ in calls) for calls in (self.calls, rank.calls)]
        return called == [True, False] and any(module == owner for of in self.ranks for _, module, _ in of.calls)

    def _averages_parameters(self, key: Key) -> bool:
        """Return whether ranks have a parameter in common before the next step, and not right behind this one."""
        after, before_next = (
            [rank.seen[at].tensor for rank in self.ranks if at in rank.seen]
            for at in (
                Key(key.step, "updated parameter", key.module, 0, 0, 0),
                Key(key.step + 1, "parameter", key.module, 0, 0, 0),
            )
        )
        return bool(before_next) and _are_equal(before_next) and not _are_equal(after)

    def _whole(self, key: Key, rank: "RankRecording", seen: Seen, whole: torch.Tensor) -> torch.Tensor:
        """Return the reference's tensor, of several calls of the model if the rank made one call for them."""
        roots = rank.roots_of(key, seen.key.root)
        if len(roots) == 1 or whole.dim() == 0:
            return whole
        return torch.cat(
            [self.expected[key._replace(root=root)] for root in roots if key._replace(root=root) in self.expected]
        )

    def _may_be_right(self, key: Key, rank: RankRecording, part: torch.Tensor, fit: Fit | None) -> bool:
        """Return whether a tensor may be right in its own way: of another shape, or dispatched to experts."""
        of_model = key.module == self.outermost.get(key.module)
        return self._holds_experts(key, rank) or (not of_model and (fit is None or not part.any()))

    def _holds_experts(self, key: Key, rank: RankRecording) -> bool:
        """Return whether a rank has some of the experts, say, of a module or of one around it."""
        names = key.module.split(".")
        return any((rank.number, ".".join(names[:count])) in self.dispatched for count in range(1, len(names) + 1))

    def _of_all_ranks(self, key: Key, rank: RankRecording, seen: Seen) -> torch.Tensor | None:
        """Return the reference's tensor of all calls that ranks make at once, for experts, who have tokens of all."""
        if key.kind not in (*FORWARD, *BACKWARD) or not self._holds_experts(key, rank):
            return None
        roots = sorted({root for other in self.ranks for root in other.roots_of(key, seen.key.root)})
        found = [self.expected[at] for root in roots if (at := key._replace(root=root)) in self.expected]
        return torch.cat(found) if len(found) > 1 and found[0].dim() else None

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
        if part.dtype == torch.bool:
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
        own = [each.tensor for each in rank.of(key) if each is not seen]
        sums.append(("all micro-batches", own, len(own) + 1))
        apart = key.kind in BACKWARD and not any(
            same_place(*(each.place_of_input(key, seen.key.root) for each in (rank, other)))
            for other in self.ranks
            if other is not rank
        )
        for words, members, size in sums:
            if len(members) != size - 1 or size < 2 or any(x.shape != part.shape for x in members):
                continue
            if key.kind in SUMMED_LATER and key.kind not in BUFFERS and _are_equal([part, *members]):
                continue  # they are summed already, or averaged
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
            rows, covered = bits_of_rows(whole, dim), {*torch.cat(indexes).tolist()}
            have = {rows[index] for index in covered}
            missing = [index for index in range(size) if index not in covered and rows[index] not in have]
            if missing:
                text = f"no rank has {_stretches(missing)} of its dimension {dim}, and ranks have the others twice"
                return Mismatch(words_of(key), self._module_of(key), key.step, there[0][0].number, 1.0, 0.0, text)
        return None

    def _module_of(self, key: Key) -> str:
        """Return the module whose code has made a tensor: what a module is given, the one that calls it has made."""
        if key.kind not in ("input", "gradient of output"):
            return key.module or ("" if key.kind in (*FORWARD, *BACKWARD) else key.kind)
        return self._around(key.module)


def _are_equal(tensors: Sequence[torch.Tensor]) -> bool:
    return all(x.shape == tensors[0].shape and torch.equal(x, tensors[0]) for x in tensors)


def _columns_that_differ(part: torch.Tensor, others: Sequence[torch.Tensor], allowed: float) -> torch.Tensor:
    """Return which columns (last dimension) are not the same on all ranks: of a layer for several uses, say."""
    columns = [x.double().flatten(0, -2) for x in (part, *others)]
    differences = torch.stack([(x - columns[0]).norm(dim=0) for x in columns])
    return (differences > allowed * columns[0].norm(dim=0)).any(0)


def _stretches(numbers: Sequence[int]) -> str:
    ends = [n for n in numbers if n - 1 not in set(numbers)], [n for n in numbers if n + 1 not in set(numbers)]
    return " and ".join(f"{start} to {stop}" if start < stop else f"{start}" for start, stop in zip(*ends, strict=True))
