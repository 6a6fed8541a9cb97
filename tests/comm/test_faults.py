"""What happens when ranks die, fall silent, leave or disagree: every survivor raises, names who and what, and leaves
nothing behind."""

import contextlib
import errno
import gc
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import weft
from weft.comm import rendezvous
from weft.testing.ranks import run_ranks, try_ranks

NOTICED_WITHIN_S = 2
MEET_WITHIN_S = 10  # of what a test waits for before it begins


def run_until_it_fails(rank, victim, point, collective):
    engine = dist.group.WORLD.engine.group
    if rank == victim:
        engine.inject_faults(die_at_point=point)
    x = torch.ones(300_000)
    world = dist.get_world_size()
    for _ in range(3):
        if collective == "all_reduce":
            dist.all_reduce(x)
        elif collective == "all_gather":
            dist.all_gather([torch.empty_like(x) for _ in range(world)], x)
        elif collective == "reduce_scatter":
            dist.reduce_scatter(torch.empty_like(x), [x] * world)
        elif collective == "broadcast":
            dist.broadcast(x, src=0)
        else:
            dist.barrier()


def backward_of_ddp(rank, victim, hooked):
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6))), bucket_cap_mb=0.01
    )
    if hooked:
        model.register_comm_hook(weft.HookState(), weft.ddp_hook)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    model(torch.ones(2, 64)).sum().backward()


@pytest.mark.parametrize("hooked", [False, True])
def test_torchs_ddp_raises_in_backward_with_the_dead_ranks_name(hooked):
    outcomes = try_ranks(backward_of_ddp, 3, 1, hooked, timeout_s=20)
    for survivor in (outcomes[0], outcomes[2]):
        assert isinstance(survivor.error, RuntimeError), survivor  # C++ passes on the text of a future's error
        assert "RankLostError: rank 1" in f"{type(survivor.error).__name__}: {survivor.error}"


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "barrier"])
@pytest.mark.parametrize("point", [1, 2, 3, 4])
@pytest.mark.parametrize("single_copy", ["0", "1"])
def test_a_dead_rank_is_named(collective, point, single_copy, monkeypatch):
    monkeypatch.setenv("WEFT_SINGLE_COPY", single_copy)
    victim = 1
    outcomes = try_ranks(run_until_it_fails, 3, victim, point, collective, timeout_s=20)
    assert outcomes[victim].exit_code == -signal.SIGKILL
    for survivor in (outcomes[0], outcomes[2]):
        assert isinstance(survivor.error, weft.RankLostError), survivor
        text = str(survivor.error)
        assert text.startswith("rank 1 (pid ") and f"{collective} #" in text and "signal 9" in text
        assert survivor.seconds < NOTICED_WITHIN_S


def die_in_a_message(rank):
    x = torch.ones(1_000_000)
    if rank == 1:
        dist.isend(x, 0)  # more than the ring holds
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        while 1 not in dist.group.WORLD.engine.group.lost_ranks():
            time.sleep(0.01)
        dist.recv(x)  # from anyone: finds the start of a message that has no end; rank 2 lives
    if rank == 2:
        dist.recv(x, 0)  # waits for a live rank, and hears of the dead one all the same


def test_a_rank_that_dies_in_a_message_to_anyone_is_named():
    outcomes = try_ranks(die_in_a_message, 3)
    for survivor in (outcomes[0], outcomes[2]):
        assert isinstance(survivor.error, weft.RankLostError) and "rank 1" in str(survivor.error), survivor
        assert survivor.seconds < NOTICED_WITHIN_S


def send_and_end(rank):
    """Rank 1 sends and ends after rank 0 has looked for messages, and before it looks for lost ranks."""
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["looked"], timedelta(seconds=20))
        dist.send(torch.arange(10.0), 0)
        return None
    dist.group.WORLD.engine.group.inject_faults(wait_for_death=True)
    x = torch.zeros(10)
    work = dist.irecv(x, 1)
    time.sleep(0.05)  # the messenger's thread starts, looks for messages, and waits
    store.set("looked", "")
    work.wait()
    return x.tolist()


def test_a_message_outlives_its_sender():
    assert run_ranks(send_and_end, 2)[0] == list(range(10))


