"""Windows: every rank's memory mapped by every rank, zero when it is handed out, and refused on all ranks alike."""

import os
import shutil
import subprocess
import time

import pytest
import torch
import torch.distributed as dist

import weft
from weft.comm import symmetric_memory
from weft.comm.registry import communicator
from weft.comm.symmetric_memory import open_symmetric_memory
from weft.testing.ranks import on_machines, run_ranks, try_ranks

CPU = torch.device("cpu")
BOTH = "cpu:weft,cuda:gloo"


def check_window(rank):
    opened = open_symmetric_memory(communicator(), 5000, CPU)
    world = dist.get_world_size()
    assert opened.rank == rank and opened.multicast == 0 and len(opened.parts) == world
    assert opened.mine is opened.parts[rank]
    assert opened.addresses == tuple(part.data_ptr() for part in opened.parts)
    assert all(part.shape == (5000,) and part.dtype == torch.uint8 and (part == 0).all() for part in opened.parts)
    dist.barrier()
    opened.parts[(rank + 1) % world].fill_(rank + 1)
    dist.barrier()
    assert (opened.mine == (rank - 1) % world + 1).all()


@pytest.mark.parametrize("backend", ["weft", BOTH])
@pytest.mark.parametrize("world", [1, 3])
def test_what_a_rank_writes_into_a_peers_part_is_there(world, backend):
    run_ranks(check_window, world, backend=backend)


class FakeSymmetricMemory:
    """torch's symmetric memory over the host's: allocation hands out garbage, rendezvous maps the same of all ranks."""

    fails_at = ""

    @classmethod
    def empty_strided_p2p(cls, size, stride, dtype, device):
        if cls.fails_at == "allocation":
            raise RuntimeError("CUDA driver error: out of memory\nC++ frames follow")
        assert stride == (1,) and dtype == torch.uint8
        cls.window = open_symmetric_memory(communicator(), *size, CPU)
        return cls.window.mine.fill_(7)

    @classmethod
    def rendezvous(cls, memory, group_name):
        if cls.fails_at == "rendezvous":
            raise RuntimeError("CUDA driver error: peer access is not supported")
        assert group_name == "0/cuda" and memory is cls.window.mine
        cls.equal_numbers = os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES")
        return None if cls.fails_at == "quietly" else cls()

    def get_buffer(self, rank, sizes, dtype):
        return self.window.parts[rank].view(dtype).view(sizes)

    multicast_ptr = 1 << 40


def pretend_gpus(rank, *, gpu=None, number=None, shared="0", fabric=""):
    place = {
        "machine": symmetric_memory._describe_process()["machine"],
        "gpu": gpu or f"GPU-{rank}",
        "fabric": fabric,
        "number": rank if number is None else number,
        "may_share_gpu": shared == "1",
    }
    symmetric_memory._SymmetricMemory, symmetric_memory._place = FakeSymmetricMemory, lambda device: place
    torch.cuda.synchronize = lambda device: None


def open_on_gpu(bytes=4096):
    ranks = communicator()
    return symmetric_memory._on_gpu(ranks, ranks.cuda_group().group_name, bytes, CPU)


def check_gpu_window(rank):
    pretend_gpus(rank)
    opened = open_on_gpu()
    assert all(len(part) == 4096 and (part == 0).all() for part in opened.parts), "every rank's is zero, not only ours"
    assert opened.multicast == 1 << 40 and opened.rank == rank
    assert opened.owner[0] is FakeSymmetricMemory.window.mine
    assert [len(part) for part in open_on_gpu(0).parts] == [0, 0]


def test_memory_of_gpus_is_zeroed_before_anyone_sees_it():
    run_ranks(check_gpu_window, 2, backend=BOTH)


