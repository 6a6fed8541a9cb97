"""signal: flags between ranks. Only this file implements waits between kernels of different ranks.

A flag is an int32 in symmetric memory. It is 0 while it is not set, else the signature of the call under way. The
signature is a hash of all that the ranks must agree on, so ranks with different calls find out at the first flag.

    put    waits until the flag is 0 and sets it                          load, then store, release, system scope
    post   sets a flag that is known to be 0                              store, release, system scope
    wait   waits until the flag is set and leaves it set                  load, acquire, system scope
    meet   every rank puts a flag at every other rank and resets the flags that were put at it: a barrier
    last   counts a program; returns True for the last one                fetch-and-add, acquire and release

One rank sets a flag and another resets it, so no access to it must be atomic: links without native atomics (PCIe) will
do. A rank that has waited for a flag sees everything that the other rank wrote before its put or post. Release and
acquire at system scope ensure this, and inside a program the barrier that both sides pass. Before reads by the tensor
copy engine the program must also call `to_copy_engine`.

A clock bounds every wait. A wait that gives up leaves a record for the host (`comm/wait_record.py`) and marks this
rank's work as spoiled. From then on waits end at once, results are NaN, and the rank does not write to memory that
another rank may still read for the previous call. So no rank has a wrong sum. The host can end waits too, by writing to
the record.

A program waits for other ranks' programs and for copies, never for a later program of its own launch. So a rank makes
progress even if only a few of its programs run at a time, and in the interpreter only one.
"""

import zlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from weft.kernels import interpreted as _interpreted_waits
from weft.kernels import launch
from weft.kernels.language import cdiv, tl, triton
from weft.kernels.launch import _INTERPRETED

_interpreted: Any = _interpreted_waits if launch.INTERPRETED else None  # no Python where Triton compiles

# Layout of a window: flags for `meet`, flags for everything else, then data.
MEETING_BYTES = 4096
FLAGS = 16384
DATA_OFFSET = MEETING_BYTES + 4 * FLAGS
_MEETING_BYTES = tl.constexpr(MEETING_BYTES)

# Codes in records; those of the CUDA extension are below 100.
ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER, MATMUL_ALL_REDUCE = 100, 101, 102
COME, ARRIVED, SUMMED, DONE, PARTIAL = 110, 111, 112, 113, 114
WAIT_NAMES = {
    ALL_GATHER_MATMUL: "all_gather + matmul",
    MATMUL_REDUCE_SCATTER: "matmul + reduce_scatter",
    MATMUL_ALL_REDUCE: "matmul + all_reduce",
    COME: "everybody has come",
    ARRIVED: "rows arrived",
    PARTIAL: "partial sums arrived",
    SUMMED: "sums are there",
    DONE: "everybody is done",
}
_BLOCK = 4096
# The record of csrc/cuda/flags.h, which comm/wait_record.py reads; ops/overlap/workspace.py checks that they agree.
RECORD_WORDS = 16
RECORD_FIELDS = ("state", "rank", "operation", "phase", "peer", "block", "seen", "expected", "claimed")
RECORD_STATES = ("idle", "timed_out", "mismatched", "stopped")
(_STATE, _RANK, _OPERATION_CODE, _PHASE_CODE, _PEER, _PROGRAM, _SEEN, _EXPECTED, _CLAIMED) = map(
    tl.constexpr, range(len(RECORD_FIELDS))
)
_TIMED_OUT = tl.constexpr(RECORD_STATES.index("timed_out"))  # mismatched is the next


