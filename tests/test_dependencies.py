"""Dependencies run one way, and importing weft imports nothing else."""

import ast
import inspect
import subprocess
import sys
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from imports import modules, modules_named

import weft

ROOT = Path(__file__).parent.parent

# From the bottom up: a part imports those of lines above its own, and itself. Imports inside of functions count.
LAYERS = [
    {"weft._C", "weft.kernels", "weft.tools.planner"},
    {"weft.build", "weft.arguments", "weft.metadata", "weft.forward", "weft.comm"},
    {"weft.mesh", "weft.sharding", "weft.rng", "weft.layer_lists"},
    {"weft.ops"},
    {"weft.nn", "weft.testing"},
    {"weft.context_parallel"},
    {"weft.invariant"},
    {"weft.replicas", "weft.output_gradients", "weft.activation_checkpoint", "weft.tensor_parallel"},
    {"weft.data_parallel"},
    {"weft.pipeline", "weft.clip_grad", "weft.optim", "weft.checkpoint"},
    {"weft.adapters"},
    {"weft.tools"},
    {"weft.parallelization"},
    {"weft.pretrained"},
    {"weft.bench", "weft.cli"},
    {"weft.__main__"},
]
WITHOUT_WEFT = {"weft.kernels", "weft.tools.planner"}  # import nothing of weft but themselves, weft._C included


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
    return ".".join(module.split(".")[: 3 if module.startswith("weft.tools.planner") else 2])


PUBLIC = """
    all_gather all_reduce all_reduce_rms_norm all_to_all as_dtensors barrier broadcast build_info causal_probe
    check_replicas check_waits CheckpointError clip_grad_norm_ CollectiveMismatchError CollectiveTimeoutError
    ColumnParallelLinear CommError compare context_attention DataParallel ddp_hook DiLoCo doctor empty_symmetric explain export_safetensors
    FSDPAllGather FSDPReduceScatter full_state_dict HookState init_mesh LAMB LARS LayerSplit from_pretrained layerwise_groups
    linear_scaling load_balancing_loss load_checkpoint load_safetensors merge_attention Muon parallel_cross_entropy
    parallel_linear_cross_entropy ParallelConv1d ParallelConv2d ParallelConv3d ParallelEmbedding ParallelExperts parallelize ParallelLinear Pipeline plan RankLostError record reduce_scatter router_z_loss RowParallelLinear
    save_checkpoint Shard shard_of shard_sequence split_sizes state_hash topk_gating trace unshard_sequence verify warm_up
"""


def level_of(part):
    levels = [level for level, parts in enumerate(LAYERS) if part in parts]
    assert levels, f"{part} is new: say in this test where it stands"
    return levels[0]


@pytest.mark.parametrize(("module", "path"), [pytest.param(*pair, id=pair[0]) for pair in modules()])
def test_imports_follow_the_direction(module, path):
    if module == "weft":
        assert {name for name in imports_of(path) if name.startswith("weft")} == {"weft.comm.register"}
        return
    part = part_of(module)
    for imported in imports_of(path):
        if imported.split(".")[0] != "weft" or imported == "weft" or part_of(imported) == part:
            continue
        assert part not in WITHOUT_WEFT, f"{module} imports {imported}"
        assert level_of(part_of(imported)) < level_of(part), f"{module} imports {imported}"


def test_no_modules_import_each_other():
    """Directly or by way of others, inside of functions and under TYPE_CHECKING too."""
    paths = dict(modules())
    needs = {}
    for module, path in paths.items():
        needs[module] = set(modules_named(path, paths)) - {"weft", module}
    assert list(TopologicalSorter(needs).static_order())


def test_no_two_classes_have_one_name():
    names = Counter()
    for _, path in modules():
        tree = ast.parse(path.read_text())
        names.update(node.name.lstrip("_") for node in tree.body if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []


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


def functions_of(name, public):
    """Of a public name: itself, or the public methods that its own class defines."""
    if inspect.isclass(public):
        own = {f"{name}.{key}": getattr(public, key) for key in vars(public) if key[0] != "_" or key == "__init__"}
        return {key: inspect.unwrap(method) for key, method in own.items() if inspect.isroutine(method)}
    return {name: public} if inspect.isfunction(public) else {}


@pytest.mark.parametrize("name", PUBLIC.split())
def test_public_functions_are_annotated_in_full(name):
    for full, function in functions_of(name, getattr(weft, name)).items():
        signature = inspect.signature(function)
        bare = [one.name for one in signature.parameters.values() if one.annotation is one.empty and one.name != "self"]
        assert bare == [], full
        assert full.endswith("__init__") or signature.return_annotation is not signature.empty, full


ALL_NAMES = """
import importlib, pkgutil, types, weft
for module in pkgutil.iter_modules(weft.__path__):
    if module.name != "__main__":
        importlib.import_module(f"weft.{module.name}")
assert not set(vars(weft)) & set(weft.__all__), "a module has taken a name"
for name in weft.__all__:
    assert not isinstance(getattr(weft, name), types.ModuleType), name
print(*weft.__all__)
"""


def test_the_public_names_are_these_and_stay_what_they_are_whatever_else_is_imported():
    assert sorted(run(ALL_NAMES).split()) == sorted(PUBLIC.split())


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