def watched_without_an_engine(rank):
    """A group of torch's own has no engine that notices a death."""

    class OwnMemory:
        multicast_ptr = 0
        get_buffer = staticmethod(lambda rank, shape, dtype: torch.zeros(shape, dtype=dtype))
        rendezvous = classmethod(lambda cls, memory, name: cls())

    pretend_gpus(rank)
    symmetric_memory._SymmetricMemory, symmetric_memory._zeros = OwnMemory, lambda bytes, device: torch.zeros(bytes)
    ranks = communicator()
    symmetric_memory._on_gpu(ranks, dist.group.WORLD.group_name, 4096, CPU)
    record = ranks.record(CPU)
    ranks.all_gather_object("both have a record")
    record.check()
    if rank == 1:
        os._exit(3)
    deadline = time.monotonic() + 10
    while record.memory[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(weft.RankLostError, match="rank 1 died or left"):
        record.check()
    os._exit(0)  # the group cannot be taken down in order


def test_a_death_in_a_group_without_an_engine_ends_waits():
    survivor, dead = try_ranks(watched_without_an_engine, 2, backend="gloo")
    assert survivor.exit_code == 0 and dead.exit_code == 3, survivor.traceback


def check_refusals(rank):
    pretend_gpus(rank)
    for fails_at, expected in (
        ("rendezvous", "rank 1 could not map the symmetric memory of its peers: .*peer access is not supported$"),
        ("quietly", "rank 1 could not map .*: torch does not know the memory"),
    ):
        FakeSymmetricMemory.fails_at = fails_at if rank == 1 else ""
        with pytest.raises(OSError, match=expected):
            open_on_gpu()
    FakeSymmetricMemory.fails_at = ""
    asked = []
    allocate = FakeSymmetricMemory.empty_strided_p2p

    def none_for_rank_0(size, *rest):
        asked.append(size)
        if rank == 0:
            raise RuntimeError("CUDA driver error: out of memory\nC++ frames follow")
        return torch.empty(size, dtype=torch.uint8)

    FakeSymmetricMemory.empty_strided_p2p = staticmethod(none_for_rank_0)
    with pytest.raises(OSError, match="rank 0 could not get 4096 bytes of symmetric memory: .*out of memory$"):
        open_on_gpu()
    with pytest.raises(
        weft.CollectiveMismatchError, match='group "default_pg": rank 0 asks for 100 bytes, rank 1 for 101'
    ):
        open_on_gpu(100 + rank)
    FakeSymmetricMemory.empty_strided_p2p = allocate
    assert len(open_on_gpu().parts) == 2, "the group stays usable"


def test_memory_that_one_rank_cannot_have_is_refused_on_all():
    run_ranks(check_refusals, 2, backend=BOTH)


def check_one_gpu(rank):
    pretend_gpus(rank, gpu="GPU-0")
    with pytest.raises(ValueError, match="ranks 0 and 1 of group .* are on one .for tests, TORCH_SYMM_MEM"):
        open_on_gpu()
    pretend_gpus(rank, gpu="GPU-0", shared=str(rank))
    with pytest.raises(ValueError, match="are on one"):
        open_on_gpu()  # one rank permits it, the other does not
    pretend_gpus(rank, gpu="GPU-0", shared="1")
    assert len(open_on_gpu().parts) == 2


def test_ranks_on_one_gpu_are_refused_unless_all_permit_it():
    run_ranks(check_one_gpu, 2, backend=BOTH)


def check_equal_numbers(rank):
    """Each rank sees one GPU alone, another one, and calls it number 0."""
    pretend_gpus(rank)
    open_on_gpu()
    assert FakeSymmetricMemory.equal_numbers is None
    pretend_gpus(rank, number=0)
    assert len(open_on_gpu().parts) == 2 and FakeSymmetricMemory.equal_numbers == "1"
    assert "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES" not in os.environ


def test_gpus_that_their_ranks_see_alone_are_told_apart():
    run_ranks(check_equal_numbers, 2, backend=BOTH)


def check_machines(rank):
    pretend_gpus(rank)
    FakeSymmetricMemory.empty_strided_p2p = staticmethod(lambda size, *rest: torch.empty(size, dtype=torch.uint8))
    with pytest.raises(ValueError, match="a group on one machine; ranks 0 and 1 of group .default_pg. are on two"):
        open_on_gpu()
    with pytest.raises(ValueError, match="whose ranks are on one machine"):
        open_symmetric_memory(communicator(), 100, CPU)


def check_fabrics(rank):
    """GPUs of two machines reach each other's memory where one fabric joins them."""

    class Memory:
        multicast_ptr = 1 << 40
        get_buffer = staticmethod(lambda rank, shape, dtype: torch.zeros(shape, dtype=dtype))

        @classmethod
        def rendezvous(cls, memory, name):
            cls.equal_numbers = os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES")
            return cls()

    pretend_gpus(rank, number=rank % 2, fabric="cluster/1")
    symmetric_memory._SymmetricMemory, symmetric_memory._zeros = Memory, lambda bytes, device: torch.zeros(bytes)
    assert len(open_on_gpu().parts) == 4
    assert Memory.equal_numbers is None, "torch distinguishes GPUs of two machines, whatever their numbers"
    pretend_gpus(rank, fabric=f"cluster/{rank // 2}")
    with pytest.raises(ValueError, match="ranks 0 and 2 of group .* are on two, whose GPUs no NVLink fabric joins"):
        open_on_gpu()


def test_a_fabric_joins_the_gpus_of_two_machines():
    run_ranks(check_fabrics, 4, backend=BOTH, before=on_machines("aabb"))


NVML = """
#include <string.h>
static char name[16];
struct info { unsigned char cluster[16]; unsigned status, clique; unsigned char state; };
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByUUID(const char* uuid, void** handle) { *handle = strcpy(name, uuid); return 0; }
int nvmlDeviceGetGpuFabricInfo(void* handle, struct info* info) {
  const char* uuid = handle;
  memset(info, 0, sizeof *info);
  info->cluster[15] = strcmp(uuid, "GPU-alone") != 0;
  info->clique = 7;
  info->state = strcmp(uuid, "GPU-starting") != 0 ? 3 : 2;
  return strcmp(uuid, "GPU-old") == 0 ? 3 : 0;
}
"""


def test_the_fabric_of_a_gpu_is_asked_of_the_driver(tmp_path):
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here")
    (tmp_path / "nvml.c").write_text(NVML)
    library = str(tmp_path / "libnvml.so")
    subprocess.run([compiler, "-shared", "-fPIC", tmp_path / "nvml.c", "-o", library], check=True)
    assert symmetric_memory.fabric_of("GPU-1", library) == "0" * 31 + "1/7"
    assert [symmetric_memory.fabric_of(gpu, library) for gpu in ("GPU-alone", "GPU-starting", "GPU-old")] == [""] * 3
    assert symmetric_memory.fabric_of("GPU-1", str(tmp_path / "none.so")) == "", "no driver"


def test_a_group_of_two_machines_is_refused_on_every_rank():
    for outcome in try_ranks(check_machines, 2, backend=BOTH, before=on_machines("ab")):
        assert outcome.error is None, outcome.traceback


def check_devices(rank):
    with pytest.raises(ValueError, match="there is symmetric memory on cpu and cuda devices, not on meta"):
        open_symmetric_memory(communicator(), 100, torch.device("meta"))


def test_other_devices_are_refused():
    run_ranks(check_devices, 1)


def test_the_name_of_a_device_distinguishes_it_from_others(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("Properties", (), {"uuid": "b71c"}))
    monkeypatch.setenv("WEFT_HOST", "left")
    monkeypatch.delenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", raising=False)
    monkeypatch.setattr(symmetric_memory, "fabric_of", lambda gpu: f"of {gpu}")
    machine = f"left, {os.readlink('/proc/self/ns/pid')}"
    place = {"machine": machine, "gpu": "b71c", "fabric": "of GPU-b71c", "number": 1, "may_share_gpu": False}
    assert symmetric_memory._place(torch.device("cuda", 1)) == place
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    assert symmetric_memory._place(CPU)["may_share_gpu"]
