"""Attention of a chunk by torch's own functions on GPUs: flash attention, and forward cuDNN's where torch prefers it.

They take rows that see all keys, or keys up to their own position (with a window), if the last row has the last key's
position. They take no state, documents, softcap, sinks or dropout. So each run of positions is one call.
Both return the logarithm of the sum of exponentials, and flash attention takes it in backward. cuDNN's backward is not
called: torch keeps its plan by the strides of q, k and v, and uses it for other strides of dout.

flash attention is Dao 2023, and another that `torch.nn.attention.activate_flash_attention_impl` has put in its place.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention import SDPBackend
from torch.utils import deterministic

from weft.ops import kernel_choice
from weft.ops.attention_blocks import AttentionChunk, runs

_aten = torch.ops.aten
_MOST_SUMS = 4  # of all queries' gradients in fp32 that the deterministic backward may hold
_changing_mode = threading.Lock()


@dataclass(frozen=True)
class Part:
    """A run of rows, and the keys that they see.

    Attributes:
        causal: a row sees no key behind its own position.
        left: number of positions that a row sees before its own; -1 is without bound.
    """

    rows: slice
    keys: slice
    causal: bool
    left: int


def choose(
    kind: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chunk: AttentionChunk
) -> tuple[tuple[Part, ...], str]:
    """Return the parts that torch's functions compute, none if weft's kernel or `attention_blocks` does; and why.

    Args:
        kind: "forward" or "backward".
        q, k, v: [B, H, Sq, D], [B, Hkv, Sk, D] and [B, Hkv, Sk, Dv], with all keys of the queries.
    """
    if not _on_gpu(q):
        return (), kernel_choice.excluded(q.device).reason
    found = _parts(q, k, v, chunk)
    if not isinstance(found, str):
        found = _refusal(kind, q, k, v, chunk) or found
    if isinstance(found, str):
        return (), found
    algorithm = kernel_choice.attention_algorithm(kind, q, k, v, chunk)
    return (() if algorithm.kernel else found), algorithm.reason


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chunk: AttentionChunk, parts: Sequence[Part]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out [B, H, Sq, Dv] and lse [B, H, Sq] fp32."""
    results = [_forward(q[:, :, p.rows], k[:, :, p.keys], v[:, :, p.keys], p, chunk) for p in parts]
    if len(results) == 1:
        return results[0]
    outs, lses = zip(*results, strict=True)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def backward(
    of_queries: Sequence[torch.Tensor],
    of_keys: Sequence[torch.Tensor],
    chunk: AttentionChunk,
    parts: Sequence[Part],
    gradients: Sequence[torch.Tensor],
) -> None:
    """Add to the gradients dq, dk and dv, fp32; those of each part are rounded to q's type before.

    Args:
        of_queries: q, dout, out and lse.
        of_keys: k and v.
        gradients: dq, dk and dv.
    """
    for part in parts:
        of_rows, of_part = [x[:, :, part.rows] for x in of_queries], [x[:, :, part.keys] for x in of_keys]
        found = part_backward(of_rows, of_part, part, chunk)
        for total, place, gradient in zip(gradients, (part.rows, part.keys, part.keys), found, strict=True):
            total[:, :, place] += gradient


def _parts(q, k, v, chunk: AttentionChunk) -> tuple[Part, ...] | str:
    """Return a part for each run of queries, or why torch's functions do not compute the chunk."""
    rules, (key_start, key_count, _, more_keys) = chunk.rules, chunk.key_positions
    if not chunk.library:
        return "the result must have the same bits on any mesh"
    if chunk.query_documents is not None or rules.softcap is not None or rules.dropout:
        return "torch's functions take no documents, no softcap and not this package's dropout"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"torch's functions do not take {q.dtype}"
    if q.size(3) != v.size(3) or q.size(3) % 8 or q.size(3) > _largest_head_dim(q.device):
        return f"torch's functions do not take heads of {q.size(3)} and {v.size(3)} features"
    if not q.numel() or not k.numel() or more_keys or (rules.scale is not None and rules.scale <= 0):
        return "torch's functions take one run of keys, and a positive scale"
    found = []
    for start, count, first in runs(chunk.query_positions):
        end = start + count - key_start  # of the keys up to the last query's position
        if rules.left is None and rules.right is None:
            found.append(Part(slice(first, first + count), slice(0, key_count), False, -1))
        elif rules.right == 0 and count <= end <= key_count:
            left = -1 if rules.left is None else rules.left
            found.append(Part(slice(first, first + count), slice(0, end), True, left))
        else:
            return "torch's functions take no window on both sides, and no queries without a key of their position"
    return tuple(found)


