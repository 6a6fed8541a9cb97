"""Collectives of tensors on GPUs: which transport, what kernels are asked for, and what becomes of waits that fail.

Without a GPU, host memory stands for a GPU's: the communicator, the windows, the record and the agreement of the ranks
are the real ones, and `FakeRanks` does in Python what the extension's kernels do, with flags and bounded waits. On a GPU
the same laws are tested with the kernels, by processes that share one device; each runs this file as a script.
"""

import contextlib
import ctypes
import gc
import importlib
import itertools
import os
import re
import sys
import threading
import time
import zlib
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.nn.functional import rms_norm

import weft
from weft import _C
from weft.bench import tune_collectives
from weft.comm import backend
from weft.comm import cuda as gpus
from weft.comm import wait_record as records
from weft.comm.backend_communicator import BackendCommunicator
from weft.comm.crossovers import NEVER, Crossovers, crossovers, default_crossovers, table_text
from weft.comm.cuda import DeviceCommunicator
from weft.comm.engine_communicator import EngineCommunicator
from weft.comm.p2p import send_recv
from weft.comm.registry import communicator
from weft.comm.symmetric_memory import open_symmetric_memory
from weft.ops import kernel_choice
from weft.pipeline import pipeline
from weft.pipeline.tied_params import Ties
from weft.pipeline.timing import ClockedStage
from weft.testing import reference
from weft.testing.ranks import SHARED_GPU, from_file, run_ranks, try_ranks

BOTH = "cpu:weft,cuda:gloo"
LARGEST_BYTES = 8 << 20  # of staging memory, and the default from which NCCL is taken
TYPES = (torch.float32, torch.float16, torch.bfloat16)
CPU = torch.device("cpu")


# A stand-in for the extension's kernels.


def memory_at(address, count, dtype):
    if count == 0:
        return torch.empty(0, dtype=dtype)
    bytes = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(bytes, dtype=dtype)


class FakeRanks:
    """weft._C.cuda.Ranks over host memory: it stages, meets by flags, sums in rank order, meets again."""

    log: ClassVar[list] = []  # of this process: (name, arguments that decide how)

    def __init__(self, rank, pads, pad_words, workspace, workspace_bytes, record, timeout_s, blocks):
        self.rank, self.world, self.workspace, self.timeout_s = rank, len(pads), workspace, timeout_s
        self.pads = [(ctypes.c_uint32 * pad_words).from_address(pad) for pad in pads]
        self.record = (ctypes.c_int64 * 16).from_address(record)
        self.workspace_bytes = workspace_bytes
        self.marks = [rank]
        self.low_latency_bytes = 2048

    def rms_norm_rows(self, hidden, dtype):
        return 4 if hidden <= 200 else 0

    def load(self):
        return True

    def meet(self, *call):
        """Whether every rank came, with the same call."""
        flag = zlib.crc32(repr(call).encode()) | 1
        others = [peer for peer in range(self.world) if peer != self.rank]
        for peer in others:
            if not self.wait(peer, lambda peer=peer: self.pads[peer][self.rank] == 0, 0):
                return False
            self.pads[peer][self.rank] = flag
        for peer in others:
            if not self.wait(peer, lambda peer=peer: self.pads[self.rank][peer] != 0, flag):
                return False
            if self.pads[self.rank][peer] != flag:
                return self.give_up(2, peer, self.pads[self.rank][peer], flag)
            self.pads[self.rank][peer] = 0
        return True

    def wait(self, peer, done, expected):
        deadline = time.monotonic() + self.timeout_s
        while not done():
            if self.record[0] != 0 or time.monotonic() > deadline:
                return done() or self.give_up(1, peer, self.pads[self.rank][peer], expected)
            time.sleep(0)
        return True

    def give_up(self, state, peer, seen, expected):
        if self.record[0] == 0:
            self.record[1:8] = [self.rank, 2, 22, peer, 0, seen, expected]
            self.record[0] = state
        self.pads[self.rank][self.rank] = 1
        return False

    def all_reduce(self, source, destination, count, dtype, average, scale, algorithm, stream):
        FakeRanks.log.append((algorithm, count, dtype))
        dtype = getattr(torch, dtype)
        most = self.workspace_bytes // dtype.itemsize
        for begin in range(0, max(count, 1), most):
            length, offset = min(most, count - begin), begin * dtype.itemsize
            memory_at(self.workspace[self.rank], length, dtype).copy_(memory_at(source + offset, length, dtype))
            output = memory_at(destination + offset, length, dtype)
            going = self.meet("all_reduce", count, dtype, average, scale, algorithm, begin)
            if going:
                total = self.sum(self.workspace, length, dtype, average, scale)
            if going and self.meet("read"):
                output.copy_(total)
            else:
                output.fill_(float("nan"))

    def all_reduce_rms_norm(self, partial, residual, weight, normalised, total, rows, hidden, dtype, eps, stream):
        FakeRanks.log.append(("all_reduce_rms_norm", rows, hidden, dtype))
        count, dtype = rows * hidden, getattr(torch, dtype)
        sums = memory_at(total, count, dtype)
        memory_at(self.workspace[self.rank], count, dtype).copy_(memory_at(partial, count, dtype))
        if self.meet("all_reduce_rms_norm", rows, hidden, dtype, eps):
            sums.copy_(memory_at(residual, count, dtype) + self.sum(self.workspace, count, dtype, False, 1.0))
            norm = rms_norm(sums.view(rows, hidden), (hidden,), memory_at(weight, hidden, dtype), eps)
            if self.meet("read"):
                memory_at(normalised, count, dtype).copy_(norm.view(-1))
                return
        for address in (normalised, total):
            memory_at(address, count, dtype).fill_(float("nan"))

    def all_reduce_in_place(self, addresses, count, dtype, average, scale, stream, offset=0):
        FakeRanks.log.append(("in_place", count, dtype))
        dtype = getattr(torch, dtype)
        mine = memory_at(addresses[self.rank], count, dtype)
        if self.meet("in_place", count, dtype, average, scale, offset):
            total = self.sum(addresses, count, dtype, average, scale)
            if self.meet("summed"):
                mine.copy_(total)
                return
        mine.fill_(float("nan"))

    def all_reduce_multimem(self, multicast, count, dtype, average, scale, stream, offset=0, own=0):
        FakeRanks.log.append(("multimem", multicast, own))

    def reduce_scatter(self, source, destination, counts, dtype, average, scale, stream):
        FakeRanks.log.append(("reduce_scatter", tuple(counts), dtype))
        dtype = getattr(torch, dtype)
        memory_at(self.workspace[self.rank], sum(counts), dtype).copy_(memory_at(source, sum(counts), dtype))
        output = memory_at(destination, counts[self.rank], dtype)
        if self.meet("reduce_scatter", counts, dtype, average, scale):
            skipped = sum(counts[: self.rank]) * dtype.itemsize
            total = self.sum([at + skipped for at in self.workspace], counts[self.rank], dtype, average, scale)
            if self.meet("read"):
                output.copy_(total)
                return
        output.fill_(float("nan"))

    def all_gather(self, source, destinations, bytes, stream):
        FakeRanks.log.append(("all_gather", tuple(bytes)))
        mine = memory_at(source, bytes[self.rank], torch.uint8)
        memory_at(self.workspace[self.rank], len(mine), torch.uint8).copy_(mine)
        assert self.meet("all_gather", bytes)
        self.gather(self.workspace, destinations, bytes)

    def reduce_scatter_in_place(self, window, offset, destination, counts, dtype, average, scale, stream, number=0):
        FakeRanks.log.append(("reduce_scatter_in_place", tuple(counts), dtype))
        dtype = getattr(torch, dtype)
        output = memory_at(destination, counts[self.rank], dtype)
        places = self.share_offset(window, offset)
        if self.meet("reduce_scatter_in_place", counts, dtype, average, scale, number):
            skipped = sum(counts[: self.rank]) * dtype.itemsize
            total = self.sum([at + skipped for at in places()], counts[self.rank], dtype, average, scale)
            if self.meet("read"):
                output.copy_(total)
                return
        output.fill_(float("nan"))

    def all_gather_in_place(self, window, offset, destinations, bytes, unit, stream, number=0):
        FakeRanks.log.append(("all_gather_in_place", tuple(bytes)))
        places = self.share_offset(window, offset)
        assert self.meet("all_gather_in_place", bytes, unit, number)
        self.gather(places(), destinations, bytes)

    def all_gather_by_copies(self, sources, destinations, bytes, stream, number=0):
        FakeRanks.log.append(("all_gather_by_copies", tuple(bytes)))
        assert self.meet("all_gather_by_copies", bytes, number)
        self.gather(sources, destinations, bytes)

    def share_offset(self, window, offset):
        """Each rank's source in its window, by its own word; valid after a meeting."""
        offsets = [ctypes.c_uint64.from_address(workspace) for workspace in self.workspace]
        offsets[self.rank].value = offset
        return lambda: [at + place.value for at, place in zip(window, offsets, strict=True)]

    def gather(self, sources, destinations, bytes):
        for at, to, size in zip(sources, destinations, bytes, strict=True):
            if at != to:
                memory_at(to, size, torch.uint8).copy_(memory_at(at, size, torch.uint8))
        assert self.meet("read")

    def sum(self, addresses, count, dtype, average, scale):
        parts = [memory_at(address, count, dtype) for address in addresses]
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        if average:
            total = total / self.world
        return (total * torch.tensor(scale)).to(dtype)


