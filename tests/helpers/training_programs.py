"""Programs as a user writes them, each for one process and for several ranks, and faults to plant in them.

`program(fault, seed)` trains on one process where no process group is up, and else in its parallel form. A fault changes
one line of that form.
"""

import copy
import math
import os
import tempfile
from contextlib import nullcontext

import parallel_programs as gpt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

STEPS = 2


def world():
    return dist.get_world_size() if dist.is_initialized() else 1


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def numbers(*shape, step, salt=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * salt + step))


def average(tensors):
    for x in tensors:
        if world() > 1 and x is not None:
            dist.all_reduce(x)
            x /= world()


def gradients(model):
    return [x.grad for x in model.parameters()]


class Perceptron(nn.Module):
    def __init__(self, drop=0.0):
        super().__init__()
        self.first, self.second = nn.Linear(12, 24), nn.Linear(24, 3)
        self.drop = nn.Dropout(drop)

    def forward(self, x):
        return self.second(self.drop(F.gelu(self.first(x))))


def accumulation(fault="", seed=0):
    """DistributedDataParallel, two micro-batches of numbers with dropout, half of each on each rank."""
    torch.manual_seed(seed)
    model = Perceptron(0.3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    wrapped = DistributedDataParallel(model) if world() > 1 else model
    torch.manual_seed(seed if fault == "drops alike" else seed + rank())
    for step in range(STEPS):
        for micro in range(2):
            source = 0 if fault == "second micro-batch" and micro == 1 and rank() == 1 else micro
            x, y = (numbers(8, n, step=10 * step + source, salt=n).chunk(world())[rank()] for n in (12, 3))
            late = micro == 0 or (fault == "no last reduction" and step == 1)
            with wrapped.no_sync() if world() > 1 and late else nullcontext():
                loss = F.mse_loss(wrapped(x), y)
                (loss if fault == "not divided" else loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()


def accumulation_of_four(fault="", seed=0):
    """Four micro-batches, shared out among the ranks."""
    torch.manual_seed(seed)
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        for micro in range(rank(), 4, world()):
            source = 2 if fault == "second micro-batch" and micro == 3 and world() > 1 else micro
            x, y = (numbers(8, n, step=10 * step + source, salt=n) for n in (12, 3))
            (F.mse_loss(model(x), y) / (4 / world())).backward()
        average(gradients(model))
        optimizer.step()
        optimizer.zero_grad()


def gan(fault="", seed=0):
    """Two models with an optimizer each; the discriminator is called three times."""
    torch.manual_seed(seed)
    generator = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
    critic = Critic()
    optimizers = [torch.optim.Adam(model.parameters(), 1e-2, betas=(0.5, 0.9)) for model in (generator, critic)]
    criterion = nn.BCEWithLogitsLoss()
    for step in range(STEPS):
        noise, real = (numbers(8, n, step=step, salt=n).chunk(world())[rank()] for n in (6, 4))
        fake = generator(noise)
        scores = critic(real), critic(fake.detach() if fault != "not detached" else fake)
        criterion(scores[0], torch.ones_like(scores[0])).backward()
        criterion(scores[1], torch.zeros_like(scores[1])).backward(retain_graph=True)
        average(gradients(critic))
        optimizers[1].step()
        optimizers[1].zero_grad()
        scores = critic(fake)
        criterion(scores, torch.ones_like(scores)).backward()
        if fault != "generator not averaged":
            average(gradients(generator))
        optimizers[0].step()
        for optimizer in optimizers:
            optimizer.zero_grad()


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 16), nn.Linear(16, 1)

    def forward(self, x):
        return self.head(self.body(x).relu())


def distillation(fault="", seed=0):
    """A student beside a teacher of the same class, and an average of its weights that is evaluated."""
    torch.manual_seed(seed)
    student, teacher = Perceptron(), Perceptron().eval()
    shadow = copy.deepcopy(student)
    optimizer = torch.optim.AdamW(student.parameters(), 1e-2)
    wrapped = DistributedDataParallel(student) if world() > 1 else student
    for step in range(STEPS):
        x = numbers(8, 12, step=step).chunk(world())[rank()]
        with torch.no_grad():
            wanted = teacher(x + 0.01 * (fault == "teacher sees another batch"))
        F.mse_loss(wrapped(x), wanted).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for average, x_ in zip(shadow.parameters(), student.parameters(), strict=True):
                average.lerp_(x_, 0.1 * (2 if fault == "average decays twice" and world() > 1 else 1))
            shadow(x)


def policy(fault="", seed=0):
    """Two epochs of PPO on given actions, with a frozen copy of the policy and a model of values."""
    torch.manual_seed(seed)
    actor, values = Perceptron(), nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 1))
    frozen = copy.deepcopy(actor).requires_grad_(False)
    optimizer = torch.optim.Adam([*actor.parameters(), *values.parameters()], 1e-2)
    x, rewards = numbers(8, 12, step=0), numbers(8, step=1)
    actions = torch.arange(8) % 3
    if fault != "normalised apart":
        rewards = (rewards - rewards.mean()) / rewards.std()
    x, rewards, actions = (y.chunk(world())[rank()] for y in (x, rewards, actions))
    if fault == "normalised apart":
        rewards = (rewards - rewards.mean()) / rewards.std()
    with torch.no_grad():
        before = frozen(x).log_softmax(-1).gather(1, actions[:, None])
    for _ in range(STEPS):
        ratio = (actor(x).log_softmax(-1).gather(1, actions[:, None]) - before).exp().squeeze(1)
        limit = 0.002 if fault == "other limit" and world() > 1 else 0.2
        surrogate = torch.min(ratio * rewards, ratio.clamp(1 - limit, 1 + limit) * rewards).mean()
        ((values(x).squeeze(1) - rewards).square().mean() - surrogate).backward()
        average([*gradients(actor), *(gradients(values) if fault != "values not averaged" else [])])
        optimizer.step()
        optimizer.zero_grad()


