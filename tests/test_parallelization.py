"""parallelize: a plan splits a model's layers and changes nothing else."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import weft
from weft.testing.ranks import run_ranks


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(12), nn.Linear(12, 29), nn.Linear(29, 12)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):
    """Tied at both ends, an odd vocabulary, a layer used twice."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(31, 12)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.blocks.append(self.blocks[0])
        self.head = nn.Linear(12, 31, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


PLAN = {"embedding": "vocabulary", "blocks.*.up": "column", "blocks.*.down": "row", "head": "column"}


def train(model, tokens, target, loss_of):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = loss_of(model(tokens), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def check_training(rank):
    torch.manual_seed(0)
    whole = Model().double()
    model = weft.parallelize(copy.deepcopy(whole), plan=PLAN)
    assert model.head.weight is model.embedding.weight
    assert model.blocks[2] is model.blocks[0] and model.blocks[2].up is model.blocks[0].up
    tokens, target = torch.randint(0, 31, (4, 6)), torch.randint(0, 31, (4, 6))
    expected = train(whole, tokens, target, lambda y, t: nn.functional.cross_entropy(y.flatten(0, 1), t.flatten()))
    losses = train(model, tokens, target, weft.parallel_cross_entropy)
    torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-9)
    for name, parameter in model.named_parameters():
        shard = weft.shard_of(parameter)
        mine = whole.get_parameter(name) if shard is None else shard.take(whole.get_parameter(name))
        torch.testing.assert_close(parameter, mine, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_five_steps_equal_the_whole_models(world):
    run_ranks(check_training, world)


def check_refusals(rank):
    model = Model()
    model.special, model.hooked = Doubled(4, 4), nn.Linear(4, 4)
    model.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    model.hooked.register_forward_hook(lambda *_: None)
    model.patched, model.listened = nn.Linear(4, 4), nn.Linear(4, 4)
    model.patched.forward = Doubled(4, 4).forward
    model.listened.bias.register_hook(lambda gradient: 2 * gradient)
    model.attention = nn.MultiheadAttention(4, 2)
    nn.utils.parametrizations.weight_norm(model.attention.out_proj)
    before = [type(module) for module in model.modules()]
    calls = dist.group.WORLD.engine.group.calls
    for error, message, plan in (
        (
            ValueError,
            r"names 'layers.\*.up', and no module is called that.*embedding, blocks.0.up",
            {"layers.*.up": "column"},
        ),
        (ValueError, "no module is called", {"*.up": "column"}),  # one star is one component
        (ValueError, "blocks.0.up is named by both", {"blocks.*.up": "column", "blocks.0.*": "row"}),
        (ValueError, "style 'diagonal' is not one of", {"blocks.*.up": "diagonal"}),
        (TypeError, "blocks.0.norm is LayerNorm; style 'column' takes nn.Linear", {"blocks.*.norm": "column"}),
        (TypeError, "embedding is Embedding; style 'column' takes nn.Linear", {"embedding": "column"}),
        (ValueError, "embedding.weight, head.weight are one parameter", {"embedding": "vocabulary"}),
        (
            ValueError,
            "are one parameter, and the plan does not split them in the same way",
            {"embedding": "vocabulary", "head": "row"},
        ),
        (ValueError, "blocks.0.up: .*not a whole number of units of 2", {"**.up": {"style": "column", "unit": 2}}),
        (TypeError, "blocks.0.up: .*colour", {"**.up": {"style": "column", "colour": "red"}}),
        (TypeError, "special is Doubled; style 'column' takes nn.Linear itself", {"special": "column"}),
        (TypeError, "normed is ParametrizedLinear", {"normed": "row"}),
        (ValueError, "hooked has hooks, which its replacement would lose", {"hooked": "column"}),
        (ValueError, "patched has a forward of its own, which its", {"patched": "column"}),
        (ValueError, "listened has hooks of its parameters, which its", {"listened": "column"}),
        (ValueError, "attention has parametrizations, which its", {"attention": "heads"}),
    ):
        with pytest.raises(error, match=message):
            weft.parallelize(model, plan=plan)
        assert [type(module) for module in model.modules()] == before, "the model is as it was"
    assert dist.group.WORLD.engine.group.calls == calls
    mesh = weft.init_mesh(cp=2, device_type="cpu")
    other = init_device_mesh("cpu", (1, 2), mesh_dim_names=("tp", "columns"))
    for message, arguments, options in (
        ('the plan splits embedding, .* and the mesh has no dimension "tp"', [mesh["cp"]], {"plan": PLAN}),
        ("context='ring', and the mesh has no dimension \"cp\"", [mesh["tp"]], {"plan": PLAN, "context": "ring"}),
        ('the plan splits embedding, .* and the mesh has no dimension "tp"', [mesh["pp", "dp"]], {"plan": PLAN}),
        (r"the dimensions \('tp', 'columns'\); it takes those of weft.init_mesh", [other], {"plan": PLAN}),
        ("plan='automatic' is not \"auto\", None or a dict", [], {"plan": "automatic"}),
        ('sequence_parallel=True belongs to plan="auto"', [], {"plan": PLAN, "sequence_parallel": True}),
        ("recompute='some' is not one of 'none', 'full', 'selective'", [], {"plan": PLAN, "recompute": "some"}),
    ):
        with pytest.raises(ValueError, match=message):
            weft.parallelize(model, *arguments, **options)
    assert not model._forward_pre_hooks


def test_a_plan_that_cannot_be_followed_changes_nothing():
    run_ranks(check_refusals, 2)


def check_meshes(rank):
    whole = weft.init_mesh(tp=2, device_type="cpu")
    for mesh in (whole, whole["tp"], whole["tp"].get_group(), None):
        model = weft.parallelize(Model(), mesh, plan={"**.down": {"style": "row", "split_input": True}})
        assert model(torch.zeros(1, 2, dtype=torch.int64)).shape == (1, 2, 31)
        assert model.blocks[1].down.weight.shape[1] in (14, 15)


class Listed(nn.Module):
    """Runs its layers from a list of its own, as MaskFormer does."""

    def __init__(self):
        super().__init__()
        self.layers = [nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 5)]
        for number, layer in enumerate(self.layers):
            self.add_module(str(number), layer)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def check_layers_in_a_list(rank):
    model = Listed()
    split = weft.parallelize(copy.deepcopy(model), plan={"0": "column", "2": "row"})
    assert split.layers[0] is split.get_submodule("0") and isinstance(split.layers[2], weft.ParallelLinear)
    x = torch.randn(3, 5)
    torch.testing.assert_close(split(x), model(x))


def test_layers_that_a_list_holds_too_are_replaced_there():
    run_ranks(check_layers_in_a_list, 2)


def test_a_mesh_a_dimension_of_it_and_a_group_are_all_taken():
    run_ranks(check_meshes, 2)


class Region(nn.Module):
    """A norm with its parameters between a row and a column layer: in a sequence-parallel region."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)
        self.norm, self.head = nn.Sequential(), nn.Linear(6, 7)
        self.norm.inner_norm = nn.LayerNorm(6)

    def forward(self, x):
        return self.head(self.norm(self.down(self.up(x).relu())))


def check_region(rank):
    torch.manual_seed(0)
    whole = Region().double()
    model = weft.parallelize(
        copy.deepcopy(whole),
        plan={
            "up": "column",
            "**.down": {"style": "row", "sequence_parallel": True, "sequence_dim": 1},
            "**norm": "sequence",  # also the norm inside the norm's container: summed once all the same
            "head": {"style": "column", "sequence_parallel": True, "sequence_dim": 1, "gather_output": True},
        },
    )
    model = copy.deepcopy(model)  # which loses the hooks of tensors
    for _ in range(2):  # gradients of two backwards add up
        x = torch.randn(2, 5, 6, dtype=torch.float64)
        model(x).square().sum().backward()
        whole(x).square().sum().backward()
    for name, parameter in model.named_parameters():
        shard = weft.shard_of(parameter)
        expected = whole.get_parameter(name).grad
        expected = shard.take(expected) if shard else expected
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-10, atol=1e-11, msg=name)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_what_stands_in_a_sequence_parallel_region_gets_the_whole_gradient(world):
    run_ranks(check_region, world)


def check_meta(rank):
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(5, 8), nn.Embedding(9, 4))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(5, 8), nn.Embedding(9, 4))
    model = weft.parallelize(model, plan={"0": "column", "1": "vocabulary"})
    assert model[0](torch.empty(2, 5, device="meta")).shape == (2, model[0].weight.shape[0])
    model.to_empty(device="cpu")
    model.load_state_dict(whole.state_dict())
    twin = copy.deepcopy(model).double()
    twin.load_state_dict(whole.state_dict(), assign=True)
    for layers in (model, twin):
        for name, parameter in layers.named_parameters():
            assert torch.equal(parameter, weft.shard_of(parameter).take(whole.get_parameter(name)))
            assert parameter.untyped_storage().nbytes() == parameter.nbytes


def test_a_model_larger_than_a_rank_is_built_on_meta_and_loaded_in_parts():
    run_ranks(check_meta, 2)


def check_unseeded(rank):
    torch.manual_seed(rank // 2)
    model = Model()
    with pytest.raises(
        ValueError, match=r"embedding.weight differs between rank 0 and rank 2 \(\d+ of \d+ tensors do\)"
    ):
        weft.parallelize(model, plan=PLAN)
    assert type(model.head) is nn.Linear


def test_ranks_that_drew_different_weights_are_reported():
    run_ranks(check_unseeded, 3)


class Between(nn.Module):
    """A column layer, an operation, and a row layer."""

    def __init__(self, operation, inputs=1):
        super().__init__()
        self.up, self.down, self.operation = nn.Linear(6, 10), nn.Linear(10, 6), operation
        self.gate, self.norm = nn.Linear(6, 1), nn.LayerNorm(5)
        if inputs > 1:
            self.forward = self.forward_of_lists

    def forward(self, x):
        return self.down(self.operation(self, self.up(x), x))

    def forward_of_lists(self, xs, first):
        return Between.forward(self, xs[first["place"]])


OPERATIONS = {
    "softmax": (lambda m, h, x: h.softmax(-1), "_softmax in the model goes over all of its features"),
    "softmax of the sequence": (lambda m, h, x: h.softmax(1), None),
    "norm": (lambda m, h, x: F.layer_norm(h, (10,)), "native_layer_norm in the model goes over"),
    "length": (lambda m, h, x: h / h.norm(dim=-1, keepdim=True), "linalg_vector_norm in the model goes over"),
    "length of the sequence": (lambda m, h, x: h / h.norm(dim=1, keepdim=True), None),
    "topk": (lambda m, h, x: h * (h >= h.topk(2).values[..., -1:]), "topk in the model goes over"),
    "argmax": (lambda m, h, x: h * h.argmax(-1, keepdim=True), "argmax in the model goes over"),
    "largest": (lambda m, h, x: h - h.max(-1, keepdim=True).values, "max in the model goes over"),
    "two halves": (lambda m, h, x: torch.cat(h.chunk(2, -1)[::-1], -1), "cat in the model joins features"),
    "gate that is whole": (lambda m, h, x: h * m.gate(x), "an activation that is whole, and its gradient"),
    "weight that is whole": (
        lambda m, h, x: m.norm(h.unflatten(-1, (-1, 5))).flatten(-2),
        r'norm\.(weight|bias) meets them, .* make norm "sequence"',
    ),
    "an input": (lambda m, h, x: h * x.mean(), None),
    "a convolution that no rule is known for": (
        lambda m, h, x: F.conv1d(h.mT, torch.ones_like(h[0].mT[:, :1, None]), groups=h.shape[-1]).mT,
        None,
    ),
    "pointwise": (lambda m, h, x: F.gelu(h) * 2 + 1, None),
}


def check_between(rank):
    split = {"up": "column", "down": "row"}
    for name, (operation, message) in OPERATIONS.items():
        torch.manual_seed(0)
        whole = Between(operation).double()
        x = torch.randn(2, 3, 6, dtype=torch.float64)
        if message is None:
            model = weft.parallelize(copy.deepcopy(whole), plan=split)
            torch.testing.assert_close(model(x), whole(x), msg=name)
        else:
            with pytest.raises(ValueError, match=f"up gives each rank a part .*{message}.*gather_output"):
                weft.parallelize(whole, plan=split)
            assert type(whole.up) is nn.Linear
        other = copy.deepcopy(whole)
        gathered = {"up": {"style": "column", "gather_output": True}, "down": {"style": "row", "split_input": True}}
        model = weft.parallelize(other, plan=gathered)
        torch.testing.assert_close(model(x), whole(x), msg=name)
    summed = weft.parallelize(Between(OPERATIONS["weight that is whole"][0]), plan={**split, "norm": "sequence"})
    assert summed(torch.ones(2, 3, 6)).shape == (2, 3, 6)


def test_what_needs_all_features_is_refused_between_a_column_and_a_row_layer():
    run_ranks(check_between, 2)


class Beside(nn.Module):
    """Two layers side by side, whose features meet, before a third."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(6, 20), nn.Linear(6, 20), nn.Linear(20, 6)

    def forward(self, x):
        return self.down(self.gate(x).relu() * self.up(x))


def check_cuts(rank):
    torch.manual_seed(0)
    whole, x = Beside().double(), torch.randn(2, 3, 6, dtype=torch.float64)
    alike = {"parts": (8, 12)}
    for gate, up, down, message in (
        (alike, alike, alike, None),
        ({"unit": 4}, {"unit": 4}, {"unit": 4}, None),
        (alike, alike, {}, "gate gives .* rank 0 of tp has 0 to 4 and 8 to 14 of them, where down takes 0 to 10"),
        ({}, {}, alike, "gate gives .* rank 0 of tp has 0 to 10 of them, where down takes 0 to 4 and 8 to 14"),
        (
            {"unit": 4},
            {"unit": 4},
            {},
            "rank 0 of tp has 0 to 12 of them, where down takes 0 to 10: give both the same unit",
        ),
        ({}, alike, {}, "gate gives .* rank 0 of tp has 0 to 10 of them, where up takes 0 to 4 and 8 to 14"),
    ):
        plan = {
            "gate": {"style": "column", **gate},
            "up": {"style": "column", **up},
            "down": {"style": "row", **down},
        }
        if message is None:
            model = weft.parallelize(copy.deepcopy(whole), plan=plan)
            torch.testing.assert_close(model(x), whole(x))
        else:
            with pytest.raises(ValueError, match=message):
                weft.parallelize(copy.deepcopy(whole), plan=plan)


def test_features_that_meet_must_be_cut_alike():
    run_ranks(check_cuts, 2)


class GroupedAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = nn.Linear(8, 96), nn.Linear(8, 24), nn.Linear(8, 24), nn.Linear(96, 8)

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (-1, 8)).transpose(1, 2) for p in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2))