class FakeStream:
    captures = False
    of_thread = threading.local()  # `captures` there, for threads that stand for streams

    def __init__(self, device):
        self.device = device

    def capturing(self):
        return getattr(FakeStream.of_thread, "captures", FakeStream.captures)

    def on_device(self):
        return contextlib.nullcontext()

    def next(self):
        return contextlib.nullcontext((0, self.capturing()))


def lent_memory(lent):
    bytes = (ctypes.c_uint8 * lent.bytes).from_address(lent.address)
    bytes.lent = lent  # as __cuda_array_interface__ keeps it
    return torch.frombuffer(bytes, dtype=torch.uint8)


def pretend(timeout_s=20.0):
    """From here on in this process, host memory is a GPU's, for communicators that may use one."""
    backend._DEVICE_TYPE = "cpu"
    gpus._DEVICE_TYPE, gpus._ranks, gpus.StreamOrder, gpus._as_tensor = "cpu", FakeRanks, FakeStream, lent_memory
    if _C.cuda is None:  # built without CUDA
        _C.cuda = SimpleNamespace(state=lambda: {"driver": ""})
    dist.group.WORLD.timeout = timedelta(seconds=timeout_s)
    dist.group.WORLD.group_here = None  # whose calls in C++ know a CPU tensor
    FakeRanks.log.clear()
    return communicator()


def pretended_symmetric(count, dtype=torch.float32, multicast=0):
    ranks = communicator()
    opened = open_symmetric_memory(ranks, count * dtype.itemsize, CPU)
    return ranks.lend(replace(opened, multicast=multicast)).view(dtype)


def last_logged():
    return FakeRanks.log[-1]


def torchs_own(rank):
    """torch.distributed's calls on CUDA tensors, here pretended by fp64, go to the CUDA half and nowhere else."""
    backend._on_gpu, gpus._DEVICE_TYPE = (lambda x: x.dtype == torch.float64), "cpu"
    backend._DEVICE_TYPE = "cpu"
    group, world = dist.group.WORLD, dist.get_world_size()
    group.group_here = None  # whose calls in C++ know a CPU tensor
    calls = group.engine.group.calls
    x = torch.full((3,), rank + 1.0, dtype=torch.float64)
    dist.all_reduce(x)
    assert (x == sum(range(world + 1))).all()
    whole = torch.empty(world * 3, dtype=torch.float64)
    dist.all_gather_into_tensor(whole, torch.full((3,), float(rank), dtype=torch.float64))
    assert whole.tolist() == [float(r) for r in range(world) for _ in range(3)]
    parts = [torch.empty(1, dtype=torch.float64) for _ in range(world)]
    dist.all_gather(parts, torch.full((1,), float(rank), dtype=torch.float64))
    assert [part.item() for part in parts] == list(range(world))
    dist.broadcast(x.fill_(rank), src=1)
    assert (x == 1).all()
    if rank == 0:
        dist.send(x, 1)
    elif rank == 1:
        dist.recv(x, 0)
    after = group.engine.group.calls
    dist.all_reduce(torch.ones(2))
    assert after == calls and group.engine.group.calls == calls + 1


def test_torchs_collectives_of_cuda_tensors_go_to_the_other_backend():
    run_ranks(torchs_own, 3, backend="cpu:weft,cuda:gloo")


def no_other_backend(rank):
    backend._on_gpu = lambda x: True
    dist.group.WORLD.group_here = None
    with pytest.raises(TypeError, match='start the group with the backend "cpu:weft,cuda:nccl"'):
        dist.all_reduce(torch.ones(2))


def test_without_another_backend_a_cuda_tensor_is_refused():
    run_ranks(no_other_backend, 2)


# The same laws for both.


def check_collectives(rank, device):
    """Every collective of layers has the bits of the reference, whatever the type, the size and the split."""
    world = dist.get_world_size()
    for dtype in TYPES:
        for count in (0, 1, 7, 1000, 100_003, 600_001):
            torch.manual_seed(count)
            parts = [(torch.randn(count, dtype=torch.float64) * 9).to(dtype) for _ in range(world)]
            x = parts[rank].to(device, copy=True)
            assert weft.all_reduce(x) is x
            assert torch.equal(x.cpu(), reference.reduce(parts)), (dtype, count)
            x = weft.all_reduce(parts[rank].to(device, copy=True), op="avg", scale=0.37)
            assert torch.equal(x.cpu(), reference.fused_sum(parts, None, 0.37, average=True)), (dtype, count)
        parts = [torch.randn(world + 2, 6, dtype=torch.float64).to(dtype) for _ in range(world)]
        strided = parts[rank].to(device, copy=True).t()
        assert torch.equal(weft.all_reduce(strided).cpu(), reference.reduce([part.t() for part in parts]))
        for dim in (0, 1):
            sizes = weft.split_sizes(parts[0].size(dim), world)
            mine = weft.reduce_scatter(parts[rank].to(device), dim=dim)
            assert torch.equal(mine.cpu(), reference.reduce(parts).split(sizes, dim)[rank])
            assert torch.equal(weft.all_gather(mine, dim=dim).cpu(), reference.reduce(parts))
    numbers = torch.arange(5, device=device) + rank
    gathered = weft.all_gather(numbers[: rank + 1])
    assert gathered.tolist() == [i + r for r in range(world) for i in range(r + 1)], "any type can be gathered"
    norm = torch.zeros(1, dtype=torch.float64)
    parts = [torch.full((1000,), 0.1 * (r + 1)) for r in range(world)]
    x = weft.all_reduce(parts[rank].to(device, copy=True), wire_dtype=torch.bfloat16, scale=0.5, squared_norm=norm)
    assert torch.equal(x.cpu(), reference.fused_sum(parts, torch.bfloat16, 0.5))
    assert torch.allclose(norm, x.cpu().double().square().sum())
    weft.check_waits()


def check_norm(rank, device, empty=None):
    """A norm of the sum is that of an all_reduce, an addition and torch's norm, whichever way it goes."""
    world = dist.get_world_size()
    for dtype in TYPES:
        for shape in ((1, 64), (3, 97), (2, 2, 200), (5, 100), (1, 5000), (600, 33), (96,), (1, 0)):
            if empty and not all(shape):
                continue  # there is no symmetric memory of no bytes
            torch.manual_seed(sum(shape))
            parts = [torch.randn(shape).to(dtype) for _ in range(world)]
            residual, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
            partial = (
                empty(parts[rank].numel(), dtype).view(shape) if empty else torch.empty(shape, device=device).to(dtype)
            )
            partial.copy_(parts[rank])
            given = residual.to(device)
            normalised, total = weft.all_reduce_rms_norm(partial, given, weight.to(device), 1e-5)
            expected = residual + reference.reduce(parts)
            assert torch.equal(total.cpu(), expected) and torch.equal(given.cpu(), residual), (dtype, shape)
            exact = rms_norm(expected.double(), weight.shape, weight.double(), 1e-5)
            assert normalised.dtype == dtype and normalised.shape == shape
            eps = torch.finfo(dtype).eps  # half of it is the result's rounding; fp32's are smaller in the other types
            torch.testing.assert_close(
                normalised.cpu().double(), exact, rtol=(8 if dtype == torch.float32 else 0.52) * eps, atol=1e-7
            )
    weft.check_waits()


