"""Self-attention as people write it: the layouts of its projections, its scores, and how its heads come together."""

import torch
import torch.nn.functional as F
from torch import nn

PROJECTIONS = (
    *("separate", "split", "chunk", "stacked", "per head", "per head stacked", "grouped", "keys and values"),
    *("parameters", "sliced", "unbind"),
)
VIEWS = ("view", "unflatten", "reshape", "folded", "einsum")
SCORES = (
    *("sdpa", "causal sdpa", "masked sdpa", "biased sdpa", "softmax", "causal softmax", "alibi", "bias of heads"),
    *("relu", "linear", "talking", "sinks", "scaled", "cosine"),
)
POSITIONS = ("none", "halves", "interleaved", "complex", "table")
NORMS = ("none", "layer", "rms", "whole", "own")
REPEATS = ("interleave", "expand", "gqa", "broadcast", "repeat")
OUTPUTS = ("reshape", "flatten", "view", "einsum", "gated", "product")


def attention(sample: torch.Tensor, choice: int) -> nn.Module:
    """An attention for [batch, length, width]; the choice is digits, one after another, of the options."""
    options = []
    for kinds in (PROJECTIONS, VIEWS, SCORES, POSITIONS, NORMS, REPEATS, OUTPUTS):
        choice, place = divmod(choice, len(kinds))
        options.append(kinds[place])
    choice, kv_heads = divmod(choice, 3)
    choice, each = divmod(choice, 3)
    size = choice % 3 + 1
    return Attention(sample.shape[-1], kv_heads + 1, each + 1, 2 * size, *options)


CHOICES = 3 * 3 * 3
for _kinds in (PROJECTIONS, VIEWS, SCORES, POSITIONS, NORMS, REPEATS, OUTPUTS):
    CHOICES *= len(_kinds)


