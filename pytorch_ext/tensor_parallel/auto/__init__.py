"""Finds which layers of a model can be split, and how."""

from weft.tensor_parallel.auto.plan import AutomaticPlan, automatic_plan

__all__ = ["AutomaticPlan", "automatic_plan"]
