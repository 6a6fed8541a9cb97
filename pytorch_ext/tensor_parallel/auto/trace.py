"""Trace of a model's operations, recorded in a run on tensors without values."""

import contextlib
import copy
import random
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from weft.forward import ForwardChain, FunctionMode, Handler
from weft.metadata import metadata, set_metadata
from weft.sharding.quantized import groups_of, is_quantized
from weft.tensor_parallel.auto.layer_specs import known
from weft.tensor_parallel.local_sizes import SIZES, arguments_of
from weft.tensor_parallel.peft_wrappers import disable_adapters

# Copies are not recorded: strides, and so sizes, decide whether a tensor is copied or a view needs a copy first.
_COPIES = ("clone", "alias", "contiguous")
_SAME = {"_unsafe_view": "view", "reshape": "view", "_reshape_alias": "view"}
_CONSTANT = ("detach", "lift_fresh")
_OF_INPUTS = ("layer", "closed", "attention")
_LOOKUPS = ("embedding", "index", "gather", "index_select")  # of rows of a parameter that the input chooses
_FEW = 1024  # constants with at most so many numbers are compared
_OBJECTS = 3  # depth of nested objects to search in a model's output
ACTIVATION = None  # the origin of tensors that depend on the model's input


@dataclass(eq=False)
class Value:
    """Tensor of the run.

    Attributes:
        origin: the parameters that it depends on, if it depends only on parameters and constants; else ACTIVATION.
        given: it is an input of the model, or a constant that no recorded operation made.
        content: its numbers, if no recorded operation made it and they are few (for example a torch.tensor of a count).
        twin: in a rehearsal, the whole model's tensor that it is a part of.
        aliases: it and the views that share its memory. A write to one of them changes the origin of all.
    """

    shape: tuple[int, ...]
    origin: frozenset[str] | None = frozenset()
    given: bool = False
    content: str = ""
    twin: "Value | None" = None
    aliases: "list[Value]" = field(default_factory=list)

    def __post_init__(self) -> None:
        self.aliases.append(self)


@dataclass(eq=False)
class Node:
    """One operation; "layer" is a whole layer, "closed" a closed module and "attention" a whole attention.

    Attributes:
        args, kwargs: the arguments, with Values in place of tensors.
        outputs: the results; None for a result that is no tensor.
        where: name of the innermost running module.
        layer: name of the module, for "layer" and "closed".
        inputs: the tensors in args and kwargs.
    """

    op: str
    args: tuple
    kwargs: dict
    outputs: list[Value | None]
    where: str
    pointwise: bool = False
    layer: str = ""
    inputs: list[Value] = field(default_factory=list)

    @property
    def output(self) -> Value:
        """First output of an operation that gives a tensor."""
        assert self.outputs[0] is not None
        return self.outputs[0]

    @property
    def drops(self) -> bool:
        """Whether the operation drops elements at random."""
        return self.op == "dropout" or (self.op == "attention" and self.kwargs.get("dropout_p", 0.0) > 0.0)

    @property
    def mutates(self) -> bool:
        return self.op.endswith("_") and bool(self.inputs) and self.outputs[:1] == self.inputs[:1]


@dataclass
class Trace:
    """Operations of a model.

    Attributes:
        nodes: the operations, in order.
        outputs: the tensors that the model returned.
        closed: modules that could not run without values inside, to the reason. Each is recorded as one operation.
        aside: tensors that a module returns in a tuple or list and that no later operation uses (attention weights), to
            (innermost module, index in the tuple or list).
        arguments: (module, argument) to the tensors passed as that argument, if the module's own code reads their
            sizes.
    """

    nodes: list[Node]
    outputs: list[Value]
    closed: dict[str, str]
    aside: dict[Value, tuple[str, int]]
    arguments: dict[tuple[str, str], list[Value]] = field(default_factory=dict)


class UntraceableError(Exception):
    """Error of a model that does not run with a call.

    Attributes:
        module: name of the innermost running module.
    """

    def __init__(self, message: str, module: str):
        super().__init__(message)
        self.module = module