def check_heads(rank):
    torch.manual_seed(0)
    whole, x = GroupedAttention().double(), torch.randn(2, 5, 8, dtype=torch.float64)
    plan = {name: {"style": "row" if name == "o" else "column", "unit": 8} for name in "qkvo"}
    with pytest.raises(
        ValueError, match='rank 1 of tp has 48 to 96 of them, and 16 to 24 of the k they use: say "heads"'
    ):
        weft.parallelize(copy.deepcopy(whole), plan=plan)  # 12 query heads are cut 6 + 6, 3 KV heads 2 + 1
    with_heads = {name: {**entry, "heads": (12, 3)} for name, entry in plan.items()}
    torch.testing.assert_close(weft.parallelize(copy.deepcopy(whole), plan=with_heads)(x), whole(x))


def test_a_rank_has_the_key_value_heads_that_its_query_heads_use():
    run_ranks(check_heads, 2)


class Tied(nn.Module):
    """A head that is a function of the embedding's weight."""

    def __init__(self):
        super().__init__()
        self.emb, self.up, self.down = nn.Embedding(31, 8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, tokens):
        h = self.emb(tokens)
        return F.linear(h + self.down(F.relu(self.up(h))), self.emb.weight)


def check_uses_outside(rank):
    for plan in ({"emb": "vocabulary", "up": "column", "down": "row"}, {"emb": "vocabulary"}):
        with pytest.raises(ValueError, match="emb is split, and its weight is also used by t in the model"):
            weft.parallelize(Tied(), plan=plan)
    weft.parallelize(Tied(), plan={"up": "column", "down": "row"})
    penalised = Between(lambda m, h, x: h / m.up.weight.norm())
    with pytest.raises(ValueError, match="up is split, and its weight is also used by linalg_vector_norm"):
        weft.parallelize(penalised, plan={"up": "column", "down": "row"})


