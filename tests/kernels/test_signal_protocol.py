"""The flags of kernels/signal.py and the calls built on them, in every interleaving of two and three ranks.

Each step below is one atomic operation on memory that ranks share. The models are sequentially consistent: posts and
puts release what was written before, waits acquire it (docs/communicating_kernels.md).
"""

import pytest
from interleavings import Process, Violated, explore


def replace(values, index, value):
    return (*values[:index], value, *values[index + 1 :])


class Model:
    """A flag is 0 or 1: calls of one kind have one signature, so nothing but the protocol distinguishes them.

    Ranks each run a list of steps `step(state) -> state, or None while blocked` over cells of shared memory.
    """

    def __init__(self):
        self.places: dict[object, int] = {}
        self.programs: list[list] = []

    def cell(self, *name) -> int:
        return self.places.setdefault(name, len(self.places) + 1)  # place 0 is what went wrong

    def explore(self) -> int:
        def process(steps):
            def step(state, pc):
                after = steps[pc](state)
                return None if after is None else (after, pc + 1)

            return Process(step, len(steps))

        start = (None,) + (0,) * len(self.places)
        final = [len(steps) for steps in self.programs]

        def fault(state, counters):
            if state[0]:
                return state[0]
            done = list(counters) == final
            left = [name for name, place in self.places.items() if name[0] == "flag" and state[place]]
            return f"{left} still set at the end" if done and left else None

        return explore([process(steps) for steps in self.programs], start, fault)

    # Steps.

    def write(self, place, value):
        return lambda state: replace(state, place, value)

    def read(self, place, value, who):
        """The cell must hold that value."""

        def step(state):
            found = state[place]
            return state if found == value else replace(state, 0, f"{who} read {found} instead of {value}")

        return step

    def put(self, flag):
        """A look and a store: nothing but the protocol keeps another store from coming between."""
        return [self.wait_for_zero(flag), self.post(flag)]

    def post(self, flag):
        def step(state):
            return replace(state, flag, 1) if state[flag] == 0 else replace(state, 0, "posted to a flag that is set")

        return step

    def wait(self, flag):
        return lambda state: state if state[flag] else None

    def wait_for_zero(self, flag):
        return lambda state: None if state[flag] else state

    def meet(self, world, rank):
        """Pairs in the order of ranks, as where one program runs at a time."""
        steps = []
        for peer in range(world):
            if peer != rank:
                mine = self.cell("flag", "meet", rank, peer)
                steps += [*self.put(self.cell("flag", "meet", peer, rank)), self.wait(mine), self.write(mine, 0)]
        return steps


def meetings(world, count, rounds_of_pairs=True):
    """Each rank says that it came, meets, and looks whether the others had come."""
    model = Model()
    for rank in range(world):
        steps = []
        for number in range(1, count + 1):
            steps.append(model.write(model.cell("came", rank), number))
            steps += model.meet(world, rank) if rounds_of_pairs else []
            for peer in range(world):
                steps.append(model.read(model.cell("came", peer), number, f"rank {rank}, meeting {number},"))
            steps += model.meet(world, rank)
        model.programs.append(steps)
    return model


@pytest.mark.parametrize(("world", "count"), [(2, 4), (3, 2)])
def test_nobody_leaves_a_meeting_before_all_have_come(world, count):
    assert meetings(world, count).explore() > 100


def test_a_missing_meeting_would_be_found():
    with pytest.raises(Violated, match="read"):
        meetings(2, 2, rounds_of_pairs=False).explore()


def at_once(world, count):
    """Meetings as on a GPU: the pairs of a rank meet at the same time, and a kernel begins when the last has ended."""
    model = Model()
    for rank in range(world):
        for peer in range(world):
            if peer == rank:
                continue
            mine = model.cell("flag", "meet", rank, peer)
            steps = []
            for number in range(1, count + 1):
                steps += [
                    lambda s, rank=rank, n=number: s if s[model.cell("ended", rank)] >= (n - 1) * (world - 1) else None,
                    lambda s, rank=rank: replace(s, model.cell("begun", rank), s[model.cell("begun", rank)] + 1),
                    *model.put(model.cell("flag", "meet", peer, rank)),
                    model.wait(mine),
                    lambda s, peer=peer, n=number: (
                        s if s[model.cell("begun", peer)] > (n - 1) * (world - 1) else replace(s, 0, "left early")
                    ),
                    model.write(mine, 0),
                    lambda s, rank=rank: replace(s, model.cell("ended", rank), s[model.cell("ended", rank)] + 1),
                ]
            model.programs.append(steps)
            model.cell("ended", rank), model.cell("begun", rank)
    return model


@pytest.mark.parametrize(("world", "count"), [(2, 6), pytest.param(3, 2, marks=pytest.mark.slow("kernels"))])
def test_pairs_may_meet_at_the_same_time(world, count):
    assert at_once(world, count).explore() > 50


