"""all_reduce of vLLM and of FlashInfer, as peers of `weft bench several_gpus` where they are installed.

vLLM's CustomAllreduce copies its input to a buffer of its own, as it does outside of its own capture of CUDA graphs.
FlashInfer's allreduce_fusion has the kernels of TensorRT-LLM, also with the residual and RMSNorm behind the sum.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from weft.comm.communicator import Communicator

LARGEST_BYTES = 8 << 20  # of a call: vLLM's default
_ROW = 2048  # elements of FlashInfer's rows, if only sums are asked for

AllReduce = Callable[[torch.Tensor], torch.Tensor]
Norm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Peer:
    """Another package's calls. They give new tensors, and raise ValueError for a tensor that they do not take.

    Attributes:
        all_reduce: x -> the sum of x over the ranks.
        norm: as `weft.all_reduce_rms_norm`; None if the package has no such kernel.
    """

    all_reduce: AllReduce
    norm: Norm | None = None


def open_peers(
    ranks: Communicator, group: dist.ProcessGroup, device: torch.device
) -> tuple[dict[str, Peer], dict[str, str]]:
    """Return the peers that work on every rank, and the reason for each other one. All ranks call it.

    Args:
        ranks: over which the ranks agree.
        group: the same ranks, in host memory.
    """
    peers: dict[str, Peer] = {}
    missing: dict[str, str] = {}
    for name, make in MAKERS.items():
        reason = ""
        try:
            peer = make(group, device)
        except ImportError as error:
            reason = f"not installed ({error})"
        except Exception as error:  # whatever another package raises costs its own figures only
            reason = first_line(error)
        if reason := next(filter(None, ranks.all_gather_object(reason)), ""):
            missing[name] = reason
        else:
            peers[name] = peer
    return peers, missing


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def vllm(group: dist.ProcessGroup, device: torch.device) -> Peer:
    from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce

    custom: Any = CustomAllreduce(group, device, max_size=LARGEST_BYTES + 1)  # sizes below it
    if hasattr(custom, "finalize_p2p"):  # a later vLLM makes its buffers there
        custom.finalize_p2p()
    if custom.disabled:
        raise ValueError("vLLM does not use its custom all_reduce on these GPUs")

    def all_reduce(x: torch.Tensor) -> torch.Tensor:
        if not custom.should_custom_ar(x):
            raise ValueError("vLLM does not use its custom all_reduce at this size")
        return custom.all_reduce(x)

    return Peer(all_reduce)


def flashinfer(group: dist.ProcessGroup, device: torch.device) -> Peer:
    from flashinfer.comm import AllReduceFusionPattern, allreduce_fusion, create_allreduce_fusion_workspace

    rows = LARGEST_BYTES // (_ROW * torch.bfloat16.itemsize)
    workspace = create_allreduce_fusion_workspace(
        "trtllm", group.size(), group.rank(), rows, _ROW, torch.bfloat16, group=group
    )

    def all_reduce(x: torch.Tensor) -> torch.Tensor:
        if x.numel() % _ROW or x.numel() > rows * _ROW:
            raise ValueError(f"FlashInfer's workspace is for {rows} rows of {_ROW}")
        x = x.view(-1, _ROW)
        pattern = AllReduceFusionPattern.kAllReduce
        return allreduce_fusion(x, workspace, pattern, output=torch.empty_like(x)).view(-1)

    def norm(partial, residual, weight, eps) -> tuple[torch.Tensor, torch.Tensor]:
        normalised, total = torch.empty_like(partial), torch.empty_like(partial)
        out = {"residual_out": total, "norm_out": normalised}
        given = {"residual_in": residual, "rms_gamma": weight, "rms_eps": eps}
        allreduce_fusion(partial, workspace, AllReduceFusionPattern.kARResidualRMSNorm, **out, **given)
        return normalised, total

    return Peer(all_reduce, norm)


MAKERS: dict[str, Callable[[dist.ProcessGroup, torch.device], Peer]] = {"vLLM": vllm, "FlashInfer": flashinfer}
