"""Record what a program computes: what its modules take and give, their gradients, and steps of its optimizers.

The program is anybody's. A module's call is seen by `nn.Module.__call__`, a backward by `torch.autograd.backward`, and
a step by torch's hooks of all optimizers; all of it is as before when the recording ends. Tensors are kept whole, so a
model that is to be compared should be small.
"""

import atexit
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Partial
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import get_worker_info

import weft.clip_grad
from weft.context_parallel.shared_sequence import parts_here
from weft.data_parallel.batch_units import running_unit
from weft.data_parallel.data_parallel import DataParallel
from weft.data_parallel.grad_norm import gradient_of
from weft.data_parallel.sharded_optimizer import piece_of
from weft.sharding.shard import shard_of
from weft.sharding.sharded_grad import local
from weft.tools.called_modules import CalledModules, Changes, holder_of, is_around, names_of, outermost
from weft.tools.compare.reordering import OtherOrder, nudge
from weft.tools.compare.seen import Call, Edge, Key, Place, RecordedRun, Seen, flat_parts, place_of, plain_name, save
from weft.tools.numbers import numbers_of

STEPS = (0, 1)
_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
_NO_SETTINGS = {"params", "foreach", "fused", "capturable", "differentiable"}  # of a group: how it runs
_HOOKED = (torch.Tensor, nn.Parameter, DTensor)


