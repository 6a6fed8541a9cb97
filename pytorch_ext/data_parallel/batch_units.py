"""The batch in units: gradients with the same bits on any number of ranks that share it, for `invariant=V`.

A batch is V equal units of sequences. Each has the bits of a call of its own, and gradients of its own. They are added
in the binary tree over units of ops/invariant, in fp32, and rounded once. The first call of a kind runs the units one
by one; where a trial gives the same bits, later calls run the units of this rank at once (weft.units).

In autograd's graph, the batch's node stands between the parameters and one node for each call, which gives the module
the parameters of that unit or of several. Backward leaves the gradients of units in the sums. At the batch's node the
ranks exchange their sums, and the parameters get the gradient of the whole batch.
"""

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import compress
from operator import not_
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from weft.comm.communicator import Communicator
from weft.context_parallel.region import sharing_in
from weft.data_parallel.grad_norm import gradient_of, norm_of
from weft.forward import Members
from weft.forward.running import followed
from weft.metadata import metadata
from weft.ops import kernel_choice
from weft.ops.backward import RankFunction, first_order
from weft.ops.invariant import Tree, Units, in_own_memory, plus, sum_over_nodes
from weft.ops.unit_parameters import ParameterOfUnits
from weft.rng import name_modules, random_numbers_of
from weft.sharding.shard import shard_of
from weft.units.at_once import NUMBERS, AtOnce, FunctionStep, PathChangedError
from weft.units.functions import draws_of_units
from weft.units.trial import NotAloneError, Trial

_REFUSED = (nn.modules.batchnorm._BatchNorm,)
_FIRST_GRAPHS = 3  # after a change of what trains; the hooks on parameters look at every gradient
_MOST_KINDS, _MOST_CHANGES = 16, 3
_ATOMS = {int, float, bool, str, type(None), torch.dtype}
# What a call on several units may raise that would not fail unit by unit.
_ORDINARY_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_at_once = [True]  # the innermost context's last
_running: list[int] = []  # numbers of the units whose forward runs, the innermost last


def running_unit() -> int | None:
    """Return the number of the unit whose forward runs; None outside of units."""
    return _running[-1] if _running else None


@contextmanager
def within_unit(number: int) -> Iterator[None]:
    """Say that the forward of a unit runs inside the context."""
    _running.append(number)
    try:
        yield
    finally:
        _running.pop()


@contextmanager
def one_unit_at_a_time() -> Iterator[None]:
    """Run each unit in a call of its own inside the context."""
    _at_once.append(False)
    try:
        yield
    finally:
        _at_once.pop()


def _check_of(reference: "weakref.ref[BatchUnits]", name: str) -> Callable[[torch.Tensor], None]:
    """Return a hook for the wrapper's life: it raises if a parameter gets a gradient that is not of the whole batch."""

    def check(parameter: torch.Tensor) -> None:
        if (units := reference()) is None:
            return
        if id(parameter) not in units.expected:
            units.refuse(name)
        units.expected.discard(id(parameter))

    return check


@dataclasses.dataclass(frozen=True)
class _Learnt:
    """How calls of a kind run on several units at once.

    Attributes:
        path: the functions that it calls.
        cuts: how each tensor of its output is cut into units.
        draws: it drops elements.
    """

    path: list[FunctionStep]
    cuts: list[int]
    draws: bool


