"""transformers' whole loop on a split model: its losses, its checkpoints, and going on with them on another mesh."""

import json
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import weft
from weft.testing.ranks import run_ranks

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")

from safetensors.torch import load_file  # noqa: E402

transformers.Trainer  # imported here once instead of in each rank
transformers.LlamaForCausalLM

SIZES = dict(
    vocab_size=61,
    hidden_size=24,
    intermediate_size=45,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
STEPS, EVERY = 6, 2
# Batches of whole micro-batches.
IN_HALVES = dict(per_device_train_batch_size=4, per_device_eval_batch_size=4, dataloader_drop_last=True)
CLOSE = dict(rel=1e-4, abs=1e-5)


class Sentences(torch.utils.data.Dataset):
    """22 rows, each fourth with labels everywhere: eight batches of three rows an epoch, the last of one."""

    def __len__(self):
        return 22

    def __getitem__(self, index):
        tokens = torch.randint(3, 60, (7,), generator=torch.Generator().manual_seed(index))
        labels = tokens.clone()
        labels[: index % 4] = -100
        return {"input_ids": tokens, "labels": labels}


def model_of(adapters=False, dropout=0.0):
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, attention_dropout=dropout))
    if adapters:
        torch.manual_seed(5)
        config = peft.LoraConfig(r=3, lora_alpha=8, target_modules="all-linear", lora_dropout=dropout)
        model = peft.get_peft_model(model, config)
    return model


def options_of(folder, **more):
    """With the worst evaluation as the best, which is the first, the model at the end is not the last one."""
    return {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.3,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": EVERY,
        "save_steps": EVERY,
        "logging_steps": 1,
        "save_total_limit": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,
        "report_to": "none",
        "disable_tqdm": True,
        **more,
    }


def history_of(trainer, **options):
    """Losses, norms and evaluations by step, and those of the steps before a resumed one."""
    trainer.train(**options)
    kept = ("loss", "grad_norm", "eval_loss")
    return [entry[key] for entry in trainer.state.log_history for key in kept if key in entry]


def trains_plainly(rank, folder, model, **more):
    arguments = transformers.TrainingArguments(use_cpu=True, **options_of(folder, **more))
    trainer = transformers.Trainer(model_of(**model), arguments, train_dataset=Sentences(), eval_dataset=Sentences())
    return history_of(trainer)


def plainly_in_halves(rank, folder):
    return trains_plainly(rank, folder, {}, **IN_HALVES)


def split_trainer(folder, sizes, model=None, **options):
    from weft.adapters.trainer import settings

    warnings.simplefilter("ignore")
    mesh = weft.init_mesh(**sizes, device_type="cpu")
    zero = options.pop("zero", 0)
    split = weft.parallelize(model_of(**(model or {})), mesh if zero else mesh["cp", "tp"], zero=zero)
    given = settings(mesh, **options_of(folder, **options))
    return transformers.Trainer(split, train_dataset=Sentences(), eval_dataset=Sentences(), **given)


def staged_trainer(folder, sizes, **options):
    from weft.adapters.trainer import settings

    warnings.simplefilter("ignore")
    mesh = weft.init_mesh(**sizes, device_type="cpu")
    model = model_of()
    if sizes.get("tp", 1) > 1:
        model = weft.parallelize(model, mesh["tp"])
    example = {key: value[None] for key, value in Sentences()[0].items()}
    pipe = weft.Pipeline(model, mesh, microbatches=2, reduction="sum", example=example)
    given = settings(mesh, pipeline=pipe, **options_of(folder, **{**IN_HALVES, **options}))
    return transformers.Trainer(model, train_dataset=Sentences(), eval_dataset=Sentences(), **given)


def check_sharded_loop(rank, folder, sizes, expected):
    trainer = split_trainer(folder / "sharded", sizes, zero=3)
    assert history_of(trainer) == pytest.approx(expected, **CLOSE)
    resumed = split_trainer(folder / "resumed", {"dp": 4}, zero=3)
    again = history_of(resumed, resume_from_checkpoint=checkpoint_in(folder / "sharded"))
    assert again == pytest.approx(expected, **CLOSE)


@pytest.mark.slow("pytorch_ext/adapters", "pytorch_ext/checkpoint", "data_parallel")
def test_a_run_with_sharded_parameters_goes_on_as_the_plain_trainer(tmp_path):
    expected = run_ranks(trains_plainly, 1, tmp_path / "plain", {}, backend=None)[0]
    run_ranks(check_sharded_loop, 4, tmp_path, {"dp": 2, "tp": 2}, expected, timeout_s=300)


