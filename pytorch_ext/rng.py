"""Random numbers on ranks with equal seeds and in units, and the states of their generators."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from weft.comm.communicator import Communicator
from weft.forward.functions import FunctionMode, Handler
from weft.forward.running import followed, running
from weft.metadata import metadata, set_metadata


@contextmanager
def own_random_numbers(ranks: Communicator, device: torch.device) -> Iterator[None]:
    """Draw different random numbers on every rank, for parts with different positions, heads or channels.

    The seed follows from the state before and the rank. Ranks may draw different amounts inside and draw alike again
    afterwards. A recomputation that starts from the state before (torch.utils.checkpoint) draws the same numbers.
    """
    with random_numbers_of(next_seed() + ranks.rank, device):
        yield


def next_seed() -> int:
    """Return a number of torch's generator."""
    return int(torch.randint(2**62, (1,)))


@contextmanager
def random_numbers_of(seed: int, device: torch.device) -> Iterator[None]:
    """Use the random numbers of `seed` inside, so that ranks with different states compute alike."""
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng([device] if on_gpu else []):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed takes 2 ms, for devices that are not there
        if on_gpu:
            torch.cuda.manual_seed(seed)
        yield


# Functions that drop elements: the probability's name, place and default; place and default of `training`, if there.
DROPS: dict[Callable, tuple[str, int, float, int, bool | None]] = {
    **dict.fromkeys((F.dropout, F.dropout1d, F.dropout2d, F.dropout3d), ("p", 1, 0.5, 2, True)),
    **dict.fromkeys((F.alpha_dropout, F.feature_alpha_dropout), ("p", 1, 0.5, 2, False)),
    F.scaled_dot_product_attention: ("dropout_p", 4, 0.0, 0, None),
    F.multi_head_attention_forward: ("dropout_p", 10, 0.0, 13, True),
}
# Functions now get this part of a tensor: dimension of the mesh and number of the unit, the outermost first.
parts_of_functions: list[tuple[str, int]] = []


def drops(func: Callable, args: Sequence, kwargs: dict) -> bool:
    """Return whether a call of a function of torch drops elements at random."""
    if func not in DROPS:
        return False
    name, place, default, of_training, training = DROPS[func]
    if not kwargs.get(name, args[place] if len(args) > place else default):
        return False
    return training is None or kwargs.get("training", args[of_training] if len(args) > of_training else training)


def device_of(args: Sequence, kwargs: dict) -> torch.device:
    """Return the device of the first tensor in a call's arguments."""
    return next(x.device for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))


@contextmanager
def part_of(dimension: str, number: int) -> Iterator[None]:
    """Say that inside the context functions get a unit of what the ranks along a dimension of the mesh share."""
    parts_of_functions.append((dimension, number))
    try:
        yield
    finally:
        parts_of_functions.pop()


def name_modules(model: nn.Module) -> None:
    """Give the modules their names, which the random numbers of a `UnitDraws` follow from."""
    for name, module in model.named_modules():
        set_metadata(module, "name", name)


