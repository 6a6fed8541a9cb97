"""A model that shares its sequence is the unsplit model: outputs, losses, gradients and training steps."""

import copy
import inspect
from contextlib import nullcontext
from functools import partial

import gpt
import pytest
import torch
import torch._dynamo  # as operations on meta tensors do: once, and not in every rank
import torch.distributed as dist
import torch.nn.functional as F
from shared_models import MODELS, SHARED_ALL_THROUGH, SPLIT, WORDS, ByHand, Llama, pair, tokens_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import weft
import weft.parallelization
import weft.tools.verification
from weft.testing.ranks import run_ranks


def is_the_unsplit(rank, names):
    mesh = weft.init_mesh(cp=dist.get_world_size(), device_type="cpu")
    for name in names:
        for length in (13, 2):
            model, reference = pair(MODELS[name])
            weft.parallelize(model, mesh["cp"], context={"strict": name in SHARED_ALL_THROUGH})
            report = weft.verify(model, reference, tokens_of(length))
            assert report.ok, f"{name} {length}\n{report}"
            with torch.inference_mode():
                found, expected = (part(tokens_of(length)) for part in (model, reference))
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "world", [2, *(pytest.param(x, marks=pytest.mark.slow("pytorch_ext/context_parallel")) for x in (3, 4))]
)
def test_outputs_and_gradients_are_the_unsplit_models(world):
    """Also for lengths that divide by nothing, and for more ranks than positions."""
    run_ranks(is_the_unsplit, world, MODELS, timeout_s=120)


def steps(model, tokens, count=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(count):
        optimizer.zero_grad()
        for half in tokens.roll(step, 1).split(1):  # gradients of two backwards add up
            loss = F.cross_entropy(model(half).flatten(0, 1), half.roll(-1, 1).flatten()) / 2
            loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def trains(rank, cp, tp, dp):
    mesh = weft.init_mesh(dp=dp, cp=cp, tp=tp, device_type="cpu")
    model, reference = pair(Llama)
    weft.parallelize(model, mesh["cp", "tp"], plan=SPLIT if tp > 1 else None)
    model = copy.deepcopy(model)  # shares as the one it is a copy of
    trained = DistributedDataParallel(model, process_group=mesh["dp"].get_group()) if dp > 1 else model
    tokens = tokens_of(11)
    torch.testing.assert_close(steps(trained, tokens), steps(reference, tokens), rtol=2e-5, atol=2e-5)
    for name, parameter in model.named_parameters():
        shard, whole = weft.shard_of(parameter), reference.get_parameter(name)
        torch.testing.assert_close(parameter, shard.take(whole) if shard else whole, rtol=1e-3, atol=1e-4, msg=name)
    assert model.logits.weight is model.embedding.weight
    same = weft.all_gather(torch.cat([p.detach().flatten() for p in model.parameters()]).unsqueeze(0), group=mesh["cp"])
    assert all(torch.equal(other, same[0]) for other in same), "every rank of cp has the same bits"


@pytest.mark.parametrize(("cp", "tp", "dp"), [(1, 1, 1), (2, 1, 1), (3, 1, 1), (2, 2, 1), (2, 1, 2)])
def test_training_steps_are_the_unsplit_models(cp, tp, dp):
    run_ranks(trains, cp * tp * dp, cp, tp, dp)


def both_ways(rank):
    mesh = weft.init_mesh(cp=2, tp=2, device_type="cpu")
    model, reference = pair(Llama)
    weft.parallelize(model, mesh, plan=SPLIT, context={"strict": True})
    report = weft.verify(model, reference, tokens_of(13), probes=[weft.causal_probe(5, vocabulary=WORDS)])
    assert report.ok, str(report)
    assert model.blocks[0].query.weight.shape == (8, 16)


def test_sequences_and_layers_are_split_at_once():
    run_ranks(both_ways, 4)


def parts(rank, method, layout):
    mesh = weft.init_mesh(cp=3, device_type="cpu")
    model, reference = pair(Llama)
    weft.parallelize(model, mesh, context={"parts": True, "strict": True, "method": method, "layout": layout})

    def step(model, tokens):
        """The loss of the parts is a part of the loss."""
        targets = tokens.roll(-1, 1)
        if model.logits.weight.dtype == torch.float64 or not weft.explain(model).sequence:
            output = model(tokens)
            F.cross_entropy(output.flatten(0, 1), targets.flatten()).backward()
            return output.detach()
        tokens, targets = (weft.shard_sequence(x, dim=1, layout=layout) for x in (tokens, targets))
        output = model(tokens)
        assert output.shape == (*tokens.shape, WORDS) and type(output) is torch.Tensor
        (F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum") / 26).backward()
        return weft.unshard_sequence(output.detach(), dim=1, layout=layout)

    report = weft.verify(model, reference, tokens_of(13), step=step)
    assert report.ok, str(report)
    assert {row.kind for row in weft.explain(model).sequence} == {"shares", "attention"}


@pytest.mark.parametrize(
    ("method", "layout"), [("ring", "contiguous"), ("ulysses", "zigzag"), ("all_gather", "zigzag")]
)
def test_a_model_may_be_given_parts_and_gives_parts(method, layout):
    run_ranks(parts, 3, method, layout)


def drops(rank):
    mesh = weft.init_mesh(cp=2, device_type="cpu")
    torch.manual_seed(rank)  # ranks need not be seeded alike for their random numbers

    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.project, self.drop = nn.Linear(8, 24), nn.Dropout(0.4)

        def forward(self, x):
            q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.project(x).chunk(3, -1))
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3).transpose(1, 2).flatten(2)
            return self.drop(torch.ones_like(y)), self.drop(x.mean(1)), checkpoint(self.drop, y, use_reentrant=False)

    model = Dropping()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)
    weft.parallelize(model, mesh)
    x = torch.ones(2, 400, 8)
    kept, pooled, dropped = model(x)
    assert abs((kept > 0).double().mean() - 0.6) < 0.05
    first, second = (weft.shard_sequence(kept, dim=1, layout="contiguous"), kept[:, 200 * (1 - rank) :][:, :200])
    assert not torch.equal(first, second), "the ranks drop different ones"
    gathered = weft.all_gather(torch.cat([t.detach().flatten() for t in (kept, pooled, dropped)]).unsqueeze(0))
    assert torch.equal(gathered[0], gathered[1]), "what they have whole they have alike"
    assert not torch.equal(model(x)[0], kept)
    before = torch.get_rng_state()
    model.eval()
    model(x)
    model.train()
    assert not torch.equal(torch.get_rng_state(), before) and dropped.requires_grad
    dropped.sum().backward()
    assert model.project.bias.grad.isfinite().all()

    recomputed = weft.parallelize(Plain(lambda t: checkpoint(model.drop, t, use_reentrant=False)), mesh)
    x.requires_grad_()
    dropped = recomputed(x)
    dropped.sum().backward()
    assert torch.equal(x.grad == 0, dropped == 0), "backward drops what forward did"