def _refusal(kind: str, q, k, v, chunk: AttentionChunk) -> str | None:
    """Return why this GPU's flash attention is not called, or None."""
    if not can_use_flash_attention(SDPAParams(q, k, v, None, 0.0, False, q.size(1) != k.size(1))):
        return "torch's flash attention does not run here"
    sums = _sums_of(q)
    if kind == "backward" and chunk.library == "deterministic" and sums > _MOST_SUMS:
        return f"torch's deterministic backward would hold {sums} sums of dq"
    return None


def _forward(q, k, v, part: Part, chunk: AttentionChunk) -> tuple[torch.Tensor, torch.Tensor]:
    scale = chunk.rules.scale
    q, k, v = _by_position(q, k, v)
    if _takes_cudnn(q, k, v, part, chunk):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, lse, *_ = _aten._scaled_dot_product_cudnn_attention.default(
            q, k, v, None, True, 0.0, part.causal, scale=scale
        )
        return out, lse.reshape(q.shape[:3])
    bounds = {"window_size_left": part.left, "window_size_right": 0} if part.left >= 0 else {}
    out, lse, *_ = _aten._flash_attention_forward.default(
        q, k, v, None, None, q.size(1), k.size(1), 0.0, part.causal, False, scale=scale, **bounds
    )
    return out.transpose(1, 2), lse


def part_backward(of_rows, of_keys, part: Part, chunk: AttentionChunk) -> tuple[torch.Tensor, ...]:
    """Return dq, dk and dv of one part, from q, dout, out and lse, and k and v."""
    (q, dout, out, lse), (k, v) = of_rows, of_keys
    no_numbers = torch.empty(2, dtype=torch.int64, device=q.device)  # nothing is dropped, so they are not read
    bounds = {"window_size_left": part.left, "window_size_right": 0} if part.left >= 0 else {}
    with same_in_every_run() if chunk.library == "deterministic" else contextlib.nullcontext():
        found = _aten._flash_attention_backward.default(
            *_by_position(dout, q, k, v, out),
            lse.contiguous(),
            None,
            None,
            q.size(2),
            k.size(2),
            0.0,
            part.causal,
            no_numbers,
            no_numbers,
            scale=chunk.rules.scale,
            **bounds,
        )
    return tuple(gradient.transpose(1, 2) for gradient in found)


def _by_position(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors as [B, S, H, D], with rows at multiples of 16 bytes."""
    from weft.kernels.launch import describable

    turned = (x.transpose(1, 2) for x in tensors)
    return [x if describable(x) else x.contiguous() for x in turned]


def _sums_of(q: torch.Tensor) -> int:
    """Return the number of sums of dq that the deterministic backward holds: it has one for each multiprocessor."""
    from weft.kernels.launch import multiprocessors

    return -(-multiprocessors(q.device) // (q.size(0) * q.size(1)))


def _largest_head_dim(device: torch.device) -> int:
    """Return that of flash attention, which torch does not train with more than 192 features on 8.6 to 8.9 and 12.x."""
    if device.type != "cuda":
        return 256
    major, minor = torch.cuda.get_device_capability(device)
    return 192 if (major == 8 and minor >= 6) or major == 12 else 256


def _takes_cudnn(q, k, v, part: Part, chunk: AttentionChunk) -> bool:
    """Return True if torch would take cuDNN, whose causal mask begins with the first row and the first key.

    Args:
        q, k, v: by position.
    """
    if chunk.library != "any" or part.left >= 0 or (part.causal and q.size(1) != k.size(1)):
        return False
    grouped = q.size(2) != k.size(2)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    choice = torch._fused_sdp_choice(q, k, v, None, 0.0, part.causal, scale=chunk.rules.scale, enable_gqa=grouped)
    return choice == SDPBackend.CUDNN_ATTENTION.value


def _on_gpu(q: torch.Tensor) -> bool:
    return q.is_cuda


@contextlib.contextmanager
def same_in_every_run() -> Iterator[None]:
    """Let ATen add in a fixed order, one thread at a time: the mode is the process's.

    It fills no new memory meanwhile, as it otherwise does in this mode.
    """
    with _changing_mode:
        before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        filled = deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        torch._C._set_deterministic_algorithms(True, warn_only=False)
        deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        try:
            yield
        finally:
            deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
            torch._C._set_deterministic_algorithms(before[0], warn_only=before[1])
