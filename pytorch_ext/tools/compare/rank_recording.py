"""What one rank of a run recorded, and the places of its parts in the reference's tensors."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from weft.tools.compare.alignment import Alignment, Fit, error_of, rows_of, take
from weft.tools.compare.seen import Key, Seen
from weft.tools.numbers import numbers_of

FORWARD, BACKWARD = ("input", "output"), ("gradient of output", "gradient of input")
UPDATED = ("updated parameter", "state", "parameter")
BUFFERS = ("buffer", "updated buffer")
PARAMETER = ("parameter", "gradient before clipping", "gradient", "updated parameter", "state", *BUFFERS)
_SAME_INPUT = 1e-3  # relative difference of inputs that are computed: what a generator makes for a critic, say


class RankRecording:
    """What one rank recorded, and what is known of its parts."""

    def __init__(self, number: int, seen: Sequence[Seen], rename: Mapping[str, str]):
        self.number = number
        self.seen: dict[Key, Seen] = {}
        pairs = [(old.rpartition(":"), new) for old, new in rename.items()]
        mine = [(old, new) for (ranks, _, old), new in pairs if not ranks or number in numbers_of(ranks, "ranks")]
        for each in seen:
            name = each.key.module
            for old, new in mine:
                name = name.replace(old, new)
            key = each.key._replace(module=name)
            self.seen[key] = each._replace(key=key)
        self.calls = calls_of(self.seen)
        self.names = {key.module for key in self.seen}
        self.alignment = Alignment()
        self.places: dict[Any, tuple] = {}  # of each parameter, and of each module's last input
        # Of gradients of activations, by step, outermost module and its call:
        self.scales: dict[tuple[int, str, int], float] = {}
        # Calls of outermost modules, by step, name and number, to the numbers in the reference:
        self.roots: dict[tuple[int, str, int], list[int]] = {}
        self.uncertain: set[tuple[int, str]] = set()  # steps and modules with calls that are paired by their order
        self._by_reference: dict[tuple[int, str, int], list[int]] = defaultdict(list)
        self._outermost: Mapping[str, str] = {}

    def pair(self, outermost: Mapping[str, str], wholes: Mapping[Key, torch.Tensor]) -> None:
        """Pair the rank's calls of the outermost modules with those of the reference, by their inputs.

        Args:
            outermost: the reference's modules to the outermost one that calls them.
            wholes: the reference's tensors.
        """
        self._outermost = outermost
        theirs, ours = calls_of_outermost(wholes, outermost), calls_of_outermost(self.seen, outermost)
        for (step, model), own in ours.items():
            inputs = _inputs_that_vary(wholes, step, model)
            for index, root in enumerate(own):
                paired = self._paired(root, index, own, theirs.get((step, model), [0]), inputs, wholes)
                if paired is None:
                    self.uncertain.add((step, model))
                    paired = _paired_by_order(index, len(own), theirs.get((step, model), [0]))
                self.roots[step, model, root] = paired
                self._by_reference[step, model, paired[0]].append(root)

    def _paired(self, root, index, ours, theirs, inputs, wholes) -> list[int] | None:
        if len(theirs) == 1:
            return theirs
        likely = _paired_by_order(index, len(ours), theirs)[0]
        scores: Counter[int] = Counter()
        for key in inputs:
            seen, whole = self.seen.get(key._replace(root=root)), wholes[key]
            if seen is not None:
                allowed = _SAME_INPUT if whole.is_floating_point() else 0.0
                fit = Alignment().fit(seen.tensor, whole, allowed)
                scores[key.root] += fit is not None and fit.error <= allowed
        best = max(theirs, key=lambda other: (scores[other], -abs(other - likely)))
        return [best] if scores[best] else None

    def roots_of(self, key: Key, root: int) -> list[int]:
        """Return the calls of the reference that one call of this rank's stands for."""
        return self.roots.get((key.step, self._outermost.get(key.module, ""), root), [key.root])

    def place_of_input(self, key: Key, root: int) -> tuple | None:
        """Return the place of the first input of the outermost module, in the call that a tensor belongs to."""
        return self.places.get((key.step, self._outermost.get(key.module, ""), root, 0, 0))

    def of(self, key: Key) -> list[Seen]:
        """Return what this rank has of a tensor of the reference, in each of its calls of the model."""
        if key.kind in FORWARD or key.kind in BACKWARD:
            model = self._outermost.get(key.module, "")
            keys = [key._replace(root=root) for root in self._by_reference.get((key.step, model, key.root), ())]
        else:
            keys = [key]
        return [self.seen[at] for at in keys if at in self.seen]

    def losses(self, step: int) -> list[float]:
        return [
            seen.tensor.double().item() for key, seen in self.seen.items() if (key.step, key.kind) == (step, "loss")
        ]

    def fit(self, key: Key, seen: Seen, part: torch.Tensor, whole: torch.Tensor, allowed: float) -> Fit | None:
        """Return the place of a part in the reference's tensor, and how much it differs there."""
        if key.kind in PARAMETER:
            return self._fit_parameter(key, seen, part, whole, allowed)
        scales = key.kind in BACKWARD
        fit = self.alignment.fit(part, whole, allowed, scales)
        if fit is None:
            return None
        if scales and part.numel() == 1:  # of a loss, say: any factor fits, so it says nothing about others
            return fit if fit.scale > 0 or whole.numel() > 1 else self.alignment.fit(part, whole, allowed)
        if scales and fit.error <= allowed:
            model = self._outermost.get(key.module, "")
            usual = self.scales.setdefault((key.step, model, seen.key.root), fit.scale)
            if abs(fit.scale - usual) > allowed * abs(usual):
                expected = fit.expected / fit.scale * usual if fit.scale else fit.expected
                return Fit(error_of(part, expected), fit.indexes, usual, expected, rescaled=True)
        if fit.error <= allowed:
            self.alignment.note(fit.indexes, whole.shape)
            if key.kind == "input" and key.item in (0, "0", "dropped"):
                self.places[key.step, key.module, seen.key.root, *key[4:]] = fit.indexes
        return fit

    def _fit_parameter(
        self, key: Key, seen: Seen, part: torch.Tensor, whole: torch.Tensor, allowed: float
    ) -> Fit | None:
        known = self.places.get(key.module)
        if seen.place is not None:
            flat = seen.place.get("flat")
            if known is None or not seen.place.keys() <= {"flat"}:
                known = tuple(_indices(seen.place.get(dim)) for dim in range(whole.dim()))
            expected = take(whole, known)
            if flat is not None:
                (start, stop), part = flat[0], part.reshape(-1)
                expected = expected.reshape(-1)[start:stop]
            if part.shape != expected.shape:
                return None
            return Fit(error_of(part, expected), known, 1.0, expected)
        if known is not None and len(known) == whole.dim():
            expected = take(whole, known)
            if expected.shape == part.shape:
                return Fit(error_of(part, expected, key.kind in UPDATED), known, 1.0, expected)
        fit = self.alignment.fit(part, whole, allowed)
        if (fit is None or fit.error > allowed) and part.dim() == whole.dim() and key.kind not in BUFFERS:
            for dim in range(part.dim()):
                rows = rows_of(part, whole, dim) if part.size(dim) < whole.size(dim) else None
                if rows is not None:
                    places = tuple(rows if d == dim else None for d in range(part.dim()))
                    fit = Fit(0.0, places, 1.0, part)
                    break
        if fit is not None and fit.error <= allowed and key.kind == "parameter":
            self.places[key.module] = fit.indexes
            self.alignment.note(fit.indexes, whole.shape)
        return fit


