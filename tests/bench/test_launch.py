"""weft bench launch: what it times is what it says, and what it cannot time it names."""

import pytest
import torch

from weft.bench import launch as bench
from weft.cli import main


def test_without_a_gpu_each_part_is_not_measured_with_the_reason(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    assert main(["bench", "launch", "--rounds", "3"]) == 0
    said = capsys.readouterr().out
    assert said.count("not measured") == len(bench.PARTS) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("part", bench.PARTS)
def test_every_part_times_both_calls(part):
    if reason := bench._why_not():
        pytest.skip(reason)
    lines = list(bench.PARTS[part](3))
    assert [line.of["shape"] for line in lines] == ["bucket.reduce", "matmul"]
    assert all(line.ours.p50_us > 0 and line.ratio > 0 for line in lines)
