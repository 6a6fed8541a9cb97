"""A model's forward as a chain of layers, which can be cut between any two of them.

torch.fx traces the outermost code of the model. The elements of its outermost ModuleLists and Sequentials, and every
other module that the code calls, stay whole. A cut passes on every value that a later layer needs, so skip connections,
masks and tables of angles cross it. Stages hold the model's own modules and parameters.
"""

import inspect
import random
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import fx, nn

from weft.context_parallel.region import is_edge, of_positions
from weft.forward.chain import step_of
from weft.layer_lists import opened_in
from weft.pipeline.stage_boundary import cross
from weft.sharding.shard import shard_of


@dataclass(frozen=True)
class Layer:
    """A module with parameters, together with the parameterless operations that follow it.

    Attributes:
        name: name of the module.
        nodes: its nodes of the trace.
        parameters: the distinct parameters that it uses.
        buffers: buffers of the modules that it calls.
    """

    name: str
    nodes: tuple[fx.Node, ...]
    parameters: tuple[nn.Parameter, ...]
    buffers: tuple[torch.Tensor, ...]

    @property
    def elements(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters)


@dataclass(frozen=True)
class Chain:
    """A model's layers in the order in which its forward calls them."""

    model: nn.Module
    inputs: tuple[fx.Node, ...]
    output: fx.Node
    layers: tuple[Layer, ...]
    settings: "ReadAttributes"

    def stages(self, sizes: Sequence[int]) -> list[fx.GraphModule]:
        """Cut the model into stages in sequence.

        The first stage takes the model's inputs. Each stage but the last returns a tuple: the arguments of the next
        stage. The last stage returns the model's output.

        Args:
            sizes: number of layers of each stage.
        """
        stages, before, crossing = [], 0, list(self.inputs)
        for size in sizes:
            nodes = [node for layer in self.layers[before : before + size] for node in layer.nodes]
            before += size
            later = {node for layer in self.layers[before:] for node in layer.nodes} | {self.output}
            leaving = None
            if before < len(self.layers):
                produced = [*crossing, *nodes]
                leaving = [node for node in produced if later & set(node.users)]
            stages.append(self._stage(crossing, nodes, leaving))
            crossing = leaving or []
        return stages

    def _stage(self, entering, nodes, leaving) -> fx.GraphModule:
        graph, copies = fx.Graph(), {}
        for node in entering:
            copies[node] = graph.placeholder(node.name)

        def copy_of(node: fx.Node) -> fx.Node:
            if node not in copies:  # a parameter or buffer: every stage that uses it has it
                copies[node] = graph.node_copy(node, copy_of)
            return copies[node]

        for node in nodes:
            copies[node] = graph.node_copy(node, copy_of)
        if leaving is None:
            graph.output(fx.map_arg(self.output.args[0], copy_of))
        else:
            fixed = self._fixed()
            if fixed.issuperset(leaving):
                fixed = set()  # one gradient at least goes back: see _Crossing
            graph.output(tuple(graph.call_function(cross, (copy_of(node), node in fixed)) for node in leaving))
        return fx.GraphModule(self.model, graph, class_name="Stage")

    def _fixed(self) -> set[fx.Node]:
        """Return the nodes that depend on no parameter, such as masks and tables of angles."""
        fixed: set[fx.Node] = set()
        for node in self.output.graph.nodes:
            if fixed.issuperset(node.all_input_nodes) and not _uses_parameters(self.model, node):
                fixed.add(node)
        return fixed


class UncuttableError(ValueError):
    """Error for a forward that cannot be cut between its layers as it is written."""


