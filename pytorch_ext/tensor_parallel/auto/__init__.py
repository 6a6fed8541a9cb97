"""Automatic plans: the layers of a model that can be split, and their styles."""

from weft.tensor_parallel.auto.plan import AutomaticPlan, automatic_plan

__all__ = ["AutomaticPlan", "automatic_plan"]
