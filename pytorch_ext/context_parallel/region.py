"""The edge of a model that shares its sequence: whole tensors outside, shared tensors inside."""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

import weft.context_parallel.attention  # noqa: F401 - registers its rules
from weft.arguments import check_choice
from weft.comm.communicator import Communicator
from weft.context_parallel.function_rules import own_random_numbers, used
from weft.context_parallel.learning import ForwardRecord, Kind, Kinds, knowing, state
from weft.context_parallel.shared_sequence import (
    SequenceCut,
    SharedSequence,
    Sharing,
    by_part,
    crossed,
    in_units,
    left_alone,
    localized,
    note_gathering,
    refuse_results_of_custom_functions,
    shared_in,
    shared_like,
    wholes,
    without_guards,
)
from weft.context_parallel.transformers_attention import refuse_missing_weights, use_context_attention
from weft.context_parallel.uncompiled import leave_out_of_graphs, outside_of_graphs, uncompile
from weft.forward.chain import ForwardChain, step_of
from weft.forward.running import followed
from weft.metadata import metadata, set_metadata
from weft.nn import Branches, ParallelConv, ParallelEmbedding, ParallelLinear, ParallelMultiheadAttention
from weft.nn.expert_form import form_of
from weft.nn.sharded import ShardedModule
from weft.ops.backward import refuse_transforms
from weft.ops.context_attention import METHODS
from weft.ops.sequence_layout import LAYOUTS, SequenceLayout
from weft.rng import random_numbers_of
from weft.sharding.bits import mark_of_bits
from weft.sharding.shard import split_over

_OPTIONS = {
    "method": METHODS,
    "layout": LAYOUTS,
    "dim": None,
    "parts": (True, False),
    "strict": (True, False),
    "deterministic": (True, False),
    "units": None,
}


def sharing_of(ranks: Communicator, context: str | Mapping, checks: str = "first") -> Sharing:
    """Check the context options of weft.parallelize and return them. Raise ValueError for an unknown option."""
    options = {"method": context} if isinstance(context, str) else dict(context)
    for name, value in options.items():
        if name not in _OPTIONS:
            raise ValueError(f"parallelize: context has no option {name!r}; it has {', '.join(_OPTIONS)}")
        known = _OPTIONS[name]
        if known is not None:
            check_choice(f"parallelize: context {name}", value, known)
    dim = options.get("dim", 1)
    if not isinstance(dim, int) or dim < 0:
        raise ValueError(f"parallelize: context dim={dim!r} must be a dimension, counted from the first")
    if options.get("units") is not None:
        _check_units(ranks, options)
        options["layout"] = "contiguous"
    return Sharing(ranks, checks=checks, **options)


def _check_units(ranks: Communicator, options: Mapping) -> None:
    units = options["units"]
    if not isinstance(units, int) or units < 1 or units % ranks.world_size:
        raise ValueError(
            f"parallelize: context units={units!r} must be a number of units that the {ranks.world_size} ranks of "
            '"cp" divide'
        )
    for name, possible in (("method", ("auto", "all_gather")), ("layout", ("contiguous",)), ("parts", (False,))):
        if options.get(name, possible[0]) not in possible:
            raise ValueError(f"parallelize: context {name}={options[name]!r} is not supported with units={units}")


def share(model: nn.Module, sharing: Sharing, tokenwise: list[str]) -> None:
    """Make the model share its sequence.

    Args:
        tokenwise: names of the modules that get this rank's part as it is.
    """
    named = [model.get_submodule(name) for name in tokenwise]
    for module in model.modules():
        if isinstance(module, ParallelMultiheadAttention):
            for name in ("_linear", "_over_heads"):
                setattr(module, name, _OfPart(getattr(module, name)))
        elif isinstance(module, Branches | ParallelConv):
            ForwardChain.of(module).add("sequence", of_whole)
        elif isinstance(module, ShardedModule) or any(module is other for other in named):
            ForwardChain.of(module).add("sequence", of_positions)
        elif not isinstance(form_of(module), str):
            ForwardChain.of(module).add("sequence", of_tokens)
    use_context_attention(model)
    leave_out_of_graphs(model)
    entry = RegionEntry(sharing)
    model.register_forward_pre_hook(entry, with_kwargs=True)
    model.register_forward_hook(entry.leave, always_call=True)


