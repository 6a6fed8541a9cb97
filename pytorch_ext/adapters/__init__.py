"""Adapters to other libraries. Each is imported by its own name, and asks for the versions that it was tested with.

styles.py          ParallelStyles for torch's parallelize_module
hugging_face.py    attn_implementation="weft" for transformers
trainer.py         transformers' Trainer on a model that several ranks hold
accelerate.py      an accelerate mesh as weft.parallelize takes it
lightning.py       a strategy for Lightning's Trainer
"""

from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile


def need(who: str, package: str, at_least: str) -> None:
    """ImportError where the package is missing or older; with what was found and what is needed."""
    try:
        found = version(package)
    except PackageNotFoundError:
        found = None
    if found is None or _numbers(found) < _numbers(at_least):
        there = f"has {package} {found}" if found else f"has no {package}"
        raise ImportError(
            f'{who} needs {package} >= {at_least}; this Python {there}: pip install "{package}>={at_least}"'
        )


def _numbers(text: str) -> tuple[int, ...]:
    """Of "2.13.0+cpu" (2, 13, 0); of "5.23.0rc1" (5, 23, 0)."""
    return tuple(int("".join(takewhile(str.isdigit, part)) or 0) for part in text.partition("+")[0].split(".")[:3])