def test_dropout_differs_by_position_and_is_the_same_on_every_rank():
    run_ranks(drops, 2)


def breaks(rank):
    """What must be found: positions of the part instead of the whole, a mask that came loose, a sum that is missing."""
    mesh = weft.init_mesh(cp=2, device_type="cpu")

    class Loose(nn.Module):
        def __init__(self, causal=True):
            super().__init__()
            self.project, self.causal = nn.Linear(8, 24), causal

        def forward(self, x):
            q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.project(x).chunk(3, -1))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
            return y.transpose(1, 2).flatten(2)

    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.position = nn.Parameter(torch.randn(20, 8))

        def forward(self, x):
            return x + self.position[: x.size(1)]

    x = torch.randn(2, 13, 8, generator=torch.Generator().manual_seed(3))
    model, reference = pair(Loose)
    weft.parallelize(model, mesh)
    assert weft.verify(model, reference, x, probes=[weft.causal_probe(4)]).ok
    model.zero_grad()
    model.causal = False
    report = weft.verify(model, reference, x, probes=[weft.causal_probe(4)])
    assert not report.ok and len(report.leaks) == 2

    for plan, right in ((None, True), ({"0": "tokenwise"}, False)):  # a module that does not treat positions alone
        model, reference = pair(lambda: nn.Sequential(Positions()))
        weft.parallelize(model, mesh, plan=plan)
        report = weft.verify(model, reference, x)
        assert report.ok == right, str(report)
        if not right:
            assert {d.name for d in report.differences if not d.ok} == {"output", "gradient of 0.position"}

    model, reference = pair(Loose)
    weft.parallelize(model, mesh)
    model.project.weight.register_hook(lambda gradient: gradient / 2)  # as if one rank's part were missing
    report = weft.verify(model, reference, x)
    assert [d.name for d in report.differences if not d.ok] == ["gradient of project.weight"]


