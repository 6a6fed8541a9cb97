"""Launches that share flags, from whatever streams: each waits for the one before."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch


class StreamOrder:
    """Where launches on one device go: torch's current stream. They share flags, so one waits for the other."""

    def __init__(self, device: torch.device):
        self.device = device
        self._last: torch.cuda.Stream | None = None

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def on_device(self) -> AbstractContextManager:
        return torch.cuda.device(self.device)

    @contextmanager
    def next(self) -> Iterator[int]:
        """The handle of the current stream, with the device made current."""
        with self.on_device():
            stream = torch.cuda.current_stream()
            # A captured launch is ordered by its graph: it neither waits for what runs now, nor is it waited for.
            if self._last is not None and stream != self._last and _captures(self._last) == self.capturing():
                stream.wait_stream(self._last)
            self._last = stream
            yield stream.cuda_stream


def _captures(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()
