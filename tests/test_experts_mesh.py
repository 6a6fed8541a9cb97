"""A mesh with ep: ranks of dp hold experts together, and a model learns what one process learns from the whole batch."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from shared_models import Mixture, MixtureBlock
from torch import nn

import weft
from weft.mesh import expert_mesh
from weft.nn import Experts, ParallelExperts
from weft.ops.kernel_choice import prefer
from weft.testing.ranks import run_ranks


def loss_of(model, tokens):
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def batch(step, replicas):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(11, (2 * replicas, 5), generator=generator)


def whole(parameter, tensor):
    shard = weft.shard_of(parameter)
    tensor = tensor.detach().as_subclass(torch.Tensor)
    return tensor if shard is None else shard.gather(tensor)


IN_PARTS = {"layers.*.experts": {"style": "experts", "split": "intermediate"}}  # each expert over the ranks of tp


def check_learning(rank, sizes, options, clips, plan="auto"):
    mesh = weft.init_mesh(**sizes)
    replicas, place = mesh["dp"].size(), mesh["dp"].get_local_rank()
    plain = Mixture().double()
    model = weft.parallelize(copy.deepcopy(plain), mesh["pp", "cp", "tp"], plan=plan)
    assert len([layer for layer in model.modules() if isinstance(layer, ParallelExperts)]) == 2
    inside, model = model, weft.DataParallel(model, group=mesh["dp"], **options)
    sharded = options.get("shard_optimizer", False)
    make = model.optimizer if sharded else lambda kind, **settings: kind(model.parameters(), **settings)
    optimizer = make(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1)
    of_plain = dict(plain.named_parameters())
    for step in range(10):
        tokens = batch(step, replicas)
        model.zero_grad()
        loss_of(model, tokens.split(2)[place]).backward()
        plain.zero_grad()
        loss_of(plain, tokens).backward()
        exact = 1e-5 if options.get("main_grad") else 1e-8  # which is in fp32
        for name, parameter in inside.named_parameters() if not sharded else ():
            gradient = parameter.main_grad.double() if options.get("main_grad") else parameter.grad
            found, expected = whole(parameter, gradient), of_plain[name].grad
            assert torch.allclose(found, expected, exact, exact / 100), f"{name}: {(found - expected).abs().max()}"
        if options.get("main_grad"):
            return
        if clips:
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            assert torch.allclose(model.grad_norm, norm)
            found = model.clip_grad_norm_(0.1) if sharded else weft.clip_grad_norm_(model, 0.1)
            assert torch.allclose(found, norm)
        optimizer.step()
        reference.step()
    for name, parameter in inside.named_parameters():
        found, expected = whole(parameter, parameter), of_plain[name]
        assert torch.allclose(found, expected, 1e-6, 1e-8), f"{name} at the end: {(found - expected).abs().max()}"
    model.check_replicas()
    experts = inside.layers[0].experts
    with torch.no_grad():
        if rank == dist.get_world_size() - 1:
            experts.down_proj.add_(1)
    if expert_mesh(mesh)["edp"].size() > 1:
        with pytest.raises(ValueError, match="have the same experts"):
            model.check_replicas()


@pytest.mark.parametrize(
    ("world", "sizes"),
    [(2, dict(dp=2, ep=2)), (4, dict(dp=4, ep=2))],
    ids=["ep", "ep-and-dp"],
)
def test_a_model_with_experts_over_ep_learns_what_one_process_learns(world, sizes):
    run_ranks(check_learning, world, sizes, {}, True)


@pytest.mark.slow("data_parallel", "nn", "ops")
@pytest.mark.parametrize(
    ("world", "sizes", "options"),
    [
        (3, dict(dp=3, ep=3), {}),
        (4, dict(dp=4, ep=4), {}),
        (4, dict(dp=2, tp=2, ep=2), {}),
        (2, dict(dp=2, ep=2), dict(shard_optimizer=True)),
        (4, dict(dp=4, ep=2), dict(shard_optimizer=True, bucket_mb=1e-3)),
        (4, dict(dp=2, tp=2, ep=2), dict(shard_optimizer=True)),
        (4, dict(dp=2, cp=2, ep=2), {}),  # over dp
        (2, dict(cp=2, ep=2), {}),
        (4, dict(dp=2, cp=2, ep=4), {}),
        (4, dict(dp=2, cp=2, ep=4), dict(shard_optimizer=True)),
        (4, dict(cp=2, tp=2, ep=2), {}),
        (4, dict(dp=4, ep=2), dict(main_grad=True)),
        (4, dict(dp=4, ep=2), dict(bucket_mb=1e-3, overlap=False)),
    ],
)
def test_so_do_other_meshes_and_options(world, sizes, options):
    run_ranks(check_learning, world, sizes, options, True)


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        (dict(dp=2, tp=2, ep=2), {}),
        pytest.param(
            dict(dp=2, tp=2, ep=2),
            dict(shard_optimizer=True, bucket_mb=1e-3),
            marks=pytest.mark.slow("data_parallel", "nn", "ops"),
        ),
        pytest.param(dict(cp=2, tp=2, ep=2), {}, marks=pytest.mark.slow("context_parallel", "nn", "ops")),
        pytest.param(
            dict(dp=2, tp=2, ep=2), dict(main_grad=True), marks=pytest.mark.slow("data_parallel", "nn", "ops")
        ),
    ],
)
def test_so_do_experts_over_ep_with_their_intermediate_dimension_over_tp(sizes, options):
    run_ranks(check_learning, 4, sizes, options, True, IN_PARTS)


def check_adding_up(rank, sizes, options, plan):
    """Backwards without zero_grad between them, some in no_sync, add up to what one process adds up."""
    mesh = weft.init_mesh(**sizes)
    replicas, place = mesh["dp"].size(), mesh["dp"].get_local_rank()
    plain = Mixture().double()
    inside = weft.parallelize(copy.deepcopy(plain), mesh["pp", "cp", "tp"], plan=plan)
    model = weft.DataParallel(inside, group=mesh["dp"], **options)
    of_plain, scale = dict(plain.named_parameters()), 1 if options.get("average", True) else replicas
    for step, reduces in enumerate([True, True, False, True, False, False, True]):
        if step == 5:
            model.zero_grad()
            plain.zero_grad()
        if step == 3 and not options.get("main_grad"):  # the order is recorded anew, and some keep what they have
            inside.layers[0].requires_grad_(False)
            with pytest.raises(ValueError, match="wait to be summed"):
                model(batch(step, replicas))
            inside.layers[0].requires_grad_(True)
        tokens = batch(step, replicas)
        with nullcontext() if reduces else model.no_sync():
            loss_of(model, tokens.split(2)[place]).backward()
        (scale * loss_of(plain, tokens)).backward()
        for name, parameter in inside.named_parameters() if reduces else ():
            main_grad = getattr(parameter, "main_grad", None)
            found = whole(parameter, parameter.grad if main_grad is None else main_grad.double())
            exact = 1e-8 if main_grad is None else 1e-5  # which is in fp32
            torch.testing.assert_close(found, of_plain[name].grad, rtol=exact, atol=exact / 100, msg=f"{name} {step}")


@pytest.mark.parametrize(
    ("sizes", "options", "plan"),
    [
        (dict(dp=2, ep=2), {}, "auto"),
        pytest.param(dict(dp=2, ep=2), dict(average=False), "auto", marks=pytest.mark.slow("data_parallel")),
        pytest.param(dict(dp=2, ep=2), dict(main_grad=True), "auto", marks=pytest.mark.slow("data_parallel")),
        pytest.param(dict(dp=3, ep=3), {}, "auto", marks=pytest.mark.slow("data_parallel")),
        pytest.param(dict(dp=4, ep=2), dict(bucket_mb=1e-3), "auto", marks=pytest.mark.slow("data_parallel")),
        pytest.param(dict(dp=2, tp=2, ep=2), {}, IN_PARTS, marks=pytest.mark.slow("data_parallel")),
        pytest.param(dict(dp=2, cp=2, ep=4), {}, "auto", marks=pytest.mark.slow("data_parallel")),
    ],
)
def test_backwards_add_up_without_no_sync(sizes, options, plan):
    run_ranks(check_adding_up, sizes["dp"] * sizes.get("tp", 1) * sizes.get("cp", 1), sizes, options, plan)


def check_products_added_to_main_grad(rank):
    """The kernels add an expert's product to main_grad themselves, before the parameter's hooks run."""
    mesh = weft.init_mesh(dp=2, ep=2)
    inside = weft.parallelize(MixtureBlock(), mesh["pp", "cp", "tp"], plan={"experts": "experts"})
    model = weft.DataParallel(inside, group=mesh["dp"], main_grad=True)
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(rank))
    once = {}
    with prefer("kernel"):
        for times in (1, 2, 3):
            model(x).square().sum().backward()
            once = once or {name: p.main_grad.clone() for name, p in inside.named_parameters()}
            for name, p in inside.named_parameters():
                torch.testing.assert_close(p.main_grad, times * once[name], rtol=1e-5, atol=1e-6, msg=name)


def test_so_do_products_that_kernels_add_to_main_grad():
    run_ranks(check_products_added_to_main_grad, 2)


def check_pipeline(rank, sizes, reduction):
    mesh = weft.init_mesh(**sizes)
    replicas, place = mesh["dp"].size(), mesh["dp"].get_local_rank()
    plain = Mixture().double()
    model = weft.parallelize(copy.deepcopy(plain), mesh["cp", "tp"])

    def loss(logits, tokens):
        total = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
        return total / (8 * replicas) if reduction == "sum" else total / 4  # of a micro-batch: one sequence

    pipe = weft.Pipeline(model, mesh, microbatches=2, loss=loss, reduction=reduction)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2, weight_decay=0.1)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1)
    of_plain = dict(plain.named_parameters())
    for step in range(10):
        tokens = batch(step, replicas)
        optimizer.zero_grad()
        mine = tokens.split(2)[place]
        pipe.step(mine, mine)
        reference.zero_grad()
        loss_of(plain, tokens).backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        assert torch.allclose(weft.clip_grad_norm_(pipe, 0.1), norm)
        optimizer.step()
        reference.step()
    own = {name: parameter for name, parameter in pipe.named_parameters() if parameter.numel()}
    assert any("experts" in name for name in own)
    for name, parameter in own.items():
        found, expected = whole(parameter, parameter), of_plain[name]
        assert torch.allclose(found, expected, 1e-6, 1e-8), f"{name} at the end: {(found - expected).abs().max()}"
    pipe.check_replicas()


@pytest.mark.slow("pipeline", "nn", "ops")
@pytest.mark.parametrize(
    ("sizes", "reduction"),
    [(dict(pp=2, dp=2, ep=2), "mean"), (dict(pp=2, dp=2, ep=2), "sum"), (dict(pp=2, tp=2), "mean")],
    ids=["ep", "ep-sum", "tp"],
)
def test_stages_with_experts_learn_what_one_process_learns(sizes, reduction):
    run_ranks(check_pipeline, 4, sizes, reduction)


def check_mesh(rank):
    mesh = weft.init_mesh(dp=4, ep=2)
    assert mesh.mesh_dim_names == ("pp", "dp", "cp", "tp") and mesh["dp"].size() == 4
    apart = expert_mesh(mesh["dp"])
    assert apart["ep"].mesh.tolist() == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert apart["edp"].mesh.tolist() == [rank % 2, rank % 2 + 2]
    assert expert_mesh(weft.init_mesh(dp=4)) is None
    for sizes in (dict(dp=4, ep=3), dict(dp=2, cp=2, ep=3), dict(cp=4, ep=2)):
        with pytest.raises(ValueError, match=r"ep=\d must divide dp=\d, or be cp=\d times a divisor of it"):
            weft.init_mesh(**sizes)
    over_cp = expert_mesh(weft.init_mesh(dp=2, cp=2, ep=4))
    assert over_cp["ep"].mesh.tolist() == [0, 1, 2, 3] and over_cp["edp"].size() == over_cp["cp"].size() == 1
    with pytest.raises(ValueError, match="ep=0 must be at least 1"):
        weft.init_mesh(dp=4, ep=0)
    with pytest.raises(ValueError, match="the plan splits no layer of experts"):
        weft.parallelize(nn.Sequential(nn.Linear(4, 4)), mesh)
    with pytest.raises(ValueError, match="3 elements cannot be split over 4 ranks"):
        few = nn.ModuleDict({"experts": Experts(3, 4, 4)})
        weft.parallelize(few, weft.init_mesh(dp=4, ep=4), plan={"experts": "experts"})


def test_ranks_of_dp_hold_experts_together_and_what_does_not_fit_is_refused():
    run_ranks(check_mesh, 4)


def check_explained(rank):
    tokens = batch(0, 1)
    for sizes, sent in ((dict(tp=2), 4096 * 6 * 4), (dict(dp=2, ep=2), 4096 * 2 * (2 * 6 * 4) // 2)):
        model = weft.parallelize(Mixture(), weft.init_mesh(**sizes))
        of_experts = [layer for layer in weft.explain(model).layers if "ParallelExperts" in layer.layer]
        assert len(of_experts) == 2 and of_experts[0].forward_bytes is None
        weft.verify(model, Mixture(), tokens)
        layer = next(layer for layer in weft.explain(model).layers if "ParallelExperts" in layer.layer)
        assert layer.forward_bytes == sent, (sizes, layer.forward_bytes)
        load = [int(n) for n in layer.layer.rpartition("last call ")[2].split(",")]
        total = weft.all_reduce(torch.tensor(sum(load)))
        assert total == tokens.numel() * 2 * sizes.get("dp", 1), "every token has two experts"


def test_explain_counts_what_travels_and_the_load_and_verify_finds_the_gradients_right():
    run_ranks(check_explained, 2)


def check_checkpoint(rank, folder):
    plain = Mixture()
    plan = {"layers.*.experts": "experts"}
    model = weft.parallelize(copy.deepcopy(plain), weft.init_mesh(dp=4, ep=2), plan=plan)
    weft.save_checkpoint(model, None, folder)
    tokens = batch(0, 4)
    for sizes, other_plan in (
        (dict(dp=2, tp=2, ep=2), plan),
        (dict(dp=2, tp=2, ep=2), IN_PARTS),
        (dict(tp=4), IN_PARTS),
    ):
        other = weft.parallelize(Mixture().apply(scramble), weft.init_mesh(**sizes), plan=other_plan)
        optimizer = torch.optim.AdamW(other.parameters(), lr=0.0)
        other(tokens).sum().backward()
        optimizer.step()
        weft.load_checkpoint(other, None, folder)
        inside = getattr(other, "module", other)
        for name, tensor in weft.full_state_dict(inside).items():
            assert torch.equal(tensor, plain.state_dict()[name]), name
        weft.save_checkpoint(other, optimizer, f"{folder}/again")
        moments = dict(zip(dict(inside.named_parameters()), map(optimizer.state.get, other.parameters()), strict=True))
        known = {name: state["exp_avg"].clone() for name, state in moments.items()}
        for state in optimizer.state.values():
            state["exp_avg"].zero_()
        weft.load_checkpoint(other, optimizer, f"{folder}/again")
        for name, parameter in inside.named_parameters():
            assert torch.equal(optimizer.state[parameter]["exp_avg"], known[name]), name
        files = weft.load_safetensors(Mixture().apply(scramble), f"{folder}/again", group=None)
        for name, tensor in files.state_dict().items():
            assert torch.equal(tensor, plain.state_dict()[name]), name


def scramble(module):
    for parameter in module.parameters(recurse=False):
        parameter.data.add_(1)


def test_a_checkpoint_moves_to_another_ep_and_to_experts_in_parts(tmp_path):
    run_ranks(check_checkpoint, 4, str(tmp_path))
