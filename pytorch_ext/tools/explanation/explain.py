"""`weft.explain`: algorithm and traffic of each parallel layer of a model, and why no faster one."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from weft.arguments import check_module
from weft.context_parallel.notes import notes
from weft.context_parallel.region import sharing_in
from weft.data_parallel.sharded_optimizer import piece_of
from weft.forward import ORDER, steps_of
from weft.metadata import metadata
from weft.nn import ParallelEmbedding, ParallelExpertList, ParallelExperts, ParallelLinear
from weft.nn.sharded import ShardHolder
from weft.ops import grouped_matmul, kernel_choice
from weft.ops.overlap import products
from weft.tensor_parallel.auto.trace import tensors_in
from weft.tools.explanation.reports import (
    ATEN,
    OVERLAPPED,
    Communication,
    Explanation,
    LayerReport,
    ProductReport,
    SequenceReport,
    Traffic,
    size_in_words,
)
from weft.tools.explanation.summary import share_held


def explain(model: nn.Module, batch: Any = None, *, tokens: int | None = None, calls: bool = False) -> Explanation:
    """Explain how each parallel layer of a model runs.

    For each product of a layer the result names the algorithm, the data that the layer sends, and the reason why no
    faster path is taken. For a model that shares its sequence it says how the last call computed each attention, and
    why it gathered the sequence. For an automatic plan it names the modules that stay whole on every rank, and the
    layers whose outputs are gathered, with the reason.

    The result prints as text. `.show()` and `rich.print` print a table, `.json()` and `.as_dict()` are for programs.

    Args:
        batch: arguments of a call of the model, to count their tokens: a tensor, or a tuple, list or dict of them.
        tokens: instead of a batch, the number of tokens that all ranks of a layer's group work on together, 4096 by
            default. The faster path and the traffic depend on it.
        calls: also list what stands around each module's forward, from the outermost to the innermost.

    Raises:
        ValueError: tokens is not a whole number of at least 1.
        TypeError: the model is not a module.

    Examples:
        >>> model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        >>> model = weft.parallelize(model, weft.init_mesh(tp=2))
        >>> print(weft.explain(model, tokens=512))
        at 512 tokens:
        tp: 2 ranks, each has its part of the layers' weights; see each layer
        this rank holds 1,072 of 2,128 parameters of its layers
        0: ParallelLinear column, weight (32, 16) of (64, 16), over shared memory
            sends    0 B forward, 32 KiB backward
        2: ParallelLinear row, weight (16, 32) of (16, 64), over shared memory
            sends    32 KiB forward, 0 B backward
    """
    check_module("explain", model)
    if batch is not None and tokens is not None:
        raise ValueError("explain takes a batch or tokens, and not both")
    tokens = 4096 if batch is None and tokens is None else _tokens_of(batch) if tokens is None else tokens
    if not isinstance(tokens, int) or tokens < 1:
        raise ValueError(f"explain: tokens={tokens!r} must be a whole number of at least 1")
    plans = (metadata(module, "plan") for module in model.modules())  # the plan may be inside of a wrapper
    plan = next((plan for plan in plans if plan is not None), None)
    return Explanation(
        tokens,
        tuple(_of_layers(model, tokens)),
        _of_sequences(model),
        {} if plan is None else plan.whole,
        tuple(_ranks(model)),
        calls=_calls(model) if calls else {},
        gathered={} if plan is None else plan.gathered,
    )


def _tokens_of(batch: Any) -> int:
    """Count the tokens in the first tensor: its whole numbers, or its vectors of floating-point numbers."""
    first = next(tensors_in(batch), None)
    if first is None or not first.dim():
        raise ValueError(f"explain: there is no tensor with dimensions in a batch of type {type(batch).__name__}")
    return first.numel() // (first.shape[-1] if first.is_floating_point() and first.dim() > 1 else 1)


_DOES = {
    "pp": "each keeps a part of the layers and sends activations to the next",
    "dp": "each has its part of the batch; gradients are averaged in backward",
    "cp": "each has its part of every sequence",
    "tp": "each has its part of the layers' weights; see each layer",
}


def _ranks(model: nn.Module) -> Iterator[str]:
    """Yield a line about each dimension of the mesh."""
    sizes: dict[str, int] = next(filter(None, (metadata(module, "mesh") for module in model.modules())), {})
    sharded = [x for x in model.parameters() if isinstance(x, DTensor) and piece_of(x) is not None]
    for name, size in sizes.items():
        if size > 1:
            yield f"{name}: {size} ranks, {_of_sharded(sharded) if name == 'dp' and sharded else _DOES[name]}"
    if any(size > 1 for size in sizes.values()):
        yield f"this rank holds {share_held(model)}"


def _of_sharded(parameters: Sequence[DTensor]) -> str:
    """Describe what a step sends to gather sharded parameters for forward and backward, and to reduce gradients."""
    others = [x.nbytes - x.to_local().nbytes for x in parameters]
    reduced = sum(size for x, size in zip(parameters, others, strict=True) if x.requires_grad)
    return (
        "each has its part of the batch, and of parameters, gradients and optimizer state (FSDP2): a step receives "
        f"up to {size_in_words(2 * sum(others))} of parameters and sends {size_in_words(reduced)} of gradients"
    )


def _calls(model: nn.Module) -> dict[str, str]:
    """Return what stands around the forward of each module: weft's hooks, then the steps of its chain."""
    found = {}
    for name, module in model.named_modules():
        hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        owners = [type(getattr(hook, "__self__", hook)) for hook in hooks]
        names = [kind.__name__.lstrip("_") for kind in dict.fromkeys(owners) if kind.__module__.startswith("weft.")]
        parts = [f"hook {kind}" for kind in names] + [f"{step}: {ORDER[step]}" for step in steps_of(module)]
        if parts:
            found[name] = "; ".join(parts)
    return found


