"""shard_optimizer=True steps as the whole optimizer does, to the bit, and keeps a W-th of its state."""

import pytest
import torch
import torch.distributed as dist
from replicas_of_mlp import batch, loss_of, mlp
from torch import nn

import weft
from weft.data_parallel.sharded_optimizer import piece_of
from weft.sharding.sharded_grad import is_elsewhere
from weft.testing.ranks import run_ranks

ELEMENTWISE = {
    torch.optim.SGD: dict(lr=0.1, momentum=0.9, weight_decay=0.01),
    torch.optim.AdamW: dict(lr=1e-2),
    torch.optim.RMSprop: dict(lr=1e-3, centered=True),
    torch.optim.Adagrad: dict(lr=1e-2),
    torch.optim.NAdam: dict(lr=1e-3),
}


def same_steps(rank, options):
    for kind, settings in ELEMENTWISE.items():
        whole, sharded = (weft.DataParallel(mlp(), shard_optimizer=on, **options) for on in (False, True))
        theirs, ours = kind(whole.parameters(), **settings), sharded.optimizer(kind, **settings)
        assert type(ours) is kind
        schedule = torch.optim.lr_scheduler.StepLR(ours, 2, gamma=0.5), torch.optim.lr_scheduler.StepLR(theirs, 2, 0.5)
        for step in range(6):
            for model, optimizer in ((whole, theirs), (sharded, ours)):
                optimizer.zero_grad()
                if step % 2:
                    with model.no_sync():
                        loss_of(model(batch(100 + step, rank))).backward()
                loss_of(model(batch(step, rank))).backward()
                assert all(is_elsewhere(p.grad) == (model is sharded) for p in model.parameters())
            torch.testing.assert_close(sharded.grad_norm, whole.grad_norm, rtol=1e-12, atol=0)
            for model, optimizer in ((whole, theirs), (sharded, ours)):
                if step == 3:
                    model.clip_grad_norm_(0.01)
                optimizer.step()
            for each in schedule:
                each.step()
            for mine, expected in zip(sharded.parameters(), whole.parameters(), strict=True):
                if step < 3:  # the norms' last bits may differ, and so may what is clipped by them
                    assert torch.equal(mine, expected), kind
                torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("world", "bucket_mb"), [(1, 25), (2, 1e-3), (3, 25), (4, 1e-4)])
def test_a_sharded_optimizer_steps_as_the_whole_one(world, bucket_mb):
    run_ranks(same_steps, world, {"bucket_mb": bucket_mb})


def test_what_travels_may_be_narrower():
    run_ranks(same_steps, 2, {"wire_dtype": torch.bfloat16})


def a_share_each(rank):
    """Bytes of Adam's state on this rank, of all of it."""
    module = nn.Sequential(nn.Embedding(500, 64), nn.Linear(64, 64), nn.Linear(64, 500))
    model = weft.DataParallel(module, shard_optimizer=True)
    optimizer = model.optimizer(torch.optim.Adam)
    model(torch.arange(8)).square().mean().backward()
    optimizer.step()
    held = sum(value.numel() for state in optimizer.state.values() for value in state.values() if value.dim())
    return held / (2 * sum(parameter.numel() for parameter in module.parameters()))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_each_rank_keeps_its_part_of_the_state(world):
    shares = run_ranks(a_share_each, world)
    assert sum(shares) == pytest.approx(1, abs=1e-9)
    assert max(shares) <= 1.05 / world


def groups_and_pieces(rank):
    world = dist.get_world_size()
    model = weft.DataParallel(mlp(), shard_optimizer=True, bucket_mb=1e-3)
    biases = [parameter for name, parameter in model.named_parameters() if name.endswith("bias")]
    others = [parameter for name, parameter in model.named_parameters() if not name.endswith("bias")]
    optimizer = model.optimizer(torch.optim.SGD, [{"params": biases, "lr": 0.0}, {"params": others}], lr=0.1)
    before = {name: parameter.detach().clone() for name, parameter in model.module.named_parameters()}
    loss_of(model(batch(0, rank))).backward()
    optimizer.step()
    for name, parameter in model.module.named_parameters():
        assert torch.equal(parameter, before[name]) == name.endswith("bias")
    covered = {name: torch.zeros(parameter.numel()) for name, parameter in before.items()}
    for group in optimizer.param_groups:
        for piece in group["params"]:
            part = piece_of(piece)
            assert piece.numel() == part.stop - part.start
            assert torch.equal(part.parameter.view(-1)[part.start : part.stop], piece)
            covered[part.name][part.start : part.stop] += 1
    for count in covered.values():
        dist.all_reduce(count)
        assert (count == 1).all(), "every element is on one rank"
    assert piece_of(before["0.weight"]) is None and world == 3


def test_groups_keep_their_options_and_pieces_know_their_place():
    run_ranks(groups_and_pieces, 3)


