"""How a dimension is cut over ranks: balanced and contiguous. Plain arithmetic."""


def split_sizes(n: int, world: int, unit: int = 1) -> list[int]:
    """Sizes of the shards of a dimension of n elements over `world` ranks, in rank order.

    The dimension is cut at multiples of `unit` (a head of attention, say); of its n/unit units, the first
    (n/unit) % world ranks get one more than the others.

    Raises:
        ValueError: n is not a multiple of unit, or there are fewer units than ranks.
    """
    if world < 1 or unit < 1 or n < 0:
        raise ValueError(f"split_sizes(n={n}, world={world}, unit={unit}): n must be at least 0, the others at least 1")
    units, rest = divmod(n, unit)
    if rest:
        raise ValueError(f"{n} elements are no whole number of units of {unit}: choose a unit that divides {n}")
    if units < world:
        what = f"{n} elements" if unit == 1 else f"{n} elements in units of {unit} ({units} units)"
        raise ValueError(
            f"{what} cannot be split over {world} ranks; every rank needs at least one. "
            f"Use a group of at most {units} ranks."
        )
    share, more = divmod(units, world)
    return [(share + (rank < more)) * unit for rank in range(world)]