def without_values(model: nn.Module, training: bool = True) -> nn.Module:
    """Return a copy of the model with parameters on the meta device, in training or evaluation mode.

    Adapters of peft are disabled in the copy.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        quantized = is_quantized(parameter)
        like = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta") if quantized else parameter.detach()
        bare = torch.empty_like(like, device="meta")
        twin_of_it = nn.Parameter(bare, requires_grad=parameter.requires_grad)
        twin_of_it._backward_hooks = parameter._backward_hooks  # no backward runs; only their existence matters
        twin_of_it._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
        if quantized:
            set_metadata(twin_of_it, "quantized", groups_of(parameter))
        memo[id(parameter)] = twin_of_it
    twin = copy.deepcopy(model, memo).train(training)
    disable_adapters(twin)
    for module in twin.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()  # its statistics do not matter here
    return twin


def trace(
    twin: nn.Module, call: Callable[[nn.Module], Any], closed: dict[str, str], run: "TraceRun | None" = None
) -> Trace:
    """Run call(twin) and record its operations.

    Args:
        twin: a model from `without_values`.
        closed: modules to treat as one operation, to the reason. The output has the shape of the first input.
        run: the recording to use, for a rehearsal; None starts a new one.

    Raises:
        UntraceableError: the model raised an error.
    """
    run = run or TraceRun()
    run.name_parameters(twin)
    with contextlib.ExitStack() as stack:
        for name, module in twin.named_modules():
            stack.enter_context(_watched(module, name, closed, run))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # a guessed input may cause warnings
        stack.enter_context(torch.random.fork_rng([]))
        stack.callback(random.setstate, random.getstate())
        torch.default_generator.manual_seed(0)  # a model that skips random layers skips the same ones each time
        stack.enter_context(torch.no_grad())
        stack.enter_context(_functions(run))
        stack.enter_context(_own_backwards(run))
        stack.enter_context(_Recorder(run))
        try:
            outputs = call(twin)
        except MismatchError:
            raise
        except Exception as error:  # a model's code may raise anything on tensors without values
            where = run.stack[-1] if run.stack else ""
            message = str(error).partition("\n")[0]
            raise UntraceableError(f"{type(error).__name__}: {message}", where) from error
    returned = [run.value(tensor) for tensor in tensors_in(outputs, _OBJECTS)]
    return Trace(run.nodes, returned, closed, run.aside(), run.read_arguments())


class MismatchError(Exception):
    """Difference between a rehearsal and the whole model's run.

    Attributes:
        step: index of the operation.
    """

    def __init__(self, step: int, message: str):
        super().__init__(message)
        self.step = step


class TraceRun:
    """State of one recording. A rehearsal (dry_run.py) overrides `take` and `width_of`."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.stack: list[str] = []
        self.arguments: dict[tuple[str, str], list[Value]] = {}
        self._sized: set[tuple[str, Value]] = set()
        self._results: dict[Value, tuple[str, int, int]] = {}  # to (module, index, number of operations until then)
        self._values: dict[int, Value] = {}
        self._kept: list[torch.Tensor] = []  # keeps tensors alive, so that their ids stay unique

    def name_parameters(self, twin: nn.Module) -> None:
        for name, parameter in twin.named_parameters():
            self._set(parameter, Value(tuple(parameter.shape), frozenset([name])))
        for buffer in twin.buffers():
            self._set(buffer, Value(tuple(buffer.shape)))

    def value(self, tensor: torch.Tensor) -> Value:
        """Return the Value of a tensor. A tensor that no operation made is the model's input or a constant."""
        known = self._values.get(id(tensor))
        if known is None:
            # A tensor that the model makes of a number is first seen here, at its use.
            an_input = tensor.is_meta and _differentiable(tensor) and tensor.dim() > 0 and not is_constant(tensor)
            origin = ACTIVATION if an_input else frozenset[str]()
            with _unrecorded():
                content = "" if tensor.is_meta or tensor.numel() > _FEW else str(tensor.tolist())
            known = self._set(tensor, Value(tuple(tensor.shape), origin, given=True, content=content))
        return known

    def record(self, op: str, args, kwargs, results, is_view: bool = False, **about) -> None:
        if op in _COPIES and isinstance(results, torch.Tensor):
            self._set(results, self.value(args[0]))
            return
        op = _SAME.get(op, op)
        inputs = [self.value(tensor) for tensor in tensors_in((args, kwargs))]
        origin = _origin(op, inputs)
        outputs: list[Value | None] = []
        for result in results if isinstance(results, (list, tuple)) else [results]:
            if not isinstance(result, torch.Tensor):
                outputs.append(None)
                continue
            known = self._values.get(id(result))
            if known is None:
                aliases = inputs[0].aliases if is_view else []
                of_floats = origin if _differentiable(result) else frozenset[str]()
                known = self._set(result, Value(tuple(result.shape), of_floats, aliases=aliases))
            elif _differentiable(result):
                for alias in known.aliases:
                    alias.origin = _together([alias.origin, origin])
            outputs.append(known)
        replaced = (_with_values(args, self), _with_values(kwargs, self))
        node = Node(op, *replaced, outputs, self.stack[-1] if self.stack else "", inputs=inputs, **about)
        self.take(node)

    def take(self, node: Node) -> None:
        self.nodes.append(node)

    def note_arguments(self, name: str, given: Iterable[tuple[str, Any]]) -> None:
        """Note the tensors that a module is called with."""
        for argument, tensor in given:
            if isinstance(tensor, torch.Tensor):
                self.arguments.setdefault((name, argument), []).append(self.value(tensor))

    def note_sizes(self, tensor: torch.Tensor) -> None:
        """Note that the running module's own code reads sizes of a tensor."""
        if self.stack and id(tensor) in self._values:
            self._sized.add((self.stack[-1], self._values[id(tensor)]))

    def read_arguments(self) -> dict[tuple[str, str], list[Value]]:
        return {
            (name, argument): values
            for (name, argument), values in self.arguments.items()
            if any((name, value) in self._sized for value in values)
        }

    def note_results(self, name: str, results) -> None:
        """Note the tensors that a module returns in a tuple or list. The model's own outputs are not noted."""
        if name and isinstance(results, (tuple, list)):
            for place, tensor in enumerate(results):
                if isinstance(tensor, torch.Tensor):
                    self._results.setdefault(self.value(tensor), (name, place, len(self.nodes)))

    def aside(self) -> dict[Value, tuple[str, int]]:
        last = {value: step for step, node in enumerate(self.nodes) for value in node.inputs}
        return {
            value: (name, place) for value, (name, place, then) in self._results.items() if last.get(value, -1) < then
        }

    def width_of(self, name: str, whole: int) -> int:
        """Return the width of a layer's output in this run."""
        return whole

    def check_input(self, layer: nn.Module, *inputs) -> None:
        """Raise for a wrong guess of the model's input, as the layer itself would."""
        kind, tensor = known(layer), next(tensors_in(inputs), None)
        if kind is None or tensor is None:
            return
        if isinstance(layer, nn.Embedding):
            if tensor.is_floating_point():
                raise TypeError(f"an embedding was given {tensor.dtype}")
        elif tensor.shape[kind.features :][:1] != (kind.sizes(layer)[0],):
            raise ValueError(
                f"{type(layer).__name__} of {kind.sizes(layer)[0]} features was given {tuple(tensor.shape)}"
            )
        elif not tensor.is_floating_point():
            raise TypeError(f"{type(layer).__name__} was given {tensor.dtype}")

    def _set(self, tensor: torch.Tensor, value: Value) -> Value:
        self._values[id(tensor)] = value
        self._kept.append(tensor)
        return value


