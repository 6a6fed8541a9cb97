"""weft.explain names what runs in each layer, what it sends, and why not the faster path."""

import contextlib
import io
import json
import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from torch import nn

import weft
from weft import cli, parallelization
from weft.bench.traffic import counted
from weft.kernels import config, dispatch, launch
from weft.kernels.config import Entry
from weft.kernels.matmul_tiles import Problem, listed
from weft.metadata import metadata
from weft.nn import ParallelConv1D, ParallelConv2d
from weft.ops import kernel_choice
from weft.testing.ranks import run_ranks


def explains(rank):
    model = nn.Sequential(weft.ColumnParallelLinear(8, 10, activation="gelu"), nn.ReLU(), weft.RowParallelLinear(10, 6))
    found = weft.explain(model, tokens=64)
    assert [layer.name for layer in found.layers] == ["0", "2"]
    column, row = found.layers
    assert column.shard == "(5, 8) of (10, 8)" and row.shard == "(6, 5) of (6, 10)"
    assert column.layer == "ColumnParallelLinear column"
    why = "ATen: the kernels run on CUDA devices, the tensors are on the CPU"
    assert column.products == row.products == {"forward": why, "dgrad": why, "wgrad": why}
    assert str(found).startswith(
        "at 64 tokens:\n0: ColumnParallelLinear column, weight (5, 8) of (10, 8), over shared memory\n    sends    0 B"
    ), "on a CPU it is no news that ATen computes"
    with kernel_choice.prefer("kernel"):
        assert weft.explain(model).layers[0].products["forward"] == "weft kernel: preferred by the caller"
    with pytest.raises(ValueError, match="tokens=0"):
        weft.explain(model, tokens=0)


def test_every_parallel_layer_is_named_with_what_runs_and_why():
    run_ranks(explains, 2)


def test_a_model_that_is_not_split_says_so():
    found, printed = weft.explain(nn.Linear(2, 2)), io.StringIO()
    assert str(found).endswith("no layer is split over ranks")
    Console(file=printed).print(found)
    assert "no layer is split over ranks" in printed.getvalue()
    for wrong in ("a path", None):
        with pytest.raises(TypeError, match=r"takes a torch.nn.Module, and not a (str|NoneType)"):
            weft.explain(wrong)
    with pytest.raises(ValueError, match="tokens=1.5 must be a whole number"):
        weft.explain(nn.Linear(2, 2), tokens=1.5)


TOKENS = 6


def layers():
    """Each kind of layer and option that sends something, with whether its input wants a gradient."""
    yield weft.ColumnParallelLinear(10, 14)
    yield weft.ColumnParallelLinear(10, 14, gather_output=True)
    yield weft.ColumnParallelLinear(10, 14, sequence_parallel=True, sequence_dim=0)
    yield weft.ColumnParallelLinear(10, 14, sequence_parallel=True, sequence_dim=0).requires_grad_(False)
    yield weft.ColumnParallelLinear(10, 8, unit=4, heads=(6, 2))  # two KV heads, which three ranks share
    yield weft.RowParallelLinear(14, 10)
    yield weft.RowParallelLinear(14, 10, split_input=True)
    yield weft.RowParallelLinear(14, 10, sequence_parallel=True, sequence_dim=0)
    yield weft.RowParallelLinear(14, 10, bias=False, sequence_parallel=True, sequence_dim=0)
    yield weft.ParallelEmbedding(14, 10)


def bytes_reported_and_sent(rank):
    """Return the bytes of each layer's forward and backward, as explained and as sent."""
    world, found = torch.distributed.get_world_size(), []
    for layer in layers():
        mine = weft.split_sizes(TOKENS, world)[rank]
        if isinstance(layer, weft.ParallelEmbedding):
            x = torch.zeros(TOKENS, dtype=torch.int64)
        else:
            column = layer.style == "column"
            features = layer.in_features if column or layer.split_input else layer.weight.size(1)
            x = torch.randn(mine if column and layer.sequence_parallel else TOKENS, features, requires_grad=True)
        layer.communicator.all_sizes = lambda x, dim: weft.split_sizes(TOKENS, world)  # a few bytes that nobody counts
        with counted() as forward:
            y = layer(x)
        with counted() as backward:
            y.sum().backward()
        (report,) = weft.explain(layer, tokens=TOKENS).layers
        found.append((str(layer), report.forward_bytes, forward.bytes, report.backward_bytes, backward.bytes))
    return found


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_bytes_that_are_reported_are_those_that_the_layers_send(world):
    """On average over the ranks, uneven shards included; both are rounded down collective by collective."""
    for rows in zip(*run_ranks(bytes_reported_and_sent, world), strict=True):
        for reported, sent in ((1, 2), (3, 4)):
            average = sum(row[sent] for row in rows) / world
            assert all(abs(row[reported] - average) < 3 for row in rows), rows
    assert any(row[1] for row in rows) == (world > 1)


