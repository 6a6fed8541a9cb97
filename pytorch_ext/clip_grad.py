"""clip_grad_norm_: torch's function for a model that lies on several ranks."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from weft.arguments import check_tensor
from weft.comm.communicator import Communicator
from weft.comm.purpose import calls_for
from weft.comm.registry import communicator
from weft.data_parallel.data_parallel import DataParallel
from weft.data_parallel.grad_norm import gradient_of, norm_of
from weft.data_parallel.sharded_optimizer import piece_of
from weft.sharding.owners import owners_of
from weft.sharding.sharded_grad import is_elsewhere


@calls_for("weft.clip_grad_norm_, which every rank calls")
@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    *,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    mesh: DeviceMesh | None = None,
) -> torch.Tensor:
    """Scale all gradients so that the norm of the whole model's gradient is at most max_norm. A collective call.

        weft.clip_grad_norm_(model, 1.0)  # after backward, or after Pipeline.step

    Every element of the model counts once: shards of "tp" count together, and whole parameters and copies on several
    stages of "pp" (tied embeddings) count once. Gradients over "dp" and "cp" are averaged and summed already. Each rank
    gets the same norm and multiplies by the same factor.

    Args:
        parameters: the result of `weft.parallelize`, `weft.Pipeline`, `weft.LayerSplit` or `weft.DataParallel`, or
            parameters of it. Gradients are read from `.grad`, or from `main_grad` if `.grad` is None.
        max_norm: the largest norm of all gradients together.
        norm_type: p of the p-norm, more than 0; inf is the largest |g|.
        error_if_nonfinite: raise if the norm is infinite or NaN. False scales by the resulting factor, like torch.
        mesh: needed if some stages of "pp" have none of the parameters, because those stages cannot know the others.

    Returns:
        The norm before clipping, a float64 scalar, the same on every rank.

    Raises:
        RuntimeError: the norm is not finite, with error_if_nonfinite; on every rank.
        ValueError: norm_type is not above 0; it is neither 2 nor inf, and the model was made with `invariant`;
            parameters are pieces of a sharded optimizer; a parameter belongs to no stage although the mesh has "pp".
        TypeError: a parameter is a DTensor.

    Examples:
        >>> model = weft.parallelize(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), weft.init_mesh(tp=2))
        >>> model(torch.ones(2, 4)).sum().backward()
        >>> norm = weft.clip_grad_norm_(model, 1.0)
        >>> torch.allclose(weft.clip_grad_norm_(model, 1.0), norm.clamp(max=1.0))
        True
    """
    if not norm_type > 0:
        raise ValueError(f"clip_grad_norm_: norm_type={norm_type} must be more than 0, or inf")
    if isinstance(parameters, DataParallel) and parameters.shards_optimizer:
        if norm_type != 2.0:
            raise ValueError(f"clip_grad_norm_: norm_type={norm_type}; with shard_optimizer=True only 2 is supported")
        if error_if_nonfinite:
            parameters.reducer.measure_anew()
            _check_finite(parameters.grad_norm, True)
        return parameters.clip_grad_norm_(max_norm)
    listed = _listed(parameters)
    norm = norm_of(listed, norm_type, _stages(listed, mesh))
    _check_finite(norm, error_if_nonfinite)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for parameter in listed:
        gradient = gradient_of(parameter)
        if gradient is not None:
            gradient.mul_(factor.to(gradient.device))
    return norm


def _listed(parameters) -> list[torch.Tensor]:
    """Return the parameters, each once."""
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    for parameter in listed:
        check_tensor("clip_grad_norm_: each of the parameters", parameter)
        if isinstance(parameter, DTensor) and piece_of(parameter) is None:
            raise TypeError(
                "clip_grad_norm_: a parameter is a DTensor, as fully_shard makes them, and its other parts are not "
                "summed here. torch.nn.utils.clip_grad_norm_ sums them, but not the parts of layers that "
                "weft.parallelize has split; for a model with such layers use weft.parallelize(..., zero=3)"
            )
        if (piece_of(parameter) is not None and not isinstance(parameter, DTensor)) or is_elsewhere(parameter.grad):
            raise ValueError(
                "clip_grad_norm_: a parameter is a piece of a sharded optimizer, and another rank may have none: pass "
                "the weft.DataParallel itself"
            )
    return list(dict.fromkeys(listed))


def _stages(listed: list[torch.Tensor], mesh: DeviceMesh | None) -> Communicator | None:
    """Return the ranks of the other stages."""
    known = {owners.ranks for owners in map(owners_of, listed) if owners is not None}
    if mesh is not None and "pp" in (mesh.mesh_dim_names or ()):
        ranks = communicator(mesh if mesh.ndim == 1 else mesh["pp"])
        if ranks.world_size > 1 and any(owners_of(parameter) is None for parameter in listed):
            raise ValueError(
                f'clip_grad_norm_: the mesh has "pp" of {ranks.world_size}, and a parameter belongs to no stage: pass '
                "the parameters of the model that weft.Pipeline or weft.LayerSplit returned"
            )
        known.add(ranks)
    if len(known) > 1:
        raise ValueError(
            "clip_grad_norm_: the parameters belong to several models, or not to this mesh: call it once for each model"
        )
    return next(iter(known), None)


def _check_finite(norm: torch.Tensor, wanted: bool) -> None:
    if wanted and not norm.isfinite():
        raise RuntimeError(
            f"clip_grad_norm_: the norm of the gradients is {norm.item()}, so they cannot be clipped; with "
            "error_if_nonfinite=False they are scaled all the same"
        )
