"""clip_grad_norm_: the norm of the whole model's gradient, however it lies on the ranks, and the clipping that follows."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import weft
from weft.sharding.shard import shard_of
from weft.testing.models import LLAMA_PLAN, Llama
from weft.testing.ranks import run_ranks

NORMS = (2.0, 1.0, 3.0, math.inf)


def model_of(tied=True):
    torch.manual_seed(0)
    return Llama(tied=tied).double()


def batch_of():
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randint(Llama.WORDS, (4, 7), generator=generator) for _ in range(2))


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gradients_of(model):
    loss_of(model(batch_of()[0]), batch_of()[1]).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters(remove_duplicate=False)}


def take(parameter, whole):
    shard = shard_of(parameter)
    return shard.take(whole) if shard else whole


def assert_clips(model, whole):
    """Every norm is the whole model's, on every rank to the same bit, and gradients are scaled as torch would."""
    inner = model.module if isinstance(model, weft.DataParallel) else model
    names = dict(inner.named_parameters(remove_duplicate=False))
    plain = gradients_of(whole)
    for name, parameter in names.items():
        parameter.grad = take(parameter, plain[name]).clone()
    for norm_type in NORMS:
        expected = nn.utils.clip_grad_norm_(whole.parameters(), 0.3, norm_type=norm_type)
        norm = weft.clip_grad_norm_(model, 0.3, norm_type=norm_type)
        torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
        gathered = weft.all_gather(norm.reshape(1))
        assert (gathered == norm).all()
        for name, parameter in names.items():
            torch.testing.assert_close(parameter.grad, take(parameter, plain[name]), rtol=1e-12, atol=0, msg=name)
        for one in (*whole.parameters(), *dict.fromkeys(names.values())):
            one.grad *= 5  # to be clipped again


def on_meshes(rank):
    for sizes in ({"pp": 2, "tp": 2}, {"tp": 2, "cp": 2}, {"dp": 2, "pp": 2}, {"tp": 4}):
        mesh = weft.init_mesh(**sizes, device_type="cpu")
        plan = dict(LLAMA_PLAN) if "tp" in sizes else None
        if sizes.get("tp") == 4:  # more ranks than heads of keys: two ranks have the same one
            for name in ("query", "key", "value", "output"):
                style = "row" if name == "output" else "column"
                entry = {"style": style, "unit": Llama.HEAD, "heads": (2 * Llama.KV_HEADS, Llama.KV_HEADS)}
                plan[f"blocks.*.attention.{name}"] = entry
        inner = weft.parallelize(model_of(), mesh["cp", "tp"], plan=plan)
        if sizes.get("tp") == 4:
            assert any(shard_of(p).cut.replicated for p in inner.parameters() if shard_of(p))
        model = weft.Pipeline(inner, mesh, microbatches=2, loss=loss_of) if "pp" in sizes else inner
        assert_clips(model, model_of())
        if "pp" in sizes:
            assert_clips(weft.parallelize(model_of(), mesh, plan=plan), model_of())


def test_shards_count_together_replicas_and_tied_copies_once():
    run_ranks(on_meshes, 4)


def of_data_parallel(rank):
    """grad_norm is known at the end of backward, also where layers are on several ranks or the optimizer is sharded."""
    whole = model_of()
    expected = nn.utils.get_total_norm(list(gradients_of(whole).values())[:-1])  # tied: one of the two
    for sizes, shards in (({"dp": 2, "pp": 2}, False), ({"dp": 2, "tp": 2}, True)):
        mesh = weft.init_mesh(**sizes, device_type="cpu")
        plan = LLAMA_PLAN if "tp" in sizes else None
        inner = weft.parallelize(model_of(), mesh["pp", "tp"], plan=plan)
        model = weft.DataParallel(inner, group=mesh["dp"], shard_optimizer=shards)
        part = mesh["dp"].get_local_rank()
        tokens, targets = (x.chunk(2)[part] for x in batch_of())
        loss_of(model(tokens), targets).backward()
        torch.testing.assert_close(model.grad_norm, expected, rtol=1e-12, atol=0)
        torch.testing.assert_close(weft.clip_grad_norm_(model, 0.1), expected, rtol=1e-12, atol=0)
        if shards:
            with pytest.raises(ValueError, match="with shard_optimizer=True only 2 is supported"):
                weft.clip_grad_norm_(model, 0.1, norm_type=1.0)
            with pytest.raises(ValueError, match="piece of a sharded optimizer.*pass the weft.DataParallel itself"):
                weft.clip_grad_norm_(model.optimizer(torch.optim.SGD, lr=1.0).param_groups[0]["params"], 0.1)
        else:
            torch.testing.assert_close(weft.clip_grad_norm_(model, 9.0).item(), 0.1, rtol=1e-4, atol=0)


