"""What statements of random programs do, by name: the ways in which people write models.

FUNCTIONS: name to f(x, number). PAIRS: name to f(x, y). LAYERS: name to (layer(sample, number), f(x, layer, number));
PARAMETERS and BUFFERS in the same way, with a tensor in the layer's place. `number` is 1 or more. A sequence is dimension 1 and
features are dimension -1 of [batch, length, features]; an image's channels are dimension 1.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from random_programs.attention import attention


def _groups(x: torch.Tensor, number: int, dim: int = -1) -> int:
    """The largest divisor of the features that is at most number + 1."""
    return next(g for g in range(number + 1, 0, -1) if x.shape[dim] % g == 0)


def _halves_swapped(x, n):
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def _chunk_of(x, n):
    return x.chunk(n + 1, -1)[-1]


def _split_unevenly(x, n):
    first, second = x.split([n, x.shape[-1] - n], dim=-1)
    return torch.cat((first * 2, second), -1) + second.mean(-1, keepdim=True)


def _gated(x, n):
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def _gated_by_slices(x, n):
    half = x.shape[-1] // 2
    return x[..., :half].sigmoid() * x[..., half : 2 * half]


def _gated_in_pairs(x, n):
    pairs = x.unflatten(-1, (-1, 2))
    return pairs[..., 0] * pairs[..., 1].tanh()


def _gated_stacked(x, n):
    batch, length, _ = x.shape
    gate, up = x.view(batch, length, 2, -1).unbind(2)
    return F.gelu(gate) * up


def _over_groups(function: Callable) -> Callable:
    """Of groups of features, on a dimension of their own."""

    def over(x, n):
        y = x.unflatten(-1, (_groups(x, n), -1))
        return function(y).flatten(-2)

    return over


def _shuffled(x, n):
    batch, length, width = x.shape
    return x.view(batch, length, _groups(x, n), -1).transpose(2, 3).reshape(batch, length, width)


def _zeroed_in_place(x, n):
    y = x.clone()
    y[..., :n] = 0
    return y


def _doubled_in_place(x, n):
    y = x + 0
    y[..., n:] *= 2
    return y


def _first_zeroed(x, n):
    y = x.clone()
    y[:, 0] = 0
    return y


def _tail_added_in_place(x, n):
    y = x * 1.5
    y[:, -n:].add_(1)
    return y


def _filled(x, n):
    y = torch.empty_like(x)
    y[..., ::2] = x[..., ::2]
    y[..., 1::2] = -x[..., 1::2]
    return y


def _copied(x, n):
    y = torch.zeros_like(x)
    return y.copy_(x).mul_(0.5)


def _new_zeros(x, n):
    return torch.cat((x.new_zeros(*x.shape[:-1], n), x), -1)


def _accumulated(x, n):
    total = torch.zeros_like(x[:, 0])
    states = []
    for position in range(x.shape[1]):
        total = 0.5 * total + x[:, position]
        states.append(total)
    return torch.stack(states, 1)


def _over_tokens(x, n):
    """Tokens of all sequences one after another, as mixtures of experts see them."""
    tokens = x.reshape(-1, x.shape[-1])
    return (tokens * tokens.softmax(-1)).view(x.shape)


def _sequence_first(x, n):
    y = x.transpose(0, 1).contiguous()
    return (y - y.mean(0, keepdim=True)).transpose(0, 1)


def _fourier(x, n):
    return torch.fft.fft(torch.fft.fft(x.double(), dim=-1), dim=1).real.to(x.dtype)


def _gram(x, n):
    return x @ (x.transpose(1, 2) @ x) / (x.shape[1] * x.shape[-1])


def _self_attention(x, n):
    return F.softmax(x @ x.mT / math.sqrt(x.shape[-1]), dim=-1) @ x


def _causal_self_attention(x, n):
    hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
    return (x @ x.mT).masked_fill(hidden, -torch.inf).softmax(-1) @ x


def _sdpa(x, n):
    heads = _groups(x, n)
    y = x.unflatten(-1, (heads, -1)).transpose(1, 2)
    return F.scaled_dot_product_attention(y, y, y, is_causal=n % 2 == 0).transpose(1, 2).flatten(2)


def _patches(x, n):
    """Neighbours along the sequence side by side, and back."""
    size = _groups(x, n, 1)
    y = x.reshape(x.shape[0], x.shape[1] // size, size * x.shape[2])
    return (y - y.mean(-1, keepdim=True)).reshape(x.shape)


def _windows(x, n):
    size = _groups(x, n, 1)
    y = x.view(x.shape[0], -1, size, x.shape[2])
    return (y.softmax(2) * y).flatten(1, 2)


def _half_and_half(x, n):
    middle = x.shape[1] // 2
    return torch.cat((x[:, middle:], x[:, :middle]), dim=1)


def _shifted(x, n):
    return F.pad(x, (0, 0, n, 0))[:, : x.shape[1]]


def _last_repeated(x, n):
    return torch.cat([x[:, 1:], x[:, -1:]], dim=1)


def _statistics(x, n):
    variance, mean = torch.var_mean(x, dim=-1, keepdim=True, correction=0)
    return (x - mean) * (variance + 1e-5).rsqrt()


def _rms(x, n):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def _largest_kept(x, n):
    return torch.where(x >= x.topk(min(n, x.shape[-1]), -1).values[..., -1:], x, 0.0)


POINTWISE: dict[str, Callable] = {
    "relu": lambda x, n: F.relu(x),
    "relu_": lambda x, n: (x * 2).relu_(),
    "relu in place": lambda x, n: F.relu(x + 0.5, inplace=True),
    "gelu": lambda x, n: F.gelu(x),
    "gelu tanh": lambda x, n: F.gelu(x, approximate="tanh"),
    "silu": lambda x, n: F.silu(x),
    "tanh": lambda x, n: x.tanh(),
    "sigmoid": lambda x, n: torch.sigmoid(x),
    "softplus": lambda x, n: F.softplus(x),
    "leaky": lambda x, n: F.leaky_relu(x, 0.1),
    "elu": lambda x, n: F.elu(x) + 1,
    "square": lambda x, n: F.relu(x).square(),
    "abs": lambda x, n: x.abs(),
    "sin": lambda x, n: torch.sin(x),
    "exp": lambda x, n: torch.exp(-x.abs()),
    "clamp": lambda x, n: x.clamp(-n, n),
    "clamped": lambda x, n: torch.clamp(x, max=1.0, min=-1.0),
    "mish": lambda x, n: F.mish(x),
    "affine": lambda x, n: x * 0.5 + n,
    "negative": lambda x, n: -x,
    "one minus": lambda x, n: 1 - x,
    "rational": lambda x, n: x / (1 + x**2),
    "where": lambda x, n: torch.where(x > 0, x, 0.1 * x),
    "masked": lambda x, n: x.masked_fill(x < -1, 0.0),
    "masked in place": lambda x, n: (x + 1).masked_fill_(x > 0, 0.25),
    "as double": lambda x, n: x.double().tanh().to(x.dtype),
    "in place sum": lambda x, n: (x + 1).add_(x).mul_(0.5),
    "copied": _copied,
    "detached": lambda x, n: x - x.detach().mean(-1, keepdim=True),
    "threshold": lambda x, n: x * (x.detach() > 0),
    "lerp": lambda x, n: torch.lerp(x, x.tanh(), 0.3),
    "addcmul": lambda x, n: torch.addcmul(x, x, x, value=0.1),
    "dropout": lambda x, n: F.dropout(x, p=0.0, training=True),
}

FEATURES: dict[str, Callable] = {
    "swapped": _halves_swapped,
    "chunk of": _chunk_of,
    "split unevenly": _split_unevenly,
    "gated": _gated,
    "gated by slices": _gated_by_slices,
    "gated in pairs": _gated_in_pairs,
    "gated stacked": _gated_stacked,
    "glu": lambda x, n: F.glu(x, -1),
    "narrow": lambda x, n: x.narrow(-1, 0, x.shape[-1] - 1),
    "every other": lambda x, n: x[..., ::2],
    "from": lambda x, n: x[..., n:],
    "all but last": lambda x, n: x[..., :-1],
    "flip": lambda x, n: x.flip(-1),
    "roll": lambda x, n: torch.roll(x, n, -1),
    "cumsum": lambda x, n: x.cumsum(-1),
    "softmax": lambda x, n: x.softmax(-1),
    "softmax named": lambda x, n: F.softmax(x, dim=2),
    "log_softmax": lambda x, n: F.log_softmax(x, -1),
    "layer norm": lambda x, n: F.layer_norm(x, x.shape[-1:]),
    "rms": _rms,
    "statistics": _statistics,
    "normalize": lambda x, n: F.normalize(x, dim=-1),
    "norm of": lambda x, n: x / (x.norm(dim=-1, keepdim=True) + 1),
    "softmax of groups": _over_groups(lambda y: y.softmax(-1)),
    "softmax over groups": _over_groups(lambda y: y.softmax(-2)),
    "norm of groups": _over_groups(lambda y: F.layer_norm(y, y.shape[-1:])),
    "largest of groups": lambda x, n: x.unflatten(-1, (-1, _groups(x, n))).amax(-1),
    "mean of groups": lambda x, n: x.unflatten(-1, (_groups(x, n), -1)).mean(-2),
    "sum of groups": lambda x, n: x.unflatten(-1, (_groups(x, n), -1)).sum(-1),
    "flip of groups": _over_groups(lambda y: y.flip(-2)),
    "roll of groups": _over_groups(lambda y: y.roll(1, -1)),
    "cumsum of groups": _over_groups(lambda y: y.cumsum(-1)),
    "first of groups": lambda x, n: x.unflatten(-1, (_groups(x, n), -1))[..., 0, :],
    "first in groups": lambda x, n: x.unflatten(-1, (_groups(x, n), -1))[..., 0],
    "shuffled": _shuffled,
    "mean": lambda x, n: x.mean(-1, keepdim=True),
    "centred": lambda x, n: x - x.mean(dim=-1, keepdim=True),
    "largest": lambda x, n: x.amax(-1, keepdim=True),
    "repeat_interleave": lambda x, n: x.repeat_interleave(2, dim=-1),
    "repeat": lambda x, n: x.repeat(1, 1, 2),
    "expand": lambda x, n: x.unsqueeze(-1).expand(*x.shape, 2).flatten(-2),
    "expand before": lambda x, n: x.unsqueeze(-2).expand(-1, -1, 2, -1).reshape(*x.shape[:2], -1),
    "pad": lambda x, n: F.pad(x, (0, n)),
    "pad before": lambda x, n: F.pad(x, (n, 0)),
    "twice": lambda x, n: torch.cat((x, x), dim=-1),
    "both signs": lambda x, n: torch.cat([x.relu(), (-x).relu()], -1),
    "stacked": lambda x, n: torch.stack((x, x.tanh()), dim=-1).flatten(-2),
    "stacked before": lambda x, n: torch.stack((x, x.tanh()), dim=-2).flatten(-2),
    "stacked sum": lambda x, n: torch.stack([x, -0.5 * x, x.sin()]).sum(0),
    "permuted": lambda x, n: x[..., torch.arange(x.shape[-1] - 1, -1, -1)],
    "selected": lambda x, n: x.index_select(-1, torch.tensor([0, x.shape[-1] - 1, 0])),
    "square of": lambda x, n: torch.einsum("blf,blg->blfg", x[..., :3], x).flatten(2),
    "dot": lambda x, n: torch.einsum("blf,blf->bl", x, x.tanh()).unsqueeze(-1),
    "zeroed in place": _zeroed_in_place,
    "doubled in place": _doubled_in_place,
    "filled": _filled,
    "new zeros": _new_zeros,
    "largest kept": _largest_kept,
    "sorted": lambda x, n: x.sort(-1).values,
    "logsumexp": lambda x, n: x.logsumexp(-1, keepdim=True),
    "pooled": lambda x, n: F.avg_pool1d(x, 2, ceil_mode=True),
    "moved": lambda x, n: x.movedim(-1, 0).exp().clamp(max=3).movedim(0, -1),
    "size of": lambda x, n: x / math.sqrt(x.shape[-1]),
    "size of batch": lambda x, n: x / (x.shape[0] * x.shape[1]),
}

SEQUENCES: dict[str, Callable] = {
    "roll along": lambda x, n: x.roll(n, 1),
    "roll along two": lambda x, n: torch.roll(x, shifts=(1, n), dims=(1, 2)),
    "flip along": lambda x, n: x.flip(1),
    "cumsum along": lambda x, n: x.cumsum(1) / x.shape[1],
    "mean along": lambda x, n: x.mean(1, keepdim=True),
    "largest along": lambda x, n: x.max(1, keepdim=True)[0],
    "amax along": lambda x, n: x - x.amax(dim=1, keepdim=True),
    "softmax along": lambda x, n: F.softmax(x, 1),
    "shifted": _shifted,
    "last repeated": _last_repeated,
    "half and half": _half_and_half,
    "first of": lambda x, n: x[:, :1],
    "last of": lambda x, n: x[:, -1:],
    "difference": lambda x, n: x - x.roll(1, dims=1),
    "gram": _gram,
    "self attention": _self_attention,
    "causal self attention": _causal_self_attention,
    "sdpa": _sdpa,
    "patches": _patches,
    "windows": _windows,
    "fourier": _fourier,
    "accumulated": _accumulated,
    "over tokens": _over_tokens,
    "sequence first": _sequence_first,
    "first zeroed": _first_zeroed,
    "tail added": _tail_added_in_place,
    "mean of batch": lambda x, n: x - x.mean(0, keepdim=True),
    "mean of all": lambda x, n: x - x.mean(),
    "spread along": lambda x, n: x / (x.std(1, keepdim=True, correction=0) + 1),
    "norm over both": lambda x, n: F.layer_norm(x, x.shape[1:]),
    "positions": lambda x, n: x + torch.linspace(0, 1, x.shape[1], dtype=x.dtype)[:, None],
    "counted": lambda x, n: x * torch.arange(x.shape[1])[:, None].to(x).cos(),
    "causal mean": lambda x, n: torch.ones(x.shape[1], x.shape[1]).tril().to(x) @ x / x.shape[1],
    "pooled along": lambda x, n: F.avg_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2),
    "sum of squares along": lambda x, n: (x * x).sum(1).sqrt().unsqueeze(1) + x,
    "every other along": lambda x, n: x[:, ::2].repeat_interleave(2, dim=1)[:, : x.shape[1]],
    "chunks along": lambda x, n: torch.cat([part.cumsum(1) for part in x.chunk(2, 1)], 1),
    "unfolded": lambda x, n: F.pad(x, (0, 0, 1, 1)).unfold(1, 3, 1).mean(-1),
    "logsumexp along": lambda x, n: x - x.logsumexp(1, keepdim=True),
    "squeezed": lambda x, n: x.squeeze().reshape(x.shape),
    "unsqueezed": lambda x, n: (x.unsqueeze(1) * x.unsqueeze(2)).mean(2),
    "distances": lambda x, n: torch.exp(-(x.unsqueeze(1) - x.unsqueeze(2)).square().sum(-1)) @ x / x.shape[1],
    "gathered": lambda x, n: x.gather(1, x.argsort(1).detach()),
    "strided": lambda x, n: x.contiguous().as_strided(x.shape, x.contiguous().stride()),
    "item": lambda x, n: x / (1 + float(x.detach().abs().amax())),
}

PAIRS: dict[str, Callable] = {
    "add": lambda x, y: x + y,
    "subtract": lambda x, y: x - y,
    "multiply": lambda x, y: x * y.tanh(),
    "gate": lambda x, y: F.silu(x) * y,
    "attention gate": lambda x, y: x * y.sigmoid(),
    "larger": lambda x, y: torch.maximum(x, y),
    "joined": lambda x, y: torch.cat((x, y), -1),
    "stacked mean": lambda x, y: torch.stack((x, y)).mean(0),
    "joined stack": lambda x, y: torch.stack((x, y), -1).flatten(-2),
    "joined along": lambda x, y: torch.cat((x, y), 1)[:, : x.shape[1]],
    "attend": lambda x, y: (x @ y.transpose(1, 2) / x.shape[-1] ** 0.5).softmax(-1) @ y,
    "attend linearly": lambda x, y: x.softmax(-1) @ (x.softmax(1).mT @ y) / x.shape[-1],
    "similar": lambda x, y: F.cosine_similarity(x, y, dim=-1).unsqueeze(-1),
    "outer": lambda x, y: torch.einsum("blf,blg->blfg", x[..., :2], y).flatten(-2),
    "chosen": lambda x, y: torch.where(x > y, x, y * 0.5),
    "mean added": lambda x, y: x + y.mean(1, keepdim=True),
    "in place": lambda x, y: (x + 1).mul_(y.sigmoid()),
    "interpolated": lambda x, y: torch.lerp(x, y, 0.25),
    "reversed": lambda x, y: y + x.flip(-1),
    "dot product": lambda x, y: (x * y).sum(-1, keepdim=True),
    "baddbmm": lambda x, y: torch.baddbmm(x, (x @ y.mT).softmax(-1), y),
}

PARAMETERS: dict[str, tuple[Callable, Callable]] = {
    "scale": (lambda x, n: torch.rand(x.shape[-1]), lambda x, p, n: x * p),
    "shift": (lambda x, n: torch.randn(x.shape[-1]), lambda x, p, n: x + p),
    "scalar": (lambda x, n: torch.rand(()), lambda x, p, n: x * p),
    "one number": (lambda x, n: torch.rand(1), lambda x, p, n: x * p.exp()),
    "three ones": (lambda x, n: torch.rand(1, 1, x.shape[-1]), lambda x, p, n: x * (1 + p)),
    "power": (lambda x, n: torch.rand(x.shape[-1]), lambda x, p, n: x * torch.sin(p) + torch.cos(p)),
    "matrix": (lambda x, n: torch.randn(x.shape[-1], 2 * n + 1) / 3, lambda x, p, n: x @ p),
    "einsum": (
        lambda x, n: torch.randn(x.shape[-1], x.shape[-1]) / 4,
        lambda x, p, n: torch.einsum("blf,fg->blg", x, p),
    ),
    "functional": (lambda x, n: torch.randn(3 * n, x.shape[-1]) / 4, lambda x, p, n: F.linear(x, p)),
    "grouped matrix": (
        lambda x, n: torch.randn(_groups(x, n), x.shape[-1] // _groups(x, n), x.shape[-1] // _groups(x, n)) / 2,
        lambda x, p, n: torch.einsum("blgd,gde->blge", x.unflatten(-1, (p.shape[0], -1)), p).flatten(2),
    ),
    "of each group": (
        lambda x, n: torch.rand(_groups(x, n), 1),
        lambda x, p, n: (x.view(*x.shape[:2], p.shape[0], -1) * p).flatten(-2),
    ),
    "in each group": (
        lambda x, n: torch.rand(x.shape[-1] // _groups(x, n)),
        lambda x, p, n: (x.view(*x.shape[:2], -1, p.shape[0]) * p).flatten(-2),
    ),
    "memory": (
        lambda x, n: torch.randn(3, x.shape[-1]),
        lambda x, p, n: (x @ p.t()).softmax(-1) @ p,
    ),
    "queries": (
        lambda x, n: torch.randn(3, x.shape[-1]),
        lambda x, p, n: x + ((p @ x.transpose(1, 2)).softmax(-1) @ x).mean(1, keepdim=True),
    ),
    "table": (lambda x, n: torch.randn(16, x.shape[-1]), lambda x, p, n: x + p[: x.shape[1]]),
    "of each place": (lambda x, n: torch.randn(x.shape[1], 1), lambda x, p, n: x * p),
    "token": (
        lambda x, n: torch.randn(1, 1, x.shape[-1]),
        lambda x, p, n: torch.cat((p.expand(x.shape[0], -1, -1), x), 1)[:, :-1],
    ),
    "norm weight": (lambda x, n: torch.rand(x.shape[-1]), lambda x, p, n: F.rms_norm(x, x.shape[-1:], p)),
    "prelu": (lambda x, n: torch.rand(1), lambda x, p, n: F.prelu(x, p)),
    "taps": (
        lambda x, n: torch.randn(x.shape[-1], 1, 3),
        lambda x, p, n: F.conv1d(x.mT, p, padding=1, groups=x.shape[-1]).mT,
    ),
}

BUFFERS: dict[str, tuple[Callable, Callable]] = {
    "constant": (lambda x, n: torch.rand(x.shape[-1]), lambda x, b, n: x * b),
    "number": (lambda x, n: torch.rand(()), lambda x, b, n: x + b),
    "mask": (lambda x, n: torch.arange(x.shape[-1]) % (n + 1) > 0, lambda x, b, n: x.masked_fill(b, 0.0)),
    "chosen by": (lambda x, n: torch.arange(x.shape[-1]) % 2 == 0, lambda x, b, n: torch.where(b, x, -x)),
    "order": (lambda x, n: torch.randperm(x.shape[-1]), lambda x, b, n: x[..., b]),
    "causal": (
        lambda x, n: torch.ones(16, 16, dtype=torch.bool).triu(1),
        lambda x, b, n: (x @ x.mT).masked_fill(b[: x.shape[1], : x.shape[1]], -torch.inf).softmax(-1) @ x,
    ),
    "places": (lambda x, n: torch.rand(16), lambda x, b, n: x * b[: x.shape[1], None]),
}


def _linear(x, width: int, bias: bool = True) -> nn.Module:
    return nn.Linear(x.shape[-1], width, bias=bias)


def _recurrent(x, layer, n):
    return layer(x)[0]


def _along_channels(x, layer, n):
    return layer(x.transpose(1, 2)).transpose(1, 2)


def _conv1d(x, n):
    return nn.Conv1d(x.shape[-1], 2 * n + 1, 3, padding=1)


def _mha(x, layer, n):
    return layer(x, x, x, need_weights=False)[0]


def _mha_causal(x, layer, n):
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
    return layer(x, x, x, attn_mask=mask, need_weights=n % 2 == 0)[0]


def _heads(x, n):
    return nn.MultiheadAttention(x.shape[-1], _groups(x, n), batch_first=True)


def _encoder_layer(x, n):
    heads, hidden = _groups(x, n), 4 * n + 3
    return nn.TransformerEncoderLayer(x.shape[-1], heads, hidden, 0.0, batch_first=True, norm_first=n % 2 == 0)


def _called(x, layer, n):
    return layer(x)


def _called_twice(x, layer, n):
    return layer(layer(x).relu())


LINEARS: dict[str, tuple[Callable, Callable]] = {
    "linear": (lambda x, n: _linear(x, n), _called),
    "linear relu_": (lambda x, n: _linear(x, n), lambda x, layer, n: layer(x).relu_()),
    "linear without bias": (lambda x, n: _linear(x, n, False), _called),
    "linear of tokens": (
        lambda x, n: _linear(x, n),
        lambda x, layer, n: layer(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1),
    ),
}

LAYERS: dict[str, tuple[Callable, Callable]] = {
    **LINEARS,
    "square linear twice": (lambda x, n: _linear(x, x.shape[-1]), _called_twice),
    "linear and its weight": (
        lambda x, n: _linear(x, n),
        lambda x, layer, n: F.gelu(layer(x)) @ layer.weight,
    ),
    "sequential": (
        lambda x, n: nn.Sequential(_linear(x, 2 * n + 1), nn.GELU(), nn.Linear(2 * n + 1, x.shape[-1])),
        _called,
    ),
    "sequential in place": (
        lambda x, n: nn.Sequential(
            _linear(x, 3 * n + 1), nn.ReLU(inplace=True), nn.Dropout(0.0), nn.Linear(3 * n + 1, n)
        ),
        _called,
    ),
    "dropout layer": (lambda x, n: nn.Dropout(0.5), _called),
    "layer norm with weights": (lambda x, n: nn.LayerNorm(x.shape[-1]), _called),
    "rms norm": (lambda x, n: nn.RMSNorm(x.shape[-1]), _called),
    "group norm": (lambda x, n: nn.GroupNorm(_groups(x, n), x.shape[-1]), _along_channels),
    "batch norm": (lambda x, n: nn.BatchNorm1d(x.shape[-1]), _along_channels),
    "prelu of each": (lambda x, n: nn.PReLU(x.shape[-1]), _along_channels),
    "conv1d": (_conv1d, _along_channels),
    "depthwise": (lambda x, n: nn.Conv1d(x.shape[-1], x.shape[-1], 3, padding=1, groups=x.shape[-1]), _along_channels),
    "causal conv1d": (
        lambda x, n: nn.Conv1d(x.shape[-1], x.shape[-1], 2, padding=1),
        lambda x, layer, n: layer(x.mT)[..., : x.shape[1]].mT,
    ),
    "mixer": (lambda x, n: nn.Linear(x.shape[1], x.shape[1]), _along_channels),
    "gru": (lambda x, n: nn.GRU(x.shape[-1], n + 1, batch_first=True), _recurrent),
    "mha": (_heads, _mha),
    "causal mha": (_heads, _mha_causal),
    "encoder layer": (_encoder_layer, _called),
    "bilinear": (lambda x, n: nn.Bilinear(x.shape[-1], x.shape[-1], n), lambda x, layer, n: layer(x, x.tanh())),
    "attention": (lambda x, n: attention(x, n), _called),
}

# Images


def _conv2d(size: int, **options) -> Callable:
    def conv2d(x, n):
        return nn.Conv2d(x.shape[1], n, size, padding=size // 2, **options)

    return conv2d


class _Squeeze(nn.Module):
    """Squeeze and excitation (Hu et al. 2018), with linear layers or convolutions."""

    def __init__(self, channels: int, number: int):
        super().__init__()
        self.flat = number % 2 == 0
        layers = (nn.Linear, {}) if self.flat else (nn.Conv2d, {"kernel_size": 1})
        self.down = layers[0](channels, number, **layers[1])
        self.up = layers[0](number, channels, **layers[1])

    def forward(self, x):
        if self.flat:
            return x * self.up(self.down(x.mean((2, 3))).relu()).sigmoid()[:, :, None, None]
        return x * self.up(self.down(F.adaptive_avg_pool2d(x, 1)).relu()).sigmoid()


def _shuffled_channels(x, n):
    batch, _, height, width = x.shape
    return x.view(batch, _groups(x, n, 1), -1, height, width).transpose(1, 2).reshape(x.shape)


def _scaled_and_shifted(x, n):
    scale, shift = x.chunk(2, 1)
    return scale.sigmoid() * shift


def _image_attention(x, n):
    y = x.flatten(2).transpose(1, 2)
    return ((y @ y.mT).softmax(-1) @ y).transpose(1, 2).reshape(x.shape)


IMAGES: dict[str, Callable] = {
    "max_pool2d": lambda x, n: F.max_pool2d(x, 3, 1, 1),
    "avg_pool2d": lambda x, n: F.avg_pool2d(x, 3, 1, 1),
    "pooled channels": lambda x, n: F.adaptive_avg_pool2d(x, 1),
    "mean of channels": lambda x, n: x.mean(1, keepdim=True),
    "mean of image": lambda x, n: x - x.mean((2, 3), keepdim=True),
    "shuffled channels": _shuffled_channels,
    "gated channels": _scaled_and_shifted,
    "chunk of channels": lambda x, n: x.chunk(n + 1, dim=1)[-1],
    "twice the channels": lambda x, n: torch.cat((x, x.relu()), 1),
    "softmax of channels": lambda x, n: x.softmax(1),
    "up and down": lambda x, n: F.avg_pool2d(F.interpolate(x, scale_factor=2), 2),
    "bilinear up": lambda x, n: F.interpolate(x, scale_factor=2, mode="bilinear")[:, :, ::2, ::2],
    "image attention": _image_attention,
    "roll of image": lambda x, n: x.roll((1, n), (2, 3)),
    "flip of image": lambda x, n: x.flip((2, 3)),
    "half the channels": lambda x, n: x[:, : (x.shape[1] + 1) // 2],
    "channels last": lambda x, n: F.layer_norm(x.permute(0, 2, 3, 1), x.shape[1:2]).permute(0, 3, 1, 2),
    "dropout2d": lambda x, n: F.dropout2d(x, 0.0),
}

IMAGE_LAYERS: dict[str, tuple[Callable, Callable]] = {
    "conv 1": (_conv2d(1), _called),
    "conv 3": (_conv2d(3), _called),
    "conv without bias": (_conv2d(3, bias=False), _called),
    "conv reflect": (_conv2d(3, padding_mode="circular"), _called),
    "conv relu_": (_conv2d(1), lambda x, layer, n: layer(x).relu_()),
    "depthwise 2d": (lambda x, n: nn.Conv2d(x.shape[1], x.shape[1], 3, padding=1, groups=x.shape[1]), _called),
    "grouped 2d": (lambda x, n: nn.Conv2d(x.shape[1], x.shape[1], 1, groups=_groups(x, n, 1)), _called),
    "batch norm 2d": (lambda x, n: nn.BatchNorm2d(x.shape[1]), _called),
    "group norm 2d": (lambda x, n: nn.GroupNorm(_groups(x, n, 1), x.shape[1]), _called),
    "instance norm": (lambda x, n: nn.InstanceNorm2d(x.shape[1], affine=True), _called),
    "squeeze": (lambda x, n: _Squeeze(x.shape[1], n), _called),
    "pixel linear": (
        lambda x, n: nn.Linear(x.shape[1], n),
        lambda x, layer, n: layer(x.movedim(1, -1)).movedim(-1, 1),
    ),
    "conv and norm": (
        lambda x, n: nn.Sequential(nn.Conv2d(x.shape[1], n, 3, padding=1), nn.BatchNorm2d(n), nn.ReLU(inplace=True)),
        _called,
    ),
    "transposed": (lambda x, n: nn.ConvTranspose2d(x.shape[1], n, 3, padding=1), _called),
}

FUNCTIONS = {**POINTWISE, **FEATURES, **SEQUENCES, **IMAGES}
LAYERS |= IMAGE_LAYERS
