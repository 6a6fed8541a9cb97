"""The model and the data of the examples: a byte-level GPT in plain PyTorch, and a plan to split its layers."""

import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

BYTES = 256
WIDTH, LAYERS, HEAD = 256, 6, 64

# Which layers are split, and how. Heads stay whole: queries, keys and values are cut at multiples of one head.
PLAN = {
    "embedding": "vocabulary",
    "blocks.*.attention.query": {"style": "column", "unit": HEAD},
    "blocks.*.attention.key": {"style": "column", "unit": HEAD},
    "blocks.*.attention.value": {"style": "column", "unit": HEAD},
    "blocks.*.attention.output": {"style": "row", "unit": HEAD},
    "blocks.*.up": "column",
    "blocks.*.down": "row",
    "logits": "column",
}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        # -1: the number of heads on this rank.
        q, k, v = (
            project(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for project in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(y.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, sequence):
        super().__init__()
        self.embedding, self.position = nn.Embedding(BYTES, WIDTH), nn.Embedding(sequence, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.logits = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, BYTES, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)
        self.logits.weight = self.embedding.weight  # tied, and still tied when both are split

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position.weight[: tokens.size(1)]
        for block in self.blocks:
            x = block(x)
        return self.logits(self.norm(x))


def batches(steps, batch, sequence, seed=0, start=0):
    """Yield the whole batches from step `start` on, the same on every rank: bytes, and the bytes that follow them."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)[:4_000_000]), dtype=torch.uint8)
    for step in range(start, steps):
        draw = torch.Generator().manual_seed(seed + step)
        starts = torch.randint(len(text) - sequence - 1, (batch,), generator=draw)
        windows = torch.stack([text[start : start + sequence + 1] for start in starts]).long()
        yield windows[:, :-1], windows[:, 1:]
