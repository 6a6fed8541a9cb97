"""How far a bench is: told by the processes that measure, drawn once a second where the output is a terminal.

The ranks are forked, so they tell through memory that they share with the process that started them. Drawing takes
about a millisecond, which a bench of two ranks on two cores would notice if it were done more often.
"""

import mmap
import os
import threading

_EVERY_S = 1.0
_told = memoryview(mmap.mmap(-1, 16)).cast("q")  # the round that is measured, and of how many
_drawing = threading.Lock()
# A rank that is forked while a line is drawn would inherit the terminal's lock, held by nobody.
os.register_at_fork(before=_drawing.acquire, after_in_parent=_drawing.release, after_in_child=_drawing.release)


def tell(done: int, rounds: int) -> None:
    """From any process: so many rounds are done of what is measured now."""
    _told[0], _told[1] = done, rounds


class Bar:
    """A line with the rows that are there and the rounds of the next; nothing where the console is no terminal."""

    def __init__(self, name: str, console):
        self.name, self.console, self.rows = name, console, 0
        self._ended = threading.Event()

    def __enter__(self) -> "Bar":
        tell(0, 0)
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
            done, rounds = _told
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
