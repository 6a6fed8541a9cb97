"""Errors of a group name the program's ranks, not the places of the ranks in the group."""

import pytest
import torch
from torch import nn

import weft
from weft.nn import Experts
from weft.testing.ranks import run_ranks


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.seldom = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, both=True):
        return self.seldom(self.used(x)) if both else self.used(x)


def other_options(rank, mesh, path):
    weft.DataParallel(mlp(), group=mesh["dp"], bucket_mb=1 + rank // 3)


def other_parameters(rank, mesh, path):
    model = mlp()
    model[0].requires_grad_(rank != 3)
    weft.DataParallel(model, group=mesh["dp"])


def an_obstacle(rank, mesh, path):
    weft.DataParallel(mlp() if rank < 3 else nn.Identity(), group=mesh["dp"])


def unused(rank, mesh, path):
    model = weft.DataParallel(Branch(), group=mesh["dp"])
    for both in (True, rank != 3):
        model(torch.ones(2, 4), both=both).sum().backward()


def frozen_on_one(rank, mesh, path):
    model = weft.DataParallel(mlp(), group=mesh["dp"])
    model.module[0].requires_grad_(rank != 3)
    model(torch.ones(2, 4)).sum().backward()


def copies_that_differ(rank, mesh, path):
    model = weft.DataParallel(mlp(), group=mesh["dp"])
    with torch.no_grad():
        model.module[0].weight.add_(rank == 3)
    weft.check_replicas(model)


def other_calls(rank, mesh, path):
    weft.parallelize(mlp(), mesh["tp"], plan={"0": "column", "2": "row"})(torch.full((2, 4), float(rank == 3)))


def equal_parts(rank, mesh, path):
    model = weft.parallelize(mlp(), mesh["tp"], plan={"0": "column", "2": "row"})
    if rank > 1:
        nn.init.normal_(model[0].weight, generator=torch.Generator().manual_seed(0))
    model(torch.ones(2, 4))


def drifted_tensors(rank, mesh, path):
    model = mlp()
    with torch.no_grad():
        model[0].weight.add_(rank == 3)
    weft.save_checkpoint(model, None, path / str(rank // 2), group=mesh["tp"])


def other_stages(rank, mesh, path):
    along = weft.init_mesh(dp=2, pp=2)["pp"]
    weft.Pipeline(mlp(), along, microbatches=2 if rank < 3 else 4, loss=nn.MSELoss(), layers=["0", "1", "2"])


def no_such_expert(rank, mesh, path):
    mesh = weft.init_mesh(dp=4, ep=2)
    model = nn.ModuleDict({"experts": Experts(4, 4, 4)})
    experts = weft.parallelize(model, mesh["pp", "cp", "tp"], plan={"experts": "experts"})["experts"]
    experts(torch.ones(2, 4), torch.full((2, 1), 9 if rank == 3 else 0), torch.ones(2, 1))


FOUND = {
    other_options: ("rank 1 has bucket_mb=1, rank 3 has bucket_mb=2", (1, 3)),
    other_parameters: ("rank 1 has the parameter '0.weight' .*, which rank 3 does not train", (1, 3)),
    an_obstacle: ("DataParallel on rank 3: ", (1, 3)),
    unused: ("'seldom.weight' on rank 3", (1, 3)),
    frozen_on_one: ("ranks 1 and 3 do not train the same", (1, 3)),
    copies_that_differ: ("module.0.weight differs between rank 1 and rank 3", (1, 3)),
    other_calls: ("ranks 2 and 3, which compute one model together", (2, 3)),
    equal_parts: ("ranks 2 and 3 have the same part of 0.weight", (2, 3)),
    drifted_tensors: ("0.weight of rank 2 on rank 3", (2, 3)),
    other_stages: ("rank 1 has .*; rank 3 has ", (1, 3)),
    no_such_expert: ("the router chose expert 9 on rank 3", (2, 3)),
}


def fail(rank, path):
    mesh = weft.init_mesh(dp=2, tp=2)
    for case, (text, where) in FOUND.items():
        if rank in where:
            with pytest.raises((ValueError, RuntimeError), match=text):
                case(rank, mesh, path)
        else:
            case(rank, mesh, path)
    model = weft.DataParallel(mlp(), group=mesh["dp"], check_gradients=True)
    model(torch.full((2, 4), torch.nan if rank == 3 else 1.0)).sum().backward()
    assert model.nonfinite_parameters().get("0.weight") == ([3] if rank % 2 else None)


def test_errors_name_the_programs_ranks(tmp_path):
    run_ranks(fail, 4, tmp_path)
