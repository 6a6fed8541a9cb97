"""Programs that train one small model on several ranks by hand, each with a place for a fault.

The model is a GPT. Its parallel forms are written as others write them: layers of Megatron's kind, a sequence that ranks
share, DistributedDataParallel, experts that get their tokens by all_to_all. A fault changes one line of a program.
"""

import math
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import weft

WIDTH, HEADS, VOCABULARY, LENGTH, BATCH = 32, 4, 48, 16, 4


class Block(nn.Module):
    def __init__(self, p=0.0):
        super().__init__()
        self.heads, self.p = HEADS, p
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x):
        y = self.norm1(x)
        q, k, v = (layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.drop(self.o(self.attend(q, k, v).transpose(1, 2).flatten(2)))
        return x + self.down(self.drop_features(F.gelu(self.up(self.norm2(x)))))

    def drop(self, x):
        return F.dropout(x, self.p, self.training)

    drop_features = drop


class GPT(nn.Module):
    def __init__(self, block=Block, p=0.0, layers=2):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(block(p) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)

    def where(self, tokens):
        return torch.arange(tokens.shape[1])

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(self.where(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batch_of(step):
    return torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))


def loss_of(model, batch):
    return loss_of_scores(model(batch[:, :-1]), batch[:, 1:])


def loss_of_scores(scores, labels):
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


def train(model, batches, loss=loss_of, *, clip=True, rate=1e-2, reduce=None, norm=None, make=torch.optim.AdamW):
    """Train; `batches` are lists of micro-batches, and `reduce` treats the gradients before they are used."""
    optimizer = make(model.parameters(), lr=rate)
    for step in batches:
        optimizer.zero_grad()
        for micro in step if isinstance(step, list) else [step]:
            loss(model, micro).backward()
        if reduce is not None:
            reduce(model)
        if norm is not None:
            norm(model)
        elif clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def unsplit(p=0.0, block=Block, seed=0):
    torch.manual_seed(seed)
    train(GPT(block, p), [batch_of(0), batch_of(1)])


# Layers of Megatron's kind


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, dx):
        dx = dx.clone()
        dist.all_reduce(dx)
        return dx


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, dx):
        return dx


def _own(x, dim):
    return x.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()].clone()


class Column(nn.Module):
    """A linear layer that gives this rank's part of its features."""

    def __init__(self, whole, fault=""):
        super().__init__()
        part = (
            (lambda x: x.detach().chunk(dist.get_world_size())[0].clone()) if "shard" in fault else lambda x: _own(x, 0)
        )
        self.weight, self.bias, self.fault = nn.Parameter(part(whole.weight)), nn.Parameter(part(whole.bias)), fault

    def forward(self, x):
        return F.linear(x if "gradient" in self.fault else _CopyTo.apply(x), self.weight, self.bias)


class Row(nn.Module):
    """A linear layer that takes such a part and adds up over the ranks."""

    def __init__(self, whole, fault=""):
        super().__init__()
        self.weight, self.bias, self.fault = (
            nn.Parameter(_own(whole.weight, 1)),
            nn.Parameter(whole.bias.detach()),
            fault,
        )

    def forward(self, x):
        if "bias" in self.fault:
            return _ReduceFrom.apply(F.linear(x, self.weight, self.bias))
        y = F.linear(x, self.weight)
        return (y if "sum" in self.fault else _ReduceFrom.apply(y)) + self.bias


class Vocabulary(nn.Module):
    """An embedding whose rows are split over the ranks."""

    def __init__(self, whole, fault=""):
        super().__init__()
        self.weight, self.fault = nn.Parameter(_own(whole.weight, 0)), fault

    def forward(self, tokens):
        rows = len(self.weight)
        local = tokens - rows * dist.get_rank()
        outside = (local < 0) | (local >= rows)
        x = F.embedding(local.clamp(0, rows - 1), self.weight)
        if "mask" not in self.fault:
            x = x.masked_fill(outside.unsqueeze(-1), 0.0)
        return x if "sum" in self.fault else _ReduceFrom.apply(x)


def over_tp(fault="", p=0.0, seed=0):
    """Train the model split by hand over all ranks. The fault names a module and what is wrong there."""
    torch.manual_seed(seed)
    model = GPT(Block, p)
    where, _, what = fault.partition(": ")
    for name, module in list(model.named_modules()):
        mine = what if name == where else ""
        owner, _, last = name.rpartition(".")
        kind = {**dict.fromkeys(("q", "k", "v", "up"), Column), **dict.fromkeys(("o", "down"), Row)}.get(last)
        kind = Vocabulary if name == "tokens" else kind
        if kind is not None:
            setattr(model.get_submodule(owner), last, kind(module, mine))
        if isinstance(module, Block):
            module.heads //= dist.get_world_size()
            if mine:
                _break_block(module, mine)
        if mine == "eps":
            module.eps = 1e-2
        if mine == "frozen":
            module.weight.requires_grad_(False)
    if what == "off by one":
        model.where = lambda tokens: torch.arange(1, tokens.shape[1] + 1) % LENGTH

    def norm(model):
        split = [x.grad for name, x in model.named_parameters() if _is_split(name)]
        whole = [x.grad for name, x in model.named_parameters() if not _is_split(name) and x.grad is not None]
        square = sum(g.square().sum() for g in split)
        if what != "of a part":
            dist.all_reduce(square)
        total = (square + sum(g.square().sum() for g in whole)).sqrt()
        nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, total)

    loss = (lambda model, batch: dist.get_world_size() * loss_of(model, batch)) if what == "times ranks" else loss_of
    for block in model.blocks if p else ():  # each rank drops elements of its own features, and all the same of others
        seed = 7 if what == "drops alike" and block is model.blocks[0] else dist.get_rank()
        block.drop_features = partial(_drop, p, seed)
        if what == "drops unlike" and block is model.blocks[0]:
            block.drop = partial(_drop, p, dist.get_rank())
    train(model, [batch_of(0), batch_of(1)], loss, norm=norm)