def checkpoint_in(folder, step=EVERY):
    return str(Path(folder) / f"checkpoint-{step}")


def check_loop(rank, folder, sizes, others, expected, model):
    """Train on one mesh; resume on others from its first checkpoint, which the limit must not have removed."""
    trainer = split_trainer(folder / "first", sizes, model)
    assert history_of(trainer) == pytest.approx(expected, **CLOSE)
    checkpoints = {path.name for path in (folder / "first").glob("checkpoint-*")}
    assert checkpoints == {f"checkpoint-{EVERY}", f"checkpoint-{STEPS}"}
    assert trainer.state.best_model_checkpoint == checkpoint_in(folder / "first")
    best = split_trainer(folder / "unused", sizes, model)
    best._load_from_checkpoint(checkpoint_in(folder / "first"))
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, best.model.get_parameter(name)), f"{name} is not that of the best checkpoint"
    for number, other in enumerate(others):
        resumed = split_trainer(folder / f"resumed-{number}", other, model)
        again = history_of(resumed, resume_from_checkpoint=checkpoint_in(folder / "first"))
        assert again == pytest.approx(expected, **CLOSE)


def check_files(split, plain, name):
    """A checkpoint's files are those of the plain Trainer, but for the training's."""
    for step in (EVERY, STEPS):
        folders = [Path(checkpoint_in(folder, step)) for folder in (split, plain)]
        training = {"training", "optimizer.pt", "scheduler.pt", "rng_state.pth"}
        names = [{path.name for path in folder.iterdir()} - training for folder in folders]
        assert names[0] == names[1]
        result, expected = (load_file(folder / name) for folder in folders)
        assert result.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.allclose(result[key], value, rtol=1e-3, atol=1e-4), key
        for file in ("config.json", "adapter_config.json"):
            texts = [json.loads((folder / file).read_text()) for folder in folders if (folder / file).exists()]
            assert texts[:1] == texts[1:]


def check_plain_loop(tmp_path, world, sizes, others, **model):
    expected = run_ranks(trains_plainly, 1, tmp_path / "plain", model, backend=None)[0]
    assert len(expected) == 2 * STEPS + STEPS // EVERY
    run_ranks(check_loop, world, tmp_path, sizes, others, expected, model, timeout_s=300)
    name = "adapter_model.safetensors" if model.get("adapters") else "model.safetensors"
    check_files(tmp_path / "first", tmp_path / "plain", name)
    return tmp_path / "first"


def test_a_split_run_saves_and_goes_on_as_the_plain_trainer(tmp_path):
    folder = check_plain_loop(tmp_path, 2, {"tp": 2}, [{"dp": 2}])
    last = transformers.LlamaForCausalLM.from_pretrained(checkpoint_in(folder, STEPS), dtype=torch.float32)
    stored = load_file(Path(checkpoint_in(folder, STEPS)) / "model.safetensors")
    assert all(torch.equal(x, stored[name]) for name, x in last.state_dict().items())


@pytest.mark.slow("pytorch_ext/adapters", "pytorch_ext/checkpoint")
@pytest.mark.parametrize("adapters", [False, True])
def test_replicas_of_a_split_model_save_and_go_on_as_the_plain_trainer(adapters, tmp_path):
    check_plain_loop(tmp_path, 4, {"dp": 2, "tp": 2}, [{"tp": 4}, {"dp": 4}, {"cp": 2, "tp": 2}], adapters=adapters)


@pytest.mark.slow("pytorch_ext/adapters", "pytorch_ext/checkpoint")
def test_adapters_are_saved_and_go_on_as_the_plain_trainers(tmp_path):
    check_plain_loop(tmp_path, 2, {"dp": 2}, [{"tp": 2}], adapters=True)


def check_stages(rank, folder, sizes, expected):
    trainer = staged_trainer(folder / "first", sizes)
    assert history_of(trainer) == pytest.approx(expected, **CLOSE)
    assert trainer.state.best_model_checkpoint == checkpoint_in(folder / "first")
    resumed = staged_trainer(folder / "resumed", sizes)
    again = history_of(resumed, resume_from_checkpoint=checkpoint_in(folder / "first"))
    assert again == pytest.approx(expected, **CLOSE)