def _differentiable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def constant(tensor: torch.Tensor) -> torch.Tensor:
    """Mark an argument of a call as one that gets no gradient, and return it."""
    set_metadata(tensor, "constant", True)
    return tensor


def is_constant(tensor: torch.Tensor) -> bool:
    return bool(metadata(tensor, "constant"))


def tensors_in(tree, objects: int = 0) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested containers, outputs of transformers and other objects.

    Args:
        objects: depth of nested objects to search.
    """
    if isinstance(tree, torch.Tensor):
        yield tree
    elif all(callable(getattr(tree, name, None)) for name in ("keys", "values")):  # excludes a layer of a cache
        for part in tree.values():
            yield from tensors_in(part, objects)
    elif isinstance(tree, (list, tuple, set)):
        for part in tree:
            yield from tensors_in(part, objects)
    elif objects and hasattr(tree, "__dict__") and not isinstance(tree, type):
        for part in vars(tree).values():
            yield from tensors_in(part, objects - 1)


def _with_values(tree, run: TraceRun):
    if isinstance(tree, torch.Tensor):
        return run.value(tree)
    if isinstance(tree, dict):
        return {key: _with_values(part, run) for key, part in tree.items()}
    if isinstance(tree, (list, tuple)):
        return tuple(_with_values(part, run) for part in tree)
    return tree


def _origin(op: str, inputs: list[Value]) -> frozenset[str] | None:
    if op in _CONSTANT or op.endswith("_like"):
        return frozenset()
    looked_up = op in _LOOKUPS and any(value.origin for value in inputs)
    if op in _OF_INPUTS or looked_up:
        return ACTIVATION
    return _together(value.origin for value in inputs)


def _together(origins: Iterable[frozenset[str] | None]) -> frozenset[str] | None:
    found: frozenset[str] = frozenset()
    for origin in origins:
        if origin is ACTIVATION:
            return ACTIVATION
        found |= origin
    return found


class _Recorder(TorchDispatchMode):
    """Mode that records operations. Tensors with values (positions, their masks) keep them.

    The result of an operation with a tensor without values has no values.
    """

    def __init__(self, run: TraceRun):
        super().__init__()
        self.run = run

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "meta":
            kwargs["device"] = torch.device("cpu")
            if any(tensor.is_meta for tensor in tensors_in(args)):
                kwargs["device"] = torch.device("meta")
        given, named = args, kwargs
        if any(tensor.is_meta for tensor in tensors_in((args, kwargs))):
            given, named = tree_map_only(torch.Tensor, _to_meta, (args, kwargs))
        result = func(*given, **named)
        result = _same_objects(result, given, args)
        name = func._schema.name.removeprefix("aten::")
        aliases = [returned.alias_info for returned in func._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in aliases)
        self.run.record(name, args, kwargs, result, is_view, pointwise=torch.Tag.pointwise in func.tags)
        return result


def _with_slices(index):
    """Return the index with lists of one number as slices (x[[-1]] as x[-1:]), which show the place in the trace."""
    if isinstance(index, tuple):
        return tuple(map(_with_slices, index))
    if isinstance(index, list) and len(index) == 1 and type(index[0]) is int:
        return slice(index[0], index[0] + 1 or None)
    return index


def _to_meta(x: torch.Tensor) -> torch.Tensor:
    return x if x.is_meta else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _same_objects(result, given, args):
    """Return the caller's tensor, not its meta stand-in, for the result of an in-place operation."""
    if isinstance(result, torch.Tensor):
        for stand_in, own in zip(given, args, strict=True):
            if result is stand_in:
                return own
    return result


