"""What functions do to a shared sequence, called in every way there is, is what they do to the whole."""

import os
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from shared_calls import CASES, Draw, RefusedError, outcomes

import weft.context_parallel.attention  # noqa: F401
from weft.comm.registry import communicator
from weft.context_parallel.shared_sequence import RULES, SequenceCut, SharedSequence, Sharing, in_units, name_of
from weft.ops.sequence_layout import SequenceLayout
from weft.testing.ranks import run_ranks

# Of one tensor of three dimensions; (0, 1) are two dimensions to a sum, and a dimension and a flag to nothing.
REDUCTIONS = [
    *(((dim,), {}) for dim in (0, 1, 2, -1, [0], (0, 1), (-1, -2), (0, 1, 2))),
    *(((dim, flag), {}) for dim in (0, 2, (0, 2), (1, 2)) for flag in (False, True)),
    *(((), named) for named in ({}, {"dim": 0}, {"dim": (0, 1), "keepdim": True}, {"axis": 1})),
    *(((), {"dim": dim, "dtype": torch.float64}) for dim in (0, 1)),
    ((0, 1), {}),
    ((0, 0), {}),
    ((3,), {}),
    (((1, 1),), {}),
]
COUNT = int(os.environ.get("WEFT_SHARED_CALLS", "4"))  # of each function; half of it where nothing slow runs


def outcome(x, name, args, named):
    try:
        out = getattr(x, name)(*args, **named)
    except (RuntimeError, IndexError, TypeError) as error:
        return type(error)
    return whole_of(out)


def whole_of(out):
    return out.whole() if isinstance(out, SharedSequence) else out


def reduces(rank):
    ranks = communicator(None)
    for axis in range(3):
        shape = [3, 4, 5]
        shape[axis] = 7
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(axis))
        cut = SequenceCut(Sharing(ranks), SequenceLayout(7, ranks.world_size))
        shared = SharedSequence(cut.pick(whole, axis), axis, cut)
        for name in ("sum", "mean"):
            for args, named in REDUCTIONS:
                expected, found = outcome(whole, name, args, named), outcome(shared, name, args, named)
                if isinstance(expected, type):
                    assert found is expected, (name, axis, args, named, found)
                else:
                    assert found.dtype == expected.dtype
                    torch.testing.assert_close(found, expected, msg=lambda text: f"{text} {name} {axis} {args} {named}")  # noqa: B023


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow("pytorch_ext/context_parallel")), 3])
def test_sums_and_means_are_those_of_the_whole(world):
    run_ranks(reduces, world)


def named_functions():
    """(name of a case, module or class, function) of every function that has a rule."""
    for func in RULES:
        owner = getattr(func, "__objclass__", None)
        where = owner.__name__ if owner is not None else getattr(func, "__module__", None) or "torch"
        name = name_of(func)
        yield name.replace(" of ", "_"), where, func


def calls_at_random(rank, units, numbers):
    ranks, done, refused = communicator(None), Counter(), Counter()
    for name, owner, func in named_functions():
        for number in numbers:
            draw = Draw(ranks, name, owner, number, units)
            try:
                for expected, found in outcomes(draw, func):
                    words = f"{owner}.{name} #{number} {draw.shapes} {draw.cut.layout} {draw.cut.blocks}"
                    if isinstance(expected, torch.Tensor):
                        assert isinstance(found, torch.Tensor), words
                        close = {"rtol": 1e-4, "atol": 1e-5} if expected.dtype == torch.float32 else {}
                        message = lambda text: f"{text}\n{words}"  # noqa: B023, E731
                        torch.testing.assert_close(found, expected, equal_nan=True, msg=message, **close)
                    else:
                        assert found == expected or (isinstance(expected, bool) and bool(found) == expected), (
                            words,
                            found,
                        )
                done[name] += 1
            except RefusedError:
                refused[name] += 1
    assert len(numbers) < COUNT or not refused.keys() - done.keys(), refused


