"""ParallelMultiheadAttention: nn.MultiheadAttention with its heads split over ranks."""

import torch
from torch import nn

from weft.comm.registry import Group, communicator
from weft.nn.linear import ParallelLinear
from weft.nn.sharded import ShardHolder
from weft.ops import ParallelContext, column_parallel_linear
from weft.ops.multihead import attend, mask_of, over_heads
from weft.sharding.shard import Shard
from weft.sharding.sizes import Cut


class ParallelMultiheadAttention(ShardHolder):
    """nn.MultiheadAttention with its heads split over the ranks (Shoeybi et al. 2019, section 3).

    It replaces an nn.MultiheadAttention, also inside nn.TransformerEncoderLayer and DecoderLayer. Inputs, masks and
    outputs are whole and the same on every rank; parameters keep their names.

    The projections of queries, keys and values are split by output features, in whole heads; out_proj is split by input
    features. Forward runs one all_reduce, and one more where the caller asks for the weights. Backward runs one for
    each different tensor among query, key and value.

    Heads need not divide by the number of ranks. With dropout, each rank draws for its own heads, so the mask depends
    on the number of ranks.

    `from_attention` makes it; in a plan the style is "heads".
    """

    def __init__(self, whole: nn.MultiheadAttention, group: Group = None):
        super().__init__()
        for option in ("bias_k", "bias_v"):
            if getattr(whole, option) is not None:
                raise ValueError("ParallelMultiheadAttention does not take add_bias_kv=True; keep this attention whole")
        if whole.add_zero_attn:
            raise ValueError("ParallelMultiheadAttention does not take add_zero_attn=True; keep this attention whole")
        self.communicator = ranks = communicator(group)
        self.embed_dim, self.kdim, self.vdim = whole.embed_dim, whole.kdim, whole.vdim
        self.num_heads, self.head_dim, self.dropout = whole.num_heads, whole.head_dim, whole.dropout
        self.batch_first, self._qkv_same_embed_dim = whole.batch_first, whole._qkv_same_embed_dim
        self.bias_k = self.bias_v = None
        self.add_zero_attn = False
        try:
            heads = Shard.of_shape((self.num_heads,), 0, ranks)
        except ValueError as error:
            raise ValueError(f"ParallelMultiheadAttention: num_heads={self.num_heads}: {error}") from None
        self._heads: Cut = heads.cut
        self._width = heads.size * self.head_dim  # of this rank's heads
        self._largest = max(heads.sizes) * self.head_dim
        for name, parameter in whole._parameters.items():
            if parameter is not None:
                parts = [self.embed_dim] * 3 if name.startswith("in") else None
                self.shards[name] = Shard.of_shape(tuple(parameter.shape), 0, ranks, self.head_dim, parts=parts)
        self.register_parts(whole)
        self.out_proj = ParallelLinear.from_linear(whole.out_proj, style="row", group=ranks, unit=self.head_dim)
        self.train(whole.training)

    @classmethod
    def from_attention(cls, attention: nn.MultiheadAttention, *, group: Group = None) -> "ParallelMultiheadAttention":
        """Return this rank's heads of an existing nn.MultiheadAttention.

        Raises:
            ValueError: fewer heads than ranks; add_bias_kv or add_zero_attn.
            TypeError: another layer.
        """
        if not isinstance(attention, nn.MultiheadAttention):
            raise TypeError(f"from_attention takes an nn.MultiheadAttention, got {type(attention).__name__}")
        return cls(attention, group)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute attention; arguments and results are those of nn.MultiheadAttention."""
        batched = self._check(query, key, value, attn_mask, is_causal)
        first = self.batch_first and batched  # the batch is the first dimension; else the second, if there is one
        q, k, v = (self._by_heads(x, batched, first) for x in self._project(query, key, value))
        scores = q.size(2), k.size(2)
        if key_padding_mask is not None and not batched and key_padding_mask.dim() == 1:
            key_padding_mask = key_padding_mask.unsqueeze(0)
        alone = is_causal and key_padding_mask is None and not need_weights  # then the hint replaces attn_mask
        masks = (None if alone else attn_mask), key_padding_mask
        mask = mask_of(*masks, q.size(0), scores, self._heads, self.communicator, q.dtype)
        dropout = self.dropout if self.training else 0.0
        y, weights = attend(q, k, v, mask, ranks=self.communicator, causal=alone, dropout=dropout, weights=need_weights)
        y = self.out_proj(y.permute(0, 2, 1, 3).flatten(2) if first else y.permute(2, 0, 1, 3).flatten(2))
        if weights is not None:
            weights = self._over_heads(weights, average_attn_weights)
        if batched:
            return y, weights
        return y.squeeze(1), None if weights is None else weights.squeeze(0)

    def _project(self, query, key, value) -> list[torch.Tensor]:
        """Return queries, keys and values of this rank's heads; each different tensor is projected once."""
        weights = self._weights()
        bias = self.operand("in_proj_bias", whole_use=False)
        biases = [None] * 3 if bias is None else list(bias.split(self._width))
        if query is key is value and self._qkv_same_embed_dim:
            whole = self._linear(query, self.operand("in_proj_weight", whole_use=False), bias)
            return list(whole.split(self._width, -1))
        if key is value and self._qkv_same_embed_dim:
            q = self._linear(query, weights[0], biases[0])
            both = None if bias is None else bias[self._width :]
            fused = self.operand("in_proj_weight", whole_use=False)[self._width :]
            return [q, *self._linear(key, fused, both).split(self._width, -1)]
        return [self._linear(*given) for given in zip((query, key, value), weights, biases, strict=True)]

    def _weights(self) -> list[torch.Tensor]:
        if self._qkv_same_embed_dim:
            return list(self.operand("in_proj_weight", whole_use=False).split(self._width))
        return [self.operand(f"{name}_proj_weight") for name in "qkv"]

    def _linear(self, x, weight, bias) -> torch.Tensor:
        fused = weight.size(0) // self._width
        return column_parallel_linear(x, weight, bias, ParallelContext(self.communicator, share=fused * self._largest))

    def _over_heads(self, weights: torch.Tensor, average: bool) -> torch.Tensor:
        return over_heads(weights, average, self.communicator, self._heads)

    def _by_heads(self, x: torch.Tensor, batched: bool, first: bool) -> torch.Tensor:
        """Return x as [B, H_r, positions, D]."""
        x = (x if batched else x.unsqueeze(1)).unflatten(-1, (-1, self.head_dim))
        return x.transpose(1, 2) if first else x.permute(1, 2, 0, 3)

    def _check(self, query, key, value, attn_mask, is_causal: bool) -> bool:
        """Check the inputs; return True if they have a batch dimension."""
        if any(x.is_nested for x in (query, key, value)):
            raise ValueError(
                "ParallelMultiheadAttention takes no nested tensors: make it inside of "
                "nn.TransformerEncoder(..., enable_nested_tensor=False)"
            )
        if query.dim() not in (2, 3) or not query.dim() == key.dim() == value.dim():
            shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
            raise ValueError(f"query, key and value must all be of 2 or 3 dimensions, got {shapes}")
        if is_causal and attn_mask is None:
            raise ValueError("is_causal=True says that attn_mask is the causal mask: pass that mask too")
        return query.dim() == 3

    def _draw_whole(self) -> nn.MultiheadAttention:
        like = {"device": self.out_proj.weight.device, "dtype": self.out_proj.weight.dtype}
        dims = {"kdim": self.kdim, "vdim": self.vdim, "bias": self.in_proj_bias is not None}
        return nn.MultiheadAttention(self.embed_dim, self.num_heads, **dims, **like)

    def extra_repr(self) -> str:
        return (
            f"{self.embed_dim}, {self.num_heads} heads, rank {self.communicator.rank} of "
            f"{self.communicator.world_size}, "
            f"{self._heads.sizes[self.communicator.rank]} heads here"
        )
