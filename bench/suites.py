"""The benches of `weft bench`: name, text and device of each. Imports the standard library only."""

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from dataclasses import dataclass
from typing import Any

WARM = "warm: calls follow one another on the same operands and nothing is flushed"
COLD = "cold: the L2 cache is flushed before each call"


class RefusedError(Exception):
    """Request that cannot be carried out; the text is one line for the user."""


def positive(text: str) -> int:
    """Return the value of an option that counts; raise ArgumentTypeError below 1."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


@dataclass(frozen=True)
class Suite:
    """Description of a bench, the module `weft.bench.<name>`.

    The module has `run(options)`, which returns rows (`table.Row`), and `LIMIT`, the text of the limit that
    times are compared with. It may have `add_arguments(parser)` for options of its own, and `plot(rows, path)` for a
    better picture than times and ratios row by row.

    Attributes:
        text: One line for the help.
        on_gpu: True to measure a CUDA device, False for the processor.
        caches: State of the caches at the start of a call, in words.
    """

    text: str
    on_gpu: bool = False
    caches: str = WARM


def add_arguments(module, parser: ArgumentParser) -> None:
    """Add a bench's own options, if it has any."""
    getattr(module, "add_arguments", lambda parser: None)(parser)


def options_of(module, **given: Any) -> Namespace:
    """Return the default options of a bench, with those that are given in their place."""
    parser = ArgumentParser()
    add_arguments(module, parser)
    return Namespace(**{**vars(parser.parse_args([])), **given})


SUITES = {
    "linear": Suite("a tensor-parallel MLP step beside DTensor over gloo"),
    "attention": Suite("a sequence shared by CPU ranks beside one process with it whole"),
    "data_parallel": Suite(
        "steps of weft.DataParallel and sets of gradients beside DDP over gloo and over weft, with memory"
    ),
    "sharded_optimizer": Suite("training steps with a sharded AdamW beside ZeroRedundancyOptimizer over gloo"),
    "sharded_parameters": Suite("training steps with zero=3 beside FSDP2 over gloo, and steps of Muon beside torch's"),
    "paradigms": Suite("one model's training step on two and four CPU ranks, split in every way, beside one process"),
    "host_calls": Suite("calls of Python functions in a training step, split in every way, beside the plain model's"),
    "invariance": Suite("a training step with the same bits on any number of ranks beside the ordinary one"),
    "collectives": Suite("the collectives beside gloo, with nccl-tests' flags and columns"),
    "experts": Suite("a layer of experts over CPU ranks beside one process, and the way of its tokens beside gloo"),
    "generate": Suite("generation by a Llama on CPU ranks beside one process, gloo and transformers' own split"),
    "lora": Suite("a training step of LoRA on CPU ranks, and the peak memory of from_pretrained, beside one process"),
    "matmul": Suite(
        "the linear layers' products at published models' shards beside torch.matmul, on a GPU", True, COLD
    ),
    "attention_chunk": Suite(
        "an attention chunk, forward and backward, beside cuDNN, flash and FlexAttention, on a GPU", True, COLD
    ),
    "bucket": Suite(
        "gradients into one buffer and back, and sums of buffers, beside _foreach_copy_, on a GPU", True, COLD
    ),
    "cross_entropy": Suite(
        "the loss over a shard of the vocabulary beside eager, Liger and torch.compile, on a GPU", True, COLD
    ),
    "grouped_matmul": Suite("the products of a mixture's experts beside torch's grouped_mm, on a GPU", True, COLD),
    "communicating": Suite(
        "the kernels that cross ranks, as far as one GPU can show: tax, overlap, host time",
        True,
        f"{COLD}; the host's times are of warm calls",
    ),
    "launch": Suite(
        "the start of a kernel compiled ahead of time beside Triton's own launcher and compiler, on a GPU",
        True,
        "warm, but for a process's first call, whose compiler cache the row names",
    ),
    "llama_step": Suite("a training step of four layers of Llama 3 8B beside plain torch's, on a GPU", True, COLD),
    "kernels": Suite(
        "the GPU kernels' benches as one table; --communicating: those of the kernels that cross ranks", True, COLD
    ),
    "rank_order_sum": Suite("the CUDA extension's sum of W buffers beside torch.sum, on a GPU", True, COLD),
    "several_gpus": Suite("collectives beside NCCL's and others', overlapped products, one rank a GPU", True),
}
