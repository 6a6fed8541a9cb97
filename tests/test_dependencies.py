"""Dependencies run one way, and importing weft imports nothing else."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {"weft": ROOT / "pytorch_ext", "weft.kernels": ROOT / "kernels", "weft.bench": ROOT / "bench"}

LEAVES = {"weft.split"}  # need the standard library only
# What each part may import of weft, besides itself. None: everything but what is needed by nothing.
ALLOWED = {
    "weft.kernels": set(),
    "weft.planner": set(),
    "weft.comm": {"weft._C", "weft.kernels", *LEAVES},
    "weft.sharded_grad": {"weft.comm"},
    "weft.shard": {"weft.sharded_grad", "weft.comm", *LEAVES},
    "weft.optimizer_check": {"weft.stages", "weft.shard", "weft.sharded_grad"},
    "weft.replicas": {"weft.context", "weft.stages", "weft.comm", "weft.shard"},
    "weft.ops": {"weft._C", "weft.kernels", "weft.comm", "weft.shard", *LEAVES},
    "weft.nn": {"weft.optimizer_check", "weft.sharded_grad", "weft.ops", "weft.comm", "weft.shard", *LEAVES},
    "weft.mesh": {"weft.comm"},
    "weft.context": {"weft.kernels", "weft.nn", "weft.ops", "weft.comm", *LEAVES},
    "weft.splitting": {"weft.checkpoint", "weft.context", "weft.nn", "weft.ops", "weft.comm", "weft.shard", *LEAVES},
    "weft.parallelize": {
        *("weft.splitting", "weft.context", "weft.recompute", "weft.layer_split", "weft.data_parallel"),
        *("weft.explaining", "weft.replicas", "weft.saving", "weft.nn", "weft.comm"),
    },
    "weft.gradients": {
        *("weft._C", "weft.optimizer_check", "weft.stages", "weft.comm", "weft.shard", "weft.sharded_grad"),
        *LEAVES,
    },
    "weft.gradient_norm": {
        "weft.sharded_grad",
        "weft.data_parallel",
        "weft.gradients",
        "weft.stages",
        "weft.comm",
        "weft.shard",
    },
    "weft.dtensors": {"weft.comm", "weft.shard"},
    "weft.full_state_dict": {"weft.data_parallel", "weft.stages", "weft.comm", "weft.shard"},
    "weft.recompute": {"weft.stages", "weft.context"},
    "weft.data_parallel": {"weft.replicas", "weft.gradients", "weft.stages", "weft.comm", "weft.shard"},
    "weft.saving": {"weft.optimizer_check", "weft.data_parallel", "weft.gradients", "weft.comm", "weft.shard", *LEAVES},
    "weft.checkpoint": {"weft.saving"},
    "weft.optim": {"weft._C", "weft.gradients", "weft.comm", "weft.shard", *LEAVES},
    "weft.stages": {"weft._C", "weft.context", "weft.comm", "weft.shard", "weft.sharded_grad"},
    "weft.pipeline": {
        *("weft._C", "weft.replicas", "weft.stages", "weft.context", "weft.comm", "weft.shard", "weft.sharded_grad"),
        *("weft.layer_split", "weft.data_parallel", "weft.recompute"),  # what it refuses
    },
    "weft.layer_split": {"weft.replicas", "weft.stages", "weft.context", "weft.comm"},
    "weft.explaining": {"weft.splitting", "weft.shard"},
    "weft.explain": {"weft.splitting", "weft.explaining", "weft.context", "weft.kernels", "weft.nn", "weft.ops"},
    "weft.adapters": {
        *("weft.splitting", "weft.full_state_dict", "weft.context", "weft.nn", "weft.comm", "weft.shard"),
        "weft.data_parallel",
    },
    "weft.build_info": {"weft._C"},
    "weft.verify": {"weft.data_parallel", "weft.gradients", "weft.shard", "weft.sharded_grad"},
    "weft.doctor": {"weft._C", "weft.build_info", "weft.kernels", "weft.testing"},
    "weft.split": set(),
    "weft.testing": None,
    "weft.bench": None,
    "weft.cli": None,
    "weft.__main__": {"weft.cli"},
}
NEEDED_BY_NOTHING = {"weft.bench", "weft.cli"}


def modules():
    for package, folder in FOLDERS.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            yield ".".join([package, *(part for part in parts if part != "__init__")]), path


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (
                (f"{node.module}.{alias.name}" for alias in node.names) if node.module == "weft" else [node.module]
            )


def part_of(module):
    return ".".join(module.split(".")[:2])


@pytest.mark.parametrize(("module", "path"), [pytest.param(*pair, id=pair[0]) for pair in modules()])
def test_imports_follow_the_direction(module, path):
    if module == "weft":
        assert {name for name in imports_of(path) if name.startswith("weft")} == {"weft.comm.register"}
        return
    part = part_of(module)
    assert part in ALLOWED, f"{part} is new: say in this test what it may import"
    allowed = ALLOWED[part]
    for imported in imports_of(path):
        if imported.split(".")[0] != "weft" or imported == "weft" or part_of(imported) == part:
            continue
        if allowed is None:
            assert part in NEEDED_BY_NOTHING or part_of(imported) not in NEEDED_BY_NOTHING
        else:
            assert part_of(imported) in allowed, f"{module} imports {imported}"


def test_the_extension_includes_no_torch_header():
    for path in (ROOT / "csrc").rglob("*"):
        if path.suffix in (".cpp", ".cu", ".h"):
            text = path.read_text()
            assert "torch/" not in text and "ATen" not in text and "c10/" not in text, path


def run(code, **environment):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PATH": "", **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_weft_imports_neither_torch_nor_triton():
    assert (
        run(
            "import sys, weft; weft.split_sizes(5, 2); weft.build_info(); print(sorted({'torch', 'triton', 'numpy'} & set(sys.modules)))"
        )
        == "[]\n"
    )


def test_a_function_is_found_also_where_its_module_has_its_name():
    names = "build_info doctor explain parallelize verify"
    code = f"import importlib, weft\nfor n in {names.split()}: importlib.import_module('weft.' + n); print(type(getattr(weft, n)).__name__)"
    assert run(code).split() == ["function"] * 5


def test_what_needs_no_torch_works_where_there_is_none():
    block = "import sys; sys.modules['torch'] = sys.modules['triton'] = None\n"
    assert run(block + "import weft; print(weft.split_sizes(5, 2), weft.build_info()['version'])") == "[3, 2] 0.1.0\n"


@pytest.mark.parametrize("order", ["import weft, torch.distributed as dist", "import torch.distributed as dist, weft"])
def test_the_backend_is_registered_whichever_is_imported_first(order):
    assert run(f"{order}; print('weft' in dist.Backend.backend_list)") == "True\n"


def test_the_folders_refuse_their_own_names():
    for folder, package in (("kernels", "weft.kernels"), ("pytorch_ext", "weft")):
        done = subprocess.run(
            [sys.executable, "-c", f"import {folder}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            env={"PYTHONPATH": str(ROOT)},
        )
        assert done.returncode != 0 and "source of" in done.stderr and package in done.stderr
    import weft

    with pytest.raises(AttributeError, match="has no attribute 'Parallel'; it has .*ParallelLinear"):
        weft.Parallel
