"""What collectives are called for where the caller's own code has none: ranks compare it, and errors name it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from weft import _C

_here = threading.local()


def purpose() -> str:
    """Return what this thread's calls are made for; "" is nothing."""
    return getattr(_here, "purpose", "")


@contextmanager
def calls_for(text: str) -> Iterator[None]:
    """Say what the calls inside are made for; also a decorator. Inside of another such context, that one's text counts.

    Args:
        text: what the user's code calls, and what it asks for: "weft.full_state_dict, which every rank calls". The
            shared-memory engine keeps 183 bytes of it.
    """
    if purpose():
        yield
        return
    _here.purpose = text
    _C.set_purpose(text)
    try:
        yield
    finally:
        _here.purpose = ""
        _C.set_purpose("")
