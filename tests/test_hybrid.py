"""Whatever the mesh, training is the single process's: losses, norms, every parameter, every moment of the optimizer."""

import itertools
import math
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

import weft
from weft import clip_grad
from weft.activation_checkpoint import recomputes
from weft.context_parallel import function_rules
from weft.metadata import metadata
from weft.pipeline import pipeline
from weft.pipeline.schedules import SCHEDULES
from weft.sharding.shard import shard_of
from weft.testing.models import LLAMA_PLAN, Llama, TiedModel
from weft.testing.models import batch_of as model_batch
from weft.testing.ranks import run_ranks
from weft.testing.tolerance import assert_close

STEPS, BATCH, LENGTH, MAX_NORM, SEED = 3, 12, 7, 0.5, 5


def model_of(dtype=torch.float64, **options):
    torch.manual_seed(0)
    return Llama(**options).to(dtype)


def batch_of(step, part=0, parts=1):
    generator = torch.Generator().manual_seed(1 + step)
    tokens = torch.randint(Llama.WORDS, (BATCH, LENGTH + 1), generator=generator).chunk(parts)[part]
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(model, step_of, parts=(0, 1)):
    """Losses and norms of a few steps with clipping, and the optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    figures = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = step_of(*batch_of(step, *parts))
        figures.append([loss.item(), float(weft.clip_grad_norm_(model, MAX_NORM))])
        optimizer.step()
    return torch.tensor(figures, dtype=torch.float64), optimizer


def plain(**options):
    """The single process: what it reported, and parameters and moments by the model's names."""
    model = model_of(**options)
    torch.manual_seed(SEED)

    def step(tokens, targets):
        loss = loss_of(model(tokens), targets)
        loss.backward()
        return loss

    figures, optimizer = train(model, step)
    assert (figures[:, 1] > MAX_NORM).any(), "clipping does something"
    return figures, values_of(model, optimizer)


