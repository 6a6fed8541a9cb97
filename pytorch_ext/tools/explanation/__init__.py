"""`weft.explain`: algorithm and traffic of each parallel layer of a model, and why no faster one."""

from weft.tools.explanation.explain import explain

__all__ = ["explain"]
