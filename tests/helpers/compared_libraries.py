"""`python tests/helpers/compared_libraries.py`: other libraries' parallel training beside one process, by weft compare.

Each row is a family of transformers, made small, and a way to train it on ranks as the library's documentation says.
Both programs load one folder, train two steps of AdamW with clipped gradients, evaluate and save.
"""

import argparse
import importlib.metadata
import json
import math
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from logging import getLogger
from pathlib import Path
from typing import Any

import families
import torch
import torch.distributed as dist
from compared_runs import BATCH, EPS, NORM, RATE, Program, Task, Way, rows_of, verdict
from torch import nn

from weft.layer_lists import lists_in
from weft.pipeline.cut import RECORDED
from weft.pipeline.microbatches import microbatches_of
from weft.tensor_parallel.auto.trace import tensors_in

INSTALLED = [Path("build") / name for name in ("deepspeed", "megatron", "torchtitan")]  # or elsewhere on the path
PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "megatron-core", "torchtitan")


# The ways


def plain(task: Task) -> Program:
    model = task.model.from_pretrained(task.folder)

    def save(folder: Path) -> None:
        model.save_pretrained(folder)
        torch.save(model.state_dict(), folder / "state.pt")

    return _program(model, _adamw(model), save)


def _program(
    model: nn.Module,
    optimizer: Any,
    save: Callable[[Path], Any],
    rows: Callable[[dict], dict] = lambda call: call,
    backward: Callable[[torch.Tensor], Any] = lambda loss: loss.backward(),
    clip: Callable[[Any, float], Any] = lambda *args: nn.utils.clip_grad_norm_(*args),  # the recorder's by then
    norm: Callable[[], Any] | None = None,
) -> Program:
    """Return a program of calls that differ by the library.

    Args:
        save: write the whole model to a folder, on all ranks.
        rows: those of a batch that this rank has.
        norm: the gradients' norm, after the step, where `clip` does not return it.
    """

    def step(call: dict) -> Any:
        optimizer.zero_grad()
        model.train()
        backward(loss_of(model, rows(call)))
        found = clip(model.parameters(), NORM)
        optimizer.step()
        return norm() if norm else found.full_tensor() if hasattr(found, "full_tensor") else found

    def evaluate(call: dict) -> float:
        model.eval()
        return loss_of(model, rows(call)).item()

    return Program(step, evaluate, save)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE, eps=EPS)


def by_transformers(task: Task, **sizes: int) -> Program:
    """DistributedConfig of transformers."""
    from transformers.distributed import DistributedConfig

    model = task.model.from_pretrained(task.folder, distributed_config=DistributedConfig(**sizes))
    rows = _rows_of_rank if "fsdp_size" in sizes else lambda call: call
    return _program(model, _adamw(model), model.save_pretrained, rows, clip=_clips_on_any_mesh())


def _clips_on_any_mesh() -> Callable:
    """Return accelerate's clip_grad_norm_: torch's takes no gradients of several meshes, or of none, at once."""
    from accelerate import Accelerator

    return Accelerator(cpu=True).clip_grad_norm_


def _rows_of_rank(call: dict, rank: int | None = None, world: int | None = None) -> dict:
    rank, world = rank if rank is not None else dist.get_rank(), world or dist.get_world_size()
    return list(microbatches_of(((), call), None, world))[rank][1]


def _start() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")


def by_ddp(task: Task) -> Program:
    _start()
    model = task.model.from_pretrained(task.folder)
    wrapped = nn.parallel.DistributedDataParallel(model)
    return _program(wrapped, _adamw(wrapped), lambda folder: _on_rank_0(model.save_pretrained, folder), _rows_of_rank)


def _on_rank_0(save: Callable, *args: Any) -> None:
    if dist.get_rank() == 0:
        save(*args)