def reuse_memory_after_abort(rank):
    """Rank 0 aborts and reuses its memory before rank 1, which is slow, has copied from it."""
    group = dist.group.WORLD.engine.group
    store = dist.distributed_c10d._get_default_store()
    x = torch.full((300_000,), rank + 1.0)
    out = torch.zeros(2, 300_000)

    def abort_when_rank_1_has_arrived():
        while not out[1, -1]:
            time.sleep(0.0001)
        group.abort()

    if rank == 0:
        threading.Thread(target=abort_when_rank_1_has_arrived).start()
        with pytest.raises(weft.CommError):
            dist.all_gather_into_tensor(out, x)
        x.fill_(-1)
        store.wait(["copied"], timedelta(seconds=20))
        return [1, 2]
    group.inject_faults(seed=7, longest_delay_us=300_000)
    try:
        dist.all_gather_into_tensor(out, x)
    finally:
        store.set("copied", "")
    return out[:, -1].tolist()


def test_memory_that_a_failed_rank_reuses_is_not_taken_for_data():
    outcomes = try_ranks(reuse_memory_after_abort, 2)
    assert outcomes[0].value == [1, 2]
    assert isinstance(outcomes[1].error, weft.CommError) or outcomes[1].value == [1, 2], outcomes[1]


def destroy_in_a_handler(rank, asynchronous):
    """A signal arrives while rank 0 waits, and its handler takes the group down."""
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["destroyed"], timedelta(seconds=10))
        return

    def handler(*_):
        try:
            dist.destroy_process_group()
        finally:
            store.set("destroyed", "")

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    work = dist.all_reduce(torch.ones(1000), async_op=asynchronous)
    work.wait()  # at once: before the queue's thread wakes up, so this thread runs the call


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_signals_handler_may_destroy_the_group_that_is_waited_for(asynchronous):
    waiting, other = try_ranks(destroy_in_a_handler, 2, asynchronous, timeout_s=15)
    assert isinstance(waiting.error, weft.CommError) and "rank 0 aborted" in str(waiting.error), waiting
    assert other.error is None and other.exit_code == 0


def raise_in_one_rank(rank):
    if rank == 1:
        raise RuntimeError("out of luck")
    dist.all_reduce(torch.ones(3))


def test_a_rank_that_raised_and_ended_is_noticed():
    outcomes = try_ranks(raise_in_one_rank, 3)
    assert isinstance(outcomes[0].error, weft.RankLostError) and "exit code 1" in str(outcomes[0].error)
    assert isinstance(outcomes[2].error, weft.RankLostError)


def leave_early(rank):
    dist.all_reduce(torch.ones(3))
    if rank == 1:
        dist.destroy_process_group()
        time.sleep(0.5)
        return
    dist.all_reduce(torch.ones(3))


def test_a_rank_that_left_the_group_is_noticed_though_it_lives():
    outcomes = try_ranks(leave_early, 2)
    assert isinstance(outcomes[0].error, weft.RankLostError) and "rank 1" in str(outcomes[0].error)
    assert "left the group in or before all_reduce #2" in str(outcomes[0].error)
    assert outcomes[1].error is None


def be_impatient(timeout_s):
    """From here on, where all ranks are: joining a group takes longer than a test may wait for a silent rank."""
    dist.barrier()
    dist.group.WORLD.engine.set_timeout(timedelta(seconds=timeout_s))
    return dist.distributed_c10d._get_default_store()


def fall_silent(rank):
    """Rank 1 lives, and comes when the others have given up: it must not believe that all is well."""
    store = be_impatient(2)
    if rank == 1:
        store.wait(["gave up/0", "gave up/2"], timedelta(seconds=20))
    try:
        dist.all_reduce(torch.ones(3))
    except weft.CommError:
        store.set(f"gave up/{rank}", "")
        raise


def test_a_silent_rank_is_named_by_a_timeout():
    for outcome in try_ranks(fall_silent, 3):
        assert isinstance(outcome.error, weft.CollectiveTimeoutError), outcome
        assert "rank 1 did not arrive in all_reduce #2" in str(outcome.error) and "within the timeout of 2 s" in str(
            outcome.error
        )