def chain_of(caller: str, model: nn.Module, layers: Sequence[str] | None, arguments: Sequence[str] | None) -> Chain:
    """Return the chain of a model.

    Args:
        caller: first word of the error messages.
        layers: names of modules that run one after another, each on the output of the one before; a `*` stands for the
            elements of a ModuleList. None traces the model's forward.
        arguments: names of the arguments of forward that a call gives. The default is those without a default value.

    Raises:
        UncuttableError: the forward cannot be traced, has hooks, or asks whether the model trains.
        ValueError: there is no such module, or the model has no parameters.
    """
    settings = ReadAttributes(caller)
    graph = _traced(caller, model, arguments, settings) if layers is None else _listed(caller, model, layers)
    inputs = tuple(node for node in graph.nodes if node.op == "placeholder")
    (output,) = (node for node in graph.nodes if node.op == "output")
    runs: list[list[fx.Node]] = []
    for node in graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        begins = node.op == "call_module" and _parameters(model, [node])
        if runs and not (begins and _parameters(model, runs[-1])):
            runs[-1].append(node)
        else:
            runs.append([node])
    found = tuple(
        Layer(_name(run), tuple(run), tuple(_parameters(model, run)), tuple(_buffers(model, run))) for run in runs
    )
    if not any(layer.parameters for layer in found):
        raise ValueError(f"{caller}: the model has no layer with parameters; there is nothing to split")
    return Chain(model, inputs, output, found, settings)


_SIMPLE = (bool, int, float, str, type(None))
_OWN = {*vars(nn.Module()), *dir(nn.Module), "training"}


class ReadAttributes:
    """Attributes that the traced code has read and that must stay as they were.

    These are numbers, strings and flags of modules, and of the plain objects (configurations) that modules hold.
    """

    def __init__(self, caller: str):
        self._caller = caller
        self._read: dict[tuple[str, str], tuple[weakref.ref, object]] = {}  # module and value

    @contextmanager
    def noting(self, modules: dict[str, nn.Module]) -> Iterator[None]:
        """Record the attributes that the code of these modules reads."""
        names = {id(module): name for name, module in modules.items()}
        before = vars(nn.Module).get("__getattribute__")
        read = before or object.__getattribute__

        def noted(module, attribute):
            value = read(module, attribute)
            name = names.get(id(module))
            if name is not None and attribute not in _OWN and (held := _settings_of(value)) is not None:
                self._read.setdefault((name, attribute), (weakref.ref(module), held))
            return value

        nn.Module.__getattribute__ = noted  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            if before is None:
                del nn.Module.__getattribute__
            else:
                nn.Module.__getattribute__ = before  # type: ignore[method-assign]

    def check(self) -> None:
        """Raise ValueError if an attribute has changed. A module that no longer exists is not checked."""
        for (name, attribute), (of_module, before) in self._read.items():
            module = of_module()
            if module is not None and _settings_of(getattr(module, attribute, None)) != before:
                changed = f"{name}.{attribute}".removeprefix(".")
                raise ValueError(
                    f"{self._caller}: {changed} was changed after the model was cut, and the cut model keeps "
                    "the value that its forward read: set it before the model is cut, or let a layer read it"
                )


def _settings_of(value) -> object:
    """Return the part of an attribute's value that is compared, or None if nothing is."""
    if type(value) in _SIMPLE:
        return type(value).__name__, value
    if callable(value) or isinstance(value, nn.Module | torch.Tensor | type) or not hasattr(value, "__dict__"):
        return None
    return {key: part for key, part in vars(value).items() if type(part) in _SIMPLE}


def _name(run: Sequence[fx.Node]) -> str:
    modules = [str(node.target) for node in run if node.op == "call_module"]
    return modules[0] if modules else run[0].name


def _uses_parameters(model: nn.Module, node: fx.Node) -> bool:
    if node.op == "get_attr":
        owner, _, name = str(node.target).rpartition(".")
        return isinstance(getattr(model.get_submodule(owner), name), nn.Parameter)
    return node.op == "call_module" and any(True for _ in model.get_submodule(str(node.target)).parameters())