class BatchUnits:
    """Runs of a module in units of the batch, in the place of a `Reducer` in DataParallel.

    Attributes:
        units: the V units, and the ranks' parts of the tree over them.
        module: the module.
        ranks: ranks that share the batch; each has V / ranks of the units, one after another.
        inside: a unit runs.
    """

    def __init__(
        self, module: nn.Module, ranks: Communicator, units: int, average: bool, unused: str, chunk_bytes: int
    ):
        check_units(module, ranks, units)
        name_modules(module)
        self.module, self.ranks, self.units = module, ranks, Units(units)
        self._average, self._unused, self._chunk_bytes = average, unused, chunk_bytes
        self._device = next((p.device for p in module.parameters()), torch.device("cpu"))
        self._members, self._flags = Members(module, buffers=False), list[bool]()
        self._trained: dict[str, torch.Tensor] = {}
        self.places: list[tuple[dict, str, int]] = []  # of what trains: a module's parameters, name, number
        self._buffers: list[dict] = [part._buffers for part in self._members.modules]
        self.inside = False
        self._learnt: dict[tuple | None, _Learnt | None] = {}
        self._alone = len(self.here) == 1 or self._device.type != "cpu" or "" in sharing_in(module)
        self._changes = 0  # times that a forward has left its path
        shards = filter(None, map(shard_of, module.parameters()))
        self._beside = list(dict.fromkeys(s.communicator for s in shards if s.communicator.world_size > 1))
        self.expected: set[int] = set()  # ids of the parameters that the batch's node has given a gradient
        self._watched: set[torch.Tensor] = set()
        self.watch()

    @property
    def here(self) -> range:
        """Numbers of this rank's units."""
        return self.units.here(self.ranks)

    def watch(self) -> None:
        """Raise from now on where a gradient comes to a parameter that requires one, but not from its units."""
        self._unchecked = _FIRST_GRAPHS
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad and parameter not in self._watched:
                self._watched.add(parameter)
                hook = parameter.register_post_accumulate_grad_hook(_check_of(weakref.ref(self), name))
                weakref.finalize(self, hook.remove)

    def refuse(self, name: str) -> None:
        """Raise for a gradient of a parameter of the module."""
        raise RuntimeError(
            f"invariant={self.units.total}: {name!r} is used as a parameter of the module, not of a unit, so that its "
            "gradient would be of this rank alone. Checkpoint with use_reentrant=False, call the DataParallel and not "
            "the module in it, and use no layer that keeps its parameters in a place of its own"
        )

    def run(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        """Call a function with each unit of its arguments; see `DataParallel.in_units`."""
        self._renew()
        arguments, seed = self._cut((args, kwargs))
        buffers = [(of, name, x, x._version) for of in self._buffers for name, x in of.items() if x is not None]
        kind = self._kind(function, args, kwargs)
        learnt = self._learnt.get(kind)
        found = None if learnt is None else self._at_once(learnt, function, args, kwargs, seed)
        if found is None:
            first = kind is not None and (learnt is not None or kind not in self._learnt)
            tried = self._try(function, args, kwargs, seed) if first else None
            found = self._unit_by_unit(function, arguments, seed)
            if first:
                self._learn(kind, tried, found)  # type: ignore[arg-type]
        if changed := [name for of, name, x, version in buffers if x._version != version or of.get(name) is not x]:
            raise RuntimeError(
                f"invariant={self.units.total}: forward changed the buffers {', '.join(changed)}, which would depend "
                "on the units that a rank has"
            )
        return found

    def _unit_by_unit(self, function: Callable, arguments: list, seed: int | None) -> Any:
        named = self._trained
        batch = _Batch(self, named) if torch.is_grad_enabled() and named else None
        outputs = []
        for unit, (unit_args, unit_kwargs) in zip(self.here, arguments, strict=True):
            own = nullcontext() if batch is None else batch.parameters_of(unit)
            with self._in_a_unit(unit, seed), own:
                outputs.append(function(*unit_args, **unit_kwargs))
        if batch is not None and self._unchecked:
            self._unchecked -= 1
            self._check_graph(outputs[0], named)
        return self._joined(outputs)

    # Several units at once.

    def _kind(self, function: Callable, args: tuple, kwargs: dict) -> tuple | None:
        """Return the kind of a call: calls of one kind run alike. None if it cannot run on several units at once."""
        code = self.module if function is self.module else getattr(function, "__code__", None)
        if self._alone or torch.is_autocast_enabled("cpu") or not _at_once[-1]:
            return None
        leaves, structure = tree_flatten((args, kwargs))
        if code is None or any(type(leaf) not in _ATOMS and not isinstance(leaf, torch.Tensor) for leaf in leaves):
            return None
        return (
            *(code, str(structure), torch.is_grad_enabled()),
            *[(x.shape, x.dtype, x.requires_grad) if isinstance(x, torch.Tensor) else (type(x), x) for x in leaves],
            *[part.training for part in self._members.modules],
        )

    def _at_once(self, learnt: "_Learnt", function: Callable, args: tuple, kwargs: dict, seed: int | None) -> Any:
        """Return the output of all units in one call; None if it called other functions than in its trial."""
        try:
            output = self._call(AtOnce(learnt.path, self.here, seed or 0), function, args, kwargs, learnt.draws)
        except PathChangedError:
            self._changes += 1
            return None
        return self._joined([output], learnt.cuts)

    def _call(self, functions: AtOnce, function: Callable, args: tuple, kwargs: dict, draws: bool) -> Any:
        batch = _Batch(self, self._trained) if torch.is_grad_enabled() and self._trained else None
        self.inside = True
        try:
            with ExitStack() as stack:
                if batch is not None:
                    stack.enter_context(batch.parameters_at_once())
                if draws:
                    stack.enter_context(followed(self.module))
                with functions:
                    output = function(*args, **kwargs)
            functions.end()
            return output
        finally:
            self.inside = False

    def _try(self, function: Callable, args: tuple, kwargs: dict, seed: int | None) -> tuple["_Learnt", list] | None:
        """Call a function on all units at once; return how it runs, and its outputs. None if it cannot."""
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        size = next(x.size(0) for x in tensors if x.dim() and x.size(0) != 1)
        of_batch = [bool(x.dim()) and x.size(0) == size for x in tensors]
        batch, whole = list(compress(tensors, of_batch)), list(compress(tensors, map(not_, of_batch)))
        try:
            trial = Trial(self.here, seed or 0, batch, [*self.module.parameters(), *self.module.buffers(), *whole])
            output = self._call(trial, function, args, kwargs, True)
            cuts = [trial.cut_of(x) for x in tensors_in(output)]
            outputs = tensors_in(self._joined([output], cuts))
        except (NotAloneError, *_ORDINARY_ERRORS):
            return None
        return _Learnt(trial.path, cuts, trial.drew), [x.detach() for x in outputs]

    def _learn(self, kind: tuple, tried: tuple["_Learnt", list] | None, found: Any) -> None:
        """Keep what a trial has shown, if its outputs have the bits of the units' own calls. A collective call."""
        outputs = tensors_in(found)
        good = tried is not None and self._changes < _MOST_CHANGES and len(outputs) == len(tried[1])
        good = good and all(map(_same_bits, outputs, tried[1]))  # type: ignore[index]
        for ranks in self._beside:
            good = all(ranks.all_gather_object(good))
        while len(self._learnt) >= _MOST_KINDS:
            del self._learnt[next(iter(self._learnt))]
        self._learnt[kind] = tried[0] if good else None  # type: ignore[index]

    def _renew(self) -> None:
        """Record what trains, and where it is, if that has changed."""
        if self._members.changed():
            self._members.record()
            self._flags = []
        if [parameter.requires_grad for parameter in self._members.parameters] == self._flags:
            return
        self._flags = [parameter.requires_grad for parameter in self._members.parameters]
        self._learnt.clear()
        self._trained = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        indices = {id(parameter): index for index, parameter in enumerate(self._trained.values())}
        self.places = [
            (part._parameters, name, indices[id(parameter)])
            for part in self._members.modules
            for name, parameter in part._parameters.items()
            if id(parameter) in indices
        ]
        self._buffers = [part._buffers for part in self._members.modules]

    @contextmanager
    def _in_a_unit(self, unit: int, seed: int | None) -> Iterator[None]:
        self.inside = True
        try:
            with ExitStack() as stack:
                stack.enter_context(within_unit(unit))
                if seed is not None:
                    stack.enter_context(random_numbers_of(seed + unit, self._device))
                    stack.enter_context(followed(self.module))
                stack.enter_context(draws_of_units(None if seed is None else seed + unit))
                yield
        finally:
            self.inside = False

    def _check_graph(self, output: Any, trained: Mapping[str, torch.Tensor]) -> None:
        """Check that autograd's graph of a unit's output ends at the unit's parameters and at none of the module."""
        names = {p: name for name, p in trained.items()}
        nodes = [x.grad_fn for x in tensors_in(output) if x.grad_fn is not None]
        seen = set(nodes)
        while nodes:
            node = nodes.pop()
            variable = getattr(node, "variable", None)
            if variable is not None and variable in names:
                self.refuse(names[variable])
            if node.name() != "_UnitFunctionBackward":
                new = {function for function, _ in node.next_functions if function is not None} - seen
                nodes += new
                seen |= new

    # Arguments.

    def _cut(self, arguments: Any) -> tuple[list, int | None]:
        """Return the arguments of each unit here, and the number that random numbers of units follow from.

        A collective call: the units of all ranks have the same size, and the number is the first rank's.
        """
        leaves, spec = tree_flatten(arguments)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()]
        size = next((tensor.size(0) for tensor in tensors if tensor.size(0) != 1), 1 if tensors else 0)
        wrong = [tensor for tensor in tensors if tensor.size(0) not in (1, size)]
        draws = True in [part.training for part in self._members.modules]
        seed = int(torch.randint(2**62, (1,))) if draws else 0
        where = self.ranks.device_of_numbers(self._device)
        own = torch.tensor([[-1 if wrong else size, seed, torch.get_num_threads()]], device=where)
        notes = self.ranks.all_gather(own, 0, [1] * self.ranks.world_size).cpu()
        threads = notes[:, 2].tolist()
        if len(set(threads)) > 1:
            raise ValueError(
                f"invariant={self.units.total}: the ranks compute in {', '.join(map(str, threads))} threads, and bits "
                "of ATen's functions follow their number: set OMP_NUM_THREADS alike in every process"
            )
        self._check_sizes(size, wrong, notes[:, 0].tolist())
        count = len(self.here)
        cut = [
            [in_own_memory(part) for part in leaf.chunk(count)]
            if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.size(0) == size
            else [leaf] * count
            for leaf in leaves
        ]
        units = [tree_unflatten(list(of_unit), spec) for of_unit in zip(*cut, strict=True)] if cut else []
        return units or [arguments] * count, int(notes[0, 1]) if draws else None

    def _check_sizes(self, size: int, wrong: list[torch.Tensor], sizes: list[int]) -> None:
        total, world = self.units.total, self.ranks.world_size
        if wrong:
            raise ValueError(
                f"invariant={total}: a tensor of shape {tuple(wrong[0].shape)} beside a batch of {size}; every tensor "
                "has the batch as its first dimension, or 1 there"
            )
        if len(set(sizes)) > 1 or sizes[0] < 1 or sizes[0] * world % total:
            possible = [count for count in range(world, size * world + 1, world) if size * world % count == 0]
            raise ValueError(
                f"invariant={total}: the ranks' batches of {', '.join(map(str, sizes))} must be {total} equal units "
                f"together, {total // world} on each rank; for {size} on each of {world} ranks invariant can be "
                f"{', '.join(map(str, possible))}"
            )

    # Outputs.

    def _joined(self, outputs: list, cuts: list[int] | None = None) -> Any:
        """Return an output of the batch: tensors joined along the batch, scalars averaged over all units.

        Args:
            outputs: by unit; or one of all units.
            cuts: how each tensor in the one of all units is cut into units.
        """
        return self._join(outputs, None if cuts is None else iter(cuts))

    def _join(self, outputs: list, cuts: Iterator[int] | None) -> Any:
        first = outputs[0]
        if isinstance(first, torch.Tensor) and cuts is not None:
            return self._mean(first.unbind()) if next(cuts) == NUMBERS else self._batch_of(outputs)
        if isinstance(first, torch.Tensor):
            return self._mean(outputs) if first.dim() == 0 else self._batch_of(outputs)
        if dataclasses.is_dataclass(first) and not isinstance(first, (type, dict)):
            names = [field.name for field in dataclasses.fields(first)]
            parts = {name: self._join([getattr(output, name) for output in outputs], cuts) for name in names}
            return dataclasses.replace(first, **parts)
        leaves, spec = tree_flatten(first)
        if leaves == [first] and spec.is_leaf():
            return first if all(output is first or _same(output, first) for output in outputs) else outputs
        of_units = [tree_flatten(output)[0] for output in outputs]
        if len({len(of_unit) for of_unit in of_units}) > 1:
            raise ValueError(f"invariant={self.units.total}: the units' outputs have different structures")
        return tree_unflatten([self._join(list(same), cuts) for same in zip(*of_units, strict=True)], spec)

    def _batch_of(self, parts: list[torch.Tensor]) -> torch.Tensor:
        if any(part.shape != parts[0].shape for part in parts):
            raise ValueError(
                f"invariant={self.units.total}: outputs of units have the shapes "
                f"{', '.join(str(tuple(part.shape)) for part in parts)}; they must be alike, with the batch first"
            )
        return _JoinFunction.apply(self.ranks.world_size if self._average else 1, *parts)

    def _mean(self, scalars: Sequence[torch.Tensor]) -> torch.Tensor:
        if not scalars[0].is_floating_point():
            raise TypeError(
                f"invariant={self.units.total}: the units return a scalar of {scalars[0].dtype}; scalars are averaged "
                "over units, so they must be floating point"
            )
        return _MeanFunction.apply(self.ranks, self.units.total, *scalars)

    # The interface of a Reducer, after backward.

    def expect(self, parameters: Sequence[torch.Tensor]) -> None:
        """Let these parameters get the gradients that the batch's node returns."""
        self.expected.update(map(id, parameters))

    @property
    def norm_squared(self) -> torch.Tensor:
        """Squared norm of all gradients, float64 [1]. A collective call under tensor parallelism."""
        return norm_of(list(self.module.parameters()), 2.0).square().reshape(1)

    def measure_anew(self) -> None:
        """Do nothing: `norm_squared` always measures."""

    def held(self) -> list[torch.Tensor]:
        """Return all gradients."""
        return [g for p in self.module.parameters() if (g := gradient_of(p)) is not None]

    def nonfinite(self) -> dict[str, list[int]]:
        """Return the parameters with an infinite or NaN gradient, without the ranks that it came from."""
        named = ((name, gradient_of(p)) for name, p in self.module.named_parameters())
        return {name: [] for name, g in named if g is not None and not g.isfinite().all()}


