"""ParallelExperts against the experts in one process: output and every gradient, any load, any number of ranks."""

import copy
import math
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from weft.nn import Experts, ParallelExperts
from weft.testing import reference
from weft.testing.ranks import RanksFailedError, run_ranks

HIDDEN, WIDE = 6, 5
LOADS = ("even", "one expert", "first experts", "no tokens here")


def draw(experts, tokens, seed, load, chosen=2):
    """Return tokens, their experts, routing weights and the gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    x, dy = (torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64) for _ in range(2))
    scores = torch.randn(tokens, experts, generator=generator, dtype=torch.float64)
    if load == "one expert":
        scores[:, experts - 1] += 100
        chosen = 1
    elif load == "first experts":
        scores[:, :2] += 100  # the others get none
    weights, index = scores.softmax(-1).topk(min(chosen, experts), -1)
    return x, index, weights, dy


def results(layer, x, index, weights, dy):
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    layer(x, index, weights).backward(dy)
    with torch.no_grad():
        y = layer(x, index, weights)
    return y, x.grad, weights.grad


def listed(experts):
    torch.manual_seed(2)
    layers = (nn.Sequential(nn.Linear(HIDDEN, WIDE), nn.Tanh(), nn.Linear(WIDE, HIDDEN)) for _ in range(experts))
    return nn.ModuleList(layers).double()


def run_list(layers):
    return lambda x, index, weights: reference.routed(x, index, weights, lambda number, rows: layers[number](rows))


def whole_of(kind, experts):
    torch.manual_seed(1)
    if kind == "list":
        layers = listed(experts)
        return layers, run_list(layers)
    layer = Experts(experts, HIDDEN, WIDE, gated=kind != "plain", bias=kind == "bias", dtype=torch.float64)
    return layer, layer


def same(found, expected, message):
    assert found.shape == expected.shape, message
    assert torch.allclose(found, expected, 1e-11, 1e-11), f"{message}: {(found - expected).abs().max()}"


def check_gradients(layer, whole, message):
    of_whole = dict(whole.named_parameters())
    for name, parameter in layer.named_parameters():
        expected, shard = of_whole[name].grad, weft.shard_of(parameter)
        if expected is None:
            assert parameter.grad is None or not parameter.numel(), f"{message} {name}: one process has no gradient"
            continue
        assert parameter.grad is not None, f"{message} {name}: no gradient"
        same(parameter.grad.as_subclass(torch.Tensor), shard.take(expected) if shard else expected, f"{message} {name}")


def check_same_tokens(rank, experts):
    dist.group.WORLD.engine.group.inject_faults(seed=rank + 1, longest_delay_us=100)
    for kind in ("gated", "plain", "bias", "list"):
        for load in LOADS[:3]:
            whole, run = whole_of(kind, experts)
            layer = ParallelExperts.from_experts(copy.deepcopy(whole))
            given = draw(experts, 9, 5, load)
            for name, found, expected in zip("y dx dw", results(layer, *given), results(run, *given), strict=False):
                same(found, expected, f"{kind} {load} {name}")
            check_gradients(layer, whole, f"{kind} {load}")


@pytest.mark.parametrize(("world", "experts"), [(2, 5), (3, 4), (4, 4)])
def test_ranks_with_the_same_tokens_compute_what_one_process_does(world, experts):
    run_ranks(check_same_tokens, world, experts)


def check_own_tokens(rank, experts):
    """Each rank's loss is of its tokens; a gradient of the experts is the sum over all of them."""
    dist.group.WORLD.engine.group.inject_faults(seed=rank + 1, longest_delay_us=100)
    world = dist.get_world_size()
    for kind in ("gated", "plain", "bias", "list"):
        for load in LOADS:
            whole, run = whole_of(kind, experts)
            layer = ParallelExperts.from_experts(copy.deepcopy(whole), ep_group=dist.group.WORLD)
            counts = [0 if load == "no tokens here" and r == 1 else 7 + r for r in range(world)]
            given = [draw(experts, count, 5 + r, load) for r, count in enumerate(counts)]
            together = [torch.cat(tensors) for tensors in zip(*given, strict=True)]
            expected = [tensor.split(counts)[rank] for tensor in results(run, *together)]
            for name, found, part in zip("y dx dw", results(layer, *given[rank]), expected, strict=False):
                same(found, part, f"{kind} {load} {name}")
            check_gradients(layer, whole, f"{kind} {load}")


