"""torchtitan's parallel forms on processors: small models, trained by its Trainer on gloo.

Importing this replaces what torchtitan asks of CUDA and of a newer torch, in the whole process.
"""

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import torch._utils
import torch.distributed as dist
from compared_runs import BATCH, EPS, NORM, RATE, Program, Task
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental._context_parallel import _attention as context_parallel
from torch.nn.attention import flex_attention

for name in ("torch.utils.tensorboard", "datasets", "datasets.distributed"):  # imported by Trainer, never called here
    sys.modules.setdefault(name, MagicMock())
torch._utils._get_available_device_type = lambda: "cpu"  # torchtitan falls back to "cuda" where this finds nothing
flex_attention._DEFAULT_SPARSE_BLOCK_SIZE = 4  # context parallelism shards whole blocks, of 128 tokens by default

from torchtitan.components.checkpointer import CheckpointManager  # noqa: E402
from torchtitan.components.checkpointer.base import ModelWrapper  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.validate import Validator  # noqa: E402
from torchtitan.config import CommConfig, Configurable, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, attention  # noqa: E402
from torchtitan.tools.utils import NoColor  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

MODULES = {"Llama 3": "llama3", "Qwen 3": "qwen3", "Qwen 3 MoE": "qwen3", "DeepSeek V3": "deepseek_v3"}
MODULES |= {"GPT-OSS": "gpt_oss"}
VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH, EXPERTS = 128, 64, 4, 2, 16, 4

# torchtitan compiles both with max_autotune; the eager functions compute the same.
attention.FlexAttention._compiled_flex_attn = flex_attention.flex_attention
attention._compiled_create_block_mask = flex_attention.create_block_mask
# torch refuses the backward of flex attention on CPUs, whose compiled kernel has none; the eager one is dense and has.
flex_attention._validate_device = lambda *tensors: None
flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
context_parallel._compiled_create_block_mask = flex_attention.create_block_mask
torch.Tensor.bfloat16 = lambda tensor: tensor  # the experts compute in bfloat16 whatever the precision asked for


def step_microbatches(
    schedule: Any,
    arg_mbs: Any,
    kwarg_mbs: Any,
    target_mbs: Any,
    losses: Any,
    loss_kwargs: Any = None,
    return_outputs: bool = False,
) -> None:
    """The `step` of a newer torch that Trainer calls, which takes microbatches already split."""
    for stage in getattr(schedule, "_stages", None) or [schedule._stage]:
        stage.has_backward = schedule._has_backward
        stage.clear_runtime_states()
    arg_mbs = arg_mbs or [()] * len(kwarg_mbs)
    schedule._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs=loss_kwargs)


def eval_microbatches(schedule: Any, **given: Any) -> None:
    """The `eval` of a newer torch that Validator calls."""
    schedule._has_backward = False
    step_microbatches(schedule, **given)
    schedule._has_backward = True


for base in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
    base.step, base.eval = step_microbatches, eval_microbatches


class Rows(Configurable):
    """The dataloader, and the tokenizer too: this rank's rows of the one batch set in `batch`."""

    batch: tuple[torch.Tensor, torch.Tensor]

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        infinite: bool = True

    def __init__(self, config: Config, **given: Any) -> None:
        self.given = given

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        ranks, rank, size = (self.given[key] for key in ("dp_world_size", "dp_rank", "local_batch_size"))
        tokens, labels = (tensor.chunk(ranks)[rank].split(size) for tensor in Rows.batch)
        positions = torch.arange(LENGTH).expand(size, LENGTH)
        for row, label in zip(tokens, labels, strict=True):
            yield {"input": row, "positions": positions.clone()}, label


class Record(MetricsProcessor):
    """Keeps the last loss and norm; the real one asks the CUDA device for its memory and name.

    With pipeline stages only ranks of the last stage know a loss.
    """

    loss = norm = evaluation = 0.0

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def __init__(self, config: Config, **given: Any) -> None:
        self.config, self.color = config, NoColor()
        peak = SimpleNamespace(max_reserved_gib=0.0, max_reserved_pct=0.0)
        self.device_memory_monitor = SimpleNamespace(device_name="cpu", get_peak_stats=lambda: peak)
        self.ntokens_since_last_log, self.data_loading_times = 0, []

    def log(self, step: int, loss: float, max_loss: float, norm: float, extra_metrics: Any = None) -> None:
        Record.loss, Record.norm = loss, norm

    def log_validation(self, loss: float, step: int, *args: Any, **kwargs: Any) -> None:
        Record.evaluation = loss


