"""What everybody's training script does around a model, on every mesh: right, or refused with a way out."""

import contextlib
import copy
import functools
import io
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import weft
from weft.comm.registry import communicator
from weft.sharding.optimizer_check import ELEMENTWISE
from weft.sharding.owners import mark
from weft.testing.models import LLAMA_PLAN, Llama
from weft.testing.ranks import run_ranks

MESHES = ({"tp": 2}, {"dp": 2}, {"cp": 2}, {"pp": 2}, {"dp": 2, "tp": 2}, {"pp": 2, "tp": 2})


def ids(sizes):
    return "-".join(f"{name}{size}" for name, size in sizes.items())


on_meshes = pytest.mark.parametrize("sizes", MESHES, ids=ids)


def on_ranks(function, sizes, *args):
    return run_ranks(function, math.prod(sizes.values()), sizes, *args)


def model_of():
    torch.manual_seed(0)
    return Llama()


def batches_of(count, rows=4):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(Llama.WORDS, (2, rows, 8), generator=generator).unbind() for _ in range(count)]


def loss_of(model, batch):
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def mine_of(batch, mesh):
    """The rows of this rank of "dp"."""
    if "dp" not in mesh.mesh_dim_names:
        return batch
    dp = mesh["dp"]
    return tuple(x.chunk(dp.size())[dp.get_local_rank()] for x in batch)


def assert_same_model(model, plain, tolerance=1e-5):
    whole = weft.full_state_dict(model)
    for name, expected in plain.state_dict().items():
        torch.testing.assert_close(whole[name], expected, rtol=tolerance, atol=tolerance, msg=name)


def split(mesh, model=None, **options):
    model = model_of() if model is None else model
    if isinstance(model, Llama):  # a plan of its own, which is found at once
        options["plan"] = LLAMA_PLAN if "tp" in mesh.mesh_dim_names else None
    return weft.parallelize(model, mesh, **options)


# Gradients that a script sums itself.


def averaged_by_hand(rank, sizes):
    """As tutorials wrote it before there was DistributedDataParallel."""
    mesh = weft.init_mesh(**sizes, device_type="cpu")
    model, plain = split(mesh["pp", "cp", "tp"]), model_of()
    batch = batches_of(1)[0]
    loss_of(model, mine_of(batch, mesh)).backward()
    loss_of(plain, batch).backward()
    parts = [parameter for parameter in model.parameters() if parameter.grad is not None]
    message = "all_reduce of a gradient over ranks .0, 1., which have different parts of the model: .*mesh..dp"
    if "dp" not in sizes:
        with pytest.raises(TypeError, match=message):
            dist.all_reduce(parts[0].grad)
        return
    for parameter in parts:
        dist.all_reduce(parameter.grad, group=mesh["dp"].get_group())
        parameter.grad /= mesh["dp"].size()
    expected = nn.utils.get_total_norm([parameter.grad for parameter in plain.parameters()])
    torch.testing.assert_close(nn.utils.get_total_norm([x.grad for x in parts]), expected, rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"pp": 2}, {"dp": 2, "tp": 2}], ids=ids)
def test_a_gradient_is_summed_by_hand_over_ranks_that_have_the_same_part_alone(sizes):
    on_ranks(averaged_by_hand, sizes)


# Clipping.


def clip_by_torch(rank, sizes):
    """torch's function, Lightning's and accelerate's way to call it, and what scripts wrote before there was one."""
    mesh = weft.init_mesh(**sizes, device_type="cpu")
    model, plain = split(mesh), model_of()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.5, momentum=0.9) for one in (model, plain)]
    clips = (
        lambda one: nn.utils.clip_grad_norm_(one.parameters(), 0.3),
        lambda one: nn.utils.clip_grad_norm_(one.parameters(), 2.0, norm_type=1, foreach=False),
        lambda one: nn.utils.clip_grad_norm_(one.parameters(), 0.01, norm_type="inf"),
        clip_as_before,
    )
    for batch, clip in zip(batches_of(len(clips)), clips, strict=True):
        loss_of(model, mine_of(batch, mesh)).backward()
        loss_of(plain, batch).backward()
        torch.testing.assert_close(clip(model), clip(plain))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_model(model, plain)
    weft.check_replicas(model)