def stop_one(rank):
    """Rank 1 stops, and goes on when rank 0 has given up."""
    store = be_impatient(0.3)
    if rank == 1:
        store.set("pid", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        pid = int(store.get("pid"))
        while state_of(pid) != "T":
            time.sleep(0.01)
    try:
        for _ in range(3):
            dist.all_reduce(torch.ones(300_000))
    finally:
        if rank == 0:
            os.kill(pid, signal.SIGCONT)


def state_of(pid):
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0]


def test_a_stopped_rank_is_a_timeout_and_raises_too_when_it_goes_on():
    outcomes = try_ranks(stop_one, 2)
    assert isinstance(outcomes[0].error, weft.CollectiveTimeoutError)
    assert isinstance(outcomes[1].error, weft.CollectiveTimeoutError)
    assert outcomes[1].seconds < 0.7 + NOTICED_WITHIN_S


def disagree(rank, what):
    x = torch.ones(8)
    odd = rank == 1
    with pytest.raises(weft.CollectiveMismatchError) as raised:
        if what == "operation":
            dist.barrier() if odd else dist.all_reduce(x)
        elif what == "type":
            dist.all_reduce(x.bfloat16() if odd else x)
        elif what == "type of what is only moved":
            dist.broadcast(x.to(torch.float8_e5m2 if odd else torch.float8_e4m3fn), src=0)
        elif what == "size":
            dist.all_reduce(x[:5] if odd else x)
        elif what == "operator":
            dist.all_reduce(x, dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM)
        elif what == "root":
            dist.broadcast(x, src=1 if odd else 0)
        elif what == "split":
            sizes = [4, 2, 2] if odd else [3, 3, 2]
            dist.all_gather([torch.empty(size) for size in sizes], torch.ones(sizes[rank]))
    dist.all_reduce(x)  # everybody raised at the same place, so the group is still good
    assert (x == 3).all()
    return str(raised.value)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("operation", "ranks 0, 2 called all_reduce(float32, 8 elements, sum), rank 1 called barrier()"),
        ("type", "rank 1 called all_reduce(bfloat16, 8 elements, sum)"),
        ("type of what is only moved", "rank 1 called broadcast(float8_e5m2, 8 elements, from rank 0)"),
        ("size", "rank 1 called all_reduce(float32, 5 elements, sum)"),
        ("operator", "rank 1 called all_reduce(float32, 8 elements, max)"),
        ("root", "rank 1 called broadcast(float32, 8 elements, from rank 1)"),
        ("split", "rank 1 called all_gather(float32, 8 elements, split "),
    ],
)
def test_ranks_that_disagree_all_raise_the_same_words(what, message):
    outcomes = try_ranks(disagree, 3, what)
    texts = {outcome.value for outcome in outcomes}
    assert len(texts) == 1 and message in texts.pop(), outcomes
    assert all(outcome.error is None for outcome in outcomes)


def misjudge(rank, sent):
    if rank == 1:
        return dist.send(sent, 0)
    with pytest.raises(weft.CollectiveMismatchError) as raised:
        dist.recv(torch.empty(6), 1)
    return str(raised.value)


@pytest.mark.parametrize(
    "sent", [torch.ones(5), torch.ones(7), torch.ones(6, dtype=torch.int32)], ids=["less", "more", "type"]
)
def test_a_message_that_does_not_fit_its_receive_is_reported(sent):
    message = run_ranks(misjudge, 2, sent)[0]
    kind = str(sent.dtype).removeprefix("torch.")
    assert f"rank 1 sent ({kind}, {len(sent)} elements, tag 0) to rank 0" in message
    assert message.endswith("which receives (float32, 6 elements, tag 0).")


def interrupt_one(rank):
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    else:
        store.wait(["interrupted"], timedelta(seconds=20))
    try:
        dist.all_reduce(torch.ones(3))
        dist.all_reduce(torch.ones(3))
    except KeyboardInterrupt:
        store.set("interrupted", "")
        raise


def test_ctrl_c_ends_a_wait_and_the_others_are_reported():
    outcomes = try_ranks(interrupt_one, 2)
    assert isinstance(outcomes[0].error, KeyboardInterrupt)
    assert isinstance(outcomes[1].error, weft.CommError)
    assert "interrupted" in str(outcomes[1].error) or isinstance(outcomes[1].error, weft.RankLostError)


def lose_a_member_of_a_new_group(rank):
    if rank == 1:
        os._exit(7)
    dist.new_group([0, 1, 2])


