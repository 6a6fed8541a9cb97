"""Runs a script as torchrun would, on ranks forked from this process, which has imported everything."""

import contextlib
import io
import os
import runpy
import socket
import sys
import warnings
from pathlib import Path

from weft.testing.ranks import run_ranks


def run_script(path: Path, *arguments: object, ranks: int | None = None) -> str:
    """Return what the ranks print, in their order; without `ranks` one process has no variables of torchrun's.

    Every rank has one thread, as ranks that are forked must.
    """
    variables = {"OMP_NUM_THREADS": "1"}
    if ranks is not None:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        variables |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        variables |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    options = {"backend": None, "environment": variables, "timeout_s": 240}
    texts = run_ranks(_run, ranks or 1, ranks is not None, path, [str(one) for one in arguments], **options)
    return "".join(texts)


def _run(rank: int, torchrun: bool, path: Path, arguments: list[str]) -> str:
    if torchrun:
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(io.StringIO()) as text:
        runpy.run_path(str(path), run_name="__main__")
    return text.getvalue()
