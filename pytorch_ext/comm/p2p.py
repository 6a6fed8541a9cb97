"""Messages between the ranks of a ring, in flight while their senders compute."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from weft.comm.communicator import Communicator

_TAG = 0x5745  # tag of all messages of a ring; messages of one sender arrive in order


class PendingTransfer:
    """Messages under way; their tensors must not be touched before `wait` returns."""

    def __init__(self, pending: Sequence):
        self._pending = pending

    def wait(self) -> None:
        for operation in self._pending:
            operation.wait()


def send_recv(
    ranks: Communicator,
    sent: Sequence[torch.Tensor],
    to: int | None,
    received: Sequence[torch.Tensor],
    source: int | None,
) -> PendingTransfer:
    """Start to send tensors to one rank and to receive tensors from another.

    All tensors are contiguous. Sender and receiver give the same number of tensors, of the same sizes and types, in the
    same order.

    Args:
        ranks: the communicator of the group.
        sent: tensors to send.
        to: rank to send to; None sends nothing.
        received: tensors to fill.
        source: rank to receive from; None receives nothing.
    """
    if to is None and source is None:
        return PendingTransfer([])
    engine = ranks.engine
    if engine is not None and not any(x.is_cuda for x in (*sent, *received)):
        pending = [engine.send(x, to, _TAG) for x in sent] if to is not None else []
        if source is not None:
            pending += [engine.receive(x, source, _TAG) for x in received]
        return PendingTransfer(pending)
    operations = []
    if to is not None:
        operations += [dist.P2POp(dist.isend, x, group=ranks.group, group_peer=to) for x in sent]
    if source is not None:
        operations += [dist.P2POp(dist.irecv, x, group=ranks.group, group_peer=source) for x in received]
    return PendingTransfer(dist.batch_isend_irecv(operations))
