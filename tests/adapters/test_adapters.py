"""Adapters: what other libraries run through weft is what they run without it, and what does not go is refused."""

import copy
import os
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import weft
import weft.parallelization
from weft.adapters import need
from weft.adapters.styles import ColumnParallel, RowParallel, SequenceParallel, VocabularyParallel
from weft.testing.ranks import run_ranks

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
transformers.Trainer  # imported here once instead of in each rank

SIZES = dict(
    vocab_size=61,
    hidden_size=24,
    intermediate_size=45,
    num_hidden_layers=2,
    num_attention_heads=3,
    num_key_value_heads=3,
    head_dim=8,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    use_cache=False,
)


# torch's parallelize_module


class Model(nn.Module):
    """A table, and two layers around a normalised middle; 13 words, 7 and 11 features."""

    def __init__(self, tied=False):
        super().__init__()
        self.table = nn.Embedding(13, 7)
        self.up, self.down = nn.Linear(7, 11), nn.Linear(11, 7)
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(7, 13, bias=not tied)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens):
        x = self.table(tokens)
        x = x + self.down(torch.relu(self.up(x)))
        return self.head(self.norm(x))


PLAN = {
    "table": VocabularyParallel(),
    "up": ColumnParallel(),
    "down": RowParallel(),
    "head": ColumnParallel(gather_output=True),
}


def whole_gradients(model):
    whole = {}
    for name, parameter in model.named_parameters():
        shard = weft.shard_of(parameter)
        whole[name] = parameter.grad if shard is None else shard.gather(parameter.grad)
    return whole


def assert_trains_as(model, plain, tokens):
    targets = tokens.roll(1, 1)
    results = []
    for each in (model, plain):
        out = each(tokens)
        nn.functional.cross_entropy(out.flatten(0, 1), targets.flatten()).backward()
        results.append(out)
    torch.testing.assert_close(*results, rtol=1e-11, atol=1e-11)
    for name, gradient in whole_gradients(model).items():
        expected = plain.get_parameter(name).grad
        torch.testing.assert_close(gradient, expected, rtol=1e-11, atol=1e-12, msg=name)


def split_by_styles(rank):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for tied in (False, True):
        torch.manual_seed(5)
        plain = Model(tied).double()
        torch.manual_seed(5 + rank)  # as in torch, the weights are those of src_data_rank
        model = Model(tied).double()
        optimizer = torch.optim.SGD(model.parameters())
        known = dict(model.named_parameters())
        layer = model.up
        assert parallelize_module(model, mesh, PLAN) is model
        assert model.up is layer and isinstance(layer, weft.ParallelLinear)
        assert isinstance(model.table, weft.ParallelEmbedding)
        assert {name: id(parameter) for name, parameter in model.named_parameters()} == {
            name: id(parameter) for name, parameter in known.items()
        }, "an optimizer that was made before knows them"
        with torch.no_grad():  # the styles do not name the norm
            model.norm.load_state_dict(plain.norm.state_dict())
        assert_trains_as(model, plain, torch.randint(13, (3, 5), generator=torch.Generator().manual_seed(2)))
        optimizer.step()
        assert copy.deepcopy(model).up.extra_repr() == model.up.extra_repr()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_layers_split_by_styles_compute_what_the_plain_ones_do(world):
    run_ranks(split_by_styles, world)


