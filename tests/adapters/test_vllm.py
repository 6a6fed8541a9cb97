"""The communicator of vLLM's groups, on a stand-in for vLLM's base class: what each method returns, on every rank.

docs/adapters.md says how vLLM itself was run over it.
"""

import importlib
import sys
import types

import pytest
import torch
import torch.distributed as dist

from weft.testing.ranks import run_ranks


class Base:
    """What vLLM's DeviceCommunicatorBase has of a group."""

    def __init__(self, cpu_group, device=None, device_group=None, unique_name="", use_all2all=False):
        self.cpu_group, self.device_group, self.use_all2all = cpu_group, device_group, use_all2all
        self.world_size, self.ranks = dist.get_world_size(cpu_group), dist.get_process_group_ranks(cpu_group)


@pytest.fixture
def adapter(monkeypatch):
    at = "vllm.distributed.device_communicators.base_device_communicator"
    parts = at.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
    sys.modules[at].DeviceCommunicatorBase = Base
    platform = types.ModuleType("vllm.platforms.cpu")
    platform.CpuPlatform = type("CpuPlatform", (), {"get_device_communicator_cls": classmethod(lambda cls: "vllm's")})
    monkeypatch.setitem(sys.modules, "vllm.platforms", types.ModuleType("vllm.platforms"))
    monkeypatch.setitem(sys.modules, "vllm.platforms.cpu", platform)
    yield importlib.import_module("weft.adapters.vllm")
    sys.modules.pop("weft.adapters.vllm")


def calls(rank, world, make):
    members = list(range(1, world))  # a group whose ranks are not the global ones
    group = dist.new_group(members)
    if rank == 0:
        return
    ranks = make(cpu_group=group, device_group=group, unique_name="tp:0")
    at, count = rank - 1, world - 1
    every = [torch.arange(6.0).view(2, 3) + 10 * r for r in range(count)]
    for dim in (0, 1, -1):
        assert torch.equal(ranks.all_gather(every[at], dim), torch.cat(every, dim))
        sizes = [r + 1 for r in range(count)]
        uneven = [torch.full((2, 2), float(r)).repeat_interleave(sizes[r], dim) for r in range(count)]
        given = [2 * size for size in sizes]
        found = ranks.all_gatherv([uneven[at], 2 * uneven[at]], dim, given)
        assert torch.equal(found[0], torch.cat(uneven, dim)) and torch.equal(found[1], 2 * found[0])
        whole = torch.arange(float(2 * sum(given))).view((-1, 2) if dim == 0 else (2, -1))
        own = whole.split(given, dim)[at]
        assert torch.equal(ranks.reduce_scatterv((at + 1) * whole, dim, given), own * sum(sizes))
    equal = torch.arange(4.0 * count).view(count, 4)
    assert torch.equal(ranks.reduce_scatter(equal, 0), equal[at : at + 1] * count)
    if at == 0:
        tensors = {"hidden": torch.randn(3, 5).t(), "none": torch.empty(0, 7), "mask": torch.tensor([True, False])}
        sent = {"step": 4, **tensors, "bf16": torch.ones(3, dtype=torch.bfloat16)}
        ranks.send_tensor_dict(sent, 1)
        assert torch.equal(ranks.recv_tensor_dict(1)["hidden"], sent["hidden"])
    elif at == 1:
        got = ranks.recv_tensor_dict(0)
        assert list(got) == ["step", "hidden", "none", "mask", "bf16"] and got["step"] == 4
        assert got["none"].shape == (0, 7) and got["mask"].tolist() == [True, False]
        assert got["bf16"].dtype == torch.bfloat16 and got["hidden"].shape == (5, 3)
        ranks.send_tensor_dict(got, 0)


@pytest.mark.parametrize("world", [3, 4])
def test_collectives_are_those_of_the_group(world, adapter):
    run_ranks(calls, world, world, adapter.WeftCommunicator)


@pytest.mark.parametrize(("value", "named"), [("1", "weft.adapters.vllm.WeftCommunicator"), ("0", "vllm's")])
def test_vllm_gets_it_where_weft_takes_gloos_place(value, named, adapter, monkeypatch):
    monkeypatch.setenv("WEFT_AS_GLOO", value)
    adapter.register()
    assert sys.modules["vllm.platforms.cpu"].CpuPlatform.get_device_communicator_cls() == named