@pytest.mark.parametrize(("world", "experts"), [(2, 5), (3, 4), (4, 4)])
def test_tokens_that_travel_to_their_experts_come_back_right(world, experts):
    run_ranks(check_own_tokens, world, experts)


def check_both(rank):
    mesh = weft.init_mesh(dp=2, tp=2)
    place, (whole, run) = mesh["dp"].get_local_rank(), whole_of("bias", 5)
    groups = {"group": mesh["tp"], "ep_group": mesh["dp"], "all_group": dist.group.WORLD}
    layer = ParallelExperts.from_experts(copy.deepcopy(whole), **groups)
    assert layer.down_proj.size(0) == (2, 1, 1, 1)[rank]
    given = [draw(5, 7 + 2 * r, 5 + r, "even") for r in range(2)]
    expected = results(run, *(torch.cat(tensors) for tensors in zip(*given, strict=True)))
    for found, of_all in zip(results(layer, *given[place]), expected, strict=True):
        same(found, of_all.split([7, 9])[place], "both")
    check_gradients(layer, whole, "both")
    with pytest.raises(ValueError, match="need all_group"):
        ParallelExperts(5, 6, 5, group=mesh["tp"], ep_group=mesh["dp"])


def test_experts_lie_over_ranks_with_the_same_tokens_and_ranks_with_their_own_at_once():
    run_ranks(check_both, 4)


def check_inner(rank, sizes, experts):
    """The ranks of tp share each expert, and those of dp have tokens of their own."""
    dist.group.WORLD.engine.group.inject_faults(seed=rank + 1, longest_delay_us=100)
    mesh = weft.init_mesh(**sizes)
    tp, dp, place = mesh["tp"].size(), mesh["dp"].size(), mesh["dp"].get_local_rank()
    groups = {"group": mesh["tp"], "split": "intermediate"}
    groups |= {"ep_group": mesh["dp"], "all_group": dist.group.WORLD} if dp > 1 else {}
    for kind in ("gated", "plain", "bias"):
        for load in LOADS[:3]:
            whole, run = whole_of(kind, experts)
            layer = ParallelExperts.from_experts(copy.deepcopy(whole), **groups)
            inside = weft.split_sizes(WIDE, tp)[mesh["tp"].get_local_rank()]
            assert layer.down_proj.shape == (weft.split_sizes(experts, dp)[place], HIDDEN, inside)
            counts = [7 + 2 * r for r in range(dp)]
            given = [draw(experts, count, 5 + r, load) for r, count in enumerate(counts)]
            expected = results(run, *(torch.cat(tensors) for tensors in zip(*given, strict=True)))
            for name, found, of_all in zip("y dx dw", results(layer, *given[place]), expected, strict=False):
                same(found, of_all.split(counts)[place], f"{kind} {load} {name}")
            check_gradients(layer, whole, f"{kind} {load}")
            for name, parameter in layer.named_parameters():
                again = weft.shard_of(parameter).gather(parameter.detach()) if weft.shard_of(parameter) else parameter
                assert torch.equal(again, whole.get_parameter(name)), name
    if dp == 1 and tp > experts:
        assert ParallelExperts(experts, HIDDEN, WIDE).place.inner, "fewer experts than ranks share each of them"
    with pytest.raises(ValueError, match="takes fused experts"):
        ParallelExperts.from_experts(listed(experts), **groups)
    with pytest.raises(ValueError, match="split='half' is not one of 'auto', 'experts', 'intermediate'"):
        ParallelExperts(experts, HIDDEN, WIDE, split="half")


@pytest.mark.parametrize(("sizes", "experts"), [(dict(tp=2), 4), (dict(tp=3), 2), (dict(dp=2, tp=2), 3)])
def test_ranks_that_share_the_intermediate_dimension_compute_what_one_process_does(sizes, experts):
    run_ranks(check_inner, sizes.get("dp", 1) * sizes["tp"], sizes, experts)


