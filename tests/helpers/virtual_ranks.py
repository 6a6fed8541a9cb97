"""Virtual ranks of the CUDA collectives: several ranks on one GPU, each with its own memory and stream.

Grids are small enough that all run at the same time. CUDA_DEVICE_MAX_CONNECTIONS=32 keeps the streams apart: ranks wait
for each other, so no stream may stand behind another one's launches.
"""

import os

import torch

from weft import _C
from weft.testing import reference

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

WORDS = 3  # flags of a block for each rank
BOX_WORDS = 3 * 513 * 4  # the same for boxes: three, with a line for each thread and the signature's
IN_WINDOWS = ["reduce_scatter_in_place", "all_gather_in_place", "all_gather_by_copies"]
OPERATIONS = ["low_latency", "one_shot", "two_shot", "in_place", "reduce_scatter", "all_gather", *IN_WINDOWS]


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


class VirtualRanks:
    """Ranks on one device.

    Calls go to the ranks' streams in turn, so that no launch stands before one that it waits for. Their memory is
    allocated before.
    """

    def __init__(self, world, blocks=4, workspace_bytes=2**18, timeout_s=20.0):
        assert _C.cuda is not None
        self.world, self.flags = world, WORDS * blocks * world
        pad_words = self.flags + 4 + BOX_WORDS * blocks * world
        self.pads = [torch.zeros(pad_words, dtype=torch.int32, device="cuda") for _ in range(world)]
        self.workspaces = [torch.zeros(workspace_bytes, dtype=torch.uint8, device="cuda") for _ in range(world)]
        self.records = [torch.zeros(16, dtype=torch.int64).pin_memory() for _ in range(world)]
        self.streams = [torch.cuda.Stream() for _ in range(world)]
        pads = [pad.data_ptr() for pad in self.pads]
        workspaces = [workspace.data_ptr() for workspace in self.workspaces]
        self.ranks = [
            _C.cuda.Ranks(
                rank,
                pads,
                pad_words,
                workspaces,
                workspace_bytes,
                self.records[rank].data_ptr(),
                timeout_s,
                blocks,
            )
            for rank in range(world)
        ]
        # Loading a kernel may wait for all that runs, and ranks wait for each other: load all that they launch now.
        self.ranks[0].load()
        torch.cuda._sleep(1)
        self.workspaces[0][:16].copy_(self.workspaces[-1][:16])
        torch.cuda.synchronize()

    def put(self, rank, launch):
        """launch(ranks, rank, stream handle) with the rank's stream as torch's current one."""
        with torch.cuda.stream(self.streams[rank]):
            launch(self.ranks[rank], rank, self.streams[rank].cuda_stream)

    def call(self, launch, late=None, cycles=0):
        for rank in range(self.world):
            if rank == late:
                with torch.cuda.stream(self.streams[rank]):
                    torch.cuda._sleep(cycles)
            self.put(rank, launch)

    def assert_idle(self):
        torch.cuda.synchronize()
        assert all(pad[: self.flags].count_nonzero().item() == 0 for pad in self.pads)
        assert all(record.count_nonzero().item() == 0 for record in self.records)


def values(count, dtype, offset=0):
    """Return a vector that begins `offset` elements after an aligned address."""
    return torch.randn(count + offset, device="cuda").to(dtype)[offset:]


class Trial:
    """One call on every rank: `launch` puts it on a stream, `check` compares once all is done."""

    def __init__(self, operation, ranks, dtype, counts, average=False, offset=0):
        self.operation, self.dtype, self.counts = operation, dtype, counts
        world = ranks.world
        self.average, self.nowhere = average, values(8, dtype)
        op = "avg" if average else "sum"
        scattered = operation.startswith("reduce_scatter")
        if operation == "low_latency":
            counts[0] = min(counts[0], ranks.ranks[0].low_latency_bytes // dtype.itemsize)
        whole = sum(counts) if scattered else counts[0]
        if operation.startswith("all_gather"):
            self.sources = [values(counts[rank], dtype, offset) for rank in range(world)]
            self.results = [[values(count, dtype, offset * (rank % 2)) for count in counts] for rank in range(world)]
            self.expected = [[source.cpu() for source in self.sources]] * world
            return
        self.sources = [values(whole, dtype, offset * (rank % 2 or operation == "in_place")) for rank in range(world)]
        total = reference.reduce([source.cpu() for source in self.sources], op)
        if scattered:
            self.results = [[values(counts[rank], dtype, offset)] for rank in range(world)]
            self.expected = [[part] for part in total.split(counts)]
        elif operation == "in_place":
            self.results = [[source] for source in self.sources]
            self.expected = [[total]] * world
        else:
            self.results = [[values(whole, dtype, offset)] for rank in range(world)]
            self.expected = [[total]] * world

    def launch(self, ranks, rank, stream):
        source, results = self.sources[rank].data_ptr(), [result.data_ptr() for result in self.results[rank]]
        what = (name_of(self.dtype), self.average, 1.0)
        bytes = [count * self.dtype.itemsize for count in self.counts]
        sources = [x.data_ptr() for x in self.sources]
        # Each rank's source lies at another offset of its window; one without elements has no address.
        window = [(at or self.nowhere.data_ptr() + 16 * r) - 16 * r for r, at in enumerate(sources)], 16 * rank
        if self.operation == "all_gather":
            ranks.all_gather(source, results, bytes, stream)
        elif self.operation == "all_gather_in_place":
            ranks.all_gather_in_place(*window, results, bytes, self.dtype.itemsize, stream)
        elif self.operation == "all_gather_by_copies":
            ranks.all_gather_by_copies(sources, results, bytes, stream)
        elif self.operation == "reduce_scatter_in_place":
            ranks.reduce_scatter_in_place(*window, results[0], self.counts, *what, stream)
        elif self.operation == "reduce_scatter":
            ranks.reduce_scatter(source, results[0], self.counts, *what, stream)
        elif self.operation == "in_place":
            ranks.all_reduce_in_place(sources, self.counts[0], *what, stream)
        else:
            ranks.all_reduce(source, results[0], self.counts[0], *what, self.operation, stream)

    def check(self):
        for results, expected in zip(self.results, self.expected, strict=True):
            for result, wanted in zip(results, expected, strict=True):
                assert torch.equal(result.cpu(), wanted), (self.operation, self.dtype, self.counts)

    def is_nan(self, rank):
        return all(result.isnan().all().item() for result in self.results[rank])


def counts_of(operation, world, count):
    """Parts that differ in size, one of them empty, where the operation takes them."""
    if not operation.startswith(("reduce_scatter", "all_gather")):
        return [count]
    return [count // (rank + 1) if rank != 1 else 0 for rank in range(world)]
