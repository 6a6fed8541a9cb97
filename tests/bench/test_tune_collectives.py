"""weft tune collectives: from times to the sizes at which algorithms take turns."""

import pytest
import torch

from weft.bench import tune_collectives
from weft.cli import main
from weft.comm.crossovers import NEVER, Crossovers

NAMES = ("low_latency", "one_shot", "two_shot", "nccl", "gather", "gather by nccl", "in place", "copies")


def times(**faster):
    """1 us for the algorithm that a size's letter names, 2 us for all others."""
    sizes = [1 << shift for shift in range(10, 16)]
    return {
        size: {name: 1.0 if of_name[number] == "x" else 2.0 for name, of_name in faster.items()}
        for number, size in enumerate(sizes)
    }


def test_each_algorithm_begins_where_it_is_never_the_slower_one_again():
    found = tune_collectives.crossovers(
        {
            size: {"gather": 1.0, "gather by nccl": 2.0 - (size >= 1 << 14) * 1.5, **row}
            for size, row in times(
                **{
                    "low_latency": "xx....",
                    "one_shot": "..xx..",
                    "two_shot": "....x.",
                    "nccl": ".....x",
                    "in place": "x.x...",
                    "copies": ".x.xxx",
                }
            ).items()
        }
    )
    assert found == Crossovers(one_shot=1 << 12, two_shot=1 << 14, nccl=1 << 15, copies=1 << 13)


def test_an_algorithm_that_is_never_or_always_the_fastest():
    names = {name: "xxxxxx" if name in ("two_shot", "gather", "in place") else "......" for name in NAMES}
    assert tune_collectives.crossovers(times(**names)) == Crossovers(0, 0, NEVER, NEVER)
    del names["low_latency"]  # it fits no size
    assert tune_collectives.crossovers(times(**names)).one_shot == 0


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="there are GPUs to measure")
def test_without_several_gpus_nothing_is_written(tmp_path):
    with pytest.raises(SystemExit, match="needs several GPUs"):
        main(["tune", "collectives", "--out", str(tmp_path)])
    assert not list(tmp_path.iterdir())
