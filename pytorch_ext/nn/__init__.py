"""Layers that replace those of torch.nn: wiring only."""

from weft.nn.attention import ParallelMultiheadAttention
from weft.nn.branches import Branches
from weft.nn.convolution import ParallelConv, ParallelConv1d, ParallelConv2d, ParallelConv3d
from weft.nn.dropout import OwnDropout2d, ShardedDropout
from weft.nn.embedding import ParallelEmbedding
from weft.nn.experts import Experts, ParallelExpertList, ParallelExperts
from weft.nn.linear import ColumnParallelLinear, ParallelConv1D, ParallelLinear, RowParallelLinear
from weft.nn.lora import LoRA
from weft.nn.norm import ChannelBatchNorm, ChannelGroupNorm, ChannelInstanceNorm
from weft.nn.sequence import sum_gradients

__all__ = [
    "Branches",
    "ChannelBatchNorm",
    "ChannelGroupNorm",
    "ChannelInstanceNorm",
    "ColumnParallelLinear",
    "Experts",
    "LoRA",
    "OwnDropout2d",
    "ParallelConv",
    "ParallelConv1D",
    "ParallelConv1d",
    "ParallelConv2d",
    "ParallelConv3d",
    "ParallelEmbedding",
    "ParallelExpertList",
    "ParallelExperts",
    "ParallelLinear",
    "ParallelMultiheadAttention",
    "RowParallelLinear",
    "ShardedDropout",
    "sum_gradients",
]