def _functions(run: TraceRun) -> FunctionMode:
    """Return a mode that records an attention, and a dropout that drops, as one operation, and notes reads of sizes."""

    def size(func, args: tuple, kwargs: dict):
        if args:
            run.note_sizes(args[0])
        return func(*args, **kwargs)

    def item(func, args: tuple, kwargs: dict):
        return func(args[0], _with_slices(args[1]))

    def attention(func, args: tuple, kwargs: dict):
        return _attention(run, **dict(zip(_ATTENTION, args, strict=False), **kwargs))

    def dropout(func, args: tuple, kwargs: dict):
        return _dropout(run, **dict(zip(_DROPOUT, args, strict=False), **kwargs))

    def differentiable(func, args: tuple, kwargs: dict):
        return _differentiable(args[0]) and run.value(args[0]).origin != frozenset()

    def hook(func, args: tuple, kwargs: dict):
        run.record("register_hook", args[:1], {}, None)
        return RemovableHandle(OrderedDict())

    table: dict[Callable, Handler] = {
        torch.Tensor.requires_grad.__get__: differentiable,  # type: ignore[attr-defined]
        torch.Tensor.register_hook: hook,
        torch.Tensor.__getitem__: item,
        F.scaled_dot_product_attention: attention,
        F.dropout: dropout,
    }
    return FunctionMode({**dict.fromkeys(SIZES, size), **table})


