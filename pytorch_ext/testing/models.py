"""Small models whose parts can be put on several ranks."""

import torch
import torch.nn.functional as F
from torch import nn

BATCH, WIDTH, VOCABULARY = 8, 12, 17


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, gate):
        return x + self.down(F.gelu(self.up(self.norm(x)))) * gate


class TiedModel(nn.Module):
    """Tied embeddings, a table of positions that is used as it is, and a gate that every block is given."""

    def __init__(self, blocks: int = 6):
        super().__init__()
        self.embedding, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(9, WIDTH)
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm, self.logits = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.logits.weight = self.embedding.weight

    def forward(self, tokens):  # [batch, sequence] -> [batch, sequence, VOCABULARY]
        x = self.embedding(tokens) + self.position.weight[: tokens.size(1)]
        gate = torch.sigmoid(self.gate(x))
        for block in self.blocks:
            x = block(x, gate)
        return self.logits(self.norm(x))


def batch_of(part: int = 0, parts: int = 1, step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets of `TiedModel`; a part of the batch, which is the same in every process."""
    generator = torch.Generator().manual_seed(1 + step)
    tokens, targets = (torch.randint(VOCABULARY, (BATCH, 5), generator=generator) for _ in range(2))
    return tokens.chunk(parts)[part], targets.chunk(parts)[part]


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