def between_styles(rank):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(7, 11), nn.ReLU(), nn.Linear(11, 7), nn.LayerNorm(7), nn.Linear(7, 5)).double()
    model = copy.deepcopy(plain)
    plan = {
        "0": ColumnParallel(),
        "2": RowParallel(sequence_parallel=True),
        "3": SequenceParallel(),
        "4": ColumnParallel(sequence_parallel=True, gather_output=True),
    }
    parallelize_module(model, mesh, plan, src_data_rank=None)
    x = torch.randn(2, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    results = [each(x) for each in (model, plain)]
    for result in results:
        result.square().sum().backward()
    torch.testing.assert_close(*results, rtol=1e-11, atol=1e-11)
    for name, gradient in whole_gradients(model).items():
        torch.testing.assert_close(gradient, plain.get_parameter(name).grad, rtol=1e-11, atol=1e-11, msg=name)


def test_a_sequence_parallel_region_by_styles_sums_the_gradients_in_it():
    run_ranks(between_styles, 2)


def refuses_styles(rank):
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(TypeError, match="Embedding; style 'column' takes nn.Linear itself"):
        parallelize_module(Model(), mesh, {"table": ColumnParallel()})
    with pytest.raises(TypeError, match="gathers"):
        parallelize_module(Model(), mesh, {"up": ColumnParallel(gathers=True)})
    model = Model(tied=True)
    with pytest.raises(ValueError, match="RowParallel: weight is shared with a layer that is split along dimension 0"):
        parallelize_module(model, mesh, {"table": VocabularyParallel(), "head": RowParallel()})
    assert model.table.weight.shape == (7 - rank, 7), "the layer before is as it was"
    one = nn.Sequential(nn.Linear(3, 1))
    with pytest.raises(ValueError, match="out_features=1"):
        parallelize_module(one, mesh, {"0": ColumnParallel()})
    assert type(one[0]) is nn.Linear


def test_styles_refuse_what_they_cannot_split():
    run_ranks(refuses_styles, 2)


# transformers' attention


def config_of(kind="Llama", **options):
    return getattr(transformers, f"{kind}Config")(**{**SIZES, **options})


def made(config, attention):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=attention)


def tokens_of(batch, length, seed=0):
    return torch.randint(3, 61, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", ["Llama", "Mistral"])
def test_attention_alone_is_sdpa(kind):
    from weft.adapters.hugging_face import register

    register()
    config = config_of(kind, **({"sliding_window": 4} if kind == "Mistral" else {}))
    model, plain = made(config, "weft"), made(config, "sdpa")
    assert model.config._attn_implementation == "weft"
    tokens = tokens_of(2, 11)
    padding = (torch.arange(11) < torch.tensor([[11], [7]])).long()
    for extra in ({}, {"attention_mask": padding}):
        gradients = []
        for each in (model, plain):
            each.zero_grad()
            logits = each(tokens, **extra).logits
            logits.square().mean().backward()
            gradients.append([logits, *(parameter.grad for parameter in each.parameters())])
        torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)
    generate = dict(max_new_tokens=6, do_sample=False, use_cache=True)
    assert torch.equal(model.eval().generate(tokens, **generate), plain.eval().generate(tokens, **generate))


def test_attention_refuses_what_it_does_not_know():
    from weft.adapters.hugging_face import attention, register
    from weft.context_parallel.transformers_attention import Pattern

    register()
    q = torch.randn(1, 2, 5, 4)
    with pytest.raises(TypeError, match="takes a mask that is a tensor or none, got str"):
        attention(nn.Identity(), q, q, q, "causal")
    for option in ({"softcap": 30.0}, {"s_aux": torch.zeros(2)}):
        with pytest.raises(ValueError, match=r"window=3, softcap=.*got a sequence that is not shared"):
            attention(nn.Identity(), q, q, q, Pattern(3), **option)


def shares(rank):
    from weft.adapters.hugging_face import register

    register()
    config = config_of("Mistral", sliding_window=4)
    plain, model = made(config, "sdpa"), made(config, "weft")
    weft.parallelize(model, weft.init_mesh(cp=2, tp=2, device_type="cpu"), context={"strict": True})
    assert weft.shard_of(model.model.layers[0].self_attn.q_proj.weight) is not None
    tokens = tokens_of(2, 11)
    torch.testing.assert_close(model(tokens).logits, plain(tokens).logits, rtol=1e-5, atol=1e-5)
    assert [row.kind for row in weft.explain(model).sequence].count("attention") == 2


def test_attention_of_a_shared_sequence_is_context_attention():
    run_ranks(shares, 4)


# transformers' Trainer

STEPS, BATCH, LENGTH = 3, 4, 9


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return STEPS * BATCH

    def __getitem__(self, index):
        tokens = tokens_of(1, LENGTH, seed=index)[0]
        return {"input_ids": tokens, "labels": tokens}


def options_of(folder):
    return dict(
        output_dir=folder,
        max_steps=STEPS,
        logging_steps=1,
        per_device_eval_batch_size=2,
        logging_nan_inf_filter=False,
        learning_rate=0.3,
        lr_scheduler_type="constant",
        optim="sgd",
        report_to="none",
        disable_tqdm=True,
        seed=7,
    )


