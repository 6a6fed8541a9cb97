"""Every figure of docs/planner.md is what the planner says today."""

import re
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path

import pytest

from weft.tools.planner import Clock, Hardware, Job, Layout, MemoryModel, Model, mean_error, search, validate

PAGE = (Path(__file__).parents[2] / "docs" / "planner.md").read_text()


@cache
def found(model, gpus, hardware, sequence, batch, **more):
    return search(Job(Model.of(model), Hardware.of(hardware), sequence, batch, **more), gpus)


def best(search, keep):
    """The fastest plan whose layout is so."""
    return next(plan for plan in search.plans if keep(plan.layout))


def times(search, keep):
    """How much longer the fastest of those layouts takes than the fastest of all."""
    return f"{best(search, keep).step.seconds / search.plans[0].step.seconds:.2f}x"


def gib(job, layout):
    return f"{MemoryModel(job).memory(layout).total / 2**30:.0f} GiB"


def small():
    plans = found("gpt2", 8, "a100", 1024, 512)
    assert plans.plans[0].layout.dp == 8
    tensor, pipeline = times(plans, lambda layout: layout.tp == 8), times(plans, lambda layout: layout.pp == 8)
    return (
        f"GPT-2 on 8 A100: data parallel alone is fastest; tensor parallel alone takes {tensor}, a pipeline {pipeline}"
    )


def states():
    job = Job(Model.of("llama-3-8b"), Hardware.of("h100"), 8192, 128)
    layout = Layout(dp=2, cp=4)
    without, with_ = (gib(job, replace(layout, zero=zero)) for zero in (0, 1))
    seconds = [Clock(job).step(replace(layout, zero=zero)).seconds for zero in (1, 3)]
    return f"Llama 3 8B on 8 H100, dp=2 x cp=4: {without} without, {with_} with stage 1; stage 3 takes {seconds[1] / seconds[0]:.2f}x the time"


def tensor_in_a_node():
    plans = found("llama-3-70b", 64, "h200", 8192, 512)
    inside, outside = (
        best(plans, lambda layout, tp=tp: layout.tp == tp and layout.pp == layout.cp == 1) for tp in (8, 16)
    )
    waits = [plan.step.exposed_s / plan.step.seconds for plan in (inside, outside)]
    ratio = outside.step.seconds / inside.step.seconds
    return f"Llama 3 70B on 64 H200, dp x tp: tp=16, over two nodes, takes {ratio:.2f}x the time of tp=8 and waits {waits[1]:.0%} of it (tp=8: {waits[0]:.0%})"


def pipeline():
    plans = found("gpt-3-175b", 3072, "a100", 2048, 1536)
    assert plans.plans[0].layout.pp > 1
    return f"GPT-3 175B on 3,072 A100: the fastest layout without a pipeline takes {times(plans, lambda layout: layout.pp == 1)}"


def schedule():
    plan = found("gpt-3-175b", 3072, "a100", 2048, 1536).plans[0]
    plain = Clock(plan.job).step(replace(plan.layout, schedule="1f1b", chunks=1))
    assert plan.layout.schedule == "interleaved"
    return f"that run's best, pp={plan.layout.pp} with {plan.layout.micro_batches(plan.job)} micro-batches: a bubble of {plan.step.bubble:.0%} in {plan.layout.chunks} chunks a rank, {plain.bubble:.0%} with 1F1B"


def long_sequences():
    plans = found("llama-3-8b", 64, "h100", 131072, 32)
    assert plans.plans[0].layout.cp > 1
    return f"Llama 3 8B on 64 H100, sequences of 131,072: cp={plans.plans[0].layout.cp} is fastest; without context parallelism the fastest takes {times(plans, lambda layout: layout.cp == 1)}"


def recompute():
    job = Job(Model.of("llama-3-8b"), Hardware.of("h100"), 8192, 128)
    layouts = [Layout(dp=2, cp=4, zero=1, recompute=recompute) for recompute in ("none", "selective", "full")]
    none, *others = (Clock(job).step(layout).seconds for layout in layouts)
    kept = [MemoryModel(job).memory(layout).activations / 2**30 for layout in layouts]
    return f"Llama 3 8B again: selective {others[0] / none:.2f}x the time, full {others[1] / none:.2f}x; activations {kept[0]:.1f}, {kept[1]:.1f} and {kept[2]:.1f} GiB"


