"""`python tests/helpers/families.py`: automatic plans of every model family of the installed transformers.

Each configuration is made small by rules on the names of its numbers, built, and planned in a process of its own. With
--check, two ranks compare the split model's outputs and gradients with the unsplit model's. With --pipeline they run it
as a pipeline of two stages instead, and compare the loss and the gradients of a step.
"""

import argparse
import contextlib
import copy
import json
import math
import os
import random
import re
import resource
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from logging import getLogger
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import weft
from weft.context_parallel.transformers_attention import models_of_transformers
from weft.pipeline.cut import RECORDED
from weft.pipeline.microbatches import microbatches_of
from weft.pipeline.transformers_stages import without_caches
from weft.tensor_parallel.auto import AutomaticPlan, automatic_plan
from weft.tensor_parallel.auto.trace import tensors_in
from weft.tensor_parallel.transformers_calls import calls_of_transformers
from weft.testing.ranks import RanksFailedError, run_ranks
from weft.tools.explanation.explain_command import share_of_plan

WORLD = 2
WIDTH, HEADS, HEAD_SIZE, LAYERS, VOCABULARY, IMAGE, PATCH = 64, 4, 16, 2, 256, 16, 4
MICROBATCHES, EXPERTS = 4, 4
_GROUPS = -1  # of query heads with the same keys and values
_MOST_PARAMETERS = 30_000_000
_LARGE = 0.02  # the share of the parameters from which layers that stay whole have a reason
_MEMORY_BYTES = 12 << 30
# The first pattern that a number's name contains decides; None keeps the number.
_RULES: list[tuple[str, int | None]] = [
    (r"^(n|topk)_group$", 1),
    (r"n_groups$", 2),
    (r"upsample_groups$", WIDTH),
    (r"token_(id|index)$|_ids?$|kernel|stride|groups?$|padding|ratio|factor|expand|expansion", None),
    (r"key_value_heads|kv_heads|num_kv|query_groups", _GROUPS),
    (r"(^|_)d_head$", HEAD_SIZE),
    (r"(^|_)(n_|num_)?\w*heads?$|n_head$", HEADS),
    (r"rope_head_dim|rotary_dim", HEAD_SIZE // 2),
    (r"head_(dim|size)|d_kv|dim_head|headdim|attention_channels|channels_per_head", HEAD_SIZE),
    (r"vocab|num_embeddings|codebook_size", VOCABULARY),
    (r"position|max_seq|max_length|context_(length|size)|seq_length|source_length|target_length|block_size", 64),
    (r"image_size|img_size|input_size", IMAGE),
    (r"chunk_size$", 16),
    (r"patch_size", PATCH),
    (r"pos_emb_(height|width)$", IMAGE),
    (r"^coordinate_size$", 12),  # four of these and two of the next are the features
    (r"^shape_size$", 8),
    (r"experts_per_tok|top_?k|num_selected|moe_k$", 2),
    (r"experts?(_num)?$", EXPERTS),
    (r"(^|_)(n_|num_)?\w*layers?$|^depth$|num_\w*blocks$", LAYERS),
    (r"intermediate|ffn|d_ff|inner|mlp_dim|feed_?forward|linear_units", 2 * WIDTH),
    (r"lora_rank|low_rank", WIDTH // 2),
    (r"(hidden|embed\w*|model|latent|projection|proj|output|projector|codebook|lru)_?(size|dim|width)$", WIDTH),
    (r"d_model|n_embd|^dim$|_dim$|width|_channels$|hidden|^d_\w+$|_filters$", WIDTH),
]
# In some configurations None.
_MISSING = {"vocab_size": VOCABULARY, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}
_MISSING |= {"head_dim": HEAD_SIZE, "num_key_value_heads": HEADS, "prediction_length": 8}
_MIXERS = [("num_heads", "head_dim", "expand"), ("mamba_n_heads", "mamba_d_head", "mamba_expand")]
# Numbers to keep in the next tries, by their small values, if a configuration has other rules.
_KEPT: list[tuple[int, ...]] = [(), (LAYERS,), (LAYERS, HEADS, _GROUPS, HEAD_SIZE), (HEADS, WIDTH, 2 * WIDTH, LAYERS)]
# Tables of transformers, the likeliest use of a family first.
_MODELS = ["SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "IMAGE_TEXT_TO_TEXT", "CAUSAL_LM", "MASKED_LM", "CTC"]
_MODELS += ["IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION", "OBJECT_DETECTION", "SEMANTIC_SEGMENTATION"]


def families() -> list[str]:
    """Return the model types of the installed transformers that have a model."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return list(MODEL_MAPPING_NAMES)


def small(numbers: dict[str, Any], kept: Sequence[int] = ()) -> dict[str, Any]:
    """Return a configuration's values with few layers, heads and features, and no dropout.

    Args:
        kept: numbers with these small values keep their own.
    """
    layers = [value for name, value in numbers.items() if _rule(name) == LAYERS and type(value) is int]
    layers = [] if LAYERS in kept else layers
    result: dict[str, Any] = {}
    for name, value in numbers.items():
        if name in ("out_features", "out_indices"):
            result[name] = None  # all stages
        elif isinstance(value, dict) and "rope_type" in value:
            result[name] = _small_rotation(value)
        elif name == "per_layer_config" and isinstance(value, dict):
            result[name] = {}
        elif isinstance(value, dict) and value and all(str(key).isdigit() for key in value) and "0" not in value:
            result[name] = value  # a table by sizes
        elif name == "num_experts_per_tok" and value is None:
            result[name] = 2
        elif isinstance(value, dict) and name not in ("id2label", "label2id", "rope_parameters", "rope_scaling"):
            result[name] = small({k: v for k, v in value.items() if str(k) in "01" or not str(k).isdigit()}, kept)
        elif isinstance(value, (list, tuple)) and layers and len(value) in layers and len(value) > LAYERS:
            result[name] = _few_kinds(list(value))
        elif isinstance(value, (list, tuple)):
            result[name] = list(value) if _rule(name) in kept else _small_list(name, list(value))
        elif isinstance(value, float) and re.search("drop", name):
            result[name] = 0.0
        elif value is None and name in _MISSING:
            result[name] = _MISSING[name]
        elif type(value) is int and _rule(name) not in kept:
            result[name] = _small_number(name, value, numbers)
        else:
            result[name] = value
    return result | _products_and_sums(result, numbers)


def _products_and_sums(found: dict[str, Any], numbers: dict[str, Any]) -> dict[str, int]:
    """Return the small numbers that follow from others: a head's features, and the heads of a mixer's features."""
    result = {}
    if {"qk_head_dim", "qk_nope_head_dim", "qk_rope_head_dim"} <= found.keys():
        result["qk_head_dim"] = found["qk_nope_head_dim"] + found["qk_rope_head_dim"]
    for heads, size, expand in _MIXERS:
        values = [value for name in (heads, size, expand, "hidden_size") if type(value := numbers.get(name)) is int]
        if len(values) == 4 and values[0] * values[1] == values[2] * values[3]:
            result[heads] = found[expand] * found["hidden_size"] // found[size]
    return result


def _rule(name: str) -> int | None:
    return next((size for pattern, size in _RULES if re.search(pattern, name)), None)


def _small_number(name: str, value: int, beside: dict[str, Any]) -> int:
    if re.search(r"token_(id|index)$", name) and value >= VOCABULARY // 2:
        return VOCABULARY - 1 - sum(map(ord, name)) % (VOCABULARY // 2)
    size = _rule(name)
    if size is None or value <= 0:
        return value
    if name == "head_dim" and "qk_rope_head_dim" in beside:  # the part that is rotated is a share of it
        return int(HEAD_SIZE // 2 / (beside.get("rope_parameters") or {}).get("partial_rotary_factor", 1))
    if size == _GROUPS:  # as many as query heads, one, or two
        query = next((other for key, other in beside.items() if _rule(key) == HEADS and type(other) is int), 0)
        return 1 if value == 1 else HEADS if value == query else 2
    return min(size, value)


def _small_rotation(value: dict[str, Any]) -> dict[str, Any]:
    """Return rotary parameters with a head's pairs for time, height and width, which some models look for."""
    pairs = int(HEAD_SIZE * value.get("partial_rotary_factor", 1)) // 2
    space = pairs * 3 // 8
    return value | {"mrope_section": [pairs - 2 * space, space, space]}


def _small_list(name: str, value: list) -> list:
    if not value or not all(type(part) is int for part in value):
        return [small(part) if isinstance(part, dict) else part for part in value]
    size = _rule(name)
    if size == HEADS:
        return [part if min(value) < 2 else max(1, part * 2 // min(value)) for part in value]
    if size in (IMAGE, PATCH):
        return [min(part, size) for part in value]
    if name.endswith("_indexes"):
        return [LAYERS - 1]
    if re.search("depth|num_blocks|_layers$|blocks_per", name):
        return [min(part, 1) for part in value]
    if size and size >= WIDTH // 2 and min(value) > WIDTH // 4:
        return [part * (WIDTH // 2) // min(value) // 8 * 8 for part in value]
    return value


def _few_kinds(value: list) -> list:
    """Return LAYERS elements of a list with an element for each layer, of different kinds if there are some."""
    kinds = [part for place, part in enumerate(value) if part not in value[:place]]
    return (kinds + value)[:LAYERS] if all(isinstance(part, str) for part in value) else value[:LAYERS]


def small_model(family: str, batch: int = 3) -> tuple[nn.Module, dict[str, Any] | None]:
    """Build a small random model of a family, in fp64 if it can, and a call that it runs.

    The first size that runs a guessed call is taken; if none does, the first that can be built, with None.

    Raises:
        RuntimeError: the model is not small.
    """
    errors: list[Exception] = []
    first: nn.Module | None = None
    for kept in _KEPT:
        try:
            model = _built(family, kept).train()
        except Exception as error:
            errors.append(error)
            continue
        first = model if first is None else first
        for kind in (torch.float64, torch.float32):
            if (named := example(model.to(kind), batch)) is not None:
                return model, named
    if first is None:
        raise errors[0]
    return first, None


def _built(family: str, kept: Sequence[int]) -> nn.Module:
    import transformers
    from transformers.models.auto import modeling_auto

    plain = transformers.CONFIG_MAPPING[family]
    config = plain.from_dict(small(plain().to_dict(), kept))
    for part in [config, *vars(config).values()]:
        if hasattr(part, "to_dict"):
            part._experts_implementation = "eager"  # grouped products take no fp64
    tables = [f"MODEL_FOR_{use}_MAPPING_NAMES" for use in _MODELS] + ["MODEL_MAPPING_NAMES"]
    name = next(filter(None, (getattr(modeling_auto, table).get(family) for table in tables)))
    kind = getattr(transformers, name if isinstance(name, str) else name[0])
    torch.manual_seed(0)
    with torch.device("meta"):
        try:
            count = sum(parameter.numel() for parameter in kind(config).parameters())
        except Exception:  # some models cannot be built there
            count = 0
    if count > _MOST_PARAMETERS:
        raise RuntimeError(f"it has {count:,} parameters at the small size")
    return kind(config)


def example(model: nn.Module, batch: int = 3) -> dict[str, Any] | None:
    """Return arguments with values that the model runs with; None if no guess runs."""
    generator = torch.Generator().manual_seed(5)
    tries: Iterator[Any] = calls_of_transformers(model, batch, 5)
    for call in tries:
        named = {
            key: torch.randn(value.shape, generator=generator).to(value.dtype)
            if isinstance(value, torch.Tensor) and value.is_meta
            else value
            for key, value in call.keywords["named"].items()
        }
        with contextlib.suppress(Exception), torch.no_grad():
            copy.deepcopy(model)(**named)
            return named
    return None


def compare(rank: int, model: nn.Module, found: AutomaticPlan, named: dict[str, Any]) -> tuple[float, float, str]:
    """Compare the split model with the unsplit one, every output and gradient of a call.

    Returns:
        The share of the parameters on this rank, the largest relative error, and the tensor that has it.
    """
    whole = copy.deepcopy(model)
    split = weft.parallelize(model, plan=found)
    share = _count(split) / _count(whole)
    expected = _results(whole, named)
    result = _results(split, named)
    if result.keys() != expected.keys():
        raise AssertionError(f"outputs or gradients differ: {sorted(result.keys() ^ expected.keys())[:3]}")
    largest = max((tensor.norm().item() for key, tensor in expected.items() if key.startswith("d ")), default=0.0)
    worst = (0.0, "")
    for key, tensor in expected.items():
        if key.startswith("d "):
            shard = weft.shard_of(split.get_parameter(key[2:]))
            tensor = tensor if shard is None else shard.take(tensor)
        if result[key].shape != tensor.shape:
            raise AssertionError(f"{key} is {tuple(result[key].shape)}, not {tuple(tensor.shape)}")
        scale = max(tensor.norm().item(), 1e-3 * largest if key.startswith("d ") else 1e-6)
        error = (result[key] - tensor).norm().item() / scale if tensor.numel() else 0.0
        worst = max(worst, (error if math.isfinite(error) else math.inf, key))
    return share, *worst


def _results(model: nn.Module, named: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return outputs by number, and gradients by "d " and the parameter's name."""
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(1)
    outputs = [tensor for tensor in tensors_in(model(**named), 3) if tensor.is_floating_point()]
    loss = _weighted_sum([x for x in outputs if x.requires_grad])
    if loss.requires_grad:
        loss.backward()
    found = {f"output {place}": tensor.detach().double() for place, tensor in enumerate(outputs)}
    return found | _gradients(model)


def _weighted_sum(outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of all elements, each with a random weight."""
    generator = torch.Generator().manual_seed(2)
    sums = [(x.double() * torch.randn(x.shape, generator=generator)).sum() for x in outputs]
    return torch.stack(sums).sum() if sums else torch.zeros(())


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {f"d {name}": p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def compare_pipeline(rank: int, model: nn.Module, named: dict[str, Any]) -> tuple[float, float, str]:
    """Compare a step of a pipeline with the plain model on the same micro-batches, its loss and every gradient.

    Returns:
        As `compare`.
    """
    plain = copy.deepcopy(model)
    parts = [keywords for _, keywords in microbatches_of(((), named), None, MICROBATCHES)]
    expected = torch.stack([_step_alone(plain, part) for part in parts]).sum()
    pipe = weft.Pipeline(
        model,
        weft.init_mesh(pp=WORLD, device_type="cpu"),
        microbatches=MICROBATCHES,
        loss=_loss_of_output,
        reduction="sum",
        example=parts[0],
    )
    loss = pipe.step(named, torch.zeros(2 * MICROBATCHES))
    share = _count(pipe) / _count(plain)
    wanted, found = _gradients(plain), _gradients(pipe)
    held = {f"d {name}" for name, _ in pipe.named_parameters()}
    for key in found.keys() - wanted.keys():  # a stage whose output needs no gradient gets zeros
        if not found[key].any():
            del found[key]
    if differing := found.keys() ^ (wanted.keys() & held):
        raise AssertionError(f"gradients differ: {sorted(differing)[:3]}")
    largest = max((tensor[tensor.isfinite()].norm().item() for tensor in wanted.values()), default=0.0)
    error = (loss - expected).abs().item() / max(expected.abs().item(), 1.0)
    worst = (error if math.isfinite(error) else math.inf, "loss")
    for key, gradient in found.items():
        error, numbers = math.inf, wanted[key].isfinite()  # some models have gradients that are not numbers
        if torch.equal(gradient.isfinite(), numbers):
            distance = (gradient - wanted[key])[numbers].norm().item()
            error = distance / max(wanted[key][numbers].norm().item(), 1e-3 * largest)
        worst = max(worst, (error, key))
    return share, *worst


def _loss_of_output(output, targets=None) -> torch.Tensor:
    return _weighted_sum([x for x in tensors_in(output, 3) if x.is_floating_point()])


def _step_alone(model: nn.Module, named: dict[str, Any]) -> torch.Tensor:
    """Return the loss of a batch; its gradients are added to those of the model."""
    with without_caches(models_of_transformers(model)):
        loss = _loss_of_output(model(**named))
    loss.backward()
    return loss.detach()


def _is_random(model: nn.Module, named: dict[str, Any]) -> bool:
    """Return whether the model's loss depends on random numbers."""
    losses = []
    for seed in (1, 2):
        for library in (torch.manual_seed, np.random.seed, random.seed):
            library(seed)
        with torch.no_grad():
            losses.append(_loss_of_output(copy.deepcopy(model)(**named)))
    return not torch.equal(*losses)


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def row_of(family: str, checked: bool, pipeline: bool = False) -> dict[str, Any]:
    """Return a family's row of the table: its share, the reasons of large whole layers, the comparison."""
    row: dict[str, Any] = {"family": family}
    try:
        model, named = small_model(family, 2 * MICROBATCHES if pipeline else 3)
    except Exception as error:
        return row | {"not built": line(error)}
    row |= {"model": type(model).__name__, "parameters": _count(model)}
    if pipeline:
        return row | _row_of_pipeline(model, named)
    start = time.monotonic()
    found = automatic_plan(model, WORLD)
    row |= {"share": share_of_plan(model, found, WORLD), "seconds": time.monotonic() - start}
    row["whole"] = _whole(model, found)
    row["called"] = found.parts == ("",)
    if checked:
        if named is None:
            return row | {"not compared": "no guessed call runs"}
        first, second = (_results(copy.deepcopy(model), named) for _ in range(2))
        if any((tensor != second[key]).any() for key, tensor in first.items()):
            return row | {"not compared": "the model is random"}
        row |= _compared(compare, model, found, named)
    return row


def _compared(comparison, model: nn.Module, *arguments) -> dict[str, Any]:
    row: dict[str, Any] = {"type": str(next(model.parameters()).dtype)}
    try:
        results = run_ranks(comparison, WORLD, model, *arguments, timeout_s=120)
    except RanksFailedError as error:
        return row | {"failed": line(error)}
    row["share"] = max(share for share, *_ in results)
    row["error"], row["of"] = max((error, of) for _, error, of in results)
    return row


def _row_of_pipeline(model: nn.Module, named: dict[str, Any] | None) -> dict[str, Any]:
    if named is None:
        return {"not compared": "no guessed call runs"}
    named = {name: value for name, value in named.items() if name not in RECORDED}
    rows = torch.arange(2 * MICROBATCHES)[:, None]
    for name in ("input_ids", "decoder_input_ids"):
        if (tokens := named.get(name)) is not None:  # others in every row, but for those that stand for images
            named[name] = torch.where((tokens >= 3) & (tokens < 7), (tokens - 3 + rows) % 4 + 3, tokens)
    if _is_random(model, named) and _is_random(model.eval(), named):
        return {"not compared": "the model is random"}
    return _compared(compare_pipeline, model, named)


def _whole(model: nn.Module, found: AutomaticPlan) -> dict[str, float]:
    """Return the reasons why layers stay whole, to the share of the parameters in these layers."""
    total, shares = _count(model), dict[str, float]()
    modules = dict(model.named_modules())
    for name, reason in found.whole.items():
        held = sum(parameter.numel() for parameter in modules[name].parameters(recurse=False)) / total
        shares[reason] = shares.get(reason, 0.0) + held
    return {why: round(held, 3) for why, held in sorted(shares.items(), key=lambda item: -item[1]) if held >= _LARGE}


def line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def row_in_a_process(family: str, checked: bool, timeout_s: float, pipeline: bool = False) -> dict[str, Any]:
    """Return the row of a family from a process of its own."""
    return in_a_process({"family": family}, timeout_s, lambda: row_of(family, checked, pipeline))


def in_a_process(of: dict[str, Any], timeout_s: float, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return a row that is made in a process of its own, so that a model may hang, crash or take all memory.

    Args:
        of: what the row is of; the row is this and "failed" if there is no other.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.setpgid(0, 0)
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        try:
            row = make()
        except BaseException as error:
            row = of | {"failed": line(error)}
        with os.fdopen(writer, "w") as file:
            json.dump(row, file)
        os._exit(0)
    os.close(writer)
    timer = threading.Timer(timeout_s, lambda: os.killpg(child, signal.SIGKILL))
    timer.start()
    with os.fdopen(reader) as file:
        text = file.read()
    timer.cancel()
    os.waitpid(child, 0)
    return json.loads(text) if text else of | {"failed": f"not done within {timeout_s:.0f} s"}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python tests/helpers/families.py", description=__doc__)
    parser.add_argument("--only", help="families, with commas between")
    parser.add_argument("--check", action="store_true", help="compare with the unsplit model on two ranks")
    parser.add_argument("--pipeline", action="store_true", help="compare a pipeline of two stages instead")
    parser.add_argument("--json", type=Path, help="write the rows here; families that it has already are not run again")
    parser.add_argument("--timeout", type=float, default=120, help="seconds for a family")
    options = parser.parse_args(arguments)
    from transformers import logging

    logging.set_verbosity_error()
    logger = getLogger("weft")
    logger.setLevel("ERROR")
    rows = json.loads(options.json.read_text())["rows"] if options.json and options.json.exists() else []
    have = {row["family"] for row in rows}
    wanted = options.only.split(",") if options.only else families()
    for family in (family for family in wanted if family not in have):
        row = row_in_a_process(family, options.check, options.timeout, options.pipeline)
        rows.append(row)
        print(_text(row), flush=True)
        if options.json:
            options.json.write_text(json.dumps({"rows": rows}, indent=1))


def _text(row: dict[str, Any]) -> str:
    if "not built" in row:
        return f"{row['family']:28} not built: {row['not built']}"
    if "share" not in row:
        return f"{row['family']:28} {row.get('failed') or row['not compared']}"
    reasons = "; ".join(f"{share:.0%} {reason}" for reason, share in list(row.get("whole", {}).items())[:2])
    compared = row.get("failed") or row.get("not compared")
    compared = f"{row['error']:.1e} ({row['of']})" if "error" in row else compared or ""
    return f"{row['family']:28} {row['share']:4.0%} of {row['parameters']:,} {compared} {reasons}"


if __name__ == "__main__":
    main()
