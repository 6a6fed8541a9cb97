"""`weft stuck`: which rank a hang waits for, where that rank is, and where the others are."""

import contextlib
import ctypes
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from weft import cli
from weft.comm import rank_report
from weft.testing.ranks import try_ranks

LIMIT_S = 20


class Loads(nn.Module):
    def __init__(self, released):
        super().__init__()
        self.released = released

    def forward(self, x):
        self.released()
        return x


def sleeps(path):
    while not os.path.exists(path):
        time.sleep(0.02)


def computes(path):
    while not os.path.exists(path):
        sum(range(1000))


def takes_a_lock(path):
    lock = threading.Lock()
    lock.acquire()
    while not lock.acquire(timeout=0.1) and not os.path.exists(path):
        pass


def gets_from_a_queue(path):
    items: queue.Queue = queue.Queue()
    while not os.path.exists(path):
        try:
            items.get(timeout=0.1)
        except queue.Empty:
            continue


def waits_for_an_event(path):
    event = threading.Event()
    while not os.path.exists(path):
        event.wait(0.1)


def joins_a_thread(path):
    thread = threading.Thread(target=sleeps, args=(path,))
    thread.start()
    thread.join()


def runs_a_process(path):
    subprocess.run([sys.executable, "-c", f"import os, time\nwhile not os.path.exists({path!r}): time.sleep(0.02)"])


def reads_a_socket(path):
    one, other = socket.socketpair()
    one.settimeout(0.1)
    while not os.path.exists(path):
        try:
            one.recv(1)
        except TimeoutError:
            continue
    other.close()


def multiplies(path):
    x = torch.ones(500, 500)
    while not os.path.exists(path):
        x = (x @ x).clamp(max=1.0)


def loads_in_a_module(path):
    nn.Sequential(Loads(lambda: sleeps(path)))(torch.ones(2))


def keeps_the_gil(path):
    ctypes.PyDLL(None).sleep(6)
    sleeps(path)


def ends_while_a_thread_runs(path):
    threading.Thread(target=sleeps, args=(path,), name="uploader").start()
    threading._shutdown()  # as at the end of a program


def is_stopped(path):
    os.kill(os.getpid(), signal.SIGSTOP)


HANGS = [
    *(sleeps, computes, takes_a_lock, gets_from_a_queue, waits_for_an_event, joins_a_thread, runs_a_process),
    *(reads_a_socket, multiplies, loads_in_a_module, is_stopped, keeps_the_gil, ends_while_a_thread_runs),
]


def one_hangs(rank, hang, path):
    x = torch.ones(4)
    dist.all_reduce(x)
    if rank == 1:
        hang(path)
    dist.all_reduce(x)


def other_orders(rank, path):
    first, second = (dist.new_group([0, 1], timeout=timedelta(seconds=6)) for _ in range(2))
    if rank < 2:
        for group in (first, second) if rank == 0 else (second, first):
            dist.all_reduce(torch.ones(1), group=group)
    sleeps(path)


def seen_meanwhile(function, *args, path, timeout_s=LIMIT_S, until=r"(has waited for (0\.[3-9]|[1-9])[\s\S]*){2}"):
    """Run three ranks; return the table of reports as soon as it has this text, and the ranks' outcomes."""
    outcomes: list = []
    running = threading.Thread(
        target=lambda: outcomes.extend(try_ranks(function, 3, *args, timeout_s=LIMIT_S, group_timeout_s=timeout_s))
    )
    running.start()
    text, end = "", time.monotonic() + LIMIT_S
    while not re.search(until, text) and time.monotonic() < end and running.is_alive():
        text = rank_report.table([each for each in rank_report.reports() if _is_below_this(each["pid"])])
    path.touch()
    for pid in map(int, re.findall(r"process (\d+) is stopped", text)):
        os.kill(pid, signal.SIGCONT)
    running.join()
    return text, outcomes


def _is_below_this(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[1]) == os.getpid()
    except OSError:
        return False


@pytest.mark.parametrize("hang", HANGS, ids=lambda hang: hang.__name__)
def test_the_rank_that_others_wait_for_comes_first_with_its_place(hang, tmp_path):
    text, outcomes = seen_meanwhile(one_hangs, hang, str(tmp_path / "go on"), path=tmp_path / "go on")
    first, *lines = text.split("\n")
    if hang is is_stopped:
        assert re.match(r"others wait for rank 1, which does not answer: process \d+ is stopped", first), text
    elif hang is keeps_the_gil:
        assert re.match(r"others wait for rank 1, .*: process \d+ is asleep, perhaps in code that keeps the GIL", first)
        assert ("keeps_the_gil" if rank_report.py_spy() else "`pip install py-spy` shows where") in text, text
    elif hang is ends_while_a_thread_runs:
        where = r'the end of its program, where it waits for thread "uploader" at .*test_rank_report.py:\d+ sleeps'
        assert re.match(rf"rank 1 \(pid \d+\) is waited for, at {where}", first), text
    else:
        assert re.match(r"rank 1 \(pid \d+\) is waited for, at .*test_rank_report.py:\d+ ", first), text
        assert 'it has finished call #1 on "default_pg"' in first
        assert any(hang.__name__ in line or "sleeps" in line for line in [first, *lines]), text
    if hang is loads_in_a_module:
        assert ", in Sequential > Loads;" in first and "_call_impl" not in text
    for rank in (0, 2):
        assert re.search(
            rf"rank {rank} \(pid \d+\) has waited for .* in all_reduce #2 .*for rank 1, at .*one_hangs", text
        )
    assert all(outcome.error is None for outcome in outcomes), outcomes


