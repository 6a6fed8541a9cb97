"""Optimizers for large batches: steps scaled by layer, learning rates that follow the batch, local steps."""

from weft.optim.diloco import DiLoCo
from weft.optim.lamb import LAMB
from weft.optim.lars import LARS
from weft.optim.layerwise import layerwise_groups
from weft.optim.schedule import linear_scaling

__all__ = ["LAMB", "LARS", "DiLoCo", "layerwise_groups", "linear_scaling"]
