"""The planner against the steps measured on the machine that the committed results are of: no clock runs here."""

import json
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest

from weft.bench import machine, paradigms
from weft.bench.suites import RefusedError
from weft.tools.planner import Clock, Hardware, Job, Layout, Model, search

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "amd-epyc-2-cores"
DIMENSIONS = ("pp", "dp", "cp", "tp")


def measured():
    """Milliseconds a step of four ranks, by mesh and whether the optimizer is sharded; the fastest of each."""
    found = {}
    for row in json.loads((RESULTS / "paradigms.json").read_text())["rows"]:
        if row["world"] == 4 and row["paradigm"] != "layer-wise":
            sizes = dict(pair.split("=") for pair in row["mesh"].split())
            key = (tuple(int(sizes.get(name, 1)) for name in DIMENSIONS), "sharded" in row["paradigm"])
            found[key] = row["times"]["ours"]["p50_us"] / 1e3
    return found


def test_every_mesh_of_four_ranks_is_measured():
    sizes = {mesh for mesh, _ in measured()}
    assert sizes == {
        (pp, dp, cp, 4 // (pp * dp * cp))
        for pp in (1, 2, 4)
        for dp in (1, 2, 4)
        for cp in (1, 2, 4)
        if 4 % (pp * dp * cp) == 0
    }


def test_the_chosen_plan_is_within_five_percent_of_the_best_measured(tmp_path):
    model = paradigms.SmallModel
    width = 2 * model.KV_HEADS * model.HEAD
    config = {
        "model_type": "llama",
        "hidden_size": width,
        "num_hidden_layers": paradigms.BLOCKS,
        "num_attention_heads": 2 * model.KV_HEADS,
        "num_key_value_heads": model.KV_HEADS,
        "intermediate_size": model.HIDDEN,
        "vocab_size": model.WORDS,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    hardware = Hardware.of(str(RESULTS / "hw.json"))
    planned = Model.of(str(tmp_path / "config.json"))
    # As they are measured: weft.parallelize leaves what stands between the layers whole unless it is asked.
    job = Job(planned, hardware, paradigms.SEQUENCE, paradigms.BATCH, precision="fp32", sequence_parallel=False)
    chosen = search(job, 4).plans[0].layout
    mesh = (chosen.pp, chosen.dp, chosen.cp, chosen.tp)
    times = measured()
    time = times.get((mesh, chosen.zero > 0), times[mesh, False])
    assert time <= 1.05 * min(times.values()), (chosen, times)


def attention_times(product_s, score_s, block):
    """Of bench's shapes, as the planner counts them: forward, and backward that takes 2.5 times as long."""
    return {
        shape: 3.5 * prod(shape[:3]) * (shape[2] + block) / 2 * (score_s + product_s * shape[3])
        for shape in machine.ATTENTION
    }


def test_attention_s_constants_are_found_from_the_times_that_they_make():
    found = machine.fit_attention(attention_times(7e-11, 1.5e-9, 120))
    assert (found.product_s, found.score_s, found.block) == pytest.approx((7e-11, 1.5e-9, 120))
    assert machine.fit_attention(attention_times(7e-11, 0, 0)).score_s == pytest.approx(0, abs=1e-15)
    with pytest.raises(RefusedError, match="wider heads took no longer"):
        machine.fit_attention(attention_times(0, 1.5e-9, 120))


def test_a_turn_is_what_each_meeting_but_the_last_adds():
    rounds = [
        {"each": [400.0, 500.0, 450.0], "last": [100.0, 150.0, 140.0]},
        {"each": [100.0] * 3, "last": [150.0] * 3},
    ]
    assert machine.turn(rounds) == (450 - 150) / (machine._PRODUCTS - 1)
    assert machine.turn([{"each": [1.0], "last": [2.0]}]) == 0


def test_turns_are_taken_where_ranks_outnumber_cores_and_only_inside_of_layers():
    hardware = replace(Hardware.of(str(RESULTS / "hw.json")), turn_s=1.0, full_speed_ranks=2)
    job = Job(Model(8, 256, 768, 8, 256), hardware, 256, 8, precision="fp32", sequence_parallel=False)
    without = Job(job.model, replace(hardware, turn_s=0.0), 256, 8, precision="fp32", sequence_parallel=False)

    def turns(layout):
        return Clock(job).step(layout).seconds - Clock(without).step(layout).seconds

    assert turns(Layout(dp=4, micro_batch=2)) == 0 and turns(Layout(tp=2, micro_batch=8)) == 0
    assert turns(Layout(dp=2, tp=2, micro_batch=4)) == pytest.approx(8 * 4)
    assert turns(Layout(tp=4, micro_batch=8)) == pytest.approx(2 * 8 * 4)
    assert turns(Layout(cp=4, micro_batch=8)) == pytest.approx(2 * 8 * 6)