def check_mistakes_in_stages(rank, folder):
    from weft.adapters.trainer import settings

    mesh = weft.init_mesh(pp=2, device_type="cpu")
    with pytest.raises(ValueError, match="pp=2; it is for dp, cp and tp. Stages"):
        settings(mesh, output_dir=str(folder))
    example = {key: value[None] for key, value in Sentences()[0].items()}
    pipe = weft.Pipeline(model_of(), mesh, microbatches=2, example=example)
    with pytest.raises(ValueError, match='reduction="sum"'):
        settings(mesh, pipeline=pipe, output_dir=str(folder))
    trainer = staged_trainer(folder, {"pp": 2})
    with pytest.raises(ValueError, match="no predict"):
        trainer.predict(Sentences())
    trainer.__class__ = OwnSum
    with pytest.raises(ValueError, match="or there is a compute_loss, a compute_loss_func"):
        trainer.train()
    with pytest.raises(ValueError, match="or a label_smoothing_factor"):
        staged_trainer(folder, {"pp": 2}, label_smoothing_factor=0.1).train()


def check_uneven_rows(rank, folder):
    trainer = staged_trainer(folder, {"pp": 2, "dp": 2}, per_device_train_batch_size=3)
    with pytest.raises(ValueError, match="3 rows has no equal parts for dp=2"):
        trainer.train()


def test_rows_that_dp_does_not_divide_are_refused_in_stages(tmp_path):
    run_ranks(check_uneven_rows, 4, tmp_path, timeout_s=120)


def test_mistakes_in_stages_are_named_on_every_rank(tmp_path):
    run_ranks(check_mistakes_in_stages, 2, tmp_path, timeout_s=120)


@pytest.mark.parametrize(
    "world, sizes",
    [
        (2, {"pp": 2}),
        pytest.param(4, {"pp": 2, "tp": 2}, marks=pytest.mark.slow("pytorch_ext/adapters", "pytorch_ext/pipeline")),
        (4, {"pp": 2, "dp": 2}),
    ],
)
def test_stages_save_and_go_on_as_the_plain_trainer(world, sizes, tmp_path):
    expected = run_ranks(plainly_in_halves, 1, tmp_path / "plain", backend=None, timeout_s=200)[0]
    run_ranks(check_stages, world, tmp_path, sizes, expected, timeout_s=240)
    check_files(tmp_path / "first", tmp_path / "plain", "model.safetensors")


def check_dropout(rank, folder, sizes):
    model = {"dropout": 0.3}
    whole = history_of(split_trainer(folder / "whole", sizes, model))
    second = history_of(split_trainer(folder / "second", sizes, model))
    assert whole == second
    resumed = split_trainer(folder / "resumed", sizes, model)
    torch.rand(5)
    assert history_of(resumed, resume_from_checkpoint=checkpoint_in(folder / "whole")) == whole
    return whole


@pytest.mark.slow("pytorch_ext/adapters", "pytorch_ext/checkpoint")
def test_a_resumed_run_draws_the_random_numbers_of_the_whole_run(tmp_path):
    without = run_ranks(trains_plainly, 1, tmp_path / "plain", {}, backend=None)[0]
    for name in ("tp", "dp"):
        first, second = run_ranks(check_dropout, 2, tmp_path / name, {name: 2}, timeout_s=120)
        assert first == second != pytest.approx(without, **CLOSE)


# Mistakes


def check_unwritable(rank, folder):
    """A file stands where the first rank must make a folder; only the second rank fails; every rank raises."""
    import weft.checkpoint.save_plan as save_plan

    for name in (f"checkpoint-{EVERY}", f"checkpoint-{EVERY}/training"):
        path = folder / name.replace("/", "-") / name
        if rank == 0:
            path.parent.mkdir(parents=True)
            path.touch()
        trainer = split_trainer(path.parents[name.count("/")], {"tp": 2})
        with pytest.raises(
            (weft.CheckpointError, ValueError), match="^(rank 0: FileExists|every rank: NotADirectory)Error"
        ):
            trainer.train()
    write = save_plan.write_share

    def failing(*args, **options):
        if rank == 1:
            raise OSError("no space left")
        return write(*args, **options)

    save_plan.write_share = failing
    with pytest.raises(weft.CheckpointError, match="rank 1: OSError: no space left"):
        split_trainer(folder / "full", {"tp": 2}).train()
    save_plan.write_share = write
    assert history_of(split_trainer(folder / "full", {"tp": 2}))


