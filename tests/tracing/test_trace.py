"""`weft trace`: a delay is named where it is, clocks agree, and times add up."""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import parallel_programs as programs
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.data import DataLoader

import weft
from weft.cli import main
from weft.testing.ranks import run_ranks
from weft.tools.tracing import trace_command, trace_recorder
from weft.tools.tracing.rank_trace import (
    GroupTrace,
    RankTrace,
    Span,
    TracedCall,
    Transfer,
    on_one_clock,
)
from weft.tools.tracing.step_report import StepReport
from weft.tools.tracing.trace_file import load_trace
from weft.tools.tracing.waiting import Label, Waits

PIPELINE = {
    "example": torch.zeros(1, programs.LENGTH, dtype=torch.int64),
    "loss": programs.loss_of_scores,
    "microbatches": 4,
}
PROGRAMS = {
    "tp": ("over_tp", 2, {}),
    "tp4": ("over_tp", 4, {}),
    "micro-batches": ("over_dp", 2, {"micro": 2}),
    "ddp": ("over_ddp", 2, {}),
    "cp": ("over_cp", 2, {}),
    "ep": ("over_ep", 2, {}),
    "fsdp": ("over_fsdp", 2, {}),
    "weft tp": ("over_weft", 2, {}),
    "weft dp": ("over_weft", 2, {"sizes": {"dp": 2}}),
    "weft zero=3": ("over_weft", 2, {"sizes": {"dp": 2}, "zero": 3}),
    "weft cp": ("over_weft", 2, {"sizes": {"cp": 2}}),
    "weft dp x tp": ("over_weft", 4, {"sizes": {"dp": 2, "tp": 2}}),
    "weft pp": ("over_weft", 2, {"sizes": {"pp": 2}, "pipeline": PIPELINE}),
}
DELAY_S = float(os.environ.get("WEFT_DELAY_S", 0.1))  # 0.02 is named where each rank has a core


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        time.sleep(DELAY_S)
        return dx


def traced(rank, path, program, options, late=None, name=None, backward=False):
    train, init, models = programs.train, programs.GPT.__init__, []

    def made(model, *args, **kwargs):
        init(model, *args, **kwargs)
        models.append(model)

    def delay(module, _):
        if any(module is child and path == name for model in models for path, child in model.named_modules()):
            time.sleep(DELAY_S)  # the fault that is to be named

    def delay_backward(module, _, y):
        if any(module is child and path == name for model in models for path, child in model.named_modules()):
            return SlowBackward.apply(y)
        return None

    programs.train = lambda model, batches, *args, **kwargs: train(model, batches * 3, *args, **kwargs)
    if rank == late:
        programs.GPT.__init__ = made
        if backward:
            register_module_forward_hook(delay_backward)
        else:
            register_module_forward_pre_hook(delay)
    with weft.trace(path):
        getattr(programs, program)(**options)


def ranks_of(path, which, *args):
    program, world, options = PROGRAMS[which]
    run_ranks(traced, world, path, program, options, *args, timeout_s=100)
    return load_trace(path)


def some_module(which, chosen):
    """Return a rank and a module that runs there."""
    program, world, _ = PROGRAMS[which]
    model = programs.GPT(programs.MixtureBlock if program == "over_ep" else programs.Block)
    names = [name for name, _ in model.named_modules() if name and name != "blocks" and "experts" not in name]
    name = chosen.choice(names)
    first = name in ("tokens", "positions") or name.startswith("blocks.0")
    return (0 if first else 1) if which == "weft pp" else chosen.randrange(world), name


def check_named(path, which, seed):
    late, name = some_module(which, random.Random(seed))
    report = StepReport(ranks_of(path, which, late, name))
    (rank, cause), _ = report.causes.most_common(1)[0]
    assert (rank, cause.name) == (late, name), f"{report}"
    assert f"rank {late} is late, at {name}, " in report.advice()[0].text


@pytest.mark.parametrize("which", PROGRAMS)
def test_a_delay_is_named(which, tmp_path):
    check_named(tmp_path / "run.json", which, which)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_twenty_delays_are_named(seed, tmp_path):
    check_named(tmp_path / "run.json", random.Random(seed).choice(list(PROGRAMS)), seed)