def _of_layers(model: nn.Module, tokens: int) -> Iterator[LayerReport]:
    for name, module in model.named_modules():
        if isinstance(module, ParallelLinear):
            yield _linear(name, module, tokens)
        elif isinstance(module, ParallelEmbedding):
            yield _embedding(name, module, tokens)
        elif isinstance(module, ParallelExperts | ParallelExpertList) and module.shards:
            yield _experts(name, module, tokens)
        elif isinstance(module, ShardHolder) and module.shards:
            yield _other(name, module)


def _of_sequences(model: nn.Module) -> tuple[SequenceReport, ...]:
    seen = [SequenceReport(*found) for found in notes(model)]
    shares = []
    for name, sharing in sharing_in(model).items():
        ranks = sharing.ranks
        text = f"dimension {sharing.dim} of its arguments, {ranks.world_size} ranks, over {ranks.transport}"
        shares.append(SequenceReport(name, "shares", text if seen else f"{text}; call it once to see how"))
    return (*shares, *seen)


def _linear(name: str, layer: ParallelLinear, tokens: int) -> LayerReport:
    weight = layer.weight.t() if layer.transposed else layer.weight
    n, k = weight.shape
    # A row layer's activation comes after its reduction, outside of the product.
    fused = layer.activation if layer.style == "column" else None
    to_main_grad = "main_grad" if getattr(layer.weight, "main_grad", None) is not None else None
    layouts = ("nn", "nt") if layer.transposed else ("nt", "nn")
    if layer.place.units is not None:
        reason = f"an element has the same bits in any shape; sums over {layer.place.units.total} units are trees"
        by_kernel = weight.is_cuda or kernel_choice.on_kernel(weight.device)
        same = ProductReport("weft kernel" if by_kernel else "weft CPU product", reason)
        computed = dict.fromkeys(("forward", "dgrad", "wgrad"), same)
    else:
        computed = {
            "forward": _product(tokens, n, k, layouts[0], weight, fused),
            "dgrad": _product(tokens, k, n, layouts[1], weight),
            "wgrad": _product(n, k, tokens, "tn", weight, to_main_grad),
        }
    communicated = {
        product: _communication(layer, tokens, weight.t() if product == "forward" else weight, how)
        for product, how in _COLLECTIVES[layer.style, layer.sequence_parallel].items()
    }
    return LayerReport(
        name,
        f"{type(layer).__name__} {layer.style}",
        _shard(layer),
        layer.communicator.transport,
        computed,
        communicated,
        tuple(_linear_traffic(layer, tokens)),
    )