def clip_as_before(model):
    """As torch did it in 1.4, and many scripts since."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    total = torch.norm(torch.stack([torch.norm(gradient.detach(), 2.0) for gradient in gradients]), 2.0)
    if total > 0.3:
        for gradient in gradients:
            gradient.detach().mul_(0.3 / (total + 1e-6))
    return total


@on_meshes
def test_torch_clips_by_the_norm_of_the_whole_model(sizes):
    on_ranks(clip_by_torch, sizes)


class Grouped(nn.Module):
    """Eight query heads of two, and two KV heads."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.output = nn.Linear(8, 16), nn.Linear(8, 4), nn.Linear(16, 8)

    def forward(self, x):
        query, key = (layer(x).unflatten(-1, (-1, 2)) for layer in (self.query, self.key))
        key = key.repeat_interleave(query.size(-2) // key.size(-2), -2)
        return self.output((query * key.tanh()).flatten(-2))


def clip_kv_heads(rank):
    """Four ranks and two KV heads: each is on two ranks, and counts once."""
    ranks = weft.init_mesh(tp=4, device_type="cpu")["tp"]
    torch.manual_seed(0)
    plain = Grouped()
    heads = {"style": "column", "unit": 2, "heads": (8, 2)}
    model = weft.parallelize(copy.deepcopy(plain), ranks, plan={"query": heads, "key": heads, "output": "row"})
    x = torch.randn(3, 8)
    for one in (model, plain):
        one(x).square().sum().backward()
    assert any(weft.shard_of(p) is not None and weft.shard_of(p).cut.replicated for p in model.parameters())
    of_both = [nn.utils.get_total_norm([p.grad for p in one.parameters()]) for one in (model, plain)]
    torch.testing.assert_close(*of_both)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.norm(), plain.get_parameter(name).grad.norm(), msg=name)
        torch.testing.assert_close(parameter.grad.sum(), plain.get_parameter(name).grad.sum(), msg=name)


def test_rows_that_two_ranks_have_count_once():
    run_ranks(clip_kv_heads, 4)


def look_at_gradients(rank):
    """Reductions of a gradient are the whole one's; what mixes elements otherwise is refused."""
    model, plain = split(weft.init_mesh(tp=2, device_type="cpu")), model_of()
    batch = batches_of(1)[0]
    for one in (model, plain):
        loss_of(one, batch).backward()
    name = next(name for name, p in model.named_parameters() if weft.shard_of(p) is not None)
    parameter, gradient, whole = (
        model.get_parameter(name), model.get_parameter(name).grad, plain.get_parameter(name).grad
    )  # fmt: skip
    looks = (
        lambda g: g.norm(),
        lambda g: g.data.norm(2),
        lambda g: torch.linalg.vector_norm(g, 3),
        lambda g: g.float().pow(2).sum().sqrt(),
        lambda g: g.abs().max(),
        lambda g: g.min(),
        lambda g: g.mean(),
        lambda g: (g * 2).view(-1).abs().mean(),
        lambda g: torch.isfinite(g).all(),
        lambda g: (g == g.max()).any(),
        lambda g: torch.count_nonzero(g),
        lambda g: torch.stack([g.norm(), g.norm()]).sum(),
    )
    for number, look in enumerate(looks):
        torch.testing.assert_close(look(gradient), look(whole), msg=str(number))
    for look in (
        lambda g: g @ g.T,
        lambda g: g.norm(dim=-1),
        lambda g: g.mean(0),
        lambda g: torch.linalg.svdvals(g),
        lambda g: torch.linalg.norm(g, 2),
        lambda g: torch.cat([g.view(-1), g.view(-1)]),
        lambda g: g.median(),
    ):
        with pytest.raises(TypeError, match=r"split over ranks.*|unsupported operand"):
            look(gradient)
    assert type(gradient.as_subclass(torch.Tensor).norm()) is torch.Tensor
    again = (copy.deepcopy(gradient), gradient.clone(), gradient.to(torch.float64))
    for copied in again:
        torch.testing.assert_close(copied.norm().float(), whole.norm())
    file = io.BytesIO()
    torch.save(gradient, file)
    file.seek(0)
    assert type(torch.load(file)) is torch.Tensor  # nobody else knows these ranks
    replicas = [dist.new_group([other]) for other in range(2)][rank]
    dist.all_reduce(summed := gradient.clone(), group=replicas)  # by hand, as scripts without a wrapper do
    assert torch.equal(summed.as_subclass(torch.Tensor), gradient.as_subclass(torch.Tensor))
    parameter.requires_grad_(False)
    parameter.grad = None
    parameter.requires_grad_(True)  # frozen for a while, as fine-tuning does
    loss_of(model, batch).backward()
    torch.testing.assert_close(parameter.grad.norm(), whole.norm())
    assert all(type(p) is nn.Parameter for p in model.parameters())  # or optimizers would take slow paths