def test_what_is_broken_on_purpose_is_found():
    run_ranks(breaks, 2)


def compiles(rank):
    compiled = partial(torch.compile, backend="eager")
    mesh, tokens = weft.init_mesh(cp=2, device_type="cpu"), tokens_of(11)
    for how in ("around", "before", "blocks", "recomputed blocks", "a function"):
        torch.manual_seed(0)
        reference = Llama(recompute="recomputed" in how)
        model = copy.deepcopy(reference)
        model = weft.parallelize(compiled(model) if how == "before" else model, mesh)
        for block in model.blocks if "blocks" in how else ():
            block.compile(backend="eager")
        model = compiled(model) if how == "around" else model
        call = compiled(lambda x: 2 * model(x)) if how == "a function" else lambda x: 2 * model(x)  # noqa: B023
        with pytest.warns(UserWarning, match="run uncompiled") if "blocks" in how else nullcontext():
            found = call(tokens)
        torch.testing.assert_close(found, 2 * reference(tokens), rtol=1e-4, atol=1e-5, msg=how)
        found.sum().backward()
        (2 * reference(tokens)).sum().backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4, msg=how)
    assert inspect.signature(weft.parallelize(Llama(), mesh).forward) == inspect.signature(reference.forward)


def test_a_compiled_model_or_block_runs_as_it_is_written():
    run_ranks(compiles, 2)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, dy):
        return 2 * dy


class Custom(nn.Module):
    def __init__(self, then=lambda x: x):
        super().__init__()
        self.project, self.then = nn.Linear(8, 8), then

    def forward(self, x):
        return self.then(Twice.apply(self.project(x)))


def written(write, read=lambda zeros: zeros):
    """Return a function of x that writes x to zeros, and gives what it has read before to a function of its own."""

    def forward(x):
        zeros = torch.zeros_like(x)
        seen = read(zeros)
        write(zeros, x)
        return x + Twice.apply(seen)

    return forward