def check_seeded(rank):
    torch.manual_seed(3)
    layer = ParallelExperts(5, HIDDEN, WIDE, bias=True)
    torch.manual_seed(3)
    whole = Experts(5, HIDDEN, WIDE, bias=True)
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter, weft.shard_of(parameter).take(whole.get_parameter(name)))
    torch.manual_seed(4)
    layer.reset_parameters()
    torch.manual_seed(4)
    whole.reset_parameters()
    assert torch.equal(layer.down_proj, weft.shard_of(layer.down_proj).take(whole.down_proj))
    twin = copy.deepcopy(layer)
    layer.load_state_dict({name: tensor + 1 for name, tensor in whole.state_dict().items()})  # a whole one
    assert torch.equal(layer.down_proj, weft.shard_of(layer.down_proj).take(whole.down_proj) + 1)
    given = [t.float() if t.is_floating_point() else t for t in draw(5, 4, 0, "even")]
    expected = results(whole, *given)[0]
    assert torch.allclose(results(twin, *given)[0], expected, 1e-5, 1e-5), "a copy computes with its own parameters"
    assert not torch.allclose(results(layer, *given)[0], expected, 1e-5, 1e-5)
    assert results(twin.double(), *draw(5, 4, 0, "even"))[0].dtype == torch.float64


def test_a_seed_gives_each_rank_its_experts_and_copies_are_apart():
    run_ranks(check_seeded, 2)