class Attention(nn.Module):
    """heads = kv_heads * each; the projections of `projection` kinds that cannot have fewer KV heads have as many."""

    def __init__(self, width, kv_heads, each, size, projection, view, scores, positions, norm, repeat, output):
        super().__init__()
        self.heads, self.kv_heads, self.size = kv_heads * each, kv_heads, size
        self.projection, self.view, self.scores, self.positions = projection, view, scores, positions
        self.repeat, self.output_kind = repeat, output
        if projection in ("chunk", "stacked", "per head", "per head stacked", "unbind"):
            self.kv_heads = self.heads
        self.groups = self.heads // self.kv_heads
        wide, narrow = self.heads * size, self.kv_heads * size
        if projection == "separate":
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, n) for n in (wide, narrow, narrow))
        elif projection == "keys and values":
            self.to_q, self.to_kv = nn.Linear(width, wide, bias=False), nn.Linear(width, 2 * narrow, bias=False)
        elif projection == "parameters":
            self.query = nn.Parameter(torch.randn(self.heads, width, size) / width**0.5)
            self.key = nn.Parameter(torch.randn(self.kv_heads, width, size) / width**0.5)
            self.value = nn.Parameter(torch.randn(self.kv_heads, width, size) / width**0.5)
        else:
            self.qkv = nn.Linear(width, wide + 2 * narrow, bias=size != 4)
        self.norm_kind = norm
        if norm == "layer":
            self.q_norm, self.k_norm = nn.LayerNorm(size), nn.LayerNorm(size)
        elif norm == "rms":
            self.q_norm, self.k_norm = nn.RMSNorm(size), nn.RMSNorm(size)
        elif norm == "own":
            self.q_weight, self.k_weight = nn.Parameter(torch.rand(size)), nn.Parameter(torch.rand(size))
        elif norm == "whole":
            self.q_norm, self.k_norm = nn.LayerNorm(wide), nn.LayerNorm(narrow)
        if positions == "table":
            self.table = nn.Parameter(torch.randn(16, width) / 2)
        if scores == "alibi":
            self.register_buffer("slopes", 2.0 ** -torch.arange(1.0, self.heads + 1).view(-1, 1, 1))
        elif scores == "bias of heads":
            self.bias = nn.Parameter(torch.randn(self.heads, 1, 1))
        elif scores == "talking":
            self.talking = nn.Parameter(torch.randn(self.heads, self.heads))
        elif scores == "sinks":
            self.sinks = nn.Parameter(torch.randn(self.heads))
        elif scores == "scaled":
            self.temperature = nn.Parameter(torch.rand(()))
        if output == "einsum":
            self.out_weight = nn.Parameter(torch.randn(self.heads, size, width) / wide**0.5)
        else:
            self.out = nn.Linear(wide, width)
        if output == "gated":
            self.gate = nn.Linear(width, wide)

    def forward(self, x):
        batch, length, _ = x.shape
        if self.positions == "table":
            x = x + self.table[:length]
        q, k, v = self._projected(x)  # [batch, length, heads, size]
        q, k = self._normed(q, k)
        if self.positions in ("halves", "interleaved", "complex"):
            q, k = self._rotated(q), self._rotated(k)
        y = self._attended(q, k, v)  # [batch, length, heads, size]
        if self.output_kind == "einsum":
            return torch.einsum("blhd,hde->ble", y, self.out_weight)
        if self.output_kind == "flatten":
            return self.out(y.flatten(2))
        if self.output_kind == "view":
            return self.out(y.contiguous().view(batch, length, self.heads * self.size))
        if self.output_kind == "gated":
            return self.out(y.flatten(-2) * torch.sigmoid(self.gate(x)))
        if self.output_kind == "product":
            return F.linear(y.reshape(batch * length, -1), self.out.weight, self.out.bias).view(batch, length, -1)
        return self.out(y.reshape(batch, length, -1))

    def _projected(self, x):
        batch, length, _ = x.shape
        heads, kv, size = self.heads, self.kv_heads, self.size
        if self.projection == "separate":
            parts = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        elif self.projection == "keys and values":
            parts = self.to_q(x), *self.to_kv(x).chunk(2, dim=-1)
        elif self.projection == "parameters":
            return tuple(torch.einsum("blw,hwd->blhd", x, weight) for weight in (self.query, self.key, self.value))
        elif self.projection == "split":
            parts = self.qkv(x).split([heads * size, kv * size, kv * size], dim=2)
        elif self.projection == "sliced":
            qkv, wide, narrow = self.qkv(x), heads * size, kv * size
            parts = qkv[..., :wide], qkv[..., wide : wide + narrow], qkv[..., -narrow:]
        elif self.projection == "chunk":
            parts = self.qkv(x).chunk(3, -1)
        elif self.projection == "stacked":
            qkv = self.qkv(x).reshape(batch, length, 3, heads, size).permute(2, 0, 1, 3, 4)
            return qkv[0], qkv[1], qkv[2]
        elif self.projection == "unbind":
            return self.qkv(x).unflatten(-1, (3, heads, size)).unbind(2)
        elif self.projection == "per head":
            return self.qkv(x).view(batch, length, heads, 3 * size).chunk(3, dim=-1)
        elif self.projection == "per head stacked":
            return self.qkv(x).view(batch, length, heads, 3, size).unbind(dim=3)
        else:  # grouped: the query heads of a KV head, then that
            qkv = self.qkv(x).view(batch, length, kv, self.groups + 2, size)
            return qkv[..., :-2, :].flatten(2, 3), qkv[..., -2, :], qkv[..., -1, :]
        return tuple(self._in_heads(part, n) for part, n in zip(parts, (heads, kv, kv), strict=True))

    def _in_heads(self, x, heads):
        if self.view == "view":
            return x.view(x.shape[0], x.shape[1], heads, self.size)
        if self.view == "unflatten":
            return x.unflatten(-1, (-1, self.size))
        return x.reshape(*x.shape[:2], heads, -1)

    def _normed(self, q, k):
        if self.norm_kind in ("layer", "rms"):
            return self.q_norm(q), self.k_norm(k)
        if self.norm_kind == "own":
            q, k = (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5) for y in (q, k))
            return q * self.q_weight, k * self.k_weight
        if self.norm_kind == "whole":
            return self.q_norm(q.flatten(-2)).view(q.shape), self.k_norm(k.flatten(-2)).view(k.shape)
        return q, k

    def _rotated(self, x):
        places = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)
        angles = places[:, None] / 10.0 ** torch.arange(self.size // 2, device=x.device)
        if self.positions == "halves":
            turned = torch.cat((angles, angles), -1)[:, None].to(x.dtype)
            first, second = x.chunk(2, -1)
            return x * turned.cos() + torch.cat((-second, first), -1) * turned.sin()
        if self.positions == "interleaved":
            angles = angles[:, None].to(x.dtype)
            even, odd = x[..., 0::2], x[..., 1::2]
            rows = even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()
            return torch.stack(rows, dim=-1).flatten(-2)
        numbers = torch.view_as_complex(x.double().reshape(*x.shape[:-1], -1, 2))
        turns = torch.polar(torch.ones_like(angles), angles)[:, None]
        return torch.view_as_real(numbers * turns).flatten(-2).to(x.dtype)

    def _repeated(self, x):
        """[batch, kv_heads, length, size] -> [batch, heads, length, size]"""
        if self.groups == 1:
            return x
        batch, heads, length, size = x.shape
        if self.repeat == "expand":
            return x[:, :, None].expand(batch, heads, self.groups, length, size).reshape(batch, -1, length, size)
        if self.repeat == "repeat":
            return x.unsqueeze(2).repeat(1, 1, self.groups, 1, 1).flatten(1, 2)
        return torch.repeat_interleave(x, self.groups, dim=1)

    def _attended(self, q, k, v):
        length = q.shape[1]
        hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        if self.scores == "linear":
            k, v = (self._repeated(y.transpose(1, 2)).transpose(1, 2) for y in (k, v))
            q, k = F.elu(q) + 1, F.elu(k) + 1
            context = torch.einsum("blhd,blhe->bhde", k, v)
            return torch.einsum("blhd,bhde->blhe", q, context) / length
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        if self.scores.endswith("sdpa"):
            return self._sdpa(q, k, v, hidden).transpose(1, 2)
        if self.repeat == "broadcast" and self.scores in ("softmax", "causal softmax"):
            q = q.unflatten(1, (self.kv_heads, self.groups))
            weights = q @ k.unsqueeze(2).transpose(-1, -2)
            if self.scores == "causal softmax":
                weights = weights.masked_fill(hidden, float("-inf"))
            return (weights.softmax(-1) @ v.unsqueeze(2)).flatten(1, 2).transpose(1, 2)
        k, v = self._repeated(k), self._repeated(v)
        if self.scores == "cosine":
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        if self.view == "folded":
            batch, heads = q.shape[:2]
            q, k, v = (y.reshape(batch * heads, length, -1) for y in (q, k, v))
            weights = self._weights(torch.bmm(q, k.transpose(1, 2)).view(batch, heads, length, length), hidden)
            y = torch.bmm(weights.view(batch * heads, length, length), v)
            return y.view(batch, heads, length, -1).transpose(1, 2)
        if self.view == "einsum":
            weights = self._weights(torch.einsum("bhld,bhmd->bhlm", q, k), hidden)
            return torch.einsum("bhlm,bhmd->blhd", weights, v)
        return (self._weights(torch.matmul(q, k.transpose(-2, -1)), hidden) @ v).permute(0, 2, 1, 3)

    def _weights(self, scores, hidden):
        """[batch, heads, length, length]"""
        scores, length = scores / self.size**0.5, scores.shape[-1]
        if self.scores == "relu":
            return F.relu(scores) / length
        if self.scores == "alibi":
            places = torch.arange(length, device=scores.device)
            scores = scores - self.slopes * (places[:, None] - places).abs()
        elif self.scores == "bias of heads":
            scores = scores + self.bias * (~hidden)
        elif self.scores == "scaled":
            scores = scores * self.temperature.exp()
        if self.scores in ("causal softmax", "alibi", "sinks"):
            scores = scores.masked_fill(hidden, float("-inf"))
        if self.scores == "sinks":
            sinks = self.sinks.view(1, -1, 1, 1).expand(scores.shape[0], -1, length, 1)
            return torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
        weights = F.softmax(scores, dim=-1)
        if self.scores == "talking":
            return torch.einsum("bhlm,hg->bglm", weights, self.talking)
        return weights

    def _sdpa(self, q, k, v, hidden):
        grouped = self.repeat == "gqa" and self.groups > 1
        if not grouped:
            k, v = self._repeated(k), self._repeated(v)
        mask = None
        if self.scores == "masked sdpa":
            mask = ~hidden
        elif self.scores == "biased sdpa":
            places = torch.arange(q.shape[2], device=q.device)
            mask = -(places[:, None] - places).abs().to(q.dtype)
        causal = self.scores == "causal sdpa"
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)
