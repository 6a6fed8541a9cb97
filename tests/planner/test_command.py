"""`weft plan` from end to end, where torch cannot be imported."""

import json
import subprocess
import sys
from importlib.resources import files

import pytest

WITHOUT = "import sys; sys.modules.update(dict.fromkeys(['torch', 'triton', 'numpy', 'safetensors']))\n"
PUBLISHED = str(files("weft.tools.planner").joinpath("data/published_training_runs.csv"))
LLAMA = ["llama-3-8b", "--gpus", "16", "--hardware", "h100", "--sequence-length", "8192", "--global-batch", "128"]


def weft(*arguments, code=0):
    main = f"{WITHOUT}from weft.cli import main; sys.exit(main({list(arguments)!r}))"
    done = subprocess.run([sys.executable, "-c", main], capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout if code == 0 else done.stderr


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_reader_who_leaves_gets_no_traceback(options):
    main = f"from weft.cli import main; import sys; sys.exit(main({['plan', *LLAMA, *options]!r}))"
    words = subprocess.Popen([sys.executable, "-c", main], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    words.stdout.close()
    assert (words.stderr.read(), words.wait()) == ("", 1)


@pytest.mark.parametrize("command", [["bench", "collectives"], ["tune", "matmul"]])
def test_a_command_that_needs_torch_says_so(command):
    assert weft(*command, code=2) == "weft: no module named 'torch', which this command needs: install it\n"


def test_the_arithmetic_imports_the_standard_library_only():
    code = "import sys, weft.tools.planner; print({name.split('.')[0] for name in sys.modules} - set(sys.stdlib_module_names))"
    before = "import sys; print({name.split('.')[0] for name in sys.modules} - set(sys.stdlib_module_names))"
    loaded, site = (
        eval(subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout)
        for text in (code, before)
    )
    assert loaded - site == {"weft"}


def test_a_plan_is_a_table_reasons_and_the_commands_that_start_it():
    words = weft("plan", *LLAMA)
    for heading in ("TFLOP/s", "MFU", "bubble", "waits", "optimizer", "activations"):
        assert heading in words
    assert "Not chosen:\n  pp " in words
    assert "torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint $HOST:29500 --nproc-per-node 8 train.py" in words
    assert "mesh = weft.init_mesh(pp=" in words
    assert "selective computes again its attention and MLP" in " ".join(words.split())


def test_no_digit_is_cut_at_80_columns(monkeypatch, capsys):
    from rich.console import Console

    from weft.cli import main
    from weft.tools.planner import plan_command

    monkeypatch.setattr(plan_command, "_console", lambda: Console(width=80))
    gpt = ["gpt-3-175b", "--gpus", "3072", "--hardware", "a100", "--sequence-length", "2048", "--global-batch", "1536"]
    mixtral = [
        "mixtral-8x7b",
        "--gpus",
        "16",
        "--hardware",
        "h100",
        "--sequence-length",
        "4096",
        "--global-batch",
        "256",
    ]
    for arguments in (LLAMA, gpt, mixtral):
        assert main(["plan", *arguments, "--top", "5"]) == 0
        words = capsys.readouterr().out
        assert max(map(len, words.splitlines())) <= 80, words
        words = words.partition("TFLOP/s per device")[0]
        rows = [line.split() for line in words.splitlines() if line[:3].strip().isdigit()]
        assert len(rows) == 10, words
        assert [row[0] for row in rows] == list("12345" * 2), words
        assert "…" not in words
        assert all(len(row) == 9 for row in rows[5:]), words


def test_experts_are_named_with_what_a_token_uses():
    arguments = ["mixtral-8x7b", "--gpus", "16", "--hardware", "h100", "--sequence-length", "4096"]
    words = weft("plan", *arguments, "--global-batch", "256", "--imbalance", "1.5")
    assert "46.70B parameters; 45.10B in 8 experts a layer, 12.88B active" in words and "imbalance 1.5" in words
    assert "pp dp cp tp ep" in words and "\n  dp x ep " in words
    message = weft("plan", *arguments, "--global-batch", "256", "--imbalance", "0.5", code=2)
    assert "weft plan: imbalance=0.5 must be at least 1" in message


def test_a_leaner_way_is_called_so():
    from dataclasses import replace

    from weft import plan
    from weft.tools.planner.layout_search import Plan, _slower

    chosen = plan("gpt2", gpus=2, hardware="a100", sequence_length=512, global_batch=8)[0]
    memory = replace(chosen.memory, activations=chosen.memory.activations - 0.2 * chosen.memory.total)
    leaner = Plan(chosen.job, chosen.layout, memory, chosen.step)
    assert _slower(leaner, chosen).startswith("leaner (1.000x the time, 0.80x the memory)")
    assert _slower(chosen, leaner).startswith("no faster (1.000x the time, 1.25x the memory)")


def test_json_is_the_function_s_plans():
    words = json.loads(weft("plan", *LLAMA, "--json", "--top", "3", "--precision", "fp16", "--recompute", "full"))
    from weft import plan

    plans = plan(
        "llama-3-8b",
        gpus=16,
        hardware="h100",
        sequence_length=8192,
        global_batch=128,
        precision="fp16",
        recompute="full",
    )
    assert words["plans"] == [json.loads(json.dumps(found.as_dict())) for found in plans[:3]]
    assert {found["recompute"] for found in words["plans"]} == {"full"}
    assert all(set(rejection) == {"family", "why"} for rejection in words["rejected"])
    first = words["plans"][0]
    assert sum(size for name, size in first["memory_bytes"].items() if name != "total") == pytest.approx(
        first["memory_bytes"]["total"]
    )


def test_what_nobody_gives_is_taken_by_default_and_named():
    words = weft("plan", "meta-llama/Llama3-8B", "--gpus", "16", "--top", "1")
    taken = "By default: --hardware h100, --sequence-length 8192 (the model's own), --global-batch 512."
    assert words.splitlines()[0] == taken and "llama-3-8b: 8.03B" in words
    given = weft("plan", *LLAMA, "--json")
    assert json.loads(given)["defaults"] == []
    words = json.loads(weft("plan", "qwen3-32b", "--gpus", "64", "--hardware", "h200", "--json"))
    assert words["defaults"] == ["--sequence-length 8192 (the model's own is 40960)", "--global-batch 512"]


def test_validate_prints_each_run_and_the_mean_error():
    words = weft("plan", "--validate", PUBLISHED)
    assert "137 TFLOP/s" in words and "mean error" in words
    words = json.loads(weft("plan", "--validate", PUBLISHED, "--json"))
    assert words["mean_error"] == pytest.approx(sum(abs(row["error"]) for row in words["rows"]) / len(words["rows"]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"llama-3-8b": "llama-9"}, "weft plan: model 'llama-9' is neither a file nor one of gpt2"),
        ({"h100": "abacus"}, "weft plan: hardware 'abacus' is neither a file nor one of v100-32gb"),
        ({"llama-3-8b": "llama-3-405b"}, "more than the 79.1 GiB there are. It would fit with "),
        ({"16": "0"}, "weft plan: gpus=0 must be at least 1"),
        ({"128": "0"}, "weft plan: global_batch=0 must be at least 1"),
        ({"--gpus": "--top"}, "weft plan: needs --gpus, as in `weft plan llama-3-8b --gpus 16`"),
        ({"llama-3-8b": "lama3-8b"}, "qwen3-30b-a3b, gpt-3-175b; did you mean llama-3-8b?"),
        ({"llama-3-8b": "llama-3"}, "did you mean llama-3-8b or llama-3-70b or llama-3-405b?"),
        ({"llama-3-8b": "gpt2"}, "sequence_length=8192: gpt2 has learned positions for 1024 tokens"),
        ({"--global-batch": "--top=0", "128": "--global-batch=8"}, "weft plan: --top 0 must be at least 1"),
        (
            {"llama-3-8b": f"--validate={PUBLISHED}"},
            "takes a run's options from its row of the file: leave out --gpus, --hardware",
        ),
    ],
)
def test_bad_input_is_a_message_and_exit_code_2(change, message):
    assert message in weft("plan", *(change.get(argument, argument) for argument in LLAMA), code=2)


