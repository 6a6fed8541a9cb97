"""Random numbers on ranks with equal seeds, and the states of their generators."""

import hashlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode_temporarily

from weft.comm.communicator import Communicator
from weft.metadata import metadata, set_metadata
from weft.running import followed, running


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


# Functions that drop elements: the probability's name, place and default; the default of `training`, None without it.
_DROPS: dict[Callable, tuple[str, int, float, bool | None]] = {
    **dict.fromkeys((F.dropout, F.dropout1d, F.dropout2d, F.dropout3d), ("p", 1, 0.5, True)),
    **dict.fromkeys((F.alpha_dropout, F.feature_alpha_dropout), ("p", 1, 0.5, False)),
    F.scaled_dot_product_attention: ("dropout_p", 4, 0.0, None),
    F.multi_head_attention_forward: ("dropout_p", 10, 0.0, True),
}
_TRAINING = {F.multi_head_attention_forward: 13}  # place of `training`; 2 for the others
_parts: list[
    tuple[str, int]
] = []  # what runs is this part of a tensor: dimension of the mesh and unit, outermost first


def drops(func: Callable, args: Sequence, kwargs: dict) -> bool:
    """Return whether a call of a function of torch drops elements at random."""
    if func not in _DROPS:
        return False
    name, place, default, training = _DROPS[func]
    if not kwargs.get(name, args[place] if len(args) > place else default):
        return False
    place = _TRAINING.get(func, 2)
    return training is None or kwargs.get("training", args[place] if len(args) > place else training)


@contextmanager
def part_of(dimension: str, number: int) -> Iterator[None]:
    """Say that inside the context functions get a unit of what the ranks along a dimension of the mesh share."""
    _parts.append((dimension, number))
    try:
        yield
    finally:
        _parts.pop()


def name_modules(model: nn.Module) -> None:
    """Give the modules their names, which the random numbers of a `UnitDraws` follow from."""
    for name, module in model.named_modules():
        set_metadata(module, "name", name)


class UnitDraws(TorchFunctionMode):
    """Mode in which functions drop the same elements on any number of ranks, for models with `invariant`.

    The random numbers follow from the seed, the name of the running module, the unit of split features and of positions
    that a function gets, and how often this combination has dropped before. So they do not depend on what ran before,
    which may be on another stage. Enter it once for each forward, inside of `followed`.

    Args:
        seed: None for a number of torch's generator, drawn when the first function drops.
    """

    def __init__(self, seed: int | None = None):
        super().__init__()
        self._seeds = [] if seed is None else [seed]
        self._before: Counter[tuple] = Counter()
        self._checkpoints = ExitStack()

    def copy(self) -> "UnitDraws":
        """Return a mode that drops from here on what this one drops."""
        other = type(self)()
        other._seeds, other._before = self._seeds, self._before.copy()
        return other

    @contextmanager
    def in_its_place(self) -> Iterator[None]:
        """Enter this mode; it goes on as the innermost one and stands in its place, if that is a UnitDraws."""
        modes = _get_current_function_mode_stack()
        if not modes or not isinstance(modes[-1], UnitDraws):
            with self:
                yield
            return
        self._seeds, self._before = modes[-1]._seeds, modes[-1]._before
        with _pop_mode_temporarily(), self:
            yield

    def __enter__(self):
        self._checkpoints.enter_context(_checkpoints_drop_alike())
        return super().__enter__()

    def __exit__(self, *error):
        self._checkpoints.close()
        return super().__exit__(*error)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = metadata(running(), "name") if func in _DROPS and drops(func, args, kwargs) else None
        if name is None:  # code between layers that a stage of a pipeline has copied from a module has no name
            return func(*args, **kwargs)
        with random_numbers_of(self._next_seed(name), args[0].device if args else next(iter(kwargs.values())).device):
            return func(*args, **kwargs)

    def _next_seed(self, name: str) -> int:
        if not self._seeds:
            self._seeds.append(int(torch.randint(2**62, (1,))))
        place = name, *_parts
        text = repr((self._seeds, place, self._before[place]))
        self._before[place] += 1
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())


_checkpoint = inspect.unwrap(torch.utils.checkpoint.checkpoint)


@contextmanager
def _checkpoints_drop_alike() -> Iterator[None]:
    """Let torch.utils.checkpoint, called inside, recompute in the modes of its call; otherwise it would drop others.

    Torch has no hook for this: the default of `context_fn` is replaced while the context lasts.
    """
    torch_checkpoint, usual = torch.utils.checkpoint, torch.utils.checkpoint.noop_context_fn
    torch_checkpoint.noop_context_fn = _checkpoint.__kwdefaults__["context_fn"] = _forward_and_again
    try:
        yield
    finally:
        torch_checkpoint.noop_context_fn = _checkpoint.__kwdefaults__["context_fn"] = usual


class _Resumed:
    """Context with the modes and parts of the time when it was made, in which functions drop what they dropped then."""

    def __init__(self) -> None:
        self._module, self._parts = running(), list(_parts)
        self._modes = [_copy_of(mode) for mode in _get_current_function_mode_stack()]
        self._stack = ExitStack()

    def __enter__(self) -> None:
        if self._module is not None:
            self._stack.enter_context(followed(self._module))
        for part in self._parts:
            self._stack.enter_context(part_of(*part))
        for mode in self._modes:
            self._stack.enter_context(_copy_of(mode))

    def __exit__(self, *error) -> None:
        self._stack.close()


def _copy_of(mode: TorchFunctionMode) -> TorchFunctionMode:
    return mode.copy() if isinstance(mode, UnitDraws) else mode


def _forward_and_again() -> tuple[AbstractContextManager, AbstractContextManager]:
    """Return contexts for the forward of a checkpoint and for its recomputations."""
    return nullcontext(), _Resumed()


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
