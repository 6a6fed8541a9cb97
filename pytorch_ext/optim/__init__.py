"""Optimizers for large batches and many ranks: steps by layer or by matrix, rates by batch, local steps."""

from weft.optim.diloco import DiLoCo
from weft.optim.lamb import LAMB
from weft.optim.lars import LARS
from weft.optim.layerwise import layerwise_groups
from weft.optim.muon import Muon
from weft.optim.schedule import linear_scaling

__all__ = ["LAMB", "LARS", "DiLoCo", "Muon", "layerwise_groups", "linear_scaling"]
