"""weft.LayerSplit: layers on several devices or ranks give the plain model's values and gradients, bit for bit."""

import copy
import os
import signal
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

import weft
from weft.pipeline.balance import placed
from weft.testing.models import TiedModel, batch_of, loss_of
from weft.testing.ranks import run_ranks, try_ranks


def model_of():
    torch.manual_seed(0)
    return TiedModel()


def assert_same_bits(split, model):
    tokens, targets = batch_of()
    expected = model(tokens)
    output = split(tokens)
    assert torch.equal(output, expected)
    loss_of(expected, targets).backward()
    loss_of(output, targets).backward()
    plain = {name: parameter.grad for name, parameter in model.named_parameters(remove_duplicate=False)}
    held = dict(split.named_parameters(remove_duplicate=False))
    assert held
    for name, parameter in held.items():
        assert torch.equal(parameter.grad, plain[name]), name
    return set(held)


def test_devices_give_the_same_bits():
    model = model_of()
    split = weft.LayerSplit(copy.deepcopy(model), ["cpu", "cpu"])
    assert assert_same_bits(split, model) == set(dict(model.named_parameters(remove_duplicate=False)))
    assert split.state_dict().keys() == model.state_dict().keys()
    split.eval()
    assert not any(module.training for module in split.modules())


def test_layers_are_called_where_they_are():
    split = weft.LayerSplit(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), ["cpu", "meta"])
    assert [parameter.device.type for parameter in split.parameters()] == ["cpu"] * 4 + ["meta"] * 4
    assert split(torch.randn(2, 4)).device.type == "meta"


