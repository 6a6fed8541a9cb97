"""init_mesh: names, order, and what does not multiply."""

import pytest
import torch.distributed as dist

import weft
from weft.testing.ranks import run_ranks, try_ranks


def check_mesh(rank):
    mesh = weft.init_mesh(pp=2, dp=1, cp=1, tp=2, device_type="cpu")
    assert mesh.mesh_dim_names == ("pp", "dp", "cp", "tp")
    assert mesh.mesh.flatten().tolist() == [0, 1, 2, 3]
    assert (mesh["pp"].get_local_rank(), mesh["tp"].get_local_rank()) == divmod(rank, 2)
    with pytest.raises(ValueError, match="DeviceMesh of 4 dimensions"):
        weft.ParallelLinear(4, 4, style="column", group=mesh)
    with pytest.raises(ValueError, match="pp=1 x dp=3 x cp=1 x tp=1 makes 3 ranks, and this run has 4"):
        weft.init_mesh(dp=3)
    with pytest.raises(ValueError, match="tp=0 must be at least 1"):
        weft.init_mesh(tp=0)


def test_tp_changes_fastest_and_the_product_must_be_the_world():
    run_ranks(check_mesh, 4)


def check_alone(rank):
    mesh = weft.init_mesh(device_type="cpu")
    assert dist.get_backend() == "weft" and mesh["tp"].size() == 1
    assert weft.ParallelLinear(4, 4, style="column", group=mesh["tp"]).weight.shape == (4, 4)


def test_without_a_launcher_one_process_is_a_mesh():
    (outcome,) = try_ranks(check_alone, 1, backend=None)
    assert outcome.error is None, outcome.traceback
