"""Adapters to other libraries. Import each by its own name; it needs at least the version that it was tested with.

styles.py          ParallelStyles for torch's parallelize_module
hugging_face.py    attn_implementation="weft" for transformers
trainer.py         transformers' Trainer on a model that several ranks hold
peft.py            LoRA on split layers
accelerate.py      an accelerate mesh as weft.parallelize takes it
lightning.py       a strategy for Lightning's Trainer
vllm.py            the communicator of vLLM's groups on CPUs
"""

from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile


def need(adapter: str, package: str, at_least: str) -> None:
    """Raise ImportError if the package is missing or older than the version `at_least`.

    Args:
        adapter: the importing module, for the error message.
        package: name of the package, as pip takes it.
        at_least: the oldest version that is accepted.
    """
    try:
        found = version(package)
    except PackageNotFoundError:
        found = None
    if found is None or version_numbers(found) < version_numbers(at_least):
        there = f"has {package} {found}" if found else f"has no {package}"
        raise ImportError(
            f'{adapter} needs {package} >= {at_least}; this Python {there}: pip install "{package}>={at_least}"'
        )


def version_numbers(text: str) -> tuple[int, ...]:
    """Return (2, 13, 0) for "2.13.0+cpu", and (5, 23, 0) for "5.23.0rc1"."""
    return tuple(int("".join(takewhile(str.isdigit, part)) or 0) for part in text.partition("+")[0].split(".")[:3])