def check_low_precision(rank):
    for dtype in (torch.bfloat16, torch.float32):
        whole = Experts(4, 64, 48, dtype=torch.float64)
        nn.init.constant_(whole.down_proj, 0.01)
        x = torch.randn(9, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        index = torch.tensor([[0, 2], [1, 3], [3, 0]]).repeat(3, 1)
        weights = torch.full((9, 2), 0.5, dtype=torch.float64)
        layer = ParallelExperts.from_experts(copy.deepcopy(whole).to(dtype))
        y = layer(x.to(dtype), index, weights.float())  # routers often give fp32
        assert y.dtype == dtype
        error = (y - whole(x, index, weights)).abs().max() / y.abs().max()
        assert error < 8 * torch.finfo(dtype).eps, error


def test_routing_weights_may_be_of_a_wider_type():
    run_ranks(check_low_precision, 2)


def kept_within(index, experts, factor):
    """GShard's algorithm 1, token by token: all first choices come before second ones."""
    kept, room = torch.zeros(index.shape, dtype=torch.bool), [math.ceil(factor * index.numel() / experts)] * experts
    for choice in range(index.size(1)):
        for token in range(len(index)):
            expert = int(index[token, choice])
            kept[token, choice] = room[expert] > 0
            room[expert] -= 1
    return kept


def check_capacity(rank, factor, chosen):
    mesh, experts, counts = weft.init_mesh(dp=2, tp=2), 5, [7, 9]
    tp, dp, place = mesh["tp"], mesh["dp"], mesh["dp"].get_local_rank()
    whole, _ = whole_of("gated", experts)
    given = [draw(experts, count, 5 + r, "first experts" if r else "even", chosen) for r, count in enumerate(counts)]
    x, index, weights, dy = (torch.cat(tensors) for tensors in zip(*given, strict=True))
    kept = kept_within(index, experts, factor)
    assert not kept.all() and kept.any()
    expected = results(whole, x, index, weights * kept, dy)
    assert not torch.allclose(results(whole, x, index, weights, dy)[0], expected[0]), "nothing is dropped without it"
    for parameter in whole.parameters():
        parameter.grad = None
    results(whole, x, index, weights * kept, dy)
    for options in (
        {"group": tp, "replica_group": dp},
        {"group": tp, "replica_group": dp, "split": "intermediate"},
        {"ep_group": dp},
        {"group": tp, "ep_group": dp, "all_group": dist.group.WORLD},
        {"group": tp, "ep_group": dp, "all_group": dist.group.WORLD, "split": "intermediate"},
        {},
    ):
        layer = ParallelExperts.from_experts(copy.deepcopy(whole), capacity_factor=factor, **options)
        own, part = (given[place], place) if options else ((x, index, weights, dy), None)
        found = results(layer, *own)
        for name, one, of_all in zip(("y", "dx"), found, expected, strict=False):
            same(one, of_all if part is None else of_all.split(counts)[part], f"{list(options)} {name}")
        own_kept = kept if part is None else kept.split(counts)[part]
        assert (found[2][~own_kept] == 0).all() and (found[2][own_kept] != 0).all()
        if "ep_group" in options or not options:
            check_gradients(layer, whole, str(list(options)))


@pytest.mark.parametrize(("factor", "chosen"), [(1.0, 1), (1.25, 2)])
def test_a_capacity_drops_the_same_later_tokens_on_every_mesh(factor, chosen):
    run_ranks(check_capacity, 4, factor, chosen)


class Capped(Experts):
    """Drops tokens over a capacity of its own, which its parts would count differently."""

    def forward(self, x, top_k_index, top_k_weights):
        kept = kept_within(top_k_index, self.num_experts, 2.0)
        return super().forward(x, top_k_index, top_k_weights * kept)


def test_a_capacity_that_nobody_asked_for_is_refused():
    with pytest.raises(ValueError, match="cannot be split by experts: .*depends on how many chose the same expert"):
        ParallelExperts.from_experts(Capped(4, 6, 5))
    with pytest.raises(ValueError, match="capacity_factor=0 must be more than 0"):
        ParallelExperts.from_experts(Experts(4, 6, 5), capacity_factor=0)


def check_bad_index(rank, ways):
    mesh = weft.init_mesh(dp=2)
    options = {
        "tp": {},
        "ep": {"ep_group": dist.group.WORLD},
        "dp": {"group": mesh["tp"], "replica_group": mesh["dp"], "capacity_factor": 1.0},
    }[ways]
    layer = ParallelExperts(4, HIDDEN, WIDE, **options)
    bad = torch.tensor([[4 if rank == 1 or ways == "tp" else 0]])
    layer(torch.ones(1, HIDDEN), bad, torch.ones(1, 1))


@pytest.mark.parametrize("ways", ["tp", "ep", "dp"])
def test_an_expert_that_does_not_exist_is_refused_on_every_rank(ways):
    with pytest.raises(RanksFailedError) as error:
        run_ranks(check_bad_index, 2, ways)
    assert len(re.findall(r"exit code \d+, ValueError.*the router chose expert 4", str(error.value))) == 2


def check_few(rank):
    for options, message in (
        ({"ep_group": dist.group.WORLD}, "2 elements cannot be split over 3 ranks"),
        ({"split": "experts"}, "2 elements cannot be split over 3 ranks"),
        ({}, "2 experts on 3 ranks, 3 of them for each expert.*cannot be split over 3 ranks: it is 2"),
    ):
        with pytest.raises(ValueError, match=message):
            ParallelExperts(2, HIDDEN, 2, **options)


def test_more_ranks_than_experts_and_features_inside_are_refused():
    run_ranks(check_few, 3)


class Normalised(Experts):
    """Divides by the sum of the routing weights that it sees, so its parts do not add up."""

    def forward(self, x, top_k_index, top_k_weights):
        return super().forward(x, top_k_index, top_k_weights / top_k_weights.sum(-1, keepdim=True))


class Mixing(Experts):
    """Adds the mean over all tokens."""

    def forward(self, x, top_k_index, top_k_weights):
        return super().forward(x, top_k_index, top_k_weights) + x.mean(0)


@pytest.mark.parametrize("kind", [Normalised, Mixing])
def test_experts_that_do_not_add_up_are_refused(kind):
    with pytest.raises(ValueError, match="the sum over parts of its experts is not what all of them give"):
        ParallelExperts.from_experts(kind(4, 6, 5))
    with pytest.raises(ValueError, match="is no layer of fused experts"):
        ParallelExperts.from_experts(nn.Linear(4, 4))


def test_arguments_that_do_not_match_are_refused():
    layer, x, index = Experts(4, 6, 5), torch.ones(3, 6), torch.zeros(3, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match=re.escape("must be [..., hidden], [..., k] and [..., k]")):
        layer(x, index, torch.ones(3, 1))
    with pytest.raises(TypeError, match="must be whole numbers"):
        layer(x, torch.ones(3, 2), torch.ones(3, 2))
