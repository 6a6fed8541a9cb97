"""The states of torch's generators, which a run that goes on draws from."""

import torch
from torch import nn


def states(model: nn.Module) -> dict[str, torch.Tensor]:
    """By kind of device: the host's, and that of the GPU that the model is on."""
    found = {"cpu": torch.get_rng_state()}
    gpu = _gpu_of(model)
    return found if gpu is None else {**found, "cuda": torch.cuda.get_rng_state(gpu)}


def restore(kind: str, state: torch.Tensor, model: nn.Module) -> None:
    gpu = _gpu_of(model)
    if kind == "cuda" and gpu is not None:
        torch.cuda.set_rng_state(state, gpu)
    elif kind == "cpu":
        torch.set_rng_state(state)


def _gpu_of(model: nn.Module) -> torch.device | None:
    return next((parameter.device for parameter in model.parameters() if parameter.is_cuda), None)