def by_fsdp2(task: Task, tp: int = 1) -> Program:
    """fully_shard for each block and the whole; with tp, parallelize_module of a Llama before it."""
    from torch.distributed.fsdp import fully_shard

    _start()
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))
    model = task.model.from_pretrained(task.folder)
    if tp > 1:
        _split_llama(model, mesh["tp"])
    for name in lists_in(model):
        for block in model.get_submodule(name):
            fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    of_rank = partial(_rows_of_rank, rank=mesh.get_local_rank("dp"), world=mesh["dp"].size())
    clip = {"clip": _clips_on_any_mesh()} if tp > 1 else {}
    return _program(model, _adamw(model), partial(_save_full_state, model), of_rank, **clip)


def _split_llama(model: nn.Module, mesh: Any) -> None:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    column, row = (lambda names: dict.fromkeys(names, ColwiseParallel())), RowwiseParallel
    for block in model.model.layers:
        names = [f"self_attn.{x}_proj" for x in "qkv"] + ["mlp.gate_proj", "mlp.up_proj"]
        parallelize_module(block, mesh, {**column(names), "self_attn.o_proj": row(), "mlp.down_proj": row()})
    plan = {"model.embed_tokens": row(input_layouts=Replicate())}
    parallelize_module(model, mesh, {**plan, "lm_head": ColwiseParallel(output_layouts=Replicate())})


def _save_full_state(model: nn.Module, folder: Path) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    _on_rank_0(torch.save, state, folder / "state.pt")


def by_accelerate(task: Task, cp: int = 1) -> Program:
    """FSDP2 by accelerate's plugin, which makes it DDP on processors; with cp, the sequence is shared and labels are shifted before they are cut."""
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    config = ParallelismConfig(cp_size=cp) if cp > 1 else None
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=config)
    model = task.model.from_pretrained(task.folder)
    model, optimizer = accelerator.prepare(model, _adamw(model))

    def save(folder: Path) -> None:
        state = accelerator.get_state_dict(model)
        accelerator.unwrap_model(model).save_pretrained(
            folder, is_main_process=accelerator.is_main_process, save_function=accelerator.save, state_dict=state
        )

    return _program(model, optimizer, save, _rows_of_rank, accelerator.backward, accelerator.clip_grad_norm_)


