"""The planner against the steps measured on the machine that the committed results are of: no clock runs here."""

import json
from pathlib import Path

from weft.bench import paradigms
from weft.planner import Hardware, Job, Model, search

RESULTS = Path(__file__).parent.parent / "bench" / "results" / "amd-epyc-2-cores"
DIMENSIONS = ("pp", "dp", "cp", "tp")


def measured():
    """Milliseconds a step of four ranks, by mesh and whether the optimizer is sharded; the fastest of each."""
    found = {}
    for row in json.loads((RESULTS / "paradigms.json").read_text())["rows"]:
        if row["world"] == 4 and row["paradigm"] != "layer-wise":
            sizes = dict(pair.split("=") for pair in row["mesh"].split())
            key = (tuple(int(sizes.get(name, 1)) for name in DIMENSIONS), "sharded" in row["paradigm"])
            found[key] = row["ours"]["p50_us"] / 1e3
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
    model = paradigms.Model
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
    job = Job(Model.of(str(tmp_path / "config.json")), hardware, paradigms.SEQUENCE, paradigms.BATCH, precision="fp32")
    chosen = search(job, 4).plans[0].layout
    mesh = (chosen.pp, chosen.dp, chosen.cp, chosen.tp)
    times = measured()
    time = times.get((mesh, chosen.zero > 0), times[mesh, False])
    assert time <= 1.05 * min(times.values()), (chosen, times)