def test_a_gradient_stands_for_the_whole_one():
    run_ranks(look_at_gradients, 2)


# Optimizers.


def clipping(parameters):
    def hook(*_):
        nn.utils.clip_grad_norm_(parameters, 0.1)

    return hook


def out_of_memory():
    raise MemoryError


def optimizer_before(rank, sizes):
    mesh = weft.init_mesh(**sizes, device_type="cpu")
    model, plain = model_of(), model_of()
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in (model, plain)]
    parameters = [list(one.parameters()) for one in (model, plain)]
    model = split(mesh, model)
    if sizes.get("pp", 1) > 1:  # it has the layers of other stages
        with pytest.raises(ValueError, match="AdamW: .* made before weft.parallelize"):
            optimizers[0].step()
        optimizers[0], parameters[0] = torch.optim.AdamW(model.parameters(), lr=0.01), list(model.parameters())
    found = []
    for number, batch in enumerate(batches_of(3)):
        loss_of(model, mine_of(batch, mesh)).backward()
        loss_of(plain, batch).backward()
        for optimizer, own in zip(optimizers, parameters, strict=True):
            if number == 1:  # its step fails, and the next one does not
                with pytest.raises(MemoryError):
                    optimizer.step(out_of_memory)
            if number == 2:  # by hooks of one's own
                optimizer.register_step_pre_hook(clipping(own))
                optimizer.register_step_post_hook(clipping(own))
            found.append(nn.utils.get_total_norm([x.grad for x in own if x.grad is not None]))
            optimizer.step()
        torch.testing.assert_close(*found[-2:], rtol=1e-4, atol=0.0)
        norms = [nn.utils.get_total_norm([x.grad for x in own if x.grad is not None]) for own in parameters]
        torch.testing.assert_close(*norms, rtol=1e-4, atol=0.0)
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert_same_model(model, plain, 1e-4)


@on_meshes
def test_an_optimizer_made_before_the_split_trains_what_is_split(sizes):
    on_ranks(optimizer_before, sizes)


def optimizer_with_state(rank):
    """One that has stepped the whole model has momenta of whole matrices."""
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model, batches_of(1)[0]).backward()
    optimizer.step()
    model = split(weft.init_mesh(tp=2, device_type="cpu"), model)
    loss_of(model, batches_of(1)[0]).backward()
    with pytest.raises(ValueError, match=r"state 'exp_avg' is of the whole parameter \(37, 24\)"):
        optimizer.step()


def test_an_optimizer_with_the_state_of_the_whole_model_is_refused():
    run_ranks(optimizer_with_state, 2)


