"""Random numbers of ranks that are seeded alike: the same where they have the same, others where each has a part."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from weft.comm.communicator import Communicator


@contextmanager
def own_random_numbers(ranks: Communicator, device: torch.device) -> Iterator[None]:
    """Other ones on every rank, that follow from the ones before: parts are of different positions, heads or channels.

    However many are drawn inside, which differs where parts do, the ranks draw alike again afterwards. A recomputation
    that begins with the numbers before (torch.utils.checkpoint) draws the same ones.
    """
    seed = int(torch.randint(2**62, (1,))) + ranks.rank
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
