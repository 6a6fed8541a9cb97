"""Messages between ranks, in flight while their senders compute."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from weft.comm.communicator import Communicator

_TAG = 0x5745  # tag of all these messages; messages of one sender arrive in order


class PendingTransfer:
    """Messages under way; their tensors must not be touched before `wait` returns."""

    def __init__(self, pending: Sequence):
        self._pending = pending

    def wait(self) -> None:
        for operation in self._pending:
            operation.wait()


def send_recv(
    ranks: Communicator, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]
) -> PendingTransfer:
    """Start to send tensors to ranks and to receive tensors from ranks, in one batch.

    All tensors are contiguous and on one device. Two ranks give each other's tensors in the same order, of the same
    sizes and types. A batch of NCCL's ends when all of it is done, and the next one waits for it. So what a rank
    receives in its batch number n, its peers must send in theirs.

    Args:
        ranks: the communicator of the group.
        sends: tensors to send, each with the rank to send to.
        receives: tensors to fill, each with the rank to receive from.
    """
    if not sends and not receives:
        return PendingTransfer([])
    device = next(x.device for x, _ in (*sends, *receives))
    engine, group = ranks.engine, ranks.p2p_group(device)
    if engine is not None and group is ranks.group and device.type == "cpu":
        pending = [engine.send(x, to, _TAG) for x, to in sends]
        return PendingTransfer([*pending, *(engine.receive(x, source, _TAG) for x, source in receives)])
    operations = [dist.P2POp(dist.isend, x, group=group, group_peer=to) for x, to in sends]
    operations += [dist.P2POp(dist.irecv, x, group=group, group_peer=source) for x, source in receives]
    return PendingTransfer(dist.batch_isend_irecv(operations))
