"""attention: a chunk of queries against a chunk of keys and values, each row at its global position.

    S = scale Q K^T    (softcap: S := c tanh(S / c))    P = exp(S - lse), 0 where a key is hidden    O = P V

    q [B, H, Sq, D]    k [B, Hkv, Sk, D]    v [B, Hkv, Sk, Dv]    out [B, H, Sq, Dv]    lse [B, H, Sq] fp32, natural log

Query i sees key j where -left <= position_j - position_i <= right and their documents are the same. Positions are one
or two runs of consecutive numbers, so that a rank may hold an early and a late part of the sequence. The kernel skips a
tile of keys that no query of its tile sees, and computes one that all of them see without a mask.

A state (out, lse) continues: the sum over keys starts from it, in fp32, and is rounded when it is written. So a ring of
chunks is exact: pass each step's state to the next, in fp32, and ask the last for the input's type (Liu et al. 2023,
with the merge of two states of Dao et al. 2022, section 3.1). Attention sinks are such a state: out 0, lse = the sink.
Their gradient is dsink = -sum_i exp(sink - lse_i) delta_i, since a sink has no value. A row that sees no key has out 0
and lse -inf; its gradients are 0.

Backward (Dao 2023, section 3.1.2) takes the lse over all chunks and delta = rowsum(out dout). It computes P again and

    dV = P^T dO    dP = dO V^T    dS = P (dP - delta)    dQ = scale dS K    dK = scale dS^T Q

Two kernels without atomics give the same bits in every run. One computes dK and dV: its programs sum over the query
heads of a KV head and over query tiles in order. The other computes dQ. Both add to gradients given as fp32 buffers.

Dropout keeps or drops a probability by Philox 4x32-7 (Salmon et al. 2011) of (key position, query position, head,
batch), so the mask does not depend on the chunks. Backward draws the same numbers again. lse is that of the undropped
probabilities.

Operations: forward 2 B H pairs (D + Dv), backward 2 B H pairs (4 D + 3 Dv) in all, where pairs are those not masked.
Head dimensions are padded to a power of two: 192 costs as much as 256. Types are bf16 and fp16; fp32 runs in the
interpreter only, as its products do not fit the registers together with the sums. Bytes: q, k, v, out once from device
memory, k and v Sq / block_m times from L2. Saved for backward: q, k, v, out, lse.
Tests: tests/kernels/test_attention.py.
"""

import math
from itertools import zip_longest

import torch

from weft.kernels import launch
from weft.kernels.attention_backward import delta_kernel, dkdv_kernel, dq_kernel
from weft.kernels.attention_rules import Positions, Rules
from weft.kernels.attention_scores import (
    NUMBERS,
    capped,
    kept_pairs,
    load_tile,
    own_tile,
    query_tile,
    seed_of,
    seen_tile,
    seen_tiles,
    visible_pairs,
)
from weft.kernels.attention_tiles import AttentionProblem, listed, padded
from weft.kernels.config import AttentionConfig, choose, chosen
from weft.kernels.language import TensorDescriptor, cdiv, tl, triton
from weft.kernels.launch import LOG2E
from weft.kernels.replay import replayed

LARGEST_HEAD_DIM = 256
_DTYPES = launch.DTYPES if launch.INTERPRETED else (torch.bfloat16, torch.float16)
_LAST_POSITION = 1 << 29  # the largest position
_UNBOUNDED = (1 << 30) - 1  # a bound that hides no position; twice it, and its sum with a position, fit 32 bits
_DELTA_ROWS = 32