def network():
    times_ = []
    job = Job(Model.of("llama-3-8b"), Hardware.of("h100"), 8192, 128)
    for gb_s in (50, 1.25):
        slow = replace(job, hardware=job.hardware.with_network_of(gb_s))
        step = Clock(slow).step(Layout(dp=16, cp=2, tp=2, zero=1))
        times_.append(step.seconds)
    return f"Llama 3 8B on 64 H100, dp=16 x cp=2 x tp=2: a network of 10 Gbit/s a GPU in place of 400 takes {times_[1] / times_[0]:.2f}x the time"


def experts():
    """A mixture that fits with ep and no other split."""
    job = Job(Model.of("mixtral-8x7b"), Hardware.of("h200"), 4096, 256)
    whole, together = (Layout(dp=16, zero=1, ep=ep) for ep in (1, 8))
    step = Clock(job).step(together)
    exposed, even = step.exposed_s / step.seconds, Clock(replace(job, imbalance=1.0)).step(together).seconds
    return f"Mixtral 8x7B on 16 H200, dp=16: {gib(job, whole)} without ep, {gib(job, together)} with ep=8, which waits {exposed:.0%} of the time; a rank with 1.1 times the mean load costs {step.seconds / even - 1:.0%}"


FIGURES = [small, states, tensor_in_a_node, pipeline, schedule, long_sequences, recompute, network, experts]


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.__name__)
def test_a_figure_of_the_page_is_what_the_planner_says(figure):
    assert figure() in PAGE


def test_the_page_s_validation_table_is_what_the_planner_says():
    compared = validate(str(files("weft.tools.planner").joinpath("data/published_training_runs.csv")))
    papers = dict.fromkeys(row.source for row in compared)
    for source in papers:
        rows = [row for row in compared if row.source == source]
        line = f"| {source} | {len(rows)} | {mean_error(rows):.1%} |"
        assert line in PAGE, line
    assert f"{mean_error(compared):.1%} over {len(compared)} runs" in PAGE


MIXTRAL = Model.of("mixtral-8x7b")
GPT_OSS = Model(36, 2880, 2880, 64, 201088, kv_heads=8, head_dim=64, bias=True, experts=128, experts_per_token=4)
# Model, devices, global batch, layout, published TFLOP/s a device. All in bf16 with sequences of 4,096.
PUBLISHED_MIXTURES = {
    "Mixtral 8x7B, 64 H100, Megatron-Core 0.9": (
        MIXTRAL, "h100", 256, Layout(4, 16, schedule="interleaved", chunks=8, zero=1, ep=8), 468),
    "GPT-OSS 120B, 64 B200, Megatron Bridge 26.02": (
        GPT_OSS, "b200", 1280, Layout(dp=64, micro_batch=4, zero=1, ep=64), 219),
    "GPT-OSS 120B, 64 H100, Megatron Bridge 26.02": (
        GPT_OSS, "h100", 1280, Layout(4, 16, zero=1, ep=8), 163),
}  # fmt: skip


@pytest.mark.parametrize("run", PUBLISHED_MIXTURES)
def test_the_page_says_how_far_off_a_published_mixture_is(run):
    model, hardware, batch, layout, published = PUBLISHED_MIXTURES[run]
    job = Job(model, Hardware.of(hardware), 4096, batch, by_weft=False, imbalance=1.0)
    predicted = Clock(job).step(layout).flops_per_s / 1e12
    line = f"| {run} | {published} | {predicted:.0f} | {predicted / published - 1:+.0%} |"
    assert line in PAGE, line


def test_the_page_s_commands_run(capsys):
    from weft.cli import main

    commands = re.findall(r"^    weft plan (.+)$", PAGE, re.MULTILINE)
    assert len(commands) >= 3
    for command in commands:
        if "hw.json" not in command and "FILE" not in command:
            assert main(["plan", *command.split("#")[0].split()]) == 0, command
    assert "init_mesh" in capsys.readouterr().out


def test_the_page_s_hardware_file_is_read(tmp_path):
    path = tmp_path / "hw.json"
    path.write_text(re.search(r"```json\n(.+?)```", PAGE, re.DOTALL)[1])
    hardware = Hardware.of(path)
    assert (hardware.devices_per_node, hardware.full_speed_ranks) == (4, 2)
    named = set(re.findall(r"`(\w+)`", PAGE.split("Required\n")[1])) | set(re.findall(r'"(\w+)":', path.read_text()))
    from weft.tools.planner.hardware import _OPTIONAL, _REQUIRED

    assert {*_OPTIONAL, *_REQUIRED} <= named
