"""Records of the use of a shared sequence in each module, written as the model runs."""

from collections.abc import Iterator

from torch import nn

from weft.forward.running import running
from weft.metadata import metadata, set_metadata


def note(kind: str, text: str) -> None:
    """Record a text for the innermost running module; it replaces an earlier text of the same kind."""
    module = running()
    if module is not None:
        set_metadata(module, "sequence_notes", {**(metadata(module, "sequence_notes") or {}), kind: text})


def notes(model: nn.Module) -> Iterator[tuple[str, str, str]]:
    """Yield (module name, kind, text) of all records."""
    for name, module in model.named_modules():
        for kind, text in (metadata(module, "sequence_notes") or {}).items():
            yield name, kind, text
