"""Hypothesis strategies for programs: models in the ways in which people write them, of odd sizes, on small meshes."""

import itertools
import math
from collections.abc import Callable

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from random_programs.attention import CHOICES
from random_programs.models import Body, Program
from random_programs.statements import (
    BUFFERS,
    FEATURES,
    IMAGE_LAYERS,
    IMAGES,
    LAYERS,
    LINEARS,
    PAIRS,
    PARAMETERS,
    POINTWISE,
    SEQUENCES,
)

TOGETHER = 10  # programs of one seed: of more hypothesis makes variations

MESHES = [mesh for mesh in itertools.product(range(1, 5), repeat=4) if 1 < math.prod(mesh) <= 4]
FEATURE_LAYERS = [name for name in LAYERS if name not in IMAGE_LAYERS and name not in LINEARS]
OF_FEATURES = [list(POINTWISE), list(FEATURES), list(FEATURES), [*PARAMETERS, *BUFFERS]]
ANY = [list(LINEARS), *OF_FEATURES, list(PAIRS), list(SEQUENCES), list(SEQUENCES), FEATURE_LAYERS]
ANY_OF_IMAGES = [list(IMAGE_LAYERS), list(IMAGES), list(POINTWISE), ["add", "multiply", "larger", "chosen"]]
NORMS = {2: ["layer", "rms", "own", "none", "batch"], 4: ["group", "none", "batch"]}
NORMS[3] = [*NORMS[2], "group"]
HEADS = {
    2: ["none", "linear", "norm and scores", "narrow"],
    3: ["none", "linear", "norm and scores", "narrow", "first", "last", "mean", "max", "sum", "flat"],
    4: ["none", "mean of images", "flat"],
}
EXTRA = {2: ["none", "asks"], 3: ["none", "none", "needed", "keyword", "asks"], 4: ["none", "asks"]}
WIDTHS = st.sampled_from([6, 4, 8, 12, 9, 7, 5, 3, 2, 16, 1])


class Writing:
    """Statements that are drawn one after another; those that do not fit are left out."""

    def __init__(self, draw, sample: torch.Tensor):
        self.draw, self.sample, self.body = draw, sample, Body((), sample)
        self.axis = 1 if sample.ndim == 4 else -1
        self.layers = list(LINEARS) if sample.ndim < 4 else ["conv 1", "conv 3", "conv relu_", "conv without bias"]

    @property
    def newest(self) -> int:
        return len(self.body.values) - 1

    def add(self, name: str, inputs: tuple[int, ...], number: int) -> None:
        try:
            value = self.body.add((name, inputs, number))
        except (RuntimeError, ValueError, IndexError, StopIteration, TypeError, AssertionError):
            return
        odd = value.dtype != self.sample.dtype or value.numel() == 0 or not value.abs().max() < 1e3
        if odd or value.ndim != self.sample.ndim or value.shape[self.axis] > 40:
            self.body.drop()

    def layer(self, place: int, width: int) -> None:
        self.add(self.draw(st.sampled_from(self.layers)), (place,), width)

    def some(self, kinds: list[list[str]], most: int) -> None:
        draw = self.draw
        for _ in range(draw(st.integers(0, most))):
            name = draw(st.sampled_from(draw(st.sampled_from(kinds))))
            place = draw(st.integers(0, self.newest)) if draw(st.integers(0, 3)) == 3 else self.newest
            inputs = (place, draw(st.integers(0, self.newest))) if name in PAIRS else (place,)
            if name == "attention":
                number = draw(st.integers(0, CHOICES - 1))
            else:
                number = draw(WIDTHS) if name in LAYERS else draw(st.integers(1, 3))
            self.add(name, inputs, number)

    def finished(self) -> tuple:
        """Those that are needed for a last value of the sample's shape."""
        if self.body.values[-1].shape != self.sample.shape:
            self.layer(self.newest, self.sample.shape[self.axis])
        if self.body.values[-1].shape != self.sample.shape:
            self.add("add", (0, self.newest), 1)
        return _needed(self.body.statements) if self.body.values[-1].shape == self.sample.shape else ()


