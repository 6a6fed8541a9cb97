"""Random numbers on ranks with equal seeds, and the states of their generators."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from weft.comm.communicator import Communicator


@contextmanager
def own_random_numbers(ranks: Communicator, device: torch.device) -> Iterator[None]:
    """Draw different random numbers on every rank, for parts with different positions, heads or channels.

    The seed follows from the state before and the rank. Ranks may draw different amounts inside and draw alike again
    afterwards. A recomputation that starts from the state before (torch.utils.checkpoint) draws the same numbers.
    """
    with random_numbers_of(int(torch.randint(2**62, (1,))) + ranks.rank, device):
        yield


@contextmanager
def random_numbers_of(seed: int, device: torch.device) -> Iterator[None]:
    """Use the random numbers of `seed` inside, so that ranks with different states compute alike."""
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng([device] if on_gpu else []):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed takes 2 ms, for devices that are not there
        if on_gpu:
            torch.cuda.manual_seed(seed)
        yield


def rng_states(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the states of torch's generators by device type: the host's, and that of the model's GPU."""
    found = {"cpu": torch.get_rng_state()}
    gpu = _gpu_of(model)
    return found if gpu is None else {**found, "cuda": torch.cuda.get_rng_state(gpu)}


def restore_rng_state(kind: str, state: torch.Tensor, model: nn.Module) -> None:
    """Set the generator of a device type to a state that rng_states returned."""
    gpu = _gpu_of(model)
    if kind == "cuda" and gpu is not None:
        torch.cuda.set_rng_state(state, gpu)
    elif kind == "cpu":
        torch.set_rng_state(state)


def _gpu_of(model: nn.Module) -> torch.device | None:
    return next((parameter.device for parameter in model.parameters() if parameter.is_cuda), None)