class RowNormalised(torch.optim.Optimizer):
    """Somebody's: looks at rows, and at nothing else."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                update = parameter.grad.as_subclass(torch.Tensor)
                parameter.sub_(group["lr"] * update / (update.norm(dim=-1, keepdim=True) + 1e-8))


class OneStepSize(RowNormalised):
    """Somebody's: one number for all parameters together."""

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        size = sum(parameter.grad.as_subclass(torch.Tensor).abs().sum() for parameter in parameters)
        for parameter in parameters:
            parameter.sub_(0.1 * parameter.grad / size)


class Signed(RowNormalised):
    """Somebody's: each element by itself."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(group["lr"] * parameter.grad.sign())


class Warmed(torch.optim.AdamW):
    """Somebody's: torch's step, with more around it."""

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)


class Clipped(torch.optim.AdamW):
    """Somebody's: it looks like torch's step, and is not."""

    @functools.wraps(torch.optim.AdamW.step)
    def step(self, closure=None):
        nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1.0)
        return super().step(closure)


class Around(RowNormalised):
    """Somebody's: another optimizer does the work."""

    def __init__(self, parameters):
        super().__init__(parameters)
        self.inner = torch.optim.SGD(self.param_groups, lr=0.5)

    def step(self, closure=None):
        self.inner.step()


def refused_optimizers(rank, sizes):
    model = split(weft.init_mesh(**sizes, device_type="cpu"))
    loss_of(model, batches_of(1)[0]).backward()
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    matrices = [parameter for parameter in parameters if parameter.dim() == 2]
    kinds = [OneStepSize, RowNormalised, Signed, Clipped, torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.Muon]
    for kind in kinds:
        before = [parameter.detach().clone() for parameter in parameters]
        optimizer = kind(matrices)
        torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)  # which gives it a step of its own
        with pytest.raises(TypeError, match=f"{kind.__name__} is not known to .*elementwise = True"):
            optimizer.step(lambda: 0.0) if kind is torch.optim.LBFGS else optimizer.step()
        assert all(map(torch.equal, before, parameters))  # it has not stepped
    Warmed(parameters).step()
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer = Signed(parameters)
    optimizer.elementwise = True  # who says so is believed
    optimizer.step()
    for x, start in zip(parameters, before, strict=True):
        torch.testing.assert_close(x.detach(), start - 0.1 * x.grad.sign().as_subclass(torch.Tensor))
    expected = [(x - 0.1 * x.grad).detach().as_subclass(torch.Tensor) for x in parameters]
    Around(parameters).step()  # once, with the 0.1 of its own groups
    for x, one in zip(parameters, expected, strict=True):
        torch.testing.assert_close(x.detach(), one)
    for name in ELEMENTWISE:
        getattr(torch.optim, name)(parameters).step()


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"pp": 2}], ids=ids)
def test_optimizers_that_look_at_more_than_an_element_are_refused(sizes):
    on_ranks(refused_optimizers, sizes)


def optimizers_of_a_stage(rank):
    parameters = [nn.Parameter(torch.ones(4, 3))]
    mark({parameters[0]: {rank}}, communicator(None))
    parameters[0].sum().backward()
    for kind in (torch.optim.Adafactor, torch.optim.Muon):
        kind(parameters).step()
    with pytest.raises(TypeError, match="OneStepSize is not known to step each parameter by itself"):
        OneStepSize(parameters).step()


def test_a_stage_of_a_pipeline_takes_optimizers_of_whole_matrices():
    run_ranks(optimizers_of_a_stage, 2)


def optimizer_of_another_rank(rank):
    model = split(weft.init_mesh(tp=2, device_type="cpu"), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)))
    x = torch.ones(2, 4)
    model(x).sum().backward()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    saved = [optimizer.state_dict()]
    mine = copy.deepcopy(saved[0])
    dist.broadcast_object_list(saved, 0)
    optimizer.load_state_dict(mine)
    optimizer.step()
    again = torch.optim.AdamW(model.parameters())
    again.load_state_dict(saved[0])
    if rank == 0:
        again.step()
    else:
        with pytest.raises(ValueError, match="its state was saved by rank 0 of 2 .* this is rank 1 of 2"):
            again.step()


