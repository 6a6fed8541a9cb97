"""Mistakes around a model that keep every shape right, or end in another library's words: each is refused by name."""

import contextlib
import copy
import io
import re
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

import weft
from weft.testing.ranks import run_ranks

CLASSES = 12


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, CLASSES)).to(dtype)


def batch(seed=1, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 8, generator=generator).to(dtype), torch.randint(CLASSES // 2, (8,), generator=generator)


def refused(call, message, kind=Exception):
    with pytest.raises(kind, match=message):
        call()


@contextlib.contextmanager
def warned():
    """Collect the texts of warnings."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(one.message) for one in caught]


# Losses


def losses(rank):
    mesh = weft.init_mesh(tp=2)
    column, pair = {"2": "column"}, {"0": "column", "2": "row"}
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x, y = batch(dtype=dtype)
        model = weft.parallelize(net(dtype), mesh, plan=column)
        refused(lambda m=model, x=x, y=y: F.cross_entropy(m(x), y).backward(), "took them for all", ValueError)
        model = weft.parallelize(net(dtype), mesh, plan=pair)
        other = y if rank == 0 else (y + 1) % CLASSES
        refused(lambda m=model, x=x, y=other: F.cross_entropy(m(x), y).backward(), "the same targets", ValueError)
    x, y = batch()
    whole = weft.parallelize(net(), mesh, plan=pair)
    dist.barrier()
    refused(lambda: weft.parallel_cross_entropy(whole(x), y), "the same logits, of 12 classes", ValueError)


def first_losses(rank, which):
    """Each run has a group that has not compared its first loss."""
    weft.init_mesh(tp=2)
    x, y = batch()
    part, other = net()(x).chunk(2, -1)[rank], y if rank == 0 else y.flip(0)
    if which == "logits":
        refused(lambda: weft.parallel_cross_entropy(part, other), "the targets differ between rank 0 and rank 1")
    elif which == "linear":
        weight = torch.randn(6, 8, generator=torch.Generator().manual_seed(rank))
        refused(lambda: weft.parallel_linear_cross_entropy(x, weight, other), "the targets differ")
    else:  # a head that starts at zero has equal logits, and is right
        assert weft.parallel_cross_entropy(torch.zeros(8, 6), y).item() == pytest.approx(torch.tensor(12.0).log())


def right_losses(rank):
    mesh = weft.init_mesh(tp=2)
    x, y = batch()
    with warned() as texts:
        for plan, loss in (
            ({"2": "column"}, weft.parallel_cross_entropy),
            ({"2": "column"}, lambda z, _: z.square().sum()),
            ({"0": "column", "2": "row"}, F.cross_entropy),
        ):
            model = weft.parallelize(net(), mesh, plan=plan)
            for _ in range(5):
                loss(model(x), y).backward()
            assert not model._forward_hooks or all(
                "SameLoss" not in repr(hook) for hook in model._forward_hooks.values()
            )
        own = {name: {"style": style, "sequence_parallel": True} for name, style in (("0", "column"), ("2", "row"))}
        model = weft.parallelize(net(), mesh, plan=own)
        F.cross_entropy(model(x.chunk(2)[rank]), y.chunk(2)[rank]).backward()  # this rank's part of the positions
    assert not texts


def over_cp(rank):
    model = weft.parallelize(net(), weft.init_mesh(cp=2))
    x, y = (t.expand(2, *t.shape) for t in batch())
    with warned() as texts:
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    assert not texts
    y = y.clone()
    y[:, -1] += rank
    with warned() as texts:
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    assert len(texts) == 1 and "ranks 0 and 1" in texts[0] and "the same targets" in texts[0]


def test_a_loss_that_takes_parts_for_the_whole_or_other_targets_is_refused():
    run_ranks(losses, 2)


@pytest.mark.parametrize("which", ["logits", "linear", "equal logits"])
def test_the_first_parallel_loss_compares_what_it_gets(which):
    run_ranks(first_losses, 2, which)


def test_right_losses_pass_in_silence():
    run_ranks(right_losses, 2)


def test_other_targets_over_cp_are_warned_of():
    run_ranks(over_cp, 2)


# Batches and files


def same_batches(rank, sizes, options):
    mesh = weft.init_mesh(**sizes)
    for seed, expected in ((1, 1), (1 + mesh["dp"].get_local_rank(), 0)):
        model = weft.parallelize(net(), mesh, **options)
        with warned() as texts:
            for _ in range(2):
                x, y = batch(seed)
                if isinstance(model, weft.Pipeline):
                    model.step(x, y)
                else:
                    F.cross_entropy(model(x), y).backward()
        assert sum("got the same batch" in text for text in texts) == expected, (options, texts)


@pytest.mark.parametrize(
    "sizes, options",
    [
        ({"dp": 2}, {}),
        ({"dp": 2}, {"zero": 1}),
        ({"dp": 2}, {"zero": 3}),
        ({"dp": 2}, {"invariant": 2}),
        ({"dp": 2}, {"pipeline": {"microbatches": 2, "loss": F.cross_entropy}}),
    ],
    ids=["dp", "zero 1", "zero 3", "units", "pipeline"],
)
def test_one_batch_on_all_ranks_of_dp_is_warned_of_once(sizes, options):
    run_ranks(same_batches, 2, sizes, options)


def saved(rank):
    model = weft.parallelize(net(), weft.init_mesh(tp=2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            torch.save({"model": model.state_dict()}, io.BytesIO())
        assert len(caught) == 1 and "weft.full_state_dict" in str(caught[0].message)
        copy.deepcopy(model.state_dict())
        torch.save(weft.full_state_dict(model), io.BytesIO())
        assert len(caught) == 1


def test_a_saved_part_of_a_model_is_warned_of_once():
    run_ranks(saved, 2)


# Pipelines


class OwnLoss(nn.Module):
    def __init__(self, scalars=1):
        super().__init__()
        self.layers, self.scalars = net(), scalars

    def forward(self, x, y):
        logits = self.layers(x)
        return logits, *[F.cross_entropy(logits, y)] * self.scalars


def tuples(rank, schedule):
    model, (x, y) = OwnLoss(), batch()
    _, expected = model(x, y)
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    gradients = dict(zip(dict(model.named_parameters()), gradients, strict=True))
    pipe = weft.parallelize(model, weft.init_mesh(pp=2), pipeline={"microbatches": 2, "schedule": schedule})
    torch.testing.assert_close(pipe.step({"x": x, "y": y}), expected.detach())
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name])
    torch.testing.assert_close(pipe.evaluate({"x": x, "y": y}), expected.detach())
    other = weft.parallelize(OwnLoss(2), weft.init_mesh(pp=2), pipeline={"microbatches": 2})
    refused(lambda: other.step({"x": x, "y": y}), "without a scalar loss", ValueError)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_a_pipeline_takes_the_only_scalar_of_an_output_as_the_loss(schedule):
    run_ranks(tuples, 2, schedule)


def one_stage(rank, sizes, options):
    mesh, (x, y) = weft.init_mesh(**sizes), batch()
    loss = F.cross_entropy(net()(x), y)
    pipe = weft.parallelize(net(), mesh, pipeline={"microbatches": 2, "loss": F.cross_entropy}, **options)
    dp = mesh["dp"]
    mine = [t.chunk(dp.size())[dp.get_local_rank()] for t in (x, y)]
    for _ in range(2):
        pipe.zero_grad()
        torch.testing.assert_close(pipe.step(*mine), loss.detach())
    plain = net()
    F.cross_entropy(plain(x), y).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    assert float(weft.clip_grad_norm_(pipe.parameters(), 1.0)) == pytest.approx(float(norm), rel=1e-5)


@pytest.mark.parametrize(
    "sizes, options",
    [({"pp": 1}, {}), ({"dp": 2}, {}), ({"tp": 2}, {}), ({"dp": 2}, {"zero": 3}), ({"dp": 2, "tp": 2}, {})],
    ids=str,
)
def test_one_script_with_a_pipeline_serves_meshes_without_stages(sizes, options):
    run_ranks(one_stage, max(1, 2 ** sum(size > 1 for size in sizes.values())), sizes, options)


def in_inference_mode(rank):
    mesh, (x, y), options = weft.init_mesh(pp=2), batch(), {"microbatches": 2, "loss": F.cross_entropy}
    expected = F.cross_entropy(net()(x), y).detach()
    model = net()
    with torch.inference_mode():
        pipe = weft.parallelize(model, mesh, pipeline=options)
        made_inside = net()
    torch.testing.assert_close(pipe.step(x, y), expected)
    refused(lambda: weft.Pipeline(made_inside, mesh, **options), "made inside of torch.inference_mode", ValueError)


def test_a_pipeline_may_be_made_inside_of_inference_mode():
    run_ranks(in_inference_mode, 2)


# The state of the model around the split


def behind_a_split(rank):
    mesh, (x, y) = weft.init_mesh(tp=2), batch()
    model = net()
    held = F.cross_entropy(model(x), y)  # its graph knows the whole parameters
    split = weft.parallelize(model, mesh, plan={"0": "column", "2": "row"})
    F.cross_entropy(split(x), y).backward()
    plain = net()
    F.cross_entropy(plain(x), y).backward()
    torch.testing.assert_close(split[2].weight.grad, plain[2].weight.grad.chunk(2, 1)[rank])
    del held
    parametrizations = torch.nn.utils.parametrizations
    for change in (
        parametrizations.spectral_norm,
        parametrizations.weight_norm,
        lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    ):
        model = weft.parallelize(net(), mesh)
        change(model[0])
        refused(lambda m=model: m(x), "by a parametrization or a pruning", ValueError)
    model = weft.parallelize(net(), mesh)
    values = dict(model.named_parameters())

    def loss(parameters):
        return torch.func.functional_call(model, parameters, (x,)).sum()

    refused(lambda: torch.func.grad(loss)(values), "inside of a transform of torch.func", RuntimeError)


def test_what_is_done_to_a_split_model_is_right_or_refused():
    run_ranks(behind_a_split, 2)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 8)
        self.layers = net()

    def forward(self, x):
        return self.layers(x + self.table.weight.sum(0))


def behind_dp(rank):
    model = weft.DataParallel(Critic())
    x = batch(rank)[0].requires_grad_()
    model(x).sum().backward()
    model.requires_grad_(False)
    model(x).sum().backward()  # a generator's turn
    model.requires_grad_(True)
    model.zero_grad()
    model(x).sum().backward()
    copies = weft.comm.registry.communicator(None).all_gather_object(model.module.layers[0].weight.grad)
    assert torch.equal(*copies) and copies[0].any()
    model.module.table.weight.data = torch.zeros(10, 8)
    refused(lambda: model(x), r"'table.weight' is torch.float32 \[10, 8\], and was torch.float32 \[8, 8\]", ValueError)


def test_a_frozen_wrap_passes_gradients_on_and_a_resized_parameter_is_refused():
    run_ranks(behind_dp, 2)


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.text = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))])
        self.image = nn.ModuleList([nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 8))])

    def forward(self, x, image):
        x = self.text[0](x)
        return self.image[0](x) if image else x


def skipped(rank):
    model = weft.parallelize(Towers(), weft.init_mesh(dp=2), zero=3)
    x = batch(rank)[0]
    model(x, True).sum().backward()
    name = ("image.0", "text.0")[rank]
    refused(lambda: model(x, rank == 0).sum().backward(), f"gathers the parameters of '{re.escape(name)}'")


def test_a_block_that_one_rank_skips_under_zero_3_is_named():
    run_ranks(skipped, 2)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(2)])

    def forward(self, x):
        for block in self.blocks:
            y = block(x)  # a view, as a linear layer with a bias returns it
            y += x
            x = y
        return x


def written_to(rank):
    plain, model = Residual(), weft.parallelize(Residual(), weft.init_mesh(dp=2), zero=3)
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))
    (plain(x).square().sum() / 2).backward()
    with warned() as texts:
        for _ in range(2):
            model.zero_grad()
            model(x[rank : rank + 1]).square().sum().backward()
    assert not texts
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


def test_a_blocks_output_under_zero_3_may_be_written_to():
    run_ranks(written_to, 2)


def copied(rank):
    torch.manual_seed(0)
    model = weft.parallelize(nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2))),
                             weft.init_mesh(cp=2), zero=3)  # fmt: skip
    made, x = copy.deepcopy(model), batch()[0].unsqueeze(0)
    for _ in range(4):
        for each in (model, made):
            each.zero_grad()
            each(x).square().sum().backward()
        for ours, theirs in zip(made.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad.full_tensor())


def test_a_copy_of_a_model_with_zero_3_over_cp_runs_as_the_model():
    run_ranks(copied, 2)


def experts_over_dp_alone(rank):
    mesh = weft.init_mesh(dp=2, cp=2, ep=2)
    refused(lambda: weft.parallelize(net(), mesh, zero=3), r"use init_mesh\(ep=4\), a mesh without cp", ValueError)


def test_zero_3_over_cp_says_which_meshes_of_experts_it_takes():
    run_ranks(experts_over_dp_alone, 4)


# Messages


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads, self.query, self.output = 4, nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        q = self.query(x).view(*x.shape[:2], self.heads, 4).transpose(1, 2)
        return self.output(F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2))


def messages(rank, path):
    mesh = weft.init_mesh(tp=2)
    tp, x = mesh["tp"], batch()[0]
    state, on_meta = net().state_dict(), net().to("meta")
    torch.save(state, path / f"{rank}.pt")
    own = {"query": "column", "output": "row"}
    for call, kind, message in (
        (lambda: weft.parallelize(Attention(), tp, plan=own)(torch.ones(2, 5, 16)), RuntimeError,
         r"query, output of Attention are split, .* \(heads\).*\"attributes\""),
        (lambda: weft.parallelize(net(torch.bfloat16 if rank else torch.float32), tp), ValueError,
         r"0.weight is torch.float32 \[16, 8\] on rank 0 and torch.bfloat16"),
        (lambda: weft.load_checkpoint(net(), None, path / f"{rank}.pt"), weft.CheckpointError,
         "no safetensors file, but one of torch.save"),
        (lambda: weft.RowParallelLinear(16, 8, group=tp)(torch.ones(2, 16)), ValueError, "with split_input=True"),
        (lambda: weft.parallelize(on_meta, tp)(x), ValueError, "0.weight is on the meta device"),
        (lambda: weft.parallelize(net(), mesh, pipeline={"micro_batches": 2}), TypeError,
         "no option 'micro_batches'; it has schedule, microbatches"),
        (lambda: weft.all_reduce([x]), TypeError, "all_reduce: x must be a tensor, and not a list"),
        (lambda: weft.clip_grad_norm_([[x]], 1.0), TypeError, "must be a tensor, and not a list"),
        (lambda: weft.full_state_dict(state), TypeError, "takes a torch.nn.Module, and not a OrderedDict"),
        (lambda: weft.save_checkpoint(state, None, path / "x"), TypeError, "takes a torch.nn.Module"),
        (lambda: weft.load_checkpoint(state, None, path / "x"), TypeError, "takes a torch.nn.Module"),
        (lambda: weft.state_hash(state), TypeError, "takes a torch.nn.Module"),
        (lambda: weft.check_replicas(state), TypeError, "takes a torch.nn.Module"),
        (lambda: weft.parallelize([nn.Linear(2, 2)], tp), TypeError, "parallelize takes a torch.nn.Module"),
        (lambda: weft.DataParallel(state), TypeError, "DataParallel takes a torch.nn.Module"),
        (lambda: weft.Pipeline(state, mesh, microbatches=2), TypeError, "Pipeline takes a torch.nn.Module"),
        (lambda: weft.LayerSplit(state, ["cpu"]), TypeError, "LayerSplit takes a torch.nn.Module"),
        (lambda: weft.DataParallel(net().requires_grad_(False)), ValueError, "leave dp out"),
        (lambda: weft.init_mesh(tp=2.0), ValueError, "tp=2.0 must be a whole number"),
        (lambda: weft.init_mesh(tp="2"), ValueError, "tp='2' must be a whole number"),
        (lambda: weft.init_mesh(tp=2, device_type="gpu"), ValueError, "'gpu' is not one of 'cpu', 'cuda'"),
    ):  # fmt: skip
        refused(call, message, kind)
        dist.barrier()
    if not torch.cuda.is_available():
        refused(lambda: weft.init_mesh(tp=2, device_type="cuda"), "torch sees no GPU here", ValueError)


def test_messages_say_what_to_change(tmp_path):
    run_ranks(messages, 2, tmp_path)