def shows(rank):
    model = nn.Sequential(weft.ParallelEmbedding(9, 8), weft.ColumnParallelLinear(8, 10), weft.RowParallelLinear(10, 6))
    found = weft.explain(model, tokens=64)
    assert json.loads(found.json()) == json.loads(json.dumps(found.as_dict()))
    embedding, column, row = json.loads(found.json())["layers"]
    assert embedding["forward_bytes"] == 64 * 8 * 4 and embedding["backward_bytes"] == 0
    assert column["backward_bytes"] == 64 * 8 * 4 and row["forward_bytes"] == 64 * 6 * 4
    assert column["computed"]["wgrad"]["algorithm"] == "ATen" and column["computed"]["wgrad"]["variant"] == ""
    assert column["why_not_faster"]["wgrad"] == "the kernels run on CUDA devices, the tensors are on the CPU"
    assert set(column["why_not_faster"]) == {"forward", "dgrad", "wgrad"}
    assert row["communicated"]["forward"]["collective"] == "all_reduce"
    text = str(found)
    assert "1.5 KiB forward, 0 B backward" in text and "\x1b" not in text
    drawn = io.StringIO()
    Console(file=drawn, width=220).print(found)
    for word in ("1: ColumnParallelLinear column", "(6, 5) of (6, 10)", "all_reduce dx", "2 KiB", "why not faster"):
        assert word in drawn.getvalue(), drawn.getvalue()
    for terminal in ("", "1"):
        shown, os.environ["FORCE_COLOR"] = io.StringIO(), terminal
        with contextlib.redirect_stdout(shown):
            found.show()
        assert ("┃" in shown.getvalue()) == bool(terminal)
        assert (shown.getvalue() == f"{text}\n") == (not terminal)
    with kernel_choice.prefer("kernel"):
        (column,) = weft.explain(weft.ColumnParallelLinear(64, 64), tokens=64).layers
    assert column.computed["forward"].variant.startswith("MatmulConfig(")
    assert set(column.why_not_faster) == {"dgrad"}, "products on kernels are not slow, the communication still is apart"


def shows_others(rank):
    model = nn.Sequential(ParallelConv2d(4, 6, 3, style="column"), ParallelConv1D(8, 10, style="row"))
    convolution, linear = weft.explain(model, tokens=64).layers
    assert (convolution.layer, convolution.shard) == ("ParallelConv2d column", "(3, 4, 3, 3) of (6, 4, 3, 3)")
    assert convolution.forward_bytes is None and "unknown from tokens forward" in str(convolution)
    assert convolution.why_not_faster["forward"] == "weft has no kernel for this layer"
    assert linear.shard == "(4, 10) of (8, 10)" and linear.forward_bytes == 64 * 10 * 4
    with kernel_choice.prefer("kernel"):
        (linear,) = weft.explain(model[1], tokens=64).layers
    assert linear.computed["forward"].variant.startswith("MatmulConfig(")
    drawn = io.StringIO()
    Console(file=drawn, width=220).print(weft.explain(model))
    assert "unknown from tokens" in drawn.getvalue()
    json.loads(weft.explain(model).json())


def test_no_split_layer_is_passed_over():
    run_ranks(shows_others, 2)


def test_an_explanation_is_text_a_table_and_json():
    run_ranks(shows, 2)


