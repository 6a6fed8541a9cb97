"""The first launches on a GPU: every variant that the archives list, beside fp64, and equal bits in repeated calls.

The calls are those of the ops' own `variants`, with random numbers for their meta tensors, so the list has no copy
here. A call is left out if it launches nothing new. What `variants` cannot call is listed by hand: buckets, kernels and
collectives that cross ranks, which are virtual ones on one GPU, and the products whose bits depend on no shape.

A kernel that raises or is wrong costs its own row. `on_gpu.py` goes on behind a kernel that poisons the device.
"""

import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from unittest.mock import patch

import torch
from launch_references import FEW_TIMES, REFERENCES, TIMES, Given, Reference, Tensors
from torch.utils._pytree import tree_leaves, tree_map_only

from weft.bench.table import Row
from weft.kernels import launch, signal, variants
from weft.kernels.all_gather_matmul import all_gather_matmul
from weft.kernels.all_reduce import matmul_all_reduce
from weft.kernels.bucket import PackedBucket, Statistics, reduce
from weft.kernels.chunks import Rows
from weft.kernels.matmul import matmul
from weft.kernels.matmul_reduce_scatter import Inbox, matmul_reduce_scatter
from weft.kernels.matmul_tiles import listed, tile_of_any_size
from weft.sharding.sizes import split_sizes
from weft.testing import reference
from weft.testing.peers import run_as_ranks
from weft.testing.tolerance import tolerance

_WAIT_S = 3.0  # of virtual ranks
Result = Callable[[torch.dtype], Tensors]  # the results by PyTorch, in arithmetic of the given type


@dataclass(frozen=True)
class Check:
    """A call to check.

    Attributes:
        name: the op, and its launcher.
        shape: the variants that it launches, or sizes and types.
        ours: returns the results.
        plain: returns the same results by PyTorch, in arithmetic of the given type; None if they are to be zeros.
        times: further calls, which must have the same bits.
        floor: error that is right at least, as a part of the largest result.
    """

    name: str
    shape: str
    ours: Callable[[], Tensors]
    plain: Result | None = None
    times: int = FEW_TIMES
    floor: float = 0.0


def groups() -> dict[str, Callable[[torch.device], Iterator[Check]]]:
    """Return the checks of each group, which is a process of its own in `make gpu`."""
    return {
        **{op: partial(_of_variants, op) for op in REFERENCES},
        "bucket": _buckets,
        "invariant": _invariant,
        "communicating": _communicating,
        "collectives": _collectives,
    }


def row_of(check: Check, most: int = TIMES) -> Row:
    """Return the row of a check, after at most `most` further calls."""
    of: dict[str, str | int] = {"op": check.name, "shape": check.shape}
    try:
        first = [x.clone() for x in check.ours()]
        error = _error(first, check.plain, check.floor)
        times = min(check.times, most)
        unequal = sum(not all(map(torch.equal, first, check.ours())) for _ in range(times))
    except Exception as error_of_kernel:  # a kernel that fails must not hide the others
        return Row(of, remark=f"FAULT: {type(error_of_kernel).__name__}: {str(error_of_kernel).strip()[:500]}")
    faults = [f"off by {error:.3g} tolerances"] if not error <= 1 else []
    faults += [f"other bits in {unequal} of {times} calls"] if unequal else []
    remark = f"FAULT: {', '.join(faults)}" if faults else ""
    return Row(of, facts={"error_in_tolerances": error, "unequal_calls": unequal}, remark=remark)


def is_fault(row: Row) -> bool:
    return row.remark.startswith("FAULT")


def _error(results: Tensors, plain: Result | None, floor: float) -> float:
    """Return the largest error in tolerances; infinity for one that is not finite, or for what is not 0 but must be."""
    if plain is None:
        return float("inf") if any(x.count_nonzero() for x in results) else 0.0
    exact, of_type, found = plain(torch.float64), plain(results[0].dtype), 0.0
    for result, true, other in zip(results, exact, of_type, strict=True):
        if result.shape != true.shape or not (result.is_floating_point() or torch.equal(result, true)):
            return float("inf")
        if not (result.is_floating_point() and result.numel()):
            continue
        largest = (result.double() - true.double()).abs().max().item()
        least = 64 * 2.0**-53 if result.dtype == torch.float64 else floor  # sums of millions of squares in fp64
        allowed = max(tolerance(other.to(result.dtype), true.double()), least * true.abs().max().item())
        ratio = largest / allowed if largest else 0.0
        found = ratio if not ratio <= found else found  # NaN is no less
    return found