def test_data_parallel_gives_the_norm_of_the_whole_model():
    run_ranks(of_data_parallel, 4)


class Outside(nn.Module):
    """A parameter of the model's own, which every stage has; it cannot be cut."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.ones(1, 3))
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])

    def forward(self, x):
        x = x + self.token if x.sum() < 1e9 else x
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


def of_what_stages_share(rank):
    torch.manual_seed(0)
    whole, mesh = Outside().double(), weft.init_mesh(pp=2, dp=2, device_type="cpu")
    x = torch.randn(4, 3, dtype=torch.float64)
    model = weft.parallelize(copy.deepcopy(whole), mesh)
    model(x).backward()
    whole(x).backward()
    expected = nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
    torch.testing.assert_close(model.grad_norm, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(weft.clip_grad_norm_(model, 0.1), expected, rtol=1e-12, atol=0)


def test_what_every_stage_has_counts_once():
    run_ranks(of_what_stages_share, 4)


def of_some(rank):
    """Parameters that only one stage has; gradients that are not finite, or not there, or in main_grad."""
    mesh = weft.init_mesh(pp=2, device_type="cpu")
    pipe = weft.Pipeline(model_of(tied=False), mesh, microbatches=2, loss=loss_of)
    plain = gradients_of(model_of(tied=False))
    pipe.step(*batch_of())
    head = [parameter for name, parameter in pipe.named_parameters() if name.startswith("logits")]
    assert len(head) == rank
    norm = weft.clip_grad_norm_(head, 10.0, mesh=mesh)
    torch.testing.assert_close(norm, plain["logits.weight"].norm(), rtol=1e-9, atol=0)
    for parameter in head:
        parameter.grad[0, 0] = math.nan
    for norm_type in (2.0, math.inf):
        with pytest.raises(RuntimeError, match="norm of the gradients is nan"):
            weft.clip_grad_norm_(pipe, 1.0, norm_type=norm_type, error_if_nonfinite=True)
    assert weft.clip_grad_norm_(pipe, 1.0).isnan()
    pipe.zero_grad()
    assert weft.clip_grad_norm_(pipe, 1.0) == 0
    for parameter in pipe.parameters():
        parameter.main_grad = torch.full_like(parameter, 2.0, dtype=torch.float32)
    elements = sum(parameter.numel() for parameter in model_of(tied=False).parameters())
    assert weft.clip_grad_norm_(pipe, 1.0).item() == pytest.approx(2 * math.sqrt(elements))
    assert weft.clip_grad_norm_(pipe, 9.0).item() == pytest.approx(1.0, rel=1e-4)


def test_a_stage_without_such_parameters_takes_part():
    run_ranks(of_some, 2)


def refused(rank):
    mesh = weft.init_mesh(pp=2, device_type="cpu")
    one = nn.Linear(2, 2)
    with pytest.raises(ValueError, match='the mesh has "pp" of 2, and a parameter belongs to no stage'):
        weft.clip_grad_norm_(one, 1.0, mesh=mesh)
    with pytest.raises(ValueError, match="norm_type=0 must be more than 0"):
        weft.clip_grad_norm_(one, 1.0, norm_type=0)


def test_what_would_be_counted_wrongly_is_refused():
    run_ranks(refused, 2)


def test_one_process_needs_no_ranks():
    one, other = (nn.Linear(3, 4).bfloat16() for _ in range(2))
    other.load_state_dict(one.state_dict())
    for layer in (one, other):
        layer(torch.ones(2, 3).bfloat16()).square().sum().backward()
    norm = weft.clip_grad_norm_(one.parameters(), 0.5)
    exact = torch.cat([parameter.grad.flatten() for parameter in other.parameters()]).double().norm()
    torch.testing.assert_close(norm, exact, rtol=1e-6, atol=0)
    assert one.weight.grad.norm() < 0.51