def _is_split(name):
    return name.rsplit(".", 2)[-2] in ("q", "k", "v", "up", "tokens") or name.endswith(("o.weight", "down.weight"))


def _drop(p, seed, x):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return F.dropout(x, p)


def _break_block(block, what):
    if what == "no mask":
        block.attend = lambda q, k, v: F.scaled_dot_product_attention(q, k, v)
    if what == "scale":
        block.attend = lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=1 / math.sqrt(q.shape[-1] * dist.get_world_size())
        )


# Data parallel


def over_dp(fault="", micro=1, seed=0):
    torch.manual_seed(dist.get_rank() if fault == "other weights" else seed)
    model, world, rank = GPT(), dist.get_world_size(), dist.get_rank()
    own = [batch_of(step).chunk(world)[0 if fault == "same batch" else rank] for step in (0, 1)]
    batches = [list(batch.chunk(micro)) for batch in own]
    kept = {}

    def reduce(model):
        for name, x in model.named_parameters():
            if fault == "stale bucket" and name == "head.weight" and name in kept:
                x.grad.copy_(kept[name])
                continue
            if fault not in ("no reduction", "norm without reduction") or (
                fault != "no reduction" and name != "norm.weight"
            ):
                dist.all_reduce(x.grad)
            if fault != "sum":
                x.grad /= world
            kept[name] = x.grad.clone()
        if fault == "one rank skips" and rank == 1:
            model.head.weight.grad.zero_()

    def loss(model, batch):
        whole = loss_of(model, batch)
        if fault == "labels of others":
            whole = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].roll(1, 0).flatten())
        return whole if fault == "unscaled micro-batches" else whole / micro

    train(model, batches, loss, reduce=reduce, rate=1e-2 * (world if fault == "rate times ranks" else 1))


def over_ddp(fault="", seed=0):
    torch.manual_seed(seed)
    model, world, rank = GPT(), dist.get_world_size(), dist.get_rank()
    if fault == "frozen part":
        model.head.bias.requires_grad_(False)
    own = [batch_of(step).chunk(world)[rank] for step in (0, 1)]
    train(DistributedDataParallel(model), own)


# A sequence that ranks share


class _GatherKeys(torch.autograd.Function):
    """Keys or values of all ranks, in the order of positions."""

    @staticmethod
    def forward(ctx, x, fault):
        ctx.fault, parts = fault, [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx, dx):
        dx = dx.clone()
        if ctx.fault != "keys keep their gradients":
            dist.all_reduce(dx)
        return dx.chunk(dist.get_world_size(), 2)[dist.get_rank()], None


def over_cp(fault="", seed=0):
    """Train with each rank's part of every sequence; keys and values are gathered."""
    torch.manual_seed(seed)
    model, world, rank = GPT(), dist.get_world_size(), dist.get_rank()
    size = LENGTH // world

    def attend(q, k, v):
        k, v = (_GatherKeys.apply(x, fault) for x in (k, v))
        first = rank * size - (1 if fault == "mask shifted" and rank else 0)
        seen = torch.arange(LENGTH) <= torch.arange(first, first + size).unsqueeze(1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)

    for block in model.blocks:
        block.attend = attend
    model.where = lambda tokens: torch.arange(size) + (0 if fault == "positions from 0" else rank * size)

    def loss(model, batch):
        part = slice(rank * size, (rank + 1) * size)
        labels = batch[:, 1:][:, part]
        if fault == "labels within the part":
            labels = torch.cat([batch[:, :-1][:, part][:, 1:], batch[:, :-1][:, part][:, :1]], 1)
        tokens = batch[:, :-1][:, slice(0, size) if fault == "first part" else part]
        total = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
        return total / (BATCH * (size if fault == "divided by own tokens" else LENGTH))

    def reduce(model):
        for name, x in model.named_parameters():
            if not (fault == "norms not reduced" and "norm1" in name):
                dist.all_reduce(x.grad)

    train(model, [batch_of(0), batch_of(1)], loss, reduce=reduce)


# Experts