# The calls of `variants`.


def _of_variants(op: str, device: torch.device) -> Iterator[Check]:
    architecture = launch.architecture_of(device)
    for name, given, label in _calls(op, architecture, small=device.type == "cpu"):
        of = REFERENCES[op][name]
        yield Check(f"{op}: {name}", label, *_prepared(op, name, given, of, device), of.times, of.floor(given))


def _calls(op: str, architecture: str, small: bool) -> list[tuple[str, Given, str]]:
    """Return launcher, arguments by name (meta tensors) and new variants of each call of the op's `variants`."""
    module = importlib.import_module(f"weft.kernels.{op}")
    calls: list[tuple[str, Given, str]] = []
    known: set = set()

    def noting(name: str) -> Callable:
        function = getattr(module, name)
        signature = inspect.signature(function)

        def call(*args, **options):
            before = len(launches)
            result = function(*args, **options)
            # The interpreter has no variants: each call counts.
            key = (lambda made: len(calls)) if launch.INTERPRETED else variants.variant_of
            new = {key(made): variant_text(made) for made in launches[before:]}
            fresh = [text for key, text in new.items() if key not in known]
            known.update(new)
            if fresh:
                calls.append((name, signature.bind(*args, **options).arguments, "; ".join(fresh)))
            return result

        return call

    empty = torch.empty

    def fewer(*shape, **options):
        return empty([_fewer(size) for size in (shape[0] if isinstance(shape[0], Sequence) else shape)], **options)

    with ExitStack() as stack:
        for name in REFERENCES[op]:
            stack.enter_context(patch.object(module, name, noting(name)))
        if small:
            stack.enter_context(patch.object(torch, "empty", fewer))
        launches = stack.enter_context(launch.recording(architecture))
        module.variants(architecture)
    return calls


def variant_text(made: launch.Launch) -> str:
    """Return the name of a kernel and of its variant."""
    return f"{made.kernel.__name__.strip('_').removesuffix('_kernel')} {made}"


def _fewer(size: int) -> int:
    """Return a size for the interpreter; twice a size becomes twice as much, as code that calls `variants` expects."""
    return size // 64 + size % 64 if size > 256 else size


def _prepared(op: str, name: str, given: Given, of: Reference, device: torch.device) -> tuple[Callable, Result]:
    """Return the call on real tensors, and its results by PyTorch. Both draw the tensors when they are called first."""

    @lru_cache(maxsize=1)
    def drawn() -> Given:
        real = tree_map_only(torch.Tensor, partial(_real, storages={}, device=device), given)
        of.fill(real)
        return real

    @lru_cache(maxsize=1)
    def before() -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(x, x.clone()) for part in of.written for x in tree_leaves(drawn().get(part)) if x is not None]

    def ours() -> Tensors:
        for x, content in before():
            x.copy_(content)
        function = getattr(importlib.import_module(f"weft.kernels.{op}"), name)
        results = function(**drawn())
        return [x for x in (results if isinstance(results, tuple) else (results,)) if x is not None]

    def plain(to: torch.dtype) -> Tensors:
        for x, content in before():
            x.copy_(content)
        return of.results(to, **{part: x for part, x in drawn().items() if part != "config"})

    return ours, plain


def _real(meta: torch.Tensor, storages: dict, device: torch.device) -> torch.Tensor:
    """Return a tensor of random numbers in the place of a meta tensor; views of one tensor stay views of one tensor."""
    storage = meta.untyped_storage()
    if storage._cdata not in storages:
        count = storage.nbytes() // meta.element_size()
        generator = torch.Generator(device).manual_seed(len(storages))
        numbers = torch.randn(count, generator=generator, device=device)
        storages[storage._cdata] = numbers.to(meta.dtype) if meta.is_floating_point() else numbers.new_zeros(
            count, dtype=meta.dtype
        )  # fmt: skip
    return storages[storage._cdata].as_strided(meta.shape, meta.stride(), meta.storage_offset())