def test_a_rank_lost_before_a_new_group_is_made_does_not_hang_it():
    outcomes = try_ranks(lose_a_member_of_a_new_group, 3)
    for survivor in (outcomes[0], outcomes[2]):
        assert isinstance(survivor.error, weft.RankLostError) and survivor.seconds < NOTICED_WITHIN_S
        assert "rank 1" in str(survivor.error)


def die_while_the_default_group_forms(rank, last_words, late):
    """Rank 1 dies after those words. Rank 2 reads a note, and then does nothing until the others are no more."""
    store = dist.FileStore(os.environ["WEFT_TEST_STORE"], 3)
    announce, read = rendezvous._Rendezvous.announce, rendezvous._Rendezvous.read

    def die(self, key, note):
        announce(self, key, note)
        if key == last_words:
            os._exit(3)

    def wait(self, key, from_rank):
        note, deadline = read(self, key, from_rank), time.monotonic() + 20
        while key == late and time.monotonic() < deadline:
            if not any(os.path.exists(f"/proc/{self.processes[other]['pid']}") for other in (0, 1)):
                break
            time.sleep(0.01)
        return note

    if rank == 1:
        rendezvous._Rendezvous.announce = die
    if rank == 2:
        rendezvous._Rendezvous.read = wait
    dist.init_process_group("weft", store=store, rank=rank, world_size=3)


@pytest.mark.parametrize(
    ("last_words", "late"), [("process/1", None), ("process/1", "segment"), ("ready/1", None), ("ready/1", "ready/2")]
)
def test_a_rank_that_dies_while_the_first_group_forms_is_noticed(last_words, late, tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_TEST_STORE", str(tmp_path / "store"))
    outcomes = try_ranks(die_while_the_default_group_forms, 3, last_words, late, backend=None)
    for survivor in (outcomes[0], outcomes[2]):
        assert isinstance(survivor.error, weft.RankLostError), survivor
        assert re.match("ranks? (0, )?1 ", str(survivor.error)), survivor
        assert survivor.seconds < NOTICED_WITHIN_S


def meet_again(rank):
    for round_number in range(3):
        group = dist.new_group([0, 1], use_local_synchronization=True)
        if rank == 0:
            time.sleep(0.05)  # the other rank looks for this rank's notes now, and must not find old ones
        x = torch.ones(4) * round_number
        dist.all_reduce(x, group=group)
        assert (x == 2 * round_number).all()
        dist.destroy_process_group(group)


def test_a_group_can_be_made_again_under_the_same_name():
    outcomes = try_ranks(meet_again, 2)
    assert all(outcome.error is None for outcome in outcomes), outcomes


def be_bothered_by_signals(rank):
    signal.signal(signal.SIGALRM, lambda *_: None)
    if rank == 0:
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    else:
        time.sleep(0.5)
    dist.barrier()
    lost = dist.group.WORLD.engine.group.lost_ranks()
    signal.setitimer(signal.ITIMER_REAL, 0)
    dist.barrier()
    return lost


def test_signals_do_not_make_a_live_rank_look_dead():
    outcomes = try_ranks(be_bothered_by_signals, 2)
    assert [outcome.value for outcome in outcomes] == [[], []], outcomes


def run_out_of_memory(rank, victim):
    if rank == victim == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    elif rank == victim:

        def refuse(segment, *_):
            raise OSError(errno.ENOMEM, "cannot reserve 4096 bytes of shared memory")

        rendezvous._C.Group.reserve = refuse
    dist.new_group([0, 1, 2])


@pytest.mark.parametrize("victim", [0, 2])  # the first makes the segment, the others reserve their own parts of it
def test_memory_that_cannot_be_had_is_an_error_on_every_rank(victim):
    outcomes = try_ranks(run_out_of_memory, 3, victim)
    for outcome in outcomes:
        assert isinstance(outcome.error, OSError) and "bytes of shared memory" in str(outcome.error), outcome


def run_out_of_descriptors(rank):
    """Rank 1 has descriptors left for the memory, and not to watch its peers; all live on until the others know."""
    store = dist.distributed_c10d._get_default_store()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if rank == 1:
        held = [os.dup(0) for _ in range(100)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (held[-1] + 1, limits[1]))
        for number in held[-5:]:
            os.close(number)
    try:
        dist.new_group([0, 1, 2], backend="weft")
    finally:
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        store.set(f"noticed/{rank}", "")
        store.wait([f"noticed/{each}" for each in range(3)], timedelta(seconds=MEET_WITHIN_S))


def test_a_rank_that_cannot_join_gives_the_others():
    outcomes = try_ranks(run_out_of_descriptors, 3, backend="gloo")  # no group has descriptors of the peers yet
    for outcome in outcomes:
        assert "Too many open files" in str(outcome.error), outcome
    assert isinstance(outcomes[0].error, weft.CommError) and "rank 1 could not join" in str(outcomes[0].error)


def test_a_rank_that_cannot_join_gives_its_own_reason_when_the_others_have_gone_already():
    limit = timedelta(seconds=MEET_WITHIN_S)
    meeting = rendezvous._Rendezvous(dist.HashStore(), "g", 0, limit, lambda: [1], labels=[0, 1])
    meeting.processes = [rendezvous._describe_process()] * 2
    with pytest.raises(OSError, match="Too many open files"), meeting.losing_ranks():
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    with pytest.raises(weft.RankLostError), meeting.losing_ranks():
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))