def sharded_optimizer_of_another_rank(rank):
    model = weft.DataParallel(equal_halves(), shard_optimizer=True)
    optimizers = [model.optimizer(torch.optim.AdamW) for _ in range(2)]
    model(torch.ones(2, 8)).sum().backward()
    optimizers[0].step()
    saved = [optimizers[0].state_dict()]
    dist.broadcast_object_list(saved, 0)
    if rank == 1:
        optimizers[1].load_state_dict(saved[0])
        with pytest.raises(ValueError, match="its state was saved by rank 0 of 2 .* this is rank 1 of 2"):
            optimizers[1].step()


@pytest.mark.parametrize("job", [optimizer_of_another_rank, sharded_optimizer_of_another_rank])
def test_an_optimizer_with_the_state_of_another_rank_is_refused(job):
    run_ranks(job, 2)


def scaled(rank, sizes):
    """An element overflows on the last rank alone: all skip the step, and halve the scale."""
    mesh = weft.init_mesh(**sizes, device_type="cpu")
    model = split(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    for number, batch in enumerate(batches_of(3)):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        scaler.scale(loss_of(model, mine_of(batch, mesh))).backward()
        held = [
            p for p in model.parameters() if p.grad is not None and (weft.shard_of(p) is not None or "tp" not in sizes)
        ]
        if number == 1 and rank == dist.get_world_size() - 1:
            held[0].grad.as_subclass(torch.Tensor).view(-1)[0] = math.inf
        if number == 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        skipped = all(map(torch.equal, before, model.parameters()))
        assert skipped == (number == 1), number
        assert scaler.get_scale() == (8.0 if number == 0 else 4.0)
    weft.check_replicas(model)


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"pp": 2}, {"pp": 2, "tp": 2}], ids=ids)
def test_ranks_skip_a_step_that_overflowed_on_one_of_them(sizes):
    on_ranks(scaled, sizes)


# Saving and loading.


def states(rank, sizes, folder):
    """Rank 0 saves, all load: refused, or the whole model's by full_state_dict."""
    mesh = weft.init_mesh(**sizes, device_type="cpu")
    model = split(mesh)
    file = folder / f"{rank}.pt"
    torch.save(model.state_dict(), file)
    dist.barrier()
    other = torch.load(folder / "0.pt")
    differs = any(mesh[name].get_local_rank() for name in ("tp", "pp") if name in sizes)
    refusal = pytest.raises(RuntimeError, match=r"was saved by another rank|Missing key|expected .* the shard of rank")
    fresh = split(mesh)
    if not differs:
        fresh.load_state_dict(other)
    else:
        with refusal:
            fresh.load_state_dict(other)
    fresh.load_state_dict(torch.load(file))
    whole = weft.full_state_dict(model)
    plain = model_of()
    assert not plain.load_state_dict(whole).missing_keys
    for name, expected in model_of().state_dict().items():
        assert torch.equal(whole[name], expected), name
    target = fresh.module if isinstance(fresh, weft.DataParallel) else fresh
    target.load_state_dict(whole, strict="pp" not in sizes)  # a stage has its own names alone
    assert_same_model(fresh, plain)


@on_meshes
def test_a_state_dict_says_what_it_is(sizes, tmp_path):
    on_ranks(states, sizes, tmp_path)


def equal_halves():
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def state_without_metadata(rank):
    """A plain dict of rank 0's tensors has the right names and shapes on every rank: the next call finds it."""
    mesh = weft.init_mesh(tp=2, device_type="cpu")
    model = split(mesh, equal_halves())
    x = torch.ones(2, 8)
    for _ in range(5):
        model(x)
    saved = [dict(model.state_dict())]
    dist.broadcast_object_list(saved, 0)
    model.load_state_dict(saved[0])
    with pytest.raises(ValueError, match=r"ranks 0 and 1 have the same part of 1\.weight \(2 of 2"):
        model(x)