def sharing_in(model: nn.Module) -> dict[str, Sharing]:
    """Return how each module that shares a sequence does it, by the module's name."""
    found = {name: sharing for name, module in model.named_modules() if (sharing := metadata(module, "sharing"))}
    return found | {name: entry.sharing for name, module in model.named_modules() if (entry := entry_of(module))}


def share_in_stages(module: nn.Module, sharing: Sharing | None) -> None:
    """Record on a module that runs a model in stages that the stages share the model's sequence."""
    if sharing is not None:
        set_metadata(module, "sharing", sharing)


FIRST_CALLS = 3  # that ranks compare, with checks="first"


@dataclass
class _SharedForward:
    """A forward in progress.

    Attributes:
        frame: closed at the end of the forward.
        within: the module is a part of a model that shares its sequence already.
        learnt: the key, the kind and the record of this call, if it is the first of its kind.
    """

    frame: ExitStack
    within: bool
    learnt: tuple[tuple, Kind, ForwardRecord] | None = None


class RegionEntry:
    """A model's forward pre-hook and, as `leave`, its forward hook.

    Attributes:
        given: the agreement for each call, if the caller has agreed and set the seeds.
        learns: later calls leave out what the first of their kind has shown.
    """

    def __init__(self, sharing: Sharing):
        self.sharing = sharing
        self.given: SharedCall | None = None
        self.under_way: list[_SharedForward] = []
        self.kinds: Kinds | None = None
        self.left = FIRST_CALLS  # the first one of each kind is compared besides
        self.learns = sharing.checks != "always"

    def __deepcopy__(self, memo):
        made = RegionEntry(self.sharing)
        made.learns = self.learns
        return made

    @outside_of_graphs
    def __call__(self, module: nn.Module, args, kwargs):
        if torch._C._are_functorch_transforms_active():
            refuse_transforms(type(module).__name__)
        forward = _SharedForward(ExitStack(), within=bool(shared_in((args, kwargs))))
        self.under_way.append(forward)
        if forward.within:
            return args, kwargs
        uncompile(module)
        forward.frame.enter_context(knowing(self.sharing.units is not None))
        if self.given is not None:
            forward.frame.enter_context(followed(module))
            return self.given.enter((args, kwargs))
        with torch._C.DisableTorchFunction():
            key, kind, seed = self._agreed_kind(module, args, kwargs) if self.learns else (None, None, None)
            call = agreed(type(module).__name__, self.sharing, (args, kwargs), seed=seed) if kind is None else kind.call
        if self.kinds.trains if self.kinds is not None else any(part.training for part in module.modules()):
            forward.frame.enter_context(random_numbers_of(call.seed if seed is None else seed, call.device))
        if kind is not None:
            with torch._C.DisableTorchFunction():
                forward.frame.enter_context(kind.running())
            return call.enter((args, kwargs))
        forward.frame.enter_context(followed(module))
        if key is not None:
            forward.learnt = key, Kind(call), ForwardRecord(module, _is_shared)
            forward.frame.enter_context(forward.learnt[-1].recording())
        return call.enter((args, kwargs))

    def _agreed_kind(self, module: nn.Module, args, kwargs) -> tuple[tuple | None, Kind | None, int | None]:
        """Return a call's key, its kind if all ranks have learnt it, and a seed. A collective call."""
        if self.kinds is None:
            self.kinds = Kinds(module, self.sharing.units is not None)
        key, kind = self.kinds.find(args, kwargs)
        sharing, ranks = self.sharing, self.sharing.ranks
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        forms = repr([(() if sharing.parts else x.shape, x.dtype) for x in tensors])
        compared = tensors if self.left > 0 and not sharing.parts and sharing.checks != "off" else ()
        self.left -= 1
        mark = zlib.crc32(repr((forms, [int(mark_of_bits(x)) for x in compared if x.ndim > sharing.dim])).encode())
        length = -1 if kind is None else kind.call.layout.length
        # In eval mode nothing is drawn: units that run one by one in a first call would draw once each.
        seed = int(torch.randint(2**62, (1,))) if self.kinds.trains else 0
        where = ranks.device_of_numbers(tensors[0].device if tensors else torch.device("cpu"))
        own = torch.tensor([[length, mark, seed]], device=where)
        rows = ranks.all_gather(own, 0, [1] * ranks.world_size).tolist()
        alike = all(row[:2] == rows[0][:2] for row in rows)  # if they are not, `agreed` says how
        return key, kind if alike and length >= 0 else None, rows[0][2]

    @outside_of_graphs
    def leave(self, module: nn.Module, args, output):
        """Close the forward, also after an error; then there is no output."""
        forward = self.under_way.pop()
        forward.frame.close()
        if forward.within:
            refuse_results_of_custom_functions(output)
            return output
        refuse_missing_weights(module, output)
        if forward.learnt is not None and output is not None:
            assert self.kinds is not None
            with torch._C.DisableTorchFunction():
                self.kinds.add(*forward.learnt)
            for part in forward.learnt[1].alone:
                if step_of(part, "sequence") is None:
                    ForwardChain.of(part).add("sequence", alone_in_known_calls)
        return leave(output, self.sharing)


