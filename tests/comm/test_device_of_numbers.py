"""Numbers that hosts exchange go where `device_of_numbers` puts them: a group of GPUs alone refuses CPU tensors.

Without a GPU, a group refuses integers instead that were not made on the device it was asked for.
"""

import pytest
import torch
from replicas_of_mlp import batch, loss_of, mlp
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

import weft
from weft.comm import cuda
from weft.comm.communicator import Communicator
from weft.comm.cuda import DeviceCommunicator
from weft.comm.engine_communicator import EngineCommunicator
from weft.comm.registry import communicator
from weft.nn import Branches
from weft.testing.ranks import run_ranks

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("backends", "where"),
    [({"cpu": "weft", "cuda": "nccl"}, "cpu"), ({"cpu": "gloo", "cuda": "nccl"}, "cpu"), ({"cuda": "nccl"}, "cuda")],
)
def test_they_go_to_the_gpu_only_where_the_group_serves_no_other_memory(backends, where, monkeypatch):
    monkeypatch.setattr(cuda, "backends_of", lambda group: backends)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for device in (GPU, torch.device("cpu")):
        assert DeviceCommunicator(ProcessGroup(0, 2)).device_of_numbers(device).type == where


def refuse_others():
    """Let the rank's groups refuse integers beyond those that they were asked for; return what they were asked."""
    asked, exchanged = [], []

    def device_of_numbers(self, device):
        asked.append(device)
        return torch.device("cpu")

    def strict(method):
        def call(self, x, *rest, **options):
            first = x[0] if isinstance(x, list) else x
            if first.dtype in (torch.int32, torch.int64) and not any(first is other for other in exchanged):
                assert len(exchanged) < len(asked), f"{method.__name__} of {first}, for which no group was asked"
                exchanged.append(first)  # it may be exchanged again
            return method(self, x, *rest, **options)

        return call

    Communicator.device_of_numbers = device_of_numbers
    for name in ("all_reduce_", "broadcast_", "all_gather_into", "all_to_all_into"):
        setattr(EngineCommunicator, name, strict(getattr(EngineCommunicator, name)))
    return asked


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)


def exchange(rank, what):
    asked = refuse_others()
    with pytest.raises(AssertionError, match="no group was asked"):
        communicator().all_reduce_(torch.tensor([1]))
    if what == "sequence":
        model = weft.parallelize(Attention(), weft.init_mesh(cp=2, device_type="cpu"), plan={})
        model(torch.randn(2, 6, 16)).sum().backward()
    elif what == "branches":
        block = Branches([nn.Linear(4, 3), nn.Linear(4, 2)], dim=-1)
        assert block(torch.randn(2, 4)).shape == (2, 5)
    elif what == "data parallel":
        loss_of(weft.DataParallel(mlp())(batch(0, rank))).backward()
    elif what == "batch in units":
        loss_of(weft.DataParallel(mlp(), invariant=2)(batch(0, rank))).backward()
    elif what == "uneven parts":
        assert weft.all_gather(torch.zeros(rank + 1, 2)).shape == (3, 2)
        assert weft.all_to_all([torch.zeros(rank), torch.zeros(2)])[1].numel() == 1 + rank
    assert asked


@pytest.mark.parametrize("what", ["sequence", "branches", "data parallel", "batch in units", "uneven parts"])
def test_every_exchange_asks_its_group(what):
    run_ranks(exchange, 2, what)