# (style, sequence-parallel) -> the collective that moves the rows of each product.
_COLLECTIVES = {
    ("column", False): {"dgrad": "all_reduce"},
    ("column", True): {"forward": "all_gather", "dgrad": "reduce_scatter"},
    ("row", False): {"forward": "all_reduce"},
    ("row", True): {"forward": "reduce_scatter", "dgrad": "all_gather"},
}
_APART = "one after the other"


def _linear_traffic(layer: ParallelLinear, tokens: int) -> Iterator[Traffic]:
    """Yield every collective of a step.

    With a product of a column layer, x or dx travels; with a product of a row layer, y or dy.
    """
    column, region = layer.style == "column", layer.sequence_parallel
    world, size = layer.communicator.world_size, layer.weight.element_size()
    inputs, outputs = size * tokens * layer.in_features, size * tokens * layer.out_features
    travelling = inputs if column else outputs
    in_units = layer.place.units is not None  # partial sums travel in fp32, and every rank gets the whole sum
    for product, how in _COLLECTIVES[layer.style, region].items():
        tensor = ("x" if column else "y") if product == "forward" else ("dx" if column else "dy")
        if in_units and how != "all_gather":
            yield _traffic(product, "all_reduce", tensor, travelling // size * 4, world)
        else:
            yield _traffic(product, how, tensor, travelling, world)
    if column and region and layer.weight.requires_grad:
        yield _traffic("wgrad", "all_gather", "x", inputs, world)
    if not column and region and not in_units and layer.bias is not None and layer.bias.requires_grad:
        yield _traffic("wgrad", "all_reduce", "db", size * layer.out_features, world)
    if layer.gather_output:
        yield _traffic("forward", "all_gather", "y", outputs, world)
    if layer.split_input:
        yield _traffic("dgrad", "all_gather", "dx", inputs, world)

    for name, shard in layer.shards.items():
        if shard.cut.replicated and layer.get_parameter(name).requires_grad:
            yield Traffic("wgrad", "all_to_all", f"d{name} of parts on several ranks", _shared_bytes(layer, name))


def _shared_bytes(layer: ParallelLinear, name: str) -> int:
    """Return the bytes that a rank sends, on average, to the ranks with the same part of a parameter."""
    shard, world = layer.shards[name], layer.communicator.world_size
    pairs = [(rank, other) for rank in range(world) for other in range(world) if rank != other]
    length = sum(stop - start for pair in pairs for start, stop in shard.cut.common(*pair))
    whole = layer.get_parameter(name).element_size() * math.prod(shard.global_shape)
    return whole // shard.global_shape[shard.dim] * length // world


def _shard(layer: ShardHolder) -> str:
    shard = next(iter(layer.shards.values()))  # the weight's shard is the first
    return f"{tuple(shard.shape)} of {shard.global_shape}"


def _traffic(product: str, collective: str, tensor: str, whole_bytes: int, world: int) -> Traffic:
    times = 2 if collective == "all_reduce" else 1
    return Traffic(product, collective, tensor, times * whole_bytes * (world - 1) // world)


def _embedding(name: str, layer: ParallelEmbedding, tokens: int) -> LayerReport:
    why = "a lookup moves its rows and computes nothing"
    whole_bytes = layer.weight.element_size() * tokens * layer.embedding_dim
    return LayerReport(
        name,
        type(layer).__name__,
        _shard(layer),
        layer.communicator.transport,
        {"forward": ProductReport(ATEN, why), "wgrad": ProductReport(ATEN, why)},
        {},
        (_traffic("forward", "all_reduce", "y", whole_bytes, layer.communicator.world_size),),
    )


def _experts(name: str, layer: ParallelExperts | ParallelExpertList, tokens: int) -> LayerReport:
    """Report a layer of experts. The number of experts of a token, and the load, are known once it was called."""
    place, kind = layer.place, f"{type(layer).__name__} {layer.extra_repr()}"
    traffic: list[Traffic] | None = None
    if layer.seen is not None:
        kind += f", tokens of the last call {', '.join(map(str, layer.seen.load()))}"
        row_bytes, chosen = layer.seen.row_bytes, layer.seen.chosen
        traffic = []
        for product in ("forward", "dgrad"):
            if place.tp is not None:
                sizes = {"x": row_bytes} | ({"w": chosen * layer.seen.weight_bytes} if product == "dgrad" else {})
                for tensor, size in sizes.items():
                    traffic.append(_traffic(product, "all_reduce", tensor, tokens * size, place.tp.world_size))
            if place.ep is not None:
                world = place.ep.world_size
                there = (
                    tokens
                    * chosen
                    * (2 * row_bytes + layer.seen.weight_bytes * layer.seen.weighted)
                    // (place.tp.world_size if place.tp and not place.inner else 1)
                )
                traffic.append(
                    _traffic(product, "all_to_all", "x, w and y" if layer.seen.weighted else "x and y", there, world)
                )
    own = ProductReport(ATEN, "the experts' own forward, on this rank's experts")
    computed = {"forward": own, "backward": own}
    fused = layer.fused() if isinstance(layer, ParallelExperts) else None
    if fused is not None:
        rows = tokens * layer.seen.chosen if layer.seen is not None else tokens
        computed = {
            product: ProductReport("weft kernel" if taken.kernel else ATEN, taken.reason)
            for product, taken in grouped_matmul.algorithms(fused, rows).items()
        }
    ranks = next(iter(layer.shards.values())).communicator
    sent = None if traffic is None else tuple(traffic)
    return LayerReport(name, kind, _shard(layer), ranks.transport, computed, {}, sent)


def _other(name: str, layer: ShardHolder) -> LayerReport:
    """Report a split layer of an unknown kind."""
    ranks = next(iter(layer.shards.values())).communicator
    kind = f"{type(layer).__name__} {getattr(layer, 'style', '')}".rstrip()
    computed = {
        product: ProductReport(ATEN, "weft has no kernel for this layer") for product in ("forward", "backward")
    }
    return LayerReport(name, kind, _shard(layer), ranks.transport, computed, {}, None)


def _communication(layer: ParallelLinear, tokens: int, b: torch.Tensor, how: str) -> Communication:
    if layer.place.units is not None:
        return Communication(how, _APART, "the sum is a tree over the units, which no product with communication keeps")
    try:
        decided = products.decide(layer.place, tokens, b, how)
    except ValueError as error:  # overlap="always" is impossible: the layer will raise this
        return Communication(how, "", str(error))
    return Communication(how, OVERLAPPED if decided.fused else _APART, decided.reason)


def _product(m: int, n: int, k: int, layout: str, weight: torch.Tensor, fused: str | None = None) -> ProductReport:
    if not kernel_choice.on_kernel(weight.device):
        return ProductReport(ATEN, kernel_choice.excluded(weight.device).reason)
    from weft.kernels import launch
    from weft.kernels.matmul_tiles import choose_tile
    from weft.tools import tuning

    problem = tuning.product(m, n, k, layout, weight.dtype, fused or "none")
    algorithm = kernel_choice.algorithm(problem, weight.device)
    if not algorithm.kernel:
        return ProductReport(ATEN, algorithm.reason)
    variant, origin = str(choose_tile(problem, weight.device).config), ""
    if weight.device.type == "cuda":
        origin = str(kernel_choice.origin(problem, launch.code_architecture(weight.device)))
    return ProductReport("weft kernel", algorithm.reason, variant, origin)
