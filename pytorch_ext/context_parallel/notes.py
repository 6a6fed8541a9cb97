"""What a model did with its shared sequence, module by module, noted as it runs."""

import sys
from collections.abc import Iterator

from torch import nn

_ATTRIBUTE = "_weft_context_notes"


def note(kind: str, text: str) -> None:
    """Notes it with the innermost module whose forward runs; a later note of the kind takes the place of an earlier."""
    module = running_module()
    if module is not None:
        module.__dict__.setdefault(_ATTRIBUTE, {})[kind] = text


def notes(model: nn.Module) -> Iterator[tuple[str, str, str]]:
    """(module name, kind, text) of all that was noted."""
    for name, module in model.named_modules():
        for kind, text in module.__dict__.get(_ATTRIBUTE, {}).items():
            yield name, kind, text


def running_module() -> nn.Module | None:
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None