def test_bad_files_are_a_message_and_exit_code_2(tmp_path):
    config, hardware, runs = tmp_path / "config.json", tmp_path / "hw.json", tmp_path / "runs.csv"
    config.write_text('{"model_type": "llama", "hidden_size": 64}')
    hardware.write_text('{"weft_hardware": 7}')
    runs.write_text("source,gpus\na,1\n")
    assert "lacks layers (num_hidden_layers" in weft("plan", str(config), *LLAMA[1:], code=2)
    rest = ["--gpus", "2", "--hardware", str(hardware), "--sequence-length", "8", "--global-batch", "8"]
    assert "weft_hardware is 7, and this weft reads version 2" in weft("plan", "gpt2", *rest, code=2)
    assert "lacks the columns hardware, layers" in weft("plan", "--validate", str(runs), code=2)
    assert "is not a file" in weft("plan", "--validate", str(tmp_path / "none.csv"), code=2)
    ignored = ["--precision", "bf16", "--optimizer", "sgd", "--overlap", "none", "--top", "3"]
    assert "leave out --precision, --optimizer, --overlap, --top" in weft(
        "plan", "--validate", PUBLISHED, *ignored, code=2
    )


def test_a_plot_is_a_picture(tmp_path):
    pytest.importorskip("matplotlib", reason="--plot needs matplotlib")
    path = tmp_path / "plan.png"
    from weft.cli import main

    assert main(["plan", *LLAMA, "--top", "4", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000
