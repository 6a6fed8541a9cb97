"""A model's own forward, cut into stages by the order in which it calls its layers.

Every stage runs the whole forward of the model. Layers of its own run. Layers of earlier stages are skipped: a result
that this stage needs was sent, the others are absent. The first layer of a later stage ends the forward. The code
between layers runs on every stage, on the same inputs and with the same random numbers; results of layers on other
stages are meta tensors. So masks and angles are made where they are used, and nothing is sent that a later stage does
not need.

A layer is an element of the model's outermost lists, or another module with parameters that the code around these lists
calls. The values that cross are found in one run of a call through all stages (walk.py): results of layers, and what
the code between layers has made of them and needs after the cut.
"""

import random
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from weft.context_parallel.region import SharedCall, entry_of
from weft.context_parallel.transformers_attention import models_of_transformers
from weft.forward import ForwardChain, step_of
from weft.layer_lists import layers_of
from weft.pipeline.forward_plan import Call
from weft.pipeline.transformers_stages import without_caches
from weft.rng import next_seed, random_numbers_of

_NOTHING = nullcontext()


class UncuttableError(ValueError):
    """Error for a forward that no stages can run as it is."""


class StageEndedError(Exception):
    """Raised by the first layer of a later stage. Torch then calls the hooks that always run."""


class CutLayer:
    """Step of the forward of a layer of a model that is cut."""

    def __init__(self, name: str, layer: nn.Module, cut: "ForwardCut"):
        self.name, self.layer, self.cut = name, layer, cut

    def __call__(self, forward: Callable, layer: nn.Module, *args, **kwargs):
        run = self.cut.run
        if run is None:  # recomputation in backward, which draws the numbers of the forward again
            return self.seeded(forward, args, kwargs)
        if run.inside is not None:
            run.enter_nested(self)
            return forward(*args, **kwargs)
        return run.call(self, forward, args, kwargs)

    def seeded(self, forward: Callable, args: tuple, kwargs: dict):
        """Run the layer; it draws numbers of its own, so that the code after it draws alike on every stage."""
        own = random_numbers_of(next_seed(), self.cut.device) if self.cut.draws else nullcontext()
        with own, self.cut.watched(self.name):
            return forward(*args, **kwargs)


