"""Progress of a bench: set by the processes that measure, drawn once a second if the output is a terminal.

The ranks are forked, so they write to memory that they share with the process that started them. Drawing takes about a
millisecond: more often than once a second would disturb a bench of two ranks on two cores.
"""

import mmap
import os
import threading

_EVERY_S = 1.0
_shared = memoryview(mmap.mmap(-1, 16)).cast("q")  # rounds done, and their number
_drawing = threading.Lock()
# A rank forked while a line is drawn would inherit the terminal's lock with no thread to release it.
os.register_at_fork(before=_drawing.acquire, after_in_parent=_drawing.release, after_in_child=_drawing.release)


def set_round(done: int, rounds: int) -> None:
    """Record the rounds done of the current measurement, from any process."""
    _shared[0], _shared[1] = done, rounds


class Bar:
    """Line with the number of finished rows and the rounds of the next one; nothing without a terminal."""

    def __init__(self, name: str, console):
        self.name, self.console, self.rows = name, console, 0
        self._ended = threading.Event()

    def __enter__(self) -> "Bar":
        set_round(0, 0)
        if self.console.is_terminal:
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[at]}")
            self._progress = Progress(
                *columns, TimeElapsedColumn(), console=self.console, auto_refresh=False, transient=True
            )
            self._task = self._progress.add_task(self.name, at="")
            self._progress.start()
            self._thread = threading.Thread(target=self._draw, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error) -> None:
        self._ended.set()
        if self.console.is_terminal:
            self._thread.join()
            self._progress.stop()

    def _draw(self) -> None:
        while True:
            done, rounds = _shared
            at = f"round {done} of {rounds}" if rounds else "starting"
            with _drawing:
                self._progress.update(
                    self._task,
                    description=f"{self.name}: {self.rows} rows",
                    completed=done,
                    total=rounds or None,
                    at=at,
                )
                self._progress.refresh()
            if self._ended.wait(_EVERY_S):
                return
