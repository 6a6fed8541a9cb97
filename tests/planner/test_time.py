"""The planner's time: against hand-computed values, measured layers of Korthikanti et al. 2022, and its own laws."""

from dataclasses import replace
from math import log, sqrt

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.tools.planner import Clock, Hardware, Job, Layout, MemoryModel, Model, plan, search
from weft.tools.planner.layout_search import meshes
from weft.tools.planner.rates import exchange_s, gather_s, matmul_s, memory_s, send_s
from weft.tools.planner.step import NODE_SPREAD, beside

# Round numbers, no latencies: everything can be computed by hand.
ROUND = Hardware(
    "round",
    memory_bytes=1e15,
    peak_flops={"fp32": 1e12, "bf16": 1e12},
    memory_bytes_s=1e12,
    node_bytes_s=1e9,
    network_bytes_s=1e8,
    devices_per_node=4,
    node_latency_s=0.0,
    network_latency_s=0.0,
    launch_s=0.0,
)
GPT = Model(8, 1000, 4000, 10, 5000, gated_mlp=False, bias=True, positions=1)


def test_a_product_takes_the_longer_of_arithmetic_and_memory():
    assert matmul_s(ROUND, 1e12, 2, 1000, 1000, 1000) == 2e9 / 1e12
    assert matmul_s(ROUND, 1e12, 2, 1, 1000, 1000) == 2 * (1000 + 1000 * 1000 + 1000) / 1e12
    assert memory_s(ROUND, 3e12) == 3


def test_a_product_of_few_tiles_runs_further_from_the_peak():
    gpu = replace(ROUND, processors=100)
    rates = [2 * size**3 / matmul_s(gpu, 1e12, 2, size, size, size) for size in (512, 1024, 4096, 16384)]
    assert rates == sorted(rates) and rates[-1] < 1e12


def test_collectives_take_their_bytes_over_the_slowest_link():
    assert gather_s(ROUND, 4e9, 1, 1) == 0
    assert gather_s(ROUND, 4e9, 4, 1) == 3  # three quarters of 4 GB at 1 GB/s
    # Eight ranks side by side are two nodes of four: seven eighths of 8 GB over four network devices of 0.1 GB/s.
    assert gather_s(ROUND, 8e9, 8, 1) == pytest.approx(7 / 0.4)
    # Eight ranks, each in a node of its own.
    assert gather_s(ROUND, 8e9, 8, 4) == pytest.approx(70)
    assert send_s(ROUND, 1e9, 2) == 1 and send_s(ROUND, 1e9, 4) == 10
    slow = replace(ROUND, node_latency_s=1.0, network_latency_s=10.0)
    assert gather_s(slow, 0, 16, 1) == 4 * 3 * 1 + 3 * 10  # three hops in each of four nodes, three between them


def test_an_exchange_sends_through_link_and_network_at_once():
    hardware = Hardware.of("h100")
    inside = exchange_s(hardware, 8e9, 8, 1)
    assert inside == pytest.approx(7e9 / hardware.node_bytes_s + 7 * hardware.node_latency_s)
    outside = exchange_s(hardware, 8e9, 8, 8)  # each member in a node of its own
    assert outside == pytest.approx(7e9 / hardware.network_bytes_s, rel=1e-3)
    assert exchange_s(hardware, 8e9, 16, 1) == pytest.approx(4e9 / hardware.network_bytes_s, rel=1e-3)
    assert exchange_s(hardware, 8e9, 1, 1) == 0


def test_grouped_products_take_the_time_of_one_and_read_every_matrix():
    hardware = replace(Hardware.of("h100"), processors=0)  # without tiles
    sizes = hardware, 1e15, 2
    assert matmul_s(*sizes, 1000, 4096, 4096, 8) == pytest.approx(matmul_s(*sizes, 8000, 4096, 4096))
    few = matmul_s(*sizes, 1, 4096, 4096, 8)
    assert few == pytest.approx(8 * 2 * (4096 * 4096 + 2 * 4096) / hardware.memory_bytes_s)