class RunRecorder:
    """Recording of this process.

    Args:
        steps: numbers of the steps to keep, from 0.
        reordered: compute products in another order of summation, and start from parameters that differ by a rounding
            step. Compared with a recording without it, this measures rounding.
        drops: let dropout drop.
        kinds: the kinds of tensors to keep; None: all.

    Attributes:
        in_units: whether batches ran in units.
    """

    def __init__(
        self,
        steps: Sequence[int] = STEPS,
        reordered: bool = False,
        drops: bool = False,
        kinds: Collection[str] | None = None,
    ):
        self.steps, self.reordered, self.step = set(steps), reordered, 0
        self.drops, self.kinds, self.in_units = drops, kinds, False
        self._found: list[tuple[Any, ...]] = []  # of Seen, with the module itself for its name
        self._roots: list[nn.Module] = []
        self._called = CalledModules(self._roots)
        self._calls: Counter = Counter()
        self._forwards: dict[nn.Module, list[tuple]] = defaultdict(list)  # calls that may be recomputed
        self._again: Counter = Counter()
        self._names: dict[int, tuple[torch.Tensor, nn.Module, str]] = {}  # of parameters, by id
        self._stepped: set[int] = set()
        self._modules: dict[int, str] = {}
        self._callers: dict[nn.Module, nn.Module | None] = {}  # the first of each module
        self._numbers: dict[tuple, int] = {}  # of calls of modules without a name
        self._holder: nn.Module | None = None  # of all roots, if there are several
        self._made: dict[Any, list[tuple]] = {}  # a node of autograd's graph to the calls whose output it is
        self._edges: dict[tuple, None] = {}  # (call that made a tensor, call that it went into)
        self._changes = Changes()
        self._rank = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self._process: int | None = None  # that called a module
        self._not_recorded: dict[str, None] = {}

    # Hooks

    def start(self) -> None:
        recorder, call, backward = self, nn.Module.__call__, torch.autograd.backward

        def called(module, *args, **kwargs):
            if torch.compiler.is_compiling():
                recorder._not_recorded["modules inside a compiled graph"] = None
                return call(module, *args, **kwargs)
            if type(module) is nn.Identity or not recorder._called.counts(
                module
            ):  # Identity: a layer that a stage lacks
                return call(module, *args, **kwargs)
            recorder._begin_step()
            if recorder.step not in recorder.steps:
                return call(module, *args, **kwargs)
            return recorder._call(call, module, args, kwargs)

        def differentiated(tensors, *args, **kwargs):
            if recorder.step in recorder.steps:
                for x in [tensors] if isinstance(tensors, torch.Tensor) else list(tensors):
                    if x.numel() == 1:
                        recorder._keep("loss", None, x, item=recorder._next("loss"))
            return backward(tensors, *args, **kwargs)

        self._changes.put(nn.Module, "__call__", called)
        if not self.drops:
            for name in _DROPOUTS:
                self._changes.put(nn.functional, name, self._dropping(getattr(nn.functional, name)))
            attention = nn.functional.scaled_dot_product_attention
            self._changes.put(nn.functional, "scaled_dot_product_attention", self._attending(attention))
        self._changes.put(torch.autograd, "backward", differentiated)
        for home in (nn.utils, nn.utils.clip_grad, weft, weft.clip_grad):
            self._changes.put(home, "clip_grad_norm_", self._clipping(home.clip_grad_norm_))
        self._changes.put(nn.utils, "clip_grads_with_norm_", self._scaling(nn.utils.clip_grads_with_norm_))
        self._changes.at_end(register_optimizer_step_pre_hook(self._before_step).remove)
        self._changes.at_end(register_optimizer_step_post_hook(self._after_step).remove)
        if self.reordered:
            mode = OtherOrder()
            mode.__enter__()
            self._changes.at_end(lambda: mode.__exit__(None, None, None))

    def stop(self) -> None:
        self._changes.undo()

    # Modules

    def _begin_step(self) -> None:
        """Begin the next step with the first call of a module behind the optimizers' steps."""
        if self._called.stack or _is_recomputing():
            return
        if self._process not in (None, os.getpid()):  # forked behind the first call
            self._found.clear()
            self.step = 0
        elif self._stepped:
            self._end_step()
        if get_worker_info() is None:  # a data loader's transforms may be modules
            self._process = os.getpid()
        if dist.is_available() and dist.is_initialized():
            self._rank = dist.get_rank(), dist.get_world_size()

    def _call(self, call: Callable, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        again = _is_recomputing()
        if not again and self._called.is_root(module):
            self._enter_root(module)
        if is_around(module):
            return self._within(module, call, args, kwargs)
        at = self._recomputed(module) if again else self._next_call(module)
        args, kwargs = self._note_all("input", at, (args, kwargs), again)
        return self._note_all("output", at, self._within(module, call, args, kwargs), again)

    def _next_call(self, module: nn.Module) -> tuple:
        unit = running_unit()
        self.in_units |= unit is not None
        root = self._called.root_call if unit is None else unit
        at = (module, root, self._next((module, root)))
        self._forwards[module].append(at)
        if self.step in self.steps:
            self._callers.setdefault(module, next((x for x in reversed(self._called.stack) if not is_around(x)), None))
        return at

    def _recomputed(self, module: nn.Module) -> tuple:
        """Return the call that a recomputation in backward repeats; the backwards of calls run in the calls' order."""
        number, forwards = self._again[module], self._forwards[module]
        self._again[module] += 1
        return forwards[min(number, len(forwards) - 1)] if forwards else (module, self._called.root_call, number)

    def _within(self, module: nn.Module, call: Callable, args: tuple, kwargs: dict) -> Any:
        self._called.stack.append(module)
        drops = module.dropout if isinstance(module, nn.RNNBase) and module.training and not self.drops else 0.0
        if drops:
            self._not_recorded["dropout inside of an RNN"] = None
            module.dropout = 0.0  # type: ignore[assignment]
        try:
            return call(module, *args, **kwargs)
        finally:
            self._called.stack.pop()
            if drops:
                module.dropout = drops  # type: ignore[assignment]

    def _enter_root(self, module: nn.Module) -> None:
        new = self._called.enter_root(module)
        self._holder = None if new else self._holder
        self._called.root_call = self._next("roots", module)
        if not any(True for _ in module.parameters()):
            return
        if self.reordered and new:
            nudge(module)
        for name, x in module.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(x), (x, module, name))
            away = hasattr(x, "ds_shape") and not x.numel()  # ZeRO 3 gathers it when its module runs
            if not away and self._first("parameters", x):
                self._keep("parameter", (module, name), x, place=place_of(x))
        self._keep_buffers("buffer", module)

    def _keep_buffers(self, kind: str, root: nn.Module) -> None:
        """Keep the buffers that a checkpoint has."""
        for owner, module in root.named_modules():
            left_out = getattr(module, "_non_persistent_buffers_set", ())
            for name, x in module.named_buffers(recurse=False):
                if name not in left_out and self._first(kind, x):
                    self._keep(kind, (root, ".".join(filter(None, (owner, name)))), x)

    def _first(self, key: str, x: object) -> bool:
        self._calls[key, id(x)] += 1
        return self._calls[key, id(x)] == 1

    def _note_all(self, kind: str, at: tuple, tree: Any, again: bool) -> Any:
        leaves, structure = tree_flatten(tree)
        views: dict[int, torch.Tensor] = {}
        for item, x in enumerate(leaves):
            if isinstance(x, torch.Tensor) and not x.is_meta:
                with torch._C.DisableTorchFunction():
                    leaves[item] = self._note(kind, at, item, x, again, views)
        return tree_unflatten(leaves, structure) if views else tree

    def _note(self, kind: str, at: tuple, item: int, x: torch.Tensor, again: bool, views: dict) -> torch.Tensor:
        if not again:
            self._keep(kind, at, x, item)
        parts = parts_here(x)
        alone = parts[0][1] is x
        if not x.requires_grad or not torch.is_grad_enabled() or (alone and type(x) not in _HOOKED):
            return x
        if isinstance(x, nn.Parameter):  # that a layer returns, say: its gradient is that of all uses
            return x
        if not again:
            self._note_edges(kind, at, x)
        if kind == "input" and alone:
            # a node of its own in the graph: its gradient is that of this module alone
            x = views.setdefault(id(x), x.view_as(x))
            parts = [(None, x)]
        for part, values in parts:
            where = item if part is None else f"{item}.{part}"
            values.register_hook(lambda dx, where=where: self._keep(f"gradient of {kind}", at, dx, where))
        return x

    def _note_edges(self, kind: str, at: tuple, x: torch.Tensor) -> None:
        """Note from which calls' outputs a tensor was computed, past none that is between."""
        reached, next_ones = set(), [x.grad_fn]
        while next_ones:
            node = next_ones.pop()
            if node is None or node in reached:
                continue
            reached.add(node)
            if makers := self._made.get(node):
                self._edges.update(dict.fromkeys((maker, at) for maker in makers if maker != at))
            else:
                next_ones += [parent for parent, _ in node.next_functions]
        if kind == "output" and x.grad_fn is not None:
            self._made.setdefault(x.grad_fn, []).append(at)

    def _keep(self, kind: str, at: Any, x: torch.Tensor, item: int | str = 0, place: Place | None = None) -> None:
        if self.step not in self.steps or (self.kinds is not None and kind not in self.kinds):
            return
        with torch.no_grad(), _disable_current_modes():
            for part, values in parts_here(x):
                partial = isinstance(x, DTensor) and any(isinstance(to, Partial) for to in x.placements)
                where = item if part is None else f"{item}.{part}"
                values = values.wait() if isinstance(values, AsyncCollectiveTensor) else values
                kept = local(values.detach()).to("cpu", copy=True)
                kept = kept.to_dense() if kept.layout != torch.strided else kept
                kept = torch.view_as_real(kept) if kept.is_complex() else kept
                if type(kept) is not torch.Tensor:  # of a class of its own, without values: on another stage
                    continue
                outermost = next((x for x in self._called.stack if not is_around(x)), None)
                self._found.append((self.step, kind, at, where, kept, partial, place, outermost))

    def _dropping(self, drop: Callable) -> Callable:
        """Return a dropout that records what it would drop, and drops nothing."""

        def dropped(x, p=0.5, training="alpha" not in drop.__name__, inplace=False):
            if not training or p == 0.0 or self.step not in self.steps or not self._called.stack:
                return drop(x, p, training, inplace)
            with torch.no_grad():
                left = drop(torch.ones_like(x), p, True)
            if not _is_recomputing():
                module, root = self._called.stack[-1], self._called.root_call
                number = self._next(("drops", module, root))
                self._keep("input", (module, root, number), x, "dropped")
                self._keep("dropout", (module, root, number), left == left.max())
                self._keep("drop rate", (module, root, number), torch.tensor(p, dtype=torch.float64))
            return x

        return dropped

    def _attending(self, attend: Callable) -> Callable:
        def attended(query, key, value, attn_mask=None, dropout_p=0.0, *args, **kwargs):
            if dropout_p and self.step in self.steps and self._called.stack:
                self._not_recorded["weights that attention drops"], dropout_p = None, 0.0
            return attend(query, key, value, attn_mask, dropout_p, *args, **kwargs)

        return attended

    def _next(self, key: Any, of: object = None) -> int:
        self._calls[key, of] += 1
        return self._calls[key, of] - 1

    # Steps of optimizers

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        if id(optimizer) in self._stepped:
            self._end_step()
        if not _has_closure(args, kwargs):
            self._keep_what_it_takes(optimizer)

    def _keep_what_it_takes(self, optimizer: torch.optim.Optimizer) -> None:
        self._stepped.add(id(optimizer))
        if self._holder is None and len(models := outermost(self._roots)) > 1:
            self._holder = holder_of(models)
        if self.step not in self.steps:
            return
        for group in optimizer.param_groups:
            own = {name: x for name, x in group.items() if name in optimizer.defaults}  # others are a program's marks
            settings = {name: number for name, x in own.items() if (number := _numbers_of(name, x)) is not None}
            for x in group["params"]:
                for parameter in [named[0] for named in flat_parts(x, self._named_parameters())]:
                    for name, number in settings.items():
                        self._keep("setting", parameter, number, item=name)
        self._keep_gradients("gradient", _parameters(optimizer))

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        if _has_closure(args, kwargs):  # in which the model was called
            self._keep_what_it_takes(optimizer)
        if self.step not in self.steps:
            return
        for x in _parameters(optimizer):
            states = optimizer.state.get(x, {}).items()
            kept = {name: state for name, state in states if isinstance(state, torch.Tensor)}
            kept = {name: state for name, state in kept.items() if local(state).numel() == local(x).numel()}
            for parameter, part, place in flat_parts(x, self._named_parameters()):
                self._keep("updated parameter", parameter, x[part], place=place)
                for name, state in kept.items():
                    self._keep("state", parameter, state[part], item=name, place=place)
        for model in self._roots:
            self._keep_buffers("updated buffer", model)

    def _keep_gradients(self, kind: str, parameters: Sequence[torch.Tensor]) -> None:
        for x in parameters:
            gradient = x.grad if isinstance(x.grad, DTensor) else gradient_of(x)
            gradient = gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient
            if gradient is not None:  # it may be placed otherwise than the parameter
                other = isinstance(gradient, DTensor) and piece_of(x) is None and shard_of(x) is None
                for parameter, part, place in flat_parts(x, self._named_parameters()):
                    self._keep(kind, parameter, gradient[part], place=place_of(gradient) if other else place)

    def _named_parameters(self) -> Iterator[torch.Tensor]:
        return (x for x, _, _ in self._names.values())

    def _end_step(self) -> None:
        """Begin the next step. Optimizers that step one after another belong to one step."""
        self.step += 1
        self._stepped.clear()
        self._calls.clear()
        self._again.clear()
        self._forwards.clear()
        self._made.clear()

    def _clipping(self, clip: Callable) -> Callable:
        def clipped(parameters, *args, **kwargs):
            if not isinstance(parameters, nn.Module):
                parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            self._keep_gradients("gradient before clipping", _trained(parameters))
            norm = clip(parameters, *args, **kwargs)
            self._keep("norm", None, norm, item=self._next("norm"))
            return norm

        return clipped

    def _scaling(self, scale: Callable) -> Callable:
        def scaled(parameters, max_norm, total_norm, *args, **kwargs):
            parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            self._keep_gradients("gradient before clipping", parameters)
            self._keep("norm", None, total_norm, item=self._next("norm"))
            return scale(parameters, max_norm, total_norm, *args, **kwargs)

        return scaled

    # The result

    def seen(self, model: nn.Module | None = None) -> list[Seen]:
        """Return all that was recorded, in order.

        Args:
            model: gives its modules their names; by default, that is the outermost module that was called, or the one
                that holds all of these.
        """
        self._modules = names_of(self._roots, model or self._holder)
        self._number_unnamed()
        return [self._named(*found) for found in self._found]

    def _number_unnamed(self) -> None:
        """Give calls of modules that a forward makes anew their number, by name."""
        counts: Counter = Counter()
        for step, _, at, *_ in self._found:
            unnamed = isinstance(at, tuple) and len(at) == 3 and id(at[0]) not in self._modules
            if unnamed and at not in self._numbers:
                alike = step, self._name_of(at[0]), at[1]
                self._numbers[at] = counts[alike]
                counts[alike] += 1

    def edges(self) -> list[Edge]:
        """Return which calls' outputs went into which calls, by name; `seen` must have been called."""
        return [(self._named_call(maker), self._named_call(user)) for maker, user in self._edges]

    def _named(self, step: int, kind: str, at: Any, item: int | str, *rest: Any) -> Seen:
        *others, outermost = rest
        module: nn.Module | None = None
        root, call = 0, 0
        name = ""
        if isinstance(at, torch.Tensor):
            piece = piece_of(at)
            _, module, name = self._names.get(id(at), (at, None, "")) if piece is None else (at, None, piece.name)
        elif isinstance(at, tuple) and len(at) == 3:
            name, root, call = self._named_call(at)
        elif isinstance(at, tuple):
            module, name = at
        owner = "" if module is None else self._name_of(module)
        full_name = plain_name(".".join(filter(None, (owner, name))))
        within = full_name if outermost is None else self._name_of(outermost)
        return Seen(Key(step, kind, full_name, root, call, item), *others, within)  # type: ignore[call-arg]

    def _name_of(self, module: nn.Module) -> str:
        """Return a module's name in its model; of one that a forward makes, its caller's and its class's."""
        if (name := self._modules.get(id(module))) is None:
            caller = self._callers.get(module)
            name = ".".join(filter(None, ("" if caller is None else self._name_of(caller), type(module).__name__)))
        return plain_name(name)

    def _named_call(self, at: tuple[nn.Module, int, int]) -> Call:
        return self._name_of(at[0]), at[1], self._numbers.get(at, at[2])

    def save_before_exit(self, folder: Path) -> None:
        """Save if the process ends by `os._exit`, as forked ones do, until `stop`."""
        exit_at_once = os._exit

        def save_and_exit(status: int) -> None:
            self.save(folder)
            exit_at_once(status)

        self._changes.put(os, "_exit", save_and_exit)

    def save(self, folder: Path) -> None:
        """Write this rank's part of the recording, unless the process called no module, as a launcher does not."""
        if self._process == os.getpid():
            self._process = None
            steps, left_out = self.step + bool(self._stepped), tuple(self._not_recorded)
            save(
                RecordedRun(self.seen(), self.edges(), *self._rank, steps, left_out), folder / f"rank{self._rank[0]}.pt"
            )


