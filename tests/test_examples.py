"""What a newcomer runs: the README's lines, the example script in each of its ways, the demo, the bench.

One test runs it under torchrun, the others on ranks that are forked from here.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from scripts import run_script

ROOT = Path(__file__).parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
# As in a user's shell: a script finds the modules beside it.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}


def run(*command, **options):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=240, **options)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_readmes_lines_run(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len([line for line in code.splitlines() if line and not line.startswith("#")]) <= 10
    script = tmp_path / "this_file.py"
    script.write_text(code)
    run_script(script, ranks=2)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return train(tmp_path_factory.mktemp("alone"), None)


@pytest.fixture(scope="module")
def alone_in_units(tmp_path_factory):
    return train(tmp_path_factory.mktemp("units"), None, *UNITS)


def train(folder, ranks, *arguments):
    out = folder / "figures.json"
    options = ["--steps", "3", "--batch", "2", "--out", out, *arguments]
    run_script(ROOT / "examples" / "train_lm.py", *options, ranks=ranks)
    return json.loads(out.read_text())


def test_the_example_runs_under_torchrun(alone, tmp_path):
    out = tmp_path / "figures.json"
    options = ["--tp", "2", "--steps", "3", "--batch", "2", "--out", out]
    run(*TORCHRUN, ROOT / "examples" / "train_lm.py", *options, env=ENVIRONMENT)
    assert json.loads(out.read_text())["losses"] == pytest.approx(alone["losses"], abs=1e-4)


slow = pytest.mark.slow("examples", "pytorch_ext")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--tp", "2"],
        ["--tp", "2", "--backend", "gloo"],
        *(pytest.param([way, "2"], marks=slow) for way in ("--dp", "--cp", "--pp")),  # which are combined below
        ["--pp", "2", "--tp", "2", "--recompute", "selective"],
        pytest.param(["--dp", "2", "--cp", "2", "--recompute", "full"], marks=slow),
    ],
    ids=" ".join,
)
def test_the_example_trains_the_same_model_however_it_is_split(arguments, alone, tmp_path):
    ways = [arguments[at] for at in range(0, len(arguments), 2) if arguments[at] in ("--tp", "--dp", "--cp", "--pp")]
    figures = train(tmp_path, 2 ** len(ways), *arguments)
    assert figures["losses"] == pytest.approx(alone["losses"], abs=1e-4)
    assert figures["losses"][-1] < figures["losses"][0]
    assert len(figures["peak_memory_mb"]) == 2 ** len(ways)
    if "--tp" in arguments:  # with stages half of half the layers, and a copy of the tied embedding at both ends
        assert figures["parameters_per_rank"] < {1: 0.52, 2: 0.27}[len(ways)] * alone["parameters_per_rank"]


ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # in every process: the bits of layers that stay whole follow their number
UNITS = ["--invariant", "4", "--batch", "8", "--sequence", "32"]


@pytest.mark.parametrize(
    "arguments", [["--tp", "2"], *(pytest.param([way, "2"], marks=slow) for way in ("--dp", "--pp"))], ids=" ".join
)
def test_the_example_trains_to_the_same_bits_on_any_mesh(arguments, alone_in_units, tmp_path):
    figures = train(tmp_path, 2, *UNITS, *arguments)
    assert figures["losses"] == alone_in_units["losses"] and figures["hashes"] == alone_in_units["hashes"]


@pytest.mark.slow("examples", "pytorch_ext/data_parallel", "pytorch_ext/checkpoint")
def test_steps_of_eight_ranks_are_replayed_on_one(tmp_path):
    eight = [8, *UNITS, "--pp", "2", "--dp", "2", "--tp", "2", "--checkpoint", tmp_path / "run"]
    train(tmp_path, *eight, "--steps", "2")
    shutil.copytree(tmp_path / "run", tmp_path / "audit")
    more = ["--steps", "4", "--hash-every", "1"]
    figures = train(tmp_path, *eight, *more)
    replayed = train(tmp_path, None, *UNITS, "--checkpoint", tmp_path / "audit", *more)
    assert set(figures["hashes"]) == {"3", "4"} and figures["hashes"] == replayed["hashes"]


def machine(number, port, arguments, log):
    """Start torchrun with two ranks, as one of up to two machines; the first one has the rendezvous."""
    rendezvous = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=100"
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "2"]
    command += ["--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}"]
    command += [
        "--rdzv-conf",
        f"is_host={int(number == 0)},{rendezvous}",
        ROOT / "examples" / "train_lm.py",
        *arguments,
    ]
    return subprocess.Popen(command, env=ENVIRONMENT | ONE_THREAD, stdout=log, stderr=subprocess.STDOUT)


@pytest.mark.slow("examples", "pytorch_ext/data_parallel", "pytorch_ext/checkpoint")
def test_a_run_survives_a_machine_and_ends_with_the_same_bits(tmp_path):
    steps = ["--steps", "6", "--tp", "2", "--dp", "0", "--save-every", "1", "--checkpoint", tmp_path / "run"]
    of_one = train(tmp_path, None, *UNITS, "--steps", "6")
    with socket.socket() as free, open(tmp_path / "log", "w") as log:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
        free.close()
        out = tmp_path / "elastic.json"
        machines = [machine(number, port, [*UNITS, *steps, "--out", out], log) for number in range(2)]
        try:
            begun = time.monotonic()
            while not (tmp_path / "run" / "manifest.json").exists():
                assert machines[0].poll() is None and time.monotonic() < begun + 150, (tmp_path / "log").read_text()
                time.sleep(0.1)
            lost = machines[1].pid
            ranks = Path(f"/proc/{lost}/task/{lost}/children").read_text().split()
            for process in (*map(int, ranks[:1]), lost, *map(int, ranks[1:])):  # a rank first
                os.kill(process, signal.SIGKILL)
            assert machines[0].wait(200) == 0, (tmp_path / "log").read_text()
        finally:
            for process in machines:
                process.kill()
                process.wait()
    text = (tmp_path / "log").read_text()
    assert re.search(r"continues at step [2-6] on 2 ranks", text) and "4 ranks" not in text, text
    figures = json.loads(out.read_text())
    assert figures["losses"] == of_one["losses"] and figures["hashes"] == of_one["hashes"]


def example(name, *arguments, ranks=2):
    return run_script(ROOT / "examples" / f"{name}.py", *arguments, ranks=None if ranks == 1 else ranks)


def test_a_plan_by_hand_gives_the_same_model():
    text = example("split_by_hand")
    assert "blocks.5.down: ParallelLinear row" in text and "(512, 256) of (1024, 256) on this rank" in text
    loss, whole, gap = re.search(
        r"loss ([\d.]+), of the whole model ([\d.]+); gradients differ by (\S+)", text
    ).groups()
    assert float(loss) == pytest.approx(float(whole), abs=1e-5) and float(gap) < 1e-4


def test_an_adapter_is_the_same_over_two_ranks_as_in_one_process(tmp_path):
    pytest.importorskip("peft")
    from safetensors.torch import load_file

    texts = [example("finetune_lora", "--steps", "3", "--out", tmp_path / "1", ranks=1)]
    texts.append(example("finetune_lora", "--steps", "3", "--out", tmp_path / "2", "--tp", "2"))
    first, second = ([float(loss) for loss in re.findall(r"loss ([\d.]+)", text)] for text in texts)
    assert first == pytest.approx(second, abs=1e-4) and first[-1] < first[0]
    one, two = (load_file(tmp_path / number / "adapter_model.safetensors") for number in "12")
    assert one.keys() == two.keys()
    assert all(two[name].numpy() == pytest.approx(one[name].numpy(), abs=2e-3) for name in one)


def test_two_ranks_generate_the_tokens_of_one(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 46, "num_hidden_layers": 2, "num_attention_heads": 4}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=128, **sizes)).save_pretrained(tmp_path)
    for more in ([], ["--sample"]):
        one, two = (example("generate", tmp_path, "--tokens", "8", *more, ranks=ranks) for ranks in (1, 2))
        assert re.search("tokens: .*", one)[0] == re.search("tokens: .*", two)[0]


@pytest.mark.slow("examples", "pytorch_ext/context_parallel")
def test_a_long_sequence_is_shared():
    text = example("long_sequence", "--sequence", "256", "--steps", "2")
    first, last = (float(loss) for loss in re.findall(r"loss ([\d.]+), 128 of 256 bytes here", text))
    assert last < first


@pytest.mark.slow("examples", "pytorch_ext/pipeline")
def test_a_pipeline_prints_its_timeline():
    text = example("pipeline", "--schedule", "afab", "--steps", "2")
    assert "afab: 2 ranks, 2 stages, 4 micro-batches" in text
    first, last = (float(loss) for loss in re.findall(r"loss ([\d.]+)", text))
    assert last < first


@pytest.mark.slow("examples", "pytorch_ext/checkpoint")
def test_a_checkpoint_goes_on_at_another_mesh(tmp_path):
    sums = []
    example("other_mesh", "--tp", "2", "--save", tmp_path / "saved")
    for ranks, arguments in ((2, ["--dp", "2"]), (2, ["--tp", "2"]), (1, [])):
        text = example("other_mesh", "--load", tmp_path / "saved", *arguments, ranks=ranks)
        sums.append(re.search(r"whose sum is (\S+)", text)[1])
    assert len(set(sums)) == 1


@slow
def test_the_demo_compares_the_runs_and_draws_them(tmp_path):
    text = run(sys.executable, ROOT / "examples" / "demo.py", "--steps", "2", "--all", "--out", tmp_path)
    rows = re.findall(
        r"^(\S.*?)  +[124] +\d+ +([\d.]+) +[\d,]+ +\d+ +[\d.]+ +(\S+)  ([0-9a-f]{8})$", text, re.MULTILINE
    )
    assert len(rows) == 10 and rows[0][:2] == ("one process", "1.00")
    in_units = [(difference, weights) for name, _, difference, weights in rows if "invariant" in name]
    assert len(in_units) == 6 and len(set(in_units)) == 2, "sequences in units are sums of their own"
    assert {difference for difference, _ in in_units} == {"0"}
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow("bench", "pytorch_ext/nn")
def test_the_bench_prints_ours_beside_the_peer_and_saves_both(tmp_path):
    out = tmp_path / "linear.json"
    text = run(sys.executable, "-m", "weft", "bench", "linear", "--rounds", "2", "--json", out)
    assert "64/256/16" in text and "DTensor over gloo" in text
    results = json.loads(out.read_text())
    assert results["environment"]["torch"] and results["command"].startswith("weft bench linear")
    for row in results["rows"]:
        assert row["times"]["weft"]["p50_us"] > 0 and row["error"] <= 1
        assert ("DTensor over gloo" not in row["times"]) == (row["shape"] == "255/1021/63 fp32")