def _parameters(model: nn.Module, run: Sequence[fx.Node]) -> list[nn.Parameter]:
    found: dict[int, nn.Parameter] = {}
    for node in run:
        if node.op == "call_module":
            found |= {id(parameter): parameter for parameter in model.get_submodule(str(node.target)).parameters()}
        for used in node.all_input_nodes:
            if used.op == "get_attr":
                owner, _, name = str(used.target).rpartition(".")
                value = getattr(model.get_submodule(owner), name)
                if (shard := shard_of(value)) is not None and shard.communicator.world_size > 1:
                    raise ValueError(
                        f"{used.target} is used by {node.name} outside of its layer, and is split over ranks: make "
                        "that use a module of its own that shares the parameter, and leave both whole"
                    )
                if isinstance(value, nn.Parameter):
                    found[id(value)] = value
    return list(found.values())


def _buffers(model: nn.Module, run: Sequence[fx.Node]) -> list[torch.Tensor]:
    modules = [model.get_submodule(str(node.target)) for node in run if node.op == "call_module"]
    return [buffer for module in modules for buffer in module.buffers()]


def _listed(caller: str, model: nn.Module, layers: Sequence[str]) -> fx.Graph:
    named = dict(model.named_modules(remove_duplicate=False))
    graph = fx.Graph()
    value = graph.placeholder("input")
    for pattern in layers:
        owner = pattern.removesuffix(".*")
        children = named[owner].named_children() if pattern.endswith(".*") and owner in named else []
        for name in [f"{owner}.{child}" for child, _ in children] or [pattern]:
            if name not in named:
                raise ValueError(
                    f"{caller}: layers names {pattern!r}, and no module is called that; there are {_some(named)}"
                )
            value = graph.call_module(name, (value,))
    graph.output(value)
    calls = [node for node in graph.nodes if node.op == "call_module"]
    used = {id(parameter) for node in calls for parameter in _parameters(model, [node])}
    left_out = [name for name, parameter in model.named_parameters() if id(parameter) not in used]
    if left_out:
        raise ValueError(f"{caller}: layers={list(layers)} leave out {left_out[0]}, which the model needs: name it too")
    return graph


def _some(named: dict[str, nn.Module]) -> str:
    return ", ".join([name for name in named if name.count(".") < 2 and name][:20])


_CONSTANT = "_tensor_constant"  # torch.fx's prefix


def _modes() -> tuple:
    """Return the settings that a `with` around operations may change."""
    autocast = [
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
        for kind in ("cpu", "cuda")
    ]
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast


class _Tracer(fx.Tracer):
    """Tracer that enters the root and the modules that contain a list of layers; other modules are leaves."""

    proxy_buffer_attributes = True  # the model's own code may cut a buffer, a table of positions, to the length

    def __init__(self, caller: str, opened: set[str]):
        super().__init__()
        self._caller, self._opened = caller, opened
        self._modes = _modes()
        self._constants = 0

    @property
    def constants(self) -> list[torch.Tensor]:
        """Tensors that the forward made without its arguments; every call of the cut model uses these."""
        return [
            x for x, name in self.tensor_attrs.items() if isinstance(x, torch.Tensor) and name.startswith(_CONSTANT)
        ]

    def get_fresh_qualname(self, prefix: str) -> str:
        """Return the same names in every trace of a model."""
        self._constants += 1
        return f"{prefix}{self._constants - 1}"

    def create_node(self, *args, **options) -> fx.Node:
        if _modes() != self._modes:
            raise UncuttableError(
                f"{self._caller}: the forward of {type(self.root).__name__} switches gradients or autocast on or off "
                "around its layers, which a trace does not keep: do that inside of a layer (and freeze parameters by "
                "requires_grad_(False))"
            )
        return super().create_node(*args, **options)

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return name not in self._opened