@pytest.mark.parametrize("kib", ["", "a lot", "-4", "5"])
def test_a_setting_that_means_nothing_is_named(kib, monkeypatch):
    monkeypatch.setenv("WEFT_STAGING_KIB", kib)
    (outcome,) = try_ranks(len, 1)
    assert isinstance(outcome.error, ValueError) and f"WEFT_STAGING_KIB={kib} must be" in str(outcome.error), outcome


def use_after_destroy(rank):
    group = dist.new_group([0, 1])
    dist.destroy_process_group(group)
    group.engine.group.barrier()


def test_a_destroyed_group_refuses_calls():
    outcomes = try_ranks(use_after_destroy, 2)
    assert all(isinstance(outcome.error, weft.CommError) for outcome in outcomes)
    assert "was destroyed" in str(outcomes[0].error)


def count_what_is_open(rank):
    def opened():
        descriptors = Counter()
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                descriptors[os.readlink(f"/proc/self/fd/{number}")] += 1
        return descriptors

    def mapped():  # what has no name in /dev/shm is gone with its last process, however that one ends
        return {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm" in line}

    def threads():
        return len(os.listdir("/proc/self/task"))

    gc.collect()  # what tests before this one left may have files open
    before, mapped_before, threads_before = opened(), mapped(), threads()
    for _ in range(10):
        group = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(10), group=group, async_op=True).wait()
        weft.all_reduce(weft.empty_symmetric(1000, group=group).zero_(), group=group)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, torch.ones(100_000), 1 - rank, group),
                dist.P2POp(dist.irecv, torch.empty(100_000), 1 - rank, group),
            ]
        )
        for work in works:
            work.wait()
        dist.barrier(group=group)
        dist.destroy_process_group(group)
        del group, works, work
    gc.collect()
    after = opened()
    ours = [name for name in after - before if "weft" in name]
    return after.total() - before.total(), ours, mapped() - mapped_before, threads() - threads_before


def test_groups_leave_no_descriptors_and_threads_behind_and_name_nothing():
    outcomes = try_ranks(count_what_is_open, 2)
    for outcome in outcomes:
        assert outcome.error is None, outcome.traceback
        assert outcome.value == (0, [], set(), 0)


def on_tiny_shm(rank):
    x = torch.ones(1_000_000)
    dist.all_reduce(x)
    return x[0].item()


@pytest.mark.skipif(
    subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode != 0,
    reason="this machine does not let a test make a mount namespace",
)
def test_a_tiny_dev_shm_does_not_matter():
    script = (
        "import test_faults; from weft.testing.ranks import run_ranks; print(run_ranks(test_faults.on_tiny_shm, 2))"
    )
    tests = os.path.dirname(__file__)
    command = f"mount -t tmpfs -o size=4k none /dev/shm && PYTHONPATH={tests} {sys.executable} -c '{script}'"
    done = subprocess.run(["unshare", "--mount", "sh", "-c", command], capture_output=True, text=True)
    assert done.stdout.strip() == "[2.0, 2.0]", done.stderr


def five_at_once(rank):
    for step in range(200):
        x = torch.full((100,), float(step + rank))
        dist.all_reduce(x)
        assert (x == 5 * step + 10).all()


