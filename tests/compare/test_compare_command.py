"""`weft compare` as a command: how programs may end, and what cannot be compared is status 2 with its cause."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import weft
from weft.cli import main
from weft.tools.compare.on_ranks import compare_ranks
from weft.tools.numbers import numbers_of

PROGRAM = """
import os, sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

def train(rank=0, world=1, steps=3):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(steps):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).chunk(world)[rank]
        model(x).square().mean().backward()
        for p in model.parameters() if world > 1 else ():
            dist.all_reduce(p.grad)
            p.grad /= world
        optimizer.step()
        optimizer.zero_grad()

def on_rank(rank, port, how):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    train(rank, 2, 1 if how == "ends early" else 3)
    dist.barrier()
    dist.destroy_process_group()
    if how == "os._exit":
        os._exit(0)

if __name__ == "__main__":
    how, port = sys.argv[1:]
    if how == "plain":
        train()
        os._exit(0)
    elif how == "nothing":
        torch.ones(1)
    else:
        mp.start_processes(on_rank, args=(port, how), nprocs=2, start_method="fork" if how == "fork" else "spawn")
"""


@pytest.fixture
def commands(tmp_path, unused_tcp_port):
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    return lambda how: f"{sys.executable} {script} '{how}' {unused_tcp_port}"


@pytest.fixture
def unused_tcp_port():
    import socket

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


@pytest.mark.parametrize("how", ["os._exit", "fork"])
def test_ranks_that_leave_their_group_and_end_without_python_s_exit_are_recorded(how, commands, capfd):
    assert main(["compare", "--reference", commands("plain"), "--run", commands(how), "--steps", "0,2"]) == 0
    out = capfd.readouterr().out
    assert "the runs agree\n104 tensors compared" in out, out


def test_a_run_that_makes_fewer_steps_is_not_compared(commands, capfd):
    assert main(["compare", "--reference", commands("plain"), "--run", commands("ends early")]) == 2
    assert capfd.readouterr().err.endswith("rank 0 makes 1 steps: the reference's step 1 is missing\n")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--steps", "foo"], "steps must be like 0,1 or 0-9 or 5, and not 'foo'"),
        (["--steps", "2-1"], "steps must be like 0,1"),
        (["--run", "'unclosed"], "No closing quotation"),
        (["--run", "no-such-program"], "No such file or directory: 'no-such-program'"),
        (["--run", "false"], "'false' ended with status 1"),
        (["--run", "true"], "'true' called no torch.nn.Module, or was ended by a signal"),
        (["--rename", "a"], "--rename must be like"),
    ],
)
def test_what_cannot_be_compared_is_status_2_with_its_cause(options, says, capfd, monkeypatch, tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(2, 2)

    def recorded(command, folder, steps, reordered):
        if command not in ("plain", "run"):
            return record(command, folder, steps, reordered)
        with weft.record(folder):
            model(torch.ones(1, 2))
        return 0

    from weft.tools.compare import compare_command

    record = compare_command._record
    monkeypatch.setattr(compare_command, "_record", recorded)
    command = ["compare", "--reference", "plain", *(["--run", "run"] if "--run" not in options else []), *options]
    assert main(command) == 2
    err = capfd.readouterr().err
    assert err.startswith("weft compare: ") and says in err and err.count("\n") == 1, err


@pytest.mark.parametrize(("text", "steps"), [("0,1", [0, 1]), ("0-3", [0, 1, 2, 3]), ("7", [7]), ("0-1,5", [0, 1, 5])])
def test_steps_are_numbers_and_ranges(text, steps):
    assert numbers_of(text) == steps


def steps_of_a_program(folder, steps, count=3, seed=0, **options):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with weft.record(folder, steps=steps, **options):
        for step in range(count):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
            F.mse_loss(model(x), torch.zeros(4, 2)).backward()
            optimizer.step()
            optimizer.zero_grad()


def folders_of(tmp_path, *steps, **options):
    """Record the reference twice and the run, with these options of the run."""
    for name in ("plain", "again", "run"):
        steps_of_a_program(tmp_path / name, steps, reordered=name == "again", **(options if name == "run" else {}))
    return lambda: weft.compare(tmp_path / "plain", tmp_path / "run", reordered=tmp_path / "again")


def test_steps_that_lie_apart_are_recorded_whole(tmp_path):
    found = folders_of(tmp_path, 0, 2)()
    assert found.ok and found.compared > 20
    wrong = folders_of(tmp_path, 2, seed=1)()
    assert wrong.findings[0].step == 2, wrong


def test_steps_and_ranks_that_are_missing_are_said(tmp_path):
    with pytest.raises(ValueError, match="rank 0 makes 2 steps: the reference's step 2 is missing"):
        folders_of(tmp_path, 0, 2, count=2)()
    with pytest.raises(ValueError, match="makes 3 steps, and none of those that are recorded"):
        folders_of(tmp_path, 7)()
    recording, *_ = weft.tools.compare.seen.load(tmp_path / "plain")
    weft.tools.compare.seen.save(recording._replace(world_size=3), tmp_path / "run" / "rank0.pt")
    with pytest.raises(FileNotFoundError, match="rank 1, 2 left no recording"):
        weft.compare(tmp_path / "plain", tmp_path / "run", reordered=tmp_path / "again")


@pytest.mark.parametrize("other", ["seed", "data"])
def test_a_reference_that_does_not_repeat_itself_is_said_to(other, tmp_path):
    compare = folders_of(tmp_path, 0, 1)
    steps_of_a_program(tmp_path / "again", (0, 1), seed=1, reordered=True) if other == "seed" else None
    if other == "data":
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 2))
        with weft.record(tmp_path / "again", reordered=True):
            model(torch.randn(4, 6)).sum().backward()
    which = "the parameter of 0.weight" if other == "seed" else "the input of the model"
    with pytest.raises(ValueError, match=f"the reference does not repeat itself: {which} is another one"):
        compare()


@pytest.mark.parametrize("how", [0, None])
def test_a_program_that_exits_inside_of_the_recording_is_recorded(how, tmp_path):
    model = nn.Linear(2, 2)
    with pytest.raises(SystemExit), weft.record(tmp_path):
        model(torch.ones(1, 2))
        sys.exit(how)
    assert (tmp_path / "rank0.pt").exists()


def test_what_is_not_recorded_is_said(tmp_path):
    torch.manual_seed(0)
    model = nn.LSTM(4, 4, num_layers=2, dropout=0.5)
    attention = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.1)
    for name in ("plain", "again", "run"):
        with weft.record(tmp_path / name, reordered=name == "again"):
            torch.manual_seed(0)
            model(torch.ones(3, 1, 4))[0].sum().backward()
            attention(torch.ones(3, 2, 8)).sum().backward()
    found = weft.compare(tmp_path / "plain", tmp_path / "run", reordered=tmp_path / "again")
    assert found.not_recorded[:2] == ("dropout inside of an RNN", "weights that attention drops")
    assert "not recorded, so not compared: dropout inside of an RNN, weights that attention drops" in str(found)


def trains(rank, world_size, forgets=None, skips=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).chunk(world_size)[rank]
        model(x).square().mean().backward()
        for name, p in model.named_parameters() if world_size > 1 else ():
            if (name, step) != forgets:
                dist.all_reduce(p.grad)
                p.grad /= world_size
        if (rank, step) != skips:
            optimizer.step()
        optimizer.zero_grad()


def test_a_rank_that_skips_a_step_is_said_to():
    found = compare_ranks(lambda *rank: trains(*rank, skips=(1, 0)), 2)
    assert str(found.findings[0]) == "step 0, rank 1: the optimizers' steps: it makes 2, rank 0 3", found


def test_a_program_without_an_optimizer_is_said_to_have_none(tmp_path):
    for name in ("plain", "again", "run"):
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        with weft.record(tmp_path / name, reordered=name == "again"):
            model(torch.ones(1, 2)).sum().backward()
    found = weft.compare(tmp_path / "plain", tmp_path / "run", reordered=tmp_path / "again")
    assert found.ok and found.not_recorded == ("an optimizer: none of torch.optim's made a step",)


def test_a_test_s_body_is_compared_on_ranks():
    assert compare_ranks(trains, 2).ok
    wrong = lambda *rank: trains(*rank, forgets=("2.bias", 2))  # noqa: E731
    assert compare_ranks(wrong, 2).ok  # behind the steps that are compared
    found = compare_ranks(wrong, 2, steps=[2], backend="gloo")
    assert found.findings[0].module == "2.bias" and found.findings[0].step == 2, found


TRAINER = """
import os, sys
sys.path.insert(0, {helpers!r})
import training_programs
training_programs.with_trainer(sys.argv[1])
"""


@pytest.mark.slow("compare")
def test_transformers_trainer_agrees_and_its_faults_are_named(tmp_path, capfd):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    script = tmp_path / "train.py"
    script.write_text(TRAINER.format(helpers=str(Path(__file__).parents[1] / "helpers")))
    launch = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2 {script}"
    named = {"": "", "weight decay": "the optimizer's weight_decay of ", "other data": "the input of the model differs"}
    for fault, text in named.items():
        command = ["compare", "--reference", f"{sys.executable} {script} ''", "--run", f"{launch} '{fault}'"]
        assert main(command) == (1 if fault else 0), capfd.readouterr().out
        assert text in capfd.readouterr().out