def test_a_split_weight_is_used_by_its_layer_alone():
    run_ranks(check_uses_outside, 2)


def check_first_calls(rank):
    split = {"up": "column", "down": "row"}
    model = weft.parallelize(Between(lambda m, h, x: h.softmax(-1), inputs=2), plan=split)
    with pytest.raises(ValueError, match="up gives each rank a part .*softmax"):
        model([torch.ones(3, 6)], {"place": 0})
    model = weft.parallelize(Between(lambda m, h, x: h.relu() if m.training else h.softmax(-1)), plan=split)
    assert model(torch.ones(3, 6)).shape == (3, 6)
    with pytest.raises(ValueError, match="up gives each rank a part .*softmax"):
        model.eval()(torch.ones(3, 6))
    with torch.device("meta"):
        model = Between(lambda m, h, x: h.softmax(-1))
    with pytest.raises(ValueError, match="up gives each rank a part .*softmax"):
        weft.parallelize(model, plan=split)


def test_a_plan_is_checked_by_the_first_call_of_each_kind():
    run_ranks(check_first_calls, 2)


def copies_after_first_calls(rank):
    model = weft.parallelize(Block(), weft.init_mesh(tp=2, device_type="cpu"), plan={"up": "column", "down": "row"})
    for _ in range(5):
        model(torch.ones(1, 2, 12))
    twin = copy.deepcopy(model)
    twin.load_state_dict(model.state_dict())
    with pytest.raises(ValueError, match="called with different batches"):
        twin(torch.full((1, 2, 12), rank))


def test_a_copy_is_checked_after_a_load_as_the_model_is():
    run_ranks(copies_after_first_calls, 2)


def errors_in_calls(rank):
    """In each call an error in the model, and what the user's own hook, which is called always, has seen."""
    plan, seen = {"up": "column", "down": "row"}, []
    model = weft.parallelize(Block(), weft.init_mesh(tp=2, device_type="cpu"), plan=plan)
    model.norm.forward = lambda x: x[..., :5]
    model.register_forward_hook(lambda *call: seen.append(1), always_call=True)
    for call in range(6):
        with pytest.raises(ValueError, match="must be 12, the input features"):
            model(torch.zeros(1, 2, 12))
        assert len(seen) == call + 1


def test_checks_of_the_first_calls_leave_a_model_that_raises_its_other_hooks():
    run_ranks(errors_in_calls, 2)