@replayed
def attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rules: Rules,
    *,
    query_positions: Positions | None = None,
    key_positions: Positions | None = None,
    query_documents: torch.Tensor | None = None,
    key_documents: torch.Tensor | None = None,
    previous: tuple[torch.Tensor | None, torch.Tensor] | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: AttentionConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and lse of the queries over these keys and over the keys in the state `previous`.

    Args:
        q: [B, H, Sq, D], bf16 or fp16, any strides.
        k: [B, Hkv, Sk, D], of q's type; H is a multiple of Hkv.
        v: [B, Hkv, Sk, Dv], of q's type.
        query_positions, key_positions: from 0 on by default.
        query_documents, key_documents: [B, Sq] and [B, Sk] integers.
        previous: (out fp32 [B, H, Sq, Dv], lse fp32 [B, H, Sq]), which may be views; an out of None stands for 0.
        out: [B, H, Sq, Dv] to write to; it may be that of `previous`. By default a new tensor of out_dtype.
        out_dtype: type of a new out; q's type by default.
        config: an explicit tile configuration; by default the table's, else the heuristic's.

    Returns:
        (out, lse fp32 [B, H, Sq]). A new out has its dimensions in memory in the order of q's.

    Raises:
        ValueError, TypeError: the kernel does not take an argument. Raised before any launch.
    """
    op = "attention_forward"
    previous_out, previous_lse = previous if previous is not None else (None, None)
    if previous is not None and previous_lse is None:
        raise ValueError(f"{op}: previous is (out, lse) and only out may be None; without a state give None")
    if out is not None and out_dtype not in (None, out.dtype):
        raise ValueError(f"{op}: out is {out.dtype}, out_dtype={out_dtype}; give one of them")
    chunk = _Chunk(op, q, k, v, rules, query_positions, key_positions, query_documents, key_documents)
    chunk.make_scale_positive()
    if out is None:
        out = launch.empty_in_order(q, v.size(3), out_dtype or q.dtype)
    launch.check_memory(op, q=q, out=out, previous_out=previous_out, previous_lse=previous_lse)
    launch.check_shape(op, (*q.shape[:3], v.size(3)), out=out, previous_out=previous_out)
    launch.check_shape(op, q.shape[:3], previous_lse=previous_lse)
    launch.check_dtype(op, (torch.float32,), previous_out=previous_out, previous_lse=previous_lse)
    launch.check_dtype(op, out=out)
    launch.check_output(op, out=out)
    _check_strides(op, out=out, previous_out=previous_out)
    lse = launch.empty(q.shape[:3], torch.float32, q.device)
    config = chunk.config("forward", config, continues=previous_out is not None)
    chunk.launch(
        _forward_kernel,
        config,
        chunk.query_tiles(config.block_m) * q.size(1),
        previous_out,
        previous_lse,
        out,
        lse,
        *_strides(previous_out, 4),
        *_strides(previous_lse, 3),
        *out.stride(),
        AHEAD=config.ahead,
    )
    return out, lse


@replayed
def attention_delta(out: torch.Tensor, dout: torch.Tensor) -> torch.Tensor:
    """Return rowsum(out dout), [B, H, Sq] fp32, from the whole attention's out, rounded or not."""
    op = "attention_delta"
    launch.check_memory(op, out=out, dout=dout)
    launch.check_dtype(op, out=out, dout=dout)
    if out.dim() != 4 or not 1 <= out.size(3) <= LARGEST_HEAD_DIM:
        raise ValueError(f"{op}: out {tuple(out.shape)} must be [B, H, Sq, Dv], with Dv 1 to {LARGEST_HEAD_DIM}")
    launch.check_shape(op, out.shape, dout=dout)
    _check_strides(op, out=out, dout=dout)
    batch, heads, rows, head_dim = out.shape
    delta = launch.empty((batch, heads, rows), torch.float32, out.device)
    tiles = cdiv(rows, _DELTA_ROWS)
    launch.launch(
        delta_kernel,
        (tiles * batch * heads,),
        out,
        dout,
        delta,
        heads,
        rows,
        head_dim,
        tiles,
        *out.stride(),
        *dout.stride(),
        ROWS=_DELTA_ROWS,
        BLOCK_D=padded(head_dim),
    )
    return delta


