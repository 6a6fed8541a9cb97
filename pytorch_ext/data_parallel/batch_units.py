"""The batch in units: gradients with the same bits on any number of ranks that share it, for `invariant=V`.

A batch is V equal units of sequences. Each has the bits of a call of its own, and gradients of its own. They are added
in the binary tree over units of ops/invariant, in fp32, and rounded once. The first call of a kind runs the units one
by one; where a trial gives the same bits, later calls run the units of this rank at once (weft.invariant).

In autograd's graph, the batch's node stands between the parameters and one node for each call, which gives the module
the parameters of that unit or of several. Backward leaves the gradients of units in the sums. At the batch's node the
ranks exchange their sums, and the parameters get the gradient of the whole batch.
"""

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from weft.comm.communicator import Communicator
from weft.context_parallel.region import sharing_in
from weft.data_parallel.consensus import mark_of_batch, warn_of_same_batch
from weft.data_parallel.grad_norm import gradient_of, norm_of
from weft.forward import Members
from weft.forward.running import followed
from weft.invariant.at_once import NUMBERS
from weft.invariant.exact_functions import draws_of_units
from weft.invariant.known_calls import KnownCalls, UnitCalls
from weft.invariant.unit_outputs import ATOMS, JoinFunction, mean_of_units, same, tensors_of
from weft.invariant.unit_sums import UnitBatch
from weft.metadata import metadata
from weft.ops import kernel_choice
from weft.ops.invariant import Units, in_own_memory
from weft.rng import name_modules, next_seed, random_numbers_of
from weft.sharding.shard import shard_of