def test_the_next_call_finds_that_ranks_loaded_the_same_part():
    run_ranks(state_without_metadata, 2)


def state_of_repeated_identities(rank):
    model = equal_halves()
    with torch.no_grad():
        model[1].weight.copy_(torch.eye(8).repeat(2, 1))  # a layer that begins as a copy, twice
        model[3].weight.zero_()
    assert split(weft.init_mesh(tp=2, device_type="cpu"), model)(torch.ones(2, 8)).shape == (2, 8)


def test_parts_of_layers_that_begin_as_copies_may_be_equal():
    run_ranks(state_of_repeated_identities, 2)


# Wrappers.


def wrapped_over_all(rank, sizes):
    """Without group= a wrapper takes all ranks, those that have other parts of the model among them."""
    mesh = weft.init_mesh(**sizes, device_type="cpu")
    inner = mesh[tuple(name for name in sizes if name != "dp")]
    with pytest.raises(ValueError, match=r"is split over ranks \[.*\] of this group.*pass group=mesh\[\"dp\"\]"):
        weft.DataParallel(split(inner))
    torch.manual_seed(0)
    even = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))  # torch itself refuses what is not alike on all ranks
    wrapped = nn.parallel.DistributedDataParallel(split(inner, even))
    with pytest.raises(ValueError, match=r"DistributedDataParallel over ranks \[.*\], which have different parts"):
        wrapped(torch.ones(2, 8))
    if "dp" in sizes:
        batch, group = batches_of(1)[0], mesh["dp"]
        for wrapped in (
            nn.parallel.DistributedDataParallel(split(inner), process_group=group.get_group()),
            weft.DataParallel(split(inner), group=group),
        ):
            loss_of(wrapped, mine_of(batch, mesh)).backward()
            plain = model_of()
            loss_of(plain, batch).backward()
            parameters = [parameter for parameter in wrapped.parameters() if parameter.grad is not None]
            expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            torch.testing.assert_close(nn.utils.clip_grad_norm_(parameters, 0.1), expected)


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"pp": 2}, {"dp": 2, "tp": 2}], ids=ids)
def test_a_wrapper_over_ranks_with_other_parts_is_refused(sizes):
    on_ranks(wrapped_over_all, sizes)


def unheld(rank):
    """The module is what the script goes on with."""
    torch.manual_seed(0)
    module, plain = nn.Linear(4, 4), nn.Linear(4, 4)
    plain.load_state_dict(module.state_dict())
    for step in range(3):
        x = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(step))
        weft.DataParallel(module)(x[rank]).square().mean().backward()
        plain(x.flatten(0, 1)).square().mean().backward()
        torch.testing.assert_close(module.weight.grad, plain.weight.grad)
        for one in (module, plain):
            one.zero_grad()


def test_a_data_parallel_that_nobody_holds_reduces():
    run_ranks(unheld, 2)


# Ranks that compute one model.


def other_batches(rank, sizes):
    mesh = weft.init_mesh(**sizes, device_type="cpu")
    tokens = batches_of(1)[0][0]
    dp = mesh["dp"].get_local_rank() if "dp" in sizes else 0
    own = torch.roll(tokens, dp, 0)  # of a sampler that counts "dp" alone
    wrong = torch.roll(tokens, rank, 0)  # of one that counts all ranks
    split(mesh)(own)
    with pytest.raises(
        ValueError, match=r"called with different batches.*num_replicas=mesh\[\"dp\"\]|different batches"
    ):
        split(mesh)(wrong)
    model = split(mesh)
    for _ in range(3):
        model(own)
    model(wrong)
    split(mesh, checks="off")(wrong)
    always = split(mesh, checks="always")
    for _ in range(4):
        always(own)
    with pytest.raises(ValueError, match="different batches"):
        always(wrong)
    model = split(mesh).train(mode=rank % 2 == 0)
    if "tp" in sizes:
        with pytest.raises(ValueError, match="one to train and one not"):
            model(own)


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"cp": 2}, {"pp": 2}, {"dp": 2, "tp": 2}, {"pp": 2, "tp": 2}], ids=ids)
def test_ranks_of_one_model_with_other_batches_are_refused(sizes):
    on_ranks(other_batches, sizes)