@contextmanager
def record(folder: str | Path, *, steps: Sequence[int] = STEPS, reordered: bool = False) -> Iterator[None]:
    """Record the training steps inside, for `weft.compare`. On every rank.

    Tensors are kept whole, so use a small model. Dropout is recorded and leaves all elements as they are, so that what
    is behind it can be compared.

    Args:
        folder: where each rank writes its part, at the end, also if that is `sys.exit()`.
        steps: numbers of the steps to keep, from 0. A step ends with the optimizers' steps.
        reordered: sum products in another order, and change parameters by a rounding step, to measure rounding.

    Examples:
        >>> model = nn.Linear(4, 2)
        >>> with weft.record(f"{path}/run"):
        ...     model(torch.ones(3, 4)).sum().backward()
    """
    recorder = RunRecorder(steps, reordered)
    recorder.start()
    recorder.save_before_exit(Path(folder))
    try:
        yield
    except SystemExit:
        recorder.save(Path(folder))
        raise
    finally:
        recorder.stop()
    recorder.save(Path(folder))


def record_by_environment() -> None:
    """Record this process, if WEFT_RECORD names a folder. WEFT_RECORD_STEPS names the steps, "0,1" by default."""
    folder = os.environ.get("WEFT_RECORD")
    if not folder:
        return
    steps = numbers_of(os.environ.get("WEFT_RECORD_STEPS", "0,1"))
    recorder = RunRecorder(steps, os.environ.get("WEFT_RECORD_REORDERED") == "1")
    recorder.start()
    recorder.save_before_exit(Path(folder))
    atexit.register(recorder.save, Path(folder))