@pytest.mark.parametrize("which", ["ddp", "tp", "weft dp"])
def test_a_delay_inside_of_one_rank_s_backward_is_named(which, tmp_path):
    """The sum of gradients makes all backwards equally long, so no rank's own times show whose fault it is."""
    report = StepReport(ranks_of(tmp_path / "run.json", which, 1, "blocks.1.up", True))
    (rank, cause), _ = report.causes.most_common(1)[0]
    assert (rank, cause.kind, cause.name) == (1, "backward", "blocks.1.up"), f"{report}"


# One trace


@pytest.fixture(scope="module")
def of_pipeline(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "run.json"
    return path, ranks_of(path, "weft pp")


@pytest.fixture(scope="module")
def of_ddp(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "run.json"
    return path, ranks_of(path, "ddp")


def test_events_of_a_track_are_inside_of_one_another(of_pipeline, of_ddp):
    for path, _ in (of_pipeline, of_ddp):
        events = json.loads(path.read_text())["traceEvents"]
        tracks = {}
        for event in events:
            if event["ph"] == "X":
                tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
        assert len(tracks) >= 6
        for spans in tracks.values():
            ends = []
            for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
                while ends and ends[-1] <= begin + 1e-3:
                    ends.pop()
                assert not ends or end <= ends[-1] + 2
                ends.append(end)


def test_what_is_in_a_trace(of_pipeline, of_ddp):
    events = json.loads(of_pipeline[0].read_text())["traceEvents"]
    names = {event["name"] for event in events}
    assert {"blocks.0.up", "blocks.1.up (backward)", "AdamW", "0F0", "1B3", "from rank 0", "to rank 1"} <= names
    assert {event["name"] for event in events if event["ph"] == "C"} == {"memory of process"}
    tracks = {event["args"]["name"] for event in events if event["name"] in ("process_name", "thread_name")}
    assert {"compute", "stages"} <= tracks and any(track.startswith("rank 1 on ") for track in tracks)
    events = json.loads(of_ddp[0].read_text())["traceEvents"]
    sums = [event for event in events if event["name"] == "all_reduce"]
    assert len(sums) == 2 * 6 * len({event["args"]["number"] for event in sums}) // 6
    for event in sums:
        assert event["args"]["bytes"] > 100_000
        assert event["args"]["waiting_us"] + event["args"]["moving_us"] == pytest.approx(event["dur"], abs=1)


def test_every_module_has_its_forward_and_its_backward(of_ddp):
    for rank in of_ddp[1]:
        names = [span.name for span in rank.of_kind("forward")]
        again = [span.name for span in rank.of_kind("backward")]
        expected = {name for name, _ in programs.GPT().named_modules() if name and name != "blocks"}
        assert expected <= set(names) and all(names.count(name) == 6 for name in expected)
        assert expected <= {*again, "tokens", "positions"}  # their outputs are added: the sum's gradient is theirs
        assert len(rank.steps()) == 6


def test_the_parts_of_a_step_are_the_step(of_ddp, of_pipeline):
    for _, ranks in (of_ddp, of_pipeline):
        report = StepReport(ranks)
        for rank in ranks:
            steps = rank.steps()[1:]
            mean = sum(end - begin for begin, end in steps) / len(steps) / 1e6
            assert sum(report.shares[rank.rank].values()) == pytest.approx(mean, rel=0.01)


def test_the_halves_of_a_backward(tmp_path):
    options = {"sizes": {"pp": 2}, "pipeline": {**PIPELINE, "schedule": "zero-bubble"}}
    run_ranks(traced, 2, tmp_path / "run.json", "over_weft", options, timeout_s=100)
    _, second = load_trace(tmp_path / "run.json")
    assert {f"1{kind}{number}" for kind in "FIW" for number in range(4)} == {
        span.name for span in second.of_kind("stage")
    }


def test_a_pipelines_bubble(of_pipeline):
    report = StepReport(of_pipeline[1])
    assert 0 < report.bubble < 0.9
    assert "the planner expects 20%, and 11% with 8 of half the size" in "".join(
        advice.text for advice in report._of_bubble()
    )


def test_clocks_of_two_machines_agree_within_50_us(tmp_path):
    ranks_of(tmp_path / "run.json", "tp")  # has many collectives: the fastest give the bounds
    parts = json.loads((tmp_path / "run.json").read_text())["weft"]["parts"]
    other = json.loads(json.dumps(parts[1]))
    other["machine"], shift = "another", 1_234_567_890
    other["calls"] = [[*call[:3], *(time and time + shift for time in call[3:])] for call in other["calls"]]
    for group in other["groups"]:
        group["calls"] = [[*call[:4], *(time and time + shift for time in call[4:])] for call in group["calls"]]
    moved = on_one_clock([parts[0], other])[1]
    assert abs(moved.offset + shift) < 50_000
    assert on_one_clock(parts)[1].offset == 0


# Around a program


def one_process(path, **options):
    model, optimizer = nn.Linear(4, 2), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with weft.trace(path, **options):
        for batch in DataLoader(torch.ones(12, 4), batch_size=2):
            model(batch).sum().backward()
            optimizer.step()
    return load_trace(path)[0]


def test_only_the_steps_that_are_asked_for(tmp_path):
    rank = one_process(tmp_path / "run.json", steps=(2, 3))
    assert len(rank.of_kind("forward")) == 2 and len(rank.of_kind("step")) == 2
    assert len(one_process(tmp_path / "run.json").of_kind("data")) == 8  # the first is iter(), the last finds no batch


def test_the_file_is_written_behind_the_last_step_that_is_asked_for(tmp_path):
    path, model = tmp_path / "run.json", nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with weft.trace(path, steps=(0, 1)):
        for step in range(4):
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
            assert path.exists() == (step >= 2)
    assert len(load_trace(path)[0].steps()) == 2


def test_a_step_behind_steps_that_are_left_out_begins_where_it_is_recorded_again(tmp_path):
    rank = one_process(tmp_path / "run.json", steps=(0, 4))
    _, (begin, _) = rank.steps()
    assert begin > rank.of_kind("step")[0].end
    assert [span.begin >= begin for span in rank.of_kind("forward")] == [False, True]


def test_a_step_whose_optimizer_calls_the_model_is_a_step(tmp_path):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure():
        loss = model(torch.ones(3, 4)).sum()
        loss.backward()
        return loss

    with weft.trace(tmp_path / "run.json"):
        for _ in range(3):
            optimizer.step(closure)
    assert len(load_trace(tmp_path / "run.json")[0].steps()) == 3


def test_the_module_around_several_is_searched_once(tmp_path, monkeypatch):
    searches = []
    monkeypatch.setattr(trace_recorder, "holder_of", lambda models: searches.append(len(models)))
    models = nn.Linear(4, 2), nn.Linear(2, 2)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    with weft.trace(tmp_path / "run.json"):
        for _ in range(3):
            loss = nn.MSELoss()
            loss(models[1](models[0](torch.ones(3, 4))), torch.ones(3, 2)).backward()
            for optimizer in optimizers:
                optimizer.step()
    assert searches == [2]


def test_tensors_are_as_they_were(tmp_path):
    """Neither a leaf that lives on nor an output has an attribute or a hook more; both are followed in a next trace."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.ones(2, 4, requires_grad=True)
    for _ in range(2):
        for path in (tmp_path / "first.json", tmp_path / "second.json"):
            with weft.trace(path):
                out = model(x)
                out.sum().backward()
            assert vars(x) == vars(out) == {} and not x._backward_hooks
            assert {"0", "1"} <= {span.name for span in load_trace(path)[0].of_kind("backward")}


def test_modules_of_steps_that_are_left_out_are_not_kept(tmp_path):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with weft.trace(tmp_path / "run.json", steps=(0,)):
        for _ in range(3):
            loss = nn.MSELoss()
            loss(model(torch.ones(3, 4)), torch.ones(3, 2)).backward()
            optimizer.step()
        left = weakref.ref(loss)
        del loss
        assert left() is None


def test_torch_is_as_it_was(tmp_path):
    before = nn.Module.__call__, torch.autograd.backward, weft.clip_grad_norm_, nn.utils.clip_grad_norm_
    one_process(tmp_path / "run.json")
    assert before == (nn.Module.__call__, torch.autograd.backward, weft.clip_grad_norm_, nn.utils.clip_grad_norm_)
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_one_trace_at_a_time(tmp_path):
    with weft.trace(tmp_path / "run.json"):
        with pytest.raises(RuntimeError, match="another trace runs"), weft.trace(tmp_path / "other.json"):
            pass
        nn.Linear(4, 2)(torch.ones(3, 4))
    assert len(load_trace(tmp_path / "run.json")[0].of_kind("forward")) == 1


def on_machines(rank, path):
    with weft.trace(path):
        programs.over_dp()


def sends_to_all(rank, path):
    with weft.trace(path):
        nn.Linear(4, 4)(torch.ones(2, 4))
        for sizes in ([1, 2], [3000, 50_000]):  # what each rank gets; both send the same
            own = torch.ones(sum(sizes))
            received = torch.empty(2 * sizes[rank])
            dist.all_to_all_single(received, own, [sizes[rank]] * 2, sizes)


def test_an_all_to_all_has_the_bytes_that_the_rank_sends(tmp_path):
    run_ranks(sends_to_all, 2, tmp_path / "run.json")
    for rank in load_trace(tmp_path / "run.json"):
        calls = [(call.operation, call.bytes) for group in rank.groups for call in group.collectives]
        assert calls == [("all_to_all", 4 * 3), ("all_to_all", 4 * 53_000)]


def test_collectives_between_machines(tmp_path):
    """Two machines, as one that are said to be: between them the engine's calls are gloo's."""
    own = lambda rank: os.environ.update(WEFT_HOST=f"machine-{rank // 2}")  # noqa: E731
    run_ranks(on_machines, 4, tmp_path / "run.json", before=own, timeout_s=100)
    ranks = load_trace(tmp_path / "run.json")
    calls = [[call for group in rank.groups for call in group.collectives] for rank in ranks]
    assert all(any(call.operation.startswith("all_reduce(") for call in of_rank) for of_rank in calls)
    assert StepReport(ranks).causes


def test_events_of_torchs_profiler_are_on_the_same_clock(tmp_path):
    with torch.profiler.profile():
        pass  # its first start takes long
    with weft.trace(tmp_path / "run.json"), torch.profiler.profile():
        nn.Linear(64, 64)(torch.ones(64, 64))
    (rank,) = load_trace(tmp_path / "run.json")
    (forward,) = rank.of_kind("forward")
    begin, end = next((begin, end) for name, begin, end, _ in rank.profiled if name == "aten::linear")
    assert forward.begin - 200_000 < begin < end < forward.end + 200_000


def test_recomputed_forwards(tmp_path):
    block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with weft.trace(tmp_path / "run.json"):
        model = nn.Sequential(block)
        out = torch.utils.checkpoint.checkpoint(model, torch.ones(2, 4, requires_grad=True), use_reentrant=False)
        out.sum().backward()
    (rank,) = load_trace(tmp_path / "run.json")
    assert {"0.0", "0.1"} <= {span.name for span in rank.of_kind("recomputed")}
    assert len(rank.of_kind("forward")) == len(rank.of_kind("recomputed")) == 4


SCRIPT = """
import sys
import torch.distributed as dist
import parallel_programs as programs
dist.init_process_group("gloo")
if "die" in sys.argv and dist.get_rank() == 1:
    sys.exit(3)
programs.over_ddp()
dist.destroy_process_group()
"""


def command(tmp_path, *args):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    launch = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2"
    return f"{launch} {script} {' '.join(args)}"


def test_the_command_runs_a_program_and_reports(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PYTHONPATH", str(Path(programs.__file__).parent), prepend=os.pathsep)
    path, page = tmp_path / "run.json", tmp_path / "report.html"
    assert main(["trace", str(path), "--run", command(tmp_path), "--html", str(page)]) == 0
    out = capfd.readouterr().out
    assert "2 ranks, a step of" in out and "Largest modules" in out and "  blocks.*" in out
    assert "<h1>2 ranks, a step of" in page.read_text() and "width:" in page.read_text()
    assert main(["trace", str(path), "--hardware", "h100"]) == 0
    assert "2 ranks, a step of" in capfd.readouterr().out


INTERRUPTS = """
import os, signal
import torch

torch.nn.Linear(4, 2)(torch.ones(3, 4))
os.kill(os.getppid(), signal.SIGINT)
print(torch.ones(1000, 1000).matmul(torch.ones(1000, 1000))[0, 0])
"""


def test_an_interrupted_command_reports(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(INTERRUPTS)
    command = [sys.executable, "-m", "weft", "trace", str(tmp_path / "run.json"), "--run", f"{sys.executable} {script}"]
    ran = subprocess.run(command, timeout=100, capture_output=True, text=True)
    assert ran.returncode == 0 and "1 rank, a step of" in ran.stdout, ran


def test_a_rank_that_is_interrupted_while_it_writes_writes(tmp_path, monkeypatch):
    write = trace_recorder.write_part

    def interrupted(*args):
        os.kill(os.getpid(), signal.SIGINT)
        write(*args)

    monkeypatch.setattr(trace_recorder, "write_part", interrupted)
    with pytest.raises(KeyboardInterrupt), weft.trace(tmp_path / "run.json"):
        nn.Linear(4, 2)(torch.ones(3, 4))
    assert len(load_trace(tmp_path / "run.json")) == 1


def test_errors_of_the_command(tmp_path, monkeypatch, capfd):
    assert main(["trace", str(tmp_path / "none.json")]) == 2
    assert "none.json is not there, nor a part of it" in capfd.readouterr().err
    other = tmp_path / "other.json"
    other.write_text("{}")
    assert main(["trace", str(other)]) == 2
    assert "other.json is no trace that weft has written" in capfd.readouterr().err
    assert main(["trace", str(other), "--run", "true", "--steps", "first"]) == 2
    assert "steps must be like 0,1 or 0-9" in capfd.readouterr().err


def test_ranks_that_left_no_part_are_named(tmp_path, of_ddp, capfd):
    parts = json.loads(of_ddp[0].read_text())["weft"]["parts"]
    (tmp_path / "run.json.rank0.part").write_text(json.dumps(parts[0]))
    options = {"run": None, "steps": "0-9", "html": None, "hardware": None}
    assert trace_command.run(argparse.Namespace(file=tmp_path / "run.json", **options)) == 0
    assert "without ranks 1, which left no part" in capfd.readouterr().out


def sums_behind_the_steps(rank, path):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with weft.trace(path, steps=(1,)):
        for _ in range(4):
            model(torch.ones(3, 4)).sum().backward()
            torch.distributed.all_reduce(model.weight.grad)
            optimizer.step()


def test_collectives_of_other_steps_are_left_out(tmp_path):
    run_ranks(sums_behind_the_steps, 2, tmp_path / "run.json", timeout_s=100)
    for rank in load_trace(tmp_path / "run.json"):
        assert [len(group.collectives) for group in rank.groups] == [1]


PROCESSES = """
import os, sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

model = nn.Linear(4, 2)


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, number):  # a worker that calls a module
        with torch.no_grad():
            return model(torch.ones(4))


def rank(number, method, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=2)
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for batch in torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=1, multiprocessing_context=method):
        ddp(batch).sum().backward()
        optimizer.step()
    if os.fork() == 0:
        sys.exit()
    os.wait()
    ddp(batch).sum().backward()
    os.chdir("/")
    dist.destroy_process_group()


