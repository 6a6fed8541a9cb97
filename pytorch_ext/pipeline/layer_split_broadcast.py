"""A model whose forward cannot be cut, on several ranks: all run it, and each layer's parameters are on one.

A layer runs on its rank. Its output goes to all ranks, and in backward the gradients of its inputs go to all ranks. The
code between layers runs on every rank, on the same values and with the same random numbers, so its gradients are the
same on every rank.

Per layer, with p ranks: forward sends the outputs from one rank to p - 1, backward sends the gradients of the inputs in
the same way. Every rank must run backward in the reverse order of forward: each layer returns a token, and the next
layer takes it.
"""

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_unflatten

from weft._C import CommError
from weft.comm.communicator import Communicator
from weft.context_parallel.hugging_face import models_of_transformers
from weft.context_parallel.pytree import leaves as leaves_of
from weft.context_parallel.shared_sequence import (
    NATIVE,
    SequenceCut,
    SharedSequence,
    localized,
    refuse_results_of_custom_functions,
    shared_in,
)
from weft.forward import ForwardChain, FunctionMode
from weft.layer_lists import refuse_caches
from weft.pipeline.stage import Mark
from weft.pipeline.stage_boundary import differentiable
from weft.rng import random_numbers_of


class Relay:
    """The layers of a model, each on one rank."""

    def __init__(self, ranks: Communicator, device: torch.device):
        self.ranks, self.device = ranks, device
        self.layers: dict[str, nn.Module] = {}
        self.inside = False  # while a layer runs
        self.token = torch.zeros((), requires_grad=True)  # from the previous layer

    def take(self, model: nn.Module, owners: Mapping[str, int]) -> None:
        """Run each layer in `owners` on its rank from now on.

        On the other ranks the layer's parameters move to the "meta" device.

        Args:
            owners: name of a layer -> its rank.
        """
        for name, owner in owners.items():
            layer = self.layers[name] = model.get_submodule(name)
            ForwardChain.of(layer).add("stage", Relayed(owner, self))
            if owner != self.ranks.rank:
                layer.to("meta")

    def follow(self, token: torch.Tensor) -> None:
        """Keep this token for the next layer.

        A layer that runs in a no_grad of the model has no backward and gives a token without a gradient. The next layer
        then takes the token of the layer before it.
        """
        if token.requires_grad:
            self.token = token

    def run(self, model: nn.Module, inputs: Sequence, named: Mapping):
        """Run the model's forward, on every rank, with the random numbers of the first rank."""
        refuse_records(model, named)
        self.token = torch.zeros((), requires_grad=True)
        where = self.ranks.device_of_numbers(self.device)
        seed = self.ranks.broadcast_(torch.randint(2**62, (1,)).to(where), 0)
        with random_numbers_of(int(seed), self.device), FunctionMode(every=_Outside(self)):
            return model(*inputs, **named)


class _Outside:
    """Handler of functions that refuses a layer's parameter outside of the layer: one rank alone has it."""

    def __init__(self, relay: Relay):
        self.relay = relay
        self.owned = {
            id(parameter): f"{name}.{own}"
            for name, layer in relay.layers.items()
            for own, parameter in layer.named_parameters()
        }

    def __call__(self, func, args: tuple, kwargs: dict):
        if not self.relay.inside and func not in NATIVE:
            for x in leaves_of((args, kwargs)):
                if id(x) in self.owned:
                    raise ValueError(
                        f"LayerSplit: {self.owned[id(x)]} is used outside of its layer, which one rank has, by a "
                        "forward that every rank runs: make that use a module of its own that shares the parameter"
                    )
        return func(*args, **kwargs)


@dataclass(frozen=True)
class _OutputKind:
    """Shape, dtype and mark of a tensor that a layer returns."""

    shape: torch.Size
    dtype: torch.dtype
    mark: Mark | None


