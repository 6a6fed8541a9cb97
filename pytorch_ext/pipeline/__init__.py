"""A model's layers on several ranks: Pipeline with micro-batches, LayerSplit with one whole batch at a time."""

from weft.pipeline.layer_split import LayerSplit
from weft.pipeline.pipeline import Pipeline

__all__ = ["LayerSplit", "Pipeline"]