def norm_in_one_kernel(rank):
    pretend()
    check_norm(rank, "cpu")
    norms = [logged for logged in FakeRanks.log if logged[0] == "all_reduce_rms_norm"]
    assert norms == [
        ("all_reduce_rms_norm", *rows, str(dtype).removeprefix("torch."))
        for dtype in TYPES
        for rows in ((1, 64), (3, 97), (4, 200), (1, 96))
        if rows[0] * rows[1] * dtype.itemsize <= 2048
    ]
    check_norm(rank, "cpu", pretended_symmetric)
    x = torch.ones(4, 100)
    ranks, before = communicator(), len(FakeRanks.log)
    ranks.crossovers = replace(ranks.crossovers, one_shot=1600)
    weft.all_reduce_rms_norm(x, x, x[0], 1e-5)
    assert FakeRanks.log[before:] == [("one_shot", 400, "float32")], "where all_reduce is not low-latency"
    weft.all_reduce_rms_norm(x[:3].t().contiguous().t(), x[:3], x[0], 1e-5)
    assert last_logged() == ("all_reduce_rms_norm", 3, 100, "float32"), "a copy, if it is not in one piece"


@pytest.mark.parametrize("world", [2, 3])
def test_a_norm_of_a_small_sum_is_one_kernel(world):
    run_ranks(norm_in_one_kernel, world, backend=BOTH)