def _is_shared(x: object) -> bool:
    return type(x) is SharedSequence


def leave(output, sharing: Sharing):
    """Return the model's output whole, or this rank's part with parts=True."""
    refuse_results_of_custom_functions(output)
    return without_guards(localized(output) if sharing.parts else wholes(output))


def entry_of(model: nn.Module) -> RegionEntry | None:
    """Return the entry of a model that shares its sequence; None for another one."""
    return next((hook for hook in model._forward_pre_hooks.values() if isinstance(hook, RegionEntry)), None)


@dataclass(frozen=True)
class SharedCall:
    """The ranks' agreement for one forward of a model that shares its sequence.

    Attributes:
        layout: layout of the sequence.
        length: length of this rank's arguments along the sequence.
        seed: seed of the random numbers of computation that is the same on all ranks.
        device: device of the arguments.
    """

    sharing: Sharing
    layout: SequenceLayout
    length: int
    seed: int
    device: torch.device

    def enter(self, tree):
        """Return the arguments, shared if they are along the sequence."""
        sharing, dim, cut = self.sharing, self.sharing.dim, SequenceCut(self.sharing, self.layout)

        def shared(x):
            if x.ndim <= dim or x.size(dim) != self.length:
                return x
            if sharing.units is not None:
                return in_units(x, dim, cut)
            return SharedSequence(x if sharing.parts else cut.pick(x, dim), dim, cut)

        return tree_map_only(torch.Tensor, shared, tree)


