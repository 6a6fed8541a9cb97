"""Findings of a comparison: what is wrong by itself, and what a later tensor may show to be right."""

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from statistics import median

from weft.tools.compare.rank_recording import BACKWARD, BUFFERS, FORWARD, RankRecording
from weft.tools.compare.report import Mismatch
from weft.tools.compare.seen import Call, Edge, Key

SUMMED_LATER = ("gradient before clipping", "gradient", "updated parameter", "state", "updated buffer")
MANY = 3  # gradients of parameters with a factor, from which a change of factor before them is no longer theirs alone


class Findings:
    """The findings of a walk through the reference's tensors.

    Args:
        edges: which calls' results went into which.
        expected: names of the reference's tensors.

    Attributes:
        found: in the order in which they are to be read.
        suspects: missing sums, and tensors laid out otherwise, unless a later tensor shows that they are right.
        undivided: by step, a loss that is a sum over micro-batches, and what it is too large by. It is wrong if
            gradients are too large by that too.
        rescaled: by step, the first gradient of an activation with another factor than those before it. It is wrong if
            gradients behind it are wrong otherwise, or if those of parameters have a factor too.
    """

    def __init__(self, edges: Sequence[Edge], expected: Collection[Key], ranks: Sequence[RankRecording]):
        self.found: list[Mismatch] = []
        self.suspects: dict[Key, Mismatch] = {}
        self.undivided: dict[int, tuple[Mismatch, float]] = {}
        self.rescaled: dict[int, Mismatch] = {}
        self._ranks = ranks
        self._with_gradients = {key.step for key in expected if key.kind in SUMMED_LATER[:2]}
        self._clipped = {key.step for key in expected if key.kind == "norm"}  # steps
        self._before: dict[Call, set[Call]] = defaultdict(set)
        self._after: dict[Call, set[Call]] = defaultdict(set)
        for maker, user in edges:
            self._before[user].add(maker)
            self._after[maker].add(user)
        self._gradients: list[tuple[Mismatch, float]] = []  # wrong ones of one step, and their factors
        self._suspected: set[Key] = set()  # at any time
        self._laid_out: set[Key] = set()
        self._factors: Counter[int] = Counter()  # numbers of wrong gradients with a factor, by step
        self._averaged: set[tuple[int, str]] = set()  # steps and parameters that ranks averaged behind the step

    def add(self, key: Key, finding: Mismatch, factor: float) -> None:
        """Add a wrong tensor, and its factor to the reference's or 0. Gradients wait for `end_gradients`."""
        if key.kind == "gradient":
            self._gradients.append((finding, factor))
        else:
            self.report(finding, key, factor if key.kind in SUMMED_LATER else 0.0)

    def suspect(self, key: Key, finding: Mismatch, laid_out: bool = False) -> None:
        """Keep a finding until a later tensor settles it.

        Args:
            laid_out: the tensor may be right in its own way. It is reported beside a wrong one in what it feeds alone.
        """
        self.suspects[key] = finding
        self._suspected.add(key)
        if laid_out:
            self._laid_out.add(key)

    def acquit(self, key: Key) -> None:
        """Drop the suspicion of sums that went into a tensor that is right."""
        call, forward = (key.module, key.root, key.call), key.kind in FORWARD
        makers = self._before[call] if forward else self._after[call]
        owner = key.module.rpartition(".")[0] if key.kind in SUMMED_LATER[:2] else None
        for other in list(self.suspects):
            if other not in self.suspects:
                continue
            if other.kind in SUMMED_LATER:
                later = "buffer" if other.kind in BUFFERS else "parameter"
                if (key.step, key.kind, key.module) == (other.step + 1, later, other.module):
                    self._settle(other)
                continue
            made = (other.kind in FORWARD) == forward and (other.module, other.root, other.call) in makers | {call}
            if made or (other.kind in BACKWARD and (other.step, other.module) == (key.step, owner)):
                del self.suspects[other]
                self.acquit(other)

    def _settle(self, key: Key) -> None:
        """Drop the suspicion of a gradient or a buffer that ranks averaged later, or report it if they did not."""
        finding, updated = self.suspects.pop(key), key._replace(kind="updated parameter", item=0)
        stepped = any(updated in rank.seen for rank in self._ranks if rank.number == finding.rank)
        if key.kind in ("gradient", "gradient before clipping") and stepped and updated not in self._suspected:
            self.found.append(finding)  # the update was right behind the step: the optimizer did not see the factor
        else:
            self._averaged.add((key.step, key.module))

    def report(self, finding: Mismatch, key: Key | None = None, factor: float = 0.0) -> None:
        """Report a finding, after the sums that were missing right before it."""
        loss, times = self.undivided.get(finding.step, (None, 0.0))
        if loss is not None and abs(factor - times) < 1e-3 * times:
            self.found.append(loss)
            del self.undivided[finding.step]
        if factor and finding.step in self.rescaled:
            self._factors[finding.step] += 1
        behind = self._factors[finding.step] == MANY or (key is not None and key.kind in BACKWARD)
        if behind and finding.step in self.rescaled:
            first = self.rescaled.pop(finding.step)
            self.found.insert(sum(other.step < finding.step for other in self.found), first)
        kept = {}
        if key is not None and key.kind == "parameter":  # others may be right in this step
            kept = {at: x for at, x in self.suspects.items() if at.kind in SUMMED_LATER and at.module != key.module}
        near: set[Call] = set()
        if key is not None:
            call = key.module, key.root, key.call
            near = {call, *self._before.get(call, ()), *self._after.get(call, ())}
        unused = {at for at in self.suspects if at in self._laid_out and (at.module, at.root, at.call) not in near}
        self.found += [*(x for at, x in self.suspects.items() if at not in kept and at not in unused), finding]
        self.suspects = kept

    def end_gradients(self) -> None:
        """Report wrong gradients of a step: those first that have not the factor of most of them.

        A clip by hand gives all gradients one factor if a single one is wrong.
        """
        found, self._gradients = self._gradients, []
        usual = median(factor for _, factor in found) if found else 0.0
        follow = [abs(factor - usual) <= 1e-3 * abs(usual) and usual != 0.0 for _, factor in found]
        if sum(follow) == len(found) > 1 and found[0][0].step in self._clipped:
            text = f"it is {usual:.7g} times the reference's, which clips by the norm: the run does not, or otherwise"
            found = [(replace(finding, symptom=text), factor) for finding, factor in found]
        if sum(follow) == len(found) or sum(follow) < 2:
            follow = [False] * len(found)
        for finding, factor in (each for each, follows in zip(found, follow, strict=True) if not follows):
            self.report(finding, factor=factor)
        for finding in (finding for (finding, _), follows in zip(found, follow, strict=True) if follows):
            text = f"it follows: {sum(follow)} gradients are {usual:.4g} times the reference's, as a clip makes them"
            self.report(replace(finding, symptom=text))

    def end(self) -> None:
        """Report gradients that are parts at the end, unless ranks average parameters behind each step before."""
        self.found += [x for step, x in self.rescaled.items() if step not in self._with_gradients]
        for key, finding in self.suspects.items():
            if key.kind in SUMMED_LATER and (key.step - 1, key.module) not in self._averaged:
                self.found.append(finding)
