"""ParallelEmbedding: nn.Embedding with its rows split over ranks."""

import torch
from torch import nn

from weft.comm.registry import Group, communicator
from weft.nn.sharded import ShardedModule
from weft.ops import parallel_embedding
from weft.sharding.shard import Shard


class ParallelEmbedding(ShardedModule):
    """nn.Embedding with a contiguous part of the vocabulary on each rank; every rank gets the whole result.

    A layer built from a seed holds this rank's rows of the nn.Embedding built from that seed.

    Args:
        num_embeddings, embedding_dim: sizes of the whole table.
        padding_idx: the row that starts as zero and gets no gradient, counted in the whole table (from its end where
            negative).
        group: a ProcessGroup, a one-dimensional DeviceMesh, or None for the default group.
        device, dtype: of the parameters.

    Raises:
        ValueError: more ranks than rows, a padding_idx outside the table, a group without this rank.

    Examples:
        >>> embedding = weft.ParallelEmbedding(100, 16)
        >>> embedding.weight.shape, embedding(torch.tensor([3, 99])).shape
        (torch.Size([50, 16]), torch.Size([2, 16]))
    """

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        group: Group = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.communicator = communicator(group)
        self.shards["weight"] = Shard.of_shape((num_embeddings, embedding_dim), 0, self.communicator)
        whole = nn.Embedding(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
        self.padding_idx = whole.padding_idx
        self.register_parts(whole)

    @classmethod
    def from_embedding(cls, embedding: nn.Embedding, *, group: Group = None) -> "ParallelEmbedding":
        """Return this rank's part of an existing nn.Embedding."""
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(embedding, option):
                raise ValueError(
                    f"ParallelEmbedding does not take {option}={getattr(embedding, option)}; keep this embedding whole"
                )
        sizes = embedding.num_embeddings, embedding.embedding_dim, embedding.padding_idx
        return cls._part_of(embedding, *sizes, group=group)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return parallel_embedding(tokens, self.weight, self.shards["weight"], self.padding_idx)

    def _draw_whole(self) -> nn.Embedding:
        device, dtype = self.weight.device, self.weight.dtype
        return nn.Embedding(self.num_embeddings, self.embedding_dim, self.padding_idx, device=device, dtype=dtype)

    def extra_repr(self) -> str:
        shard = self.shards["weight"]
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, padding_idx={self.padding_idx}, "
            f"rank {self.communicator.rank} of {self.communicator.world_size}, rows {shard.offset} to "
            f"{shard.offset + shard.size - 1}"
        )