def calls_of(keys: Iterable[Key]) -> dict[tuple[int, str, int], int]:
    """Return how often each module is called, by step, module and call of the model."""
    found: dict[tuple[int, str, int], int] = defaultdict(int)
    for key in keys:
        if key.kind in FORWARD:
            found[key.step, key.module, key.root] = max(found[key.step, key.module, key.root], key.call + 1)
    return found


def calls_of_outermost(keys: Iterable[Key], outermost: Mapping[str, str]) -> dict[tuple[int, str], list[int]]:
    """Return the numbers of the calls of each outermost module in each step."""
    found: dict[tuple[int, str], set[int]] = defaultdict(set)
    for key in keys:
        if key.kind in FORWARD and key.module in outermost:
            found[key.step, outermost[key.module]].add(key.root)
    return {at: sorted(roots) for at, roots in found.items()}


def _paired_by_order(index: int, count: int, theirs: Sequence[int]) -> list[int]:
    """Return the calls that belong to one of `count`: several, if the reference makes more."""
    if count < len(theirs) and len(theirs) % count == 0:
        of_each = len(theirs) // count
        return list(theirs[index * of_each : (index + 1) * of_each])
    return [theirs[min(index, len(theirs) - 1) if count < len(theirs) else index * len(theirs) // count]]


def _inputs_that_vary(wholes: Mapping[Key, torch.Tensor], step: int, model: str) -> list[Key]:
    """Return the inputs of an outermost module that are not the same in each of its calls."""
    found: dict[int | str, list[Key]] = defaultdict(list)
    for key in wholes:
        if (key.step, key.kind, key.module, key.call) == (step, "input", model, 0):
            found[key.item].append(key)
    first = {item: wholes[keys[0]] for item, keys in found.items()}
    vary = [item for item, keys in found.items() if not all(_same(first[item], wholes[key]) for key in keys)]
    return [key for item in vary for key in found[item]]


def _indices(stretches: Sequence[tuple[int, int]] | None) -> torch.Tensor | None:
    if stretches is None:
        return None
    return torch.cat([torch.arange(start, stop) for start, stop in stretches] or [torch.arange(0)])


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and a.shape == b.shape and torch.equal(a, b))


def same_place(one: tuple | None, other: tuple | None) -> bool:
    return one is None or other is None or all(map(_same, one, other))