@contextlib.contextmanager
def _own_backwards(run: TraceRun):
    """Record each autograd function of the model's own as one operation. Its backward may differ from its forward."""
    apply = torch.autograd.Function.__dict__["apply"]

    def recorded(cls, *args, **kwargs):
        if cls.__module__.partition(".")[0] == "torch":  # a checkpoint
            return apply.__get__(None, cls)(*args, **kwargs)
        given, named = tree_map_only(torch.Tensor, _to_meta, (args, kwargs))
        with _unrecorded():
            results = apply.__get__(None, cls)(*given, **named)
        run.record(f"autograd function {cls.__name__}", args, kwargs, results)
        return results

    torch.autograd.Function.apply = classmethod(recorded)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]


def _attention(run: TraceRun, query, key, value, **options):
    whole = run.value(key).twin or run.value(key)
    if query.shape[-3:-2] != key.shape[-3:-2] and not options.get("enable_gqa") and whole.shape[-3:-2] != (1,):
        raise ValueError(f"attention of {query.shape[-3]} query heads and {key.shape[-3]} KV heads")
    with _unrecorded():
        result = query.new_empty((*query.shape[:-1], value.shape[-1]), device="meta")
    run.record("attention", (), {"query": query, "key": key, "value": value, **options}, result)
    return result


def _dropout(run: TraceRun, input, p=0.5, training=True, inplace=False):
    if not training or p == 0.0:
        return input
    with _unrecorded():
        result = torch.empty_like(input)
    run.record("dropout", (input, p), {}, result, pointwise=True)
    return result


_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_DROPOUT = ("input", "p", "training", "inplace")


@contextlib.contextmanager
def _unrecorded():
    with torch.utils._python_dispatch._disable_current_modes():
        yield


@contextlib.contextmanager
def _watched(module: nn.Module, name: str, closed: dict[str, str], run: TraceRun):
    """Inside the context, put the running module on the run's stack and record a layer as one operation."""
    arguments = arguments_of(module) if "forward" not in vars(module) else ()
    kind = known(module)
    shaped = _like_the_first_input if name in closed else kind.output if kind else None

    def traced(forward: Callable, module: nn.Module, *args, **kwargs):
        run.stack.append(name)
        if shaped is None:
            run.note_arguments(name, [*zip(arguments, args, strict=False), *kwargs.items()])
            result = forward(*args, **kwargs)
            run.note_results(name, result)
            if module._backward_hooks or module._backward_pre_hooks:
                run.record("backward hook", ((args, kwargs), result), {}, None)
        else:
            if kind is not None:
                run.check_input(module, *args)
            with _unrecorded():
                result = shaped(module, partial(run.width_of, name), *args, **kwargs)
            run.record("closed" if name in closed else "layer", args, kwargs, result, layer=name)
        run.stack.pop()
        return result

    chain = ForwardChain.of(module)
    chain.add("trace", traced)
    try:
        yield
    finally:
        chain.remove("trace")


def _like_the_first_input(module, width, *args, **kwargs):
    first = next(tensor for tensor in tensors_in((args, kwargs)) if tensor.is_floating_point())
    return torch.empty_like(first, device="meta")
