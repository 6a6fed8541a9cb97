"""Models that share their sequence in tests, and the unsplit ones."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from weft.nn import Experts

WORDS = 40


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def rotated(x, angles):
    first, second = x.chunk(2, -1)
    return x * angles.cos() + torch.cat((-second, first), -1) * angles.sin()


class Block(nn.Module):
    """Of a Llama: rotary embeddings from positions that the model counts itself, grouped queries, a gated MLP."""

    def __init__(self, width, heads, kv_heads):
        super().__init__()
        self.head = width // heads
        self.norm1, self.norm2 = Norm(width), Norm(width)
        self.query, self.output = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(width, kv_heads * self.head, bias=False) for _ in range(2))
        self.gate, self.up, self.down = nn.Linear(width, 24), nn.Linear(width, 24), nn.Linear(24, width)

    def forward(self, x, angles):
        batch, length, _ = x.shape
        y = self.norm1(x)
        q, k, v = (
            project(y).view(batch, length, -1, self.head).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        q, k = rotated(q, angles), rotated(k, angles)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.output(y.transpose(1, 2).reshape(batch, length, -1))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Tied at both ends."""

    def __init__(self, recompute=False):
        super().__init__()
        self.recompute = recompute
        self.embedding, self.norm, self.logits = nn.Embedding(WORDS, 16), Norm(16), nn.Linear(16, WORDS, bias=False)
        self.blocks = nn.ModuleList(Block(16, 4, 2) for _ in range(2))
        self.logits.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        angles = torch.arange(tokens.size(1))[:, None] / 10.0 ** torch.arange(2)
        for block in self.blocks:
            angles_twice = torch.cat((angles, angles), -1)
            x = checkpoint(block, x, angles_twice, use_reentrant=False) if self.recompute else block(x, angles_twice)
        return self.logits(self.norm(x))


SPLIT = {
    "embedding": "vocabulary",
    "logits": {"style": "column", "gather_output": True},
    "blocks.*.query": {"style": "column", "unit": 4},
    "blocks.*.key": {"style": "column", "unit": 4},
    "blocks.*.value": {"style": "column", "unit": 4},
    "blocks.*.output": {"style": "row", "unit": 4},
    "blocks.*.gate": "column",
    "blocks.*.up": "column",
    "blocks.*.down": "row",
}


_HIDDEN, _EXPERTS = 6, 5


class MixtureBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(_HIDDEN), nn.Linear(_HIDDEN, _EXPERTS)
        self.experts = Experts(_EXPERTS, _HIDDEN, 4, bias=True)
        self.shared = nn.Sequential(nn.Linear(_HIDDEN, 8), nn.GELU(), nn.Linear(8, _HIDDEN))

    def forward(self, x):
        x = self.norm(x)
        weights, index = self.router(x).softmax(-1).topk(2, -1)
        return x + self.experts(x, index, weights) + self.shared(x)


class Mixture(nn.Module):
    """Model with two mixtures of five experts."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(11, _HIDDEN)
        self.layers = nn.ModuleList(MixtureBlock() for _ in range(2))
        self.head = nn.Linear(_HIDDEN, 11)

    def forward(self, tokens):
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Encoder(nn.Module):
    """Torch's own layers, learned positions, a mask for each attention as users write it."""

    def __init__(self, batch_first=True, mask="causal", hint=False):
        super().__init__()
        self.batch_first, self.mask, self.hint = batch_first, mask, hint
        self.embedding, self.position = nn.Embedding(WORDS, 16), nn.Parameter(torch.randn(30, 16))
        layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=batch_first, norm_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 7)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position[: tokens.size(1)]
        causal = nn.Transformer.generate_square_subsequent_mask(tokens.size(1)) if "causal" in self.mask else None
        hidden = tokens == tokens[0, -1] if "padding" in self.mask else None
        if hidden is not None and causal is not None:
            causal = causal.isinf()
        x = x if self.batch_first else x.transpose(0, 1)
        x = self.encoder(x, mask=causal, is_causal=self.hint, src_key_padding_mask=hidden)
        return self.head(x if self.batch_first else x.transpose(0, 1))