def trained(trainer):
    """Losses and norms of the steps; and at last the loss of an evaluation."""
    trainer.train()
    evaluated = trainer.evaluate(Data())["eval_loss"]
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(history) == STEPS
    return torch.tensor([[entry["loss"], entry["grad_norm"]] for entry in history] + [[evaluated, 1.0]])


def plainly(rank, folder, batch=BATCH, max_grad_norm=1.0):
    """transformers' own run: losses and norms, and the parameters before and after."""
    model = made(config_of(), "sdpa")
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    arguments = transformers.TrainingArguments(
        use_cpu=True,
        save_strategy="no",
        per_device_train_batch_size=batch,
        max_grad_norm=max_grad_norm,
        **options_of(folder),
    )
    figures = trained(transformers.Trainer(model, arguments, train_dataset=Data()))
    return figures, before, {name: parameter.detach() for name, parameter in model.named_parameters()}


def launched(rank):
    """As torchrun does."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", OMP_NUM_THREADS="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # nobody listens: the group is up already
    warnings.simplefilter("ignore")


TOLERANCE = dict(rtol=1e-4, atol=2e-5)


def assert_same_run(figures, parameters, expected):
    expected_figures, before, after = expected
    torch.testing.assert_close(figures, expected_figures, **TOLERANCE)
    moved = max((after[name] - before[name]).abs().max() for name in after)
    assert moved > 100 * TOLERANCE["atol"], "the run must have trained something"
    for name, parameter in parameters:
        shard = weft.shard_of(parameter)
        whole = after[name] if shard is None else shard.take(after[name])
        torch.testing.assert_close(parameter.detach(), whole, **TOLERANCE, msg=name)


def trains_split(rank, folder, sizes, expected):
    from weft.adapters.trainer import settings

    mesh = weft.init_mesh(**sizes, device_type="cpu")
    model = weft.parallelize(made(config_of(), "sdpa"), mesh)
    given = settings(mesh, max_grad_norm=0.5, per_device_train_batch_size=BATCH, **options_of(folder))
    trainer = transformers.Trainer(model, train_dataset=Data(), **given)
    assert trainer.args.world_size == 1 and trainer.is_world_process_zero() == (rank == 0)
    figures = trained(trainer)
    assert trainer.model_wrapped is model
    assert ("tp" in sizes) == any(weft.shard_of(parameter) is not None for parameter in model.parameters())
    assert_same_run(figures, model.named_parameters(), expected)
    trainer.save_model(folder)
    saved = type(model).from_pretrained(folder, dtype=torch.float32).state_dict()
    for name, whole in weft.full_state_dict(model).items():
        assert torch.equal(saved[name], whole), name
    with pytest.raises(TypeError, match="Linear has no save_pretrained"):
        transformers.Trainer(nn.Linear(2, 2), train_dataset=Data(), **given)


@pytest.mark.parametrize("dimension", ["tp", "cp"])
def test_trainer_of_a_split_model_is_trainer_of_the_plain_one(dimension, tmp_path):
    expected = run_ranks(plainly, 1, str(tmp_path), BATCH, 0.5, backend=None)[0]
    assert (expected[0][:, 1] > 0.5).all(), "the gradients must be clipped"
    run_ranks(trains_split, 2, str(tmp_path), {dimension: 2}, expected, before=launched, timeout_s=120)


def trains_replicas(rank, folder, expected):
    figures, _, after = plainly(rank, folder, BATCH // 2)
    state = accelerate.PartialState()
    assert (state.num_processes, state.process_index) == (2, rank)
    assert dist.get_backend() == "weft"
    assert_same_run(figures, [(name, value) for name, value in after.items()], expected)


def test_trainer_of_two_replicas_is_trainer_of_the_whole_batch(tmp_path):
    expected = run_ranks(plainly, 1, str(tmp_path), backend=None)[0]
    run_ranks(trains_replicas, 2, str(tmp_path), expected, before=launched, timeout_s=120)


def refuses_settings(rank, folder):
    from weft.adapters.trainer import settings

    mesh = weft.init_mesh(tp=2, device_type="cpu")
    for option, value, message in (
        ("push_to_hub", True, "upload the folder"),
        ("fsdp", "full_shard", "zero=3"),
        ("use_liger_kernel", True, "as if they were whole"),
        ("use_cpu", False, "is not possible with a mesh of cpu"),
    ):
        with pytest.raises(ValueError, match=f"settings: {option}={value!r}.*{message}"):
            settings(mesh, output_dir=folder, **{option: value})
    settings(mesh, output_dir=folder, push_to_hub=False, fp16=False, fsdp="", use_cpu=True)
    with pytest.raises(ValueError, match="the mesh has pp=2; it is for dp, cp and tp"):
        settings(weft.init_mesh(pp=2, device_type="cpu"), output_dir=folder)


def test_trainer_settings_that_go_wrong_with_shards_are_refused(tmp_path):
    run_ranks(refuses_settings, 2, str(tmp_path), before=launched)


# accelerate's mesh


def takes_mesh(rank):
    from accelerate import ParallelismConfig

    from weft.adapters.accelerate import mesh_of

    theirs = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2, tp_size=2)
    with pytest.raises(ValueError, match="dp_shard_size=2: pass zero=3"):
        mesh_of(theirs, "cpu")
    with pytest.raises(ValueError, match="pass dp_replicate_size=1"):
        mesh_of(theirs, zero=3)
    mesh = mesh_of(theirs, replicate_shards=True)
    assert mesh.mesh_dim_names == ("dp", "tp") and mesh.shape == (4, 2)
    assert mesh["tp"].get_group() is theirs.device_mesh["tp"].get_group()
    assert dist.get_process_group_ranks(mesh["dp"].get_group()) == [rank % 2 + 2 * replica for replica in range(4)]
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)).double()
    model = weft.parallelize(copy.deepcopy(plain), mesh, plan={"0": "column", "2": "row"})
    x = torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model(x.chunk(4)[rank // 2]).square().mean().backward()
    plain(x).square().mean().backward()
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        shard = weft.shard_of(parameter)
        whole = expected.grad if shard is None else shard.take(expected.grad)
        torch.testing.assert_close(parameter.grad, whole, rtol=1e-11, atol=1e-12)
    mesh = mesh_of(ParallelismConfig(dp_shard_size=4, tp_size=2), "cpu", zero=3)
    model = weft.parallelize(copy.deepcopy(plain).requires_grad_(), mesh, plan={"0": "column", "2": "row"}, zero=3)
    model(x.chunk(4)[rank // 2]).square().mean().backward()
    norms = [nn.utils.clip_grad_norm_(each.parameters(), 1.0) for each in (model, plain)]
    torch.testing.assert_close(*norms, rtol=1e-11, atol=1e-12)
    for sizes, names in (({"tp_size": 8}, ("tp",)), ({"cp_size": 4, "tp_size": 2}, ("cp", "tp"))):
        assert mesh_of(ParallelismConfig(**sizes), "cpu").mesh_dim_names == names
    assert mesh_of(ParallelismConfig(dp_replicate_size=8), "cpu").mesh_dim_names == ("dp",)
    with pytest.raises(ValueError, match="has nothing larger than 1"):
        mesh_of(ParallelismConfig(), "cpu")
    with pytest.raises(ValueError, match="sp_size=8 is DeepSpeed's"):
        mesh_of(ParallelismConfig(sp_size=8), "cpu")
    with pytest.raises(ValueError, match=r"the mesh has the dimensions \('x',\)"):
        mesh_of(init_device_mesh("cpu", (8,), mesh_dim_names=("x",)))


def test_an_accelerate_mesh_keeps_its_groups_and_gets_our_names():
    run_ranks(takes_mesh, 8)


# versions


def test_a_version_that_is_too_old_is_named(monkeypatch):
    import weft.adapters

    found = {"torch": "2.13.0+cpu", "transformers": "5.3.0rc1"}
    monkeypatch.setattr(weft.adapters, "version", found.__getitem__)
    need("x", "torch", "2.11")
    need("x", "transformers", "5.3")
    with pytest.raises(
        ImportError, match=r"x needs transformers >= 5\.23; this Python has transformers 5\.3\.0rc1: pip"
    ):
        need("x", "transformers", "5.23")
    monkeypatch.undo()
    with pytest.raises(ImportError, match="this Python has no weft-never-released: pip install"):
        need("x", "weft-never-released", "1")
