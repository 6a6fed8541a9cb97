"""What a model did with its shared sequence, module by module, noted as it runs."""

from collections.abc import Iterator

from torch import nn

from weft.running import running

_ATTRIBUTE = "_weft_context_notes"


def note(kind: str, text: str) -> None:
    """Note it with the innermost module that is called; a later note of the kind takes the place of an earlier."""
    module = running()
    if module is not None:
        module.__dict__.setdefault(_ATTRIBUTE, {})[kind] = text


def notes(model: nn.Module) -> Iterator[tuple[str, str, str]]:
    """(module name, kind, text) of all that was noted."""
    for name, module in model.named_modules():
        for kind, text in module.__dict__.get(_ATTRIBUTE, {}).items():
            yield name, kind, text
