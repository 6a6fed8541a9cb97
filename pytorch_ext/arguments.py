"""Argument checks that many functions share."""

from collections.abc import Iterable


def check_choice(name: str, value: object, choices: Iterable[object]) -> None:
    """Raise ValueError if the value is not among the choices.

    Args:
        name: function and argument, for example "Pipeline: schedule".
    """
    known = list(choices)
    if value not in known:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, known))}")