def test_ranks_that_call_in_different_orders_are_said_to(tmp_path):
    text, outcomes = seen_meanwhile(other_orders, str(tmp_path / "go on"), path=tmp_path / "go on")
    assert text.startswith("every rank waits for another: they make their calls in different orders"), text
    errors = {type(outcome.error) for outcome in outcomes[:2]}  # one may hear of the other's end first
    assert weft.CollectiveTimeoutError in errors and errors <= {weft.CollectiveTimeoutError, weft.RankLostError}


def one_of_a_group_hangs(rank, path):
    group = dist.new_group([1, 2])  # in which they are 0 and 1
    if rank == 2:
        sleeps(path)
    if rank > 0:
        dist.all_reduce(torch.ones(1), group=group)


def test_ranks_of_a_group_have_their_numbers_in_the_program(tmp_path):
    go_on = tmp_path / "go on"
    text, outcomes = seen_meanwhile(
        one_of_a_group_hangs, str(go_on), path=go_on, until=r"has waited for (0\.[3-9]|[1-9])"
    )
    assert re.match(r"rank 2 \(pid \d+\) is waited for, at ", text), text
    assert re.search(r"rank 1 \(pid \d+\) has waited for .* in all_reduce #1 .*for rank 2, at ", text), text
    assert all(outcome.error is None for outcome in outcomes), outcomes


def waits_for_a_message(rank, sends, path):
    if rank == 0:
        x = torch.ones(1 << 22)
        dist.send(x, 1) if sends else dist.recv(x, 1)
    if rank == 1:
        sleeps(path)
        x = torch.ones(1 << 22)
        dist.recv(x, 0) if sends else dist.send(x, 0)


@pytest.mark.parametrize("sends", [True, False])
def test_a_message_that_nobody_takes_or_sends(sends, tmp_path):
    one = r"has waited for (0\.[3-9]|[1-9])"
    text, outcomes = seen_meanwhile(
        waits_for_a_message, sends, str(tmp_path / "go on"), path=tmp_path / "go on", until=one
    )
    assert re.match(r"rank 1 \(pid \d+\) is waited for, at .*test_rank_report.py:\d+ ", text), text
    call = rf"in {'send' if sends else 'receive'} \(.*\) on group \"default_pg\" for rank 1, at .*waits_for_a_message"
    assert re.search(rf"rank 0 \(pid \d+\) has waited for .* {call}", text), text
    assert all(outcome.error is None for outcome in outcomes), outcomes


def comes_too_late(rank, folder):
    while rank == 1 and len(os.listdir(folder)) < 2:
        time.sleep(0.02)
    try:
        dist.all_reduce(torch.ones(1))
    finally:
        (folder / str(rank)).touch()


def test_a_timeout_prints_the_ranks_once(capfd, tmp_path):
    outcomes = try_ranks(comes_too_late, 3, tmp_path, timeout_s=LIMIT_S, group_timeout_s=1)
    assert "did not arrive" in str(outcomes[0].error)
    printed = capfd.readouterr().err
    assert len(re.findall(r"^rank 1 \(pid \d+\) is waited for, at .*comes_too_late", printed, re.M)) == 1, printed


def forks(rank):
    child = os.fork()
    if child == 0:
        os._exit(0 if rank_report._listening is None else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), rank_report._listening is not None


def test_a_forked_child_does_not_hold_the_socket_of_its_rank():
    (outcome,) = try_ranks(forks, 1, timeout_s=LIMIT_S)
    assert outcome.value == (0, True)


