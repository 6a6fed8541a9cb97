"""Megatron-core's parallel forms on processors: small GPTs, trained as its quick start says, on gloo."""

import contextlib
import copy
import queue
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from compared_runs import EPS, NORM, RATE, Program, Task
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import random
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.nn import functional as F

WORDS, TOKENS, LAYERS = 128, 16, 4
_SIZES = {"num_layers": LAYERS, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 128}
_SIZES |= {"hidden_dropout": 0.0, "attention_dropout": 0.0, "use_cpu_initialization": True}
_SIZES |= {"gradient_accumulation_fusion": False, "pipeline_dtype": torch.float32}
_GATED = {"normalization": "RMSNorm", "add_bias_linear": False, "gated_linear_unit": True, "activation_func": F.silu}
_EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 64, "moe_aux_loss_coeff": 0.01}
_BIASED = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
_ROTARY = {"position_embedding_type": "rope"}
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "GPT": ({}, {"share_embeddings_and_output_weights": True}),
    "Llama": (_GATED | {"num_query_groups": 2}, _ROTARY),
    "Qwen": (_GATED | {"num_query_groups": 2, "qk_layernorm": True}, _ROTARY),
    "Mixtral": (_GATED | _EXPERTS | {"moe_token_dispatcher_type": "alltoall"}, _ROTARY),
    "DeepSeek without MLA": (
        _GATED
        | _EXPERTS
        | _BIASED
        | {"moe_layer_freq": [0, 1, 1, 1], "moe_shared_expert_intermediate_size": 64, "mtp_num_layers": 1},
        _ROTARY,
    ),
}


def on_processors() -> None:
    """Replace what Megatron-core asks of CUDA, and let torch's norms take sequence parallelism."""
    filesystem_async._results_queue = queue.Queue()  # instead of a process that outlives a forked rank
    cuda: Any = torch.cuda
    cuda.current_device, cuda.synchronize, cuda.manual_seed = lambda: "cpu", lambda *_: None, torch.manual_seed
    cuda.Stream, cuda.current_stream, cuda.stream = MagicMock, MagicMock, lambda _: contextlib.nullcontext()
    cuda.get_rng_state = random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    token_dispatcher.maybe_move_tensor_to_cpu = lambda x, as_numpy=False, **_: (
        x.numpy() if as_numpy and isinstance(x, torch.Tensor) else x
    )
    for name in ("tensor", "zeros", "empty"):
        setattr(torch, name, partial(_on_no_cuda, getattr(torch, name)))
    type_of, norm_of, tensor = torch.Tensor.type, WrappedTorchNorm.__new__, torch.Tensor
    tensor.cuda = lambda self, *_, **__: self
    tensor.type = lambda self, *to: type_of(self, *to) if to else type_of(self).replace("torch.", "torch.cuda.")

    def norm(kind: type, config: Any, *args: Any, **named: Any) -> torch.nn.Module:
        alone = copy.copy(config)
        alone.sequence_parallel = False
        made = norm_of(kind, alone, *args, **named)
        for parameter in made.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return made

    WrappedTorchNorm.__new__ = norm


def _on_no_cuda(make: Any, *args: Any, **named: Any) -> torch.Tensor:
    return make(*args, **named | ({"device": "cpu"} if named.get("device") == "cuda" else {}))


