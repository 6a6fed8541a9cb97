"""ParallelConv1D: the linear layer of transformers' GPT-2, with weight [in, out], split over ranks."""

import torch
from torch import nn

from weft.comm.registry import Group
from weft.nn.linear import ParallelLinear


class ParallelConv1D(ParallelLinear):
    """ParallelLinear with a weight [in_features, out_features], as in `transformers.pytorch_utils.Conv1D`.

    Options are ParallelLinear's. A layer built from a seed holds this rank's slice of the Conv1D built from that seed.
    """

    transposed = True

    @classmethod
    def from_conv1d(cls, layer, *, style: str, group: Group = None, **options) -> "ParallelConv1D":
        """Return this rank's part of an existing Conv1D."""
        in_features, out_features = layer.weight.shape
        like = {"device": "meta", "dtype": layer.weight.dtype}
        part = cls(in_features, out_features, style=style, group=group, **like, **options)
        part._hold(layer)
        return part.train(layer.training)

    def _whole(self, bias: bool, device, dtype) -> nn.Module:
        whole = nn.Module()
        like = {"device": device, "dtype": dtype}
        whole.weight = nn.Parameter(torch.empty(self.in_features, self.out_features, **like))
        whole.register_parameter("bias", nn.Parameter(torch.zeros(self.out_features, **like)) if bias else None)
        nn.init.normal_(whole.weight, std=0.02)
        return whole