@dataclass(frozen=True)
class Peers:
    """The windows of a group's ranks, as this rank's kernels reach them.

    Attributes:
        rank: this rank's number in the group.
        memory: [bytes] uint8, this rank's window.
        at: the address of each rank's window in this process.
        addresses: [W] int64, the same addresses on the device.
        counters: [FLAGS] int32 of this rank alone, 0 between calls.
        spoiled: [1] int32, not 0 once a wait gave up.
        record: [RECORD_WORDS] int64 that the host reads.
        timeout_us: time limit of one wait.
        processors: number of programs of a launch that run at a time.
        owner: the object that keeps the windows mapped.
        kept: tables that captured CUDA graphs read.
    """

    rank: int
    memory: torch.Tensor
    at: tuple[int, ...]
    addresses: torch.Tensor
    counters: torch.Tensor
    spoiled: torch.Tensor
    record: torch.Tensor
    timeout_us: int
    processors: int
    owner: object = None
    kept: list = field(default_factory=list)

    @property
    def world(self) -> int:
        return len(self.at)

    @cached_property
    def copies(self) -> torch.cuda.Stream:
        """The stream of this rank's copies: they must not stand before the work of a rank that they wait for.

        torch hands out 32 streams of each priority again and again, those of normal priority to callers too.
        """
        return torch.cuda.Stream(self.memory.device, priority=-1)

    def keep(self, *tables: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the tables; during the capture of a CUDA graph, also keep them from being freed."""
        if self.memory.is_cuda and torch.cuda.is_current_stream_capturing():
            self.kept.extend(tables)
        return tables

    def waits(self) -> tuple:
        """Return the arguments of a kernel that waits, in the order of `wait`'s arguments."""
        return self.spoiled, self.record, self.timeout_us, self.rank


def signature(*agreed: object) -> int:
    """Return a positive int32, the hash of values that must be the same on every rank."""
    return zlib.crc32(repr(agreed).encode()) % (2**31 - 1) + 1


def unlaunched(rank: int = 1, world: int = 4, bytes: int = 1 << 30) -> Peers:
    """Return peers on the meta device, for recording launches."""

    def memory(*shape, dtype=torch.int64):
        return torch.empty(*shape, dtype=dtype, device="meta")

    return Peers(
        rank=rank,
        memory=memory(bytes, dtype=torch.uint8),
        at=(0,) * world,
        addresses=memory(world),
        counters=memory(FLAGS, dtype=torch.int32),
        spoiled=memory(1, dtype=torch.int32),
        record=memory(RECORD_WORDS),
        timeout_us=1_000_000,
        processors=132,
    )


def meet(peers: Peers, agreed: int, operation: int, phase: int) -> None:
    """Wait on the device until every rank has come; `agreed` is the signature of the call."""
    if peers.world == 1:
        return
    launch.launch(
        _meet_kernel,
        (peers.world,),
        peers.addresses,
        agreed,
        *peers.waits(),
        OPERATION=operation,
        PHASE=phase,
        warps=1,
    )


def fill(peers: Peers, offset: int, x: torch.Tensor) -> None:
    """Copy a contiguous x into this rank's window, where other ranks read it; do nothing if an earlier wait gave up."""
    source = x.view(-1).view(torch.int16)
    target = peers.memory[offset:][: 2 * source.numel()].view(torch.int16)
    if source.numel():
        programs = min(peers.processors, cdiv(source.numel(), _BLOCK))
        launch.launch(_fill_kernel, (programs,), target, source, source.numel(), programs, peers.spoiled, BLOCK=_BLOCK)


def spoil(peers: Peers, x: torch.Tensor) -> None:
    """Fill x with NaN (all bits 1) if an earlier wait gave up."""
    flat = x.view(-1).view(torch.uint8)
    if flat.numel():
        programs = min(peers.processors, cdiv(flat.numel(), _BLOCK))
        launch.launch(_spoil_kernel, (programs,), flat, flat.numel(), programs, peers.spoiled, BLOCK=_BLOCK)


def _bounded(attempt: str) -> tl.constexpr:
    """Return the PTX of a wait with a time limit.

    Thread 0 repeats the attempt until that sets the predicate `done`. The other threads wait for it at a barrier, which
    shares the result: all threads leave with $0 = 1 if thread 0 gave up. The record is in host memory, so thread 0
    reads it only once in many attempts.
    """
    return tl.constexpr(
        """{
        .reg .pred first, done, failed, again;
        .reg .b32 thread, seen, spins;
        .reg .b64 start, now, state;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        setp.ne.u32 failed, thread, thread;
        @!first bra MET;
        mov.u32 spins, 0;
        mov.u64 start, %globaltimer;
        AGAIN:
        """
        + attempt
        + """
        @done bra MET;
        add.u32 spins, spins, 1;
        and.b32 seen, spins, 1023;
        setp.ne.u32 again, seen, 0;
        @again bra CLOCK;
        ld.relaxed.sys.global.u64 state, [$3];
        setp.ne.u64 failed, state, 0;
        @failed bra MET;
        CLOCK:
        mov.u64 now, %globaltimer;
        sub.u64 now, now, start;
        setp.lt.u64 again, now, $4;
        @again bra AGAIN;
        setp.eq.u32 failed, thread, thread;
        MET:
        barrier.cta.red.or.pred failed, 0, failed;
        selp.u32 $0, 1, 0, failed;
        }"""
    )


# A value that is not the expected one is the signature of another call.
_WAIT = _bounded(
    """ld.acquire.sys.global.u32 seen, [$1];
        setp.ne.u32 done, seen, 0;
        @!done bra NOT_SET;
        setp.ne.u32 failed, seen, $2;
        NOT_SET:"""
)
_PUT = _bounded(
    """ld.relaxed.sys.global.u32 seen, [$1];
        setp.eq.u32 done, seen, 0;
        @!done bra NOT_FREE;
        st.release.sys.global.u32 [$1], $2;
        NOT_FREE:"""
)
_POST = tl.constexpr(
    """{
    .reg .pred first;
    .reg .b32 thread;
    mov.u32 thread, %tid.x;
    setp.eq.u32 first, thread, 0;
    @first st.release.sys.global.u32 [$1], $2;
    mov.u32 $0, 0;
    }"""
)


@triton.jit
def _attempt(PTX: tl.constexpr, flag, value, record, timeout_us):
    return tl.inline_asm_elementwise(
        PTX,
        "=r,l,r,l,l",
        [flag.to(tl.int64), value, record.to(tl.int64), timeout_us.to(tl.int64) * 1000],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _release(flag, value):
    """Let the first thread set the flag, after all that it wrote."""
    if _INTERPRETED:
        _interpreted.post(flag, value)
    else:
        tl.inline_asm_elementwise(_POST, "=r,l,r", [flag.to(tl.int64), value], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _leave_record(flag, expected, spoiled, record, rank, peer, OPERATION: tl.constexpr, PHASE: tl.constexpr):
    """Fill the record if no other has claimed it. The host has no part in that, so links without atomics will do."""
    tl.store(spoiled, 1)
    nobody = tl.full((), 0, tl.int64)
    mine = tl.full((), 1, tl.int64)
    if tl.atomic_cas(record + _CLAIMED, nobody, mine, sem="relaxed", scope="gpu") == 0:
        seen = tl.load(flag, volatile=True)
        tl.store(record + _RANK, rank)
        tl.store(record + _OPERATION_CODE, OPERATION)
        tl.store(record + _PHASE_CODE, PHASE)
        tl.store(record + _PEER, peer)
        tl.store(record + _PROGRAM, tl.program_id(0))
        tl.store(record + _SEEN, seen)
        tl.store(record + _EXPECTED, expected)
        differs = (seen != 0) & (seen != expected)
        tl.debug_barrier()
        if tl.load(record + _STATE, volatile=True) == 0:  # what the host wrote stays; threads may see different values
            _release((record + _STATE).to(tl.pointer_type(tl.int32)), differs.to(tl.int32) + _TIMED_OUT)


@triton.jit
def wait(flag, expected, spoiled, record, timeout_us, rank, peer, OPERATION: tl.constexpr, PHASE: tl.constexpr):
    """Wait for the flag, which rank `peer` sets.

    Returns 0 once the flag has the expected value, 1 if it has another or the wait gave up.
    """
    if _INTERPRETED:
        failed = _interpreted.wait(flag, expected, record, timeout_us)
    else:
        failed = _attempt(_WAIT, flag, expected, record, timeout_us)
    if failed != 0:
        _leave_record(flag, expected, spoiled, record, rank, peer, OPERATION, PHASE)
    return failed


@triton.jit
def put(flag, value, spoiled, record, timeout_us, rank, peer, OPERATION: tl.constexpr, PHASE: tl.constexpr):
    """Wait until the flag is 0 and set it to the value; rank `peer` resets it to 0.

    Returns 0 once the flag is set, 1 if the wait gave up.
    """
    if _INTERPRETED:
        failed = _interpreted.put(flag, value, record, timeout_us)
    else:
        failed = _attempt(_PUT, flag, value, record, timeout_us)
    if failed != 0:
        _leave_record(flag, value, spoiled, record, rank, peer, OPERATION, PHASE)
    return failed


@triton.jit
def post(flag, value):
    """Set the flag; a rank that waits for it then sees everything that this program's threads wrote before."""
    tl.debug_barrier()
    _release(flag, value)


@triton.jit
def last(counter, expected):
    """Count this program; return True if it is the last of `expected`, and reset the counter to 0 then.

    The last program sees everything that the others wrote before they came.
    """
    tl.debug_barrier()
    came = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") + 1
    if came == expected:
        tl.store(counter, 0)
    return came == expected


@triton.jit
def is_sound(spoiled):
    """Return True if no wait gave up so far."""
    return tl.load(spoiled, volatile=True) == 0


@triton.jit
def poison(spoiled):
    """Return the factor of results: 1, or NaN once a wait gave up."""
    return tl.where(is_sound(spoiled), 1.0, float("nan"))


@triton.jit
def to_copy_engine():
    """Make the data of earlier waits visible to the tensor copy engine too (PTX ISA, fence.proxy.async)."""
    if not _INTERPRETED:
        tl.inline_asm_elementwise("fence.proxy.async.global; mov.u32 $0, 0;", "=r", [], dtype=tl.int32,
                                  is_pure=False, pack=1)  # fmt: skip


@triton.jit
def at(addresses, peer, offset):
    """Return the address `offset` bytes into a rank's window, as an int64."""
    return tl.load(addresses + peer) + offset


@triton.jit
def flag_at(addresses, peer, number):
    """Return a pointer to a rank's flag of that number."""
    return at(addresses, peer, _MEETING_BYTES + 4 * number).to(tl.pointer_type(tl.int32))


@triton.jit(do_not_specialize=["agreed", "timeout_us", "rank"])
def _meet_kernel(
    addresses,  # [W] int64
    agreed,
    spoiled,
    record,
    timeout_us,
    rank,
    OPERATION: tl.constexpr,
    PHASE: tl.constexpr,
):
    """Meet rank p in program p. Pairs meet in rank order, so that one program at a time is enough."""
    peer = tl.program_id(0)
    if peer != rank:
        theirs = at(addresses, peer, 4 * rank).to(tl.pointer_type(tl.int32))
        mine = at(addresses, rank, 4 * peer).to(tl.pointer_type(tl.int32))
        # 1. Put this rank's flag at the peer. It becomes 0 when the peer leaves the previous meeting.
        failed = put(theirs, agreed, spoiled, record, timeout_us, rank, peer, OPERATION, PHASE)
        # 2. Wait for the peer's flag and reset it for the next meeting.
        if failed == 0:
            failed = wait(mine, agreed, spoiled, record, timeout_us, rank, peer, OPERATION, PHASE)
            if failed == 0:
                tl.atomic_xchg(mine, 0, sem="relaxed", scope="sys")


@triton.jit(do_not_specialize=["programs"])
def _fill_kernel(
    target,  # [count] int16
    source,
    count,
    programs,
    spoiled,
    BLOCK: tl.constexpr,
):
    if is_sound(spoiled):
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, count, programs * BLOCK):
            place = start + tl.arange(0, BLOCK)
            tl.store(target + place, tl.load(source + place, mask=place < count), mask=place < count)


@triton.jit(do_not_specialize=["programs"])
def _spoil_kernel(
    x,  # [count] uint8
    count,
    programs,
    spoiled,
    BLOCK: tl.constexpr,
):
    if not is_sound(spoiled):
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, count, programs * BLOCK):
            place = start + tl.arange(0, BLOCK)
            tl.store(x + place, 255, mask=place < count)


def variants(architecture: str) -> None:
    """Call the launcher once for each variant to check; use inside `launch.recording`."""
    peers = unlaunched()
    for operation in (ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER, MATMUL_ALL_REDUCE):
        meet(peers, signature("variants"), operation, DONE)
    meet(peers, signature("variants"), ALL_GATHER_MATMUL, COME)
    for count in (1 << 20, (1 << 20) + 1):  # 16-byte accesses, or smaller ones
        spoil(peers, peers.memory[:count])
        numbers = torch.empty(count + 1, dtype=torch.bfloat16, device="meta")
        fill(peers, DATA_OFFSET, numbers[:count])
        fill(peers, DATA_OFFSET, numbers[1:])