def program(
    task: Task,
    tp: int = 1,
    sp: bool = False,
    pp: int = 1,
    chunks: int | None = None,
    cp: int = 1,
    ep: int = 1,
    zero: bool = False,
) -> Program:
    """As megatron's own training loop calls it: its schedules, its gradients' sums, its optimizer.

    Args:
        sp: sequence parallelism, which experts with tp ask for.
        chunks: of layers on each stage, for the interleaved schedule.
        zero: the distributed optimizer.
    """
    on_processors()
    dist.init_process_group("gloo")
    etp = 1 if ep > 1 else tp  # gloo gathers no tensors of other sizes
    parallel_state.initialize_model_parallel(
        tp, pp, chunks, context_parallel_size=cp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp
    )
    model_parallel_cuda_manual_seed(0)
    kind, of_model = FAMILIES[task.model]
    config = TransformerConfig(
        **_SIZES,
        **kind,
        tensor_model_parallel_size=tp,
        sequence_parallel=sp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=chunks,
        overlap_p2p_comm=chunks is not None,
        batch_p2p_comm=chunks is None,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        finalize_model_grads_func=finalize_model_grads,
    )
    models, rename = _models(config, chunks, zero, of_model)
    experts = (config.num_moe_experts or 0) // ep
    first = parallel_state.get_expert_model_parallel_rank() * experts
    rename |= {f"local_experts.{index}": f"local_experts.{first + index}" for index in reversed(range(experts))}

    def saved() -> dict[str, Any]:
        return {f"model{number}": model.module.sharded_state_dict() for number, model in enumerate(models)}

    def save(folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        dist_checkpointing.save(saved(), str(folder))
        if dist.get_rank() == 0:
            dcp_to_torch_save(folder, folder / "model.pt")
        dist.barrier()

    if not task.folder.exists():
        for parameter in models[0].parameters():
            if parameter.dim() == 1:  # zeros and ones would hide what is added twice or left out
                parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
        save(task.folder)
    loaded = dist_checkpointing.load(saved(), str(task.folder))
    for name, state in loaded.items():
        models[int(name.removeprefix("model"))].module.load_state_dict(state)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=RATE, adam_eps=EPS, clip_grad=NORM, use_distributed_optimizer=zero), models
    )
    optimizer.reload_model_params()
    copies, copy_of_rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    mask = torch.ones(TOKENS, TOKENS).triu(1).bool()[None, None]

    def forward_step(batches: Any, model: torch.nn.Module) -> tuple:
        tokens = next(batches)
        losses = model(tokens[:, :-1], torch.arange(TOKENS)[None], mask, labels=tokens[:, 1:])
        return losses, lambda losses: (losses.mean(), {"loss": losses.mean().detach()})

    def losses_of(call: dict, forward_only: bool) -> list:
        rows = call["tokens"].chunk(copies)[copy_of_rank].split(1)
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(rows) for _ in models] if chunks else iter(rows),
            model=models,
            num_microbatches=len(rows),
            seq_length=TOKENS,
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def step(call: dict) -> float:
        for model in models:
            model.zero_grad_buffer()
        optimizer.zero_grad()
        losses_of(call, False)
        _, norm, _ = optimizer.step()
        return norm

    def evaluate(call: dict) -> float:
        found = [each["loss"].item() for each in losses_of(call, True)]
        return sum(found) / len(found) if found else float("nan")

    return Program(step, evaluate, save, rename)


def _models(config: Any, chunks: int | None, zero: bool, of_model: dict[str, Any]) -> tuple[list, dict[str, str]]:
    """Return the chunks of layers of this rank, and the names of their modules in one process."""
    models: list[torch.nn.Module] = []
    rename: dict[str, str] = {}
    for chunk in [None] if chunks is None else range(chunks):
        block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=chunk)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk)
        mtp = get_gpt_mtp_block_spec(config, block, False, chunk) if config.mtp_num_layers and last else None
        model = GPTModel(
            config,
            block,
            WORDS,
            TOKENS,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
            post_process=last,
            mtp_block_spec=mtp,
            vp_stage=chunk,
            **of_model,
        )
        # each stage numbers its layers from 0, and each chunk is a model of its own
        prefix = "" if chunks is None else f"GPTModel({chunk + 1})." if chunk else "GPTModel."
        for index, layer in reversed([*enumerate(model.decoder.layers)]):
            rename[f"{prefix}decoder.layers.{index}"] = f"decoder.layers.{layer.layer_number - 1}"
        rename |= {prefix: ""} if prefix else {}
        models.append(
            DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=zero), model)
        )
    return models, rename