def specification(family: str) -> Any:
    """The library's model specification of a family with a small model in it."""
    library = importlib.import_module(f"torchtitan.models.{MODULES[family]}")
    head = WIDTH // HEADS
    sizes = {"n_layers": LAYERS, "dim": WIDTH, "n_heads": HEADS, "attn_backend": "flex"}
    moe = {"num_experts": EXPERTS, "moe_comm_backend": "standard"}
    if family == "Llama 3":
        rope = ComplexRoPE.Config(dim=head, max_seq_len=1024, theta=500000, scaling="llama")
        layers = library._build_llama3_layers(**sizes, hidden_dim=128, n_kv_heads=2, fuse_qkv=True, rope=rope)
    elif family.startswith("Qwen"):
        rope = CosSinRoPE.Config(dim=head, max_seq_len=1024, theta=1000000.0)
        sizes |= {"n_kv_heads": 2, "head_dim": head, "rope": rope}
        if family == "Qwen 3":
            layers = library._build_qwen3_layers(**sizes, hidden_dim=128)
        else:
            layers = library._build_qwen3_moe_layers(**sizes, **moe, moe_hidden_dim=32, top_k=2)
    elif family == "DeepSeek V3":
        rope = ComplexRoPE.Config(
            dim=8,
            max_seq_len=1024,
            theta=10000.0,
            scaling="yarn",
            rope_factor=40.0,
            beta_fast=32.0,
            beta_slow=1.0,
            original_seq_len=64,
        )
        layers = library._build_dsv3_layers(
            **sizes,
            **moe,
            n_dense_layers=1,
            q_lora_rank=32,
            kv_lora_rank=32,
            qk_nope_head_dim=8,
            qk_rope_head_dim=8,
            v_head_dim=16,
            mscale=0.7,
            dense_hidden_dim=128,
            moe_hidden_dim=32,
            num_shared_experts=1,
            router_top_k=2,
            router_score_func="softmax",
            non_blocking_capacity_factor=None,
            rope=rope,
        )
    else:
        rope = CosSinRoPE.Config(
            dim=64,
            max_seq_len=1024,
            theta=150000.0,
            scaling="yarn",
            rope_factor=32,
            beta_fast=32.0,
            beta_slow=1.0,
            truncate=False,
            original_seq_len=64,
        )
        del sizes["n_heads"]  # the library's 64 heads of 64 with 8 pairs of keys and values
        layers = library._build_gptoss_layers(
            **sizes, **moe, hidden_dim=32, top_k=2, load_balance_coeff=1e-3, rope=rope
        )
    flavor = "debugmodel_moe" if family == "Qwen 3 MoE" else "debugmodel"
    plain = library.model_registry(flavor, attn_backend="flex")
    init = {"weight": nn.init.normal_}
    small = {"std": WIDTH**-0.5}
    model = replace(
        plain.model,
        dim=WIDTH,
        vocab_size=VOCABULARY,
        layers=layers,
        enable_weight_tying=False,
        norm=replace(plain.model.norm, normalized_shape=WIDTH),
        tok_embeddings=Embedding.Config(num_embeddings=VOCABULARY, embedding_dim=WIDTH, param_init=init),
        lm_head=Linear.Config(
            in_features=WIDTH,
            out_features=VOCABULARY,
            param_init={"weight": lambda weight: nn.init.normal_(weight, **small)},
        ),
    )
    return replace(plain, model=model)


def program(
    task: Task,
    replicas: int = 1,
    fsdp: int = 1,
    cp: int = 1,
    tp: int = 1,
    sp: bool = True,
    pp: int = 1,
    schedule: str = "1F1B",
    ep: int = 1,
    backend: str = "partial_dtensor",
) -> Program:
    """torchtitan's Trainer of a small model, with sizes of its ParallelismConfig."""
    parallelism = ParallelismConfig(
        data_parallel_replicate_degree=replicas,
        data_parallel_shard_degree=fsdp,
        context_parallel_degree=cp,
        tensor_parallel_degree=tp,
        enable_sequence_parallel=sp,
        pipeline_parallel_degree=pp,
        pipeline_parallel_schedule=schedule,
        expert_parallel_degree=ep,
        spmd_backend=backend,
    )
    ranks = replicas * fsdp
    start = task.folder.exists()
    config = Trainer.Config(
        model_spec=specification(task.model),
        dump_folder=str(task.folder.parent / "dump"),
        metrics=Record.Config(log_freq=1),
        tokenizer=Rows.Config(),
        dataloader=Rows.Config(),
        optimizer=default_adamw(lr=RATE, eps=EPS),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0),
        training=TrainingConfig(
            local_batch_size=BATCH // ranks,
            seq_len=LENGTH,
            max_norm=NORM,
            steps=2,
            disable_cuda_graphs=True,
            mixed_precision_param="float32",
        ),
        parallelism=parallelism,
        checkpoint=CheckpointManager.Config(
            enable=start, initial_load_path=str(task.folder) if start else None, load_only=True, keep_latest_k=0
        ),
        activation_checkpoint=None,
        comm=CommConfig(trace_buf_size=0),
        validator=Validator.Config(enable=True, steps=1, dataloader=Rows.Config()),
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY),
    )
    trainer = Trainer(config)
    for module in (module for part in trainer.model_parts for module in part.modules()):
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM, which a factor of 1 becomes
    trainer.checkpointer.load()

    def step(call: dict) -> float:
        Rows.batch = call["tokens"][:, :-1].contiguous(), call["tokens"][:, 1:].contiguous()
        trainer.step += 1
        trainer.train_step(trainer.batch_generator(trainer.dataloader))
        return Record.norm

    def evaluate(call: dict) -> float:
        Rows.batch = call["tokens"][:, :-1].contiguous(), call["tokens"][:, 1:].contiguous()
        trainer.validator.validate(trainer.model_parts, trainer.step)
        return Record.evaluation if Record.evaluation > 0 else float("nan")  # of a stage that knows none

    def save(folder: Path) -> None:
        here = {name: x.detach() for name, x in ModelWrapper(trainer.model_parts).state_dict().items()}
        whole = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in here.items()}
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(whole, folder / f"state{dist.get_rank()}.pt")

    if not start:
        for name, x in trainer.model_parts[0].named_parameters():
            if "norm" in name:  # ones would hide what is added twice or left out
                local = x.detach().to_local() if isinstance(x, DTensor) else x.detach()
                local += 0.1 * torch.randn(local.shape)
        save(task.folder)
        checkpoint.save(ModelWrapper(trainer.model_parts).state_dict(), checkpoint_id=task.folder)
    return Program(step, evaluate, save)