def values_of(model, optimizer):
    return {
        name: (parameter.detach(), optimizer.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg_sq"])
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def parallel(mesh, way, plan=LLAMA_PLAN, dtype=torch.float64, recompute="none", **options):
    """What is trained, and what steps it."""
    plan = plan if mesh["tp"].size() > 1 else None
    whole = model_of(dtype, **options)
    if way == "pipeline":
        inner = weft.parallelize(whole, mesh["cp", "tp"], plan=plan, recompute=recompute)
        microbatches = 3 if mesh["pp"].size() == 3 else 2
        pipe = weft.Pipeline(inner, mesh, microbatches=microbatches, loss=loss_of)
        return pipe, pipe.step
    model = weft.parallelize(whole, mesh, plan=plan, recompute=recompute)

    def step(tokens, targets):
        loss = loss_of(model(tokens), targets)
        loss.backward()
        return weft.all_reduce(loss.detach(), op="avg", group=mesh["dp"])

    return model, step


def assert_same(mesh, way, expected, tolerances, **options):
    model, step = parallel(mesh, way, **options)
    torch.manual_seed(SEED)
    figures, optimizer = train(model, step, (mesh["dp"].get_local_rank(), mesh["dp"].size()))
    expected_figures, expected_values = expected
    torch.testing.assert_close(figures, expected_figures, **tolerances)
    inner = model.module if isinstance(model, weft.DataParallel) else model
    found = values_of(inner, optimizer)
    for name, values in found.items():
        shard = shard_of(inner.get_parameter(name))
        for kind, value, whole in zip(("parameter", "mean", "square"), values, expected_values[name], strict=True):
            mine = shard.take(whole) if shard else whole
            torch.testing.assert_close(value, mine, **tolerances, msg=lambda text, n=name, k=kind: f"{k} {n}: {text}")
    return figures, set(found)


MESHES = [sizes for sizes in itertools.product((1, 2), repeat=4) if sizes.count(2) <= 3]
MESHES += [(1, 1, 1, 3), (1, 1, 3, 1), (1, 3, 1, 1), (3, 1, 1, 1), (1, 2, 1, 3), (3, 1, 1, 2)]
FP64 = {"rtol": 1e-8, "atol": 1e-10}


def run_meshes(rank, meshes, expected):
    for sizes, options in meshes:
        mesh = weft.init_mesh(**dict(zip(("pp", "dp", "cp", "tp"), sizes, strict=True)), device_type="cpu")
        for way in ("stages", "pipeline") if sizes[0] > 1 else ("stages",):
            figures, _ = assert_same(mesh, way, expected[options["tied"]], FP64, **options)
            everywhere = weft.all_gather(figures.unsqueeze(0))
            assert (everywhere == figures).all(), f"{sizes} {way}: the same bits on every rank"


@pytest.mark.parametrize(
    "world",
    [
        1,
        2,
        3,
        4,
        *(pytest.param(world, marks=pytest.mark.slow("pytorch_ext", "pytorch_ext/pipeline")) for world in (6, 8)),
    ],
)
def test_every_mesh_trains_as_one_process(world):
    meshes = [(sizes, {"tied": number % 2 == 0}) for number, sizes in enumerate(MESHES) if math.prod(sizes) == world]
    run_ranks(run_meshes, world, meshes, {tied: plain(tied=tied) for tied in (True, False)}, timeout_s=200)


def one_step(dtype, **options):
    """Loss and gradients of the single process."""
    model = model_of(dtype, **options)
    loss = loss_of(model(batch_of(0)[0]), batch_of(0)[1])
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}


def share_in_pipelines(rank, schedules, exact, rough):
    """In fp32 attention is weft.context_attention; strict: nothing else crosses the sequence's ranks."""
    mesh = weft.init_mesh(pp=2, cp=2, device_type="cpu")
    for schedule, parts in schedules:
        layout = "contiguous" if parts else "zigzag"
        context = {"strict": True, "parts": parts, "layout": layout}
        model = weft.parallelize(model_of(torch.float32, tied=True), mesh["cp", "tp"], context=context)

        def loss_of_part(logits, targets):
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / (BATCH / 4 * LENGTH)

        batch = batch_of(0)
        if parts:
            batch = [weft.shard_sequence(x, dim=1, layout=layout, group=mesh["cp"]) for x in batch]
        pipe = weft.Pipeline(model, mesh, schedule=schedule, microbatches=4, loss=loss_of_part if parts else loss_of)
        loss = pipe.step(*batch)
        assert_close(loss, rough[0], exact[0], "loss")
        gathered = weft.all_gather(torch.stack([loss, pipe.evaluate(*batch)]).unsqueeze(0))
        assert (gathered[:, 0] == loss).all()
        torch.testing.assert_close(gathered[:, 1], gathered[:, 0])
        assert "shares" in {row.kind for row in weft.explain(pipe).sequence}
        for name, parameter in pipe.named_parameters(remove_duplicate=False):
            assert_close(parameter.grad, rough[1][name], exact[1][name], name)


def test_stages_share_the_sequence_in_every_schedule():
    cases = [(schedule, number % 2 == 0) for number, schedule in enumerate(SCHEDULES)]
    expected = one_step(torch.float64, tied=True), one_step(torch.float32, tied=True)
    run_ranks(share_in_pipelines, 4, [*cases, ("1f1b", True)], *expected, timeout_s=120)


def forget(rank, expected):
    mesh = weft.init_mesh(pp=2, cp=2, device_type="cpu")
    for where, name, instead in (
        (function_rules, "used", lambda x, ranks: x),  # gradients of the sequence's parts are not summed
        (pipeline.Ties, "sum", lambda self: None),
        (clip_grad, "owners_of", lambda parameter: None),  # the norm of one stage
    ):
        with mock.patch.object(where, name, instead), pytest.raises(AssertionError, match="not close"):
            assert_same(mesh, "pipeline", expected, FP64, tied=True)


def test_the_tolerance_would_catch_what_is_forgotten():
    run_ranks(forget, 4, plain(tied=True), timeout_s=120)


def share_layers(rank, expected):
    for sizes in ({"tp": 2, "dp": 2}, {"pp": 2, "tp": 2}):
        mesh = weft.init_mesh(**sizes, device_type="cpu")
        for way in ("stages", "pipeline") if "pp" in sizes else ("stages",):
            assert_same(mesh, way, expected, FP64, shared=True, tied=True)


def test_layers_that_are_one_stay_one():
    run_ranks(share_layers, 4, plain(shared=True, tied=True))


def drop(rank, expected):
    mesh = weft.init_mesh(tp=4, device_type="cpu")
    plan = {name: entry for name, entry in LLAMA_PLAN.items() if "mlp" in name}
    assert_same(mesh, "stages", expected, FP64, plan=plan, dropout=0.3)
    for way in ("stages", "pipeline"):
        mesh = weft.init_mesh(pp=2, tp=2, device_type="cpu")
        model, step = parallel(mesh, way, dropout=0.3)
        torch.manual_seed(SEED)
        if way == "pipeline":  # ranks that nobody seeded alike: the first one's numbers are theirs
            plan, whole = LLAMA_PLAN, model_of(dropout=0.3)
            torch.manual_seed(rank)
            model = weft.parallelize(whole, mesh["tp"], plan=plan)
            model = weft.Pipeline(model, mesh, microbatches=2, loss=loss_of)
            step = model.step
        losses = torch.stack([step(*batch_of(0)).detach() for _ in range(2)])
        assert losses[0] != losses[1], "every batch drops others"
        assert (weft.all_gather(losses.unsqueeze(0)) == losses).all()
        for name, parameter in model.named_parameters():
            if shard_of(parameter) is None:
                same = weft.all_gather(parameter.grad.unsqueeze(0), group=mesh["tp"])
                assert torch.equal(same[0], same[1]), f"{name}: what ranks have whole they drop alike"


def test_dropout_is_alike_where_ranks_have_the_whole():
    """And with tp alone it is the single process's."""
    run_ranks(drop, 4, plain(dropout=0.3))


class Layer(nn.Sequential):
    """Of several modules, and no list that is cut."""


class Stages(nn.Sequential):
    """Blocks that show what they drop."""

    def __init__(self):
        super().__init__(*(Layer(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(2)))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(1.0)


def drop_in_stages(rank):
    torch.manual_seed(0)
    split = weft.LayerSplit(Stages(), weft.init_mesh(pp=2, device_type="cpu"))
    dropped = []
    next(module for module in split.modules() if isinstance(module, nn.Dropout)).register_forward_hook(
        lambda module, inputs, output: dropped.append(output == 0)
    )
    split(torch.ones(64, 4))
    split.eval()(torch.ones(64, 4))
    return dropped


def test_stages_of_ranks_that_are_seeded_alike_drop_others():
    first, second = run_ranks(drop_in_stages, 2)
    assert 0.3 < first[0].double().mean() < 0.7
    assert not torch.equal(first[0], second[0])
    assert not first[1].any() and not second[1].any()


def wholes(model, optimizer):
    """Every parameter and moment that this rank has, whole."""
    inner = model.module if isinstance(model, weft.DataParallel) else model
    found = {}
    for name, values in values_of(inner, optimizer).items():
        shard = shard_of(inner.get_parameter(name))
        found[name] = [shard.gather(value) if shard else value.clone() for value in values]
    return found


def save(rank, way, folder):
    mesh = weft.init_mesh(pp=2, tp=2, device_type="cpu")
    model, step = parallel(mesh, way, tied=True)
    _, optimizer = train(model, step)
    weft.save_checkpoint(model, optimizer, folder, step=STEPS)
    return wholes(model, optimizer)


def load(rank, sizes, way, folder):
    mesh = weft.init_mesh(**sizes, device_type="cpu")
    model, _ = parallel(mesh, way, tied=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = torch.optim.AdamW(model.parameters())
    assert weft.load_checkpoint(model, optimizer, folder).step == STEPS
    assert optimizer.param_groups[0]["weight_decay"] == 0.1
    return wholes(model, optimizer)


@pytest.mark.parametrize("way", ["stages", "pipeline"])
def test_checkpoints_of_stages_load_at_any_mesh(way, tmp_path):
    stored = {name: values for held in run_ranks(save, 4, way, tmp_path) for name, values in held.items()}
    assert stored.keys() == dict(model_of(tied=True).named_parameters(remove_duplicate=False)).keys()
    other = {"stages": "pipeline", "pipeline": "stages"}[way]
    for sizes, loading in (({"dp": 2, "cp": 2}, "stages"), ({"tp": 3}, "stages"), ({}, "stages"), ({"pp": 3}, other)):
        loaded = run_ranks(load, math.prod(sizes.values()), sizes, loading, tmp_path)
        for held in loaded:
            for name, values in held.items():
                same = all(torch.equal(one, two) for one, two in zip(values, stored[name], strict=True))
                assert same, f"{name} at {sizes}"
        assert set().union(*loaded) == set(stored)


def load_in_stages(rank, path, expected):
    """Built without memory, cut, and then given this rank's values from a file."""
    mesh = weft.init_mesh(pp=2, tp=2, device_type="cpu")
    tokens, targets = model_batch()
    for way in ("stages", "pipeline"):
        with torch.device("meta"):
            whole = TiedModel().double()
        plan = {"blocks.*.up": "column", "blocks.*.down": "row"}
        if way == "pipeline":
            inner = weft.parallelize(whole, mesh["tp"], plan=plan)
            model = weft.Pipeline(inner, mesh, microbatches=2, loss=loss_of)
        else:
            model = weft.parallelize(whole, mesh, plan=plan)
        weft.load_safetensors(model, path)
        if way == "pipeline":
            loss = model.step(tokens, targets)
        else:
            loss = loss_of(model(tokens), targets)
            loss.backward()
        found = torch.stack([loss.detach(), weft.clip_grad_norm_(model, 1.0)])
        torch.testing.assert_close(found, expected, **FP64)


def test_stages_that_are_loaded_after_the_cut_know_their_values(tmp_path):
    """A table that the model's own code uses, tied copies, and what the norm knows of them."""
    torch.manual_seed(0)
    model = TiedModel().double()
    stored = {name: value for name, value in model.state_dict().items() if name != "logits.weight"}
    save_file(stored, tmp_path / "model.safetensors")
    tokens, targets = model_batch()
    loss = loss_of(model(tokens), targets)
    loss.backward()
    expected = torch.stack([loss.detach(), nn.utils.get_total_norm([p.grad for p in model.parameters()])])
    run_ranks(load_in_stages, 4, tmp_path / "model.safetensors", expected)


def refuse(rank):
    mesh = weft.init_mesh(pp=2, device_type="cpu")
    pair = weft.init_mesh(tp=2, device_type="cpu")
    linears = nn.Sequential(*(nn.Linear(12, 12) for _ in range(3)))
    single = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    named = Llama(tied=True)
    calls = torch.distributed.group.WORLD.engine.group.calls
    for model, on, message, options in (
        (single, mesh, "1 layers .* too few for 2 places: use 1 at most", {}),
        (linears, mesh, 'strict.* "pp" one would compute at a time.*weft.Pipeline', {"strict": True}),
        (linears, mesh, 'the plan splits 0, and the mesh has no dimension "tp"', {"plan": {"0": "column"}}),
        (named, pair, "names 'layers.0.up', and no module is called that", {"plan": {"layers.0.up": "column"}}),
        (linears, pair, "1 is a row layer.*gets all of them.*split_input", {"plan": {"1": "row"}}),
        (
            linears,
            pair,
            "0 gives each rank a part of its output features, and .*gather_output",
            {"plan": {"0": "column"}},
        ),
        (
            linears,
            pair,
            "0 gives .* rank 0 of tp has 0 to 6 of them, where 1 takes 0 to 8: give both the same unit and parts",
            {"plan": {"0": "column", "1": {"style": "row", "unit": 4}}},
        ),
        (linears, pair, "no nn.ModuleList or nn.Sequential of blocks", {"plan": None, "recompute": "full"}),
    ):
        before = [type(module) for module in model.modules()]
        with pytest.raises(ValueError, match=message):
            weft.parallelize(model, on["pp", "cp"] if on is mesh else on, **options)
        assert [type(module) for module in model.modules()] == before, "the model is as it was"
        assert not model._forward_hooks and not recomputes(model)
    assert torch.distributed.group.WORLD.engine.group.calls == calls
    with pytest.raises(ValueError, match='the mesh has "cp" of 2, and the model does not share its sequence'):
        weft.Pipeline(linears, weft.init_mesh(cp=2, device_type="cpu"), microbatches=2, loss=F.mse_loss)
    split = weft.parallelize(linears, mesh)
    with pytest.raises(ValueError, match="the model is a LayerSplit, .*give the whole mesh to Pipeline"):
        weft.Pipeline(split, mesh, microbatches=2, loss=F.mse_loss)
    assert split(input=torch.ones(1, 12)).shape == (1, 12)
    for inputs, named in (((), {}), ((torch.ones(1, 12), 1), {}), ((), {"x": 1})):
        with pytest.raises(TypeError, match="Sequential.forward.. .* argument"):
            split(*inputs, **named)
    torch.manual_seed(rank)
    with pytest.raises(ValueError, match="differs between rank 0 and rank 1"):
        weft.parallelize(Llama(), mesh)


def test_what_does_not_fit_is_refused_before_anything_is_sent():
    run_ranks(refuse, 2)


def of_transformers(rank, expected):
    """Called as they are, with labels; the plan and the layers' places are found."""
    tokens = torch.randint(Llama.WORDS, (4, 9), generator=torch.Generator().manual_seed(1))
    for sizes, recompute in (
        ({"pp": 2, "tp": 2}, "selective"),
        ({"pp": 2, "cp": 2}, "full"),
        ({"dp": 2, "pp": 2}, "none"),
    ):
        mesh = weft.init_mesh(**sizes, device_type="cpu")
        model = weft.parallelize(language_model(), mesh, recompute=recompute)
        mine = tokens.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]
        loss = model(input_ids=mine, labels=mine, use_cache=False).loss
        loss.backward()
        torch.testing.assert_close(weft.all_reduce(loss.detach(), op="avg", group=mesh["dp"]), expected[0])
        norm = weft.clip_grad_norm_(model, 1e9)
        torch.testing.assert_close(norm, expected[1], rtol=1e-9, atol=0)
        inner = model.module if isinstance(model, weft.DataParallel) else model
        for name, parameter in inner.named_parameters():
            shard = shard_of(parameter)
            whole = shard.take(expected[2][name]) if shard else expected[2][name]
            torch.testing.assert_close(parameter.grad, whole, **FP64, msg=f"{name} {sizes}")


def language_model():
    import transformers

    sizes = {"hidden_size": 24, "intermediate_size": 29, "num_attention_heads": 6, "num_key_value_heads": 3}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(num_hidden_layers=3, vocab_size=Llama.WORDS, tie_word_embeddings=True, **sizes)
    return transformers.LlamaForCausalLM(config).double()


def test_models_of_transformers_are_put_on_any_mesh():
    pytest.importorskip("transformers")
    tokens = torch.randint(Llama.WORDS, (4, 9), generator=torch.Generator().manual_seed(1))
    model = language_model()
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    norm = nn.utils.get_total_norm(gradients.values())
    run_ranks(of_transformers, 4, (loss.detach(), norm, gradients), timeout_s=120)


def kinds(rank):
    """Check the kind of the returned model, its mesh, and that a model is found in it again."""
    for sizes, outer, plan in (
        ({"tp": 4}, Llama, "auto"),
        ({"cp": 2, "tp": 2}, Llama, LLAMA_PLAN),
        ({"dp": 2, "tp": 2}, weft.DataParallel, LLAMA_PLAN),
        ({"pp": 2, "cp": 2}, weft.LayerSplit, None),
        ({"pp": 2, "dp": 2}, weft.DataParallel, None),
    ):
        mesh = weft.init_mesh(**sizes, device_type="cpu")
        model = weft.parallelize(model_of(), mesh, plan=plan)
        assert type(model) is outer, sizes
        assert (metadata(model, "plan") is not None) == (plan == "auto")
        assert any(shard_of(parameter) for parameter in model.parameters()) == ("tp" in sizes)
        tokens, _ = batch_of(0, mesh["dp"].get_local_rank(), mesh["dp"].size())
        assert model(tokens).shape == (*tokens.shape, Llama.WORDS)
        assert bool(weft.explain(model).sequence) == ("cp" in sizes)


def test_what_comes_back_is_called_as_the_model_was():
    run_ranks(kinds, 4)
