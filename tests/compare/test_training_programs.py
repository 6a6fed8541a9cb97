"""`weft compare` on programs as users write them: silent about right ones, and faults are named."""

import re
from functools import partial

import pytest
import training_programs as programs
from recorded_runs import compared

RIGHT = [
    ("accumulation", 2),
    ("accumulation_of_four", 2),
    ("accumulation_of_four", 4),
    ("by_closure", 2),
    ("clip_by_hand", 2),
    ("distillation", 2),
    ("dtensor", 2),
    ("gan", 2),
    ("groups", 2),
    ("hsdp", 4),
    ("interleaved", 2),
    ("local_sgd", 2),
    ("pipeline", 2),
    ("policy", 2),
    ("pooled", 2),
    ("ring", 2),
    ("ring", 4),
    ("sequence_parallel", 2),
    ("sum_of_rows", 2),
    ("unet", 2),
    ("words", 2),
    ("zero_by_hand", 2),
    ("zero_of_torch", 2),
]


def run(name, world, fault="", seed=0):
    program = getattr(programs, name)
    return compared((program, "", seed), partial(program, fault, seed), world)


@pytest.mark.parametrize(("name", "world"), RIGHT)
def test_what_is_right_agrees(name, world):
    found = run(name, world)
    assert found.ok, found
    assert not found.unknown and found.compared > 90


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
def test_what_is_right_agrees_with_other_numbers(seed):
    for name, world in RIGHT:
        found = run(name, world, seed=seed)
        assert found.ok, (name, world, str(found))


A_PART = "it is a part: the (sum|mean) over ranks 0, 1 is the reference's"
# (program, fault, where it is, what it looks like, ranks)
PLANTED = [
    ("accumulation", "drops alike", "drop", "have different parts and drop the same"),
    ("accumulation", "second micro-batch", "", "input of the model: no rank has 4 to 7 of its dimension 0"),
    ("accumulation", "no last reduction", "first.weight", f"step 1.*{A_PART}"),
    ("accumulation", "not divided", "loss", ""),
    ("accumulation_of_four", "second micro-batch", "", "no rank has the reference's call 3"),
    ("by_closure", "other rows", "", "step 0"),
    ("clip_by_hand", "bias twice", "blocks.1.down.bias", r"it is 1\.\d+ times the reference's"),
    ("distillation", "teacher sees another batch", "", "the input of Perceptron differs"),
    ("distillation", "average decays twice", r"Perceptron(3).first.weight", "step 1"),
    ("dtensor", "no mask", "blocks.0", "the input of blocks.0.o"),
    ("dtensor", "norm2 not parallel", "blocks.0.norm2.weight", A_PART),
    ("gan", "not detached", "Sequential.0.weight", "step 1"),
    ("gan", "generator not averaged", "Sequential.0.weight", A_PART),
    (
        "groups",
        "decay of norms",
        "optimizer",
        "weight_decay of blocks.0.norm1.weight and .* it is 0.1, the reference's 0",
    ),
    ("groups", "eps", "optimizer", "eps of tokens.weight and .* it is 1e-06, the reference's 1e-08"),
    ("hsdp", "batch by replica", "", "no rank has 1 and 3 of its dimension 0", 4),
    ("hsdp", "loss twice", "loss", "", 4),
    ("interleaved", "scaled", "", "the input of blocks.2 .* it is 1.1 times"),
    ("local_sgd", "no average of biases", "first.bias", A_PART),
    ("local_sgd", "every second step", "first.weight", A_PART),
    ("local_adam", "", "first.weight", "Ranks average parameters after their steps: another algorithm"),
    ("pipeline", "not divided", "loss", ""),
    ("pipeline", "labels", "loss", ""),
    ("pipeline", "scaled", "", "the input of blocks.2 .* it is 1.1 times"),
    ("policy", "normalised apart", "loss", ""),
    ("policy", "other limit", "loss", "step 1"),
    ("policy", "values not averaged", "Sequential.0.weight", A_PART),
    ("pooled", "body twice", "body.weight", "the gradient of body.weight .* it is 2 times the reference's"),
    ("pooled", "rows not summed", "rows", "the updated buffer of rows .* it is a part: the sum over ranks 0, 1"),
    ("ring", "own chunk alone", "blocks.0", "rank 1: the input of blocks.0.o"),
    ("ring", "sums not scaled", "blocks.0", "rank 1: the input of blocks.0.o"),
    ("ring", "no reduction of q", "blocks.0.q.weight", A_PART),
    ("sequence_parallel", "sum of own words", "loss", ""),
    ("sequence_parallel", "words shifted", "loss", ""),
    ("sequence_parallel", "norms not reduced", "blocks.0.norm1.weight", A_PART),
    ("sum_of_rows", "mean", "first.weight", "it is 0.5 times the reference's$"),
    ("unet", "drops alike", "drop", "drop the same"),
    ("unet", "statistics apart", "norm", "the output of norm"),
    ("unet", "running statistics apart", "norm.running_var", "the updated buffer of norm.running_var"),
    ("words", "rate", "1.drop", "it drops 0.5, the reference 0.2"),
    ("words", "evaluates", "1.drop", "it drops nothing, the reference 0.2"),
    ("words", "not frozen", "1.first.weight", "the reference has none: it is frozen there"),
    ("zero_by_hand", "no broadcast", "blocks.0.norm2.bias", "step 1.* it is that of the step before"),
    ("zero_of_torch", "weight decay", "optimizer", "weight_decay of tokens.weight .* it is 0, the reference's 0.01"),
    ("zero_of_torch", "betas", "optimizer", "it is 0.9, 0.999, the reference's 0.9, 0.99"),
]


@pytest.mark.parametrize(("name", "fault", "where", "looks", "world"), [(*x, 2)[:5] for x in PLANTED])
def test_a_fault_is_found_where_it_is(name, fault, where, looks, world):
    found = run(name, world, fault)
    assert found.findings and found.findings[0].module == where, found
    assert re.search(looks, str(found.findings[0])), found