def _has_closure(args: tuple, kwargs: dict) -> bool:
    """Return whether an optimizer is given a function that calls the model; `args` begin with the optimizer."""
    return any(map(callable, (*args[1:2], kwargs.get("closure"))))


def _is_recomputing() -> bool:
    """Return whether a backward runs, in which a checkpoint calls modules again."""
    return torch._C._current_graph_task_id() != -1


def _numbers_of(name: str, setting: Any) -> torch.Tensor | None:
    """Return an optimizer's setting as numbers; None if it is no number."""
    if name in _NO_SETTINGS:
        return None
    numbers = list(setting) if isinstance(setting, (list, tuple)) else [setting]
    numbers = [x.item() if isinstance(x, torch.Tensor) and x.numel() == 1 else x for x in numbers]
    if not all(isinstance(x, (int, float)) for x in numbers):
        return None
    return torch.tensor(numbers, dtype=torch.float64)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [x for group in optimizer.param_groups for x in group["params"]]


def _trained(parameters: Any) -> list[torch.Tensor]:
    """Return a model's parameters, or the pieces of them that this rank's optimizer steps."""
    if not isinstance(parameters, nn.Module):
        return parameters
    wrappers = [module for module in parameters.modules() if isinstance(module, DataParallel)]
    return [piece for wrapper in wrappers for piece in wrapper.pieces()] or list(parameters.parameters())
