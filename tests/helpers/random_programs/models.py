"""Models built from plain data: blocks of statements on values [batch, length, features] or [batch, channels, h, w].

A statement (name, inputs, number) makes a value of earlier ones, by their place; value 0 is the block's input. What the
name does is in the tables of statements.py. A layer's sizes follow from the values it meets, and its weights
from the program's seed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from random_programs.statements import BUFFERS, FUNCTIONS, LAYERS, PAIRS, PARAMETERS

Statement = tuple[str, tuple[int, ...], int]
MAX_LENGTH = 16


@dataclass(frozen=True)
class Program:
    """A model, its batch and its mesh.

    Attributes:
        mesh: (pp, dp, cp, tp).
        shape: of the input: (batch, length, features), (batch, channels, height, width) or (batch, features). Of tokens,
            features are the width of the embedding.
        reads: "features", or tokens: "plain", "padded", "scaled", "positions", "table", "class token".
        blocks: each (form, norm, statements); an int repeats the block of that number, with its weights.
        head: what follows the blocks; returns: how results come back.
        extra: "needed", "keyword", "asks" or "none": see the classes at the end.
        options: further arguments of weft.parallelize.
        seed: of weights and inputs; and of how the model is called.
    """

    mesh: tuple[int, int, int, int]
    dtype: str
    shape: tuple[int, ...]
    reads: str
    blocks: tuple
    head: str = "none"
    returns: str = "tensor"
    extra: str = "none"
    training: bool = True
    options: tuple = ()
    seed: int = 0


VOCABULARY = 19


def model_of(program: Program) -> nn.Module:
    """The unsplit model, in fp64."""
    with torch.random.fork_rng([]):
        torch.manual_seed(program.seed)
        kind = {"needed": WithMemory, "keyword": WithGate, "asks": Asking}.get(program.extra, Model)
        model = kind(program).double()
        for module in model.modules():
            if isinstance(module, nn.Dropout) and program.training:
                module.p = 0.0
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.add_(torch.rand_like(buffer))
    return model.train(program.training)


def batch_of(program: Program, replica: int = 0, step: int = 0) -> tuple[tuple, dict]:
    """Arguments of the model, by place and by name, in fp64."""
    generator = torch.Generator().manual_seed(1000 * program.seed + 10 * replica + step)
    batch, length, *_ = program.shape
    if program.reads == "features":
        x = torch.randn(program.shape, generator=generator, dtype=torch.float64)
    else:
        x = torch.randint(VOCABULARY, (batch, length), generator=generator)
    if program.extra == "needed":
        return (x, torch.randn(batch, 3, program.shape[-1], generator=generator, dtype=torch.float64)), {}
    if program.extra == "keyword":
        length += program.reads == "class token"
        return (x,), {"gate": torch.rand(batch, length, 1, generator=generator, dtype=torch.float64)}
    return ((), {"x": x}) if program.seed % 3 == 0 else ((x,), {})


class Body(nn.Module):
    """A list of statements, whose last value it returns. It is built along a sample of the input."""

    def __init__(self, statements: Sequence[Statement], sample: torch.Tensor):
        super().__init__()
        self.statements: list[Statement] = []
        self.values = [sample]
        for statement in statements:
            self.add(statement)

    def add(self, statement: Statement) -> torch.Tensor:
        """Builds what the statement needs, and runs it. It raises what torch raises where values do not fit."""
        name, inputs, number = statement
        x, own = self.values[inputs[0]], f"{name}{len(self.statements)}"
        if name in LAYERS:
            self.add_module(own, LAYERS[name][0](x, number).to(x.dtype))
        elif name in PARAMETERS:
            self.register_parameter(own, nn.Parameter(PARAMETERS[name][0](x, number).to(x.dtype)))
        elif name in BUFFERS:
            self.register_buffer(own, BUFFERS[name][0](x, number))
        self.statements.append(statement)
        try:
            self.values.append(self._value(len(self.statements) - 1, statement, self.values))
        except Exception:
            self.values.append(x)
            self.drop()
            raise
        return self.values[-1]

    def drop(self) -> None:
        """Takes the last statement back."""
        own = f"{self.statements.pop()[0]}{len(self.statements)}"
        self.values.pop()
        if hasattr(self, own):
            delattr(self, own)

    def forward(self, x):
        values = [x]
        for place, statement in enumerate(self.statements):
            values.append(self._value(place, statement, values))
        return values[-1]

    def _value(self, place: int, statement: Statement, values: list[torch.Tensor]) -> torch.Tensor:
        name, inputs, number = statement
        given = [values[i] for i in inputs]
        if name in FUNCTIONS:
            return FUNCTIONS[name](*given, number)
        if name in PAIRS:
            return PAIRS[name](*given)
        own = getattr(self, f"{name}{place}")
        kinds = LAYERS if name in LAYERS else PARAMETERS if name in PARAMETERS else BUFFERS
        return kinds[name][1](*given, own, number)


class RMSNorm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Transposed(nn.Module):
    """A norm of [batch, features, length] for values [batch, length, features]."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


def _norm(kind: str, shape: Sequence[int]) -> nn.Module:
    width, image = shape[1 if len(shape) == 4 else -1], len(shape) == 4
    groups = next(g for g in (3, 2, 1) if width % g == 0)
    if kind == "none":
        return nn.Identity()
    if kind == "batch" and len(shape) != 3:
        return nn.BatchNorm2d(width) if image else nn.BatchNorm1d(width)
    if kind == "batch":
        return Transposed(nn.BatchNorm1d(width))
    if kind == "group" or image:
        return nn.GroupNorm(groups, width) if image else Transposed(nn.GroupNorm(groups, width))
    return {"layer": nn.LayerNorm, "rms": nn.RMSNorm, "own": RMSNorm}[kind](width)