def test_a_transformers_model_is_split_over_devices():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(num_hidden_layers=4, vocab_size=17, tie_word_embeddings=True, **sizes)
    model = transformers.LlamaForCausalLM(config)
    split = weft.LayerSplit(copy.deepcopy(model), ["cpu", "cpu"])
    tokens, targets = batch_of()
    for each in (model, split):
        loss_of(each(input_ids=tokens, use_cache=False).logits, targets).backward()
    for (name, got), expected in zip(split.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(got.grad, expected.grad), name
    meta = weft.LayerSplit(copy.deepcopy(model), ["cpu", "meta"])
    places = {name: parameter.device.type for name, parameter in meta.named_parameters()}
    assert places["model.embed_tokens.weight"] == "cpu" and places["model.layers.3.mlp.up_proj.weight"] == "meta"


def over_ranks(rank):
    model = model_of()
    split = weft.LayerSplit(model_of(), weft.init_mesh(pp=torch.distributed.get_world_size(), device_type="cpu"))
    names = assert_same_bits(split, model)
    with torch.no_grad():
        assert torch.equal(split(batch_of()[0]), model(batch_of()[0]))
    return names


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_give_the_same_bits_and_hold_their_layers_only(world):
    held = run_ranks(over_ranks, world)
    whole = set(dict(model_of().named_parameters(remove_duplicate=False)))
    assert set().union(*held) == whole and sum(map(len, held)) == len(whole)
    assert {"embedding.weight", "logits.weight"} <= held[0]  # tied: one parameter, on one rank


def test_a_tied_layer_goes_with_the_first_holder_and_counts_once():
    one, two, three, four = (torch.zeros(size) for size in (4, 4, 2, 2))
    assert placed([[one], [two], [three], [four]], 2) == [0, 1, 1, 1]
    assert placed([[one], [two], [three], [four], [one]], 2) == [0, 1, 1, 1, 0]
    assert placed([[one], [two], [three], [four, one]], 3) == [0, 1, 2, 0]
    assert placed([[one], [two], [three], [one, two]], 2) == [0, 0, 1, 0]  # the last joins the first two


class Returning(nn.Module):
    """Four layers, and what `how` makes of their output."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(1)
        self.layers, self.how = nn.ModuleList(nn.Linear(4, 4) for _ in range(4)), how

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.how(x)


def split_one_behind_another(rank):
    """A generator and its critic, in one place each and both split: the critic's first rank has the gradient of what
    the generator's last one made."""
    mesh = weft.init_mesh(pp=2, device_type="cpu")
    plain = [Returning(torch.tanh), Returning(torch.sin)]
    x, whole = (torch.ones(2, 4, requires_grad=True) for _ in range(2))
    generator, critic = (weft.LayerSplit(copy.deepcopy(model), mesh) for model in plain)
    critic(generator(x)).sum().backward()
    plain[1](plain[0](whole)).sum().backward()
    assert torch.equal(x.grad, whole.grad)
    for split, model in zip((generator, critic), plain, strict=True):
        expected = dict(model.named_parameters())
        for name, parameter in split.named_parameters():
            assert torch.equal(parameter.grad, expected[name].grad), name
    (gradient,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):  # and not a part of it
        gradient.sum().backward()
    with pytest.raises(TypeError, match="cannot be copied: copy the model first"):
        copy.deepcopy(critic)


def test_inputs_have_their_gradient_on_every_rank():
    run_ranks(split_one_behind_another, 2)


class Opaque(nn.Module):
    def forward(self, x):
        return object()


def return_all_kinds(rank):
    mesh, x = weft.init_mesh(pp=2, device_type="cpu"), torch.ones(2, 4)
    for how in (
        lambda x: (x,),
        lambda x: [x, x.argmax(-1)],
        lambda x: {"x": x, "rest": (None, 3)},
        lambda x: torch.fft.fft(x),
    ):
        model = Returning(how)
        split = weft.LayerSplit(copy.deepcopy(model), mesh)
        expected, got = model(x), split(x)
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
        for output in (expected, got):
            tree_leaves(output)[0].abs().sum().backward()
        plain = dict(model.named_parameters())
        assert all(torch.equal(one.grad, plain[name].grad) for name, one in split.named_parameters())
    with pytest.raises(TypeError, match="returns a object; across ranks"):
        weft.LayerSplit(Returning(Opaque()), mesh)(x)


def test_outputs_have_the_model_s_structure():
    run_ranks(return_all_kinds, 2)


class PartlyFrozen(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.backbone, self.neck, self.head = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        with torch.no_grad():
            x = self.backbone(x)
        return self.head(self.neck(x))


def split_partly_frozen(rank):
    model = PartlyFrozen()
    split = weft.LayerSplit(copy.deepcopy(model), weft.init_mesh(pp=2, device_type="cpu"))
    for each in (model, split):
        each(torch.ones(2, 4)).sum().backward()
    plain = dict(model.named_parameters())
    for name, parameter in split.named_parameters():
        expected = plain[name].grad
        assert parameter.grad is None if expected is None else torch.equal(parameter.grad, expected), name


def test_layers_without_gradients_have_none():
    run_ranks(split_partly_frozen, 2)


class InPlace(nn.Linear):
    def forward(self, x):
        return super().forward(x.relu_())


class Residual(nn.Module):
    """Cannot be cut, since it decides by values."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(InPlace(4, 4) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x) if x.sum() < 1e9 else x
        return x


def change_in_place(rank):
    split = weft.LayerSplit(Residual(), weft.init_mesh(pp=2, device_type="cpu"))
    with torch.no_grad(), pytest.raises(ValueError, match="a InPlace, changes its input in place"):
        split(torch.ones(2, 4))


def test_a_layer_that_changes_what_other_ranks_have_too_is_refused():
    run_ranks(change_in_place, 2)


class Layer(nn.Sequential):
    """Of several modules, and no list that is cut."""


def mlp(width):
    return Layer(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 2))


def split_unevenly(rank):
    torch.manual_seed(0)
    # Of the first, tensor-parallel ranks have 12 and 7 elements, so that each would cut elsewhere by its own.
    whole = nn.Sequential(mlp(3), mlp(4), Layer(nn.Linear(2, 2), nn.LayerNorm(2)))
    mesh, x = weft.init_mesh(pp=2, tp=2, device_type="cpu"), torch.randn(5, 2)
    model = weft.parallelize(copy.deepcopy(whole), mesh)
    assert weft.shard_of(next(model.parameters(), None)) is not None or rank > 1
    torch.testing.assert_close(model(x), whole(x))


def test_ranks_with_uneven_shards_cut_in_the_same_place():
    run_ranks(split_unevenly, 4, timeout_s=30)


def too_many_places(rank):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with pytest.raises(ValueError, match="1 layers .* too few for 2 places: use 1 at most"):
        weft.LayerSplit(model, weft.init_mesh(pp=2, device_type="cpu"))


def test_more_places_than_layers_are_refused():
    with pytest.raises(ValueError, match="1 layers .* too few for 2 places: use 1 at most"):
        weft.LayerSplit(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), ["cpu", "cpu"])
    run_ranks(too_many_places, 2)


class Branching(nn.Module):
    """Cannot be cut: it decides by values, uses a parameter of its own, drops outside of its layers, returns a dict."""

    def __init__(self):
        super().__init__()
        self.token, self.scale = nn.Parameter(torch.randn(1, 4)), nn.Parameter(torch.randn(4), requires_grad=False)
        self.register_buffer("shift", torch.randn(4))
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), Two()) for _ in range(3))
        self.unused, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        for layer in self.layers[:1].parameters():
            layer.requires_grad_(False)

    def forward(self, x, *, double=False):
        x = torch.cat([self.token, x]) * self.scale + self.shift
        seen = []
        for layer in self.layers:
            if x.sum() < 1e9:
                x, rest = layer(x)
                x = F.dropout(x + rest, 0.3, self.training)
                seen.append(rest)
        return {"output": (2 if double else 1) * self.norm(x), "seen": seen}


class Two(nn.Linear):
    """Layer with two results; one may stay unused."""

    def __init__(self):
        super().__init__(4, 8)

    def forward(self, x):
        return super().forward(x).chunk(2, -1)


def relay(rank):
    world = torch.distributed.get_world_size()
    torch.manual_seed(0)
    model = Branching()
    split = weft.LayerSplit(copy.deepcopy(model), weft.init_mesh(pp=world, device_type="cpu"))
    x = torch.randn(5, 4)
    for mode in (False, True):
        model.train(mode)
        split.train(mode)
        assert all(module.training == mode for module in split.modules())
        torch.manual_seed(3 + rank)  # the first rank's numbers are all ranks'
        found = split(x, double=True)
        gathered = weft.all_gather(found["output"].detach().unsqueeze(0))
        assert (gathered == found["output"]).all() and len(found["seen"]) == 3
        if not mode:
            expected = model(x, double=True)
            assert torch.equal(found["output"], expected["output"])
            for output in (found, expected):
                (output["output"].square().sum() + output["seen"][1].sum()).backward()
    held = dict(split.named_parameters())
    for name, parameter in held.items():
        expected = model.get_parameter(name).grad
        assert (expected is None) == (parameter.grad is None), name
        assert expected is None or torch.equal(parameter.grad, expected), name
    norm = weft.clip_grad_norm_(split, 1.0)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(model.parameters(), 1.0).double())
    with torch.no_grad():
        assert torch.equal(split.eval()(x)["output"], model.eval()(x)["output"])
    return set(held), set(split.state_dict())


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_model_that_cannot_be_cut_runs_on_every_rank_and_its_layers_on_one(world):
    per_rank = run_ranks(relay, world)
    whole = Branching()
    assert set().union(*(state for _, state in per_rank)) == set(whole.state_dict())
    layers = [name for held, _ in per_rank for name in held if name not in ("token", "scale")]
    assert sorted(layers) == sorted(name for name, _ in whole.named_parameters() if name not in ("token", "scale"))


class Wandering(nn.Module):
    """The order of its layers, and their number, follow its input. A parameter of its own is used on each rank."""

    def __init__(self):
        super().__init__()
        self.layers, self.scale = nn.ModuleList(nn.Linear(4, 4) for _ in range(4)), nn.Parameter(torch.ones(4))

    def forward(self, x):
        for number in [3, 0, 2, 0] if x.sum() > 0 else [1, 2]:
            x = x + self.layers[number](x) * self.scale
        return x


def wander(rank):
    torch.manual_seed(0)
    model = Wandering().double()
    split = weft.LayerSplit(copy.deepcopy(model), weft.init_mesh(pp=2, device_type="cpu"))
    for x in (torch.ones(2, 4).double(), -torch.ones(2, 4).double(), torch.ones(3, 4).double()):
        for each in (model, split):
            each.zero_grad()
            each(x).square().sum().backward()
        for name, parameter in split.named_parameters():
            torch.testing.assert_close(parameter.grad, model.get_parameter(name).grad)
    assert "scale" in dict(split.named_parameters())


def test_each_call_may_take_other_layers_in_another_order():
    run_ranks(wander, 2)


class Writing(nn.Module):
    """Writes in place to what its layers gave, and to a view of it."""

    def __init__(self, averages=False):
        super().__init__()
        self.layers, self.averages = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), averages
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) * 2
            x[:, 0] += 1
            x.data.mul_(0.5)
            if self.averages:
                self.mean.mul_(0.9).add_(x.detach().mean(0))
        return x


def write_in_place(rank):
    torch.manual_seed(0)
    mesh, x, model = weft.init_mesh(pp=2, device_type="cpu"), torch.randn(2, 4), Writing()
    split = weft.LayerSplit(copy.deepcopy(model), mesh)
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        with mode():
            torch.testing.assert_close(split(x), model(x))
    with pytest.raises(ValueError, match="changes mean outside of its layers, and each rank runs that several times"):
        weft.LayerSplit(Writing(averages=True), mesh)(x)


def test_writes_between_layers_are_done_once():
    run_ranks(write_in_place, 2)


class Cached(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = Keeping()

    def forward(self, x, cache=None):
        return self.head(x, past_key_values=cache) if x.sum() > -1e9 else x


class Keeping(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)

    def forward(self, x, past_key_values=None):
        return super().forward(x)


class Reaching(nn.Module):
    """Computes with a weight itself, where a Linear of the same weight would stand."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.second(self.first(x))
        return F.linear(x, self.first.weight) if x.sum() > -1e9 else x


def refuse(rank):
    mesh = weft.init_mesh(pp=2, device_type="cpu")
    split = weft.LayerSplit(Cached(), mesh)
    split(torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"Keeping got a cache \(past_key_values\).*use_cache=False"):
        split(torch.ones(2, 4), cache=object())
    shared = Branching()
    shared.unused.bias = nn.Parameter(torch.zeros(4))
    shared.scale = shared.unused.bias
    with pytest.raises(ValueError, match="a parameter of unused is also used outside of any layer"):
        weft.LayerSplit(shared, mesh)
    with pytest.raises(ValueError, match="first.weight is used outside of its layer, which another stage has"):
        weft.LayerSplit(Reaching(), mesh)(torch.ones(2, 4))


def test_what_such_a_model_cannot_do_is_refused():
    run_ranks(refuse, 2)


class Dying(nn.Linear):
    def forward(self, x):
        if torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


def split_until_one_dies(rank):
    model = nn.Sequential(nn.Linear(4, 4), Dying(4, 4), nn.Linear(4, 4))
    weft.LayerSplit(model, weft.init_mesh(pp=3, device_type="cpu"))(torch.randn(2, 4))


def test_a_dead_rank_is_named():
    outcomes = try_ranks(split_until_one_dies, 3, timeout_s=20)
    for survivor in (outcomes[0], outcomes[2]):
        assert isinstance(survivor.error, weft.RankLostError) and "rank 1" in str(survivor.error), survivor


def refuses_records(rank):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.MixtralConfig(
        num_hidden_layers=2, vocab_size=17, num_local_experts=2, use_cache=False, **sizes
    )
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config)
    tokens = batch_of()[0] % 17
    plain = model(tokens, output_hidden_states=True, output_router_logits=False)
    split = weft.LayerSplit(model, weft.init_mesh(pp=2, device_type="cpu"))
    for name in ("output_attentions", "output_router_logits"):
        with pytest.raises(ValueError, match=f"MixtralForCausalLM: {name} asks for what is recorded .*pp=1"):
            split(tokens, **{name: True})
    model.config.output_router_logits = True
    with pytest.raises(ValueError, match="output_router_logits=False"):
        split(tokens)
    output = split(tokens, output_hidden_states=True, output_router_logits=False)
    for found, expected in zip(
        (output.logits, *output.hidden_states), (plain.logits, *plain.hidden_states), strict=True
    ):
        assert torch.equal(found, expected)


def test_what_is_recorded_inside_of_layers_is_refused_across_ranks():
    """Each rank would have its own layers' alone, and of router logits a wrong loss."""
    run_ranks(refuses_records, 2)


class Flagged(nn.Module):
    """Asks a flag, and one of its configuration, outside of its layers."""

    def __init__(self):
        super().__init__()
        self.layers, self.doubled, self.epoch = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), False, 0
        self.config = SimpleNamespace(halved=False)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        x = 2 * x if self.doubled else x
        return x / 2 if self.config.halved else x


def changes_flags(rank):
    model, x = Flagged(), torch.ones(2, 4)
    split = weft.LayerSplit(copy.deepcopy(model), weft.init_mesh(pp=2, device_type="cpu"))
    (own,) = split._whole
    for each in (model, own):
        each.doubled = each.config.halved = False
    for name in ("doubled", "halved"):
        for each in (model, own):
            setattr(each if name == "doubled" else each.config, name, True)
        assert torch.equal(split(x), model(x))


def test_the_forward_follows_a_flag_that_is_set_later():
    run_ranks(changes_flags, 2)
