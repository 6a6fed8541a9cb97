"""split_sizes: balanced, contiguous, in whole units."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import weft


@settings(deadline=None)
@given(units=st.integers(1, 500), world=st.integers(1, 40), unit=st.integers(1, 16))
def test_shards_cover_the_dimension_and_differ_by_one_unit_at_most(units, world, unit):
    if units < world:
        with pytest.raises(ValueError, match=f"at most {units} ranks"):
            weft.split_sizes(units * unit, world, unit)
        return
    sizes = weft.split_sizes(units * unit, world, unit)
    assert len(sizes) == world and sum(sizes) == units * unit
    assert all(size % unit == 0 for size in sizes)
    assert max(sizes) - min(sizes) <= unit
    assert sizes == sorted(sizes, reverse=True)  # the first ranks get the larger ones


def test_a_unit_is_never_cut():
    with pytest.raises(ValueError, match="10 elements are not a whole number of units of 4"):
        weft.split_sizes(10, 2, unit=4)


@pytest.mark.parametrize("arguments", [(4, 0, 1), (4, 2, 0), (-1, 1, 1)])
def test_nonsense_is_refused(arguments):
    with pytest.raises(ValueError, match="at least"):
        weft.split_sizes(*arguments)
