"""Small models for tests that put their parts on several ranks."""

import torch
import torch.nn.functional as F
from torch import nn

BATCH, WIDTH, VOCABULARY = 8, 12, 17


class TransformerBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, gate):
        return x + self.down(F.gelu(self.up(self.norm(x)))) * gate


class TiedModel(nn.Module):
    """Model with tied embeddings, a table of positions used without a lookup, and a gate passed to every block."""

    def __init__(self, blocks: int = 6):
        super().__init__()
        self.embedding, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(9, WIDTH)
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(TransformerBlock() for _ in range(blocks))
        self.norm, self.logits = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.logits.weight = self.embedding.weight

    def forward(self, tokens):  # [batch, sequence] -> [batch, sequence, VOCABULARY]
        x = self.embedding(tokens) + self.position.weight[: tokens.size(1)]
        gate = torch.sigmoid(self.gate(x))
        for block in self.blocks:
            x = block(x, gate)
        return self.logits(self.norm(x))


def batch_of(part: int = 0, parts: int = 1, step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and targets for `TiedModel`: one part of a batch that is the same in every process."""
    generator = torch.Generator().manual_seed(1 + step)
    tokens, targets = (torch.randint(VOCABULARY, (BATCH, 5), generator=generator) for _ in range(2))
    return tokens.chunk(parts)[part], targets.chunk(parts)[part]


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Rotary(nn.Module):
    """Angles of rotary embeddings for the tokens' positions."""

    def __init__(self, head: int):
        super().__init__()
        self.pairs = head // 2

    def forward(self, tokens):  # [batch, sequence] -> [sequence, head]
        positions = torch.arange(tokens.size(1), device=tokens.device)
        angles = positions[:, None] / 10.0 ** torch.arange(self.pairs, device=tokens.device)
        return torch.cat((angles, angles), -1)


class RMSNorm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class GroupedAttention(nn.Module):
    """Causal attention with fewer heads of keys and values than of queries."""

    def __init__(self, width: int, head: int, kv_heads: int):
        super().__init__()
        self.head = head
        self.query, self.output = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(width, kv_heads * head, bias=False) for _ in range(2))

    def forward(self, x, angles):
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for project in (self.query, self.key, self.value)
        )
        angles = angles.to(x.dtype)
        q, k = (y * angles.cos() + self._turned(y) * angles.sin() for y in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.output(y.transpose(1, 2).flatten(2))

    @staticmethod
    def _turned(x):
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)


class GatedMLP(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class LlamaBlock(nn.Module):
    def __init__(self, width: int, head: int, kv_heads: int, hidden: int, dropout: float):
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.attention, self.mlp = GroupedAttention(width, head, kv_heads), GatedMLP(width, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, angles):
        x = x + self.dropout(self.attention(self.norm1(x), angles))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Llama(nn.Module):
    """Small Llama of odd sizes with a traceable forward: six heads of queries, three of keys.

    Args:
        blocks: Number of blocks.
        tied: The embedding and the logits are one parameter.
        shared: All blocks are one module (ALBERT; Lan et al. 2020).
        dropout: Probability after attention and after the MLP.
    """

    HEAD, KV_HEADS, GROUP, HIDDEN, WORDS = 4, 3, 2, 29, 37  # GROUP: heads of queries that share one of keys

    def __init__(self, blocks: int = 3, tied: bool = False, shared: bool = False, dropout: float = 0.0):
        super().__init__()
        width = self.GROUP * self.KV_HEADS * self.HEAD
        sizes = (width, self.HEAD, self.KV_HEADS, self.HIDDEN, dropout)
        self.embedding, self.rotary = nn.Embedding(self.WORDS, width), Rotary(self.HEAD)
        made = [LlamaBlock(*sizes) for _ in range(1 if shared else blocks)]
        self.blocks = nn.ModuleList(made * blocks if shared else made)
        self.norm, self.logits = RMSNorm(width), nn.Linear(width, self.WORDS, bias=False)
        if tied:
            self.logits.weight = self.embedding.weight

    def forward(self, tokens):  # [batch, sequence] -> [batch, sequence, WORDS]
        x, angles = self.embedding(tokens), self.rotary(tokens)
        for block in self.blocks:
            x = block(x, angles)
        return self.logits(self.norm(x))


# Queries are cut at groups of two heads, which share one head of keys.
LLAMA_PLAN = {
    "embedding": "vocabulary",
    "blocks.*.attention.query": {"style": "column", "unit": 2 * Llama.HEAD},
    "blocks.*.attention.key": {"style": "column", "unit": Llama.HEAD},
    "blocks.*.attention.value": {"style": "column", "unit": Llama.HEAD},
    "blocks.*.attention.output": {"style": "row", "unit": 2 * Llama.HEAD},
    "blocks.*.mlp.gate": "column",
    "blocks.*.mlp.up": "column",
    "blocks.*.mlp.down": "row",
    "logits": {"style": "column", "gather_output": True},
}