_REFUSED = (nn.modules.batchnorm._BatchNorm,)
_FIRST_GRAPHS = 3  # after a change of what trains; the hooks on parameters look at every gradient
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
        self.inside = self._compared = False
        self._alone = len(self.here) == 1 or self._device.type != "cpu"
        shards = filter(None, map(shard_of, module.parameters()))
        beside = dict.fromkeys([*[s.communicator for s in shards], *[s.ranks for s in sharing_in(module).values()]])
        self.known = KnownCalls(module, self.here, [split for split in beside if split.world_size > 1])
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
        whole, size, seed = self._agreed((args, kwargs))
        buffers = [(of, name, x, x._version) for of in self._buffers for name, x in of.items() if x is not None]
        kind = None
        if _at_once[-1] and not self._alone and not torch.is_autocast_enabled("cpu"):
            training = [part.training for part in self._members.modules]
            kind = self.known.kind_of(function, whole, training + self._flags)
        self.inside = True
        # A first call runs its units and a trial, a later one all units at once: neither may draw for the caller.
        numbers = nullcontext() if seed is None else random_numbers_of(seed, self._device)
        try:
            with numbers:
                found = self._found(kind, function, whole, size, seed)
        finally:
            self.inside = False
        if changed := [name for of, name, x, version in buffers if x._version != version or of.get(name) is not x]:
            raise RuntimeError(
                f"invariant={self.units.total}: forward changed the buffers {', '.join(changed)}, which would depend "
                "on the units that a rank has"
            )
        return found

    def _found(self, kind: tuple | None, function: Callable, whole: Any, size: int, seed: int | None) -> Any:
        """Return the output of all units: at once, if such a call is known; else one by one, after which it may be."""
        known = None if kind is None else self.known.run(kind, self._batch, function, whole, seed or 0)
        if known is not None:
            return self._joined([known[0]], iter(known[1]))
        first = kind is not None and self.known.is_tried(kind)
        copies = tree_map_only(torch.Tensor, _copied, whole) if first else None
        units = self._unit_by_unit(function, self._cut(whole, size), seed)
        if first:
            self.known.learn(kind, self._batch(), function, copies, size, seed or 0, units)  # type: ignore[arg-type]
        return self._joined(units.outputs)

    def _batch(self) -> UnitBatch | None:
        """Return sums for the gradients of a backward; None where there will be none."""
        if not torch.is_grad_enabled() or not self._trained:
            return None
        of_sums = self.units, self.ranks, self._trained, self._chunk_bytes
        return UnitBatch(*of_sums, self.places, self._unused, self.expect)

    def _unit_by_unit(self, function: Callable, arguments: list, seed: int | None) -> UnitCalls:
        batch = self._batch()
        calls = UnitCalls(arguments, [], [])
        for unit, (args, kwargs) in zip(self.here, arguments, strict=True):
            own = nullcontext(()) if batch is None else batch.parameters_of(unit)
            with self._in_a_unit(unit, seed), own as parameters:
                calls.outputs.append(function(*args, **kwargs))
            calls.parameters.append(parameters)
        if batch is not None and self._unchecked:
            self._unchecked -= 1
            self._check_graph(calls.outputs[0], self._trained)
        return calls

    def _renew(self) -> None:
        """Record what trains, and where it is, if that has changed."""
        if self._members.changed():
            self._members.record()
            self._flags = []
            self.known.forget()
        if [parameter.requires_grad for parameter in self._members.parameters] == self._flags:
            return
        self._flags = [parameter.requires_grad for parameter in self._members.parameters]
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
        with ExitStack() as stack:
            stack.enter_context(within_unit(unit))
            if seed is not None:
                stack.enter_context(random_numbers_of(seed + unit, self._device))
                stack.enter_context(followed(self.module))
            stack.enter_context(draws_of_units(None if seed is None else seed + unit))
            yield

    def _check_graph(self, output: Any, trained: Mapping[str, torch.Tensor]) -> None:
        """Check that autograd's graph of a unit's output ends at the unit's parameters and at none of the module."""
        names = {p: name for name, p in trained.items()}
        nodes = [x.grad_fn for x in tensors_of(output) if x.grad_fn is not None]
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

    def _agreed(self, arguments: Any) -> tuple[Any, int, int | None]:
        """Return the arguments, the size of the batch here, and the number that random numbers of units follow from.

        A collective call: the units of all ranks have the same size, and the number is the first rank's.
        """
        if not self._compared:
            self._compared = True
            warn_of_same_batch(self.ranks, mark_of_batch(arguments))
        leaves, spec = tree_flatten(arguments)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()]
        size = next((tensor.size(0) for tensor in tensors if tensor.size(0) != 1), 1 if tensors else 0)
        wrong = [tensor for tensor in tensors if tensor.size(0) not in (1, size)]
        draws = True in [part.training for part in self._members.modules]
        seed = next_seed() if draws else 0
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
        whole = [in_own_memory(leaf) if _is_cut(leaf, size) else leaf for leaf in leaves]
        return tree_unflatten(whole, spec), size, int(notes[0, 1]) if draws else None

    def _cut(self, arguments: Any, size: int) -> list:
        """Return the arguments of each unit here."""
        count, (leaves, spec) = len(self.here), tree_flatten(arguments)
        parts = [
            [in_own_memory(part) for part in leaf.chunk(count)] if _is_cut(leaf, size) else [leaf] * count
            for leaf in leaves
        ]
        units = [tree_unflatten(list(of_unit), spec) for of_unit in zip(*parts, strict=True)] if parts else []
        return units or [arguments] * count

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

    def _joined(self, outputs: list, cuts: Iterator[int] | None = None) -> Any:
        """Return an output of the batch: tensors joined along the batch, scalars averaged over all units.

        Args:
            outputs: by unit; or one of all units.
            cuts: how each tensor in the one of all units is cut into units.
        """
        first = outputs[0]
        if isinstance(first, torch.Tensor):
            numbers = cuts is not None and next(cuts) == NUMBERS
            return self._joined_tensors(first.unbind() if numbers else outputs)
        if dataclasses.is_dataclass(first) and not isinstance(first, (type, dict)):
            names = [field.name for field in dataclasses.fields(first)]
            parts = {name: self._joined([getattr(output, name) for output in outputs], cuts) for name in names}
            return dataclasses.replace(first, **parts)
        leaves, spec = tree_flatten(first)
        if leaves == [first] and spec.is_leaf():
            if cuts is not None and type(first) not in ATOMS:
                return outputs
            return first if all(output is first or same(output, first) for output in outputs) else outputs
        of_units = [tree_flatten(output)[0] for output in outputs]
        if len({len(of_unit) for of_unit in of_units}) > 1:
            raise ValueError(f"invariant={self.units.total}: the units' outputs have different structures")
        return tree_unflatten([self._joined(list(same), cuts) for same in zip(*of_units, strict=True)], spec)

    def _joined_tensors(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        if parts[0].dim() == 0:
            if not parts[0].is_floating_point():
                raise TypeError(
                    f"invariant={self.units.total}: the units return a scalar of {parts[0].dtype}; scalars are "
                    "averaged over units, so they must be floating point"
                )
            return mean_of_units(self.ranks, self.units, parts)
        if any(part.shape != parts[0].shape for part in parts):
            raise ValueError(
                f"invariant={self.units.total}: outputs of units have the shapes "
                f"{', '.join(str(tuple(part.shape)) for part in parts)}; they must be alike, with the batch first"
            )
        return JoinFunction.apply(self.ranks.world_size if self._average else 1, *parts)

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


def _copied(x: torch.Tensor) -> torch.Tensor:
    return x.detach().clone().requires_grad_(x.requires_grad)


def _is_cut(leaf: Any, size: int) -> bool:
    """Return whether an argument is cut into units of a batch of this size."""
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.size(0) == size