def by_deepspeed(task: Task, stage: int = 0, tp: int = 1) -> Program:
    """Automatic tensor parallelism is an entry of the configuration, as ZeRO is."""
    import deepspeed

    deepspeed.init_distributed("gloo")
    model, copies = task.model.from_pretrained(task.folder), dist.get_world_size() // tp
    zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
    config = {"train_micro_batch_size_per_gpu": BATCH // copies, "gradient_clipping": NORM, "zero_optimization": zero}
    config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    if tp > 1:
        config["tensor_parallel"] = {"autotp_size": tp}
    engine, *_ = deepspeed.initialize(model=model, optimizer=_adamw(model), config=config)
    return _program(
        engine,
        engine,
        engine.save_16bit_model if tp == 1 else partial(_save_split, engine),
        partial(_rows_of_rank, rank=dist.get_rank() // tp, world=copies),
        engine.backward,
        lambda *_: None,
        engine.get_global_grad_norm,
    )


def by_megatron(task: Task, **sizes: Any) -> Program:
    import compared_megatron

    return compared_megatron.program(task, **sizes)


def by_torchtitan(task: Task, **sizes: Any) -> Program:
    import compared_torchtitan

    return compared_torchtitan.program(task, **sizes)


def _save_split(engine: Any, folder: Path) -> None:
    """Save as accelerate does: save_16bit_model writes the part of rank 0."""
    state = engine._consolidated_16bit_state_dict()
    _on_rank_0(torch.save, state, folder / "state.pt")


def loss_of(model: nn.Module, call: dict[str, Any]) -> torch.Tensor:
    """Return the model's own loss, or of models without one a mean of the first output with random weights."""
    output = model(**call)
    if "labels" in call:
        return output.loss
    x = next(x for x in tensors_in(output, 3) if x.is_floating_point() and x.dim() > 1)
    return (x * torch.randn(x.shape[1:], generator=torch.Generator().manual_seed(2))).mean()


def task_of(family: str, folder: Path) -> Task:
    """Make a family's small model and write it.

    Raises:
        ValueError: no call of it is known.
    """
    model, named = families.small_model(family, BATCH)
    if named is None:
        raise ValueError("no guessed call runs")
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.float().parameters():
            if parameter.dim() == 1:  # zeros and ones would hide what is added twice or left out
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        for name, table in model.named_buffers():
            if name.endswith("tid2eid"):  # from tokens to experts: zeros before it is loaded
                table.copy_((torch.arange(len(table))[:, None] + torch.arange(table.shape[1])) % families.EXPERTS)
    model.save_pretrained(folder)
    named = {
        name: value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in named.items()
        if name not in (*RECORDED, "output_hidden_states", "output_attentions")
    }
    calls = [_varied(named, step) for step in range(2)]
    labelled = [{**call, "labels": call.get("decoder_input_ids", call.get("input_ids"))} for call in calls]
    try:
        if loss_of(type(model).from_pretrained(folder), labelled[0]).dim() == 0:
            calls = labelled
    except Exception:  # a model without labels, or with others: whatever it raises
        pass
    return Task(folder, calls, type(model))


def _varied(named: dict[str, Any], step: int) -> dict[str, Any]:
    """Return a call with other tokens instead of those that stand for text, no two alike.

    Each row of a tensor then has one place in the whole one, in a layer that sees single tokens too.
    """
    named, generator = dict(named), torch.Generator().manual_seed(step)
    for name in ("input_ids", "decoder_input_ids"):
        if (tokens := named.get(name)) is not None:
            others = 10 + torch.randperm(families.VOCABULARY // 2 - 10, generator=generator)
            others = others[torch.arange(tokens.numel()) % len(others)].view_as(tokens)
            named[name] = torch.where((tokens >= 3) & (tokens < 7), others, tokens)
    return named


def _splits(task: Task) -> bool:
    """Return whether the loss of a batch is the mean of its parts': not so with batch norm or a contrastive loss."""
    model = task.model.from_pretrained(task.folder).train()
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        return False
    try:
        parts = [loss_of(model, _rows_of_rank(task.calls[0], rank, 2)).item() for rank in range(2)]
    except ValueError:  # arguments without a batch
        return False
    return math.isclose(sum(parts) / 2, loss_of(model, task.calls[0]).item(), rel_tol=1e-5)


def _rows_of_transformers(family: str, ways: Sequence[Way]) -> dict[str, Any]:
    """Return the rows of a family that has a small model and a call, and of the ways that take it."""
    with tempfile.TemporaryDirectory() as temporary:
        try:
            task = task_of(family, Path(temporary) / "start")
        except Exception as error:  # any family may fail to be built small
            return {"rows": [{"way": "", "family": family, "not compared": families.line(error)}]}
        splits, model = _splits(task), task.model.from_pretrained(task.folder)
        has = {plan for plan in ("tp", "ep", "fsdp") if getattr(model, f"{plan}_plan")}
        takers = [way for way in ways if (splits or not way.splits) and has.issuperset(way.plans)]
        if not takers:
            return {"rows": [{"way": "", "family": family, "not compared": "it has no plan"}]}
        return {"rows": [{"family": family, **row} for row in rows_of(task, Way("", plain, None, 1), takers)]}


def _rows_of_decoder(family: str, ways: Sequence[Way], plain: Callable[[Task], Program]) -> dict[str, Any]:
    """Return the rows of a model of token ids that its library builds itself."""
    generator = torch.Generator().manual_seed(1)
    calls = [{"tokens": torch.randint(128, (BATCH, 17), generator=generator)} for _ in range(2)]
    with tempfile.TemporaryDirectory() as temporary:
        rows = rows_of(Task(Path(temporary) / "start", calls, family), Way("", plain, None, 1), ways)
        return {"rows": [{"family": family, **row} for row in rows]}


def rows_of_family(family: str, ways: Sequence[Way]) -> dict[str, Any]:
    """Return the rows of a family, by the ways of its library."""
    for library, (families_of, program) in OTHERS.items():
        if family in families_of:
            of_library = [way for way in ways if way.name.startswith(library)]
            return _rows_of_decoder(family, of_library, program)
    return _rows_of_transformers(family, [way for way in ways if way.name.partition(":")[0] not in OTHERS])


# The table


FEW = ["llama", "mistral", "qwen2", "qwen3", "gemma", "gpt2", "gpt_neox", "opt", "bloom", "falcon", "phi", "mixtral"]
FEW += ["t5", "bert", "vit"]
_DENSE = ["GPT", "Llama", "Qwen"]
_OF_MEGATRON = [*_DENSE, "Mixtral", "DeepSeek without MLA"]
_OF_TORCHTITAN = ["Llama 3", "Qwen 3", "Qwen 3 MoE", "DeepSeek V3", "GPT-OSS"]
_CPU = (("DS_ACCELERATOR", "cpu"),)
WAYS = [
    Way("transformers: tp", partial(by_transformers, tp_size=2), None, plans=["tp"], splits=False),
    Way("transformers: ep", partial(by_transformers, tp_size=2, ep_size=2), None, plans=["tp", "ep"], splits=False),
    Way("transformers: ep with fsdp", partial(by_transformers, fsdp_size=2, ep_size=2), None, plans=["ep", "fsdp"]),
    Way("transformers: fsdp", partial(by_transformers, fsdp_size=2), None, plans=["fsdp"]),
    Way("torch: DDP", by_ddp, FEW),
    Way("torch: FSDP2", by_fsdp2, FEW),
    Way("torch: FSDP2 with tp", partial(by_fsdp2, tp=2), ("llama", "mistral", "qwen2"), 4),
    Way("accelerate: FSDP's plugin", by_accelerate, FEW),
    Way("accelerate: cp", partial(by_accelerate, cp=2), ("llama", "mistral", "qwen2"), splits=False),
    *(Way(f"DeepSpeed: ZeRO {n}", partial(by_deepspeed, stage=n), FEW, environment=_CPU) for n in (1, 2, 3)),
    Way("DeepSpeed: AutoTP", partial(by_deepspeed, tp=2), FEW, splits=False, environment=_CPU),
    Way("DeepSpeed: AutoTP with ZeRO 1", partial(by_deepspeed, tp=2, stage=1), FEW, 4, environment=_CPU),
    Way("Megatron-core: tp", partial(by_megatron, tp=2), _DENSE),
    Way("Megatron-core: tp, sequence parallel", partial(by_megatron, tp=2, sp=True), _OF_MEGATRON),
    Way("Megatron-core: pp, 1F1B", partial(by_megatron, pp=2), _OF_MEGATRON),
    Way("Megatron-core: pp, interleaved", partial(by_megatron, pp=2, chunks=2), _OF_MEGATRON),
    Way("Megatron-core: data", by_megatron, _OF_MEGATRON),
    Way("Megatron-core: distributed optimizer", partial(by_megatron, zero=True), _OF_MEGATRON),
    Way("Megatron-core: tp with pp", partial(by_megatron, tp=2, sp=True, pp=2), _OF_MEGATRON, 4),
    Way(
        "Megatron-core: tp with distributed optimizer", partial(by_megatron, tp=2, sp=True, zero=True), _OF_MEGATRON, 4
    ),
    Way("Megatron-core: ep", partial(by_megatron, ep=2), _OF_MEGATRON[-2:]),
    Way("Megatron-core: ep with tp", partial(by_megatron, ep=2, tp=2, sp=True), _OF_MEGATRON[-2:], 4),
    Way("Megatron-core: cp", partial(by_megatron, cp=2), ["Llama"]),
    Way("torchtitan: fsdp", partial(by_torchtitan, fsdp=2), _OF_TORCHTITAN),
    Way("torchtitan: fsdp by full DTensors", partial(by_torchtitan, fsdp=2, backend="full_dtensor"), _OF_TORCHTITAN),
    Way("torchtitan: fsdp by spmd_types", partial(by_torchtitan, fsdp=2, backend="spmd_types"), ["Llama 3"]),
    Way("torchtitan: data", partial(by_torchtitan, replicas=2), _OF_TORCHTITAN),
    Way("torchtitan: cp", partial(by_torchtitan, cp=2), _OF_TORCHTITAN),
    Way("torchtitan: tp", partial(by_torchtitan, tp=2, sp=False), _OF_TORCHTITAN),
    Way("torchtitan: tp, sequence parallel", partial(by_torchtitan, tp=2), _OF_TORCHTITAN),
    Way("torchtitan: tp by full DTensors", partial(by_torchtitan, tp=2, backend="full_dtensor"), _OF_TORCHTITAN),
    Way("torchtitan: pp, 1F1B", partial(by_torchtitan, pp=2), _OF_TORCHTITAN),
    Way("torchtitan: pp, interleaved", partial(by_torchtitan, pp=2, schedule="Interleaved1F1B"), _OF_TORCHTITAN),
    Way("torchtitan: fsdp with tp", partial(by_torchtitan, fsdp=2, tp=2), _OF_TORCHTITAN, 4),
    Way("torchtitan: pp with tp", partial(by_torchtitan, pp=2, tp=2), _OF_TORCHTITAN, 4),
    Way("torchtitan: ep with fsdp", partial(by_torchtitan, fsdp=2, ep=2), _OF_TORCHTITAN[-3:]),
    Way("torchtitan: ep with tp", partial(by_torchtitan, tp=2, ep=2), _OF_TORCHTITAN[-3:]),
    Way("torchtitan: ep with fsdp and tp", partial(by_torchtitan, fsdp=2, tp=2, ep=2), _OF_TORCHTITAN[-3:], 4),
]
OTHERS = {"Megatron-core": (_OF_MEGATRON, by_megatron), "torchtitan": (_OF_TORCHTITAN, by_torchtitan)}


def with_plans() -> list[str]:
    """Return the families with a plan for tensors or experts, of the whole model or a part, and FEW."""
    import transformers

    found = []
    for family in families.families():
        try:
            config = transformers.CONFIG_MAPPING[family]()
        except Exception:  # a configuration that must be given something
            continue
        plans = [
            getattr(part, f"base_model_{plan}_plan", None)
            for part in (config, *vars(config).values())
            for plan in ("tp", "ep")
        ]
        if family in FEW or any(plans):
            found.append(family)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python tests/helpers/compared_libraries.py", description=__doc__)
    parser.add_argument("--only", default="", help="families, with commas between")
    parser.add_argument("--ways", default="", help="parts of names of ways, with commas between")
    parser.add_argument("--json", type=Path, help="write the rows here; those that it has already are not run again")
    parser.add_argument("--timeout", type=float, default=400, help="seconds for a family")
    parser.add_argument("--all", action="store_true", help="print every finding")
    options = parser.parse_args(arguments)
    from transformers import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    getLogger("weft").setLevel("ERROR")
    before = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    rows, start = before.get("rows", []), time.monotonic() - before.get("seconds", 0)
    have = {row["family"] for row in rows}
    ways = [way for way in WAYS if not options.ways or way.name in options.ways.split(",")]
    names = options.only.split(",") if options.only else [*with_plans(), *_OF_MEGATRON, *_OF_TORCHTITAN]
    for family in (name for name in names if name not in have):
        of_family = [way for way in ways if way.families is None or family in way.families or options.only]
        failed = {"way": "", "family": family}
        found = families.in_a_process(failed, options.timeout, partial(rows_of_family, family, of_family))
        rows += found.get("rows", [found])
        for row in found.get("rows", [found]):
            print(f"{row['way']:30} {family:20} {verdict(row)}", flush=True)
            for _, text in row.get("findings", [])[1:] if options.all else ():
                print(f"    {text}")
        if options.json:
            order = [way.name for way in WAYS]
            rows.sort(key=lambda row: (order.index(row["way"]) if row["way"] else len(order), row["family"]))
            saved = {"versions": versions(), "seconds": round(time.monotonic() - start), "rows": rows}
            options.json.write_text(json.dumps(saved, indent=1) + "\n")


def versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in PACKAGES}


if __name__ == "__main__":
    sys.path += map(str, INSTALLED)
    warnings.simplefilter("ignore")
    main()
