"""Random numbers of ranks that are seeded alike, and the states of their generators."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

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


def rng_states(model: nn.Module) -> dict[str, torch.Tensor]:
    """States of torch's generators by kind of device: the host's, and that of the GPU that the model is on."""
    found = {"cpu": torch.get_rng_state()}
    gpu = _gpu_of(model)
    return found if gpu is None else {**found, "cuda": torch.cuda.get_rng_state(gpu)}


def restore_rng_state(kind: str, state: torch.Tensor, model: nn.Module) -> None:
    """Set the generator of a kind of device to a state that rng_states returned."""
    gpu = _gpu_of(model)
    if kind == "cuda" and gpu is not None:
        torch.cuda.set_rng_state(state, gpu)
    elif kind == "cpu":
        torch.set_rng_state(state)


def _gpu_of(model: nn.Module) -> torch.device | None:
    return next((parameter.device for parameter in model.parameters() if parameter.is_cuda), None)