@pytest.mark.slow("pytorch_ext/tools/explanation", "kernels")
def test_where_a_kernels_machine_code_comes_from_is_reported(tmp_path):
    """In a process that does not interpret, with no archive: by triton, and why."""
    code = (
        "import torch; from weft.ops.kernel_choice import origin; from weft.kernels import dispatch, launch; "
        "from weft.kernels.matmul_tiles import Problem; from weft import _C; from pathlib import Path; "
        f"dispatch.use(_C.launch, Path({str(tmp_path)!r})); "
        "print(origin(Problem(512, 256, 128, 'nt', True, torch.bfloat16), 'sm_90'))"
    )
    clean = {key: value for key, value in os.environ.items() if key not in ("TRITON_INTERPRET", "WEFT_NO_JIT")}
    for extra, start in (({}, "jit: "), ({"WEFT_NO_JIT": "1"}, "nowhere: ")):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**clean, **extra})
        assert done.stdout.startswith(f"{start}this installation has no compiled kernels for sm_90"), done


def forget_devices():
    kernel_choice._why_no_code.cache_clear()
    kernel_choice._devices.clear()


@pytest.mark.kernel
def test_without_triton_a_gpu_takes_what_was_compiled_ahead_of_time(monkeypatch, tmp_path):
    device = torch.device("cuda")
    monkeypatch.setattr(kernel_choice, "_HAS_TRITON", False)
    for found, taken in (("there is no archive", False), (object(), True)):
        monkeypatch.setattr(dispatch, "archive_of", lambda architecture, found=found: found)
        forget_devices()
        with launch.recording("sm_90"):
            assert kernel_choice.on_kernel(device) == kernel_choice.can_run(device) == taken
            if not taken:
                assert kernel_choice.excluded(device).reason.endswith(
                    "(pip install weft[gpu]), and there is no archive"
                )
    forget_devices()


@pytest.mark.kernel
def test_a_gpu_before_8_0_takes_atens_functions_by_name_and_strict_refuses_it(monkeypatch):
    device = torch.device("cuda:0")
    monkeypatch.setattr(launch, "_properties", lambda index: SimpleNamespace(major=7, minor=0, name="an old GPU"))
    forget_devices()
    try:
        assert not kernel_choice.on_kernel(device) and not kernel_choice.can_run(device)
        assert "need compute capability 8.0, the device has 7.0" in str(kernel_choice.excluded(device))
        with pytest.raises(ValueError, match="strict, and weft's kernels do not run on cuda:0: .* the device has 7.0"):
            kernel_choice.check_kernels({device, torch.device("cpu")})
        with kernel_choice.prefer("library"):
            kernel_choice.check_kernels({device})
    finally:
        forget_devices()


def asks_for_every_device(rank):
    asked = []
    parallelization.check_kernels = asked.append
    for strict in (False, True):
        weft.parallelize(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)), strict=strict)
    assert asked == [{torch.device("cpu")}]


def test_strict_asks_for_every_device_of_the_model():
    run_ranks(asks_for_every_device, 2)


@pytest.mark.kernel
def test_the_table_decides_between_kernel_and_library_and_is_quoted(monkeypatch):
    fast = Problem(4096, 1024, 8192, "nt", True, torch.bfloat16)
    slow = Problem(512, 1024, 8192, "nt", True, torch.bfloat16)
    tile = listed("sm_90", torch.bfloat16)[0]
    rows = (Entry(fast.key(), tile, 10.0, 12.5), Entry(slow.key(), tile, 10.0, 8.0))
    monkeypatch.setattr(config, "table", lambda *_: rows)
    kernel_choice._measured.cache_clear()
    device = torch.device("cuda")
    with launch.recording("sm_90"):
        assert (
            str(kernel_choice._measured(fast, device))
            == "weft kernel: the kernel has 1.25 times ATen's speed at 4096x1024x8192 on sm_90"
        )
        assert str(kernel_choice._measured(slow, device)).startswith("ATen: the kernel has 0.80 times ATen's speed")
        unmeasured = Problem(64, 64, 64, "nt", True, torch.bfloat16)
        assert (
            str(kernel_choice._measured(unmeasured, device))
            == "ATen: not measured at this size on sm_90; `weft.warm_up` measures it"
        )
        double = Problem(64, 64, 64, "nt", True, torch.float64)
        assert "does not take torch.float64" in str(kernel_choice._measured(double, device))
    kernel_choice._measured.cache_clear()


