"""What functions do to a shared sequence, called in every way there is, is what they do to the whole."""

import pytest
import torch

import weft.context.rules  # noqa: F401
from weft.comm.communicator import communicator
from weft.context.sequence import Cut, SharedSequence, Sharing
from weft.ops.layout import Layout
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


def outcome(x, name, args, named):
    try:
        out = getattr(x, name)(*args, **named)
    except (RuntimeError, IndexError, TypeError) as error:
        return type(error)
    return out.whole() if isinstance(out, SharedSequence) else out


def reduces(rank):
    ranks = communicator(None)
    for axis in range(3):
        shape = [3, 4, 5]
        shape[axis] = 7
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(axis))
        cut = Cut(Sharing(ranks), Layout(7, ranks.world))
        shared = SharedSequence(cut.pick(whole, axis), axis, cut)
        for name in ("sum", "mean"):
            for args, named in REDUCTIONS:
                expected, found = outcome(whole, name, args, named), outcome(shared, name, args, named)
                if isinstance(expected, type):
                    assert found is expected, (name, axis, args, named, found)
                else:
                    assert found.dtype == expected.dtype
                    torch.testing.assert_close(found, expected, msg=lambda text: f"{text} {name} {axis} {args} {named}")  # noqa: B023


@pytest.mark.parametrize("world", [2, 3])
def test_sums_and_means_are_those_of_the_whole(world):
    run_ranks(reduces, world)
