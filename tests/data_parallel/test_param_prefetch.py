"""overlap_param_gather=True: parameters may be on their way after step(), and nobody sees one that has not come."""

from contextlib import contextmanager

import pytest
import torch
from replicas_of_mlp import batch, loss_of, mlp
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import weft
from weft.data_parallel.bucket_comm import OnEngine
from weft.testing.ranks import run_ranks


@contextmanager
def nothing_comes_by_itself():
    """Parts that were sent lie aside until somebody waits: who does not, sees old parameters however fast ranks are."""
    gather, waited = OnEngine.gather, []

    def aside(self, part, parts, overlap):
        received = [torch.empty_like(one) for one in parts]
        gather(self, part, received, overlap=False)

        def wait():
            waited.append(len(waited))
            torch._foreach_copy_(parts, received)

        return wait

    OnEngine.gather = aside
    try:
        yield waited
    finally:
        OnEngine.gather = gather


class Attends(nn.Module):
    """nn.MultiheadAttention uses the weight of its out_proj without calling it."""

    def __init__(self):
        super().__init__()
        self.up, self.attention = nn.Linear(13, 16), nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x):
        x = self.up(x)[None]
        return self.attention(x, x, x)[0]


class ReadsFirst(nn.Module):
    """Reads a weight of a child before it calls it, and ties another child's to it."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.tied = nn.Linear(13, 13), nn.Linear(13, 13), nn.Linear(13, 13, bias=False)
        self.tied.weight = self.second.weight

    def forward(self, x):
        return self.tied(self.second(x @ self.second.weight.T) + self.first(x))


class Recurs(nn.Module):
    """nn.LSTM keeps a list of its parameters."""

    def __init__(self):
        super().__init__()
        self.lstm, self.out = nn.LSTM(13, 11), weight_norm(nn.Linear(11, 7))

    def forward(self, x):
        return self.out(self.lstm(x)[0])


class Switches(nn.Module):
    """Takes another way in every other call, with a child that the first did not call."""

    def __init__(self):
        super().__init__()
        self.ways, self.calls = nn.ModuleList([nn.Linear(13, 13) for _ in range(3)]), 0

    def forward(self, x):
        self.calls += 1
        way = nn.functional.linear(x, self.ways[1].weight) if self.calls % 2 else self.ways[1](x)
        return self.ways[0](x) + way + (self.ways[2](x) if self.calls % 2 else x @ self.ways[2].weight)


class Encodes(nn.Module):
    """In evaluation nn.TransformerEncoderLayer takes a way of its own, which calls none of its children."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(13, 16)
        self.layer = nn.TransformerEncoderLayer(16, 4, 29, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.layer(self.up(x)[None])


def kinds_of_models(rank, bucket_mb):
    for kind in (mlp, Attends, ReadsFirst, Recurs, Switches, Encodes):
        same_as_at_once(rank, kind, bucket_mb)


def same_as_at_once(rank, kind, bucket_mb):
    def model_with(overlap):
        torch.manual_seed(0)
        model = weft.DataParallel(
            kind(),
            shard_optimizer=True,
            overlap_param_gather=overlap,
            bucket_mb=bucket_mb,
            unused_parameters="zero",
        )
        return model, model.optimizer(torch.optim.AdamW, lr=1e-2)

    pairs = [model_with(False), model_with(True)]
    with nothing_comes_by_itself():
        for step in range(6):
            losses = []
            for model, optimizer in pairs:
                if step % 3 == 2:
                    model.eval()
                    with torch.no_grad():
                        losses.append(loss_of(model(batch(50 + step, rank))))
                        losses.append(loss_of(model.module(batch(60 + step, rank))))
                    model.train()
                optimizer.zero_grad()
                loss = loss_of(model(batch(step, rank)))
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            at_once, late = losses[: len(losses) // 2], losses[len(losses) // 2 :]
            assert torch.equal(torch.stack(late), torch.stack(at_once)), f"{kind.__name__}, step {step}"
        plain, late = (list(model.parameters()) for model, _ in pairs)
        assert all(torch.equal(*pair) for pair in zip(plain, late, strict=True)), kind


@pytest.mark.parametrize(("world", "bucket_mb"), [(2, 1e-5), (3, 1e-3)])
def test_no_forward_sees_a_parameter_that_has_not_come(world, bucket_mb):
    run_ranks(kinds_of_models, world, bucket_mb)


def as_they_are_needed(rank):
    """What is still under way when each layer begins."""
    model = weft.DataParallel(mlp(), shard_optimizer=True, overlap_param_gather=True, bucket_mb=1e-5)
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
    seen = []
    with nothing_comes_by_itself() as waited:
        loss_of(model(batch(0, rank))).backward()
        optimizer.step()
        for layer in (model.module[0], model.module[2], model.module[4]):
            layer.register_forward_hook(lambda *_: seen.append(len(waited)))
        model(batch(1, rank))
    assert seen == [2, 4, 6], "a weight and a bias each, in buckets of their own"


def test_a_layer_waits_for_its_own_parameters_alone():
    run_ranks(as_they_are_needed, 2)


def looked_at_from_outside(rank, path):
    for look in (
        lambda model: dict(model.named_parameters()),
        lambda model: dict(zip(dict(model.module.named_parameters()), model.parameters(), strict=True)),
        lambda model: model.state_dict(),
        lambda model: model.module.state_dict(),
        lambda model: model.module[4].state_dict(),
        lambda model: (model.wait_for_parameters(), dict(model.module.named_parameters()))[1],
        lambda model: (
            (weft.save_checkpoint(model, None, path), weft.load_checkpoint(model, None, path))
            and dict(model.module.named_parameters())
        ),
    ):
        models = [mlp(), mlp()]
        for late, module in enumerate(models):
            model = weft.DataParallel(module, shard_optimizer=True, overlap_param_gather=bool(late))
            optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
            with nothing_comes_by_itself():
                loss_of(model(batch(0, rank))).backward()
                optimizer.step()
                models[late] = {name.removeprefix("module."): tensor for name, tensor in look(model).items()}
        for name, tensor in models[0].items():
            assert torch.equal(models[1][name], tensor), name


def test_who_asks_the_model_for_its_parameters_gets_them_whole(tmp_path):
    run_ranks(looked_at_from_outside, 2, tmp_path / "saved")


def steps_without_a_forward(rank):
    """Two steps on end, and parameters that are loaded while others are under way."""
    pairs = []
    for late in (False, True):
        model = weft.DataParallel(mlp(), shard_optimizer=True, overlap_param_gather=late, bucket_mb=1e-5)
        optimizer = model.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
        with nothing_comes_by_itself():
            loss_of(model(batch(0, rank))).backward()
            optimizer.step()
            optimizer.step()
            loaded = {name: tensor.clone().mul_(2) for name, tensor in model.module.state_dict().items()}
            optimizer.step()
            model.module.load_state_dict(loaded)
            loss_of(model(batch(1, rank))).backward()
            optimizer.step()
            pairs.append([tensor.clone() for tensor in model.state_dict().values()])
    assert all(torch.equal(*pair) for pair in zip(*pairs, strict=True))


def test_steps_and_loads_wait_for_what_is_under_way():
    run_ranks(steps_without_a_forward, 2)


def interrupted():
    raise KeyboardInterrupt


def broken_off(rank):
    """Ctrl-C while forward waits: the next forward waits again, and reads nothing old."""
    pairs = []
    for late in (False, True):
        model = weft.DataParallel(mlp(), shard_optimizer=True, overlap_param_gather=late)
        optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
        with nothing_comes_by_itself():
            loss_of(model(batch(0, rank))).backward()
            optimizer.step()
            if late:
                under_way = model._shards.under_way
                (part,) = under_way
                ways = iter([interrupted, under_way[part]])
                under_way[part] = lambda ways=ways: next(ways)()
                with pytest.raises(KeyboardInterrupt):
                    model(batch(1, rank))
            pairs.append(model(batch(1, rank)).detach())
    assert torch.equal(*pairs)


def test_a_wait_that_is_broken_off_is_not_forgotten():
    run_ranks(broken_off, 2)


def refused(rank):
    with pytest.raises(ValueError, match="needs shard_optimizer=True"):
        weft.DataParallel(mlp(), overlap_param_gather=True)
    with pytest.raises(ValueError, match="is compiled"):
        weft.DataParallel(torch.compile(mlp()), shard_optimizer=True, overlap_param_gather=True)
    model = weft.DataParallel(mlp(), shard_optimizer=True, overlap_param_gather=True)
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
    loss_of(model(batch(0, rank))).backward()
    optimizer.step()
    model.module[2].compile()
    with pytest.raises(ValueError, match="is compiled"):
        model(batch(0, rank))
    model.wait_for_parameters()  # a rank that leaves takes its parts with it


def test_modules_that_cannot_wait_are_refused():
    run_ranks(refused, 2)
