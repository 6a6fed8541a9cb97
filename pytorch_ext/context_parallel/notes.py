"""What a model did with its shared sequence, module by module, noted as it runs."""

from collections.abc import Iterator

from torch import nn

from weft.metadata import metadata, set_metadata
from weft.running import running


def note(kind: str, text: str) -> None:
    """Note it with the innermost module that is called; a later note of the kind takes the place of an earlier."""
    module = running()
    if module is not None:
        set_metadata(module, "sequence_notes", {**(metadata(module, "sequence_notes") or {}), kind: text})


def notes(model: nn.Module) -> Iterator[tuple[str, str, str]]:
    """(module name, kind, text) of all that was noted."""
    for name, module in model.named_modules():
        for kind, text in (metadata(module, "sequence_notes") or {}).items():
            yield name, kind, text
