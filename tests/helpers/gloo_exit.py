"""How processes of a program over gloo may end."""

from subprocess import CompletedProcess

# In torch 2.13 a thread of gloo's drops the last tensor of a collective under the interpreter's lock. If Python ends
# before it has the lock, the thread is ended inside of a destructor and the process aborts with this message.
ABORTED_AT_THE_END = "terminate called without an active exception"


def succeeded(done: CompletedProcess, over_gloo: bool) -> bool:
    """Return whether a program passed: over gloo it may abort at its end, behind everything that it wrote."""
    return done.returncode == 0 or (over_gloo and ABORTED_AT_THE_END in done.stderr)