def test_uneven_experts_and_a_slow_network_take_longer():
    model = Model.of("mixtral-8x7b")
    job = Job(model, Hardware.of("h100"), 4096, 64, imbalance=1.0)
    layout = Layout(dp=16, ep=8, zero=1)
    even = Clock(job).step(layout)
    uneven = Clock(replace(job, imbalance=1.5)).step(layout)
    assert 1.2 < uneven.seconds / even.seconds < 1.5  # the experts are most of the arithmetic
    slow = Clock(replace(job, hardware=job.hardware.with_network_of(5))).step(replace(layout, ep=16))
    assert slow.exposed_s > 2 * even.exposed_s
    assert even.flops_per_s == Clock(job).flops * 4096 * 64 / even.seconds / 16


def test_a_mixture_is_planned_with_its_experts_over_ep():
    found = search(Job(Model.of("mixtral-8x7b"), Hardware.of("h100"), 4096, 256), 16)
    chosen = found.plans[0]
    assert chosen.layout.ep > 1 and chosen.mesh["ep"] == chosen.layout.ep
    assert f"ep={chosen.layout.ep}" in chosen.init_mesh and 'mesh["cp", "tp"]' in chosen.code
    for layout in (other.layout for other in found.plans):
        assert layout.dp % layout.ep == 0 and layout.ep * layout.tp <= 8
        assert layout.ep == 1 or layout.zero <= (0 if layout.pp > 1 else 1)


def test_communication_beside_arithmetic_costs_part_of_its_time():
    assert beside(10, 0) == 10
    assert beside(10, 100) == pytest.approx(4) and beside(10, 5) == pytest.approx(5 + 2)


def pipeline(schedule, chunks=1, pp=4, layers=24):
    """A pipeline of equal stages: next to no output layer, and links that take no time."""
    fast = replace(ROUND, node_bytes_s=1e30, network_bytes_s=1e30, devices_per_node=pp)
    model = replace(GPT, layers=layers, vocab=1)
    clock = Clock(Job(model, fast, 100, 64, "bf16", optimizer="sgd"))
    return clock.step(Layout(pp=pp, micro_batch=4, schedule=schedule, chunks=chunks))


