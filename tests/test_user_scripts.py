"""What everybody's training script does around a model, on every mesh: right, or refused with a way out."""

import copy
import io
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import weft
from weft.optimizer_check import ELEMENTWISE
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
    return weft.parallelize(model_of() if model is None else model, mesh, **options)


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


def clip_kv_heads(rank):
    """Four ranks and three KV heads: one is on two ranks, and counts once."""
    ranks = weft.init_mesh(tp=4, device_type="cpu")["tp"]
    model, plain = weft.parallelize(model_of(), ranks, plan=LLAMA_PLAN), model_of()
    batch = batches_of(1)[0]
    for one in (model, plain):
        loss_of(one, batch).backward()
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
    parameter.requires_grad_(False)
    parameter.grad = None
    parameter.requires_grad_(True)  # frozen for a while, as fine-tuning does
    loss_of(model, batch).backward()
    torch.testing.assert_close(parameter.grad.norm(), whole.norm())
    assert all(type(p) is nn.Parameter for p in model.parameters())  # or optimizers would take slow paths


def test_a_gradient_stands_for_the_whole_one():
    run_ranks(look_at_gradients, 2)


# Optimizers.


def optimizer_before(rank, sizes):
    mesh = weft.init_mesh(**sizes, device_type="cpu")
    model, plain = model_of(), model_of()
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in (model, plain)]
    model = split(mesh, model)
    for batch in batches_of(2):
        loss_of(model, mine_of(batch, mesh)).backward()
        loss_of(plain, batch).backward()
        for optimizer in optimizers:
            optimizer.step()
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


def refused_optimizers(rank, sizes):
    model = split(weft.init_mesh(**sizes, device_type="cpu"))
    loss_of(model, batches_of(1)[0]).backward()
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    matrices = [parameter for parameter in parameters if parameter.dim() == 2]
    kinds = [OneStepSize, torch.optim.LBFGS]
    if "tp" in sizes:
        kinds += [torch.optim.Adafactor, torch.optim.Muon, RowNormalised]
    for kind in kinds:
        before = [parameter.detach().clone() for parameter in parameters]
        optimizer = kind(matrices)
        with pytest.raises(TypeError, match=f"{kind.__name__}: .*(otherwise than|cannot be tried).*elementwise = True"):
            optimizer.step(lambda: 0.0) if kind is torch.optim.LBFGS else optimizer.step()
        assert all(map(torch.equal, before, parameters))  # it has not stepped
    state = torch.get_rng_state()
    Signed(parameters).step()
    assert torch.equal(torch.get_rng_state(), state)
    optimizer = OneStepSize(parameters)
    optimizer.elementwise = True  # who says so is believed
    optimizer.step()
    for name in ELEMENTWISE:
        getattr(torch.optim, name)(parameters).step()


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"pp": 2}], ids=ids)
def test_optimizers_that_look_at_more_than_an_element_are_refused(sizes):
    on_ranks(refused_optimizers, sizes)


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


def test_an_optimizer_with_the_state_of_another_rank_is_refused():
    run_ranks(optimizer_of_another_rank, 2)


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