def other_pipeline_batches(rank):
    mesh = weft.init_mesh(pp=2, device_type="cpu")
    pipe = weft.Pipeline(equal_halves(), mesh, microbatches=2, loss=F.mse_loss)
    x = torch.arange(32.0).view(4, 8)
    pipe.step(x, x)
    pipe.check_replicas()
    with pytest.raises(ValueError, match="Pipeline: ranks 0 and 1.*different batches"):
        pipe.step(x + rank, x)
    with pytest.raises(ValueError, match="different batches"):
        pipe.step(x, x + rank)
    pipe.step(x, x + rank)  # the fourth


def test_a_pipeline_with_other_batches_is_refused():
    run_ranks(other_pipeline_batches, 2)


def drawn_again(rank):
    """`model.apply(initialise)` after the split, with ranks that draw alike."""
    mesh = weft.init_mesh(tp=2, device_type="cpu")
    model = split(mesh, equal_halves())
    for layer in (model[1], model[3]):
        nn.init.normal_(layer.weight)
    with pytest.raises(ValueError, match="have the same part of 1.weight"):
        model(torch.ones(2, 8))
    model = split(mesh, equal_halves())
    for layer in (model[1], model[3]):
        nn.init.zeros_(layer.weight)  # as every rank may have
        layer.bias.data.fill_(1.0)
    model(torch.ones(2, 8))


def test_weights_that_were_drawn_alike_after_the_split_are_refused():
    run_ranks(drawn_again, 2)


def seeded_by_rank(rank):
    mesh = weft.init_mesh(tp=2, device_type="cpu")
    x = torch.ones(2, 8)
    for dropout, trains in ((0.5, True), (0.5, False), (0.0, True)):
        model = split(mesh, nn.Sequential(*equal_halves(), nn.Dropout(dropout) if dropout else nn.Identity()))
        model.train(trains)
        torch.manual_seed(rank)
        if dropout and trains:
            with pytest.raises(ValueError, match="drew different random numbers.*seed them alike"):
                model(x)
        else:
            model(x)  # draws nothing: the script may seed as it likes


def test_ranks_that_drop_different_elements_of_what_is_whole_are_refused():
    run_ranks(seeded_by_rank, 2)


def replicas_that_differ(rank, sizes):
    """A parameter that ranks have alike is written on the last one alone."""
    mesh = weft.init_mesh(**sizes, device_type="cpu")
    every = split(mesh, checks="always")
    for number in (1, 2):
        model = split(mesh) if number == 1 else every
        model.check_replicas()
        weft.check_replicas(model)
        if rank == dist.get_world_size() - 1:
            held = [p for p in model.parameters() if weft.shard_of(p) is None or "tp" not in sizes]
            held[-1].data.view(-1)[0] += 1
        differs = pytest.raises(ValueError, match=r"check_replicas: .* differs? ?.*(rank 0 and rank|ranks)")
        if number == 1:
            with differs:
                model.check_replicas()
        else:
            batch = mine_of(batches_of(1)[0], mesh)
            with differs:
                model(batch[0])


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"dp": 2}, {"cp": 2}], ids=ids)
def test_replicas_that_differ_are_found(sizes):
    on_ranks(replicas_that_differ, sizes)


class Tied(nn.Module):
    """Its embedding is its head, on the first and the last stage."""

    def __init__(self):
        super().__init__()
        self.embedding, self.middle = nn.Embedding(8, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.middle(self.embedding(tokens)))


