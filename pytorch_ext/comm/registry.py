"""Communicators by group: made at the first request, and kept as long as the group lives."""

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from weft.comm.backend import WeftProcessGroup
from weft.comm.communicator import Communicator, backends_of
from weft.comm.cuda import DeviceCommunicator
from weft.comm.engine_communicator import EngineCommunicator

Group = dist.ProcessGroup | DeviceMesh | Communicator | None  # None is the default group
_of_group: dict[dist.ProcessGroup, Communicator] = {}  # for groups of other backends, which cannot hold theirs


def communicator(group: Group = None) -> Communicator:
    """Return the communicator of a ProcessGroup, a one-dimensional DeviceMesh, or the default group (None).

    Raises:
        ValueError: this rank is not in the group, the mesh has several dimensions, or there is no default group.
    """
    if group is None:
        group = distributed_c10d._world.default_pg  # dist.group.WORLD takes twice the time
        if group is None:
            raise ValueError(
                "group=None means the default process group, and there is none: call weft.init_mesh() or "
                "torch.distributed.init_process_group() first"
            )
    elif isinstance(group, Communicator):
        return group
    else:
        group = _process_group(group)
    if isinstance(group, WeftProcessGroup):
        if group.communicator is None:
            group.communicator = _made_for(group)
        return group.communicator
    if group not in _of_group:
        for destroyed in [other for other in _of_group if other not in distributed_c10d._world.pg_map]:
            del _of_group[destroyed]
        _of_group[group] = _made_for(group)
    return _of_group[group]


def _made_for(group: dist.ProcessGroup) -> Communicator:
    if isinstance(group, WeftProcessGroup) and "cuda" not in backends_of(group):
        return EngineCommunicator(group)
    return DeviceCommunicator(group)


def _process_group(group) -> dist.ProcessGroup:
    if isinstance(group, dist.ProcessGroup):
        return group
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group is a DeviceMesh of {group.ndim} dimensions {group.mesh_dim_names}; pass one of them, "
                f'like mesh["tp"]'
            )
        return group.get_group()
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "this rank is not in the group: new_group returned NON_GROUP_MEMBER here; "
            "build the layer only on the ranks that are in it"
        )
    raise TypeError(f"group must be a ProcessGroup, a one-dimensional DeviceMesh or None, got {type(group).__name__}")


def check_waits(group: Group = None) -> None:
    """Raise the failure of the group's kernels that gave up waiting for another rank.

    Collectives of CUDA tensors check this before they launch. A replayed CUDA graph does not. If a rank is lost, the
    graph's kernels end at their timeout or as soon as the loss is noticed, and their output is NaN. Call this after a
    replay:

        graph.replay()
        torch.cuda.synchronize()
        weft.check_waits()

    The group stays broken after any of these errors.

    Args:
        group: None is the default group.

    Raises:
        RankLostError: a rank died or left.
        CollectiveTimeoutError: a rank did not come within the group's timeout.
        CollectiveMismatchError: the ranks made different calls.

    Examples:
        >>> weft.check_waits()  # no kernel gave up waiting
    """
    communicator(group).check_waits()