class AddsUp(nn.Module):
    """In a tensor of its own, several times."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, x):
        x, total = self.project(x), torch.zeros(x.shape)
        total += x
        total += x * x
        total[:, 1:] += x[:, 1:]
        total[:, 0].add_(x[:, 1]).mul_(2)
        return total.relu_()


def adds_up(rank):
    torch.manual_seed(0)
    model, reference = (copy.deepcopy(part) for part in [AddsUp()] * 2)
    weft.parallelize(model, weft.init_mesh(cp=2, device_type="cpu"))
    report = weft.verify(model, reference, torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0)))
    assert report.ok, str(report)


def test_a_sum_in_a_tensor_that_every_rank_has_whole():
    run_ranks(adds_up, 2)


WRITTEN = {
    "slices": written(lambda zeros, x: zeros[..., 3:].copy_(x[..., 3:])),
    "all": written(lambda zeros, x: zeros.__setitem__(slice(None), x)),
    "positions": written(lambda zeros, x: zeros.__setitem__((slice(None), slice(1, None)), x[:, 1:])),
    "a mask": written(lambda zeros, x: zeros.__setitem__(x > 0, 2 * x[x > 0])),
    "a view of a view": written(lambda zeros, x: zeros.view(-1, 8)[:, :4].copy_(x.view(-1, 8)[:, :4])),
    "the same": written(lambda zeros, x: zeros.contiguous().add_(x)),
    "a view that was made before": written(lambda zeros, x: zeros.copy_(x), read=lambda zeros: zeros[..., :]),
}
# Writes to what is a view of the whole, and which a rank's part would not see.
VIEWS = {
    "ravel": lambda x: x.ravel().mul_(2),
    "as_strided": lambda x: x.as_strided((2, 6, 8), (48, 8, 1)).mul_(2),
    "atleast_3d": lambda x: torch.atleast_3d(x).mul_(2),
    "moveaxis": lambda x: x[:, :3].moveaxis(0, 1).mul_(2),
    "vsplit": lambda x: torch.vsplit(x.transpose(0, 1), [3])[0].mul_(2),
    "positions": lambda x: x[:, 0].add_(1),
}


def refuses(rank):
    mesh = weft.init_mesh(cp=2, device_type="cpu")
    x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))

    def refused(error, text, model, *arguments, **options):
        with pytest.raises(error, match=text):
            weft.parallelize(model, mesh, **options)(*(arguments or (x,)))

    way_out = '"its.name": "tokenwise"'
    refused(ValueError, f"TwiceBackward: a custom autograd function .*{way_out}", Custom())
    refused(ValueError, "TwiceBackward", Custom(torch.nn.ReLU()))
    with pytest.raises(ValueError, match="a custom autograd function .* its gradient would be lost"):
        weft.parallelize(Custom(torch.sum), mesh)(x).backward()
    reentrant = nn.Sequential(nn.Linear(8, 8), Plain(lambda t: checkpoint(torch.relu, t, use_reentrant=True)))
    refused(ValueError, "CheckpointFunctionBackward", reentrant)
    for name, write in WRITTEN.items():
        refused(ValueError, "TwiceBackward", nn.Sequential(nn.Linear(8, 8), Plain(write)))
        if name != "positions":  # a sequence in units
            units = {"invariant": 2, "context": {"units": 2}}
            refused(ValueError, "TwiceBackward", nn.Sequential(nn.Linear(8, 8), Plain(write)), **units)
    for write in VIEWS.values():
        refused(ValueError, "cannot be applied to a tensor that was gathered", Sequential(write))
    refused(ValueError, "_foreach_mul_ cannot be applied", Sequential(lambda t: torch._foreach_mul_([t], 2.0)))
    refused(
        ValueError, f"data_ptr cannot be applied to a shared sequence.*{way_out}", Sequential(lambda t: t.data_ptr())
    )
    refused(
        ValueError,
        "__setitem__ cannot be applied to a tensor that was gathered",
        Sequential(lambda t: t[:, 1:].mT.__setitem__(0, 1)),
    )
    refused(ValueError, "register_hook cannot", Sequential(lambda t: t.register_hook(print)))
    refused(ValueError, "transpose_ cannot be .* would change its shape", Sequential(lambda t: t.transpose_(0, 1)))
    strict = {"context": {"strict": True}}
    refused(
        ValueError,
        r"strict: \(2, 6, 8\) would be gathered .* cumsum has no rule",
        Sequential(lambda t: t.cumsum(1)),
        **strict,
    )
    mask = torch.ones(6, 6, dtype=torch.bool).tril(2)
    masked = Sequential(lambda t: F.scaled_dot_product_attention(*[t.unsqueeze(1)] * 3, attn_mask=mask))
    refused(ValueError, "strict: .* has a mask that is not the causal one", masked, **strict)
    both = Sequential(lambda t: F.scaled_dot_product_attention(*[t.unsqueeze(1)] * 3, attn_mask=mask, is_causal=True))
    refused(ValueError, "attn_mask and is_causal=True exclude each other", both)
    refused(ValueError, "Linear shares its sequence, dimension 1 of its arguments", nn.Linear(8, 8), torch.zeros(8))
    refused(ValueError, "got different batches: call the model with the same", nn.Linear(8, 8), x + rank)
    refused(ValueError, "got different batches", nn.Linear(8, 8), x[:, : 5 + rank])
    for dim in range(2):
        refused(ValueError, "got different batches", nn.Linear(8, 8), x.roll(rank, dim))
    pieces = {"context": {"parts": True}}
    refused(
        ValueError,
        r"the ranks have \[5, 7\] positions; zigzag parts of 12",
        nn.Linear(8, 8),
        torch.zeros(1, 5 + 2 * rank, 8),
        **pieces,
    )
    other = nn.Bilinear(8, 8, 3)
    refused(
        ValueError, r"every argument must be this rank's part along dimension 1, of 6", other, x, x[:, :4], **pieces
    )
    shrinks = Sequential(lambda t: t[:, :1])
    refused(
        ValueError,
        r"Plain is named tokenwise, got this rank's 3 positions .* returned \(2, 1, 8\)",
        shrinks,
        plan={"0": "tokenwise"},
    )
    for text, options in (
        ("context has no option 'windows'", {"context": {"windows": 3}}),
        ("context method='rings' is not one of", {"context": "rings"}),
        ("context layout='zagzig'", {"context": {"layout": "zagzig"}}),
        ("context dim=-1 must be", {"context": {"dim": -1}}),
    ):
        refused(ValueError, text, nn.Linear(8, 8), **options)
    model = weft.parallelize(nn.Linear(8, 8), mesh)
    refused(ValueError, "shares its sequence already", model)
    own = F.linear(x, model.weight, model.bias)
    torch.testing.assert_close(model(x), own, msg="nothing is left behind by what was refused")


class Plain(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def Sequential(function):  # noqa: N802 - a model of one module
    return nn.Sequential(Plain(function), nn.Linear(8, 8))


def test_what_cannot_be_done_is_refused_and_names_a_way_out():
    run_ranks(refuses, 2)


class Experts(nn.Module):
    """Fused experts as transformers writes them."""

    def __init__(self, count=4, width=6, inner=5):
        super().__init__()
        self.num_experts = count
        self.up, self.down = (nn.Parameter(torch.randn(count, *s) / 3) for s in ((inner, width), (width, inner)))

    def forward(self, x, index, weights):
        out = torch.zeros_like(x)
        for expert in range(self.num_experts):
            token, place = torch.where(index == expert)
            if len(token):
                inner = F.silu(F.linear(x[token], self.up[expert]))
                out.index_add_(0, token, F.linear(inner, self.down[expert]) * weights[token, place, None])
        return out


class Mixture(nn.Module):
    def __init__(self, route):
        super().__init__()
        self.first, self.router, self.experts, self.route = nn.Linear(6, 6), nn.Linear(6, 4), Experts(), route

    def forward(self, x):
        h = self.first(x)
        tokens = h.view(-1, 6)
        return h + self.experts(tokens, *self.route(self.router(tokens).softmax(-1))).view_as(h)


def sorts(p):
    index = p.argsort(-1, descending=True)[..., :2]
    return index, p.gather(-1, index)


def takes_turns(p):
    index = (torch.arange(p.size(0))[:, None] + torch.arange(2)) % 4
    return index, p.gather(-1, index)


def weighs_by_place(p):
    return p.topk(2, -1)[1], torch.linspace(0, 1, 2 * p.size(0)).view(-1, 2)


def routes(rank):
    mesh = weft.init_mesh(cp=2, device_type="cpu")
    for route in (lambda p: p.topk(2, -1)[::-1], sorts, takes_turns, weighs_by_place):
        for batch, length in ((2, 7), (1, 1), (3, 2)):  # of one position a rank has none
            torch.manual_seed(0)
            reference = Mixture(route)
            model = weft.parallelize(copy.deepcopy(reference), mesh)
            report = weft.verify(model, reference, torch.randn(batch, length, 6))
            assert report.ok, f"{route} {batch} {length}\n{report}"


def test_experts_get_all_that_belongs_to_their_tokens():
    run_ranks(routes, 2)


class FewOrNone(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8))

    def forward(self, x):
        return x.squeeze(1) * self.scale + x.unsqueeze(0).squeeze((0, 2)), x.mean(1) * self.scale


def takes_few_or_none(rank):
    mesh = weft.init_mesh(cp=3, device_type="cpu")
    model, reference = pair(FewOrNone)
    weft.parallelize(model, mesh, plan=None)
    for batch, length in ((2, 3), (0, 7)):
        x = torch.randn(batch, length, 8, generator=torch.Generator().manual_seed(0))
        for mine, whole in zip(model(x), reference(x), strict=True):
            torch.testing.assert_close(mine, whole)


def test_one_position_of_each_rank_and_an_empty_batch_are_as_unsplit():
    run_ranks(takes_few_or_none, 3)


def tokenwise(rank):
    mesh = weft.init_mesh(cp=2, device_type="cpu")
    x = torch.randn(2, 7, 8, generator=torch.Generator().manual_seed(0))
    model, reference = pair(lambda: nn.Sequential(Custom(), nn.Linear(8, 3)))
    weft.parallelize(model, mesh, plan={"0": "tokenwise"}, context={"strict": True})
    report = weft.verify(model, reference, x)
    assert report.ok, str(report)


def test_a_module_that_treats_positions_alone_may_do_what_it_likes():
    run_ranks(tokenwise, 2)


def outside(rank):
    """Uses of parameters outside of the model, and parts of it, keep their own gradients."""
    mesh = weft.init_mesh(cp=2, device_type="cpu")
    model, reference = pair(Llama)
    weft.parallelize(model, mesh)

    def step(model, tokens):
        output = model(tokens)
        hidden = model.norm(model.embedding(tokens))
        (output.square().mean() + hidden.square().mean() + sum(p.square().sum() for p in model.parameters())).backward()
        return output.detach()

    report = weft.verify(model, reference, tokens_of(9), step=step)
    assert report.ok, str(report)


def test_what_is_used_outside_of_the_model_is_counted_once():
    run_ranks(outside, 2)


def explains(rank):
    mesh = weft.init_mesh(cp=2, device_type="cpu")
    model, _ = pair(lambda: nn.ModuleDict({"llama": Llama(), "hand": ByHand()}))
    weft.parallelize(model["llama"], mesh, context="all_gather")
    weft.parallelize(model["hand"], mesh)
    before = weft.explain(model)
    assert [str(row) for row in before.sequence] == [
        f"{name}: shares: dimension 1 of its arguments, 2 ranks, over shared memory; call it once to see how"
        for name in ("llama", "hand")
    ]
    for _ in range(2):
        for part in model.values():
            part(tokens_of(12))
    rows = {(row.name, row.kind): row.text for row in weft.explain(model).sequence}
    why = "ATen: the kernels run on CUDA devices, the tensors are on the CPU"
    assert rows["llama.blocks.1", "attention"] == f'zigzag, all_gather: method="all_gather"; {why}'
    assert rows["hand", "gathered: cat has no rule for this"] == "(2, 12, 16), 0.00 MiB on every rank"
    assert "hand.mix" in {name for name, _ in rows} and len(rows) == 8
    weft.parallelize(auto := Llama(), mesh)
    auto(tokens_of(12))
    (row, _) = [row for row in weft.explain(auto).sequence if row.kind == "attention"]
    assert row.text.startswith("zigzag, ring: MiB that a rank sends forward: ring 0.0, all_gather 0.0, ulysses")
    assert "blocks.0: attention: zigzag" in str(weft.explain(auto))


def test_explain_names_how_each_attention_ran_and_what_was_gathered():
    run_ranks(explains, 2)


class Layer(nn.Module):
    """Of a transformer, as Korthikanti et al. 2022 count it, without dropout."""

    def __init__(self, width, heads):
        super().__init__()
        self.head = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        y = self.norm1(x)
        q, k, v = (p(y).unflatten(-1, (-1, self.head)).transpose(1, 2) for p in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Stack(nn.Module):
    """Layers between one that begins a sequence-parallel region and one that ends it."""

    def __init__(self, layers, width, heads):
        super().__init__()
        self.begin, self.end = nn.Linear(width, width), nn.Linear(width, width)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))

    def forward(self, x):
        return self.end(self.layers(self.begin(x)))


def region_plan(head, sequence_parallel):
    column, row = ({"style": style, "sequence_parallel": sequence_parallel} for style in ("column", "row"))
    plan = {
        "begin": {**row, "split_input": True},
        "end": {**column, "gather_output": True},
        **{f"layers.*.{name}": {**column, "unit": head} for name in ("query", "key", "value")},
        "layers.*.output": {**row, "unit": head},
        "layers.*.up": column,
        "layers.*.down": row,
    }
    return plan | ({"layers.*.norm*": "sequence"} if sequence_parallel else {})


def region(rank):
    mesh = weft.init_mesh(cp=2, tp=2, device_type="cpu")
    model, reference = pair(lambda: Stack(2, 16, 4))
    weft.parallelize(model, mesh, plan=region_plan(4, True), context={"strict": True})
    x = torch.randn(2, 13, 16, generator=torch.Generator().manual_seed(0))
    report = weft.verify(model, reference, x, probes=[weft.causal_probe(6)])
    assert report.ok, str(report)
    assert sum(row.kind == "attention" for row in weft.explain(model).sequence) == 2
    plan = {name: entry for name, entry in region_plan(4, True).items() if name != "end"}
    wrong = weft.parallelize(Stack(1, 16, 4), mesh, plan=plan)
    with pytest.raises(ValueError, match="of a sequence-parallel region can be used position by position alone"):
        wrong(x)
    twice = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    plan = {"*": {"style": "row", "split_input": True, "sequence_parallel": True}}
    weft.parallelize(twice, mesh, plan=plan)
    with pytest.raises(ValueError, match="a column layer ends one and a row layer begins one"):
        twice(x)


def test_sequence_parallel_regions_lie_within_a_shared_sequence():
    run_ranks(region, 4)


def types(rank):
    mesh = weft.init_mesh(cp=2, device_type="cpu")
    x = torch.randn(2, 13, 16, generator=torch.Generator().manual_seed(0))

    def autocast(model, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(x)
        output.double().square().sum().backward()
        return output.detach()

    for dtype, step, message in (
        (torch.bfloat16, None, "ring"),
        (torch.float32, autocast, "ring"),
        (torch.float64, None, "weft.context_attention does not take torch.float64"),
    ):
        model, reference = pair(lambda: Stack(1, 16, 4))
        weft.parallelize(model.to(dtype), mesh)
        report = weft.verify(model, reference.to(dtype), x.to(dtype), step=step)
        # A key's bias has the gradient 0 but for rounding, and fp64 has no finer reference.
        faults = [
            str(d) for d in report.differences if not d.ok and (dtype, d.name[-8:]) != (torch.float64, "key.bias")
        ]
        assert not faults, str(report)
        assert message in str(weft.explain(model))


def test_every_type_and_autocast_are_as_accurate_as_unsplit():
    run_ranks(types, 2)


def saved_bytes(model, x):
    """What one forward keeps for backward, parameters excepted, each memory once."""
    kept, own = {}, {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes(), tensor  # held, so that no other takes its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = model(x)
    assert out.requires_grad
    return sum(count for count, _ in kept.values())


def measures(rank, cp, tp, sequence_parallel):
    b, s, h, a, e = 2, 32, 16, 4, 4
    mesh = weft.init_mesh(cp=cp, tp=tp, device_type="cpu")
    found = []
    for layers in (1, 2):
        torch.manual_seed(0)
        model = Stack(layers, h, a)
        plan = region_plan(h // a, sequence_parallel)
        weft.parallelize(model, mesh, plan=plan, context={"parts": True, "strict": True, "method": "ring"})
        x = weft.shard_sequence(torch.randn(b, s, h), dim=1, group=mesh["cp"])
        found.append(saved_bytes(model, x))
    return found[1] - found[0], (b, s, h, a, e)


@pytest.mark.parametrize(
    ("cp", "tp", "sequence_parallel"),
    [(1, 1, True), (1, 2, True), (1, 2, False), (2, 1, True), (2, 2, True), (2, 2, False)],
)
def test_a_layer_keeps_the_formulas_activations(cp, tp, sequence_parallel):
    """Korthikanti et al. 2022, equation 4, without the terms of the scores (flash attention) and of dropout, is
    s b h 32 / t in 2-byte types: 16 activations of h. Ours are these, with s / cp; 4 bytes a row and head (lse), and 8 a
    row of each norm."""
    for found, (b, s, h, a, e) in run_ranks(measures, cp * tp, cp, tp, sequence_parallel):
        rows = b * s // cp
        in_region = tp if sequence_parallel else 1
        kept_by_norms = rows / in_region * (4 * h * e + 2 * 8)  # two inputs, two outputs, two means and deviations
        kept_by_heads = rows / tp * ((3 + 1 + 8) * h * e + 4 * a)  # q, k, v; output; 4h before and behind gelu
        assert found == kept_by_norms + kept_by_heads


def long_step(rank, cp):
    """A step of the demo's model, with one narrower layer, on a sequence of 32768 bytes: its loss, and its gradient's
    norm by parameter."""
    gpt.WIDTH, gpt.LAYERS, gpt.HEAD = 16, 1, 16
    mesh = weft.init_mesh(cp=cp, device_type="cpu")
    torch.manual_seed(0)
    model = weft.parallelize(gpt.GPT(32768), mesh["cp", "tp"], context={"parts": True, "strict": True})
    whole = next(gpt.batches(1, 1, 32768))
    inputs, targets = (weft.shard_sequence(part, dim=1, group=mesh["cp"]) for part in whole)
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum") / 32768
    loss.backward()
    total = weft.all_reduce(loss.detach(), group=mesh["cp"]).item()
    return [total, *(parameter.grad.norm().item() for parameter in model.parameters())]


@pytest.mark.slow("pytorch_ext/context_parallel")
def test_a_step_on_32k_bytes_is_the_single_processs():
    one = run_ranks(long_step, 1, 1, timeout_s=120)[0]
    two = run_ranks(long_step, 2, 2, timeout_s=120)
    assert two[0] == two[1] == pytest.approx(one, rel=1e-4, abs=1e-8)
    assert two[0][0] == pytest.approx(one[0], rel=1e-6)
