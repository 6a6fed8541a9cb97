"""Peers of the attention benches: torch's functions, FlashAttention's packages and cuDNN's where they are installed.

A backward is called "ordered" if it adds the gradients of queries in a fixed order, as ours does, so that every run has
the same bits. torch's cuDNN has no such mode: torch does not choose it where deterministic algorithms are asked for.
FlashAttention publishes that its ordered backward takes up to 38% longer.
"""

import contextlib
import importlib
import importlib.util
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from weft.kernels.attention_rules import Positions, Rules
from weft.ops import library_attention
from weft.ops.attention_blocks import AttentionChunk

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Call = Callable[[], object]

_TORCH = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
# FlashAttention's packages by the version of the method. Their tensors are [B, S, H, D].
_FLASH_ATTENTION = {
    "FlashAttention 2": "flash_attn",
    "FlashAttention 3": "flash_attn_interface",
    "FlashAttention 4": "flash_attn.cute",
}


def functions(causal: bool) -> dict[str, Attention]:
    """Return out of q, k and v [B, H, S, D] by each peer, differentiable, backward in no fixed order."""
    peers: dict[str, Attention] = {name: partial(by_torch, backend, causal) for name, backend in _TORCH.items()}
    return peers | {name: partial(_by_package, module, causal, False) for name, module in _packages().items()}


def ordered_backwards(causal: bool, q, k, v, dout) -> dict[str, Call]:
    """Return calls that give dq, dk and dv by each peer that adds in a fixed order."""

    def call(function: Attention, mode: Callable) -> Call:
        backward = backward_of(function, q, k, v, dout)

        def run():
            with mode():
                return backward()

        return run

    flash = partial(by_torch, SDPBackend.FLASH_ATTENTION, causal)
    calls = {"flash ordered": call(flash, library_attention.same_in_every_run)}
    for name, module in _packages().items():
        calls[f"{name} ordered"] = call(partial(_by_package, module, causal, True), contextlib.nullcontext)
    if importlib.util.find_spec("cudnn") is not None:
        calls["cuDNN ordered"] = _CudnnBackward(causal, q, k, v, dout)
    return calls


def backward_of(function: Attention, q, k, v, dout) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Return a call of backward alone, on a graph that its first call makes, so that a peer that raises is left out."""
    graph: list[torch.Tensor] = []

    def call():
        graph.extend([function(q, k, v)] if not graph else [])
        return torch.autograd.grad(graph[0], (q, k, v), dout, retain_graph=True)

    return call


def with_lse() -> dict[str, Callable[..., tuple[torch.Tensor, torch.Tensor]]]:
    """Return out and lse of q, k and v, where all keys are seen, by torch's functions, cuDNN as flash."""

    def by(library: str, q, k, v) -> tuple[torch.Tensor, torch.Tensor]:
        chunk = AttentionChunk(Rules(), Positions(0, q.size(2)), Positions(0, k.size(2)), library=library)
        part = library_attention.Part(slice(None), slice(None), False, -1)
        backend = SDPBackend.CUDNN_ATTENTION if library == "any" else SDPBackend.FLASH_ATTENTION
        with sdpa_kernel(backend):
            return library_attention.forward(q, k, v, chunk, (part,))

    return {"cuDNN": partial(by, "any"), "flash": partial(by, "deterministic")}


def by_torch(backend: SDPBackend, causal: bool, q, k, v) -> torch.Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.size(1) != k.size(1))


def _packages() -> dict[str, str]:
    found = {}
    for name, module in _FLASH_ATTENTION.items():
        with contextlib.suppress(ImportError):  # a namespace without the package itself
            if importlib.util.find_spec(module) is not None:
                found[name] = module
    return found


def _by_package(module: str, causal: bool, ordered: bool, q, k, v) -> torch.Tensor:
    function = importlib.import_module(module).flash_attn_func
    found = function(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal, deterministic=ordered)
    out = found[0] if isinstance(found, tuple) else found
    return out.transpose(1, 2)


class _CudnnBackward:
    """cuDNN's backward in a fixed order, which only its own package offers (nvidia-cudnn-frontend).

    Its first call makes the plan and raises AssertionError where the gradients are not those of torch's cuDNN.
    """

    def __init__(self, causal: bool, q, k, v, dout) -> None:
        self.causal, self.q, self.k, self.v, self.dout = causal, q, k, v, dout
        self.run: Callable[[], list[torch.Tensor]] | None = None

    def __call__(self) -> list[torch.Tensor]:
        if self.run is None:
            self.run = self._planned()
            plain = partial(by_torch, SDPBackend.CUDNN_ATTENTION, self.causal)
            for found, exact in zip(self.run(), backward_of(plain, self.q, self.k, self.v, self.dout)(), strict=True):
                assert (found - exact).norm() <= 0.01 * exact.norm(), "cuDNN's ordered backward differs"
        return self.run()

    def _planned(self) -> Callable[[], list[torch.Tensor]]:
        cudnn = importlib.import_module("cudnn")
        q, k, v, dout = (x.detach() for x in (self.q, self.k, self.v, self.dout))
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention.default(q, k, v, None, True, 0.0, self.causal)
        lse = lse.reshape(*q.shape[:3], 1)
        gradients = [torch.empty_like(x) for x in (q, k, v)]
        bf16 = cudnn.data_type.BFLOAT16 if q.dtype == torch.bfloat16 else cudnn.data_type.HALF
        wide = cudnn.data_type.FLOAT
        graph = cudnn.pygraph(io_data_type=bf16, intermediate_data_type=wide, compute_data_type=wide)
        given = [graph.tensor_like(x) for x in (q, k, v, out, dout, lse)]
        found = graph.sdpa_backward(
            name="sdpa_backward",
            q=given[0],
            k=given[1],
            v=given[2],
            o=given[3],
            dO=given[4],
            stats=given[5],
            attn_scale=q.size(3) ** -0.5,
            use_causal_mask=self.causal,
            use_deterministic_algorithm=True,
        )
        for tensor, gradient in zip(found, gradients, strict=True):
            tensor.set_output(True).set_dim(gradient.size()).set_stride(gradient.stride())
        graph.build([cudnn.heur_mode.A])
        workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=q.device)
        memory = dict(zip([*given, *found], [q, k, v, out, dout, lse, *gradients], strict=True))

        def run() -> list[torch.Tensor]:
            graph.execute(memory, workspace)
            return gradients

        return run