if __name__ == "__main__":
    method, store = sys.argv[1:]
    model(torch.ones(4))  # before it starts ranks
    ranks = [mp.get_context(method).Process(target=rank, args=(number, method, store)) for number in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
        assert each.exitcode == 0
"""


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_the_processes_that_write_parts_are_the_ranks(method, tmp_path):
    """Not the process that starts them, nor data workers; beside the file's name as it was when the program began."""
    script, path = tmp_path / "train.py", tmp_path / "run.json"
    script.write_text(PROCESSES)
    tracing = {"WEFT_TRACE": "run.json", "WEFT_AS_GLOO": "1"}
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")} | tracing
    command = [sys.executable, str(script), method, str(tmp_path / "store")]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, timeout=100, capture_output=True, text=True)
    assert ran.returncode == 0 and "Traceback" not in ran.stderr, ran.stderr
    ranks = load_trace(path)
    assert [(rank.rank, rank.world, len(rank.of_kind("step"))) for rank in ranks] == [(0, 2, 3), (1, 2, 3)]
    assert all(rank.of_kind("forward")[-1].begin > rank.of_kind("step")[-1].end for rank in ranks)
    assert list(tmp_path.glob("run.json*")) == [path]


def test_a_program_that_called_no_module_has_no_report(tmp_path, of_ddp, capfd):
    parts = json.loads(of_ddp[0].read_text())["weft"]["parts"]
    for part in parts:
        empty = part | {"calls": [], "spans": []}
        (tmp_path / f"run.json.rank{part['rank']}.part").write_text(json.dumps(empty))
    assert main(["trace", str(tmp_path / "run.json")]) == 2
    assert "run.json has no calls of modules" in capfd.readouterr().err