def agreed(
    caller: str, sharing: Sharing, tree, alike: Sequence[torch.Tensor] | None = None, seed: int | None = None
) -> SharedCall:
    """Agree on how the sequence of this call is shared. A collective call of the ranks that share it.

    Args:
        caller: first word of the error messages.
        tree: the call's arguments.
        alike: tensors that must have the same values on all ranks if the model takes the whole. None: all arguments
            along the sequence.
        seed: of the call, if the ranks have agreed on it; None: rank 0 draws one.

    Raises:
        ValueError: no argument has the sequence's dimension, or the ranks' arguments do not fit together; the latter on
            every rank.
    """
    ranks, dim = sharing.ranks, sharing.dim
    along = [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor) and x.ndim > dim]
    if not along:
        raise ValueError(
            f"{caller} shares its sequence, dimension {dim} of its arguments, and no argument has it; "
            'pass context={"dim": ...} to weft.parallelize'
        )
    length = along[0].size(dim)
    if sharing.parts:
        signature: list[tuple] = [(*x.shape[:dim], *x.shape[dim + 1 :], x.dtype) for x in along]
    else:
        signature = [(x.shape, x.dtype) for x in along]
        compared = () if sharing.checks == "off" else along if alike is None else alike
        signature += [(int(mark_of_bits(x)),) for x in compared]
    odd = [tuple(x.shape) for x in along if x.size(dim) != length]
    drawn = int(torch.randint(2**62, (1,))) if seed is None else seed
    own = [length, zlib.crc32(repr(signature).encode()), drawn, len(odd)]
    where = ranks.device_of_numbers(along[0].device)
    rows = ranks.all_gather(torch.tensor([own], device=where), 0, [1] * ranks.world_size).tolist()
    lengths, marks, seeds, odds = zip(*rows, strict=True)
    if len(set(marks)) > 1:
        kind = "parts of different batches" if sharing.parts else "different batches"
        raise ValueError(
            f"ranks that share a sequence got {kind}: call the model with the same arguments on all of them (a sampler "
            "of data-parallel ranks must not count them)"
        )
    if not sharing.parts:
        if length < (sharing.units or 0):
            raise ValueError(
                f"{caller} shares a sequence in {sharing.units} units, and this one has {length} positions"
            )
        layout = SequenceLayout(length, sharing.pieces, sharing.layout)
        return SharedCall(sharing, layout, length, seeds[0], along[0].device)
    if any(odds):
        raise ValueError(
            f'context={{"parts": True}}: every argument must be this rank\'s part along dimension {dim}, of {length} '
            f"positions here; got {odd or 'others on another rank'}"
        )
    layout = SequenceLayout(sum(lengths), ranks.world_size, sharing.layout)
    if layout.sizes != list(lengths):
        raise ValueError(
            f'context={{"parts": True}}: the ranks have {list(lengths)} positions; {layout.kind} parts of '
            f"{layout.length} have {layout.sizes}: cut the sequence with weft.shard_sequence"
        )
    return SharedCall(sharing, layout, length, seeds[0], along[0].device)


# A class derived from these with a forward of its own may draw.
_WITHOUT_DRAWS = ParallelLinear.forward, ParallelEmbedding.forward


def alone_in_known_calls(forward: Callable, module: nn.Module, *args, **kwargs):
    """Run a forward with this rank's part in calls of a kind that was learnt; see learning.py."""
    out = left_alone(forward, module, args, kwargs)
    return forward(*args, **kwargs) if out is NotImplemented else out


def of_positions(forward: Callable, module: nn.Module, *args, **kwargs):
    """Run a forward that treats every position alone with this rank's part."""
    out = left_alone(forward, module, args, kwargs)
    if out is not NotImplemented:
        return out
    shared = shared_in((args, kwargs))
    if not shared:
        return forward(*args, **kwargs)
    refuse_results_of_custom_functions(shared)
    lead = shared[0]
    within = isinstance(module, ParallelLinear) and lead.back == -1
    if within or any(x.cut != lead.cut or x.axis != lead.axis for x in shared):
        note_gathering("the module works along the sequence", *shared)
        return forward(*wholes(args), **wholes(kwargs))
    if state.recorder is not None:
        state.recorder.function(lead, (), {})
    return by_part(partial(_of_part, forward, module), *args, **kwargs)


def _of_part(forward: Callable, module: nn.Module, *args, **kwargs):
    lead = shared_in((args, kwargs))[0]
    ranks, cut = lead.cut.sharing.ranks, _cut_after(module, lead)
    draws = module.training and type(module).forward not in _WITHOUT_DRAWS
    with ExitStack() as frame:
        frame.enter_context(_parameters_used(module, ranks))
        if draws:
            frame.enter_context(own_random_numbers(ranks, lead.device))
        args, kwargs = _parts((args, kwargs), ranks)
        out = forward(*args, **kwargs)
        if not cut.mine:  # without tokens the module may use nothing, and backward sums over the ranks
            parameters = (p for part in module.modules() for p in part._parameters.values())
            total = 0 * sum(x.sum() for x in (*parameters, *tree_leaves((args, kwargs))) if _has_gradient(x))
            out = tree_map_only(torch.Tensor, lambda y: y + total if y.is_floating_point() else y, out)
    if draws or not cut.mine or cut is not lead.cut:
        crossed()

    def share_again(y: torch.Tensor) -> SharedSequence:
        if y.ndim <= lead.axis or y.size(lead.axis) != cut.blocks * cut.mine:
            raise ValueError(
                f"{type(module).__name__} is named tokenwise, got this rank's {cut.mine} positions as dimension "
                f"{lead.axis}, and returned {tuple(y.shape)}"
            )
        return SharedSequence(y, lead.axis, cut)

    return tree_map_only(torch.Tensor, share_again, out)