class ForwardCut:
    """A model whose layers ask the running stage whether to run.

    Args:
        caller: first word of the error messages.
        layers: the layers by name; those without parameters run on every stage. None: `layers_of(model)`.

    Attributes:
        of_transformers: the models of transformers in it.
        around: the modules that contain layers.
        names: name of the layer of each call, in order.
        stages: stage of each call.
        run: the forward under way, a StageForward or a CallRecording.
        shared: how the ranks share the sequence of the calls under way, if they do.
        draws: whether the code between layers draws random numbers, which must then be the same on every stage.
        warned: whether the user was warned of a tensor that a layer keeps.
        runs: number of runs of the code between layers in this call, where they must leave nothing behind; else None.
        watched: watched(name) is a context around each layer that runs.
    """

    way_out = "Make what needs that a module of its own, which shares the parameter if it is one"
    watched: Callable[[str], AbstractContextManager] = nullcontext
    run: Any = None
    shared: SharedCall | None = None
    draws, warned = True, False
    runs: int | None = None

    def __init__(
        self, caller: str, model: nn.Module, device: torch.device, layers: Mapping[str, nn.Module] | None = None
    ):
        self.caller, self.model, self.device = caller, model, device
        self.layers = cut_layers(model) if layers is None else dict(layers)
        self.names: list[str] = []
        self.stages: list[int] = []
        self._entry, self.of_transformers = entry_of(model), models_of_transformers(model)
        for name, layer in self.layers.items():
            ForwardChain.of(layer).add("stage", CutLayer(name, layer, self))
        inside = {part for layer in self.layers.values() for part in layer.modules()}
        self.around = [part for part in model.modules() if part not in inside and not inside.isdisjoint(part.modules())]
        for name, module in model.named_modules():  # the others that the code between layers calls
            owner = model.get_submodule(name.rpartition(".")[0])
            if module not in inside and module not in self.around and owner in self.around:
                ForwardChain.of(module).add("between", partial(self._beside_layers, name))
        ForwardChain.of(model).add("between", self._between_layers)

    def _beside_layers(self, name: str, forward: Callable, module: nn.Module, /, *args, **kwargs):
        """Run a module that the code between layers calls: to that code it is one function."""
        run = self.run
        if run is None or run.inside is not None or not run.follows:
            return forward(*args, **kwargs)
        return run.function(forward, args, kwargs, name)

    def _between_layers(self, forward: Callable, model: nn.Module, /, *args, **kwargs):
        """Run the model; the running stage follows the functions between its layers."""
        run = self.run
        if run is None or not run.follows:
            return forward(*args, **kwargs)
        with run.following():
            return forward(*args, **kwargs)

    def undo(self) -> None:
        """Give the modules back their own forward."""
        for module in self.model.modules():
            for name in ("stage", "between"):
                if step_of(module, name) is not None:
                    ForwardChain.of(module).remove(name)

    def numbers(self) -> dict[tuple[nn.Module, str], Any]:
        """Return the attributes of the modules around the layers that are numbers, for example a count of calls."""
        return {
            (module, attribute): value
            for module in self.around
            for attribute, value in vars(module).items()
            if isinstance(value, int | float) and attribute != "training"
        }

    def buffers(self) -> dict[tuple[nn.Module, str, int], int]:
        """Return the version of each buffer of these modules."""
        buffers = [(module, name, x) for module in self.around for name, x in module._buffers.items() if x is not None]
        return {(module, name, id(x)): 0 if x.is_inference() else x._version for module, name, x in buffers}

    def other_generators(self) -> tuple:
        """Return the states of random numbers that are not of torch's own generators."""
        own = [x for module in self.around for x in vars(module).values() if isinstance(x, torch.Generator)]
        return random.getstate(), [x.get_state().tolist() for x in own]

    def state(self) -> dict[tuple, Any]:
        """Return what the code between layers may change from call to call."""
        return {**self.numbers(), **self.buffers()}

    def stage_of(self, number: int, name: str, running: int) -> int:
        """Return the stage of a call.

        Args:
            name: the layer's.
            running: the stage that runs.

        Raises:
            ValueError: the call was one of another layer before.
        """
        if number == len(self.names) and (stage := self.stage_of_new(name, running)) is not None:
            self.names.append(name)
            self.stages.append(stage)
        if number < len(self.names) and self.names[number] == name:
            return self.stages[number]
        expected = self.names[number] if number < len(self.names) else "the end"
        raise ValueError(
            f"{self.caller}: the forward of {type(self.model).__name__} calls {name} where it called {expected} when "
            "it was cut; every batch must run the same layers in the same order: pass example= like the batches (and "
            "set layerdrop to 0)"
        )

    def stage_of_new(self, name: str, running: int) -> int | None:
        """Return the stage of a call after those that are known; None if all are."""
        return None

    def rank_of(self, stage: int) -> int:
        """Return the rank of a stage."""
        raise NotImplementedError(f"{type(self).__name__} does not say which rank has stage {stage}")

    def forward(self, run, inputs: Call, seed: int | None = None, model: nn.Module | None = None):
        """Run the model's forward as `run` says.

        Args:
            model: a part of the model that is called by itself.

        Returns:
            The model's output, or None if a later stage goes on.
        """
        self.run = run
        if self._entry is not None:
            self._entry.given = self.shared
        own = nullcontext() if seed is None else random_numbers_of(seed, self.device)
        try:
            with without_caches(self.of_transformers) if self.of_transformers else _NOTHING, own:
                run.started()
                output = (model or self.model)(*inputs[0], **inputs[1])
        except StageEndedError:
            pass
        finally:
            self.run = None
            if self._entry is not None:
                self._entry.given = None
        return None if run.ended else output


def cut_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of a model that one stage has: those with parameters or running means."""
    return {name: layer for name, layer in layers_of(model).items() if has_state(layer)}


def has_state(layer: nn.Module) -> bool:
    """Return whether a layer has parameters or running means."""
    means = (getattr(module, "running_mean", None) for module in layer.modules())
    return any(True for _ in layer.parameters()) or any(x is not None for x in means)


def device_of(mesh: DeviceMesh) -> torch.device:
    """Return this rank's device for the layers."""
    return torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")