class Relayed:
    """Step of the forward of a layer that is on one rank."""

    def __init__(self, owner: int, relay: Relay):
        self.owner, self.relay = owner, relay

    def __call__(self, forward: Callable, layer: nn.Module, *args, **kwargs):
        refuse_caches(layer, args, kwargs, "and every rank would fill the part of its own layers alone")
        leaves, structure = tree_flatten((args, kwargs))
        refuse_results_of_custom_functions(leaves)
        seed = int(torch.randint(2**62, (1,)))  # on every rank, so that all ranks draw alike
        if self.owner != self.relay.ranks.rank:
            return self._received(leaves)
        token, *given = Enter.apply(self.relay.token, self.owner, self.relay.ranks, *_tensors(leaves))
        args, kwargs = tree_unflatten(_with(leaves, given), structure)
        before = _versions(given)
        self.relay.inside = True
        try:
            with random_numbers_of(seed, self.relay.device):
                result = forward(*args, **kwargs)
            if _versions(given) != before:
                raise ValueError(
                    f"LayerSplit: a {type(layer).__name__} changes its input in place, which only the rank that "
                    "has the layer would see: let it work on a new tensor (inplace=False)"
                )
            leaves, structure = tree_flatten(result)
            refuse_results_of_custom_functions(leaves)
            kinds = [_kind_of(x) if isinstance(x, torch.Tensor) else x for x in leaves]
            pickle.dumps((kinds, structure))
        except CommError:  # the other ranks have it already, or cannot be reached
            raise
        except Exception as error:
            failure = None, self._peer_error(layer, error)
            dist.broadcast_object_list([failure], group=self.relay.ranks.group, group_src=self.owner)
            raise
        finally:
            self.relay.inside = False
        dist.broadcast_object_list([(kinds, structure)], group=self.relay.ranks.group, group_src=self.owner)
        return self._sent(token, leaves, structure)

    def _peer_error(self, layer: nn.Module, error: Exception) -> Exception:
        """Return the error that the waiting ranks raise, of a type that each of them knows."""
        kind = ValueError if isinstance(error, ValueError) else RuntimeError
        if str(error).startswith("LayerSplit: "):
            return kind(str(error))
        name = type(layer).__name__
        return kind(f"LayerSplit: a {name} raised on rank {self.owner}, which has it: {type(error).__name__}: {error}")

    def _sent(self, token: torch.Tensor, leaves: list, structure):
        token, *sent = Leave.apply(token, self.owner, self.relay.ranks, *_tensors(leaves))
        self.relay.follow(token)
        return tree_unflatten(_with(leaves, sent), structure)

    def _received(self, arguments: list):
        ranks = self.relay.ranks
        box: list = [None]
        dist.broadcast_object_list(box, group=ranks.group, group_src=self.owner)
        kinds, structure = box[0]
        if kinds is None:
            raise structure
        expected = [(kind.shape, kind.dtype) for kind in kinds if isinstance(kind, _OutputKind)]
        token, *got = Elsewhere.apply(
            self.relay.token, self.owner, ranks, self.relay.device, expected, *_tensors(arguments)
        )
        self.relay.follow(token)
        cuts, values = [x.cut for x in shared_in(arguments)], iter(got)
        leaves = [_again(next(values), kind, cuts) if isinstance(kind, _OutputKind) else kind for kind in kinds]
        return tree_unflatten(leaves, structure)


def _versions(tensors: Sequence[torch.Tensor]) -> list[int | None]:
    """Return the tensors' version counters, which change on a write; None for a tensor of inference_mode."""
    return [None if x.is_inference() else x._version for x in tensors]


def _tensors(leaves: list) -> list[torch.Tensor]:
    return [localized(x) for x in leaves if isinstance(x, torch.Tensor)]


def _with(leaves: list, tensors: Sequence[torch.Tensor]) -> list:
    """Return the leaves with `tensors` in place of their tensors."""
    values = iter(tensors)
    return [
        x.like(next(values)) if isinstance(x, SharedSequence) else next(values) if isinstance(x, torch.Tensor) else x
        for x in leaves
    ]


