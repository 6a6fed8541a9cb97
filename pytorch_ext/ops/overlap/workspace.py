"""Windows of communicating kernels: one for each purpose of a group, as large as its largest call."""

import torch

from weft import _C
from weft.comm.communicator import Communicator
from weft.comm.stream_order import StreamOrder
from weft.comm.symmetric_memory import SymmetricMemory, open_symmetric_memory
from weft.comm.wait_record import WAIT_NAMES, WaitRecord
from weft.kernels import launch, signal, variants

WAIT_NAMES.update(signal.WAIT_NAMES)
_OF_TRITON = signal.RECORD_WORDS, signal.RECORD_FIELDS, signal.RECORD_STATES
_OF_EXTENSION = _C.wait_record.words, tuple(_C.wait_record.fields), tuple(_C.wait_record.states)
if _OF_TRITON != _OF_EXTENSION:
    raise ImportError(f"weft.kernels writes records as {_OF_TRITON}, weft._C reads {_OF_EXTENSION}: build weft again")


def workspace(ranks: Communicator, purpose: str, bytes: int, device: torch.device) -> signal.Peers:
    """Return the group's window for a purpose, with at least that many bytes.

    This is a collective call where the window must grow. A window that is too small stays allocated, since a captured
    CUDA graph may still use it.

    Calls that overlap in time must use windows of different purposes. A call waits for the one before with the same
    purpose, also on another stream.

    Raises:
        ValueError: the ranks do not reach each other's memory.
        RuntimeError: the window must grow while a graph is captured.
        CommError: an earlier wait of the ranks has failed.
    """
    record = ranks.record(device)
    record.check()
    order, kept = ranks.workspaces.setdefault((purpose, device), (StreamOrder(device), []))
    if device.type == "cuda":
        with order.next():  # calls from several streams share the window and its flags
            pass
    if kept and kept[-1].memory.numel() >= bytes:
        return kept[-1]
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{purpose}: the window must grow to {bytes} bytes, and a CUDA graph cannot capture that; run once before"
        )
    kept.append(peers_of(open_symmetric_memory(ranks, 1 << (bytes - 1).bit_length(), device), record))
    return kept[-1]


def peers_of(window: SymmetricMemory, record: WaitRecord) -> signal.Peers:
    """Return a window of zeros in the form that this rank's kernels take; load these, before one of them waits."""
    device = window.mine.device
    launch.load(window.mine, variants.communicating)
    return signal.Peers(
        rank=window.rank,
        memory=window.mine,
        at=window.addresses,
        addresses=torch.tensor(window.addresses, dtype=torch.int64, device=device),
        counters=torch.zeros(signal.FLAGS, dtype=torch.int32, device=device),
        spoiled=torch.zeros(1, dtype=torch.int32, device=device),
        record=record.memory,
        timeout_us=min(int(record.timeout_s * 1e6), 2**31 - 1),
        processors=launch.multiprocessors(device),
        owner=window,
    )