def check_symmetric(rank, empty):
    """What lies in symmetric memory is reduced there, all of it or a part."""
    world = dist.get_world_size()
    for dtype in TYPES:
        for count in (1, 1000, 100_003):
            torch.manual_seed(count)
            parts = [torch.randn(count).to(dtype) for _ in range(world)]
            x = empty(count, dtype)
            assert x.shape == (count,) and x.dtype == dtype and (x == 0).all()
            for begin in (0, count // 3):
                x.copy_(parts[rank])
                assert weft.all_reduce(x[begin:]).data_ptr() == x[begin:].data_ptr()
                assert torch.equal(x[begin:].cpu(), reference.reduce([part[begin:] for part in parts]))
                assert torch.equal(x[:begin].cpu(), parts[rank][:begin])
            check_symmetric_parts(rank, x, parts)
    weft.check_waits()


def check_symmetric_parts(rank, x, parts):
    """Gathering and scattering read symmetric memory where it lies, at a place of each rank's own."""
    world, count, ranks = len(parts), len(x), communicator()
    sizes = [count // world + (r < count % world) for r in range(world)]  # some are 0 if count is small
    x.copy_(parts[rank])
    mine = torch.empty(sizes[rank], dtype=x.dtype, device=x.device)
    ranks.reduce_scatter_into(list(x.split(sizes)), mine)
    assert torch.equal(mine.cpu(), reference.reduce(parts).split(sizes)[rank])
    own = x[rank : max(rank, count - 1)]
    lengths = [max(r, count - 1) - r for r in range(world)]
    gathered = [torch.empty(length, dtype=x.dtype, device=x.device) for length in lengths]
    ranks.all_gather_into(own, gathered)
    assert all(torch.equal(got.cpu(), parts[r][r : r + lengths[r]]) for r, got in enumerate(gathered))
    slots = list(x.split(sizes))
    ranks.all_gather_into(slots[rank], slots)  # each rank's part is in its slot already
    assert all(torch.equal(slot.cpu(), parts[r].split(sizes)[r]) for r, slot in enumerate(slots))
    ranks.reduce_scatter_into([part.fill_(rank + 1) for part in slots], slots[rank])
    assert (slots[rank] == world * (world + 1) // 2).all()


@pytest.mark.parametrize("world", [2, 3])
def test_collectives_have_the_bits_of_the_reference(world):
    def check(rank):
        assert isinstance(pretend(), DeviceCommunicator)
        check_collectives(rank, "cpu")

    run_ranks(check, world, backend=BOTH)


@pytest.mark.parametrize("world", [2, 3])
def test_symmetric_memory_is_reduced_where_it_lies(world):
    def check(rank):
        pretend()
        check_symmetric(rank, pretended_symmetric)
        names = {"in_place", "reduce_scatter_in_place", "all_gather_in_place"}
        assert {name for name, *_ in FakeRanks.log} == names
        communicator().crossovers = replace(communicator().crossovers, copies=0)
        FakeRanks.log.clear()
        check_symmetric(rank, pretended_symmetric)
        assert {name for name, *_ in FakeRanks.log} == {*names, "all_gather_by_copies"}

    run_ranks(check, world, backend=BOTH)


def dispatch(rank):
    """Which way a call goes: by type, operator, size and number of ranks."""
    world = dist.get_world_size()
    ranks = pretend()
    small, large = torch.ones(1000), torch.ones(LARGEST_BYTES // 4 + 1000)
    weft.all_reduce(small[:512])
    assert last_logged() == ("low_latency", 512, "float32"), "as much as fits the boxes"
    weft.all_reduce(small)
    assert last_logged() == ("one_shot", 1000, "float32")
    ranks.crossovers = replace(ranks.crossovers, one_shot=1025)
    weft.all_reduce(small[:256])
    assert last_logged()[0] == "low_latency"
    weft.all_reduce(small[:257])
    assert last_logged()[0] == "one_shot"
    first_two_shot = torch.ones(min(ranks.crossovers.two_shot // 2, LARGEST_BYTES), dtype=torch.bfloat16)
    weft.all_reduce(first_two_shot[:-1])
    assert last_logged()[0] == "one_shot"
    weft.all_reduce(first_two_shot)
    assert last_logged() == ("two_shot" if world > 2 else "one_shot", len(first_two_shot), "bfloat16")
    calls = len(FakeRanks.log)
    assert (weft.all_reduce(torch.ones(5, dtype=torch.float64)) == world).all()
    assert (weft.all_reduce(torch.ones(5, dtype=torch.int64)) == world).all()
    assert (weft.all_reduce(torch.full((5,), float(rank)), op="max") == world - 1).all()
    assert (weft.broadcast(torch.full((5,), float(rank)), src=1) == 1).all()
    assert len(FakeRanks.log) == calls, "the backend's: another type or operator"
    assert (weft.all_reduce(large) == world).all()
    assert len(FakeRanks.log) == calls + 1, "gloo goes through the host: larger tensors are the kernels' in pieces"
    ranks._backend_name = "nccl"
    assert (weft.all_reduce(large.fill_(1)) == world).all()
    assert (weft.all_reduce(large.fill_(1), scale=0.5) == world / 2).all()
    assert len(FakeRanks.log) == calls + 3, "sums are in the order of ranks"
    assert (weft.all_reduce(large.fill_(1), deterministic=False) == world).all()
    assert weft.all_gather(large, dim=0).shape == (world * len(large),)
    assert len(FakeRanks.log) == calls + 4, "any order, or no sum: NCCL's (but for the sizes, which are gathered)"
    symmetric = pretended_symmetric(len(large)).fill_(1)
    assert (weft.all_reduce(symmetric) == world).all()
    assert last_logged()[0] == "in_place", "nothing is staged: the kernels', whatever the size"
    weft.all_reduce(symmetric[:400:2])
    assert last_logged() == ("low_latency", 200, "float32"), "not in one piece: through a copy"


@pytest.mark.parametrize("world", [2, 3])
def test_type_operator_and_size_decide_who_does_it(world):
    run_ranks(dispatch, world, backend=BOTH)


def test_crossovers_cover_every_number_of_ranks():
    assert [default_crossovers(world).two_shot >> 10 for world in (3, 4, 5, 8, 9, 72)] == [512, 512, 256, 256, 128, 128]
    assert default_crossovers(2).two_shot > LARGEST_BYTES, "two ranks read as much either way"


def test_crossovers_are_of_the_table_if_it_has_enough_ranks(tmp_path):
    of_4, of_8 = Crossovers(1, 2, 3, 4), Crossovers(5, 6, 7, 8)
    (tmp_path / "sm_90.json").write_text(table_text({8: of_8, 4: of_4}, {"device": "a GPU"}))
    assert [crossovers("sm_90", world, tmp_path) for world in (2, 4, 5, 8)] == [of_4, of_4, of_8, of_8]
    assert crossovers("sm_90", 9, tmp_path) == default_crossovers(9)
    assert crossovers("sm_80", 4, tmp_path) == default_crossovers(4)


def forced_algorithms(rank):
    """What `weft tune collectives` calls takes the algorithm that it names."""
    ranks = pretend()
    weft.all_reduce(torch.ones(1))
    ordinary, symmetric = torch.zeros(4096), pretended_symmetric(4096)
    for size, low_latency in ((2048, True), (8192, False)):
        found = tune_collectives.calls(ranks, size, ordinary, symmetric)
        names = {"low_latency", "one_shot", "two_shot", "nccl", "gather", "gather by nccl", "in place", "copies"}
        assert set(found) == (names if low_latency else names - {"low_latency"})
        logged = {"gather": "all_gather", "in place": "all_gather_in_place", "copies": "all_gather_by_copies"}
        ranks._backend_name = "nccl"
        for name, several in found.items():
            before = len(FakeRanks.log)
            several()
            made = [name for name, *_ in FakeRanks.log[before:]]
            assert made == ([] if "nccl" in name else [logged.get(name, name)] * tune_collectives._REPEATS), name


def test_tuning_measures_what_it_names():
    run_ranks(forced_algorithms, 2, backend=BOTH)


def differing_tables(rank):
    gpus.crossovers = lambda architecture, world: Crossovers(rank, NEVER, NEVER, NEVER)
    ranks = pretend()
    weft.all_reduce(torch.ones(1))
    assert ranks.crossovers.one_shot == 0, "of rank 0, on every rank"


def test_ranks_with_different_tables_use_one():
    run_ranks(differing_tables, 2, backend=BOTH)


def switch_sums(rank):
    pretend()
    x = pretended_symmetric(1024, multicast=1 << 40)
    weft.all_reduce(x)
    assert last_logged()[0] == "in_place", "deterministic unless it is allowed not to be"
    weft.all_reduce(x[256:], deterministic=False)
    assert last_logged() == ("multimem", (1 << 40) + 1024, x[256:].data_ptr())
    for part in (x[1:], x[:-1]):
        weft.all_reduce(part.fill_(1), deterministic=False)
        assert last_logged()[0] == "in_place", "multimem takes whole vectors of 16 bytes"
    weft.all_reduce(pretended_symmetric(1024), deterministic=False)
    assert last_logged()[0] == "in_place", "no multicast address"
    weft.all_reduce(torch.ones(1024), deterministic=False)
    assert last_logged()[0] == "one_shot", "not in symmetric memory"


def test_the_switch_sums_only_where_it_may_and_can():
    run_ranks(switch_sums, 2, backend=BOTH)


def one_without_multimem(rank):
    class Ranks(FakeRanks):
        def load(self):
            return rank == 0

    pretend()
    gpus._ranks = Ranks
    x = pretended_symmetric(1024, multicast=1 << 40).fill_(1)
    assert (weft.all_reduce(x, deterministic=False) == 2).all()
    assert last_logged()[0] == "in_place"


def test_without_the_switchs_kernels_on_every_rank_sums_are_in_place():
    run_ranks(one_without_multimem, 2, backend=BOTH)


def other_parts(rank):
    pretend()
    x = pretended_symmetric(100)
    with pytest.raises(weft.CollectiveMismatchError, match="place in symmetric memory"):
        for _ in range(2):  # the first call finds out, the next one says so
            weft.all_reduce(x[:50] if rank else x[50:])
    assert x.isnan().any()


def test_another_part_of_symmetric_memory_is_found_out():
    run_ranks(other_parts, 2, backend=BOTH)


def lives_with_its_tensors(rank):
    ranks = pretend()
    x = pretended_symmetric(100)
    part = x[50:]
    del x
    gc.collect()
    weft.all_reduce(part)
    assert last_logged()[0] == "in_place"
    del part
    gc.collect()
    assert [one() for one in ranks._lent] == [None]
    pretended_symmetric(1)
    assert len(ranks._lent) == 1


def test_symmetric_memory_lives_as_long_as_a_tensor_in_it():
    run_ranks(lives_with_its_tensors, 2, backend=BOTH)


def asks_the_extension(rank):
    """Everything up to the launch, which fails here: there is no device."""

    class Loaded(_C.cuda.Ranks):
        def load(self):
            return True

    pretend()
    gpus._ranks = Loaded
    x, symmetric = torch.ones(100), pretended_symmetric(128, multicast=1 << 40)
    for call in (
        lambda: weft.all_reduce(x),
        lambda: weft.all_reduce(x.bfloat16(), op="avg", scale=0.5),
        lambda: weft.all_reduce_rms_norm(x.view(2, 50), x.view(2, 50), x[:50], 1e-6),
        lambda: weft.all_reduce(symmetric),
        lambda: weft.all_reduce(symmetric, deterministic=False),
        lambda: weft.reduce_scatter(x),
        lambda: weft.all_gather(x),
        lambda: weft.reduce_scatter(symmetric),
        lambda: communicator().all_gather_into(symmetric, [torch.empty(128) for _ in range(2)]),
        lambda: communicator().all_gather_into(symmetric[64 * rank :][:64], list(symmetric.split(64))),
    ):
        with pytest.raises(RuntimeError, match=r"cudaError\w+ \("):
            call()


@pytest.mark.skipif(_C.cuda is None, reason="built without CUDA")
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels would run on host memory")
def test_the_extension_takes_what_it_is_asked():
    run_ranks(asks_the_extension, 2, backend=BOTH)


# What is chosen, and when.


def host_tensors(rank):
    ranks = communicator()
    assert isinstance(ranks, DeviceCommunicator) and ranks.engine is not None
    calls = dist.group.WORLD.engine.group.calls
    x = torch.ones(10)
    assert (weft.all_reduce(x) == 2).all()
    assert (weft.all_gather(x) == 2).all() and (weft.reduce_scatter(x) == 4).all()
    assert (weft.broadcast(x) == 2).all() and len(weft.all_to_all([x, x])) == 2
    assert dist.group.WORLD.engine.group.calls > calls, "the engine did it"
    assert ranks.transport == "shared memory; for CUDA tensors chosen at their first collective"
    assert communicator() is ranks and ranks.record(CPU) is ranks.record(CPU)
    assert weft.empty_symmetric(10).shape == (10,)


def test_host_tensors_of_a_group_for_both_go_to_the_engine():
    run_ranks(host_tensors, 2, backend=BOTH)


def plain_group(rank):
    ranks = communicator()
    assert isinstance(ranks, DeviceCommunicator) and isinstance(ranks.host, BackendCommunicator)
    assert communicator() is ranks and ranks.cuda_group() is dist.group.WORLD
    assert ranks.transport == "gloo; for CUDA tensors chosen at their first collective"
    assert ranks.timeout_s == 30
    os.environ["WEFT_WAIT_TIMEOUT_S"] = "0.5"
    assert ranks.timeout_s == 0.5, "a kernel that waits holds the GPU"
    os.environ["WEFT_WAIT_TIMEOUT_S"] = "soon"
    with pytest.raises(ValueError, match="WEFT_WAIT_TIMEOUT_S=soon must be a number of seconds"):
        _ = ranks.timeout_s
    assert (weft.all_reduce(torch.ones(3)) == 2).all()
    part = dist.new_group([0, 1])
    assert communicator(part) is not ranks
    dist.destroy_process_group(part)
    other = dist.new_group([0, 1])
    communicator(other)
    assert part not in sys.modules["weft.comm.registry"]._of_group, "nothing keeps a group that was destroyed"
    with pytest.raises(ValueError, match='needs a group of the "weft" backend'):
        weft.empty_symmetric(3)


def test_a_group_of_torchs_own_is_served_by_its_backend():
    run_ranks(plain_group, 2, backend="gloo")


def only_weft(rank):
    assert type(communicator()) is EngineCommunicator and communicator().cuda_group() is None
    assert communicator().transport == "shared memory"
    with pytest.raises(ValueError, match="needs a group that has a backend for cuda, as .cpu:weft,cuda:nccl.;"):
        open_symmetric_memory(communicator(), 100, torch.device("cuda"))


def test_a_group_of_weft_alone_has_nothing_for_gpus():
    run_ranks(only_weft, 2)


def halves(rank):
    """torch keeps the weft half of the group alone; the other half is made when it is first needed, and ends with it."""
    ranks = communicator()
    half = ranks.cuda_group()
    assert half is ranks.cuda_group() and half.group_name == f"{dist.group.WORLD.group_name}/cuda"
    assert [device.type for device in half._device_types] == ["cuda"] and half.size() == 2 and half.rank() == rank
    assert dist.get_process_group_ranks(half) == [0, 1]
    half.get_group_store().set(f"from {rank}", "x")
    assert half.get_group_store().get(f"from {1 - rank}") == b"x", "the store that symmetric memory meets over"
    part = communicator(dist.new_group([0, 1]))
    assert part.cuda_group().group_name == f"{part.group.group_name}/cuda" and part.cuda_group() is not half
    dist.barrier()  # both have connected
    dist.destroy_process_group()
    assert half not in dist.distributed_c10d._world.pg_map


def test_the_cuda_half_of_a_group_for_both_is_made_when_needed():
    for outcome in try_ranks(halves, 2, backend=BOTH):
        assert outcome.error is None, outcome.traceback


def one_rank_cannot(rank):
    ranks = pretend()
    opened = gpus.open_symmetric_memory

    def limited(*arguments):
        # A rank that cannot get the memory: all hear of it, and raise the same.
        answers = ranks.all_gather_object("no driver" if rank == 1 else "")
        raise OSError(f"rank {1} could not get memory: {answers[1]}") if any(answers) else opened(*arguments)

    gpus.open_symmetric_memory = limited
    assert (weft.all_reduce(torch.ones(10)) == 3).all()
    assert (weft.all_gather(torch.ones(rank + 1)) == 1).all()
    assert (weft.reduce_scatter(torch.ones(5)) == 3).all()
    assert FakeRanks.log == []
    assert ranks.transport == "gloo; weft's kernels do not run: rank 1 could not get memory: no driver"
    return ranks.transport


def test_one_rank_that_cannot_get_the_memory_decides_for_all():
    assert len(set(run_ranks(one_rank_cannot, 3, backend=BOTH))) == 1


def one_rank_is_refused(rank):
    ranks = pretend()

    class Refused(FakeRanks):
        def load(self):
            if rank == 1:
                raise RuntimeError("barrier: cudaErrorNoKernelImageForDevice (no kernel image is available)")
            return True

    gpus._ranks = Refused
    gpus._built_for = lambda: "weft is built with CUDA 13.0 for sm_80, the driver's is 13.1"
    assert (weft.all_reduce(torch.ones(10)) == 2).all() and FakeRanks.log == []
    assert ranks.transport == (
        "gloo; weft's kernels do not run: rank 1: barrier: cudaErrorNoKernelImageForDevice (no kernel image is "
        "available); weft is built with CUDA 13.0 for sm_80, the driver's is 13.1"
    )


def test_one_rank_without_the_kernels_decides_for_all():
    run_ranks(one_rank_is_refused, 2, backend=BOTH)


def no_driver(rank):
    real = gpus._ranks
    ranks = pretend()
    gpus._ranks = real
    x = torch.ones(10)
    assert (weft.all_reduce(x) == 2).all() and (weft.all_reduce(x) == 4).all()
    of_driver = "(no driver|the driver's is .*)"  # a stub of one, if another test has loaded it into this process
    reason = rf"rank 0: barrier: cudaError\w+ \(.*\); weft is built with CUDA \d+\.\d+ for sm_80.*, {of_driver}"
    assert re.fullmatch(f"gloo; weft's kernels do not run: {reason}", ranks.transport), ranks.transport


@pytest.mark.skipif(_C.cuda is None, reason="built without CUDA")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_kernels_that_cannot_run_are_found_when_the_transport_is_chosen():
    run_ranks(no_driver, 2, backend=BOTH)


def transport_report(rank):
    ranks = pretend()
    weft.all_reduce(torch.ones(1))
    ways = "one-shot" if ranks.world_size == 2 else "one-shot below 512 KiB, then two-shot"
    assert ranks.transport == f"weft's kernels over symmetric memory (low latency to 2 KiB, {ways})"
    ranks._backend_name = "nccl"
    assert ranks.transport.endswith("; nccl above 8 MiB for what is not summed in order")
    ranks.crossovers = Crossovers(0, 0, NEVER, 0)
    assert ranks.transport == "weft's kernels over symmetric memory (two-shot)"
    with pytest.raises(ValueError, match="works on cpu and got a tensor on meta"):
        ranks._on(torch.device("meta"))


@pytest.mark.parametrize("world", [2, 3])
def test_the_transport_is_reported(world):
    run_ranks(transport_report, world, backend=BOTH)


def captured_first(rank):
    pretend()
    FakeStream.captures = True
    with pytest.raises(RuntimeError, match="run one before the capture"):
        weft.all_reduce(torch.ones(1))
    FakeStream.captures = False
    weft.all_reduce(torch.ones(1))
    FakeStream.captures = True
    assert (weft.all_reduce(torch.ones(1)) == 2).all(), "set up, it can be captured"


def test_setting_up_while_a_graph_is_captured_is_refused():
    run_ranks(captured_first, 2, backend=BOTH)


def check_rounds(rounds, *tensors):
    """Small sums back to back, each of what no other was of; the ranks do not wait for each other in between."""
    world, rank = dist.get_world_size(), dist.get_rank()
    wrong = torch.zeros((), dtype=torch.int64, device=tensors[0].device)
    for number in range(rounds):
        for x in tensors:
            x.fill_(number % 97 + rank)
            weft.all_reduce(x)
            wrong += (x != number % 97 * world + world * (world - 1) // 2).sum()
    weft.check_waits()
    assert wrong == 0


def rounds_of_sums(rank):
    pretend()
    check_rounds(40, torch.empty(64), torch.empty(1000), pretended_symmetric(64))
    assert {name for name, *_ in FakeRanks.log} == {"low_latency", "one_shot", "in_place"}


def test_sums_back_to_back_are_each_of_their_own_round():
    run_ranks(rounds_of_sums, 3, backend=BOTH)


def replay_beside_a_call(rank):
    """Here a thread is the stream of the replay, and its calls, as captured, run then."""
    pretend()
    weft.all_reduce(torch.ones(1))
    replayed, eager = torch.ones(20), torch.ones(30)

    def replay():
        FakeStream.of_thread.captures = True
        weft.all_reduce(replayed)

    stream = threading.Thread(target=replay)
    if rank == 0:
        stream.start()
        time.sleep(0.3)  # the replay waits for the other rank, which begins with the other call
    weft.all_reduce(eager)
    if rank == 1:
        stream.start()
    stream.join()
    assert (eager == 2).all() and (replayed == 2).all()
    weft.check_waits()


def test_a_replay_may_run_beside_other_calls():
    run_ranks(replay_beside_a_call, 2, backend=BOTH)


class Batches:
    """Runs batches of messages as NCCL does: one is done when its messages have been received, and then comes the next."""

    def __init__(self):
        self.real, self.made = dist.batch_isend_irecv, []

    def __call__(self, operations):
        self.made.append([(operation.op.__name__, operation.group_peer) for operation in operations])
        assert all(type(operation.group) is dist.ProcessGroup for operation in operations), "torch's rule for one call"
        for work in self.real(operations):
            work.wait()
        receipt = torch.zeros(1)
        receipts = [
            dist.isend(receipt, group=operation.group, group_dst=operation.group_peer, tag=1)
            for operation in operations
            if operation.op is dist.irecv
        ]
        for operation in operations:
            if operation.op is dist.isend:
                dist.recv(torch.zeros(1), group=operation.group, group_src=operation.group_peer, tag=1)
        for work in receipts:
            work.wait()
        return []


def check_messages(ranks, device):
    rank, world = ranks.rank, ranks.world_size
    coming = torch.empty(3, device=device)
    sent = torch.full((3,), float(rank), device=device)
    send_recv(ranks, [(sent, (rank + 1) % world)], [(coming, (rank - 1) % world)]).wait()
    assert (coming == (rank - 1) % world).all()


def check_tie(ranks, device):
    """Of the first and the last rank, without the others."""
    tied = torch.nn.Parameter(torch.full((2,), float(ranks.rank), device=device))
    holders = {0, ranks.world_size - 1}
    Ties({tied: {0: 0, 1: ranks.world_size - 1}}, ranks).align()
    assert (tied == (0 if ranks.rank in holders else ranks.rank)).all()


def batched_messages(rank):
    """A ring and a tie send tensors of GPUs over the half that torch batches."""
    ranks, world = pretend(), dist.get_world_size()
    dist.batch_isend_irecv = batches = Batches()
    check_messages(ranks, "cpu")
    assert batches.made == [[("isend", (rank + 1) % world), ("irecv", (rank - 1) % world)]]
    check_tie(ranks, "cpu")
    assert len(batches.made) == (2 if rank in (0, world - 1) else 1)


@pytest.mark.parametrize("world", [2, 3])
def test_messages_of_cuda_tensors_are_batched(world):
    run_ranks(batched_messages, world, backend=BOTH)


def check_ring(device, layout, causal, rows=48):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, rows, 8, dtype=torch.float64) for _ in range(3))
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*whole, is_causal=causal)
    expected.sum().backward()
    parts = [weft.shard_sequence(x, dim=2, layout=layout).float().to(device).requires_grad_() for x in (q, k, v)]
    out = weft.context_attention(*parts, causal=causal, method="ring", layout=layout)
    out.sum().backward()
    for found, of_whole in [(out, expected), *((part.grad, x.grad) for part, x in zip(parts, whole, strict=True))]:
        of_part = weft.shard_sequence(of_whole, dim=2, layout=layout)
        torch.testing.assert_close(found.double().cpu(), of_part, rtol=1e-4, atol=1e-5)


def ring_in_batches(rank, layout, causal, rows):
    """Batches of one rank wait for those of others: each must be matched by batches of one number."""
    pretend()
    dist.batch_isend_irecv = Batches()
    check_ring("cpu", layout, causal, rows)
    assert len(dist.batch_isend_irecv.made) > 2 or rank >= rows


@pytest.mark.parametrize(
    ("world", "layout", "causal", "rows"),
    [(2, "zigzag", True, 48), (3, "contiguous", True, 48), (4, "zigzag", False, 48), (3, "contiguous", True, 2)],
)
def test_ring_attention_of_cuda_tensors_waits_for_no_later_batch(world, layout, causal, rows):
    run_ranks(ring_in_batches, world, layout, causal, rows, backend=BOTH, group_timeout_s=20)


def pipeline_over_the_half(rank):
    ranks = pretend()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    mesh = weft.init_mesh(pp=2, device_type="cpu")
    pipe = weft.Pipeline(model, mesh, schedule="1f1b", microbatches=2, loss=torch.nn.functional.mse_loss)
    groups = []

    class Kept(ClockedStage):
        def __init__(self, *arguments, group, **options):
            groups.append(group)
            super().__init__(*arguments, group=group, **options)

    pipeline.ClockedStage = Kept
    pipe.step(torch.randn(4, 4), torch.randn(4, 4))
    assert groups and all(type(group) is dist.ProcessGroup for group in groups), groups
    assert ranks is communicator(mesh["pp"]) or groups[0].size() == 2


def test_a_pipeline_of_cuda_tensors_sends_over_the_half_that_torch_batches():
    run_ranks(pipeline_over_the_half, 2, backend=BOTH)


def alone(rank):
    pretend()
    x = torch.ones(3)
    assert weft.all_reduce(x) is x and (weft.all_reduce(x, scale=0.5) == 0.5).all()
    assert (weft.broadcast(x) == 0.5).all() and FakeRanks.log == []


def test_one_rank_needs_no_other():
    run_ranks(alone, 1, backend=BOTH)


# What becomes of waits that fail.


def watches():
    return [thread for thread in threading.enumerate() if thread.name == "weft watch"]


def other_call(rank):
    pretend()
    weft.all_reduce(torch.ones(1))
    x = torch.ones(100 + rank)
    weft.all_reduce(x)
    assert x.isnan().all(), "no sum is better than a wrong one"
    texts = []
    for call in (lambda: weft.all_reduce(x), lambda: weft.all_gather(x), weft.check_waits):
        with pytest.raises(
            weft.CollectiveMismatchError, match=rf"made another call .* of rank {rank} \(rank {rank} waited"
        ) as raised:
            call()
        texts.append(str(raised.value))
    dist.barrier()  # a rank that left would be one that was lost
    assert len(set(texts)) == 1, "the group stays broken, and says the same"
    assert 'on group "default_pg"' in texts[0] and f"rank {1 - rank} made" in texts[0]


def test_ranks_that_call_different_things_are_reported():
    run_ranks(other_call, 2, backend=BOTH)


def late(rank):
    pretend(timeout_s=2)
    weft.all_reduce(torch.ones(1))
    if rank == 1:
        dist.barrier()  # returns when the other rank has said so
        return
    x = torch.ones(10)
    weft.all_reduce(x)
    assert x.isnan().all()
    with pytest.raises(weft.CollectiveTimeoutError, match="rank 1 did not come in .* within 2 s .rank 0 waited in"):
        weft.check_waits()
    dist.barrier()


def test_a_rank_that_is_late_is_named():
    run_ranks(late, 2, backend=BOTH)


def loses_one(rank):
    assert watches() == []
    pretend(timeout_s=60)
    assert watches() == [], "before the first collective of CUDA tensors there is nothing to watch"
    weft.all_reduce(torch.ones(1))
    assert len(watches()) == 1
    if rank == 1:
        os._exit(3)
    x, start = torch.ones(10), time.monotonic()
    weft.all_reduce(x)
    assert x.isnan().all() and time.monotonic() - start < 10, "its death was noticed, not its silence"
    for watch in watches():
        watch.join(10)
    assert watches() == [], "it has said what there is to say"
    store = dist.distributed_c10d._get_default_store()
    store.set(f"noticed/{rank}", "")
    store.wait(["noticed/0", "noticed/2"], timedelta(seconds=20))  # a rank that left would be another one that was lost
    with pytest.raises(weft.RankLostError, match="rank 1 died or left"):
        weft.check_waits()
    weft.all_reduce(x)


def test_a_rank_that_dies_is_named_at_once():
    outcomes = try_ranks(loses_one, 3, backend=BOTH)
    assert outcomes[1].exit_code == 3
    for survivor in (outcomes[0], outcomes[2]):
        assert isinstance(survivor.error, weft.RankLostError), survivor.traceback
        assert str(survivor.error).startswith("rank 1 died or left")


def leaves_in_order(rank):
    """A rank that leaves when all is done fails no other rank; nobody can call it any more."""
    ranks = pretend()
    x = weft.all_reduce(torch.ones(10))
    if rank == 1:
        return
    record = ranks.record(CPU)
    deadline = time.monotonic() + 10
    while record.memory[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert record.memory[0] == 3
    weft.check_waits()
    assert (x == 2).all()
    with pytest.raises(weft.RankLostError, match='rank 1 died or left on group "default_pg"'):
        weft.all_reduce(x)


def test_a_rank_that_leaves_when_all_is_done_is_no_failure():
    run_ranks(leaves_in_order, 2, backend=BOTH)


def leaves_with_launches_queued(rank):
    ranks = pretend(timeout_s=20)
    weft.all_reduce(torch.ones(1))
    ranks._records[torch.device("cuda", 0)] = ranks.record(CPU)
    x = torch.ones(10)
    if rank == 1:
        weft.all_reduce(x)
        assert (x == 2).all(), "the other rank had launched it before it left"
        return

    def synchronize(device):  # here the device begins what was launched, later than the other rank looks for losses
        time.sleep(0.5)
        weft.all_reduce(x)

    torch.cuda.synchronize = synchronize
    dist.destroy_process_group()
    assert (x == 2).all()


def test_a_rank_that_leaves_finishes_its_launches_first():
    for outcome in try_ranks(leaves_with_launches_queued, 2, backend=BOTH):
        assert outcome.error is None, outcome.traceback


def ends_with_the_group(rank):
    ranks = pretend()
    weft.all_reduce(torch.ones(1))
    assert len(watches()) == 1
    ranks.host.all_gather_object("both have looked")
    store, (watch,) = dist.distributed_c10d._get_default_store(), watches()
    if rank == 1:  # it stays, so that its going is not what ends the other's watch
        store.wait(["ended"], timedelta(seconds=20))
        return
    dist.destroy_process_group()
    watch.join(10)
    assert watches() == []
    store.set("ended", "")


def test_the_watch_ends_with_the_group():
    run_ranks(ends_with_the_group, 2, backend=BOTH)


def record_of_an_engine(rank):
    """Kernels in the interpreter leave the same record, on groups of weft alone too."""
    ranks = communicator()
    record = ranks.record(CPU)
    assert record is ranks.record(CPU) and record.memory.tolist() == [0] * 16 and not record.memory.is_pinned()
    assert len(watches()) == 1
    weft.check_waits()
    dist.barrier()  # both have looked
    if rank == 1:
        return
    deadline = time.monotonic() + 10
    while record.memory[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert record.memory[:5].tolist() == [3, 0, 0, 0, 1], "stopped by the host, for rank 1 has gone"
    weft.check_waits()  # no kernel has waited for it
    with pytest.raises(weft.RankLostError, match='rank 1 died or left on group "default_pg"'):
        record.check()
    record.memory[8] = 1  # claimed by a kernel that gave up
    with pytest.raises(weft.RankLostError, match='rank 1 died or left on group "default_pg"'):
        weft.check_waits()


def test_every_communicator_has_a_record_for_its_kernels():
    run_ranks(record_of_an_engine, 2)


# The record alone.


@pytest.fixture
def record(monkeypatch):
    group = type("Group", (), {"group_desc": "tp", "group_name": "7"})()
    numbers = {4 + rank: rank for rank in range(3)}  # the program's ranks 4, 5 and 6
    monkeypatch.setitem(distributed_c10d._world.pg_group_ranks, group, numbers)
    return records.WaitRecord(group, CPU, timeout_s=30.0)


def test_a_record_names_the_call_the_phase_and_the_ranks(record, monkeypatch):
    names = {3: "all_reduce (two_shot)", 22: "staged"}
    monkeypatch.setattr(records._C.wait_record, "names", names)
    record.check()
    record.memory[:8] = torch.tensor([1, 0, 3, 22, 2, 5, 0, 41])
    with pytest.raises(weft.CollectiveTimeoutError) as raised:
        record.check()
    assert str(raised.value) == (
        'rank 6 did not come in all_reduce (two_shot) on group "tp" within 30 s (rank 4 waited in phase "staged", block '
        "5: it saw 0 and expected 41). Create the group again to use it. A kernel waits for at most the group's timeout and "
        "WEFT_WAIT_TIMEOUT_S."
    )
    record.memory.zero_()
    record.memory[0] = 2  # what kernels write later changes nothing
    with pytest.raises(weft.CollectiveTimeoutError, match="rank 6 did not come"):
        record.check()


def test_a_record_knows_the_names_of_the_triton_kernels(record):
    signal = pytest.importorskip("weft.kernels.signal")
    pytest.importorskip("weft.ops.overlap.workspace")  # who launches them
    code, name = next(iter(signal.WAIT_NAMES.items()))
    record.memory[:8] = torch.tensor([2, 1, code, 199, 0, 0, 0xAB, 0xCD])
    with pytest.raises(weft.CollectiveMismatchError) as raised:
        record.check()
    assert f'call than {name} on group "tp" of rank 5 ' in str(raised.value)
    assert 'phase "code 199"' in str(raised.value)
    assert "saw the signature 0xab and expected 0xcd" in str(raised.value)


def test_records_of_triton_and_of_the_extension_have_one_layout(monkeypatch):
    signal = pytest.importorskip("weft.kernels.signal")
    workspace = pytest.importorskip("weft.ops.overlap.workspace")
    assert not records.WAIT_NAMES.keys() & _C.wait_record.names.keys(), "a code has one name"
    monkeypatch.setattr(signal, "RECORD_FIELDS", signal.RECORD_FIELDS[1:] + signal.RECORD_FIELDS[:1])
    with pytest.raises(ImportError, match="build weft again"):
        importlib.reload(workspace)


def test_the_first_failure_of_a_record_stays(record):
    record.stop([2])
    record.stop([1])
    record.memory[1:8] = torch.tensor([0, 110, 111, 1, 0, 0, 0])  # a kernel that gives up then
    with pytest.raises(weft.RankLostError, match="rank 6 died or left in or before .* while rank 4 waited"):
        record.check()
    assert record.memory[0] == 3
    assert ctypes.c_int64.from_address(record.address).value == 3


def test_a_record_of_a_timed_out_wait_is_not_stopped(record):
    record.memory[0] = 1
    record.stop([2])
    assert record.memory[0] == 1


# The order of launches on streams.


class Stream:
    """What of a torch.cuda.Stream the order of launches asks for."""

    def __init__(self, name, waited):
        self.cuda_stream, self._waited = name, waited

    def wait_stream(self, other):
        self._waited.append((self.cuda_stream, other.cuda_stream))


def test_a_launch_waits_for_the_one_before_on_another_stream(monkeypatch):
    waited, captured = [], set()
    streams = {name: Stream(name, waited) for name in (1, 2, 3)}
    current = [streams[1]]

    @contextlib.contextmanager
    def on(stream):
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[-1].cuda_stream in captured)
    launches = gpus.StreamOrder(torch.device("cuda:0"))
    for name, expected in ((1, []), (1, []), (2, [(2, 1)]), (1, [(2, 1), (1, 2)])):
        with on(streams[name]), launches.next() as (handle, captures):
            assert handle == name and not captures
        assert waited == expected
    captured.add(3)
    waited.clear()
    with on(streams[3]), launches.next() as (_, captures):
        assert captures and waited == [], "what is captured does not wait for what runs"
    captured.clear()
    with on(streams[3]), launches.next():
        assert waited == [(3, 1)], "nor does what runs wait for what was captured, but for the launch before that"


# On a GPU, with the kernels: processes that share one device.


def gpu_symmetric(count, dtype=torch.float32):
    return weft.empty_symmetric(count, dtype=dtype, device="cuda")


def gpu_collectives(rank):
    check_collectives(rank, "cuda")
    assert communicator().transport.startswith("weft's kernels over symmetric memory"), communicator().transport


def gpu_norm(rank):
    check_norm(rank, "cuda")
    check_norm(rank, "cuda", gpu_symmetric)
    assert communicator().transport.startswith("weft's kernels over symmetric memory"), communicator().transport


def gpu_one_call_each(rank):
    """A few small launches, for compute-sanitizer."""
    parts = [torch.randn(1000, generator=torch.Generator().manual_seed(r)) for r in range(dist.get_world_size())]
    expected = reference.reduce(parts)
    assert torch.equal(weft.all_reduce(parts[rank].cuda()).cpu(), expected)
    symmetric = gpu_symmetric(1000).copy_(parts[rank])
    assert torch.equal(weft.all_reduce(symmetric).cpu(), expected)
    mine = weft.reduce_scatter(parts[rank].cuda())
    assert torch.equal(weft.all_gather(mine).cpu(), expected)
    partial = parts[rank].view(4, 250).cuda()
    assert torch.equal(weft.all_reduce_rms_norm(partial, partial * 0, partial[0], 1e-5)[1].cpu().view(-1), expected)
    weft.check_waits()


def gpu_torchs_own(rank):
    x = torch.full((3,), rank + 1.0, device="cuda")
    dist.all_reduce(x)
    assert (x.cpu() == sum(range(dist.get_world_size() + 1))).all()


def layer_step(overlap, style, sequence_parallel):
    """y and all gradients of a layer of bf16 on the GPU; 256 tokens."""
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    options = dict(style=style, sequence_parallel=sequence_parallel, overlap=overlap, device="cuda")
    layer = weft.ParallelLinear(512, 384, dtype=torch.bfloat16, **options)
    x, dy = (torch.randn(256, width, device="cuda").bfloat16() for width in (512, 384))
    if style == "row" or sequence_parallel:
        dim = -1 if style == "row" else 0
        x = x.split(weft.split_sizes(x.size(dim), world), dim)[rank].contiguous()
    if style == "column" or sequence_parallel:
        dim = -1 if style == "column" else 0
        dy = dy.split(weft.split_sizes(dy.size(dim), world), dim)[rank].contiguous()
    x.requires_grad_()
    y = layer(x)
    y.backward(dy)
    return y.detach(), x.grad, layer.weight.grad, layer.bias.grad


def gpu_overlap(rank):
    """Overlapping changes no bit: the copies, the windows and the kernels, between processes."""
    with kernel_choice.prefer("kernel"):
        for style, sequence_parallel in itertools.product(("column", "row"), (True, False)):
            apart = layer_step("never", style, sequence_parallel)
            for _ in range(3):
                together = layer_step("always", style, sequence_parallel)
                assert all(torch.equal(a, b) for a, b in zip(apart, together, strict=True)), (style, sequence_parallel)
    torch.cuda.synchronize()
    weft.check_waits()


def gpu_overlap_graph(rank):
    """A captured layer is replayed, with other rows each time."""
    layer = weft.ColumnParallelLinear(512, 384, sequence_parallel=True, overlap="always", device="cuda", bias=False)
    layer = layer.bfloat16()
    x = torch.randn(128, 512, device="cuda").bfloat16()
    with kernel_choice.prefer("kernel"), torch.no_grad():
        layer(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        for seed in range(3):
            torch.manual_seed(seed * 10 + rank)
            x.copy_(torch.randn(128, 512, device="cuda"))
            graph.replay()
            torch.cuda.synchronize()
            weft.check_waits()
            layer.place = layer.place._replace(overlap="never")
            assert torch.equal(y, layer(x)), seed
            layer.place = layer.place._replace(overlap="always")


def gpu_in_symmetric_memory(rank):
    check_symmetric(rank, gpu_symmetric)
    large = gpu_symmetric(LARGEST_BYTES // 2).fill_(rank + 1)
    world = dist.get_world_size()
    assert (weft.all_reduce(large) == world * (world + 1) / 2).all()
    assert weft.empty_symmetric(0, device="cuda").numel() == 0
    with pytest.raises(weft.CollectiveMismatchError, match="rank 0 asks for 40 bytes, rank 1 for 44"):
        gpu_symmetric(10 + rank)


def gpu_memory_comes_back(rank):
    """What nobody holds any more is unmapped and freed."""
    gpu_symmetric(1)
    gc.collect()
    free = torch.cuda.mem_get_info()[0]
    for _ in range(4):
        x = gpu_symmetric(64 << 20, torch.uint8)
        part = x[10:20]
        del x
        assert (part == 0).all()
        del part
        gc.collect()
    communicator().all_gather_object("all have let go")
    assert free - torch.cuda.mem_get_info()[0] < 128 << 20, "the last one may still be mapped by a peer"


def gpu_streams(rank):
    """Launches on several streams follow each other."""
    streams = [torch.cuda.Stream() for _ in range(3)]
    tensors = [torch.full((50_000,), float(i + rank), device="cuda") for i in range(30)]
    torch.cuda.synchronize()
    for i, x in enumerate(tensors):
        with torch.cuda.stream(streams[i % 3]):
            weft.all_reduce(x)
    torch.cuda.synchronize()
    world = dist.get_world_size()
    for i, x in enumerate(tensors):
        assert (x == i * world + world * (world - 1) / 2).all()
    weft.check_waits()


def gpu_graph(rank):
    """A captured call is replayed on what is in its tensors then."""
    world = dist.get_world_size()
    x, symmetric = torch.zeros(5000, device="cuda"), gpu_symmetric(5000)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="run one before the capture"), torch.cuda.graph(graph):
        weft.all_reduce(x)
    weft.all_reduce(x)
    graph = torch.cuda.CUDAGraph()
    part = torch.zeros(4, 1000, device="cuda")
    ones = torch.ones(1000, device="cuda")
    with torch.cuda.graph(graph):
        weft.all_reduce(x)
        weft.all_reduce(symmetric)
        normalised, total = weft.all_reduce_rms_norm(part, part + 1, ones, 0.0)
    for step in range(5):
        x.fill_(rank + step)
        symmetric.fill_(step)
        part.fill_(step)
        graph.replay()
        torch.cuda.synchronize()
        weft.check_waits()
        assert (x == step * world + world * (world - 1) / 2).all() and (symmetric == step * world).all()
        assert (total == step * (world + 1) + 1).all() and torch.allclose(normalised, torch.ones_like(normalised))


def gpu_graph_after_a_loss(rank):
    """A graph that is replayed when a rank has gone ends, with NaN and an error."""
    x = torch.ones(5000, device="cuda")
    weft.all_reduce(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weft.all_reduce(x)
    graph.replay()
    torch.cuda.synchronize()
    communicator().all_gather_object("all have replayed it")
    if rank == 1:
        os._exit(0)
    start = time.monotonic()
    graph.replay()
    torch.cuda.synchronize()
    assert x.isnan().all() and time.monotonic() - start < 15
    with pytest.raises(weft.RankLostError, match="rank 1 died or left"):
        weft.check_waits()
    with pytest.raises(weft.RankLostError, match="rank 1 died or left"):
        weft.all_reduce(x)
    os._exit(0)  # the group cannot be taken down in order


def gpu_mismatch(rank):
    weft.all_reduce(torch.ones(10, device="cuda"))
    x = torch.ones(100 + rank, device="cuda")
    weft.all_reduce(x)
    torch.cuda.synchronize()
    assert x.isnan().all()
    with pytest.raises(weft.CollectiveMismatchError, match=f"rank {1 - rank} made another call than all_reduce"):
        weft.check_waits()


def gpu_other_part(rank):
    x = gpu_symmetric(1000)
    weft.all_reduce(x)
    weft.all_reduce(x[:500] if rank else x[500:])
    torch.cuda.synchronize()
    with pytest.raises(weft.CollectiveMismatchError, match="place in symmetric memory"):
        weft.check_waits()


def gpu_refused(rank):
    """Ranks that may not share a device fall back, all of them."""
    if rank == 0:
        os.environ.pop(SHARED_GPU)
    x = weft.all_reduce(torch.ones(10, device="cuda"))
    assert (x == dist.get_world_size()).all()
    assert "a GPU for each rank" in communicator().transport and communicator().transport.startswith("gloo;")
    with pytest.raises(ValueError, match="a GPU for each rank"):
        gpu_symmetric(10)


def gpu_messages(rank):
    """Over NCCL, whose ranks wait for each other in every message."""
    ranks = communicator()
    for _ in range(3):
        check_messages(ranks, "cuda")
        check_tie(ranks, "cuda")
    for layout, causal in (("zigzag", True), ("contiguous", False)):
        check_ring("cuda", layout, causal)


def gpu_rounds(rank):
    """A litmus of a million rounds: a store that is seen late gives a sum of another one. Words that show by themselves
    that they have come, then data before flags, staged and in symmetric memory."""
    check_rounds(333_334, torch.empty(64, device="cuda"), torch.empty(1 << 15, device="cuda"), gpu_symmetric(64))


def gpu_any_order(rank):
    """Sums in the switch, where there is one, of random numbers."""
    for count in (8, 1000, 1 << 20):
        parts = [torch.randn(count, generator=torch.Generator().manual_seed(r)) for r in range(dist.get_world_size())]
        expected = sum(part.double() for part in parts)
        for x in (parts[rank].cuda(), gpu_symmetric(count).copy_(parts[rank])):
            weft.all_reduce(x, deterministic=False)
            torch.testing.assert_close(x.double().cpu(), expected, rtol=1e-5, atol=1e-5)
    weft.check_waits()


GPU_CASES = [
    pytest.param(gpu_one_call_each, 2, marks=pytest.mark.sanitize),
    (gpu_torchs_own, 2),
    (gpu_overlap, 2),
    (gpu_overlap, 4),
    (gpu_overlap_graph, 2),
    (gpu_collectives, 2),
    (gpu_collectives, 4),
    (gpu_norm, 2),
    (gpu_norm, 4),
    (gpu_in_symmetric_memory, 2),
    (gpu_in_symmetric_memory, 4),
    (gpu_memory_comes_back, 2),
    (gpu_streams, 2),
    (gpu_graph, 2),
    (gpu_graph, 4),
    (gpu_graph_after_a_loss, 4),
    (gpu_mismatch, 2),
    (gpu_other_part, 2),
    (gpu_refused, 2),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "world"), GPU_CASES)
def test_on_one_gpu(case, world):
    options = {"backend": BOTH, "environment": {SHARED_GPU: "1"}, "timeout_s": 240, "group_timeout_s": 60}
    run_ranks(from_file(case), world, start="spawn", **options)


def on_own_gpu(rank):
    torch.cuda.set_device(rank)


SEVERAL = [gpu_messages, gpu_rounds, gpu_any_order, gpu_norm]
SEVERAL += [gpu_torchs_own, gpu_collectives, gpu_overlap, gpu_overlap_graph, gpu_in_symmetric_memory, gpu_streams]
SEVERAL += [gpu_memory_comes_back, gpu_graph, gpu_graph_after_a_loss]


@pytest.mark.gpu
@pytest.mark.gpus2
@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("case", SEVERAL)
def test_on_a_gpu_each(case, world):
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} CUDA devices")
    options = {"before": from_file(on_own_gpu), "timeout_s": 240, "group_timeout_s": 60}
    run_ranks(from_file(case), world, backend="cpu:weft,cuda:nccl", start="spawn", **options)
