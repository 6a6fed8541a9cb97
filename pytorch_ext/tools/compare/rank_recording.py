"""What one rank of a run recorded, and the places of its parts in the reference's tensors."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from weft.tools.compare.alignment import Alignment, Fit, error_of, rows_of, take
from weft.tools.compare.seen import Key, Seen

FORWARD, BACKWARD = ("input", "output"), ("gradient of output", "gradient of input")
UPDATED = ("updated parameter", "state", "parameter")
PARAMETER = ("parameter", "gradient before clipping", "gradient", "updated parameter", "state")


class RankRecording:
    """What one rank recorded, and what is known of its parts."""

    def __init__(self, number: int, seen: Sequence[Seen], rename: Mapping[str, str]):
        self.number = number
        self.seen: dict[Key, Seen] = {}
        for each in seen:
            name = each.key.module
            for old, new in rename.items():
                name = name.replace(old, new)
            key = each.key._replace(module=name)
            self.seen[key] = each._replace(key=key)
        self.calls = calls_of(self.seen)
        self.names = {key.module for key in self.seen}
        self.alignment = Alignment()
        self.places: dict[Any, tuple] = {}  # of each parameter, and of each module's last input
        self.scales: dict[tuple[int, int], float] = {}  # of gradients of activations, by step and call of the model
        self.roots: dict[tuple[int, int], list[int]] = {}
        self._by_reference: dict[tuple[int, int], list[int]] = defaultdict(list)

    def pair(self, expected: Mapping[int, list[Key]], wholes: Mapping[Key, torch.Tensor]) -> None:
        """Pair the rank's calls of the model with those of the reference.

        Args:
            expected: the inputs of the whole model, by step.
            wholes: the reference's tensors.
        """
        for step in {key.step for key in self.seen}:
            theirs = sorted({key.root for key in expected.get(step, ())})
            ours = sorted({key.root for key in self.seen if key.step == step and key.kind == "input"})
            for place, root in enumerate(ours):
                self.roots[step, root] = self._paired(step, root, place, ours, theirs, expected.get(step, ()), wholes)
                for other in self.roots[step, root][:1]:
                    self._by_reference[step, other].append(root)

    def _paired(self, step, root, place, ours, theirs, expected, wholes) -> list[int]:
        if len(theirs) <= 1:
            return theirs or [0]
        likely = theirs[min(place, len(theirs) - 1)]
        for key in sorted(expected, key=lambda key: key.root != likely):
            seen = self.seen.get(key._replace(root=root))
            if seen is not None and key.item == 0 and not seen.tensor.is_floating_point():
                fit = Alignment().fit(seen.tensor, wholes[key], 0.0)
                if fit is not None and fit.error == 0.0:
                    return [key.root]
        if len(ours) < len(theirs) and len(theirs) % len(ours) == 0:
            of_each = len(theirs) // len(ours)
            return theirs[place * of_each : (place + 1) * of_each]
        return [likely]

    def of(self, key: Key) -> list[Seen]:
        """Return what this rank has of a tensor of the reference, in each of its calls of the model."""
        if key.kind in FORWARD or key.kind in BACKWARD:
            keys = [key._replace(root=root) for root in self._by_reference.get((key.step, key.root), ())]
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
        scales = key.kind in BACKWARD and part.numel() > 1
        fit = self.alignment.fit(part, whole, allowed, scales)
        if fit is None:
            return None
        if scales and fit.error <= allowed:
            usual = self.scales.setdefault((key.step, seen.key.root), fit.scale)
            if abs(fit.scale - usual) > allowed * abs(usual):
                expected = fit.expected / fit.scale * usual if fit.scale else fit.expected
                return Fit(error_of(part, expected), fit.indexes, usual, expected)
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
        if (fit is None or fit.error > allowed) and part.dim() == whole.dim():
            for dim in range(part.dim()):
                rows = rows_of(part, whole, dim)
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


def _indices(stretches: Sequence[tuple[int, int]] | None) -> torch.Tensor | None:
    if stretches is None:
        return None
    return torch.cat([torch.arange(start, stop) for start, stop in stretches] or [torch.arange(0)])


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def same_place(one: tuple | None, other: tuple | None) -> bool:
    return one is None or other is None or all(map(_same, one, other))
