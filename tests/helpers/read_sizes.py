"""The sizes of what from_pretrained reads."""

from collections.abc import Iterator
from contextlib import contextmanager

from weft.checkpoint import safetensors_io


@contextmanager
def read_sizes() -> Iterator[list[int]]:
    """Inside the context, note the bytes of each read from a file of safetensors."""
    sizes: list[int] = []
    original = safetensors_io.Files.read

    def counting(self, box, inside=None):
        part = original(self, box, inside)
        sizes.append(part.numel() * part.element_size())
        return part

    safetensors_io.Files.read = counting
    try:
        yield sizes
    finally:
        safetensors_io.Files.read = original
