"""`weft compare` on programs in the manner of Megatron-core: names of each rank, parts of modules, what a dispatch gives."""

import re
from functools import partial

import megatron_programs as programs
import pytest
import torch
from recorded_runs import compared, recorded
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from weft.tools.compare.comparison import compare_recordings
from weft.tools.compare.rank_recording import RankRecording
from weft.tools.compare.scalars import wrong_loss
from weft.tools.compare.seen import Key, Seen

RENAME = {"stages": programs.STAGES, "experts": programs.OF_RANKS}


def run(name, fault="", seed=0):
    program = getattr(programs, name)
    return compared((program, "", seed), partial(program, fault, seed), 2, RENAME[name])


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))])
@pytest.mark.parametrize("name", RENAME)
def test_what_is_right_agrees(name, seed):
    found = run(name, seed=seed)
    assert found.ok, found
    assert not found.unknown and found.compared > 300


@pytest.mark.parametrize(
    ("name", "fault", "where", "looks"),
    [
        ("stages", "other scale", "decoder.layers.2.mixing", "the input of .*Softmax .* it is 1.5 times"),
        ("stages", "scaled", "decoder", "the input of decoder.layers.2 .* it is 1.1 times"),
        ("stages", "bias twice", "decoder.layers.3.mixing.bias", "it is 2 times the reference's"),
        ("experts", "in another order", "mixture", "rank 1: the output of mixture differs"),
        ("experts", "experts swapped", "mixture", "the input 1 of mixture.experts"),
        ("experts", "experts averaged", "mixture.experts.local.0.weight", "rank 0: the gradient of mixture.experts"),
    ],
)
def test_a_fault_is_found_where_it_is(name, fault, where, looks):
    found = run(name, fault)
    assert found.findings and found.findings[0].module == where, found
    assert re.search(looks, str(found.findings[0])), found


def test_names_are_those_of_the_ranks_that_are_given():
    seen, _ = recorded(partial(nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2)))
    for rank, names in ((0, {"", "0"}), (1, {"", "a"}), (2, {"", "a"}), (3, {"", "b"})):
        recording = RankRecording(rank, seen, {"1-2:0": "a", "3:0": "b"})
        assert {name.removesuffix(".weight").removesuffix(".bias") for name in recording.names} == names
    with pytest.raises(ValueError, match="ranks must be like 0,1 or 0-9 or 5, and not 'first'"):
        RankRecording(0, seen, {"first:0": "a"})


class Attention(nn.Module):
    def forward(self, x):
        return flex_attention(x, x, x)


def test_flex_attention_that_is_not_compiled_is_left_as_it_is(monkeypatch):
    monkeypatch.setattr("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), Attention()), torch.randn(1, 2, 128, 8)

    def program():
        with torch.no_grad():
            model(x)

    (seen, edges), (other, _) = recorded(program), recorded(program, reordered=True)
    found = compare_recordings(seen, edges, other, [seen], {})
    assert found.ok and found.compared > 5


def of(tensors):
    return [Seen(Key(0, kind, name, 0, 0, 0), x, outermost="") for (kind, name), x in tensors.items()]


def test_a_tensor_of_another_shape_or_of_zeros_is_right_if_what_is_made_of_it_is():
    torch.manual_seed(0)
    x, made, out = torch.randn(4, 6), torch.randn(1, 4, 3), torch.randn(4, 2)
    names = ("input", ""), ("output", "a"), ("output", "b")
    edges = [(("a", 0, 0), ("b", 0, 0))]
    whole = of(dict(zip(names, (x, made, out), strict=True)))
    for other in (made.transpose(0, 1), torch.zeros_like(made)):
        for last, made_of_it, wrong in ((out, edges, []), (out * 1.5, edges, ["a", "b"]), (out * 1.5, [], ["b"])):
            run = of(dict(zip(names, (x, other, last), strict=True)))
            found = compare_recordings(whole, made_of_it, whole, [run], {})
            assert [finding.module for finding in found.findings] == wrong, found


def test_counts_that_ranks_have_of_their_own_rows_are_parts():
    x, counts, out = torch.randn(4, 6), torch.tensor([5, 3, 0, 8]), torch.randn(4, 2)
    runs = [
        of({("input", ""): x[rows], ("input", "a"): own, ("output", "a"): out[rows]})
        for rows, own in ((slice(None), counts), (slice(2), counts // 2), (slice(2, 4), counts - counts // 2))
    ]
    assert compare_recordings(runs[0], [], runs[0], runs[1:], {}).ok
    wrong = of({("input", ""): x[2:], ("input", "a"): counts, ("output", "a"): out[2:]})
    assert not compare_recordings(runs[0], [], runs[0], [runs[1], wrong], {}).ok


@pytest.mark.parametrize(
    ("of_ranks", "right"),
    [
        ([2.0, 2.0, 2.0, 2.0], True),
        ([1.6, 2.4, 1.8, 2.2], True),  # means of their rows
        ([0.4, 0.6, 0.45, 0.55], True),  # shares of the whole
        ([0.8, 1.2, 0.8, 1.2], True),  # shares, the same on two ranks of tp
        ([1.2, 1.2, 0.8, 0.8], True),
        ([0.8, 1.2, 0.9, 1.1], False),
        ([4.0, 4.0, 4.0, 4.0], False),
    ],
)
def test_a_loss_may_be_shared_out_over_ranks_and_their_copies(of_ranks, right):
    loss, _ = wrong_loss(0, [2.0], [[x] for x in of_ranks], 0.0, 0.0)
    assert (loss is None) == right


def test_a_norm_has_more_rounding_than_two_runs_show():
    norm = torch.tensor(3.0)
    whole = of({("input", ""): torch.ones(2, 2), ("norm", ""): norm})
    for factor, ok in ((1 + 5e-6, True), (1 + 1e-4, False)):
        run = of({("input", ""): torch.ones(2, 2), ("norm", ""): norm * factor})
        assert compare_recordings(whole, [], whole, [run], {}).ok == ok
