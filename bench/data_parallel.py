"""weft bench data_parallel: steps of models and of sets of gradients, against torch's DDP over gloo and over weft.

A set of gradients is a model without arithmetic, so its time is that of gradients on the way into buckets, across the
ranks and back. Its backward gives autograd finished tensors, which autograd may keep, as after a real backward.
Subjects "of a sum" instead give the gradients of the sum of all parameters: one expanded number, which autograd must
write out.

The bench also measures the peak memory of each wrapper. The limit is the same step without a wrapper.
"""

import argparse
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import weft
from weft.bench.host_calls import GPTBlock
from weft.bench.measure import alternate, slowest_rank
from weft.bench.memory import peak_mb
from weft.bench.table import Row
from weft.testing import reference
from weft.testing.ranks import run_ranks

OURS, DDP_WEFT, DDP_GLOO, ALONE = "weft", "DDP on weft", "DDP on gloo", "limit"
LIMIT = "the same step without a wrapper and without communication"


@dataclass(frozen=True)
class Subject:
    """A model and its loss."""

    name: str
    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int], torch.Tensor]  # (wrapped model, rank)
    before: Callable[[nn.Module], object] = lambda model: None  # runs before each step, not measured


class Handed(torch.autograd.Function):
    """Backward that gives each parameter a finished gradient and keeps none; without any, the gradients of a sum."""

    @staticmethod
    def forward(ctx, ready, *parameters):
        ctx.ready, ctx.shapes = ready, [parameter.shape for parameter in parameters]
        return torch.zeros(())

    @staticmethod
    def backward(ctx, dy):
        gradients = ctx.ready[:] or [dy.expand(shape) for shape in ctx.shapes]
        ctx.ready.clear()
        return None, *gradients


class Gradients(nn.Module):
    """Parameters of these shapes and no arithmetic."""

    def __init__(self, shapes: list[tuple[int, ...]]):
        super().__init__()
        self.all = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes)
        self.memory: list[torch.Tensor] = []
        self.ready: list[torch.Tensor] = []

    def forward(self) -> torch.Tensor:
        return Handed.apply(self.ready, *self.all)


def _make_ready(model: nn.Module) -> None:
    """Fill this rank's gradients with the same numbers every time, in memory that no step allocates or frees."""
    assert isinstance(model, Gradients)
    if not model.memory:
        model.memory = [torch.empty(parameter.shape) for parameter in model.all]
    for number, x in enumerate(model.memory):
        x.fill_((dist.get_rank() + 1) * 1.01**number)
        model.ready.append(x.detach())  # the only reference to this tensor, so autograd may keep it


def resnet50_shapes() -> list[tuple[int, ...]]:
    """Return the shapes of He et al. 2015, table 1: 25.6 million parameters in 161 tensors, with the batch norms."""

    def convolution(outputs: int, inputs: int, kernel: int) -> list[tuple[int, ...]]:
        return [(outputs, inputs, kernel, kernel), (outputs,), (outputs,)]

    shapes, inputs = convolution(64, 3, 7), 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += convolution(width, inputs, 1) + convolution(width, width, 3) + convolution(4 * width, width, 1)
            if block == 0:
                shapes += convolution(4 * width, inputs, 1)
            inputs = 4 * width
    return [*shapes, (1000, inputs), (1000,)]


def bert_base_shapes() -> list[tuple[int, ...]]:
    """Return the shapes of BERT-base, Devlin et al. 2018: 109 million parameters in 199 tensors."""
    width, between = 768, 3072
    layer: list[tuple[int, ...]] = [(width, width), (width,)] * 4 + [(width,), (width,)]
    layer += [(between, width), (between,), (width, between), (width,), (width,), (width,)]
    return [(30522, width), (512, width), (2, width), (width,), (width,)] + layer * 12 + [(width, width), (width,)]


def linear_layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(12)))


def demo_gpt() -> nn.Module:
    """Return a model of the sizes of examples/train_lm.py: 256 wide, 6 layers, bytes as tokens."""
    return nn.Sequential(
        nn.Embedding(256, 256),
        *(GPTBlock(256, head=64, gelu="tanh") for _ in range(6)),
        nn.LayerNorm(256),
        nn.Linear(256, 256, bias=False),
    )


def _linear_loss(model: nn.Module, rank: int) -> torch.Tensor:
    return model(torch.randn(4, 1024, generator=torch.Generator().manual_seed(rank))).square().mean()


def _gpt_loss(model: nn.Module, rank: int) -> torch.Tensor:
    tokens = torch.randint(256, (4, 128), generator=torch.Generator().manual_seed(rank))
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def _no_loss(model: nn.Module, rank: int) -> torch.Tensor:
    return model()


SUBJECTS = {
    subject.name: subject
    for subject in (
        Subject("12 linear layers", linear_layers, _linear_loss),
        Subject("demo GPT", demo_gpt, _gpt_loss),
        Subject("ResNet-50's gradients", lambda: Gradients(resnet50_shapes()), _no_loss, _make_ready),
        Subject("ResNet-50's, of a sum", lambda: Gradients(resnet50_shapes()), _no_loss),
        Subject("BERT-base's gradients", lambda: Gradients(bert_base_shapes()), _no_loss, _make_ready),
        Subject("BERT-base's, of a sum", lambda: Gradients(bert_base_shapes()), _no_loss),
    )
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=SUBJECTS, default=list(SUBJECTS), help="models to run")