# By hand

START = {0: 0, 1: 0}


def a_rank(number, spans, collectives=(), transfers=(), ends=()):
    group = GroupTrace("g", "g", (0, 1), list(collectives), list(transfers))
    return RankTrace(number, 2, "here", 0, [Span(*span) for span in spans], list(ends), [group], [], "process", [])


def ms(*times):
    return tuple(round(1e6 * time) for time in times)


def a_call(number, submitted, begin, met, end):
    return TracedCall(number, "all_reduce", 1 << 20, *ms(submitted, begin, met, end))


def test_a_rank_that_waited_itself_passes_the_cause_on():
    """Rank 0 computes for 30 ms and sends; rank 1 receives, and is late at a collective of both."""
    ranks = [
        a_rank(
            0,
            [("forward", "first", *ms(0, 30)), ("forward", "more", *ms(30, 31))],
            [a_call(1, 0, 31, 40, 41)],
            [Transfer(True, 1, 8, 0, *ms(30, 30.1))],
        ),
        a_rank(
            1,
            [("wait", "", *ms(1, 30.2)), ("forward", "second", *ms(30.2, 40))],
            [a_call(1, 0, 40, 40, 41)],
            [Transfer(False, 0, 8, 0, *ms(1, 30.2))],
        ),
    ]
    found = {(wait.rank, wait.cause_rank, wait.cause): wait.ns for wait in Waits(ranks, START).found}
    assert found == {
        (1, 0, Label("forward", "first")): pytest.approx(29e6),
        (0, 1, Label("forward", "second")): pytest.approx(9e6),
    }