@st.composite
def statements(draw, sample: torch.Tensor):
    """Of a block whose values are like the sample: layers with a few operations between; an attention; or anything."""
    writing, kind = Writing(draw, sample), draw(st.sampled_from(["layers", "layers", "attention", "any"]))
    any_kind = ANY if sample.ndim < 4 else ANY_OF_IMAGES
    if kind == "attention" and sample.ndim == 3:
        writing.add("attention", (0,), draw(st.integers(0, CHOICES - 1)))
        writing.some(any_kind, 1)
    elif kind == "any":
        writing.some(any_kind, 7)
    else:
        hidden = draw(WIDTHS)
        writing.layer(0, hidden)
        if draw(st.booleans()):
            writing.layer(0, draw(st.sampled_from([hidden, hidden, 1])))
            writing.add(draw(st.sampled_from(list(PAIRS))), (1, 2), 1)
        writing.some(OF_FEATURES if sample.ndim < 4 and draw(st.booleans()) else any_kind, 3)
        writing.layer(writing.newest, sample.shape[writing.axis])
    return writing.finished()


def _needed(made: list) -> tuple:
    """Those statements that the last one follows from, renumbered."""
    needed = {len(made)}
    for place in range(len(made), 0, -1):
        if place in needed:
            needed |= set(made[place - 1][1])
    kept = sorted(needed - {0})
    return tuple(
        (name, tuple(kept.index(i) + 1 if i else 0 for i in inputs), number)
        for name, inputs, number in (made[place - 1] for place in kept)
    )


@st.composite
def programs(draw):
    mesh = draw(st.sampled_from(MESHES))
    dims = draw(st.sampled_from([3, 3, 3, 3, 4, 2]))
    batch, length, width = draw(st.integers(1, 4)), draw(st.integers(1, 9)), draw(WIDTHS)
    if dims == 4:
        shape: tuple = (batch, width, draw(st.integers(2, 6)), draw(st.integers(2, 6)))
        reads = "features"
    elif dims == 2:
        shape, reads = (batch, width), "features"
    else:
        shape = (batch, length, width)
        reads = draw(st.sampled_from(["features", "plain", "padded", "scaled", "positions", "table", "class token"]))
    sample = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    if reads == "class token":
        sample = torch.cat((sample[:, :1], sample), 1)
    blocks: list = []
    for number in range(draw(st.integers(mesh[0], 4))):
        if number and mesh[0] == 1 and draw(st.integers(0, 5)) == 5:
            blocks.append(draw(st.integers(0, number - 1)))
            if isinstance(blocks[-1], int) and isinstance(blocks[blocks[-1]], int):
                blocks.pop()
            continue
        form = draw(st.sampled_from(["pre", "post", "scaled", "plain"]))
        norm = draw(st.sampled_from(NORMS[dims]))
        body = draw(statements(sample))
        blocks.append((form, norm, body))
    heads = HEADS[dims] + (["tied", "product", "loss"] if reads != "features" else [])
    return Program(
        mesh,
        draw(st.sampled_from(["float64", "float64", "float32", "bfloat16"])),
        shape,
        reads,
        tuple(blocks),
        draw(st.sampled_from(heads)),
        draw(st.sampled_from(["tensor", "tensor", "tuple", "dict", "all"])),
        draw(st.sampled_from([one for one in EXTRA[dims] if mesh[0] == 1 or one != "keyword"])),
        draw(st.booleans()),
        draw(options(mesh)),
        draw(st.integers(0, 99)),
    )


@st.composite
def options(draw, mesh):
    chosen: list = []
    if draw(st.integers(0, 3)) == 3:
        chosen.append(("recompute", "full"))
    if mesh[2] > 1 and draw(st.booleans()):
        chosen.append(("layout", draw(st.sampled_from(["zigzag", "contiguous"]))))
        chosen.append(("method", draw(st.sampled_from(["auto", "ring", "all_gather", "ulysses"]))))
    return tuple(chosen)


def each_drawn(number: int, test: Callable[[Program], object], *phases: Phase) -> None:
    """Calls test(program) for each of the programs of a seed, TOGETHER at most."""

    @seed(number)
    @settings(
        max_examples=TOGETHER,
        database=None,
        deadline=None,
        phases=[Phase.generate, *phases],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(programs())
    def drawn(program):
        test(program)

    drawn()