def run(options: argparse.Namespace) -> Iterator[Row]:
    for name in options.only:
        yield _row(SUBJECTS[name], options)
    states = run_ranks(_optimizer_state, options.world, timeout_s=300)
    state_mb = {name: [state[name] for state in states] for name in states[0]}
    yield Row(_of("Adam's state", options, linear_layers()), facts={"state_mb": state_mb})


def _row(subject: Subject, options: argparse.Namespace) -> Row:
    per_rank = run_ranks(_measure, options.world, subject, options.rounds, timeout_s=600, group_timeout_s=120)
    peaks = {}
    for name in (OURS, DDP_WEFT, DDP_GLOO):
        peaks[name] = max(run_ranks(_peak_mb, options.world, subject, name, timeout_s=300))
    times = slowest_rank(per_rank)
    facts = {"ratio_to_ddp_on_weft": times[DDP_WEFT].p50_us / times[OURS].p50_us, "peak_mb": peaks}
    return Row(_of(subject.name, options, subject.model()), times, DDP_GLOO, facts)


def _of(name: str, options: argparse.Namespace, model: nn.Module) -> dict[str, str | int]:
    count = sum(parameter.numel() for parameter in model.parameters())
    return {"name": name, "world": options.world, "parameters": count}


def _wrapped(name: str, model: nn.Module) -> nn.Module:
    if name == OURS:
        return weft.DataParallel(model)
    if name == DDP_WEFT:
        return DistributedDataParallel(model)
    return DistributedDataParallel(model, process_group=dist.new_group(backend="gloo"))


def _step(subject: Subject, model: nn.Module, rank: int) -> Callable[[], None]:
    parameters = list(model.parameters())

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        subject.loss(model, rank).backward()

    return step


def _measure(rank: int, subject: Subject, rounds: int) -> dict[str, list[float]]:
    torch.manual_seed(0)
    alone = subject.model()
    models = {ALONE: alone} | {name: _wrapped(name, copy.deepcopy(alone)) for name in (OURS, DDP_WEFT, DDP_GLOO)}
    plain = [getattr(model, "module", model) for model in models.values()]
    steps = {name: _step(subject, model, rank) for name, model in models.items()}

    def meet() -> None:
        for model in plain:
            if not getattr(model, "ready", None):
                subject.before(model)
        dist.barrier()

    for step in steps.values():
        for _ in range(2):  # the first shows the order of gradients
            meet()
            step()
    _check(alone, models[OURS])
    return alternate(steps, meet=meet, rounds=rounds, calls=1)


def measure_ddp(rank: int, rounds: int, calls: int) -> tuple[dict[str, list[float]], int]:
    """Return microseconds a step of torch's DDP over weft and over gloo, and of the twelve linear layers alone.

    Returns also the number of elements in which the gradients differ: the two backends sum in different orders.
    """
    torch.manual_seed(0)
    subject = SUBJECTS["12 linear layers"]
    alone = subject.model()
    wrapped = {"ordinary": DDP_WEFT, "gloo": DDP_GLOO}
    models = {name: _wrapped(how, copy.deepcopy(alone)) for name, how in wrapped.items()}
    steps = {name: _step(subject, model, rank) for name, model in (models | {"limit": alone}).items()}
    for step in steps.values():
        step()
    gradients = ([parameter.grad for parameter in model.parameters()] for model in models.values())
    wrong = sum(int((~torch.isclose(a, b, rtol=1e-4, atol=1e-7)).sum()) for a, b in zip(*gradients, strict=True))
    return alternate(steps, meet=dist.barrier, rounds=rounds, calls=calls), wrong


def _check(alone: nn.Module, ours: nn.Module) -> None:
    """Check that our gradients are the rank-order averages of the ranks' gradients, to the bit."""
    for local, averaged in zip(alone.parameters(), ours.parameters(), strict=True):
        parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        assert local.grad is not None and averaged.grad is not None
        dist.all_gather(parts, local.grad)
        if not torch.equal(reference.reduce(parts, "avg"), averaged.grad):
            raise AssertionError("the gradients are not the average of the ranks'; not measured")


def _peak_mb(rank: int, subject: Subject, name: str) -> float:
    """Return the peak growth of this rank's memory in MB over three steps, from before the model exists."""
    torch.manual_seed(0)

    def three_steps(look: Callable[[], None]) -> None:
        model = subject.model()
        step = _step(subject, _wrapped(name, model), rank)
        for _ in range(3):
            subject.before(model)
            step()
            dist.barrier()
            look()

    peak = peak_mb(three_steps)
    dist.barrier()
    return peak


def _optimizer_state(rank: int) -> dict[str, float]:
    """Return the MB of Adam's state on this rank, whole and sharded."""
    found = {}
    for name, sharded in (("whole", False), ("shard_optimizer", True)):
        model = weft.DataParallel(linear_layers(), shard_optimizer=sharded)
        optimizer = model.optimizer(torch.optim.Adam) if sharded else torch.optim.Adam(model.parameters())
        _linear_loss(model, rank).backward()
        optimizer.step()
        tensors = [value for state in optimizer.state.values() for value in state.values()]
        found[name] = sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 2**20
    return found