def asks_by_a_signal(rank):
    own = signal.getsignal(signal.SIGUSR1)
    if own is not signal.SIG_DFL:
        os.kill(os.getpid(), signal.SIGUSR1)
    dist.barrier()
    dist.destroy_process_group()
    end = time.monotonic() + LIMIT_S
    while threading.active_count() > 1 and time.monotonic() < end:
        time.sleep(0.01)
    return own is not signal.SIG_DFL, [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize("slurm", [False, True])
def test_a_signal_prints_them_and_a_program_that_has_left_its_groups_says_nothing(slurm, capfd, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if slurm:
        monkeypatch.setenv("SLURM_JOB_ID", "7")
    for handled, threads in (outcome.value for outcome in try_ranks(asks_by_a_signal, 2, timeout_s=LIMIT_S)):
        assert handled != slurm and "weft rank report" not in threads
    assert ("rank 0 (pid" in capfd.readouterr().err) != slurm


def test_the_command_without_ranks(capsys, monkeypatch):
    monkeypatch.setattr(rank_report, "reports", list)
    assert cli.main(["stuck"]) == 0
    assert "weft run --as-gloo" in capsys.readouterr().out


def a_report(rank, job, program, waiting=None, place="train.py:1 train"):
    groups = [{"name": "dp", "calls": 3, "waiting": waiting}]
    which = {"pid": 100 + rank, "rank": rank, "job": job, "parent": f"launcher of {job}", "program": program}
    return {**which, "groups": groups, "stack": [], "place": place, "modules": []}


def test_jobs_have_headings_and_those_that_wait_come_first():
    well = [a_report(0, "a", "well.py")]
    waits = [a_report(0, "b", "waits.py", ("all_reduce #4", 5.0, [1])), a_report(1, "b", "waits.py")]
    silent = [{"pid": 7, "silent": "stopped", "parent": "another launcher", "program": "silent.py"}]
    lines = rank_report.table([*well, *waits, *silent]).split("\n")
    assert lines == [
        "waits.py, 2 processes: waits",
        'rank 1 (pid 101) is waited for, at train.py:1 train; it has finished call #3 on "dp"',
        "rank 0 (pid 100) has waited for 5.0 s in all_reduce #4 for rank 1, at train.py:1 train",
        "silent.py, 1 process: waits",
        "process 7 is a rank and does not answer: stopped",
        "well.py, 1 process: nobody waits",
        "rank 0 (pid 100) is at train.py:1 train",
    ]


def test_a_rank_that_does_not_answer_belongs_to_the_job_of_its_launcher():
    waits = a_report(0, "29500", "train.py", ("all_reduce #4", 5.0, [1]))
    silent = {"pid": 7, "silent": "stopped", "parent": waits["parent"], "program": "train.py"}
    assert rank_report.table([waits, silent]).split("\n") == [
        "others wait for rank 1, which does not answer: process 7 is stopped",
        "rank 0 (pid 100) has waited for 5.0 s in all_reduce #4 for rank 1, at train.py:1 train",
    ]


def test_what_a_process_says_is_printed_without_its_control_characters():
    assert rank_report.table([a_report(0, "a", "", place="\x1b[2Jx\ny")]) == r"rank 0 (pid 100) is at \x1b[2Jx\ny"


def as_another_user(act):
    """Run `act` in a child that is another user; return its process number."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os.setuid(65534)
            act()
        os._exit(0)
    return child


def asked_by_another_user(rank):
    address = "\0" + rank_report._SOCKET.format(user=os.getuid(), pid=os.getpid())
    reading, writing = os.pipe()

    def ask():
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(address)
            os.write(writing, connection.recv(100) or b"nothing")

    os.waitpid(as_another_user(ask), 0)
    return os.read(reading, 100)


only_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


@only_root
def test_a_process_of_another_user_gets_no_answer():
    (outcome,) = try_ranks(asked_by_another_user, 1, timeout_s=LIMIT_S)
    assert outcome.value == b"nothing"


@only_root
def test_a_process_of_another_user_is_not_believed():
    reading, writing = os.pipe()

    def lie():
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind("\0" + rank_report._SOCKET.format(user=0, pid=os.getpid()))
            listening.listen(4)
            os.write(writing, b"1")
            connection, _ = listening.accept()
            connection.sendall(b'{"pid": 1, "silent": "a lie"}')

    child = as_another_user(lie)
    os.read(reading, 1)
    assert rank_report._asked(child) == {}
    os.waitpid(child, 0)


def asked_by_one_that_does_not_read(rank):
    address = "\0" + rank_report._SOCKET.format(user=os.getuid(), pid=os.getpid())
    small, rank_report.report = rank_report.report, lambda: {"pid": os.getpid(), "text": "x" * (1 << 24)}
    with socket.socket(socket.AF_UNIX) as deaf, socket.socket(socket.AF_UNIX) as other:
        deaf.connect(address)
        time.sleep(0.2)
        rank_report.report = small
        other.settimeout(LIMIT_S)
        other.connect(address)
        return other.recv(100)


def test_one_that_asks_and_does_not_read_keeps_nobody_from_an_answer():
    (outcome,) = try_ranks(asked_by_one_that_does_not_read, 1, timeout_s=LIMIT_S)
    assert outcome.value.startswith(b'{"pid"')
