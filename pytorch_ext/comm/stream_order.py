"""Order of launches that share flags, on any streams: each waits for the one before."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch


class StreamOrder:
    """Order of launches on one device. Each goes to torch's current stream and waits for the launch before.

    Launches that a CUDA graph captures have an order of their own: they run when the graph is replayed.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._last: dict[bool, torch.cuda.Stream] = {}

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def on_device(self) -> AbstractContextManager:
        return torch.cuda.device(self.device)

    @contextmanager
    def next(self) -> Iterator[tuple[int, bool]]:
        """Yield the handle of the current stream and whether it captures, with the device made current."""
        with self.on_device():
            stream, captured = torch.cuda.current_stream(), self.capturing()
            last = self._last.get(captured)
            if last is not None and stream != last and _captures(last) == captured:  # an earlier capture has ended
                stream.wait_stream(last)
            self._last[captured] = stream
            yield stream.cuda_stream, captured


def _captures(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()