@pytest.mark.slow("pytorch_ext/adapters", "pytorch_ext/checkpoint")
def test_if_one_rank_cannot_write_every_rank_raises(tmp_path):
    run_ranks(check_unwritable, 2, tmp_path, timeout_s=120)


def check_mistakes(rank, folder):
    from weft.adapters.trainer import settings

    options = {"max_steps": EVERY, "eval_strategy": "no", "load_best_model_at_end": False}
    split_trainer(folder / "bare", {"tp": 2}, save_only_model=True, **options).train()
    trainer = split_trainer(folder / "unused", {"tp": 2}, **options)
    with pytest.raises(weft.CheckpointError, match="checkpoint-2 has no folder 'training'"):
        trainer.train(resume_from_checkpoint=checkpoint_in(folder / "bare"))
    before = [x.clone() for x in trainer.model.parameters()]
    torch.distributed.barrier()
    if rank == 0:
        torn = Path(checkpoint_in(folder / "bare")) / "model.safetensors"
        torn.write_bytes(torn.read_bytes()[:-100])
    torch.distributed.barrier()
    with pytest.raises(weft.CheckpointError, match="model.safetensors"):
        trainer.train(resume_from_checkpoint=checkpoint_in(folder / "bare"))
    assert all(map(torch.equal, before, trainer.model.parameters()))

    def as_trl_patches_it(self, *args, fused_lm_head=False, **more):
        return type(self).forward(self, *args, **more)

    trainer = split_trainer(folder / "unused", {"tp": 2}, **options)
    trainer.model.forward = as_trl_patches_it.__get__(trainer.model)
    with pytest.raises(ValueError, match="TRL's fused head multiplies by the head's own weight"):
        trainer.train()

    trainer = split_trainer(folder / "unused", {"dp": 2}, **options)
    trainer.data_collator = lambda rows: {**transformers.default_data_collator(rows), "position_ids": torch.ones(1, 7)}
    with pytest.raises(ValueError, match=r"dp=2: the rows of the batch are unknown.*'position_ids': \[1, 7\]"):
        trainer.train()
    mesh = weft.init_mesh(dp=2, device_type="cpu")
    wrapped = weft.parallelize(model_of(), mesh)
    with pytest.raises(TypeError, match='DataParallel has no save_pretrained.*mesh."cp", "tp".'):
        transformers.Trainer(wrapped, train_dataset=Sentences(), **settings(mesh, **options_of(folder, **options)))


def test_mistakes_are_named_on_every_rank(tmp_path):
    run_ranks(check_mistakes, 2, tmp_path, timeout_s=120)


def test_the_parts_of_a_batch_weigh_as_the_labels_that_count():
    from weft.adapters.trainer_loop import part_of_batch

    tokens = torch.arange(10).view(5, 2)
    labels = tokens.clone()
    labels[:2] = -100
    for ranks in (2, 3, 7):
        parts = [part_of_batch({"input_ids": tokens, "labels": labels}, rank, ranks) for rank in range(ranks)]
        assert sum(weight for _, weight in parts) == pytest.approx(1)
        means = [part["labels"][part["labels"] != -100].float().mean() * weight for part, weight in parts]
        assert float(sum(means)) == pytest.approx(float(labels[labels != -100].float().mean()))
        rows = [part_of_batch({"input_ids": tokens}, rank, ranks) for rank in range(ranks)]
        assert torch.equal(torch.cat([part["input_ids"] for part, weight in rows if weight]), tokens)
        assert [weight for _, weight in rows] == [len(part["input_ids"]) / 5 if weight else 0 for part, weight in rows]
    labels = torch.tensor([[5, -100, -100], [5, 6, -100], [5, 6, 7]])  # the first of a row has no position before it
    found = [part_of_batch({"labels": labels}, rank, 3, shifted=True) for rank in range(3)]
    assert [weight for _, weight in found] == [0, 1 / 3, 2 / 3] and torch.equal(found[0][0]["labels"], labels[2:])
    ready = {"labels": labels, "shift_labels": torch.tensor([[-100] * 3, [6, -100, -100], [6, 7, -100]])}
    assert [part_of_batch(ready, rank, 3, shifted=True)[1] for rank in range(3)] == [0, 1 / 3, 2 / 3]


# Trainers with code of their own over dp.


def mean_of(model, inputs):
    logits = model(input_ids=inputs["input_ids"]).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())