def scatters(world, calls, *, lost=None, repeated=None, waits=True, meets=True, clears=True):
    """matmul + reduce_scatter: every rank writes a part at every owner and posts; the owner waits, sums, clears; all
    meet. `lost`, `repeated`: the post (rank, owner, call) that does not happen, or happens twice."""
    model = Model()
    for rank in range(world):
        steps = []
        for call in range(1, calls + 1):
            for turn in range(1, world + 1):  # the own part last
                owner = (rank + turn) % world
                steps.append(model.write(model.cell("part", owner, rank), call))
                posts = 0 if lost == (rank, owner, call) else 2 if repeated == (rank, owner, call) else 1
                steps += posts * [model.post(model.cell("flag", "part", owner, rank))]
            for source in range(world):
                if waits:
                    steps.append(model.wait(model.cell("flag", "part", rank, source)))
                steps.append(model.read(model.cell("part", rank, source), call, f"rank {rank}, call {call},"))
            if clears:
                steps += [model.write(model.cell("flag", "part", rank, source), 0) for source in range(world)]
            steps += model.meet(world, rank) if meets else []
        model.programs.append(steps)
    return model


@pytest.mark.parametrize(("world", "calls"), [(2, 4), (3, 3)])
def test_parts_are_summed_when_they_are_there_and_not_overwritten_before(world, calls):
    assert scatters(world, calls).explore() > 100


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ({"lost": (0, 1, 2)}, "nobody can go on"),
        ({"repeated": (0, 1, 1)}, "posted to a flag that is set|read"),
        ({"waits": False}, "read"),
        ({"meets": False}, "read|posted to a flag"),
        ({"clears": False}, "posted to a flag|read|still set"),
    ],
    ids=str,
)
@pytest.mark.parametrize("world", [2, 3])
def test_each_part_of_the_scatter_is_needed(world, fault, text):
    with pytest.raises(Violated, match=text):
        scatters(world, 2, **fault).explore()


def gathers(world, calls, *, come=True, done=True, arrivals=True):
    """all_gather + matmul: every rank fills its window; all meet; each copies the others' windows and sets flags of its
    own behind the copies (a process of its own, as the copies are), while its product waits for them; all meet again."""
    model = Model()
    for rank in range(world):
        product, copies = [], []
        for call in range(1, calls + 1):
            product.append(model.write(model.cell("window", rank), call))
            product += model.meet(world, rank) if come else []
            product += model.put(model.cell("start", rank))
            copies.append(model.wait(model.cell("start", rank)))
            for turn in range(1, world):
                peer = (rank + turn) % world
                copies.append(model.read(model.cell("window", peer), call, f"rank {rank}, call {call},"))
                copies.append(model.write(model.cell("whole", rank, peer), call))
                copies.append(model.post(model.cell("flag", "arrived", rank, peer)))
                if arrivals:
                    product.append(model.wait(model.cell("flag", "arrived", rank, peer)))
                product.append(model.read(model.cell("whole", rank, peer), call, f"the product of rank {rank}"))
            copies.append(model.write(model.cell("start", rank), 0))
            product.append(model.wait_for_zero(model.cell("start", rank)))
            for peer in range(world):  # the next call's flags are new ones
                product.append(model.write(model.cell("flag", "arrived", rank, peer), 0))
            product += model.meet(world, rank) if done else []
        model.programs += [product, copies]
    return model


@pytest.mark.parametrize(("world", "calls"), [(2, 3), (3, 2)])
def test_rows_are_read_when_they_have_arrived_and_windows_not_overwritten_before(world, calls):
    assert gathers(world, calls).explore() > 100


@pytest.mark.parametrize("fault", [{"come": False}, {"done": False}, {"arrivals": False}], ids=str)
def test_each_part_of_the_gathering_is_needed(fault):
    with pytest.raises(Violated, match="read"):
        gathers(2, 2, **fault).explore()


def reductions(calls, *, posts=True, done=True):
    """matmul + all_reduce of two ranks, from where the sums are made: each posts its sum to both; both fetch both."""
    model, world = Model(), 2
    for rank in range(world):
        steps = []
        for call in range(1, calls + 1):
            steps.append(model.write(model.cell("sum", rank), call))
            for peer in range(world):
                steps += posts * [model.post(model.cell("flag", "summed", peer, rank))]
            for owner in range(world):
                steps += posts * [model.wait(model.cell("flag", "summed", rank, owner))]
                steps.append(model.read(model.cell("sum", owner), call, f"rank {rank}, call {call},"))
            steps += posts * [model.write(model.cell("flag", "summed", rank, owner), 0) for owner in range(world)]
            steps += model.meet(world, rank) if done else []
        model.programs.append(steps)
    return model


def test_sums_are_fetched_when_they_are_there_and_not_overwritten_before():
    assert reductions(4).explore() > 100
    for fault in ({"posts": False}, {"done": False}):
        with pytest.raises(Violated, match="read|posted"):
            reductions(3, **fault).explore()