def test_every_function_that_has_a_rule_has_a_case():
    assert {name for name, _, _ in named_functions()} == set(CASES)


@pytest.mark.parametrize(
    ("world", "units", "numbers"),
    [
        (3, None, range(0, COUNT, 2)),
        (2, 4, range(1, COUNT, 2)),
        *(
            pytest.param(*where, range(COUNT), marks=pytest.mark.slow("pytorch_ext/context_parallel"))
            for where in ((2, None), (3, None), (2, 4))
        ),
    ],
)
def test_every_function_of_a_shared_sequence_is_that_of_the_whole(world, units, numbers):
    run_ranks(calls_at_random, world, units, numbers, timeout_s=200)


def shifts(rank):
    ranks = communicator(None)
    whole = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
    for strict in (False, True):
        cut = SequenceCut(Sharing(ranks, strict=strict), SequenceLayout(5, ranks.world_size))
        shared = SharedSequence(cut.pick(whole, 1), 1, cut)
        for pad in ((0, 0, 1, -1), (0, 0, -2, 2), [1, 1, 1, -1]):
            if strict:
                with pytest.raises(ValueError, match="strict: .* pad has no rule for this"):
                    F.pad(shared, pad)
            else:
                torch.testing.assert_close(whole_of(F.pad(shared, pad)), F.pad(whole, pad))
        for pad in ((1, -1), (2, 0, 0, 0), (0, 0, 0, 0, 1, -1)):
            found = F.pad(shared, pad)
            assert isinstance(found, SharedSequence)
            torch.testing.assert_close(found.whole(), F.pad(whole, pad))


def test_padding_that_keeps_the_length_moves_the_sequence():
    run_ranks(shifts, 2)


# In-place functions without a rule, or along the sequence; x: [2, 5, 3], v: [2, 2, 3].
WRITES = {
    "index_add_": lambda x, v: x.index_add_(1, torch.tensor([3, 1]), v),
    "index_add_ to tokens": lambda x, v: x.view(-1, 3).index_add_(0, torch.tensor([9, 2, 2, 0]), v.view(-1, 3)),
    "index_copy_": lambda x, v: x.index_copy_(1, torch.tensor([3, 1]), v),
    "positions": lambda x, v: x.__setitem__((slice(None), slice(1, 3)), v),
    "a mask of positions": lambda x, v: x.__setitem__(x > 0, 2.0),
    "cumsum_": lambda x, v: x.cumsum_(1),
    "tril_": lambda x, v: x.tril_(-1),
    "threshold": lambda x, v: F.threshold(x, 0.1, 3.0, inplace=True),
    "several": lambda x, v: x.mul_(2).cumsum_(1).narrow(2, 0, 2).copy_(v[:, :1, :2]),
}


def writes(rank, units):
    ranks = communicator(None)
    for name, write in WRITES.items():
        leaf, value = (
            torch.randn(2, length, 3, generator=torch.Generator().manual_seed(length)).requires_grad_()
            for length in (5, 2)
        )
        sharing = Sharing(ranks, layout="contiguous" if units else "zigzag", units=units)
        cut = SequenceCut(sharing, SequenceLayout(5, units or ranks.world_size, sharing.layout))
        shared = in_units(leaf, 1, cut) if units else SharedSequence(cut.pick(leaf, 1), 1, cut)
        results = []
        for x in (shared * 1, leaf * 1):
            out = write(x, value)
            assert out is None or out is x or name in ("index_add_ to tokens", "several"), name
            whole = whole_of(x)
            results.append(
                [
                    whole,
                    *torch.autograd.grad(
                        (whole * torch.arange(30.0).view(2, 5, 3)).sum(),
                        [leaf, value],
                        allow_unused=True,
                        materialize_grads=True,
                    ),
                ]
            )
        torch.testing.assert_close(*results, msg=lambda text: f"{name}: {text}")  # noqa: B023


@pytest.mark.parametrize("units", [None, 4])
def test_what_is_written_in_place_is_what_is_written_to_the_whole(units):
    run_ranks(writes, 2, units)