def test_more_ranks_than_cores_still_get_on():
    outcomes = try_ranks(five_at_once, 5)
    assert all(outcome.error is None for outcome in outcomes), outcomes


def from_a_forked_child(rank):
    pid = os.fork()
    if pid == 0:
        try:
            dist.group.WORLD.shutdown()  # must not make the parent leave
            dist.all_reduce(torch.ones(1))
        except weft.CommError as error:
            os._exit(0 if "forked" in str(error) else 2)
        os._exit(1)
    _, status = os.waitpid(pid, 0)
    x = torch.ones(1)
    dist.all_reduce(x)
    return os.waitstatus_to_exitcode(status), x.item()


def test_a_forked_child_cannot_speak_for_its_parent():
    outcomes = try_ranks(from_a_forked_child, 2)
    assert [outcome.value for outcome in outcomes] == [(0, 2.0)] * 2, outcomes


ENDING = """
import os, sys, threading, time
import torch, torch.distributed as dist, weft

def ends_while_a_thread_waits(rank, number):
    store = dist.FileStore(f"{sys.argv[1]}{number}", 2)
    dist.init_process_group("weft", store=store, rank=rank, world_size=2)
    if rank == 0:
        threading.Thread(target=dist.all_reduce, args=(torch.ones(1),), daemon=True).start()
        time.sleep(0.05)
    else:
        time.sleep(0.1)  # its end is that of the thread's wait
    sys.exit(0)

ranks = []
for number in range(4):
    for rank in range(2):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            ends_while_a_thread_waits(rank, number)
print(*(os.waitpid(rank, 0)[1] for rank in ranks))
"""


def test_a_thread_that_waits_while_python_ends_does_not_abort_it(tmp_path):
    command = [sys.executable, "-c", ENDING, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.stdout.split() == ["0"] * 8, done.stderr


def other_ranks(rank, of_ranks):
    group = dist.new_group(of_ranks[rank])
    if group is not dist.GroupMember.NON_GROUP_MEMBER:
        dist.all_reduce(torch.ones(1), group=group)


@pytest.mark.parametrize(
    ("of_ranks", "named"),
    [(([0, 1], [0, 1], [1, 2]), {2}), (([0, 1, 2], [1, 2], [1, 2]), {0}), (([0, 1], [1, 2], [0, 1]), {0, 1})],
)
def test_ranks_that_make_other_groups_hear_of_it(of_ranks, named):
    outcomes = try_ranks(other_ranks, 3, of_ranks, group_timeout_s=20)
    text = "passed the ranks .* to new_group, and another rank passed|does each of them pass these to new_group"
    for rank in named:
        assert re.search(text, str(outcomes[rank].error)), outcomes


def fail_in_the_second_group(rank, how):
    """Ranks 2 and 3 of four are a group in which they are 0 and 1."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    group = groups[rank // 2]
    x = torch.ones(10)
    dist.all_reduce(x, group=group)
    try:
        if how == "dies":
            if rank == 3:
                os._exit(7)
            dist.all_reduce(x, group=group)
        elif how == "differs":
            dist.broadcast(torch.ones(4 + (rank == 3)), src=rank // 2 * 2, group=group)
        elif how == "message" and rank == 2:
            dist.send(x, 3, group=group)
        elif how == "message" and rank == 3:
            dist.recv(torch.empty(5), 2, group=group)
        elif how == "sizes":
            sizes = [1 + (rank == 3), 1]
            dist.all_to_all([torch.ones(n) for n in sizes], [torch.empty(1) for _ in sizes], group=group)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("dies", ["rank 3 (pid", "while rank 2 waited"]),
        ("differs", ["rank 2 called broadcast(float32, 4 elements, from rank 2), rank 3 called"]),
        ("message", ["rank 2 sent (float32, 10 elements, tag 0) to rank 3 on group"]),
        ("sizes", ["rank 2 sends 1 elements to rank 3, which expects 2"]),
    ],
)
def test_errors_in_a_group_of_some_ranks_have_the_programs_ranks(how, said):
    found = try_ranks(fail_in_the_second_group, 4, how)
    texts = [each.value for each in found[2:] if getattr(each, "value", None)]
    assert texts and all(word in texts[0] for word in said), texts
    assert not any(each.value for each in found[:2])