class ByHand(nn.Module):
    """Much that no rule covers: attention by hand, a convolution, a norm over the sequence, a class token, any pooling."""

    def __init__(self):
        super().__init__()
        self.embedding, self.token = nn.Embedding(WORDS, 16), nn.Parameter(torch.randn(1, 1, 16))
        self.project, self.mix, self.head = nn.Linear(16, 48), nn.Conv1d(16, 16, 3, padding=1), nn.Linear(16, 5)
        self.scale = nn.Parameter(torch.randn(()))

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        normed = F.layer_norm(x, x.shape[1:])
        q, k, v = self.project(x).chunk(3, -1)
        x = x + (q @ k.transpose(1, 2) / 4 + torch.ones(q.size(1), q.size(1)).tril().log()).softmax(-1) @ v
        x = torch.cat([self.token.expand(tokens.size(0), -1, -1), x], 1)
        return self.head(x[:, 0] + self.scale * x.mean(1) + x.amax(1) + x[:, 1:].sum(dim=1) + normed.amax(1))


class Attentions(nn.Module):
    """Calls of attention that weft.context_attention does not take as they are: a learned bias, masks by row and by
    key, one head of keys for all, heads as the batch, queries or keys that are no sequence, weights asked for."""

    def __init__(self):
        super().__init__()
        self.embedding, self.project = nn.Embedding(WORDS, 16), nn.Linear(16, 48)
        self.bias, self.latents = nn.Parameter(torch.randn(30, 30)), nn.Parameter(torch.randn(1, 4, 5, 4))
        self.weighed, self.crossing = (nn.MultiheadAttention(16, 4, batch_first=True) for _ in range(2))

    def forward(self, tokens):
        attend, length = F.scaled_dot_product_attention, tokens.size(1)
        x = self.embedding(tokens)
        q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in self.project(x).chunk(3, -1))
        seen = torch.ones(length, length, dtype=torch.bool).tril(1)
        heads = attend(q, k, v, attn_mask=self.bias[:length, :length])
        heads = heads + attend(q, k, v, seen) + attend(q, k, v, seen.all(0, True) | (torch.arange(length) < 2))
        heads = (
            heads + attend(q, k[:, :1], v[:, :1]) + attend(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)).view_as(q)
        )
        heads = heads + attend(q, self.latents, self.latents, scale=0.3) + attend(q, k.mean(2, True), v.mean(2, True))
        read = attend(self.latents.expand(q.size(0), -1, -1, -1), k, v)
        y = heads.transpose(1, 2).flatten(2)
        y = y + self.weighed(y, y, x)[0] + self.crossing(y, x[:, :3], x[:, :3], need_weights=False)[0]
        return y, read.sum() * y


class Changes(nn.Module):
    """Shapes on the way, a position's own sums, and the loss inside."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS)

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = torch.stack(x.unflatten(-1, (2, 8)).unbind(2), 2).flatten(2) * (1 + x.mean((0, 1)))
        x = x - x.sum(-1, keepdim=True).expand_as(x) / 9 + F.normalize(x, dim=-1)
        x = x + x.max(-1, keepdim=True).values * x[:, :1] - x.topk(2).values.mean(-1, keepdim=True)
        x[..., 3:5], x[1, ..., ::6] = x[..., :2] * 1.5, 0.25
        x = torch.where(x > 0, x, 0.1 * x).permute(2, 0, 1)[..., None].squeeze().movedim(0, -1)
        x += torch.arange(x.size(1)).view(1, -1, 1) / 20
        logits = self.head(x.view(-1, 16))
        wrong = F.cross_entropy(logits, tokens.roll(-1, 1).view(-1), ignore_index=int(tokens[0, 0]))
        smooth = F.cross_entropy(logits.view(*tokens.shape, WORDS).transpose(1, 2), tokens, label_smoothing=0.1)
        return torch.cat([logits.flatten(), torch.stack([wrong, smooth, logits.mean()])])


MODELS = {
    "llama": Llama,
    "llama, recomputed": lambda: Llama(recompute=True),
    "encoder": Encoder,
    "encoder, hint": lambda: Encoder(hint=True),
    "encoder, sequence first": lambda: Encoder(batch_first=False),
    "encoder, full": lambda: Encoder(mask="none"),
    "encoder, padding": lambda: Encoder(mask="padding"),
    "encoder, causal and padding": lambda: Encoder(mask="causal padding"),
    "by hand": ByHand,
    "attentions": Attentions,
    "changes": Changes,
}
SHARED_ALL_THROUGH = ["llama", "llama, recomputed", "encoder", "encoder, hint", "encoder, sequence first"]


def pair(make):
    torch.manual_seed(0)
    reference = make()
    return copy.deepcopy(reference), reference


def tokens_of(length, batch=2):
    return torch.randint(WORDS, (batch, length), generator=torch.Generator().manual_seed(length))
