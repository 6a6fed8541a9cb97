"""The Python code that trains a model by a plan: the mesh and all decisions of the plan."""

from collections.abc import Iterator
from itertools import groupby

from weft.tools.planner.job import Job, Layout
from weft.tools.planner.step_memory import split_layers

_OPTIMIZERS = {
    "adamw": ("torch.optim.AdamW", ""),
    "adam": ("torch.optim.Adam", ""),
    "lamb": ("weft.LAMB", ""),
    "lars": ("weft.LARS", ""),
    "momentum": ("torch.optim.SGD", ", momentum=0.9"),
    "sgd": ("torch.optim.SGD", ""),
}
DIMENSIONS = ("pp", "dp", "cp", "tp")
_SCHEDULES = {"gpipe": "afab"}  # schedule -> weft.Pipeline's name for it


def dimensions(experts: bool) -> tuple[str, ...]:
    """Return the dimensions of a mesh; ep only if there are experts, folded out of dp."""
    return (*DIMENSIONS, "ep") if experts else DIMENSIONS


def init_mesh(layout: Layout) -> str:
    """Return the call that makes the layout's mesh."""
    return f"weft.init_mesh({', '.join(f'{name}={getattr(layout, name)}' for name in dimensions(layout.ep > 1))})"


def code(job: Job, layout: Layout) -> str:
    """Return lines that take a `model` and define `step(inputs, targets)`."""
    lines = ["import torch", "import weft"]
    if layout.tp > 1:
        lines.append("from weft.tensor_parallel.auto import automatic_plan")
    if _zero_by_torch(layout):
        lines.append("from torch.distributed.optim import ZeroRedundancyOptimizer")
    if job.precision != "fp32":
        kind = {"bf16": "bfloat16", "fp16": "float16"}[job.precision]
        lines += ["", f"# The plan counts weights of torch.{kind}, gradients and states of fp32."]
    lines += ["", f"mesh = {init_mesh(layout)}"]
    options = ["model", 'mesh["dp", "cp", "tp"]' if layout.zero > 1 else 'mesh["cp", "tp"]']
    if layout.tp > 1:
        options.append(f"plan=automatic_plan(model, {layout.tp}, loss_parallel=True)")
    if layout.cp > 1:
        options.append('context={"parts": True}')
    if layout.recompute != "none":
        options.append(f'recompute="{layout.recompute}"')
    if layout.zero > 1:
        options.append("zero=3" if layout.zero == 3 else 'zero={"stage": 3, "reshard_after_forward": False}')
    if len(options) > 2 or layout.ep > 1:
        lines += _call("model = weft.parallelize", options)
    return (
        "\n".join([*lines, *_loss(job, layout), *_wrapped(job, layout), *_optimizer(job, layout), *_step(job, layout)])
        + "\n"
    )


def _zero_by_torch(layout: Layout) -> bool:
    """Return whether torch shards the optimizer: ZeRO stage 1 over "cp" too, or under a pipeline."""
    return layout.zero == 1 and (layout.pp > 1 or layout.cp > 1)


def _call(begin: str, options: list[str]) -> list[str]:
    line = f"{begin}({', '.join(options)})"
    if len(line) <= 80:
        return [line]
    return [f"{begin}(", *(f"    {option}," for option in options), ")"]


def _loss(job: Job, layout: Layout) -> list[str]:
    added_up = layout.pp > 1  # Pipeline adds up over "dp", DataParallel averages
    share = job.global_batch if added_up else job.global_batch // layout.dp
    lines = ["", "", "def loss_of(logits, targets):  # a part of the mean over a step's tokens"]
    if layout.tp > 1:  # each rank has its part of the vocabulary's scores
        lines += _indented(
            _call("loss = weft.parallel_cross_entropy", ["logits", "targets", 'group=mesh["tp"]', 'reduction="sum"'])
        )
    else:
        flat = ["logits.flatten(0, 1)", "targets.flatten()", 'reduction="sum"']
        lines += _indented(_call("loss = torch.nn.functional.cross_entropy", flat))
    return [*lines, f"    return loss / ({share} * {job.sequence_length})", "", ""]


def _runs(sizes: list[int]) -> Iterator[str]:
    """Yield the elements of a list display, with equal neighbours joined."""
    for size, alike in groupby(sizes):
        count = len(list(alike))
        yield ", ".join([str(size)] * count) if count < 4 else f"*[{size}] * {count}"


def _wrapped(job: Job, layout: Layout) -> list[str]:
    if layout.pp > 1:
        stages = layout.pp * layout.chunks
        sizes = [split_layers(job.model.layers, stages, stage) for stage in range(stages)]
        options = [
            "model",
            "mesh",
            f'schedule="{_SCHEDULES.get(layout.schedule, layout.schedule)}"',
            f"microbatches={layout.micro_batches(job)}",
            "loss=loss_of",
            'reduction="sum"',
            f"balance=[{', '.join(_runs([1 + sizes[0], *sizes[1:-1], sizes[-1] + 2]))}]",
        ]
        if layout.chunks > 1:
            options.append(f"stages_per_rank={layout.chunks}")
        return [
            "# balance: blocks, the embedding as one layer, norm and output as two",
            *_call("model = weft.Pipeline", options),
        ]
    if layout.dp > 1 and layout.zero < 2:
        options = ["model", 'group=mesh["dp"]']
        if layout.zero and not _zero_by_torch(layout):
            options.append("shard_optimizer=True")
            if job.precision != "fp32":
                options.append("main_grad=True")
        return _call("model = weft.DataParallel", options)
    return []


def _optimizer(job: Job, layout: Layout) -> list[str]:
    kind, more = _OPTIMIZERS[job.optimizer]
    settings = f"lr=1e-3{more}"
    if _zero_by_torch(layout):
        ranks = 'mesh["dp", "cp"]._flatten("replicas")' if layout.cp > 1 else 'mesh["dp"]'
        options = ["model.parameters()", kind, f"process_group={ranks}.get_group()", settings]
        return _call("optimizer = ZeroRedundancyOptimizer", options)
    if layout.zero == 1:
        return _call("optimizer = model.optimizer", [kind, settings])
    return _call(f"optimizer = {kind}", ["model.parameters()", settings])


def _step(job: Job, layout: Layout) -> list[str]:
    shape = f"[{job.global_batch // layout.dp}, {job.sequence_length}]"
    lines = ["", "", f'def step(inputs, targets):  # {shape} each: this "dp" rank\'s sequences']
    body = []
    if layout.cp > 1:
        body += [
            "inputs, targets = (",
            '    weft.shard_sequence(x, dim=1, group=mesh["cp"])',
            "    for x in (inputs, targets)",
            ")",
        ]
    count = layout.micro_batches(job)
    body.append("optimizer.zero_grad()")
    if layout.pp > 1:
        body.append("model.step(inputs, targets)")
    elif count == 1:
        body.append("loss_of(model(inputs), targets).backward()")
    else:
        body.append(f"parts = zip(inputs.split({layout.micro_batch}), targets.split({layout.micro_batch}))")
        body.append("for number, (some, their) in enumerate(parts, 1):")
        if layout.dp > 1 and layout.zero < 2:  # gradients travel after the last
            body.append(f"    model.require_backward_grad_sync = number == {count}")
        body.append("    loss_of(model(some), their).backward()")
    return [*lines, *_indented([*body, "optimizer.step()"])]


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]