def of_tokens(forward: Callable, module: nn.Module, *args, **kwargs):
    """Run fused experts. Every tensor has a row for each token, so what every rank has whole is cut."""
    if shared := shared_in((args, kwargs)):
        lead = shared[0]

        def along(x: torch.Tensor) -> torch.Tensor:
            if isinstance(x, SharedSequence) or x.shape[: lead.axis + 1] != lead.shape[: lead.axis + 1]:
                return x
            return shared_like(lead, x)

        args, kwargs = tree_map_only(torch.Tensor, along, (args, kwargs))
    return of_positions(forward, module, *args, **kwargs)


def of_whole(forward: Callable, module: nn.Module, *args, **kwargs):
    """Run a forward with an unknown use of the sequence on the whole, gathered."""
    shared = shared_in((args, kwargs))
    if not shared:
        return forward(*args, **kwargs)
    refuse_results_of_custom_functions(shared)
    note_gathering(f"{type(module).__name__} takes the whole", *shared)
    return forward(*wholes(args), **wholes(kwargs))


class _OfPart:
    """Function of a sequence and of plain tensors, applied to this rank's part: it treats every position alone."""

    def __init__(self, function: Callable):
        self.function = function

    def __call__(self, x, *others):
        if not isinstance(x, SharedSequence):
            return self.function(x, *others)
        refuse_results_of_custom_functions(x)
        return by_part(self._of_one, x, *others)

    def _of_one(self, x: SharedSequence, *others) -> SharedSequence:
        out = self.function(x.local, *(used(other, x.cut.sharing.ranks) for other in others))
        return x.like(out, out.ndim + x.back)


def _parts(tree, ranks: Communicator):
    return tree_map_only(torch.Tensor, lambda x: x.local if isinstance(x, SharedSequence) else used(x, ranks), tree)


def _has_gradient(x) -> bool:
    return isinstance(x, torch.Tensor) and x.requires_grad


def _cut_after(module: nn.Module, x: SharedSequence) -> SequenceCut:
    """Return the cut of a module's output.

    A column layer with sequence_parallel ends a sequence-parallel region, a row layer begins one.
    """
    if not isinstance(module, ParallelLinear) or not module.sequence_parallel or module.communicator.world_size == 1:
        return x.cut
    begins = module.style == "row"
    if module.sequence_dim % x.ndim != x.axis or begins == (x.cut.region is not None) or x.cut.blocks > 1:
        raise ValueError(
            f"ParallelLinear(style={module.style!r}, sequence_parallel=True, sequence_dim={module.sequence_dim}) got "
            f"{tuple(x.shape)} whose sequence is dimension {x.axis}, {'in' if x.cut.region else 'out'}side of a "
            "sequence-parallel region: a column layer ends one and a row layer begins one, along the sequence"
        )
    return replace(x.cut, region=(module.communicator.rank, module.communicator.world_size) if begins else None)


@contextmanager
def _parameters_used(module: nn.Module, ranks: Communicator) -> Iterator[None]:
    """Replace the module's parameters by ones with gradients that are summed over the ranks.

    Experts that these ranks hold together get the tokens of all of them, so their gradients are left alone.
    """
    saved = [(part, dict(part._parameters)) for part in module.modules()]
    try:
        for part, parameters in saved:
            summed = {name: p for name, p in parameters.items() if not split_over(p, ranks)}
            part._parameters.update({name: used(p, ranks) for name, p in summed.items()})  # type: ignore[misc]
        yield
    finally:
        for part, parameters in saved:
            part._parameters.update(parameters)
