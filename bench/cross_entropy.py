"""weft bench cross_entropy: the loss over one rank's shard of the vocabulary, forward and backward, on a GPU.

Once from logits, and once from the output layer's input, with the memory of the whole step.
"""

import argparse
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from unittest.mock import patch

import torch
import torch.nn.functional as F

from weft.bench.device_time import LIMIT, Contest, measure
from weft.bench.suites import positive
from weft.bench.table import Row
from weft.ops import linear_cross_entropy
from weft.ops.cross_entropy import fused_cross_entropy
from weft.ops.linear_cross_entropy import fused_linear_cross_entropy
from weft.testing import cases
from weft.testing.tolerance import assert_close

__all__ = ["LIMIT", "add_arguments", "contest", "run"]

# Other packages' functions, by module and name: of logits and targets, and of the input, the weight and targets.
_LIGER = "liger_kernel.transformers.functional"
_OF_LOGITS = {"Liger": (_LIGER, "liger_cross_entropy"), "QuACK": ("quack.cross_entropy", "cross_entropy")}
_WITH_LAYER = {
    "Liger": (_LIGER, "liger_fused_linear_cross_entropy"),
    # Hopper's, in CuTe; it needs nvidia-cutlass-dsl.
    "Liger CuTe": (
        "liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90",
        "liger_fused_linear_cross_entropy_sm90",
    ),
    "QuACK": ("quack.linear_cross_entropy", "chunked_linear_cross_entropy"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=positive, default=8192)
    parser.set_defaults(tensor_parallel=cases.TENSOR_PARALLEL, compiled=True)


def run(options) -> list[Row]:
    return measure(contests(options.tokens, options.tensor_parallel, options.compiled), options.rounds)


def contests(tokens: int, tensor_parallel: Iterable[int], compiled: bool) -> Iterator[Contest]:
    """Yield contests with Llama 3's vocabulary over 1 to 8 ranks."""
    model, device = cases.MODELS["llama-3-8b"], torch.device("cuda")
    for tp in tensor_parallel:
        yield contest(tokens, model.vocabulary // tp, device, compiled)
        yield contest_with_layer(tokens, model.hidden, model.vocabulary // tp, device, compiled)


def contest(tokens: int, vocabulary: int, device: torch.device, compiled: bool = True) -> Contest:
    """Return the contest on bf16 logits, which our gradient overwrites."""
    logits = (torch.randn(tokens, vocabulary, device=device) * 4).bfloat16().requires_grad_()
    target = torch.randint(0, vocabulary, (tokens,), device=device)

    def step(function, logits=logits, target=target, **options):
        return torch.autograd.grad(function(logits, target, **options), logits)[0]

    def check():
        some = slice(0, 64)
        leaves = [logits[some].detach().to(dtype).requires_grad_() for dtype in (torch.bfloat16, torch.float64)]
        plain, exact = (step(F.cross_entropy, leaf, target[some]) for leaf in leaves)
        assert_close(step(fused_cross_entropy, leaves[0], target[some]), plain, exact, "gradient")
        copy = leaves[0].detach().clone().requires_grad_()
        assert_close(step(fused_cross_entropy, copy, target[some], overwrite_logits=True), plain, exact, "in place")

    return Contest(
        "cross entropy",
        f"{tokens} x {vocabulary} bfloat16",
        lambda: step(fused_cross_entropy, overwrite_logits=True),
        {name: partial(step, loss) for name, loss in _peers(F.cross_entropy, _OF_LOGITS, compiled).items()},
        check,
        0,
        3 * logits.numel() * logits.element_size(),  # read forward; read and written backward
        eager=["Liger"],  # reads the number of targets on the host
    )


def contest_with_layer(
    tokens: int, features: int, vocabulary: int, device: torch.device, compiled: bool = True
) -> Contest:
    """Return the contest on a bf16 input of the output layer; the peers compute the logits, as a whole."""
    x = torch.randn(tokens, features, device=device).bfloat16().requires_grad_()
    weight = (torch.randn(vocabulary, features, device=device) / features**0.5).bfloat16().requires_grad_()
    target = torch.randint(0, vocabulary, (tokens,), device=device)

    def two_ops(x, weight, target):
        return F.cross_entropy(F.linear(x, weight), target)

    def step(function, x=x, weight=weight, target=target):
        return torch.autograd.grad(function(x, weight, target), (x, weight))

    def check():
        few = x[:64].detach(), weight[:2048].detach(), target[:64] % 2048
        of_types = [[part.to(dtype).requires_grad_() for part in few[:2]] for dtype in (x.dtype, torch.float64)]
        plain, exact = (step(two_ops, x, weight, few[2]) for x, weight in of_types)
        x_16, weight_16 = of_types[0]
        results = step(fused_linear_cross_entropy, x_16, weight_16, few[2])
        for name, result, in_16_bits, in_64_bits in zip(("dx", "dw"), results, plain, exact, strict=True):
            assert_close(result, in_16_bits, in_64_bits, name)

    def in_chunks(*arguments):
        with patch.object(linear_cross_entropy, "_KEEPS_LOGITS", False):
            return fused_linear_cross_entropy(*arguments)

    peers = {**_peers(two_ops, _WITH_LAYER, compiled), "ours in chunks": in_chunks}
    return Contest(
        "linear and cross entropy",
        f"{tokens} x {features} x {vocabulary} bfloat16",
        lambda: step(fused_linear_cross_entropy),
        {name: partial(step, loss) for name, loss in peers.items()},
        check,
        3 * 2 * tokens * features * vocabulary,  # the three products that a step needs
        0,
        eager=["Liger", "Liger CuTe"],
    )


def _peers(eager: Callable, installed: Mapping[str, tuple[str, str]], compiled: bool) -> dict[str, Callable]:
    """Return the peers of a loss: eager, those that are installed, and torch.compile if wanted."""

    def call(module: str, function: str, *arguments):
        loss = getattr(importlib.import_module(module), function)(*arguments)  # a peer that raises is left out
        return loss[0] if isinstance(loss, tuple) else loss

    found: dict[str, Callable] = {
        name: partial(call, *where)
        for name, where in installed.items()
        if importlib.util.find_spec(where[0].partition(".")[0]) is not None
    }
    return {"eager": eager, **found} | ({"torch.compile": torch.compile(eager)} if compiled else {})