def test_the_bubble_is_the_formula_of_narayanan_et_al():
    m, p = 16, 4
    for schedule, chunks in (("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("interleaved", 6)):
        over_work = (p - 1) / chunks / m
        assert pipeline(schedule, chunks).bubble == pytest.approx(over_work / (1 + over_work), rel=0.02)
    # Zero-bubble H1 leaves what its weights' gradients do not fill: about a third (Qi et al. 2023, table 1).
    assert 0.2 < pipeline("zero-bubble").bubble / pipeline("1f1b").bubble < 0.5
    assert pipeline("zero-bubble", pp=7, layers=8).bubble > 0  # unequal stages wait for the longest, not here


def test_zero_bubble_fills_with_no_more_than_there_is():
    # One micro-batch: the stages before the last do not wait for weights' gradients, and nothing else fills the rest.
    job = Job(replace(GPT, vocab=1), replace(ROUND, node_bytes_s=1e30, devices_per_node=4), 100, 4, optimizer="sgd")
    plain, zero = (Clock(job).step(Layout(pp=4, micro_batch=4, schedule=name)) for name in ("1f1b", "zero-bubble"))
    weights = Clock(job).block(1, 1, 4, "none").weight * GPT.layers / 4
    assert plain.seconds - zero.seconds == pytest.approx(3 * weights)
    # Weights' gradients that take most of the time, since they are short of tiles: idle time does not go below none.
    thin = Job(Model(64, 96, 4096, 3, 10, gated_mlp=False), Hardware.of("h200"), 512, 256, "fp32")
    assert Clock(thin).step(Layout(pp=8, tp=3, micro_batch=16, schedule="zero-bubble")).bubble == 0


# Milliseconds of forward and backward of a layer of the 22B model on eight A100: Korthikanti et al. 2022, table 4.
LAYER_TIMES = [
    (False, "none", 7.7, 11.9),
    (True, "none", 7.2, 11.8),
    (False, "full", 7.7, 19.5),
    (False, "selective", 7.7, 13.2),
    (True, "selective", 7.2, 13.1),
]


@pytest.mark.parametrize(("sequence_parallel", "recompute", "forward_ms", "backward_ms"), LAYER_TIMES)
def test_a_layer_takes_what_korthikanti_et_al_measured(sequence_parallel, recompute, forward_ms, backward_ms):
    model = Model(48, 6144, 24576, 64, 51200, gated_mlp=False, bias=True, dropout=True, positions=2048)
    job = Job(
        model, Hardware.of("a100"), 2048, 4, fused_attention=False, sequence_parallel=sequence_parallel, overlap="some"
    )
    block = Clock(job).block(1, 8, 4, recompute)
    assert block.forward_all * 1e3 == pytest.approx(forward_ms, rel=0.03)
    assert block.backward_all * 1e3 == pytest.approx(backward_ms, rel=0.06)


def test_a_step_waits_for_the_slowest_node():
    clock = Clock(Job(GPT, replace(ROUND, network_bytes_s=1e30, node_bytes_s=1e30), 128, 64))
    one, four = clock.step(Layout(dp=4, micro_batch=4)), clock.step(Layout(dp=16, micro_batch=4))
    gradients_alike = clock.synchronisation(1, 4, 1, 1, 0)
    assert gradients_alike == pytest.approx(clock.synchronisation(1, 16, 1, 1, 0))
    update = gradients_alike[1]
    late = 1 + NODE_SPREAD * sqrt(2 * log(4))
    assert four.seconds == pytest.approx(((one.seconds - update) / 4 + update) * late, rel=1e-6)


def test_ranks_that_share_cores_take_as_long_as_the_cores_take_for_all():
    alone = replace(ROUND, node_bytes_s=1e30)
    shared = replace(alone, full_speed_ranks=2)
    job = Job(GPT, alone, 64, 8)
    for layout in (Layout(dp=4), Layout(pp=4, micro_batch=1)):
        free = Clock(job).step(layout)
        pressed = Clock(replace(job, hardware=shared)).step(layout)
        busy = free.seconds * (1 - free.bubble)
        # A pipeline's first stage alone has work at the start and at the end: of one micro-batch, half of the cores.
        filling = busy / (layout.micro_batches(job) * 2) if layout.pp > 1 else 0
        assert pressed.seconds == pytest.approx(max(free.seconds, 2 * busy + filling), rel=0.02)
        assert pressed.seconds > 2 * busy * (1 - 1e-9)


@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from(["memory_bytes_s", "node_bytes_s", "network_bytes_s"]),
    st.builds(
        Layout,
        st.sampled_from([1, 2, 8]),
        st.sampled_from([1, 2, 8]),
        st.sampled_from([1, 2]),
        st.sampled_from([1, 2, 8]),
        st.sampled_from([1, 2, 4]),
        zero=st.sampled_from([0, 1, 2, 3]),
        recompute=st.sampled_from(["none", "selective", "full"]),
    ),
    st.sampled_from(["none", "some", "all"]),
)
def test_faster_links_and_memory_and_more_overlap_never_take_longer(field, layout, overlap):
    job = Job(replace(GPT, heads=40, head_dim=25), Hardware.of("a100"), 512, 64, overlap=overlap)
    faster = replace(job.hardware, **{field: 2 * getattr(job.hardware, field)})
    seconds = Clock(job).step(layout).seconds
    assert Clock(replace(job, hardware=faster)).step(layout).seconds <= seconds * (1 + 1e-12)
    assert Clock(replace(job, overlap="none")).step(layout).seconds >= seconds * (1 - 1e-12)
    full, none = (Clock(job).step(replace(layout, recompute=recompute)).seconds for recompute in ("full", "none"))
    assert none < full


def test_a_small_model_that_fits_is_trained_data_parallel():
    for hardware in ("v100", "a100", "h100"):
        first = plan("gpt2", gpus=8, hardware=hardware, sequence_length=1024, global_batch=512, precision="fp16")[0]
        assert first.mesh == {"pp": 1, "dp": 8, "cp": 1, "tp": 1}


def test_plans_are_ranked_fit_and_use_every_device():
    plans = plan("llama-3-70b", gpus=96, hardware="h100", sequence_length=8192, global_batch=192)
    assert len({tuple(found.mesh.values()) for found in plans}) == len(plans) > 10
    for found in plans:
        assert found.layout.ranks == 96 and found.memory.total <= found.job.hardware.memory_bytes
        assert found.layout.dp * found.layout.micro_batch * found.layout.micro_batches(found.job) == 192
        assert 0 < found.step.mfu < 1 and 0 <= found.step.bubble < 1
    assert plans[-1].step.seconds > 1.5 * plans[0].step.seconds
    assert plans[0].torchrun.startswith("torchrun --nnodes 12 ") and plans[0].init_mesh.startswith("weft.init_mesh(pp=")


def test_pruning_loses_nothing():
    """The search skips what cannot be the best of its mesh: looking at everything finds nothing faster."""
    job = Job(Model.of("llama-3-8b"), Hardware.of("a100"), 4096, 64)
    found = search(job, 16)
    best = {tuple(chosen.mesh.values()): chosen.step.seconds for chosen in found.plans}
    scale, clock = MemoryModel(job), Clock(job)
    for mesh in meshes(job, 16):
        for size in (1, 2, 4, 8, 16, 32):
            for recompute in ("none", "selective", "full"):
                for zero in range(1 if mesh.data_ranks == 1 else 2 if mesh.pp > 1 else 4):
                    layout = replace(mesh, micro_batch=size, recompute=recompute, zero=zero)
                    if (64 // mesh.dp) % size == 0 and scale.memory(layout).total <= job.hardware.memory_bytes:
                        assert clock.step(layout).seconds >= 0.97 * best[mesh.pp, mesh.dp, mesh.cp, mesh.tp]


def test_every_family_that_was_not_chosen_is_given_a_reason():
    found = search(Job(Model.of("llama-3-8b"), Hardware.of("h100"), 8192, 128), 16)
    reasons = {rejection.family: rejection.why for rejection in found.rejected}
    chosen = " x ".join(name for name, size in found.plans[0].mesh.items() if size > 1)
    mixed = {name for name in reasons if set(name.split(" x ")) <= {"pp", "dp", "cp", "tp"}}
    assert len(mixed) == 14 and chosen not in mixed
    assert {"recompute full", "ZeRO stage 0"} <= set(reasons)
    assert all("\n" not in why and why for why in reasons.values())
    assert "does not fit" in reasons["ZeRO stage 0"]


@pytest.mark.parametrize(("gpus", "a_node"), [(1, 8), (7, 8), (16, 8), (12, 8), (12, 5)])
def test_the_torchrun_line_starts_as_many_ranks_as_were_planned(gpus, a_node):
    line = plan("gpt2", gpus=gpus, hardware="h100", sequence_length=256, global_batch=84, gpus_per_node=a_node)[
        0
    ].torchrun
    nodes = int(line.split("--nnodes ")[1].split()[0]) if "--nnodes" in line else 1
    here, *last = (int(part.split()[0]) for part in line.split("--nproc-per-node ")[1:])
    assert (nodes - 1) * here + (last or [here])[0] == gpus and here <= a_node


def test_what_does_not_fit_says_by_how_much_and_what_would():
    with pytest.raises(ValueError) as caught:
        plan("llama-3-70b", gpus=8, hardware="a100-40gb", sequence_length=8192, global_batch=64)
    text = str(caught.value)
    assert "does not fit on 8 x a100-40gb" in text and "more than the 39.4 GiB there are" in text
    assert "It would fit with 48 devices or b200" in text
    with pytest.raises(ValueError, match="It would fit with a sequence of 238418"):
        plan("llama-3-8b", gpus=8, hardware="h100", sequence_length=10**12, global_batch=64)
    plan("llama-3-70b", gpus=48, hardware="a100-40gb", sequence_length=8192, global_batch=96)
    with pytest.raises(ValueError, match=r"no mesh is possible: no such mesh of 997: pp <= .*shares a factor with 997"):
        plan("llama-3-70b", gpus=997, hardware="h100", sequence_length=128, global_batch=64)
    for name in ("gpus", "sequence_length", "global_batch", "gpus_per_node"):
        for value in (1.5, "8", True):
            wrong = {"gpus": 1, "hardware": "h100", "sequence_length": 8, "global_batch": 8, name: value}
            with pytest.raises(ValueError, match=f"{name}={value!r} must be a whole number"):
                plan("gpt2", **wrong)
    with pytest.raises(TypeError, match="hardware for the planner is a preset's name, .* and not a dict"):
        plan("gpt2", gpus=1, hardware={}, sequence_length=8, global_batch=8)
    for wrong, message in (({"gpus": 0}, "gpus=0"), ({"recompute": "some"}, "recompute='some' is not one of none, ")):
        with pytest.raises(ValueError, match=message):
            plan("gpt2", **({"gpus": 1, "hardware": "h100", "sequence_length": 8, "global_batch": 8} | wrong))