class UnitDraws:
    """Context in which functions drop the same elements on any number of ranks, for models with `invariant`.

    The random numbers follow from the seed, the name of the running module, the unit of split features and of positions
    that a function gets, and how often this combination has dropped before. So they do not depend on what ran before,
    which may be on another stage. Enter it once for each forward, inside of `followed`.

    Args:
        seed: None for a number of torch's generator, drawn when the first function drops.
        handlers: handlers(draws) returns those of further functions.
        inside: as for FunctionMode.
    """

    def __init__(
        self,
        seed: int | None = None,
        handlers: "Callable[[UnitDraws], dict[Callable, Handler]] | None" = None,
        inside: type[torch.Tensor] | None = None,
    ):
        self._handlers, self._inside = handlers, inside
        more = {} if handlers is None else handlers(self)
        self.mode = FunctionMode({**dict.fromkeys(DROPS, self.drop), **more}, inside=inside, owner=self)
        self._seeds = [] if seed is None else [seed]
        self._before: Counter[tuple] = Counter()
        self._drew_seed = False  # at the first drop, in the run that this one repeats
        self._checkpoints = ExitStack()

    def copy(self) -> "UnitDraws":
        """Return a context that drops from here on what this one drops."""
        other = UnitDraws(None, self._handlers, self._inside)
        other._seeds, other._before = self._seeds, self._before.copy()
        other._drew_seed = self._drew_seed or not self._seeds
        return other

    def __enter__(self) -> "UnitDraws":
        self._checkpoints.enter_context(_checkpoints_drop_alike())
        self.mode.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self._checkpoints.close()
        self.mode.__exit__(*error)

    def drop(self, func: Callable, args: tuple, kwargs: dict):
        """Call a function with the random numbers of its place, if it drops."""
        name = metadata(running(), "name") if drops(func, args, kwargs) else None
        if name is None:  # code between layers that a stage of a pipeline has copied from a module has no name
            return func(*args, **kwargs)
        with random_numbers_of(self._next_seed(name), device_of(args, kwargs)):
            return func(*args, **kwargs)

    def _next_seed(self, name: str) -> int:
        if not self._seeds or self._drew_seed:
            number = next_seed()
            self._seeds[:] = self._seeds or [number]
            self._drew_seed = False
        place = name, *parts_of_functions
        of_seed = self._seeds[0], place
        text = repr((self._seeds, place, self._before[of_seed]))
        self._before[of_seed] += 1
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())


@contextmanager
def _checkpoints_drop_alike() -> Iterator[None]:
    """Let checkpoints of torch, called inside, recompute in the modes of their call; otherwise they would drop others.

    Torch has no hook for this: what every checkpoint without reentrance makes is replaced while the context lasts. A
    reentrant one raises.
    """
    of_torch = torch.utils.checkpoint
    usual = of_torch._CheckpointFrame, of_torch.CheckpointFunction

    def frame(recompute, *args, **kwargs):
        resumed = _Resumed()

        def again(*values):
            with resumed:
                return recompute(*values)

        return usual[0](again, *args, **kwargs)

    of_torch._CheckpointFrame, of_torch.CheckpointFunction = frame, _Refused  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        of_torch._CheckpointFrame, of_torch.CheckpointFunction = usual  # type: ignore[misc]


class _Refused:
    """Stand-in for torch's CheckpointFunction."""

    @staticmethod
    def apply(*_):
        raise RuntimeError(
            "invariant: a checkpoint with use_reentrant=True recomputes other random numbers, and parameters that are "
            "not a unit's: pass use_reentrant=False"
        )


# Functions that return a context manager with some state of the time of this call.
states_of_checkpoints: list[Callable[[], AbstractContextManager]] = []


class _Resumed:
    """Context with the modes and parts of the time when it was made, in which functions drop what they dropped then."""

    def __init__(self) -> None:
        self._module, self._parts = running(), list(parts_of_functions)
        self._states = [kept() for kept in states_of_checkpoints]
        modes = _get_current_function_mode_stack()
        self._modes = [_copy_of(mode) for mode in modes if not isinstance(mode, DeviceContext)]  # torch enters that
        self._stack = ExitStack()

    def __enter__(self) -> None:
        if self._module is not None:
            self._stack.enter_context(followed(self._module))
        for part in self._parts:
            self._stack.enter_context(part_of(*part))
        for kept in self._states:
            self._stack.enter_context(kept)
        for mode in self._modes:
            self._stack.enter_context(_copy_of(mode))

    def __exit__(self, *error) -> None:
        self._stack.close()


def _copy_of(mode: TorchFunctionMode) -> TorchFunctionMode:
    owner = mode.owner if isinstance(mode, FunctionMode) else None
    return owner.copy().mode if isinstance(owner, UnitDraws) else mode


def generator_states(device: torch.device) -> list[torch.Tensor]:
    """Return the states of the host's generator and of that of a GPU in use."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


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