class Block(nn.Module):
    """A body, between a norm and a shortcut."""

    def __init__(self, form: str, norm: str, statements: Sequence[Statement], sample: torch.Tensor):
        super().__init__()
        self.form = form
        self.norm = _norm(norm, sample.shape)
        self.body = Body(statements, sample)
        self.body.values = []
        if form == "scaled":
            features = 1 if sample.ndim == 4 else -1
            shape = [sample.shape[d] if d == features % sample.ndim else 1 for d in range(1, sample.ndim)]
            self.scale = nn.Parameter(torch.rand(shape))

    def forward(self, x):
        if self.form == "pre":
            return x + self.body(self.norm(x))
        if self.form == "post":
            return self.norm(x + self.body(x))
        if self.form == "scaled":
            return x + self.scale * self.body(self.norm(x))
        return self.body(self.norm(x))


class ScaledEmbedding(nn.Embedding):
    def forward(self, tokens):
        return super().forward(tokens) * math.sqrt(self.embedding_dim)


class Model(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, program: Program):
        super().__init__()
        self.reads, self.head_kind, self.returns = program.reads, program.head, program.returns
        sample = torch.randn(program.shape)
        width = program.shape[-1]
        if self.reads != "features":
            made = ScaledEmbedding if self.reads == "scaled" else nn.Embedding
            self.embedding = made(VOCABULARY, width, padding_idx=0 if self.reads == "padded" else None)
            if self.reads == "positions":
                self.positions = nn.Embedding(MAX_LENGTH, width)
            elif self.reads == "table":
                self.positions = nn.Parameter(torch.randn(MAX_LENGTH, width))
            elif self.reads == "class token":
                self.token = nn.Parameter(torch.randn(1, 1, width))
                sample = torch.cat((self.token.detach().expand(len(sample), -1, -1), sample), 1)
        self.blocks = nn.ModuleList()
        for block in program.blocks:
            if isinstance(block, int):
                self.blocks.append(self.blocks[block])
                continue
            self.blocks.append(Block(*block, sample))
            sample = self.blocks[-1](sample).detach()
        self._add_head(program, sample)

    def _add_head(self, program: Program, sample: torch.Tensor) -> None:
        width = sample.shape[1 if sample.ndim == 4 else -1]
        if program.head in ("linear", "first", "last", "mean", "max", "mean of images", "sum"):
            self.head = nn.Linear(width, 7)
        elif program.head == "narrow":
            self.head = nn.Linear(width, max(1, width // 2), bias=False)
        elif program.head == "norm and scores":
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY + 4, bias=False)
        elif program.head == "tied":
            self.head = nn.Linear(width, VOCABULARY, bias=False)
            self.head.weight = self.embedding.weight
        elif program.head == "flat":
            self.head = nn.Linear(sample[0].numel(), 5)

    def forward(self, x):
        return self.result(self.run(self.enter(x)), x)

    def enter(self, x):
        if self.reads == "features":
            return x
        y = self.embedding(x)
        if self.reads == "positions":
            return y + self.positions(torch.arange(x.shape[1], device=x.device))
        if self.reads == "table":
            y += self.positions[: x.shape[1]]
        if self.reads == "class token":
            return torch.cat((self.token.expand(len(x), -1, -1), y), dim=1)
        return y

    def run(self, x, gate=None, memory=None):
        states = [x]
        for block in self.blocks:
            x = block(x)
            if gate is not None:
                x = x * gate
            if memory is not None:
                x = x + F.softmax(x @ memory.transpose(1, 2), -1) @ memory
            states.append(x)
        return states

    def result(self, states, given):
        x, kind = states[-1], self.head_kind
        if kind == "first":
            y = self.head(x[:, 0])
        elif kind == "last":
            y = self.head(x[:, -1])
        elif kind == "mean":
            y = self.head(x.mean(1))
        elif kind == "sum":
            y = self.head(x).sum(1)
        elif kind == "max":
            y = self.head(x.max(dim=1).values)
        elif kind == "mean of images":
            y = self.head(x.mean((2, 3)))
        elif kind == "flat":
            y = self.head(x.flatten(1))
        elif kind == "norm and scores":
            y = self.head(self.norm(x))
        elif kind == "product":
            y = x @ self.embedding.weight.t()
        elif kind == "loss":
            logits = F.linear(x, self.embedding.weight)
            y = F.cross_entropy(logits[:, : given.shape[1]].flatten(0, 1), given.flatten())
        else:
            y = x if kind == "none" else self.head(x)
        if self.returns == "dict":
            return {"y": y, "last": x}
        if self.returns == "tuple":
            return y, states[0]
        if self.returns == "all":
            return y, [state * 1.0 for state in states]
        return y


class WithGate(Model):
    """Takes a gate of each position by name."""

    def forward(self, x, gate=None):
        return self.result(self.run(self.enter(x), gate), x)


class Asking(Model):
    """Looks at values, outside of its modules."""

    def forward(self, x):
        states = self.run(self.enter(x))
        if states[-1].abs().max() > 1e9:
            states[-1] = states[-1] / 2
        return self.result(states, x)


class WithMemory(Model):
    """Takes a second sequence."""

    def forward(self, x, memory):
        return self.result(self.run(self.enter(x), None, memory), x)