def names_what_stays_whole(rank):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6), nn.ConvTranspose1d(3, 3, 1))
    mesh = weft.init_mesh(tp=2, device_type="cpu")
    plan = metadata(weft.parallelize(model, mesh), "plan")
    found = weft.explain(model)
    assert found.whole == plan.whole and "no style for" in found.whole["3"]
    assert "3: whole on every rank: " in str(found) and json.loads(found.json())["whole"] == plan.whole
    console = Console(file=io.StringIO(), width=200)
    console.print(found)
    assert "whole on every rank" in console.file.getvalue()


class Records(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def tells_of_the_mesh(rank):
    logger, records = logging.getLogger("weft"), Records()
    root, logging.root.handlers = logging.root.handlers, []  # pytest's
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        weft.parallelize(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), weft.init_mesh(cp=2, device_type="cpu"))
    logging.root.handlers = root
    assert ("parallelize (cp=2): a rank holds 100% of 6 parameters" in printed.getvalue()) == (rank == 0)
    logger.addHandler(records)
    logger.setLevel(logging.INFO)
    torch.manual_seed(0)
    for mesh in ({"tp": 2}, {"dp": 2}, {"pp": 2}, {"cp": 2}):
        (name,) = mesh
        model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6), nn.ConvTranspose1d(3, 3, 1))
        model = weft.parallelize(model, weft.init_mesh(**mesh, device_type="cpu"))
        found = weft.explain(model, {"x": torch.zeros(5, 3, 6)})
        assert found.tokens == 15 and found.ranks[0].startswith(f"{name}: 2 ranks, ") and found.ranks[0] in str(found)
        assert json.loads(found.json())["ranks"] == list(found.ranks)
    assert weft.explain(model, torch.zeros(2, 7, dtype=torch.int64)).tokens == 14
    with pytest.raises(ValueError, match="not both"):
        weft.explain(model, torch.zeros(2), tokens=2)
    if rank:
        assert not records.lines
        return
    first = records.lines[0]
    assert first == (
        "parallelize (tp=2): a rank holds 57% of 122 parameters; whole on every rank: 3 (no such style); "
        "weft.explain(model) for the rest"
    ), first
    assert [line.partition(")")[0][-4:] for line in records.lines] == ["tp=2", "dp=2", "pp=2", "cp=2"]


def test_what_each_dimension_of_the_mesh_does_is_reported_and_logged():
    run_ranks(tells_of_the_mesh, 2)


def test_a_configuration_is_explained_on_the_command_line(tmp_path, capsys):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = dict(vocab_size=61, hidden_size=32, intermediate_size=46, num_hidden_layers=1, num_attention_heads=4)
    transformers.LlamaConfig(**sizes, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    assert cli.main(["explain", str(tmp_path / "config.json"), "--tp", "3"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("tp: 3 ranks\nevery rank holds about 3")
    assert "model.layers.0.mlp.up_proj: column\n" in text and "self_attn.o_proj: row (unit=8)" in text
    assert cli.main(["explain", str(tmp_path), "--tp", "9", "--json"]) == 0
    assert "are fewer than 9 ranks" in json.loads(capsys.readouterr().out)["planned"]["model.layers.0.self_attn.q_proj"]
    for wrong in ([str(tmp_path / "none")], [str(tmp_path), "--tp", "0"]):
        assert cli.main(["explain", *wrong]) == 2
        assert capsys.readouterr().err.startswith("weft explain: ")


def test_what_an_automatic_plan_leaves_whole_is_named():
    run_ranks(names_what_stays_whole, 2)


def explain_sharded(rank):
    model = nn.Sequential(nn.Linear(16, 64, bias=False), nn.GELU(), nn.Linear(64, 16, bias=False))
    model = weft.parallelize(model, weft.init_mesh(dp=2, tp=2), zero=3)
    text = str(weft.explain(model))
    # Each of two ranks has half of the 1024 fp32 numbers that tp leaves it.
    assert "dp: 2 ranks, each has its part of the batch, and of parameters, gradients and optimizer state" in text
    assert "receives up to 4 KiB of parameters and sends 2 KiB of gradients" in text
    assert "this rank holds 512 of 2,048 parameters" in text


def test_sharded_parameters_say_what_a_step_sends():
    run_ranks(explain_sharded, 4)