@replayed
def attention_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    rules: Rules,
    *,
    query_positions: Positions | None = None,
    key_positions: Positions | None = None,
    query_documents: torch.Tensor | None = None,
    key_documents: torch.Tensor | None = None,
    dq: torch.Tensor | None = None,
    dk: torch.Tensor | None = None,
    dv: torch.Tensor | None = None,
    dkdv_config: AttentionConfig | None = None,
    dq_config: AttentionConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dq, dk and dv of these queries, keys and values, or add them to given buffers.

    The other arguments are those of `attention_forward`.

    Args:
        dout: [B, H, Sq, Dv], of q's type.
        lse, delta: [B, H, Sq] fp32, of the whole attention over all chunks of keys.
        dq, dk, dv: fp32 buffers to add to; new tensors of the inputs' type and order of dimensions by default.

    Raises:
        ValueError, TypeError: the kernels do not take an argument. Raised before any launch.
    """
    op = "attention_backward"
    chunk = _Chunk(op, q, k, v, rules, query_positions, key_positions, query_documents, key_documents)
    launch.check_memory(op, q=q, dout=dout, lse=lse, delta=delta, dq=dq, dk=dk, dv=dv)
    launch.check_dtype(op, (q.dtype,), dout=dout)
    launch.check_dtype(op, (torch.float32,), lse=lse, delta=delta, dq=dq, dk=dk, dv=dv)
    launch.check_shape(op, (*q.shape[:3], v.size(3)), dout=dout)
    launch.check_shape(op, q.shape[:3], lse=lse, delta=delta)
    launch.check_shape(op, q.shape, dq=dq)
    launch.check_shape(op, k.shape, dk=dk)
    launch.check_shape(op, v.shape, dv=dv)
    launch.check_output(op, dq=dq, dk=dk, dv=dv)
    _check_strides(op, dout=dout, dq=dq, dk=dk, dv=dv)
    if (dk is None) != (dv is None):
        raise ValueError(f"{op}: dk and dv are added to together; give both or neither")
    add_q, add_kv = dq is not None, dk is not None
    dq, dk, dv = (
        given if given is not None else launch.empty_in_order(like, like.size(3), like.dtype)
        for given, like in ((dq, q), (dk, k), (dv, v))
    )
    lse, delta = lse.contiguous(), delta.contiguous()
    tile = chunk.config("dkdv", dkdv_config)
    programs = chunk.key_tiles(tile.block_n) * k.size(1)
    strides = *dk.stride(), *dv.stride()
    chunk.launch(dkdv_kernel, tile, programs, lse, delta, dk, dv, *strides, ADD=add_kv, dout=dout)
    tile = chunk.config("dq", dq_config)
    programs = chunk.query_tiles(tile.block_m) * q.size(1)
    chunk.launch(dq_kernel, tile, programs, lse, delta, dq, *dq.stride(), ADD=add_q, dout=dout)
    return dq, dk, dv


class _Chunk:
    """The arguments that all kernels share, checked."""

    def __init__(self, op, q, k, v, rules, query_positions, key_positions, query_documents, key_documents):
        self.op, self.q, self.k, self.v, self.rules = op, q, k, v, rules
        _check_chunk(op, q, k, v)
        _check_rules(op, rules)
        self.scale = float(q.size(3) ** -0.5 if rules.scale is None else rules.scale)
        self.query_positions = _positions(op, "query_positions", query_positions, q.size(2))
        self.key_positions = _positions(op, "key_positions", key_positions, k.size(2))
        if (query_documents is None) != (key_documents is None):
            raise ValueError(f"{op}: documents are compared; give query_documents and key_documents, or neither")
        self.documents = query_documents, key_documents
        launch.check_memory(op, q=q, query_documents=query_documents, key_documents=key_documents)
        integers = (torch.int32, torch.int64)
        launch.check_dtype(op, integers, query_documents=query_documents, key_documents=key_documents)
        launch.check_shape(op, (q.size(0), q.size(2)), query_documents=query_documents)
        launch.check_shape(op, (q.size(0), k.size(2)), key_documents=key_documents)

    def config(self, kind: str, explicit: AttentionConfig | None, continues: bool = False) -> AttentionConfig:
        q, k, v = self.q, self.k, self.v
        architecture = launch.architecture_of(q.device)
        features = {
            "dropout": self.rules.dropout > 0,
            "documents": self.documents[0] is not None,
            "state": continues,
            "softcap": self.rules.softcap is not None,
        }
        exist = listed(kind, architecture, max(q.size(3), v.size(3)), [name for name, used in features.items() if used])
        problem = AttentionProblem.of(q, k, v, self.rules).key()
        widest = min(q.size(3), v.size(3)) > 128  # its first tile takes 104 KiB on sm_80
        heuristic = exist[0 if not widest or launch.has_large_shared_memory(q.device) else -1]
        return chosen(choose(f"attention_{kind}", architecture, problem, explicit, exist, heuristic), exist, heuristic)

    def make_scale_positive(self) -> None:
        """Let a larger product give a larger score. A scale of 0 becomes one that changes no score from 0."""
        if self.scale < 0:
            self.q, self.scale = -self.q, -self.scale
        self.scale = max(self.scale, 2.0**-100)

    def query_tiles(self, block: int) -> int:
        return _tiles(self.query_positions, block)

    def key_tiles(self, block: int) -> int:
        return _tiles(self.key_positions, block)

    def launch(self, kernel, config: AttentionConfig, programs: int, *arguments, dout=None, **constants) -> None:
        """Launch a kernel, with tensor descriptors where the tensor copy engine can load the operands.

        Tiles from the copy engine take no registers for addresses or values.
        """
        q, k, v, rules = self.q, self.k, self.v, self.rules
        operands = [t for t in (q, k, v, dout) if t is not None]
        descriptors = launch.has_copy_engine(q.device) and all(map(launch.describable, operands))

        def operand(tensor, rows):
            if tensor is None or not descriptors:
                return tensor
            return TensorDescriptor.from_tensor(tensor, [1, 1, rows, padded(tensor.size(3))])

        launch.launch(
            kernel,
            (programs * q.size(0),),
            operand(q, config.block_m),
            operand(k, config.block_n),
            operand(v, config.block_n),
            operand(dout, config.block_m),
            *self.documents,
            q.size(1),
            k.size(1),
            q.size(2),
            k.size(2),
            q.size(3),
            v.size(3),
            *(strides for tensor in (q, k, v, dout) for strides in _strides(None if descriptors else tensor, 4)),
            *_strides(self.documents[0], 2),
            *_strides(self.documents[1], 2),
            *self.query_positions,
            *self.key_positions,
            _UNBOUNDED if rules.left is None else rules.left,
            _UNBOUNDED if rules.right is None else rules.right,
            self.scale,
            float(rules.softcap or 0.0),
            float(rules.dropout),
            round(rules.dropout * 2**32) - 2**31,
            rules.seed % 2**32 - 2**31,
            rules.seed >> 32,
            rules.head_start,
            *arguments,
            SOFTCAP=rules.softcap is not None,
            DROPOUT=rules.dropout > 0,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BLOCK_D=padded(q.size(3)),
            BLOCK_DV=padded(v.size(3)),
            DESCRIPTORS=descriptors,
            warps=config.warps,
            stages=config.stages,
            **constants,
        )


def _check_chunk(op, q, k, v) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(f"{op}: {name} {tuple(tensor.shape)} must be [batch, heads, sequence, head_dim]")
        if not 1 <= tensor.size(3) <= LARGEST_HEAD_DIM:
            raise ValueError(f"{op}: {name} has head_dim {tensor.size(3)}; it must be 1 to {LARGEST_HEAD_DIM}")
    launch.check_memory(op, q=q, k=k, v=v)
    launch.check_dtype(op, _DTYPES, q=q)
    launch.check_dtype(op, (q.dtype,), k=k, v=v)
    _check_strides(op, q=q, k=k, v=v)
    batch, heads, _, head_dim = q.shape
    kv_heads, keys = k.shape[1:3]
    launch.check_shape(op, (batch, kv_heads, keys, head_dim), k=k)
    launch.check_shape(op, (batch, kv_heads, keys, v.size(3)), v=v)
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"{op}: {heads} query heads cannot share {kv_heads} KV heads evenly; heads must be a multiple")


def _check_strides(op, **tensors: torch.Tensor | None) -> None:
    """Check that offsets inside a tile (of up to 256 rows or columns) fit 32 bits."""
    for name, tensor in tensors.items():
        if tensor is not None and max(tensor.stride()[2:]) >= 2**22:
            raise ValueError(f"{op}: {name} has strides {tensor.stride()}; the last two must be below {2**22}: copy it")


def _check_rules(op, rules: Rules) -> None:
    for name, bound in (("left", rules.left), ("right", rules.right)):
        if bound is not None and not -_UNBOUNDED < bound < _UNBOUNDED:
            raise ValueError(f"{op}: {name}={bound} must be smaller than {_UNBOUNDED} either way, or None")
    if rules.scale is not None and not math.isfinite(rules.scale):
        raise ValueError(f"{op}: scale={rules.scale} must be finite")
    if rules.softcap is not None and not 0 < rules.softcap < math.inf:
        raise ValueError(f"{op}: softcap={rules.softcap} must be positive, or None")
    if not 0 <= rules.dropout < 1:
        raise ValueError(f"{op}: dropout={rules.dropout} must be at least 0 and less than 1")
    if not -(2**63) <= rules.seed < 2**63:
        raise ValueError(f"{op}: seed={rules.seed} must fit 64 bits")


def _positions(op, name, given: Positions | None, size: int) -> Positions:
    found = Positions(0, size) if given is None else Positions(*given)
    if min(found) < 0 or found.length + found.second_length != size:
        raise ValueError(f"{op}: {name}={found} must be of {size} rows in all, none of its numbers negative")
    if max(found.start + found.length, found.second_start + found.second_length) > _LAST_POSITION:
        raise ValueError(f"{op}: {name}={found} passes position {_LAST_POSITION}, the last that the kernel can count")
    return found


def _tiles(positions: Positions, block: int) -> int:
    return cdiv(positions.length, block) + cdiv(positions.second_length, block)


def _strides(tensor: torch.Tensor | None, dimensions: int) -> tuple[int, ...]:
    return (0,) * dimensions if tensor is None else tensor.stride()


@triton.jit
def _products(q_tile, k, batch, kv_head, row, end, head_dim, strides, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
              MASKED: tl.constexpr, DESCRIPTORS: tl.constexpr):  # fmt: skip
    """Return the products of the queries with the keys from `row` on."""
    k_tile = load_tile(k, batch, kv_head, row, end, head_dim, strides, BLOCK_N, BLOCK_D, MASKED, DESCRIPTORS)
    return launch.dot(q_tile, tl.trans(k_tile), tl.zeros((q_tile.shape[0], BLOCK_N), tl.float32), "ieee")


@triton.jit
def _whole_products(number, whole, bounds, runs, keys, q_tile, k, batch, kv_head, head_dim, strides,
                    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, DESCRIPTORS: tl.constexpr):  # fmt: skip
    """Return the products with a tile of the list of whole ones; behind the last of them zeros, and nothing is read."""
    row = tl.where(number < whole, seen_tile(number, bounds, runs, keys, False, BLOCK_N)[0], keys)
    return _products(q_tile, k, batch, kv_head, row, keys, head_dim, strides, BLOCK_N, BLOCK_D, True, DESCRIPTORS)


@triton.jit(do_not_specialize=[*NUMBERS, "stride_plb", "stride_plh", "stride_pls"])
def _forward_kernel(
    q,  # [B, H, Sq, D]
    k,  # [B, Hkv, Sk, D]
    v,  # [B, Hkv, Sk, Dv]
    dout,  # None: all kernels have the same first arguments
    query_documents,  # [B, Sq] or None
    key_documents,  # [B, Sk] or None
    heads, kv_heads, queries, keys, head_dim, value_dim,
    stride_qb, stride_qh, stride_qs, stride_qd,
    stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd,
    stride_gb, stride_gh, stride_gs, stride_gd,
    stride_query_document_b, stride_query_document, stride_key_document_b, stride_key_document,
    q_start, q_length, q_second_start, q_second_length,
    k_start, k_length, k_second_start, k_second_length,
    left, right, scale, softcap, dropout, dropped, seed_low, seed_high, head_start,
    previous_out,  # [B, H, Sq, Dv] fp32 or None
    previous_lse,  # [B, H, Sq] fp32 or None
    out,  # [B, H, Sq, Dv]
    lse,  # [B, H, Sq] fp32, contiguous
    stride_pb, stride_ph, stride_ps, stride_pd,
    stride_plb, stride_plh, stride_pls,
    stride_ob, stride_oh, stride_os, stride_od,
    SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    DESCRIPTORS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    seed = seed_of(seed_low, seed_high)
    # 1. Find this program's queries.
    query_runs = q_start, q_length, q_second_start, q_second_length
    key_runs = k_start, k_length, k_second_start, k_second_length
    tile, head, kv_head, batch = query_tile(query_runs, heads, kv_heads, BLOCK_M)
    wide_head, wide_batch = head.to(tl.int64), batch.to(tl.int64)
    row, end, lowest, highest = own_tile(tile, query_runs, BLOCK_M)
    if query_documents is not None:
        query_documents += wide_batch * stride_query_document_b
        key_documents += wide_batch * stride_key_document_b
    q_row = row + tl.arange(0, BLOCK_M)
    q_position = (lowest + tl.arange(0, BLOCK_M))[:, None]
    q_tile = load_tile(q, batch, head, row, end, head_dim, (stride_qb, stride_qh, stride_qs, stride_qd),
                       BLOCK_M, BLOCK_D, True, DESCRIPTORS)  # fmt: skip

    # 2. Load the state to continue: maximum and sum of exponentials (here 2^maximum), and the sum of the values.
    o = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    highest_score = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    exponentials = tl.zeros((BLOCK_M,), tl.float32)
    if previous_lse is not None:
        before = previous_lse + wide_batch * stride_plb + wide_head * stride_plh + q_row.to(tl.int64) * stride_pls
        highest_score = tl.load(before, mask=q_row < end, other=float("-inf")) * LOG2E
        exponentials = tl.where(highest_score == float("-inf"), 0.0, 1.0)
    if previous_out is not None:
        o = load_tile(previous_out, batch, head, row, end, value_dim, (stride_pb, stride_ph, stride_ps, stride_pd),
                      BLOCK_M, BLOCK_DV, True, False)  # fmt: skip

    # 3. Add keys that every query of the tile sees, then keys that some queries see. The sums are in base 2.
    bounds, whole, partial = seen_tiles(key_runs, lowest, highest, left, right, query_documents is not None, BLOCK_N)
    # AHEAD: the product with the next whole tile is issued before the exponentials of this one, so that both run at
    # once. It follows the last use of this tile's scores, whose registers it takes: at the head of a turn it costs 64
    # copies (588 instructions a turn at head dim 128, here 524). The last turn has one product too many, beside its
    # exponentials; without it, the last tile would need code of its own, 456 instructions more.
    k_strides = stride_kb, stride_kh, stride_ks, stride_kd
    for MASKED in tl.static_range(2):
        if AHEAD and not MASKED:
            following = _whole_products(0, whole, bounds, key_runs, keys, q_tile, k, batch, kv_head, head_dim,
                                        k_strides, BLOCK_N, BLOCK_D, DESCRIPTORS)  # fmt: skip
        for number in range(partial if MASKED else whole):
            k_row, k_position, k_end, k_stop = seen_tile(number, bounds, key_runs, keys, MASKED, BLOCK_N)
            k_position, held = k_position[None, :], (q_position, q_row[:, None], end)
            numbered_head = head_start + head
            if AHEAD and not MASKED:
                products = following
            else:
                products = _products(q_tile, k, batch, kv_head, k_row, k_end, head_dim, k_strides,
                                     BLOCK_N, BLOCK_D, MASKED, DESCRIPTORS)  # fmt: skip
            s, factor, _ = capped(products, scale, softcap, SOFTCAP)
            if MASKED:
                moving = k_position, (k_row + tl.arange(0, BLOCK_N))[None, :], k_end
                visible = visible_pairs(held, moving, left, right, k_stop, (query_documents, stride_query_document),
                                        (key_documents, stride_key_document))  # fmt: skip
                s = tl.where(visible, s, float("-inf"))
            new_highest = tl.maximum(highest_score, tl.max(s, 1) * factor)  # the launcher makes the scale positive
            shift = new_highest
            if MASKED:
                shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)  # 0 in rows that have seen no key yet
            exponents = s * factor - shift[:, None]
            if AHEAD and not MASKED:
                following = _whole_products(number + 1, whole, bounds, key_runs, keys, q_tile, k, batch, kv_head,
                                            head_dim, k_strides, BLOCK_N, BLOCK_D, DESCRIPTORS)  # fmt: skip
            p = tl.exp2(exponents)
            fading = tl.exp2(highest_score - shift)
            exponentials = exponentials * fading + tl.sum(p, 1)
            o *= fading[:, None]
            if DROPOUT:
                p *= kept_pairs(q_position, k_position, numbered_head, batch, seed, dropped, dropout)
            v_tile = load_tile(v, batch, kv_head, k_row, k_end, value_dim, (stride_vb, stride_vh, stride_vs, stride_vd),
                               BLOCK_N, BLOCK_DV, MASKED, DESCRIPTORS)  # fmt: skip
            o = launch.dot(launch.rounded(p, v_tile.dtype), v_tile, o, "ieee")
            highest_score = new_highest

    # 4. Write the new state.
    seen = exponentials > 0
    o = o / tl.where(seen, exponentials, 1.0)[:, None]
    new_lse = tl.where(seen, (highest_score + tl.log2(tl.where(seen, exponentials, 1.0))) / LOG2E, float("-inf"))
    tl.store(lse + (wide_batch * heads + wide_head) * queries + q_row, new_lse, mask=q_row < end)
    d = tl.arange(0, BLOCK_DV)
    out += wide_batch * stride_ob + wide_head * stride_oh
    pointers = out + q_row.to(tl.int64)[:, None] * stride_os + d[None, :] * stride_od
    tl.store(pointers, launch.rounded(o, out.dtype.element_ty), mask=(q_row < end)[:, None] & (d < value_dim)[None, :])


def variants(architecture: str) -> None:
    """Call the launchers once for each variant to compile ahead of time, on meta tensors.

    Use it inside `launch.recording`. The variants serve all calls of weft.ops with any lengths and heads, whole and as
    steps of a ring (tests: tests/kernels/test_served.py). Plain attention with heads of 64 and 128 has every tile.
    """

    def tensors(head_dim, value_dim, dtype=torch.bfloat16):
        shapes = [(2, 4, 1008, head_dim), (2, 2, 1008, head_dim), (2, 2, 1008, value_dim), (2, 4, 1008, value_dim)]
        return [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]

    def forward(q, k, v, rules, state, **options):
        attention_forward(q, k, v, rules, **options)
        attention_forward(q, k, v, rules, out_dtype=torch.float32, **options)
        attention_forward(q, k, v, rules, previous=state, **options)
        attention_forward(q, k, v, rules, previous=state, out=state[0], **options)

    def backward(q, k, v, dout, lse, rules, **options):
        dq, dk, dv = (torch.empty_like(t, dtype=torch.float32) for t in (q, k, v))
        attention_delta(dout, dout)
        attention_backward(q, k, v, dout, lse, lse, rules, **options)
        attention_backward(q, k, v, dout, lse, lse, rules, dq=dq, dk=dk, dv=dv, **options)

    causal = Rules(right=0)
    for head_dim, value_dim in ((64, 64), (128, 128), (192, 128)):
        q, k, v, dout = tensors(head_dim, value_dim)
        lse = torch.empty(q.shape[:3], device="meta")
        state = dout.float(), lse
        forward(q, k, v, causal, state)
        backward(q, k, v, dout, lse, causal)
        if head_dim <= 128:  # the tiles that a table may choose instead
            for tile in listed("forward", architecture, head_dim):
                attention_forward(q, k, v, causal, config=tile)
            for dkdv, dq in zip_longest(*(listed(kind, architecture, head_dim) for kind in ("dkdv", "dq"))):
                attention_backward(q, k, v, dout, lse, lse, causal, dkdv_config=dkdv, dq_config=dq)
    for head_dim in (64, 128):
        q, k, v, dout = tensors(head_dim, head_dim)
        lse = torch.empty(q.shape[:3], device="meta")
        state = dout.float(), lse
        documents = torch.empty(2, 1008, dtype=torch.int64, device="meta")
        packed = {"query_documents": documents, "key_documents": documents}
        for rules, options in ((Rules(dropout=0.1), {}), (causal, packed)):
            forward(q, k, v, rules, state, **options)
            backward(q, k, v, dout, lse, rules, **options)
        attention_forward(q, k, v, Rules(softcap=30.0))
        attention_backward(q, k, v, dout, lse, lse, Rules(softcap=30.0))
        for out_dtype in (q.dtype, torch.float32):
            attention_forward(q, k, v, causal, previous=(None, lse), out_dtype=out_dtype)
        q, k, v, dout = tensors(head_dim, head_dim, torch.float16)
        attention_forward(q, k, v, causal)
        attention_delta(dout, dout)
        attention_backward(q, k, v, dout, lse, lse, causal)
