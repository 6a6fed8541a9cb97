"""LoRA of peft on split layers: the training, the files and the outputs of an unsplit run."""

import copy
import json
import subprocess
import sys
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

import weft
from weft.testing.ranks import run_ranks

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")

from peft import LoraConfig, PeftModel, get_peft_model  # noqa: E402
from peft.utils.hotswap import hotswap_adapter  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

SIZES = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=46,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
ENCODER = {key: SIZES[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
ENCODER |= dict(num_attention_heads=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
FALCON = {key: SIZES[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
GPT2 = dict(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2)
DRY = dict(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)


def of_transformers(config, head="ForCausalLM", **options):
    return getattr(transformers, f"{config}{head}")(getattr(transformers, f"{config}Config")(**options))


FAMILIES = {
    "Llama": partial(of_transformers, "Llama", **SIZES, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "Mistral": partial(of_transformers, "Mistral", **SIZES, head_dim=8),
    "Qwen2": partial(of_transformers, "Qwen2", **SIZES),
    "Qwen3": partial(of_transformers, "Qwen3", **SIZES, head_dim=8),
    "Gemma": partial(of_transformers, "Gemma", **SIZES, head_dim=8),
    "Gemma2": partial(of_transformers, "Gemma2", **SIZES, head_dim=8, sliding_window=5, query_pre_attn_scalar=8),
    "Phi3": partial(of_transformers, "Phi3", **SIZES),
    "GPT2": partial(of_transformers, "GPT2", "LMHeadModel", **GPT2, **DRY),
    "GPTNeoX": partial(of_transformers, "GPTNeoX", **SIZES),
    "OPT": partial(
        of_transformers,
        "OPT",
        **{**ENCODER, "ffn_dim": 46, "max_position_embeddings": 64, "word_embed_proj_dim": 32, "dropout": 0.0},
    ),
    "Bert": partial(of_transformers, "Bert", "ForMaskedLM", **ENCODER),
    "Falcon": partial(
        of_transformers,
        "Falcon",
        **FALCON,
        **dict(ffn_hidden_size=46, hidden_dropout=0.0, attention_dropout=0.0),
        new_decoder_architecture=True,
        num_kv_heads=2,
    ),
    "Granite": partial(of_transformers, "Granite", **SIZES),
    "Cohere": partial(of_transformers, "Cohere", **SIZES),
    "Starcoder2": partial(of_transformers, "Starcoder2", **SIZES, residual_dropout=0.0, embedding_dropout=0.0),
}
KINDS = {"LoRA": {}, "rsLoRA": {"use_rslora": True}, "DoRA": {"use_dora": True}}


@pytest.fixture(scope="module", autouse=True)
def _import_models():
    """Import the code of every model here, once, and not in every rank."""
    for make in FAMILIES.values():
        make()


class InDouble(TorchFunctionMode):
    """Mode in which transformers' norms and softmaxes stay in fp64, where they would compute in fp32."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        double = {torch.float32: torch.float64}
        args = tuple(double.get(x, x) if isinstance(x, torch.dtype) else x for x in args)
        kwargs = {key: double.get(x, x) if isinstance(x, torch.dtype) else x for key, x in (kwargs or {}).items()}
        return func(*args, **kwargs)


def config_of(**options):
    return LoraConfig(**{"r": 3, "lora_alpha": 5, "target_modules": "all-linear", **options})


def with_adapter(model, seed=5, **options):
    torch.manual_seed(seed)
    return get_peft_model(model, config_of(**options)).double()


def pair(make, order, **options):
    """Return the plain peft model, and the split one made in one of both orders."""
    torch.manual_seed(3)
    plain = make().double().train()
    split = copy.deepcopy(plain)
    if order == "peft first":
        split = weft.parallelize(with_adapter(split, **options))
    else:
        split = with_adapter(weft.parallelize(split), **options)
    return with_adapter(plain, **options), split


def batch_of(step=0, rows=2):
    tokens = torch.randint(3, 60, (rows, 7), generator=torch.Generator().manual_seed(7 + step))
    return {"input_ids": tokens, "labels": tokens}


def trained(model, steps, **more):
    optimizer = torch.optim.AdamW([x for x in model.parameters() if x.requires_grad], lr=5e-3)
    for step in range(steps):
        with InDouble():
            loss = model(**batch_of(step), **more).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return loss


def own_part(parameter, whole):
    shard = weft.shard_of(parameter)
    return whole if shard is None else shard.take(whole)


def close(result, expected, tolerance=1e-9):
    """Compare with the largest value, not with each, because some are zero."""
    error = (result.as_subclass(torch.Tensor) - expected).abs().max().item()
    return error <= tolerance * max(expected.abs().max().item(), 1e-3)


def check_training(plain, split, steps=3, **more):
    split_adapters = 0
    for name, parameter in split.named_parameters():
        assert close(parameter, own_part(parameter, plain.get_parameter(name)), 1e-12), f"{name} starts in another way"
        split_adapters += "lora_" in name and weft.shard_of(parameter) is not None
    assert split_adapters
    expected, result = trained(plain, steps, **more), trained(split, steps, **more)
    assert close(result, expected)
    for name, parameter in split.named_parameters():
        other = plain.get_parameter(name)
        assert (parameter.grad is None) == (other.grad is None), name
        if other.grad is not None:
            assert close(parameter.grad, own_part(parameter, other.grad)), f"gradient of {name}"
        assert close(parameter, own_part(parameter, other)), name
    weft.check_replicas(split)


def outputs(model):
    model.eval()
    with InDouble(), torch.no_grad():
        return model(input_ids=batch_of(20)["input_ids"]).logits


def check_family(name, order, kind, folder):
    plain, split = pair(FAMILIES[name], order, **KINDS[kind])
    check_training(plain, split)
    assert close(outputs(split), outputs(plain)), name
    files = [folder / name / order / which for which in ("plain", "split")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        split.save_pretrained(files[1])
        if dist.get_rank() == 0:
            plain.save_pretrained(files[0])
            expected, result = (load_file(file / "adapter_model.safetensors") for file in files)
            assert list(result) == list(expected)
            assert all(result[key].shape == x.shape and close(result[key], x) for key, x in expected.items())
            configs = (json.loads((file / "adapter_config.json").read_text()) for file in files)
            assert next(configs) == next(configs)


def check_families(rank, cases, folder):
    for name, order, kind in cases:
        try:
            check_family(name, order, kind, folder)
        except Exception as error:
            raise AssertionError(f"{name}, {order}, {kind}: {type(error).__name__}: {error}") from error


ORDERS = ("peft first", "weft first")
SOME = [(name, ORDERS[i % 2], [*KINDS][i % 3]) for i, name in enumerate(FAMILIES)]
OTHERS = [(name, order, [*KINDS][(i + j) % 3]) for i, name in enumerate(FAMILIES) for j, order in enumerate(ORDERS, 1)]


@pytest.mark.parametrize(
    "part",
    [
        0,
        *(
            pytest.param(x, marks=pytest.mark.slow("pytorch_ext/adapters", "pytorch_ext/tensor_parallel"))
            for x in range(1, 5)
        ),
    ],
)
def test_every_family_trains_as_the_unsplit_adapter(part, tmp_path):
    run_ranks(check_families, 2, SOME[part::5], tmp_path, timeout_s=120)


@pytest.mark.slow("pytorch_ext/adapters", "pytorch_ext/tensor_parallel")
@pytest.mark.parametrize("part", range(3))
def test_every_family_trains_as_the_unsplit_adapter_over_three_ranks(part, tmp_path):
    run_ranks(check_families, 3, OTHERS[part::3], tmp_path, timeout_s=300)


# What else a fine-tuning does


def check_everything_trained(rank, order):
    """Embedding, scores and norms too; the first layers' ranks and scales differ."""
    options = dict(
        target_modules=["embed_tokens", "q_proj", "o_proj", "down_proj", "lm_head"],
        rank_pattern={"q_proj": 2},
        alpha_pattern={"o_proj": 9},
        modules_to_save=["norm"],
        bias="lora_only",
        lora_bias=False,
    )
    make = partial(of_transformers, "Llama", **{**SIZES, "attention_bias": True})
    plain, split = pair(make, order, **options)
    assert weft.shard_of(split.get_input_embeddings().base_layer.weight).dim == 0
    check_training(plain, split)
    assert close(outputs(split), outputs(plain))


def check_heads_saved(rank, order):
    """A head that is trained whole is split as the one that it replaces."""
    make = partial(of_transformers, "Llama", **SIZES)
    plain, split = pair(make, order, target_modules=["q_proj"], modules_to_save=["lm_head"])
    head = split.base_model.model.lm_head
    assert weft.shard_of(head.modules_to_save["default"].weight) is not None
    assert weft.shard_of(head.original_module.weight) is not None
    check_training(plain, split)
    assert close(outputs(split), outputs(plain))
    with split.disable_adapter(), plain.disable_adapter():
        assert close(outputs(split), outputs(plain))


@pytest.mark.parametrize("order", [ORDERS[1], pytest.param(ORDERS[0], marks=pytest.mark.slow("pytorch_ext/adapters"))])
def test_embeddings_heads_biases_and_saved_modules_train_as_unsplit(order):
    run_ranks(check_everything_trained, 2, order)
    run_ranks(check_heads_saved, 2, order)


def check_switching(rank, order):
    plain, split = pair(FAMILIES["Llama"], order)
    trained(plain, 2), trained(split, 2)
    for model in (plain, split):
        torch.manual_seed(11)
        model.add_adapter("other", config_of(r=2, use_dora=True, target_modules=["q_proj", "down_proj"]))
        model.double()
        model.set_adapter("other")
    check_training(plain, split, steps=2)
    base = {}
    for active in ("default", "other"):
        plain.set_adapter(active), split.set_adapter(active)
        base[active] = outputs(plain)
        assert close(outputs(split), base[active])
        with plain.disable_adapter(), split.disable_adapter():
            assert close(outputs(split), outputs(plain))
        split.merge_adapter()
        assert close(outputs(split), base[active])
        split.unmerge_adapter()
        assert close(outputs(split), base[active])
    assert not close(base["default"], base["other"])
    split.delete_adapter("other"), plain.delete_adapter("other")
    split.set_adapter("default"), plain.set_adapter("default")
    assert close(split.merge_and_unload()(**batch_of()).logits, plain.merge_and_unload()(**batch_of()).logits, 1e-5)


def check_mixed_batch(rank, order):
    plain, split = pair(FAMILIES["Phi3"], order)
    for model in (plain, split):
        torch.manual_seed(11)
        model.add_adapter("other", config_of(r=2, init_lora_weights=False))
        model.double().eval()
    for name, parameter in split.named_parameters():
        if "lora_B.default" in name:
            value = torch.linspace(-1, 1, plain.get_parameter(name).numel()).view_as(plain.get_parameter(name)).double()
            plain.get_parameter(name).data.copy_(value)
            parameter.data.copy_(own_part(parameter, value))
    tokens, names = batch_of(rows=3)["input_ids"], ["other", "__base__", "default"]
    with InDouble(), torch.no_grad():
        result, expected = (model(input_ids=tokens, adapter_names=names).logits for model in (split, plain))
    assert close(result, expected)


@pytest.mark.parametrize("order", [ORDERS[0], pytest.param(ORDERS[1], marks=pytest.mark.slow("pytorch_ext/adapters"))])
def test_adapters_are_added_switched_merged_mixed_and_deleted_as_unsplit(order):
    run_ranks(check_switching, 2, order)
    run_ranks(check_mixed_batch, 2, order)


def check_dropout(rank):
    """Column layers drop the same elements on every rank: A's gradients are equal. Row layers drop their own."""
    for order in ORDERS:
        _, split = pair(FAMILIES["GPT2"], order, lora_dropout=0.4)
        trained(split, 2)
        weft.check_replicas(split)
        mlp = split.base_model.model.transformer.h[0].mlp
        assert type(mlp.c_proj.lora_dropout["default"]) is weft.nn.ShardedDropout
        assert type(mlp.c_fc.lora_dropout["default"]) is nn.Dropout
        row = mlp.c_proj.lora_dropout["default"]
        mine = row(torch.ones(64))
        both = split.base_model.model.lm_head.communicator.all_gather(mine, 0, [64, 64])
        assert not torch.equal(both[:64], both[64:])


def test_dropout_is_alike_where_the_input_is_whole_and_own_where_it_is_split():
    run_ranks(check_dropout, 2)


def check_no_communication_forward(rank):
    make = partial(of_transformers, "Llama", **SIZES)
    torch.manual_seed(3)
    model = weft.parallelize(make().eval(), checks="off")
    with torch.no_grad():
        model(**batch_of())
        base = _collectives(model)
        model = with_adapter(model.float()).float().eval()
        assert _collectives(model) == base > 0


def _collectives(model):
    ranks = next(m.communicator for m in model.modules() if isinstance(m, weft.ParallelLinear))
    count, kind = [0], type(ranks)
    known = {name: getattr(kind, name) for name in ("all_reduce_", "all_gather_into", "reduce_scatter_into")}
    try:
        for name, function in known.items():
            setattr(kind, name, partialmethod_counting(function, count))
        model(**batch_of())
    finally:
        for name, function in known.items():
            setattr(kind, name, function)
    return count[0]


def partialmethod_counting(function, count):
    def counting(self, *args, **kwargs):
        count[0] += 1
        return function(self, *args, **kwargs)

    return counting


def test_adapters_communicate_nothing_in_forward():
    run_ranks(check_no_communication_forward, 2)


# Files


def filled(model):
    """Give the adapters values that no two ranks and no two tensors share."""
    for number, parameter in enumerate(model.parameters()):
        if parameter.requires_grad:
            shard = weft.shard_of(parameter)
            whole = torch.randn(
                parameter.shape if shard is None else shard.global_shape,
                generator=torch.Generator().manual_seed(number),
            )
            parameter.data.copy_(own_part(parameter, whole))
    return model


def check_files(rank, order, name, options, folder):
    torch.manual_seed(3)
    plain, split = pair(FAMILIES[name], order, **options)
    split.save_pretrained(folder / "split")
    filled(plain), filled(split)
    split.save_pretrained(folder / "split")
    files = [folder / which / "adapter_model.safetensors" for which in ("plain", "split")]
    if rank == 0:
        plain.save_pretrained(folder / "plain")
        assert files[0].read_bytes() == files[1].read_bytes()
    dist.barrier()

    torch.manual_seed(3)
    base = FAMILIES[name]().double()
    onto_split = PeftModel.from_pretrained(weft.parallelize(copy.deepcopy(base)), folder / "plain").double()
    split_after = weft.parallelize(PeftModel.from_pretrained(copy.deepcopy(base), folder / "plain").double())
    expected = outputs(plain)
    for model in (onto_split, split_after):
        assert close(outputs(model), expected)
        assert not model.get_parameter(next(n for n, _ in model.named_parameters() if "lora_A" in n)).requires_grad
    if "bias" not in options:  # which peft allows of one adapter alone
        onto_split.load_adapter(folder / "split", adapter_name="again", low_cpu_mem_usage=True)
        onto_split.double().set_adapter("again")
        assert close(outputs(onto_split), expected)


@pytest.mark.parametrize(
    ("world", "order", "family"),
    [
        (2, ORDERS[0], "Llama"),
        *(
            pytest.param(*case, marks=pytest.mark.slow("pytorch_ext/adapters"))
            for case in (
                (3, ORDERS[0], "Llama"),
                (3, ORDERS[1], "Llama"),
                (2, ORDERS[0], "Phi3"),
                (2, ORDERS[1], "Phi3"),
            )
        ),
    ],
)
def test_the_file_is_the_unsplit_adapters_byte_for_byte_and_loads_on_any_mesh(world, order, family, tmp_path):
    options = {
        "Llama": {"use_dora": True, "modules_to_save": ["lm_head"], "bias": "all"},
        "Phi3": {"target_modules": ["embed_tokens", "qkv_proj", "down_proj"]},
    }
    run_ranks(check_files, world, order, family, options[family], tmp_path, timeout_s=120)


# Other plans and meshes


def check_own_plan(rank):
    """A plan may name peft's layers; it means what they wrap."""
    plain, _ = pair(FAMILIES["Llama"], "peft first")
    torch.manual_seed(3)
    model = with_adapter(FAMILIES["Llama"]().double().train())
    split = weft.parallelize(model, plan={"**.gate_proj": "column", "**.up_proj": "column", "**.down_proj": "row"})
    check_training(plain, split, steps=2)


def check_over_a_sequence(rank):
    mesh = weft.init_mesh(cp=2, tp=2, device_type="cpu")
    torch.manual_seed(3)
    plain = FAMILIES["Llama"]().double().train()
    split = weft.parallelize(with_adapter(copy.deepcopy(plain), use_dora=True), mesh)
    plain = with_adapter(plain, use_dora=True)
    for model in (plain, split):
        model(**batch_of()).loss.backward()
    for name, parameter in split.named_parameters():
        if parameter.requires_grad:
            assert close(parameter.grad, own_part(parameter, plain.get_parameter(name).grad), 1e-5), name


def test_a_plan_of_ones_own_may_name_the_wrappers():
    run_ranks(check_own_plan, 2)


@pytest.mark.slow("pytorch_ext/adapters", "pytorch_ext/context_parallel")
def test_adapters_train_on_a_shared_sequence():
    run_ranks(check_over_a_sequence, 4, timeout_s=120)


# transformers' Trainer


class Sentences(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return {key: x[0] for key, x in batch_of(index, rows=1).items()}


def options_of(folder):
    return dict(
        output_dir=str(folder),
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_grad_norm=0.1,
        learning_rate=1e-2,
        eval_strategy="steps",
        eval_steps=1,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
    )


def history_of(trainer):
    trainer.train()
    kept = ("loss", "grad_norm", "eval_loss")
    return [entry[key] for entry in trainer.state.log_history for key in kept if key in entry]


def trains_plain(rank, folder):
    torch.manual_seed(3)
    model = with_adapter(FAMILIES["Llama"]()).float()
    arguments = transformers.TrainingArguments(use_cpu=True, save_strategy="no", **options_of(folder))
    trainer = transformers.Trainer(model, arguments, train_dataset=Sentences(), eval_dataset=Sentences())
    history = history_of(trainer)
    trainer.save_model(str(folder))
    return history


def trains_split(rank, folder):
    from weft.adapters.trainer import settings

    warnings.simplefilter("ignore")
    mesh = weft.init_mesh(tp=2, device_type="cpu")
    torch.manual_seed(3)
    model = weft.parallelize(with_adapter(FAMILIES["Llama"]()).float(), mesh)
    given = settings(mesh, **options_of(folder))
    trainer = transformers.Trainer(model, train_dataset=Sentences(), eval_dataset=Sentences(), **given)
    history = history_of(trainer)
    trainer.save_model(str(folder))
    return history


def test_trainer_with_an_adapter_is_trainer_of_the_plain_one(tmp_path):
    expected = run_ranks(trains_plain, 1, tmp_path / "plain", backend=None)[0]
    for result in run_ranks(trains_split, 2, tmp_path / "split"):
        assert result == pytest.approx(expected, rel=1e-4) and len(result) == 9
    plain, split = (load_file(tmp_path / which / "adapter_model.safetensors") for which in ("plain", "split"))
    assert plain.keys() == split.keys()
    assert all(torch.allclose(split[name], x, rtol=1e-3, atol=1e-3) for name, x in plain.items())
    moved = max(x.abs().max() for name, x in split.items() if "lora_B" in name)
    assert moved > 1e-2


LATER = """
import importlib.util
import sys
import weft
from torch import nn
weft.parallelize(nn.Linear(4, 4), weft.init_mesh(tp=1, device_type="cpu"))
assert not {"peft", "transformers"} & set(sys.modules)
assert importlib.util.find_spec("peft") and "peft" not in sys.modules  # transformers asks so
import peft
from peft.tuners.lora.model import dispatch_default
print(dispatch_default.__wrapped__.__name__, peft.PeftModel.save_pretrained.__wrapped__.__name__)
"""


@pytest.mark.slow("pytorch_ext/adapters")
def test_peft_may_be_imported_after_the_split():
    done = subprocess.run([sys.executable, "-c", LATER], capture_output=True, text=True)
    assert done.stdout == "dispatch_default save_pretrained\n", done.stderr


# Mistakes


def raises(kind, message, function, *args, **options):
    with pytest.raises(kind, match=message):
        function(*args, **options)


def check_mistakes(rank, folder):
    make = partial(of_transformers, "Llama", **SIZES)
    ia3 = get_peft_model(make(), peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]))
    raises(ValueError, "'default' is of peft's IA3, and only those of LORA", weft.parallelize, ia3)
    large = get_peft_model(make(), config_of(r=33))
    raises(ValueError, "q_proj: LoRA of rank 33 on ParallelLinear.32, 32.: the rank", weft.parallelize, large)
    assert not any(weft.shard_of(x) for x in large.parameters())
    split = weft.parallelize(make())
    before = [name for name, _ in split.named_modules()]
    raises(ValueError, "LoRA of rank 17", get_peft_model, copy.deepcopy(split), config_of(r=17))
    raises(
        ValueError,
        "pissa.* computes with the whole",
        get_peft_model,
        copy.deepcopy(split),
        config_of(init_lora_weights="pissa"),
    )
    torch.manual_seed(rank)
    raises(
        ValueError, "differs between rank 0 and rank 1.*: seed all", get_peft_model, copy.deepcopy(split), config_of()
    )
    torch.manual_seed(0)

    wide = get_peft_model(of_transformers("Llama", **{**SIZES, "hidden_size": 48}), config_of())
    deep = get_peft_model(of_transformers("Llama", **{**SIZES, "num_hidden_layers": 3}), config_of())
    if rank == 0:
        (
            wide.save_pretrained(folder / "wide"),
            deep.save_pretrained(folder / "deep"),
            deep.save_pretrained(folder / "torn"),
        )
        torn = folder / "torn" / "adapter_model.safetensors"
        torn.write_bytes(torn.read_bytes()[:-100])
    dist.barrier()
    raises(
        ValueError,
        "another model: .*lora_A.weight is .3, 48., and the layer has 32",
        PeftModel.from_pretrained,
        split,
        folder / "wide",
    )
    raises(
        ValueError,
        "the model has no base_model.model.model.layers.2",
        PeftModel.from_pretrained,
        split,
        folder / "deep",
    )
    raises(weft.CheckpointError, "is torn", PeftModel.from_pretrained, split, folder / "torn")
    assert [name for name, _ in split.named_modules()] == before


def test_mistakes_are_errors_on_every_rank_before_anything_is_replaced(tmp_path):
    run_ranks(check_mistakes, 2, tmp_path)


def whole_or_refused(rank, folder):
    plain, split = pair(FAMILIES["Llama"], "peft first", init_lora_weights=False)
    for model in (plain, split):
        torch.manual_seed(6)
        model.add_adapter("other", config_of(init_lora_weights=False))
        model.double()
    for kind in ("linear", "cat"):
        split.add_weighted_adapter(["default", "other"], [0.5, 0.5], kind, combination_type=kind)
    for kind in ("svd", "ties", "magnitude_prune"):
        with pytest.raises(ValueError, match="looks at whole matrices"):
            split.add_weighted_adapter(["default", "other"], [0.5, 0.5], kind, combination_type=kind, density=0.5)
    split.save_pretrained(folder / "adapter", selected_adapters=["default"])
    with pytest.raises(ValueError, match="whole matrices in the place of this rank's parts"):
        hotswap_adapter(split, str(folder / "adapter"), "default")
    tokens = {"input_ids": batch_of()["input_ids"]}
    plain.set_adapter("default")
    split.set_adapter("default")
    merged = split.merge_and_unload()
    merged.save_pretrained(folder / "merged")
    weft.barrier()
    read = type(merged).from_pretrained(folder / "merged", dtype=torch.float64)
    with torch.no_grad(), InDouble():
        torch.testing.assert_close(read(**tokens).logits, plain(**tokens).logits)


def trained_tokens(rank):
    torch.manual_seed(3)
    whole = get_peft_model(FAMILIES["Llama"](), config_of(trainable_token_indices=[1, 5]))
    with pytest.raises(ValueError, match="trainable_token_indices are rows of the whole embedding"):
        weft.parallelize(whole, weft.init_mesh(tp=2, device_type="cpu"))
    split = weft.parallelize(FAMILIES["Llama"](), weft.init_mesh(tp=2, device_type="cpu"))
    with pytest.raises(ValueError, match="trainable_token_indices are rows of the whole embedding"):
        get_peft_model(split, config_of(trainable_token_indices=[1, 5]))


def saved_sharded(rank, folder):
    torch.manual_seed(3)
    plain = with_adapter(FAMILIES["Llama"](), init_lora_weights=False)
    model = weft.parallelize(copy.deepcopy(plain), weft.init_mesh(dp=2, device_type="cpu"), zero=3)
    model.save_pretrained(folder)
    weft.barrier()
    torch.manual_seed(3)
    read = PeftModel.from_pretrained(FAMILIES["Llama"](), folder).double()
    for name, parameter in plain.named_parameters():
        if "lora_" in name:
            torch.testing.assert_close(read.get_parameter(name), parameter, rtol=1e-6, atol=1e-7)


def test_what_needs_whole_matrices_is_refused_and_a_merged_model_saves_whole(tmp_path):
    run_ranks(whole_or_refused, 2, tmp_path)


def test_trained_rows_of_a_split_embedding_are_refused():
    run_ranks(trained_tokens, 2)


def test_adapters_of_a_model_with_zero_3_are_saved_whole(tmp_path):
    run_ranks(saved_sharded, 2, tmp_path)


def wrong_orders(rank):
    """What adapters cannot be put around, or be split with."""
    wrapped = weft.parallelize(FAMILIES["Llama"](), weft.init_mesh(dp=2, device_type="cpu"))
    with pytest.raises(ValueError, match="add the adapters before weft.parallelize"):
        get_peft_model(wrapped, config_of())
    on_experts = config_of(target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"])
    model, mesh = (
        of_transformers("Mixtral", **SIZES, num_local_experts=4),
        weft.init_mesh(dp=2, ep=2, device_type="cpu"),
    )
    with pytest.raises(ValueError, match="has target_parameters, matrices of experts"):
        weft.parallelize(get_peft_model(model, on_experts), mesh)


def test_adapters_around_a_wrap_or_around_experts_over_ep_are_refused():
    run_ranks(wrong_orders, 2)
