"""as_dtensors: views of a split model's memory that torch's own tools take."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import weft
from weft.testing.ranks import run_ranks

PLAN = {"0": "column", "2": "row"}


def model_of(hidden=12):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, hidden), nn.ReLU(), nn.Linear(hidden, 3), nn.BatchNorm1d(3))
    model[3].running_mean.fill_(2.0)
    return model


def store(rank, hidden, folder):
    mesh = weft.init_mesh(tp=torch.distributed.get_world_size(), device_type="cpu")
    model = weft.parallelize(model_of(hidden), mesh, plan=PLAN)
    views = weft.as_dtensors(model)
    assert views.keys() == weft.as_dtensors(model, mesh["tp"]).keys()
    whole = model_of(hidden).state_dict()
    assert views.keys() == whole.keys()
    for name, view in views.items():
        assert torch.equal(view.full_tensor(), whole[name]), name
        assert view.to_local().data_ptr() == model.state_dict()[name].data_ptr()
    views["0.weight"].zero_()
    assert not model[0].weight.any()
    view = views["0.weight"]
    view.copy_(torch.distributed.tensor.distribute_tensor(whole["0.weight"], view.device_mesh, view.placements))
    dcp.save({"model": views}, checkpoint_id=folder)


@pytest.mark.parametrize(("world", "hidden"), [(2, 12), (3, 11)])
def test_torchs_checkpoints_take_the_views_and_load_in_one_process(world, hidden, tmp_path):
    run_ranks(store, world, hidden, tmp_path)
    whole = model_of(hidden).state_dict()
    loaded = {name: torch.zeros_like(value) for name, value in whole.items()}
    dcp.load({"model": loaded}, checkpoint_id=tmp_path, no_dist=True)
    assert all(torch.equal(value, whole[name]) for name, value in loaded.items())


def refuse(rank):
    mesh = weft.init_mesh(tp=4, device_type="cpu")
    model = weft.parallelize(model_of(5), mesh, plan=PLAN)  # 2, 1, 1, 1; torch.chunk makes 2, 2, 1 of it
    with pytest.raises(ValueError, match=r"0.weight \(\[2, 1, 1, 1\] of 5\), 0.bias .*weft.save_checkpoint stores"):
        weft.as_dtensors(model, mesh["tp"])
    with pytest.raises(ValueError, match="0.weight is split over 4 other ranks than the mesh's"):
        weft.as_dtensors(model, mesh["pp"])
    with pytest.raises(ValueError, match='mesh must be one dimension, mesh."tp".'):
        weft.as_dtensors(model, mesh)


def test_cuts_that_dtensor_does_not_know_are_refused():
    run_ranks(refuse, 4)