def twice_without_zeroing(rank, bucket_mb):
    """Reduced gradients add up until they are zeroed, as unsharded ones do."""
    models = [weft.DataParallel(mlp(), shard_optimizer=on, bucket_mb=bucket_mb) for on in (False, True)]
    optimizers = [torch.optim.SGD(models[0].parameters(), lr=0.1), models[1].optimizer(torch.optim.SGD, lr=0.1)]
    for model, optimizer in zip(models, optimizers, strict=True):
        loss_of(model(batch(0, rank))).backward()
        loss_of(model(batch(1, rank))).backward()
        optimizer.step()
        model.zero_grad()
        loss_of(model(batch(2, rank))).backward()
        optimizer.step()
    for mine, expected in zip(models[1].parameters(), models[0].parameters(), strict=True):
        torch.testing.assert_close(mine, expected)


@pytest.mark.parametrize("bucket_mb", [25, 1e-5])  # of many parameters, and of one: no rank's piece is empty
@pytest.mark.parametrize("world", [1, 2, 3])
def test_reduced_gradients_add_up_until_they_are_zeroed(world, bucket_mb):
    run_ranks(twice_without_zeroing, world, bucket_mb)


def zeroed_in_part(rank):
    """An optimizer zeroes what it steps; what others have goes on adding up."""
    models = [weft.DataParallel(mlp(), shard_optimizer=on) for on in (False, True)]
    first = [[p for name, p in model.named_parameters() if ".0." in name] for model in models]
    rest = [[p for name, p in model.named_parameters() if ".0." not in name] for model in models]
    options = dict(lr=0.1, momentum=0.5)
    pairs = [
        [torch.optim.SGD(first[0], **options), torch.optim.SGD(rest[0], **options)],
        [models[1].optimizer(torch.optim.SGD, part[1], **options) for part in (first, rest)],
    ]
    for model, (often, seldom) in zip(models, pairs, strict=True):
        for step in range(4):
            often.zero_grad()
            loss_of(model(batch(step, rank))).backward()
            often.step()
            if step % 2:
                seldom.step()
                seldom.zero_grad(set_to_none=step == 1)
    for mine, expected in zip(models[1].parameters(), models[0].parameters(), strict=True):
        torch.testing.assert_close(mine, expected)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_optimizers_of_some_of_the_parameters_zero_theirs_alone(world):
    run_ranks(zeroed_in_part, world)


def masters(rank):
    """bf16 parameters stepped in fp32: steps too small for bf16 are not lost."""
    model = weft.DataParallel(mlp(torch.bfloat16), shard_optimizer=True, main_grad=True)
    optimizer = model.optimizer(torch.optim.SGD, lr=1e-4)
    wide = mlp(torch.bfloat16).float()
    for step in range(20):
        optimizer.zero_grad()
        loss_of(model(batch(0, rank).bfloat16())).backward()
        assert all(is_elsewhere(p.grad) and not p.main_grad.any() for p in model.parameters())
        pieces = [piece for group in optimizer.param_groups for piece in group["params"]]
        assert all(piece.dtype == piece.grad.dtype == torch.float32 for piece in pieces)
        optimizer.step()
        if step == 0:
            for piece in pieces:
                part = piece_of(piece)
                assert torch.equal(part.parameter.view(-1)[part.start : part.stop], piece.bfloat16())
    moved = sum(float((piece - piece.bfloat16().float()).abs().sum()) for piece in pieces)
    assert moved > 0, "the fp32 copies hold more than bf16 can"
    model.load_state_dict({f"module.{name}": value for name, value in wide.bfloat16().state_dict().items()})
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert all(torch.equal(piece, piece.bfloat16().float()) for piece in pieces), "loaded values are stepped from"
    for mine, loaded in zip(model.parameters(), wide.parameters(), strict=True):
        assert torch.equal(mine, loaded)


def test_parameters_of_bf16_are_stepped_in_fp32():
    run_ranks(masters, 2)


def made(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def refused(rank):
    model = weft.DataParallel(mlp(), shard_optimizer=True)
    for kind in (torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.SparseAdam):
        with pytest.raises(TypeError, match=f"{kind.__name__} is not known to update each element by itself"):
            model.optimizer(kind)

    with pytest.raises(TypeError, match="made is not known to update"):
        model.optimizer(made)

    class Own(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    with pytest.raises(TypeError, match="pass elementwise=True"):
        model.optimizer(Own, lr=0.1)
    assert isinstance(model.optimizer(Own, lr=0.1, elementwise=True), Own)
    with pytest.raises(ValueError, match="is for shard_optimizer=True"):
        weft.DataParallel(mlp()).optimizer(torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="shard_optimizer=False"):
        model.register_comm_hook(None, lambda state, bucket: None)
    stranger = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="not of the wrapped module"):
        model.optimizer(torch.optim.SGD, [stranger], lr=0.1)


def test_what_a_part_cannot_be_stepped_by_is_refused():
    run_ranks(refused, 2)


def not_finite(rank):
    model = weft.DataParallel(mlp(), shard_optimizer=True)
    model.optimizer(torch.optim.SGD, lr=0.1)
    (loss_of(model(batch(0, rank))) + model.module[4].bias.sum() * (float("nan") if rank == 1 else 1)).backward()
    assert bool(model.found_nonfinite) and list(model.nonfinite_parameters()) == ["4.bias"]


def test_a_gradient_that_is_not_finite_is_named_on_every_rank():
    run_ranks(not_finite, 3)