def _traced(caller: str, model: nn.Module, arguments: Sequence[str] | None, settings: ReadAttributes) -> fx.Graph:
    opened = opened_in(model)
    for name in opened:
        module = model.get_submodule(name)
        if _has_hooks(module, of_model=name == ""):
            raise UncuttableError(
                f"{caller}: {name or 'the model'} has hooks, which would not run in a part of it: remove them, or move "
                "them to its layers"
            )
        if step_of(module, "sequence") is of_positions:
            raise UncuttableError(
                f"{caller}: {name or 'the model'} is named tokenwise, and is cut: name its layers instead"
            )
    given, defaults = _arguments(caller, model, arguments)
    graphs, constants = [], []
    before, drawn = numbers_in(model, opened), _random_states()
    was_training = [(module, module.training) for module in model.modules()]
    try:
        for mode in (True, False):
            model.train(mode)
            tracer = _Tracer(caller, opened)
            with settings.noting({name: model.get_submodule(name) for name in opened}):
                graphs.append(_only(given, tracer.trace(model, dict(defaults) or None)))
            constants.append(tracer.constants)
    except UncuttableError:
        raise
    except Exception as error:
        raise UncuttableError(
            f"{caller}: the forward of {type(model).__name__} cannot be traced ({type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else ''}). What it makes of an input's sizes (a mask) belongs "
            "in a module of its own, which is called with that input. If its layers are called one after the other, "
            'name them: layers=["embedding", "blocks.*", "norm", "head"]'
        ) from error
    finally:
        for module, mode in was_training:
            module.training = mode
    kept = [name for name, value in numbers_in(model, opened).items() if value != before.get(name, value)]
    for name in kept:
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, before[name])
    if kept:
        raise UncuttableError(
            f"{caller}: the forward of {type(model).__name__} changes {kept[0]} outside of its layers, which a trace "
            "does once and for all; make that a module of its own"
        )
    if _random_states() != drawn:
        raise UncuttableError(
            f"{caller}: the forward of {type(model).__name__} draws random numbers outside of its layers, which a "
            "trace does once and for all; make that a module of its own"
        )
    if str(graphs[0]) != str(graphs[1]) or not all(map(torch.equal, *constants)):
        raise UncuttableError(
            f"{caller}: the forward of {type(model).__name__} itself asks whether it trains, outside of its layers; "
            "make that a module of its own (nn.Dropout for F.dropout)"
        )
    return graphs[0]


def numbers_in(model: nn.Module, opened: set[str]) -> dict[str, float]:
    """Return the attributes of these modules that are numbers, for example a count of calls."""
    return {
        f"{name}.{attribute}".removeprefix("."): value
        for name in opened
        for attribute, value in vars(model.get_submodule(name)).items()
        if isinstance(value, int | float) and attribute != "training"
    }


def _random_states() -> tuple:
    return random.getstate(), torch.get_rng_state().tolist()


def _has_hooks(module: nn.Module, of_model: bool) -> bool:
    """Check for hooks that would not run in a stage.

    Hooks at the edge of a model that shares its sequence do not count: the stages do their work.
    """
    if module._backward_hooks or module._backward_pre_hooks:
        return True
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return any(not (of_model and is_edge(hook)) for hook in hooks)


def _arguments(caller: str, model: nn.Module, arguments: Sequence[str] | None) -> tuple[list[str], dict]:
    """Return the names of forward's arguments that a call gives, and the defaults of the others."""
    known = {
        name: parameter.default
        for name, parameter in inspect.signature(model.forward).parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }
    given = [name for name, default in known.items() if default is inspect.Parameter.empty]
    if arguments is not None:
        unknown = [name for name in arguments if name not in known]
        missing = [name for name in given if name not in arguments]
        if unknown or missing:
            raise ValueError(
                f"{caller}: arguments={list(arguments)}, and forward takes {', '.join(known)}; "
                f"{', '.join(given) or 'none'} must be given"
            )
        given = [name for name in known if name in arguments]
        if given != list(arguments):
            raise ValueError(f"{caller}: arguments={list(arguments)} are to be named in forward's order: {given}")
    return given, {name: default for name, default in known.items() if name not in given}


def _only(given: Sequence[str], graph: fx.Graph) -> fx.Graph:
    """Erase the arguments that are replaced by their default values, and torch.fx's checks of them."""
    for node in list(graph.nodes):
        if node.op == "placeholder" and node.target not in given:
            _erase(graph, node)
    return graph


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    for user in list(node.users):
        _erase(graph, user)
    graph.erase_node(node)
