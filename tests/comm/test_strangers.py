"""Ranks of one machine that do not see each other in /proc share memory all the same, and notice a death."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from weft import _C

RANK = """
import ctypes, os, sys, torch, torch.distributed as dist, weft
rank, store, dumpable = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "1"
if not dumpable:
    assert ctypes.CDLL(None).prctl(4, 0, 0, 0, 0) == 0  # PR_SET_DUMPABLE
dist.init_process_group("weft", store=dist.FileStore(store, 3), rank=rank, world_size=3)
group = dist.new_group([2, 0, 1])
assert not group.engine.group.single_copy
x = torch.full((300_000,), rank + 1.0)
dist.all_reduce(x, group=group)
assert (x == 6).all()
shared = weft.empty_symmetric(300_000).fill_(rank + 1.0)
weft.all_reduce(shared)
assert (shared == 6).all()
gathered = torch.empty(3 * 50_000)
dist.all_gather_into_tensor(gathered, torch.full((50_000,), float(rank)))
assert (gathered.view(3, -1) == torch.arange(3.0)[:, None]).all()
if rank == 2:
    os._exit(3)  # the first process of a namespace ignores signals of its own
try:
    dist.barrier()
except weft.RankLostError as error:
    print(error)
"""

APART = ["unshare", "--pid", "--fork", "--kill-child"]
UNABLE = ["setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace"]


def allowed(*command):
    try:
        return subprocess.run([*command, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("prefix", "dumpable"),
    [
        pytest.param(
            APART, "1", id="process namespaces", marks=pytest.mark.skipif(not allowed(*APART), reason="unshare")
        ),
        pytest.param(
            UNABLE,
            "0",
            id="not dumpable",
            marks=[
                pytest.mark.skipif(not allowed(*UNABLE), reason="setpriv"),
                pytest.mark.slow("csrc/shm", "pytorch_ext/comm"),
            ],
        ),
    ],
)
def test_strangers_share_memory_and_notice_a_death(prefix, dumpable, tmp_path):
    ranks = []
    for rank in range(3):
        command = [
            *(prefix if rank else UNABLE),
            sys.executable,
            "-c",
            RANK,
            str(rank),
            str(tmp_path / "store"),
            dumpable,
        ]
        ranks.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    outputs = [rank.communicate(timeout=120) for rank in ranks]
    for rank in (0, 1):
        assert ranks[rank].returncode == 0, outputs[rank][1]
        assert "rank 2 (" in outputs[rank][0] and ") died" in outputs[rank][0], outputs[rank]


ASK = """
import os, sys
from weft import _C
os.setresuid(12345, 12345, 12345)
try:
    _C.descriptor_of(int(sys.argv[1]), int(sys.argv[2]))
except PermissionError as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
def test_another_user_is_given_nothing():
    ask = [sys.executable, "-c", ASK, str(_C.process_key()), "-1"]
    assert "must run as one user" in subprocess.run(ask, capture_output=True, text=True).stdout


def test_what_a_process_does_not_have_it_does_not_give():
    with pytest.raises(PermissionError):
        _C.descriptor_of(_C.process_key(), 10_000)
    with pytest.raises(ProcessLookupError, match="has ended"):
        _C.descriptor_of(1, 0)


def test_a_forked_child_has_a_key_of_its_own_and_frees_its_parents():
    """The parent's socket must end with the parent, though its child lives on."""
    reads, writes = os.pipe()
    parent = os.fork()
    if parent == 0:
        key = _C.process_key()
        if os.fork() == 0:
            os.write(writes, f"{key} {_C.process_key()}\n".encode())
            signal.pause()
        signal.pause()
    key, of_child = map(int, os.read(reads, 100).split())
    assert len({key, of_child, _C.process_key()}) == 3
    assert not _C.has_ended(key)
    (child,) = (int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split())
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    assert _C.has_ended(key) and not _C.has_ended(of_child)
    os.kill(child, signal.SIGKILL)