def check_units(module: nn.Module, ranks: Communicator, units: int) -> None:
    """Check that a module can run in units of a batch.

    Raises:
        ValueError: the ranks do not divide the units, or a layer or device has no such form.
    """
    if units < 1 or units % ranks.world_size:
        raise ValueError(f"invariant={units}: the {ranks.world_size} ranks that share the batch must divide it")
    for name, part in module.named_modules():
        if isinstance(part, _REFUSED):
            raise ValueError(
                f"invariant={units}: {name} is a {type(part).__name__}, whose statistics would be those of a unit; use "
                "a norm over features (nn.GroupNorm, nn.LayerNorm)"
            )
        if isinstance(part, torch._dynamo.OptimizedModule):
            raise ValueError(f"invariant={units}: {name or 'the module'} is compiled, which is not supported in units")
    for name, parameter in module.named_parameters():
        if parameter.device.type != "cpu" and not kernel_choice.on_kernel(parameter.device):
            raise ValueError(
                f"invariant={units}: {name} is on {parameter.device}; it must be on a CPU, or a GPU that runs weft's "
                "kernels"
            )
        shard = shard_of(parameter)
        if shard is not None and shard.communicator.world_size > 1 and not metadata(parameter, "invariant"):
            raise ValueError(
                f"invariant={units}: {name} is split over {shard.communicator.world_size} ranks without units; split "
                "the model by weft.parallelize(..., invariant=V)"
            )


