"""vLLM on CPUs over weft: the collectives of vLLM's tensor, pipeline, data and expert groups.

    WEFT_AS_GLOO=1 vllm serve MODEL --tensor-parallel-size 2

vLLM calls `register` in every process that it starts, by weft's entry point. The variable makes vLLM's process groups
weft's; `register` makes vLLM's CPU platform use them through the communicator here, on any number of ranks. Without the
variable nothing changes.
"""

import os

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase

from weft.comm.registry import communicator
from weft.sharding.sizes import split_sizes

NAME = f"{__name__}.WeftCommunicator"


def register() -> None:
    """Let vLLM's CPU platform use WeftCommunicator, if WEFT_AS_GLOO=1."""
    if os.environ.get("WEFT_AS_GLOO") == "1":
        from vllm.platforms.cpu import CpuPlatform

        CpuPlatform.get_device_communicator_cls = classmethod(lambda cls: NAME)


class WeftCommunicator(DeviceCommunicatorBase):
    """Communicator of one of vLLM's groups. all_reduce, gather, send and recv are vLLM's own, on weft's group."""

    supports_tensor_dict = True

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self._ranks = communicator(self.device_group)
        if self.use_all2all:
            from vllm.distributed.device_communicators.all2all import AgRsAll2AllManager

            self.all2all_manager = AgRsAll2AllManager(self.cpu_group)

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Return the ranks' tensors, which have one shape, one after another along `dim`."""
        return self._all_gather(input_, dim, None)

    def all_gatherv(self, input_, dim: int = 0, sizes: list[int] | None = None):
        """Return the ranks' tensors one after another along `dim`, where rank r's has `sizes[r]` elements.

        A list of tensors gives a list.
        """
        if isinstance(input_, torch.Tensor):
            return self._all_gather(input_, dim, sizes)
        return [self._all_gather(x, dim, sizes) for x in input_]

    def reduce_scatter(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Return this rank's equal part along `dim` of the ranks' sum."""
        return self.reduce_scatterv(input_, dim, None)

    def reduce_scatterv(self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
        """Return this rank's part along `dim` of the ranks' sum, `sizes[r]` elements for rank r."""
        dim %= input_.dim()
        sizes = sizes or split_sizes(input_.size(dim), self.world_size)
        return self._ranks.reduce_scatter(input_, dim, tuple(sizes))

    def send_tensor_dict(self, tensor_dict: dict, dst: int) -> None:
        """Send the values of a dictionary, tensors and others, to a rank of the group."""
        tensors = {name: value for name, value in tensor_dict.items() if isinstance(value, torch.Tensor)}
        others = {name: value for name, value in tensor_dict.items() if name not in tensors}
        described = [(name, x.dtype, x.shape) for name, x in tensors.items()]
        dist.send_object_list([list(tensor_dict), described, others], self.ranks[dst], self.device_group)
        for x in tensors.values():
            if x.numel():
                dist.send(x.contiguous(), self.ranks[dst], self.device_group)

    def recv_tensor_dict(self, src: int) -> dict:
        """Return the dictionary that rank `src` of the group sends, in its order."""
        received: list = [None, None, None]
        dist.recv_object_list(received, self.ranks[src], self.device_group)
        names, described, found = received
        for name, dtype, shape in described:
            found[name] = torch.empty(shape, dtype=dtype)
            if found[name].numel():
                dist.recv(found[name], self.ranks[src], self.device_group)
        return {name: found[name] for name in names}

    def dispatch_router_logits(self, hidden_states, router_logits, is_sequence_parallel=False, extra_tensors=None):
        """Return every rank's tokens and scores, for experts that are spread over the ranks."""
        manager = self.all2all_manager
        return manager.dispatch_router_logits(hidden_states, router_logits, is_sequence_parallel, extra_tensors)

    def dispatch(self, hidden_states, topk_weights, topk_ids, is_sequence_parallel=False, extra_tensors=None):
        """Return every rank's tokens with the weights and numbers of their experts."""
        manager = self.all2all_manager
        return manager.dispatch(
            hidden_states, topk_weights, topk_ids, is_sequence_parallel, extra_tensors=extra_tensors
        )

    def combine(self, hidden_states: torch.Tensor, is_sequence_parallel: bool = False) -> torch.Tensor:
        """Return this rank's tokens, summed over the ranks' experts."""
        return self.all2all_manager.combine(hidden_states, is_sequence_parallel)

    def _all_gather(self, x: torch.Tensor, dim: int, sizes: list[int] | None) -> torch.Tensor:
        dim %= x.dim()
        return self._ranks.all_gather(x, dim, tuple(sizes) if sizes else (x.size(dim),) * self.world_size)
