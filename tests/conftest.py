"""What every test has in common: where kernels run, why a test that needs a GPU is skipped, and when a slow one runs.

Tests marked `kernel` run in Triton's interpreter where there is no GPU (or TRITON_INTERPRET=1 is set), and on the GPU
otherwise: there they are marked gpu as well.

Tests marked `slow` name the folders that they are about. They run where `--slow` names one of these folders, or "all".
With WEFT_SLOW_MINUTES=n those that have not begun n minutes after the run are skipped: a slow machine runs fewer.
With --within no test begins after that time at all (`make check`).
"""

import gc
import importlib
import math
import os
import sys
import time

import pytest
import torch
from large_pages import use_large_pages

os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")  # before triton is imported
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # a queue for each stream of the virtual ranks on one GPU
_BEGAN = time.monotonic()
INTERPRETED = os.environ["TRITON_INTERPRET"] == "1"


class _OpenEnded:
    """A file that goes on as /dev/null once nobody reads it any more (`make test | head`)."""

    def __init__(self, file):
        self._file = file

    def __getattr__(self, name):
        return getattr(self._file, name)

    def write(self, text: str) -> None:
        self._try(self._file.write, text)

    def flush(self) -> None:
        self._try(self._file.flush)

    def _try(self, write, *text: str) -> None:
        try:
            write(*text)
        except BrokenPipeError:
            for descriptor in {1, self._file.fileno()}:
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


@pytest.hookimpl(trylast=True)  # after the reporter is there
def pytest_configure(config):
    reporter = config.pluginmanager.getplugin("terminalreporter")
    if reporter is not None:
        reporter._tw._file = _OpenEnded(reporter._tw._file)
    if not config.pluginmanager.hasplugin("timeout"):  # on machines that have no more than pytest
        config.addinivalue_line("markers", "timeout: nothing without pytest-timeout")
        config.addinivalue_line("filterwarnings", "ignore:Unknown config option. timeout")
    if INTERPRETED:
        _mend_the_interpreter(checks=bool({"kernels", "all"} & set(config.getoption("--slow"))))


def _mend_the_interpreter(checks: bool) -> None:
    """Let Triton's interpreter replace the language's functions once a launch and module, not again in every call of a
    device function; and check integers for overflow only where `checks` is True. Two and a half times as fast.
    Let comparisons of scalars be masks, which triton 3.9 refuses."""
    from triton.runtime import interpreter

    replace, launch, seen = interpreter._patch_lang, interpreter.GridExecutor.__call__, []

    def replace_once(function):
        if function.__module__ in seen[-1]:
            return None
        seen[-1].add(function.__module__)
        return replace(function)

    def launch_anew(*arguments, **options):
        seen.append(set())
        try:
            return launch(*arguments, **options)
        finally:
            seen.pop()

    splat = interpreter.InterpreterBuilder.create_splat

    def splat_truth(builder, kind, scalar):
        made = splat(builder, kind, scalar)
        if scalar.data.dtype == bool:  # it makes integers of them, and takes no mask of integers
            made.data = made.data.astype(bool)
        return made

    interpreter.InterpreterBuilder.create_splat = splat_truth
    interpreter._patch_lang, interpreter.GridExecutor.__call__ = replace_once, launch_anew
    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", checks)


def pytest_addoption(parser):
    parser.addoption("--within", type=float, default=math.inf, metavar="SECONDS", help="begin no test after that time")
    parser.addoption("--slow", nargs="*", default=[], metavar="FOLDER", help="also slow tests of these folders, or all")


def pytest_collection_modifyitems(config, items):
    folders = set(config.getoption("--slow"))
    left_out = [
        item for item in items if (mark := item.get_closest_marker("slow")) and not folders & {"all", *mark.args}
    ]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
    with_slow_ones = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in with_slow_ones)  # first, or one worker ends long after the other
    for item in items:
        if "kernel" in item.keywords and not INTERPRETED:
            item.add_marker(pytest.mark.gpu)
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device here"))


def pytest_collection_finish(session):
    """Import what ranks need before they are forked, or each of them takes a second or more for it."""
    forks = {"run_ranks", "try_ranks", "run_script"}
    if not any(forks & vars(item.module).keys() for item in session.items if hasattr(item, "module")):
        return
    import weft

    for name in weft.__all__:
        getattr(weft, name)
    importlib.import_module("torch._dynamo")  # as every optimizer does
    if "transformers" in sys.modules:
        importlib.import_module("transformers.modeling_utils")
    gc.collect()
    gc.freeze()  # a rank copies the pages that a collection visits
    use_large_pages()


def pytest_runtest_setup(item):
    if time.monotonic() - _BEGAN > item.config.getoption("--within"):
        pytest.skip("the time is over")
    minutes = float(os.environ.get("WEFT_SLOW_MINUTES", "inf"))
    if item.get_closest_marker("slow") and time.monotonic() - _BEGAN > 60 * minutes:
        pytest.skip(f"the {minutes:g} minutes of slow tests are over")


@pytest.fixture
def device() -> torch.device:
    """Where a kernel's test puts its tensors."""
    return torch.device("cpu" if INTERPRETED else "cuda")