def copies_that_differ(rank):
    torch.manual_seed(0)
    mesh = weft.init_mesh(pp=2, device_type="cpu")
    pipe = weft.Pipeline(Tied(), mesh, microbatches=2, loss=lambda y, t: F.cross_entropy(y, t), checks="always")
    tokens = torch.arange(4) % 8
    pipe.step(tokens, tokens)
    pipe.check_replicas()
    if rank:
        next(p for p in pipe.parameters() if p.shape == (8, 4)).data[0, 0] += 1
    with pytest.raises(ValueError, match=r"the copies of .*weight on ranks 0 and 1 differ"):
        pipe.step(tokens, tokens)


def test_copies_of_tied_weights_that_differ_are_found():
    run_ranks(copies_that_differ, 2)


def rows_that_differ(rank):
    ranks = weft.init_mesh(tp=4, device_type="cpu")["tp"]
    heads = {"style": "column", "unit": 2, "heads": (8, 2)}
    torch.manual_seed(0)
    model = weft.parallelize(Grouped(), ranks, plan={"query": heads, "key": heads, "output": "row"})
    model.check_replicas()
    if rank == 3:
        model.key.weight.data[0, 0] += 1
    with pytest.raises(ValueError, match=r"the copies of key\.weight on ranks 2 and 3 differ"):
        model.check_replicas()


def test_rows_that_two_ranks_have_and_that_differ_are_found():
    run_ranks(rows_that_differ, 4)


def views_and_transforms(rank):
    mesh = weft.init_mesh(tp=2, device_type="cpu")
    model = weft.parallelize(Llama(1), mesh, sequence_parallel=True)
    tokens = batches_of(1)[0][0]
    model(tokens).sum().backward()
    gradient, depth = next(p.grad for p in model.parameters() if weft.shard_of(p) is not None), 0
    while gradient is not None and depth < 9:  # as Dynamo looks for what a view is of
        gradient, depth = gradient._base, depth + 1
    assert depth < 3
    model.blocks[0].compile(backend="eager")
    model(tokens).sum().backward()

    model = weft.parallelize(model_of(), mesh, checks="off")
    parameters = dict(model.named_parameters())
    expected = model(tokens)
    assert torch.equal(torch.func.functional_call(model, parameters, (tokens,)), expected)
    assert torch.equal(torch.func.functional_call(model, model.state_dict(), (tokens,)), expected)
    with pytest.raises(RuntimeError, match="Parallel.* inside of a transform of torch.func"):
        torch.func.grad(lambda given: torch.func.functional_call(model, given, (tokens,)).sum())(parameters)


def test_gradients_that_are_views_and_functional_calls():
    run_ranks(views_and_transforms, 2)


def ddp_around(rank, sizes, options):
    """torch's wrapper over "dp" around a model that is split over "tp"."""
    mesh = weft.init_mesh(**sizes, device_type="cpu")
    inner, plain = split(mesh["tp"]), model_of()
    model = DistributedDataParallel(inner, process_group=mesh["dp"].get_group(), **options)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in (model, plain)]
    for number, batch in enumerate(batches_of(4)):
        with model.no_sync() if number == 1 else contextlib.nullcontext():
            loss_of(model, mine_of(batch, mesh)).backward()
        loss_of(plain, batch).backward()
        if number == 1:
            continue
        norms = [nn.utils.clip_grad_norm_(one.parameters(), 0.3) for one in (model, plain)]
        torch.testing.assert_close(*norms, rtol=1e-4, atol=0.0)
        torch.testing.assert_close(
            weft.clip_grad_norm_(inner, 1e9), norms[1].double().clamp(max=0.3), rtol=1e-4, atol=0
        )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=number == 0)
    assert_same_model(inner, plain, 1e-4)


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 1e-3}])
def test_norms_under_torchs_wrapper_are_of_the_whole_model(options):
    on_ranks(ddp_around, {"dp": 2, "tp": 2}, options)