class UnitSums:
    """Sums of the gradients that the units of a batch give to some parameters, in one backward.

    Args:
        units: the V units of the batch.
        ranks: ranks that share the batch; each has V / ranks of the units, one after another.
        named: the parameters by name.
        chunk_bytes: bytes of sums that travel together.
    """

    def __init__(self, units: Units, ranks: Communicator, named: Mapping[str, torch.Tensor], chunk_bytes: int):
        self.units, self.ranks, self._chunk_bytes = units, ranks, chunk_bytes
        self.names, self.trained = list(named), list(named.values())
        self.device = next((parameter.device for parameter in self.trained), torch.device("cpu"))
        self.wide = [torch.promote_types(p.dtype, torch.float32) for p in self.trained]
        self.begin()

    def begin(self) -> None:
        """Forget all gradients."""
        self.tree: Tree[list[torch.Tensor | None]] = Tree(self.units.total, self._sum)
        self.absent = torch.zeros(len(self.trained), dtype=torch.int32)

    @property
    def here(self) -> range:
        """Numbers of this rank's units."""
        return self.units.here(self.ranks)

    @property
    def nodes(self) -> list[tuple[int, int]]:
        """Nodes of the tree that lie here."""
        return self.units.of_rank(self.ranks, self.ranks.rank)

    def put(self, unit: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Take the gradients of a unit, in the type of the parameters."""
        for name, gradient in zip(self.names, gradients, strict=True):
            if gradient is not None and gradient.layout is not torch.strided:
                raise TypeError(f"invariant: the gradient of {name!r} is {gradient.layout}; it must be dense")
        self.absent += torch.tensor([gradient is None for gradient in gradients], dtype=torch.int32)
        self.tree.put(unit, [None if g is None else g.to(w) for g, w in zip(gradients, self.wide, strict=True)])

    def _sum(self, left: list, right: list) -> list:
        return [plus(x, y) for x, y in zip(left, right, strict=True)]

    def absences(self) -> str:
        """Return the parameters without a gradient in some unit, as a text. A collective call, once before `total`."""
        for unit in self.here:
            if unit not in self.tree:  # no output of this unit takes part in the loss
                self.absent += 1
                self.tree.put(unit, [None] * len(self.trained))
        counts = self.ranks.all_reduce_(self.absent.to(self.ranks.device_of_numbers(self.device))).tolist()
        return ", ".join(f"{name!r} in {count}" for name, count in zip(self.names, counts, strict=True) if count)

    def total(self) -> list[torch.Tensor]:
        """Return the gradients of the whole batch, in the parameters' types, and begin anew. A collective call."""
        nodes = [self.tree.sums[node] for node in self.nodes]
        self.begin()
        totals = []
        for chunk in self._chunks():
            like = [self.trained[i] for i in chunk]
            local = [[self._zeros(i) if (total := node[i]) is None else total for i in chunk] for node in nodes]
            for i in chunk:
                for node in nodes:
                    node[i] = None
            summed = local[0] if self.ranks.world_size == 1 else self._exchanged(local)
            totals += [x.view(p.shape).to(p.dtype) for x, p in zip(summed, like, strict=True)]
        return totals

    def _zeros(self, i: int) -> torch.Tensor:
        return self.trained[i].new_zeros(self.trained[i].shape, dtype=self.wide[i])

    def _exchanged(self, local: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        """Return the sums over ranks of the nodes here; all of them are of one type."""
        sizes = [gradient.numel() for gradient in local[0]]
        flat = torch.stack([torch.cat([gradient.reshape(-1) for gradient in node]) for node in local])
        return list(sum_over_nodes(self.ranks, self.units, flat.unsqueeze(-1)).view(-1).split(sizes))

    def _chunks(self) -> Iterator[list[int]]:
        """Yield the numbers of parameters whose gradients travel together: neighbours of one type."""
        chunk: list[int] = []
        held = 0
        for i, parameter in enumerate(self.trained):
            if chunk and (held >= self._chunk_bytes or self.wide[i] != self.wide[chunk[0]]):
                yield chunk
                chunk, held = [], 0
            chunk.append(i)
            held += parameter.numel() * self.wide[i].itemsize
        if chunk:
            yield chunk


class _Batch(UnitSums):
    """Sums of the units' gradients, and the nodes of autograd's graph around them."""

    def __init__(self, of: BatchUnits, named: Mapping[str, torch.Tensor]):
        super().__init__(of.units, of.ranks, named, of._chunk_bytes)
        self.of = of
        self.of_units: list[ParameterOfUnits] = []  # where all units here run at once
        self._token = _BatchFunction.apply(self, *self.trained)

    @contextmanager
    def parameters_of(self, unit: int) -> Iterator[None]:
        """Give the module the parameters of a unit, while the context lasts."""
        own = _UnitFunction.apply(self, unit, self._token, *[p.detach() for p in self.trained])
        for members, name, index in self.of.places:
            members[name] = own[index]
        try:
            yield
        finally:
            for members, name, index in self.of.places:
                members[name] = self.trained[index]

    @contextmanager
    def parameters_at_once(self) -> Iterator[None]:
        """Give the module parameters that keep the gradients of all units here apart, while the context lasts."""
        own = _UnitFunction.apply(self, None, self._token, *[p.detach() for p in self.trained])
        first, count = self.here.start, len(self.here)
        nodes = [(low - first, high - first) for low, high in self.nodes]
        self.of_units = [ParameterOfUnits(x, count, nodes) for x in own]
        for x in own:
            x._is_param = True  # for isinstance
        for members, name, index in self.of.places:
            members[name] = own[index]
        try:
            yield
        finally:
            for members, name, index in self.of.places:
                members[name] = self.trained[index]
            for of_units in self.of_units:
                of_units.end()

    def _take(self) -> None:
        """Put the gradients of all units here into the tree."""
        found: list[list] = [[] for _ in self.nodes]
        for index, of_units in enumerate(self.of_units):
            sums, missing = of_units.take()
            self.absent[index] += missing
            for of_node, total in zip(found, sums, strict=True):
                of_node.append(total)
        self.tree.sums = dict(zip(self.nodes, found, strict=True))

    def total(self) -> list[torch.Tensor]:
        if self.of_units:
            self._take()
        absences = self.absences()
        if absences and self.of._unused == "error":
            self.begin()
            raise RuntimeError(
                f"DataParallel: parameters got no gradient in some of {self.units.total} units: {absences}; "
                'unused_parameters="zero" counts these as zeros'
            )
        self.of.expect(self.trained)
        return super().total()


class _BatchFunction(RankFunction):
    """A token for the units of a batch; the parameters' gradients are sums over all units on all ranks.

    forward   nothing travels
    backward  dp = sum over units of dp_unit, in the tree's order, from the sums that the units' nodes left
    """

    @staticmethod
    def forward(ctx, batch: _Batch, *parameters):
        ctx.batch = batch
        return torch.zeros((), device=batch.device)

    @staticmethod
    @first_order
    def backward(ctx, _):
        return None, *ctx.batch.total()


class _UnitFunction(RankFunction):
    """p_unit = p: the parameters of one unit; of all units here if `unit` is None.

    forward   nothing travels
    backward  leaves dp_unit with the batch; functions have left those of several units there
    """

    @staticmethod
    def forward(ctx, batch: _Batch, unit: int | None, token, *parameters):
        ctx.batch, ctx.unit = batch, unit
        ctx.set_materialize_grads(False)
        return tuple([parameter.view_as(parameter) for parameter in parameters])

    @staticmethod
    @first_order
    def backward(ctx, *gradients):
        if ctx.unit is not None:
            ctx.batch.put(ctx.unit, gradients)
        elif gradients.count(None) < len(gradients):
            raise RuntimeError(f"invariant={ctx.batch.units.total}: a gradient of several units together")
        return None, None, torch.zeros((), device=ctx.batch.device), *[None] * len(gradients)


class _JoinFunction(RankFunction):
    """y = the units' outputs one after another.

    backward  dy_unit = dy / W for ranks whose own losses are averaged: where the loss of W ranks is W times that of one
              process (a mean over a part of the batch), the division by a power of two makes the same bits of it
    """

    @staticmethod
    def forward(ctx, world: int, *parts):
        ctx.world, ctx.size = world, parts[0].size(0)
        ctx.set_materialize_grads(False)
        return torch.cat(parts)

    @staticmethod
    @first_order
    def backward(ctx, dy):
        world = ctx.world
        if dy is None:
            return None, *[None] * (len(ctx.needs_input_grad) - 1)
        if world & (world - 1):
            raise ValueError(
                f"invariant: the average over {world} ranks of losses outside of the units rounds in another way than "
                "one process; compute the loss in model.in_units(...), or pass average=False and divide the loss by "
                "the size of the whole batch"
            )
        return None, *(dy if world == 1 else dy / world).split(ctx.size)


def mean_of_units(ranks: Communicator, total: int, scalars: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the mean over all units of all ranks of this rank's units' numbers. A collective call."""
    wide = torch.promote_types(scalars[0].dtype, torch.float32)
    own = torch.stack(list(scalars)).to(wide)
    tree = Tree(total, torch.add)
    for unit, x in enumerate(ranks.all_gather(own, 0, [len(scalars)] * ranks.world_size)):
        tree.put(unit, x)
    return (tree.sums[0, total] / total).to(scalars[0].dtype)


class _MeanFunction(RankFunction):
    """y = (sum of the V units' numbers, in the tree's order) / V.

    forward   all_gather of V numbers in fp32 or fp64
    backward  dx_unit = dy / V; nothing travels
    """

    @staticmethod
    def forward(ctx, ranks: Communicator, total: int, *scalars):
        ctx.total = total
        return mean_of_units(ranks, total, scalars)

    @staticmethod
    @first_order
    def backward(ctx, dy):
        return None, None, *[dy / ctx.total] * (len(ctx.needs_input_grad) - 2)


def tensors_in(output: Any) -> list[torch.Tensor]:
    """Return the tensors in a module's output: in lists, dicts, dataclasses and other trees that torch knows."""
    found = []
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            found += tensors_in([getattr(leaf, entry.name) for entry in dataclasses.fields(leaf)])
    return found


def _same(x: Any, y: Any) -> bool:
    return type(x) is type(y) and isinstance(x, (bool, int, float, str, bytes, type(None))) and x == y


def _same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    return torch.equal(*(t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (x, y)))
