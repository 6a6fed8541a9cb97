"""Messages between ranks that go on while their senders compute: what a ring passes on."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from weft.comm.communicator import Communicator

_TAG = 0x5745  # of a ring's messages; those of one sender arrive in their order


class PendingTransfer:
    """Messages under way. The tensors must not be touched before `wait` returns."""

    def __init__(self, pending: Sequence):
        self._pending = pending

    def wait(self) -> None:
        for one in self._pending:
            one.wait()


def send_recv(
    ranks: Communicator,
    sent: Sequence[torch.Tensor],
    to: int | None,
    received: Sequence[torch.Tensor],
    source: int | None,
) -> PendingTransfer:
    """Begins to send tensors to one rank and to fill others from another; None: nobody. All are contiguous; both sides
    give as many, of the same sizes and types, in the same order."""
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