class _Statistics(torch.autograd.Function):
    """Sum over ranks, forward and backward."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        if world() > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, dx):
        return _Statistics.apply(dx)


class SyncNorm(nn.BatchNorm2d):
    """A batch norm with the statistics of all ranks' batches; torch's is for GPUs alone."""

    fault = ""

    def forward(self, x):
        total = (lambda y: y * world()) if self.fault == "statistics apart" else _Statistics.apply
        count = x.numel() // x.shape[1] * world()
        mean = total(x.sum((0, 2, 3))) / count
        square = total((x - mean[:, None, None]).square().sum((0, 2, 3)))
        with torch.no_grad():
            own = x.var((0, 2, 3)) if self.fault == "running statistics apart" else square / (count - 1)
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(own, self.momentum)
            self.num_batches_tracked.add_(1)
        shape = (1, -1, 1, 1)
        y = (x - mean.view(shape)) * (square / count + self.eps).rsqrt().view(shape)
        return y * self.weight.view(shape) + self.bias.view(shape)


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.norm = nn.Conv2d(3, 8, 3, stride=2, padding=1), SyncNorm(8)
        self.middle, self.drop = nn.Conv2d(8, 8, 3, padding=1), nn.Dropout2d(0.3)
        self.up, self.last = nn.ConvTranspose2d(8, 8, 2, stride=2), nn.Conv2d(11, 3, 1)

    def forward(self, x):
        y = self.drop(self.middle(self.norm(self.down(x)).relu())).relu()
        return self.last(torch.cat([self.up(y), x], 1))


def unet(fault="", seed=0):
    """A network of convolutions with a synchronized batch norm and dropout of channels."""
    torch.manual_seed(seed)
    model = UNet()
    model.norm.fault = fault if world() > 1 else ""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True)
    torch.manual_seed(seed + rank() * (fault != "drops alike"))
    for step in range(STEPS):
        x, y = (numbers(8, 3, 8, 8, step=step, salt=salt).chunk(world())[rank()] for salt in (0, 1))
        F.mse_loss(model(x), y).backward()
        average(gradients(model))
        optimizer.step()
        optimizer.zero_grad()


def local_sgd(fault="", seed=0, make=torch.optim.SGD):
    """Each rank steps by its own gradients, then the ranks average their parameters."""
    torch.manual_seed(seed)
    model = Perceptron()
    optimizer = make(model.parameters(), 0.1)
    for step in range(STEPS):
        x, y = (numbers(8, n, step=step, salt=n).chunk(world())[rank()] for n in (12, 3))
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        left_out = "bias" if fault == "no average of biases" else "nothing"
        if not (fault == "every second step" and step == 0):
            average([x.detach() for name, x in model.named_parameters() if left_out not in name])


def local_adam(fault="", seed=0):
    local_sgd(fault, seed, torch.optim.Adam)


def sum_of_rows(fault="", seed=0):
    """A loss that is a sum over the batch, so that gradients of ranks add up."""
    torch.manual_seed(seed)
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(STEPS):
        x, y = (numbers(8, n, step=step, salt=n).chunk(world())[rank()] for n in (12, 3))
        F.mse_loss(model(x), y, reduction="sum").backward()
        for dx in gradients(model) if world() > 1 else ():
            dist.all_reduce(dx)
            dx /= 2 if fault == "mean" else 1
        optimizer.step()
        optimizer.zero_grad()


class Pooled(nn.Module):
    """Each rank has a part of the sequence, and the mean over it goes on."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(12, 16), nn.Linear(16, 3)
        self.register_buffer("rows", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        with torch.no_grad():
            self.rows.fill_(x.shape[0] * x.shape[1])
        return self.head(_Statistics.apply(self.body(x).relu().mean(1)) / world())


def pooled(fault="", seed=0):
    """A replicated head behind a sum over ranks, whose gradients grow on their way through it; a buffer that is summed late."""
    torch.manual_seed(seed)
    model = Pooled()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        x, y = numbers(4, 6, 12, step=step).chunk(world(), 1)[rank()], numbers(4, 3, step=step, salt=1)
        F.mse_loss(model(x), y).backward()
        if fault == "body twice":
            model.body.weight.grad *= 2
        average(gradients(model))
        optimizer.step()
        optimizer.zero_grad()
        if world() > 1 and fault != "rows not summed":
            dist.all_reduce(model.rows)


def by_closure(fault="", seed=0):
    """LBFGS, which calls the model itself."""
    torch.manual_seed(seed)
    model = Perceptron()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    for step in range(STEPS):
        x, y = (numbers(8, n, step=step, salt=n).chunk(world())[rank()] for n in (12, 3))
        x, y = (z.roll(1, 0) if fault == "other rows" and step == 0 and z is x else z for z in (x, y))

        def evaluate(x=x, y=y):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            average([*gradients(model), loss.data])
            return loss

        optimizer.step(evaluate)


def words(fault="", seed=0):
    """Sparse gradients, dropout, a part that is frozen."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Embedding(20, 12, sparse=True), Perceptron(0.5 if fault == "rate" and world() > 1 else 0.2)
    )
    for x in model[1].first.parameters():
        x.requires_grad_(fault == "not frozen" and world() > 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(seed + rank())
    if fault == "evaluates":
        model.eval()
    for step in range(3):
        tokens = torch.randint(20, (8,), generator=torch.Generator().manual_seed(step)).chunk(world())[rank()]
        model(tokens).square().mean().backward()
        for x in model.parameters():
            if world() > 1 and x.grad is not None:
                x.grad = x.grad.to_dense() if x.grad.is_sparse else x.grad
        average(gradients(model))
        if not (fault == "skips" and rank() == 1 and step == 0):
            optimizer.step()
            optimizer.zero_grad()


def zero_by_hand(fault="", seed=0):
    """Each rank updates a part of the parameters and sends them to the others."""
    torch.manual_seed(seed)
    model = gpt.GPT()
    own = list(model.parameters())[rank() :: world()]
    optimizer = torch.optim.AdamW(own, 1e-2)
    for step in range(STEPS):
        gpt.loss_of(model, gpt.batch_of(step).chunk(world())[rank()]).backward()
        average(gradients(model))
        optimizer.step()
        model.zero_grad()
        for number, x in enumerate(model.parameters()):
            if world() > 1 and not (fault == "no broadcast" and number == 5):
                dist.broadcast(x.detach(), number % world())


def zero_of_torch(fault="", seed=0):
    torch.manual_seed(seed)
    model = gpt.GPT()
    settings = {"lr": 2e-5, "weight_decay": 0.01, "betas": (0.9, 0.99)}
    if world() > 1:
        settings |= {"weight decay": {"weight_decay": 0.0}, "betas": {"betas": (0.9, 0.999)}}.get(fault, {})
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **settings)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **settings)
    wrapped = DistributedDataParallel(model) if world() > 1 else model
    for step in range(STEPS):
        gpt.loss_of(wrapped, gpt.batch_of(step).chunk(world())[rank()]).backward()
        optimizer.step()
        optimizer.zero_grad()


def groups(fault="", seed=0):
    """DistributedDataParallel; the groups of parameters stand in another order than in the reference."""
    torch.manual_seed(seed)
    model = gpt.GPT()
    parts = [x for x in model.parameters() if x.dim() > 1], [x for x in model.parameters() if x.dim() == 1]
    made = [{"params": parts[0], "weight_decay": 0.1, "eps": 1e-8}, {"params": parts[1], "weight_decay": 0.0}]
    if world() > 1:
        made.reverse()
        made[0]["weight_decay"] = 0.1 if fault == "decay of norms" else 0.0
        made[1]["eps"] = 1e-6 if fault == "eps" else 1e-8
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(made, 1e-4)
    for step in range(STEPS):
        gpt.loss_of(model, gpt.batch_of(step).chunk(world())[rank()]).backward()
        optimizer.step()
        optimizer.zero_grad()


def clip_by_hand(fault="", seed=0):
    torch.manual_seed(seed)
    model = gpt.GPT()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        gpt.loss_of(model, gpt.batch_of(step).chunk(world())[rank()]).backward()
        average(gradients(model))
        if fault == "bias twice":
            model.blocks[1].down.bias.grad *= 2
        with torch.no_grad():
            norm = torch.stack([dx.norm() for dx in gradients(model)]).norm()
            for dx in gradients(model):
                dx *= (0.1 / norm).clamp(max=1.0)
        optimizer.step()
        optimizer.zero_grad()


def pipeline(fault="", seed=0, rounds=1):
    """torch's pipelines, four micro-batches: 1F1B, interleaved with several rounds of stages."""
    torch.manual_seed(seed)
    model = Stacked(fault if world() > 1 else "")
    stages = [model]
    if world() > 1:
        numbers_ = range(rank(), rounds * world(), world())
        stages = [model.stage(number, rounds * world()) for number in numbers_]
    optimizer = torch.optim.AdamW([x for stage in stages for x in stage.parameters()], 1e-2)
    if world() > 1:
        made = [
            PipelineStage(stage, number, rounds * world(), torch.device("cpu"))
            for number, stage in zip(numbers_, stages, strict=True)
        ]
        options = {"loss_fn": gpt.loss_of_scores, "scale_grads": fault != "not divided"}
        schedule = Schedule1F1B(*made, 4, **options) if rounds == 1 else ScheduleInterleaved1F1B(made, 4, **options)
    for step in range(STEPS):
        batch = gpt.batch_of(step)
        inputs, labels = batch[:, :-1], batch[:, 1:].roll(int(fault == "labels" and world() > 1), 0)
        if world() == 1:
            gpt.loss_of_scores(model(inputs), labels).backward()
        else:
            schedule.step(*([inputs] if rank() == 0 else []), **({"target": labels} if rank() == world() - 1 else {}))
        optimizer.step()
        optimizer.zero_grad()


def interleaved(fault="", seed=0):
    pipeline(fault, seed, 2)


class Stacked(nn.Module):
    """A GPT whose stages lack modules."""

    def __init__(self, fault):
        super().__init__()
        whole = gpt.GPT(layers=4)
        self.tokens, self.norm, self.head, self.fault = whole.tokens, whole.norm, whole.head, fault
        self.blocks = nn.ModuleDict({str(n): block for n, block in enumerate(whole.blocks)})

    def stage(self, number, count):
        """Return a copy without what other stages have."""
        model, of_each = copy.deepcopy(self), len(self.blocks) // count
        for name in list(model.blocks):
            if int(name) // of_each != number:
                del model.blocks[name]
        for name, where in (("tokens", 0), ("norm", count - 1), ("head", count - 1)):
            if number != where:  # with more stages than ranks as others write it
                setattr(model, name, None if name == "tokens" or count == world() else nn.Identity())
        return model

    def forward(self, x):
        x = self.tokens(x) if self.tokens is not None else x
        for name, block in self.blocks.items():
            x = block(x * 1.1 if self.fault == "scaled" and name == "2" else x)
        return self.head(self.norm(x)) if self.head is not None else x


def hsdp(fault="", seed=0):
    """FSDP2 on two replicas of two ranks."""
    torch.manual_seed(seed)
    model = gpt.GPT()
    if world() > 1:
        mesh = init_device_mesh("cpu", (world() // 2, 2), mesh_dim_names=("replicas", "shards"))
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh)
    own = rank() // 2 * 2 if fault == "batch by replica" else rank()
    loss = (lambda *of: gpt.loss_of(*of) * 2) if fault == "loss twice" and world() > 1 else gpt.loss_of
    gpt.train(model, [gpt.batch_of(step).chunk(world())[own] for step in range(STEPS)], loss)


def dtensor(fault="", seed=0):
    """parallelize_module, with norms on parts of the sequence."""
    torch.manual_seed(seed)
    model = gpt.GPT()
    if world() > 1:
        mesh = init_device_mesh("cpu", (world(),))
        column = ColwiseParallel(input_layouts=Shard(1))
        for block in model.blocks:
            norms = ("norm1",) if fault == "norm2 not parallel" else ("norm1", "norm2")
            plan = dict.fromkeys(norms, SequenceParallel()) | dict.fromkeys(("q", "k", "v", "up"), column)
            plan |= dict.fromkeys(("o", "down"), RowwiseParallel(output_layouts=Shard(1)))
            block.heads //= world()
            parallelize_module(block, mesh, plan)
            if fault == "no mask":
                block.attend = F.scaled_dot_product_attention
        split = {"input_layouts": Replicate(), "output_layouts": Shard(1)}
        plan = {
            "tokens": RowwiseParallel(**split),
            "positions": RowwiseParallel(**split | {"output_layouts": Shard(0)}),
        }
        plan |= {
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        parallelize_module(model, mesh, plan)
    gpt.train(model, [gpt.batch_of(step) for step in range(STEPS)], clip=False)


class _Pass(torch.autograd.Function):
    """Send a tensor to the next rank and receive the one of the rank before."""

    @staticmethod
    def forward(ctx, x, by):
        ctx.by = by
        y, number = torch.empty_like(x), rank()
        ops = [dist.P2POp(dist.isend, x.contiguous(), (number + by) % world())]
        ops.append(dist.P2POp(dist.irecv, y, (number - by) % world()))
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return y

    @staticmethod
    def backward(ctx, dy):
        return _Pass.apply(dy, -ctx.by), None


def ring(fault="", seed=0):
    """Ring attention: keys and values go round, and softmax is merged by the maxima."""
    torch.manual_seed(seed)
    model = gpt.GPT()
    size = gpt.LENGTH // world()

    def attend(q, k, v):
        rows = torch.arange(rank() * size, (rank() + 1) * size)[:, None]
        top = torch.full((*q.shape[:-1], 1), -math.inf)
        total, y = torch.zeros_like(top), torch.zeros_like(q)
        for hop in range(world()):
            source = (rank() - hop) % world()
            columns = torch.arange(source * size, (source + 1) * size)
            scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(columns > rows, -math.inf)
            if fault == "own chunk alone" and hop:
                scores = scores.masked_fill(scores < math.inf, -math.inf)
            new = torch.maximum(top, scores.detach().amax(-1, keepdim=True))
            old = (top - new).exp() if fault != "sums not scaled" else torch.ones_like(top)
            weights = (scores - new).exp()
            total, y, top = total * old + weights.sum(-1, keepdim=True), y * old + weights @ v, new
            if hop < world() - 1:
                k, v = _Pass.apply(k, 1), _Pass.apply(v, 1)
        return y / total

    if world() > 1:
        for block in model.blocks:
            block.attend = attend
        model.where = lambda tokens: torch.arange(rank() * size, (rank() + 1) * size)

    def loss(model, batch):
        tokens, labels = (x.chunk(world(), 1)[rank()] for x in (batch[:, :-1], batch[:, 1:]))
        return gpt.loss_of_scores(model(tokens), labels)

    def reduce(model):
        average(x.grad for name, x in model.named_parameters() if not (fault == "no reduction of q" and ".q." in name))

    gpt.train(model, [gpt.batch_of(step) for step in range(STEPS)], loss, reduce=reduce)


class _GatherFrom(torch.autograd.Function):
    """Gather a sequence; the gradient is summed and split again."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(world())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, dx):
        dx = dx.clone()
        dist.all_reduce(dx)
        return dx.chunk(world(), 1)[rank()]


class _ScatterSum(torch.autograd.Function):
    """Sum over ranks and keep a part of the sequence; the gradient is gathered."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x.chunk(world(), 1)[rank()].clone()

    @staticmethod
    def backward(ctx, dx):
        parts = [torch.empty_like(dx) for _ in range(world())]
        dist.all_gather(parts, dx.contiguous())
        return torch.cat(parts, 1)


class SequenceColumn(gpt.Column):
    def forward(self, x):
        return F.linear(_GatherFrom.apply(x), self.weight, self.bias)


class SequenceRow(gpt.Row):
    def forward(self, x):
        return _ScatterSum.apply(F.linear(x, self.weight)) + self.bias


def sequence_parallel(fault="", seed=0):
    """Megatron's: layers split over features, norms and residuals over the sequence, the loss over the vocabulary."""
    torch.manual_seed(seed)
    model = gpt.GPT()
    batches = [gpt.batch_of(step) for step in range(STEPS)]
    if world() == 1:
        gpt.train(model, batches)
        return
    size = gpt.LENGTH // world()
    for block in model.blocks:
        block.heads //= world()
        for name in ("q", "k", "v", "up"):
            setattr(block, name, SequenceColumn(getattr(block, name)))
        for name in ("o", "down"):
            setattr(block, name, SequenceRow(getattr(block, name)))
    model.where = lambda tokens: torch.arange(rank() * size, (rank() + 1) * size)
    head = SequenceColumn(model.head)
    model.head = head
    rows = len(head.weight)

    def loss(model, batch):
        scores, labels = model(batch[:, :-1].chunk(world(), 1)[rank()]), batch[:, 1:]
        top = scores.detach().amax(-1, keepdim=True)
        dist.all_reduce(top, dist.ReduceOp.MAX)
        total = (scores - top).exp().sum(-1)
        total = total if fault == "sum of own words" else _Sum.apply(total)
        local = labels - rank() * rows + (1 if fault == "words shifted" and rank() == 1 else 0)
        outside = (local < 0) | (local >= rows)
        of_label = (scores - top).gather(-1, local.clamp(0, rows - 1)[..., None])[..., 0].masked_fill(outside, 0.0)
        return (total.log() - _Sum.apply(of_label)).mean()

    def reduce(model):
        for name, x in model.named_parameters():
            along_sequence = "norm" in name or name in ("tokens.weight", "positions.weight")
            along_sequence |= name.endswith(("o.bias", "down.bias"))
            if along_sequence and not (fault == "norms not reduced" and "norm1" in name):
                dist.all_reduce(x.grad)

    gpt.train(model, batches, loss, reduce=reduce, clip=False)


_Sum = gpt._ReduceFrom


def with_trainer(fault="", seed=0):
    """transformers' Trainer."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    ranks = int(os.environ.get("WORLD_SIZE", "1"))  # the Trainer starts the group
    torch.manual_seed(seed)
    sizes = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
    tokens = torch.randint(48, (16, 9), generator=torch.Generator().manual_seed(seed))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=4 // ranks,
            max_steps=STEPS,
            gradient_accumulation_steps=2,
            learning_rate=1e-3,
            weight_decay=0.1 if fault == "weight decay" and ranks > 1 else 0.0,
            report_to=[],
            use_cpu=True,
            ddp_backend="gloo" if ranks > 1 else None,
            save_strategy="no",
            disable_tqdm=True,
            seed=seed,
            data_seed=seed + 1 if fault == "other data" and ranks > 1 else seed,
        )
        Trainer(model, arguments, train_dataset=rows).train()