def test_who_was_late_at_a_call_beside_the_program_still_is_at_the_next():
    """Rank 1 is late in its forward. Both submit two sums in backward, and wait at its end."""

    def rank(number, late):
        spans = [("forward", "up", *ms(0, 1 + late)), ("backward pass", "", *ms(1 + late, 30))]
        spans += [("backward", "up", *ms(1 + late, 5 + late))]
        calls = [a_call(1, 2 + late, 2 + late, 22, 23), a_call(2, 4 + late, max(23, 4 + late), 24, 25)]
        return a_rank(number, spans, calls, ends=ms(5 + late))

    waits = Waits([rank(0, 0), rank(1, 20)], START)
    causes = {(wait.cause_rank, wait.cause) for wait in waits.found}
    assert causes == {(1, Label("forward", "up"))}
    assert sum(wait.ns for wait in waits.found) == pytest.approx(19e6)  # from 5 to 24 ms, once
    assert waits.found[0].place == Label("backward pass", "")


@pytest.mark.parametrize("stages", [True, False])
def test_a_sender_that_takes_no_longer_than_usual_is_not_late(stages):
    def spans(begin):
        return [
            (kind, "blocks.0", *ms(begin, begin + 10)) for kind in (["forward", "stage"] if stages else ["forward"])
        ]

    sent = [Transfer(True, 1, 8, 0, *ms(10, 10.1))]
    received = [Transfer(False, 0, 8, 0, *ms(0, 10.1))]
    ranks = [
        a_rank(0, spans(0), transfers=sent),
        a_rank(1, [("wait", "", *ms(0, 10.1)), *spans(10.1)], transfers=received),
    ]
    (wait,) = Waits(ranks, START).found
    assert (wait.rank, wait.cause_rank, wait.cause.kind, wait.ns) == (
        1,
        0,
        "schedule" if stages else "as usual",
        ms(10)[0],
    )
    assert not [each for each in StepReport(ranks).advice() if "is late" in each.text]


def test_advice_names_exposed_collectives_and_what_the_planner_expects():
    def rank(number):
        spans = [("forward", "up", *ms(0, 10)), ("step", "SGD", *ms(30, 31))]
        return a_rank(number, spans, [a_call(1, 0, 10, 10, 20), a_call(2, 0, 20, 20, 22)])

    advice = StepReport([rank(0), rank(1)]).advice()
    assert advice[0].saves_ms == pytest.approx(12)
    assert 'all_reduce on group "g" stops the ranks for 12 ms (2 calls of 1.05 MB on average' in advice[0].text
    assert "the planner expects 4.04 ms with the best rate of this trace" in advice[0].text
