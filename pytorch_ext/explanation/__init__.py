"""`weft.explain`: what runs in each parallel layer of a model, what it sends, and why nothing faster does."""

from weft.explanation.explain import explain

__all__ = ["explain"]