# What `variants` cannot call.


def _drawn(device: torch.device, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(device)


def _buckets(device: torch.device) -> Iterator[Check]:
    shapes = ((3,), (129, 65), (5000,), (1,)) if device.type == "cpu" else ((3,), (1290, 650), (500_000,), (1,))
    for wire in launch.DTYPES:
        tensors = [_drawn(device, *shape).to(dtype) for shape in shapes for dtype in launch.DTYPES]
        places = PackedBucket(tensors)
        for counted in (False, True):
            statistics = Statistics(device) if counted else None

            def packed(places=places, tensors=tensors, wire=wire, statistics=statistics) -> Tensors:
                flat, back = places.empty(wire), [torch.empty_like(x) for x in tensors]
                places.pack(tensors, flat, 0.5, statistics)
                norms = [] if statistics is None else [statistics.squared_norm.clone()]
                places.unpack(flat, back, 2.0, statistics)
                return *back, *norms, *([] if statistics is None else [statistics.squared_norm])

            def plain(to, tensors=tensors, wire=wire, counted=counted) -> Tensors:
                halves = [(0.5 * x.float()).to(wire) for x in tensors]
                back = [(2 * half.float()).to(x.dtype) for half, x in zip(halves, tensors, strict=True)]
                norms = [sum(x.double().square().sum() for x in written) for written in (halves, back)]
                return *back, *(norms if counted else [])

            yield Check("bucket: pack, unpack", f"{wire}{', counted' * counted}", packed, plain, TIMES)
    for dtype in launch.DTYPES:
        parts = [_drawn(device, 100_003, seed=rank).to(dtype) for rank in range(8)]
        for out_dtype, counted in [*((each, True) for each in launch.DTYPES), (dtype, False), (None, True)]:
            statistics = Statistics(device) if counted else None

            def summed(parts=parts, out_dtype=out_dtype, statistics=statistics) -> Tensors:
                given = parts if out_dtype is not None else parts[:1]
                out = None if out_dtype is None else torch.empty_like(parts[0], dtype=out_dtype)
                reduce(given, out, 0.25, statistics)
                return *([] if out is None else [out]), *([] if statistics is None else [statistics.squared_norm])

            def in_order(to, parts=parts, out_dtype=out_dtype, counted=counted) -> Tensors:
                given = parts if out_dtype is not None else parts[:1]
                out = (reference.reduce([x.float() for x in given]) * 0.25).to(out_dtype or torch.float32)
                norm = [out.double().square().sum()] if counted else []
                return *([] if out_dtype is None else [out]), *norm

            name = f"8 {dtype} to {out_dtype}{', counted' * counted}"
            yield Check("bucket: reduce", name, summed, in_order, TIMES)


def _invariant(device: torch.device) -> Iterator[Check]:
    """Yield products whose bits must not depend on the operands' memory: aligned or not, rows or columns contiguous.

    The tile is the same for all, and the left operand comes from shared memory or from registers.
    """
    m, n, k = (24, 20, 40) if device.type == "cpu" else (328, 272, 528)
    for dtype in launch.DTYPES:
        a, b = _drawn(device, m, k).to(dtype), _drawn(device, k, n, seed=1).to(dtype)

        odd = [] if dtype == torch.float32 else [(_odd, torch.clone), (torch.clone, _odd)]

        def differences(a=a, b=b, odd=odd) -> Tensors:
            of_forms = [
                matmul(*each, config=tile_of_any_size(*each), out_dtype=torch.float32)[0]
                for each in ((a, b), (a, _turned(b)), (_turned(a), b), *((x(a), y(b)) for x, y in odd))
            ]
            return [other - of_forms[0] for other in of_forms[1:]]

        yield Check("invariant: matmul", f"{m}x{n}x{k} {dtype}, {3 + len(odd)} forms of the operands", differences)


def _turned(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous().t()


def _odd(x: torch.Tensor) -> torch.Tensor:
    """Return x with rows that do not lie at multiples of 16 bytes."""
    return torch.cat([x, x[:, :1]], 1)[:, :-1]


def _communicating(device: torch.device) -> Iterator[Check]:
    """Yield products that communicate, with the bits of those that do not, for each tile and on 2 and 4 ranks."""
    architecture = launch.architecture_of(device)
    sizes = ((70, 48, 40), (33, 31, 21)) if device.type == "cpu" else ((1000, 512, 272), (333, 272, 131))
    for world, dtype in ((2, torch.bfloat16), (4, torch.bfloat16), (2, torch.float16)):
        for m, n, k in sizes if dtype == torch.bfloat16 else sizes[:1]:
            odd = k % 8 > 0
            for tile in listed(architecture, dtype, odd, True)[: 1 if device.type == "cpu" else None]:
                for name, function in _ACROSS.items():
                    differences = partial(function, device, world, m, n, k, dtype, tile)
                    shape = f"W={world} {m}x{n}x{k} {dtype} {tile}"
                    yield Check(f"communicating: {name}", shape, differences, times=5)


def _across(device, world, m, n, k, dtype, tile, function, sums: bool) -> Tensors:
    parts = [
        (_drawn(device, m, k, seed=rank).to(dtype), _drawn(device, k, n, seed=-rank).to(dtype)) for rank in range(world)
    ]
    rows = Rows.of((m, n), 0, split_sizes(m, world), most=64)
    whole = reference.reduce([matmul(a, b, config=tile)[0] for a, b in parts])

    def on_rank(peers: signal.Peers) -> torch.Tensor:
        return function(*parts[peers.rank], peers, rows, config=tile)

    bytes = Inbox(rows, n, dtype).window_bytes(sums=sums)
    results = run_as_ranks(on_rank, world, bytes, device, timeout_s=_WAIT_S)
    wanted = [whole] * world if sums else whole.split(split_sizes(m, world))
    return [result.double() - own.double() for result, own in zip(results, wanted, strict=True)]


def _gathered(device, world, m, n, k, dtype, tile) -> Tensors:
    from weft.ops.overlap.peer_copies import start_gathering, window_bytes

    x, w, sizes = _drawn(device, m, k).to(dtype), _drawn(device, n, k).to(dtype), split_sizes(m, world)
    whole = matmul(x, w.t(), config=tile)[0]

    def on_rank(peers: signal.Peers) -> torch.Tensor:
        gathering = start_gathering(peers, x.split(sizes)[peers.rank], 0, sizes)
        y = all_gather_matmul(gathering.whole, w.t(), gathering.arrivals, config=tile)[0]
        gathering.finish()
        return y

    results = run_as_ranks(on_rank, world, window_bytes(x.split(sizes)[0], 0, sizes), device, timeout_s=_WAIT_S)
    return [result.double() - whole.double() for result in results]


_ACROSS: dict[str, Callable[..., Tensors]] = {
    "all_gather_matmul": _gathered,
    "matmul_reduce_scatter": partial(_across, function=matmul_reduce_scatter, sums=False),
    "matmul_all_reduce": partial(_across, function=matmul_all_reduce, sums=True),
}


def _collectives(device: torch.device) -> Iterator[Check]:
    """Yield the extension's collectives on virtual ranks, with the bits of the reduction contract."""
    if device.type == "cpu":
        return
    from virtual_ranks import OPERATIONS, Trial, VirtualRanks, counts_of

    for world in (2, 4):
        for dtype in launch.DTYPES:
            for operation in OPERATIONS:
                for count, offset in ((7, 0), (65_537, 1), (300_003, 0)):

                    def differences(world=world, dtype=dtype, operation=operation, count=count, offset=offset):
                        ranks = VirtualRanks(world, timeout_s=_WAIT_S)
                        trial = Trial(operation, ranks, dtype, counts_of(operation, world, count), True, offset)
                        torch.cuda.synchronize()
                        ranks.call(trial.launch)
                        ranks.assert_idle()
                        pairs = zip(chain(*trial.results), chain(*trial.expected), strict=True)
                        return [found.cpu().double() - wanted.double() for found, wanted in pairs]

                    yield Check(f"collectives: {operation}", f"W={world} {count} {dtype}", differences, times=5)