def _kind_of(x: torch.Tensor) -> _OutputKind:
    if isinstance(x, SharedSequence):
        return _OutputKind(x.local.shape, x.dtype, Mark(x.axis, x.cut.blocks, x.cut.region))
    return _OutputKind(x.shape, x.dtype, None)


def _again(x: torch.Tensor, kind: _OutputKind, cuts: Sequence[SequenceCut]) -> torch.Tensor:
    if kind.mark is None:
        return x
    return SharedSequence(x, kind.mark.axis, replace(cuts[0], blocks=kind.mark.blocks, region=kind.mark.region))


class Enter(torch.autograd.Function):
    """Inputs of a layer, on its rank. forward: sends nothing; backward: sends the inputs' gradients to all ranks."""

    @staticmethod
    def forward(ctx, token, owner, ranks, *values):
        ctx.owner, ctx.ranks = owner, ranks
        ctx.mark_non_differentiable(*(x for x in values if not differentiable(x)))
        return token.clone(), *(x.view_as(x) for x in values)

    @staticmethod
    @once_differentiable  # the gradients that travel back have no graph
    def backward(ctx, _, *gradients):
        needed = ctx.needs_input_grad[3:]
        sent = [dx.contiguous() if need else None for dx, need in zip(gradients, needed, strict=True)]
        for dx in sent:
            if dx is not None:
                ctx.ranks.broadcast_(dx, ctx.owner)
        return torch.zeros(()), None, None, *sent


class Leave(torch.autograd.Function):
    """Outputs of a layer, on its rank. forward: sends them to all ranks; backward: sends nothing, all ranks agree."""

    @staticmethod
    def forward(ctx, token, owner, ranks, *values):
        outputs = [x.clone(memory_format=torch.contiguous_format) for x in values]
        for y in outputs:
            ranks.broadcast_(y, owner)
        ctx.mark_non_differentiable(*(y for y in outputs if not differentiable(y)))
        return token.clone(), *outputs

    @staticmethod
    @once_differentiable  # the gradients that travel back have no graph
    def backward(ctx, token, *gradients):
        needed = ctx.needs_input_grad[3:]
        return token, None, None, *(dy if need else None for dy, need in zip(gradients, needed, strict=True))


class Elsewhere(torch.autograd.Function):
    """A layer on another rank. forward: receives its outputs; backward: receives the gradients of its inputs."""

    @staticmethod
    def forward(ctx, token, owner, ranks, device, expected, *values):
        ctx.owner, ctx.ranks, ctx.device = owner, ranks, device
        ctx.kinds = [(x.shape, x.dtype) for x in values]
        outputs = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in expected]
        for y in outputs:
            ranks.broadcast_(y, owner)
        ctx.mark_non_differentiable(*(y for y in outputs if not differentiable(y)))
        return token.clone(), *outputs

    @staticmethod
    @once_differentiable  # the gradients that travel back have no graph
    def backward(ctx, *_):
        needed = ctx.needs_input_grad[5:]
        got = []
        for (shape, dtype), need in zip(ctx.kinds, needed, strict=True):
            dx = torch.empty(shape, dtype=dtype, device=ctx.device) if need else None
            got.append(None if dx is None else ctx.ranks.broadcast_(dx, ctx.owner))
        return torch.zeros(()), None, None, None, None, *got


_RECORDS = ("output_attentions", "output_router_logits")


def refuse_records(model: nn.Module, named: Mapping) -> None:
    """Raise ValueError if a model of transformers is asked for values that it records inside of layers."""
    configurations = [part.config for part in models_of_transformers(model)]
    for name in _RECORDS if configurations else ():
        if named.get(name, any(getattr(config, name, False) for config in configurations)):
            raise ValueError(
                f"{type(model).__name__}: {name} asks for what is recorded inside of the layers, and each rank "
                f"would return its own alone: call the model with {name}=False, or on a mesh with pp=1"
            )
