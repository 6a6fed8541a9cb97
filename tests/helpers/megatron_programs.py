"""Programs in the manner of Megatron-core, for `weft compare`: stages that number their layers anew, and experts.

As in training_programs, `program(fault, seed)` trains on one process where no process group is up, and else on ranks.
"""

import parallel_programs as programs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from training_programs import STEPS, average, numbers, rank, world

WIDTH, ROWS, LAYERS, EXPERTS = 8, 6, 4, 4


class Mixing(nn.Module):
    """Rows look at rows, with scores in memory that nobody has set; it returns its bias for another to add."""

    def __init__(self, scale=1.0):
        super().__init__()
        self.keys, self.scale = nn.Linear(WIDTH, WIDTH, bias=False), scale
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        scores = torch.full((len(x), x.shape[1], x.shape[1]), float("nan"))
        scores = torch.baddbmm(scores, x, self.keys(x).transpose(1, 2), beta=0.0)
        return nn.Softmax(dim=-1)(scores * self.scale) @ x, self.bias


class Layer(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.norm, self.mixing = nn.LayerNorm(WIDTH), Mixing(scale)

    def forward(self, x):
        mixed, bias = self.mixing(self.norm(x))
        return x + mixed + bias


class Decoder(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Stage(nn.Module):
    def __init__(self, layers, first, last):
        super().__init__()
        self.enter = first
        self.decoder = Decoder(layers)
        self.leave = last

    def forward(self, x):
        x = self.decoder(self.enter(x) if self.enter else x)
        return self.leave(x) if self.leave else x


def stages(fault="", seed=0):
    """Two stages, and each numbers its half of the layers from 0; two micro-batches."""
    torch.manual_seed(seed)
    first, last = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 2)
    layers = [Layer(1.5 if fault == "other scale" and world() > 1 and i == 2 else 1.0) for i in range(LAYERS)]
    if world() == 1:
        model = Stage(layers, first, last)
    else:
        model = Stage(layers[rank() * 2 :][:2], None if rank() else first, last if rank() else None)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    optimizer.param_groups[0]["is_expert"] = world() > 1  # a mark of the program, which no optimizer reads
    for step in range(STEPS):
        for micro in range(2):
            x, y = (numbers(2, ROWS, n, step=2 * step + micro, salt=n) for n in (3, 2))
            if world() == 1:
                (F.mse_loss(model(x), y) / 2).backward()
            elif rank() == 0:
                passed = model(x)
                dist.send(passed.detach() * (1.1 if fault == "scaled" else 1.0), 1)
                gradient = torch.empty_like(passed)
                dist.recv(gradient, 1)
                passed.backward(gradient)
            else:
                received = torch.empty(2, ROWS, WIDTH)
                dist.recv(received, 0)
                (F.mse_loss(model(received.requires_grad_()), y) / 2).backward()
                dist.send(received.grad, 0)
        if fault == "bias twice" and rank() == 1:
            model.decoder.layers[1].mixing.bias.grad *= 2
        optimizer.step()
        optimizer.zero_grad()


STAGES = {"1:decoder.layers.1": "decoder.layers.3", "1:decoder.layers.0": "decoder.layers.2"}


class Experts(nn.Module):
    def __init__(self, local):
        super().__init__()
        self.local = nn.ModuleList(local)

    def forward(self, rows, counts):
        return torch.cat([expert(x) for expert, x in zip(self.local, rows.split(counts.tolist()), strict=True)])


class Mixture(nn.Module):
    """The best of four experts for each row; on ranks, each has two and rows travel by all_to_all."""

    def __init__(self, fault):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        local = [nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS)]
        self.experts = Experts(local if world() == 1 else local[rank() * 2 :][:2])
        self.fault = fault

    def forward(self, x):
        rows = x.flatten(0, 1)
        score, chosen = self.gate(rows).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=EXPERTS)
        made = self.on_ranks(rows[order], counts) if world() > 1 else self.experts(rows[order], counts)
        back = order.flip(0) if self.fault == "in another order" and rank() == 1 else order
        return x + (torch.empty_like(made).index_copy(0, back, made) * score[:, None]).view_as(x)

    def on_ranks(self, rows, counts):
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        sent, received = counts.view(2, 2).sum(1).tolist(), theirs.view(2, 2).sum(1).tolist()
        arrived = programs._AllToAll.apply(rows, sent, received)
        by_expert = torch.arange(2).repeat(2).repeat_interleave(theirs)
        order = (1 - by_expert if self.fault == "experts swapped" else by_expert).argsort(stable=True)
        made = self.experts(arrived[order], by_expert.bincount(minlength=2))
        made = torch.empty_like(made).index_copy(0, order, made)
        return programs._AllToAll.apply(made, received, sent)


class Entrance(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight), self.bias


class Routed(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.enter, self.mixture, self.leave = Entrance(3, WIDTH), Mixture(fault), nn.Linear(WIDTH, 2)

    def forward(self, x):
        x, bias = self.enter(x)
        return self.leave(self.mixture(x + bias))


def experts(fault="", seed=0):
    """Four micro-batches of a row on one process, two on each of two ranks, which share the experts."""
    torch.manual_seed(seed)
    model = Routed(fault)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        whole = zip(*(numbers(4, ROWS, n, step=step, salt=n).split(1) for n in (3, 2)), strict=True)
        for x, y in [*whole][rank() * 4 // world() :][: 4 // world()]:
            (F.mse_loss(model(x), y) / 4).backward()
        for name, p in model.named_parameters():
            if world() > 1 and ("experts" not in name or fault == "experts averaged"):
                average([p.grad])
            if world() > 1 and "experts" not in name:
                p.grad *= 2
        optimizer.step()
        optimizer.zero_grad()


OF_RANKS = {f"1:experts.local.{i}": f"experts.local.{i + 2}" for i in (1, 0)}
