"""Checks of arguments that many functions have in common."""

from collections.abc import Iterable


def check_choice(name: str, value: object, choices: Iterable[object]) -> None:
    """Raise ValueError for a value that is not among the choices. The name is as in "Pipeline: schedule"."""
    known = list(choices)
    if value not in known:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, known))}")
