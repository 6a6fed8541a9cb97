"""Order of launches that share flags, on any streams: each waits for the one before."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch


class StreamOrder:
    """Order of launches on one device. Each goes to torch's current stream and waits for the launch before."""

    def __init__(self, device: torch.device):
        self.device = device
        self._last: torch.cuda.Stream | None = None

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def on_device(self) -> AbstractContextManager:
        return torch.cuda.device(self.device)

    @contextmanager
    def next(self) -> Iterator[int]:
        """Yield the handle of the current stream, with the device made current."""
        with self.on_device():
            stream = torch.cuda.current_stream()
            # The graph orders captured launches: they and launches outside the capture do not wait for each other.
            if self._last is not None and stream != self._last and _captures(self._last) == self.capturing():
                stream.wait_stream(self._last)
            self._last = stream
            yield stream.cuda_stream


def _captures(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()