class OwnMean(transformers.Trainer):
    """A mean over the rows at hand, and it says so."""

    loss_is_scaled_for_ga = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        assert type(model).__name__ == "LlamaForCausalLM"
        return mean_of(model, inputs)


class SilentMean(OwnMean):
    loss_is_scaled_for_ga = None


class Penalty(transformers.Trainer):
    """Adds a term that depends on the weights alone; with zero=3 these are DTensors, and it cannot."""

    def compute_loss(self, model, *args, **kwargs):
        penalty = sum(x.square().mean() for name, x in model.named_parameters() if "norm" in name)
        return super().compute_loss(model, *args, **kwargs) + 0.1 * penalty


class OwnSum(transformers.Trainer):
    """A sum, divided by the labels of all that adds up."""

    loss_is_scaled_for_ga = True

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        count = (inputs["labels"][:, 1:] != -100).sum()
        return mean_of(model, inputs) * count / num_items_in_batch


class OwnStep(transformers.Trainer):
    """Two backwards of one step, as adversaries have."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        inputs = self._prepare_inputs(inputs)
        first = mean_of(model, inputs) / 2
        self.accelerator.backward(first)
        second = mean_of(model, inputs) / 4
        self.accelerator.backward(second)
        return (first + second).detach()


class OwnStepAround(OwnSum):
    def training_step(self, model, inputs, num_items_in_batch=None):
        return super().training_step(model, inputs, num_items_in_batch)


class OwnBackward(transformers.Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = mean_of(model, inputs)
        loss.backward()
        return loss.detach()


def loss_of_outputs(outputs, labels, num_items_in_batch=None):
    total = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    return total / num_items_in_batch


OWN = {
    "mean": (OwnMean, {}, {}),
    "mean that does not say so": (SilentMean, {}, {}),
    "sum": (OwnSum, {}, {}),
    "step": (OwnStep, {}, {}),
    "step around": (OwnStepAround, {}, {}),
    "label smoothing": (transformers.Trainer, {}, {"label_smoothing_factor": 0.2}),
    "function": (transformers.Trainer, {"compute_loss_func": loss_of_outputs}, {}),
    "penalty": (Penalty, {}, {}),
}


def own_trainer(rank, folder, sizes, zero=0):
    """The losses, norms and evaluations of each trainer, with the whole model or on a mesh."""
    from weft.adapters.trainer import settings

    warnings.simplefilter("ignore")
    found = {}
    for name, (kind, more, options) in OWN.items():
        if zero and kind is Penalty:
            continue
        options = (
            options_of(folder / name, eval_strategy="no", load_best_model_at_end=False, save_strategy="no") | options
        )
        model = model_of()
        if sizes:
            mesh = weft.init_mesh(**sizes, device_type="cpu")
            model = weft.parallelize(model, mesh if zero else mesh["cp", "tp"], zero=zero)
            given = settings(mesh, **options)
        else:
            given = {"args": transformers.TrainingArguments(use_cpu=True, **options)}
        found[name] = history_of(kind(model, train_dataset=Sentences(), **given, **more))
    if sizes:
        with pytest.raises(ValueError, match=r"OwnBackward.training_step must call self.accelerator.backward\(loss\)"):
            OwnBackward(model, train_dataset=Sentences(), **given).train()
    return found


@pytest.mark.parametrize(
    ("sizes", "zero"),
    [
        ({"dp": 2}, 0),
        ({"dp": 2}, 3),
        pytest.param({"dp": 3}, 0, marks=pytest.mark.slow("pytorch_ext/adapters", "data_parallel")),
        pytest.param({"dp": 2, "tp": 2}, 0, marks=pytest.mark.slow("pytorch_ext/adapters", "data_parallel")),
        pytest.param({"dp": 2, "tp": 2}, 3, marks=pytest.mark.slow("pytorch_ext/adapters", "data_parallel")),
    ],
)
def test_a_trainers_own_code_learns_over_dp_what_it_learns_alone(sizes, zero, tmp_path):
    expected = run_ranks(own_trainer, 1, tmp_path / "plain", {}, backend=None, timeout_s=200)[0]
    world = sizes["dp"] * sizes.get("tp", 1)
    for found in run_ranks(own_trainer, world, tmp_path / "split", sizes, zero, timeout_s=300):
        for name, history in found.items():
            assert history == pytest.approx(expected[name], **CLOSE), name