class Experts(nn.Module):
    """A mixture of experts in the place of a block's MLP; each token goes to one expert."""

    def __init__(self, number=4):
        super().__init__()
        self.gate = nn.Linear(WIDTH, number)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(number)
        )

    def forward(self, x):
        tokens = x.flatten(0, -2)
        weight, chosen = self.gate(tokens).softmax(-1).max(-1)
        return (self.run(tokens, chosen) * weight.unsqueeze(-1)).view(x.shape)

    def run(self, tokens, chosen):
        result = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            mine = (chosen == number).nonzero().flatten()
            result = result.index_add(0, mine, expert(tokens[mine]))
        return result


class MixtureBlock(Block):
    def __init__(self, p=0.0):
        super().__init__(p)
        del self.up, self.down
        self.moe = Experts()

    def forward(self, x):
        y = self.norm1(x)
        q, k, v = (layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.o(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.moe(self.norm2(x))


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, sent, received):
        ctx.sizes = sent, received
        y = x.new_empty(sum(received), x.shape[1])
        dist.all_to_all_single(y, x.contiguous(), received, sent)
        return y

    @staticmethod
    def backward(ctx, dy):
        sent, received = ctx.sizes
        return _AllToAll.apply(dy, received, sent), None, None


def over_ep(fault="", seed=0):
    """Train with each rank's part of the batch and its experts; tokens travel."""
    torch.manual_seed(seed)
    model, world, rank = GPT(MixtureBlock), dist.get_world_size(), dist.get_rank()

    def run(experts, tokens, chosen):
        of_each = len(experts) // world
        order = chosen.argsort(stable=True)
        sent = torch.bincount(chosen // of_each, minlength=world)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        sent, received = sent.tolist(), received.tolist()
        arrived, numbers = (
            _AllToAll.apply(x, sent, received) for x in (tokens[order], chosen[order].unsqueeze(1).to(tokens))
        )
        result = torch.zeros_like(arrived)
        for number in range(rank * of_each, (rank + 1) * of_each):
            mine = (numbers[:, 0] == number).nonzero().flatten()
            used = number if fault != "next expert" or rank == 0 else rank * of_each + (number + 1) % of_each
            result = result.index_add(0, mine, experts[used](arrived[mine]))
        back = _AllToAll.apply(result, received, sent)
        if fault == "not put back":
            return back
        return torch.zeros_like(tokens).index_add(0, order, back)

    for block in model.blocks:
        moe = block.moe
        moe.run = lambda tokens, chosen, experts=moe.experts: run(experts, tokens, chosen)
        if fault == "router without gradient":
            moe.gate.register_forward_hook(lambda module, args, out: out.detach())
        if fault == "weights twice":
            inner = moe.run
            moe.run = lambda tokens, chosen, inner=inner: inner(tokens, chosen) * 2

    def reduce(model):
        for name, x in model.named_parameters():
            if x.grad is None:
                x.grad = torch.zeros_like(x)
            if ".experts." not in name or fault != "experts not reduced":
                dist.all_reduce(x.grad)
            if not (fault == "experts not divided" and ".experts." in name):
                x.grad /= world

    own = [batch_of(step).chunk(world)[rank] for step in (0, 1)]
    train(model, own, reduce=reduce)


# Torch's own, and weft's


def over_fsdp(fault="", tp=1, seed=0):
    """Train with FSDP2; with tp, on layers that DTensor splits."""
    torch.manual_seed(seed)
    model, world, rank = GPT(), dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("dp", "tp"))
    if tp > 1:
        for block in model.blocks:
            plan = {
                **dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel()),
                **dict.fromkeys(("o", "down"), RowwiseParallel()),
            }
            parallelize_module(block, mesh["tp"], plan)
            block.heads //= tp
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh["dp"])
        if fault == "added up":
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    own = [batch_of(step).chunk(world // tp)[rank // tp] for step in (0, 1)]
    train(model, own, clip=tp == 1)


def over_weft(fault="", p=0.0, seed=0, **options):
    torch.manual_seed(seed)
    model, world = GPT(Block, p), dist.get_world_size()
    sizes = options.pop("sizes", {"tp": world})
    mesh = weft.init_mesh(**sizes, device_type="cpu")
    plan = options.pop("plan", "auto")
    model = weft.parallelize(model, mesh, plan=plan if "tp" in sizes else None, **options)
    if "pipeline" in options:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in (0, 1):
            optimizer.zero_grad()
            batch = batch_of(step)
            model.step(batch[:, :-1], batch[:, 1:])
            weft.clip_grad_norm_(model, 1.0)
            optimizer.step()
        return
    if fault == "counts":
        for block in model.blocks:
            block.down.register_forward_pre_hook(lambda module, args: (args[0] * (args[0].shape[-1] / (4 * WIDTH)),))
    dp = sizes.get("dp", 1)
    place = mesh.get_local_rank("dp") if dp > 1 else 0
    own = [batch_of(step).chunk(dp)[place] for step in (0, 1)]
    torch.manual_seed(place)
    make = partial(model.optimizer, torch.optim.AdamW) if options.get("zero") == 1 else torch.optim.AdamW
    train(model, own, norm=lambda model: weft.clip_grad_norm_(model, 1.0), make=make)
