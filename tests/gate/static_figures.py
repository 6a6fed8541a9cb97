"""`python tests/gate/static_figures.py`: count instructions of our kernels' loops and of other Triton kernels'.

The peers are three tutorials of Triton (matmul, persistent matmul, fused attention) and Liger's loss. Their own
functions launch them here, with every tile that they list for their autotuner, and the launches are recorded. The same
Triton and the same assembler then compile all kernels. No GPU is needed.

A figure is that of the fewest instructions of one turn of the innermost loop, the spins of barriers and what a turn may
skip left out. Each kernel has the figures of its tile with the fewest of them. Products: all but those of the tensor
cores, of all warps, for 2048 multiply-adds, which are one HMMA of sm_80. Losses: all, of a thread, for a logit.

The tutorials take fp16, so all products are compared in it, and the losses in bf16. A masked loop computes tiles
that only some positions see. The tutorials' variants that give warps different work have no one loop to compare, and
are not here.
"""

import argparse
import ast
import contextlib
import importlib
import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.errors import CompileTimeAssertionFailure
from triton.runtime.errors import PTXASError
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from weft.kernels import attention_tiles, launch, machine_code, matmul_tiles, variants
from weft.kernels.attention import attention_backward, attention_forward
from weft.kernels.attention_rules import Rules
from weft.kernels.matmul import matmul
from weft.kernels.signature import Launch

sys.path.insert(0, str(Path(__file__).parent))
import sass

RESULTS = Path("bench") / "results" / "static_figures.json"
ARCHITECTURES = tuple(each for each in launch.ARCHITECTURES if each != "sm_120")  # which has sm_80's kernels
HEAD_DIMS = (64, 128)
LOOPS = (
    *("matmul nn", "matmul nt"),
    *(
        f"attention {kind}, head dim {dim}{masked}"
        for kind in ("forward", "dkdv", "dq")
        for dim in HEAD_DIMS
        for masked in ("", ", masked")
    ),
    *("loss statistics", "loss gradient"),
)
UNIT = 2048  # multiply-adds of HMMA.16816
_VOCABULARY = 128256
_TENSOR_MEMORY_COLUMNS = 512
_MATMUL, _PERSISTENT, _ATTENTION = "03-matrix-multiplication", "09-persistent-matmul", "06-fused-attention"
# The last definition that a tutorial's launches need: what follows are its own measurements.
_LAST = {_MATMUL: "matmul", _PERSISTENT: "matmul_descriptor_persistent", _ATTENTION: "attention"}
# Where a peer has fewer instructions than ours: the reason, loops and architectures.
_MORE: dict[str, dict[str, tuple[str, ...]]] = {
    "the peer's tile is deeper": {"matmul nn": ("sm_80",), "matmul nt": ("sm_80",)},
    "ours may cut K into pieces": {"matmul nt": ("sm_90",)},
    "the peer's warps have more of a tile each": {
        "matmul nt": ("sm_100",),
        "attention forward, head dim 64": ("sm_80", "sm_100"),
        "attention forward, head dim 128": ("sm_80", "sm_100"),
        "attention dkdv, head dim 64": ("sm_100",),
        "attention dkdv, head dim 128": ("sm_100",),
        "attention dq, head dim 64": ("sm_80", "sm_100"),
        "attention dq, head dim 128": ("sm_100",),
    },
    "ours finds each tile in two runs of positions": {"attention forward, head dim 128": ("sm_90",)},
    "ours scales lse in each turn": {"attention dkdv, head dim 64": ("sm_90",)},
    "ours masks any window, document and end, the peer a diagonal": {
        "attention forward, head dim 64, masked": ("sm_80", "sm_90"),
        "attention forward, head dim 128, masked": ("sm_80", "sm_90"),
        "attention dkdv, head dim 64, masked": ("sm_80", "sm_90"),
        "attention dq, head dim 64, masked": ("sm_90",),
        "attention dq, head dim 128, masked": ("sm_100",),
    },
}
EXCEPTIONS = {
    (loop, architecture): reason
    for reason, loops in _MORE.items()
    for loop, architectures in loops.items()
    for architecture in architectures
}

Products = tuple[tuple[int, int, int], ...]  # rows, columns and depth of each product of a turn
Row = dict[str, Any]


@dataclass(frozen=True)
class Loop:
    """A loop of a kernel: its name in the table, and what one turn of it computes.

    Attributes:
        products: Of one turn; none for a loss.
        logits: Of one turn of a program.
    """

    name: str
    products: Products = ()
    logits: int = 0


@dataclass(frozen=True)
class Candidate:
    """A kernel with one of its tiles, and its loops to count.

    Of the loops of the machine code with equal products, the first here is that with the fewest instructions.
    """

    kernel: str
    launch: Launch
    loops: tuple[Loop, ...]


def rows(architecture: str, tutorials: Path | None = None, liger: Path | None = None) -> list[Row]:
    """Return the figures of every loop and kernel on that architecture, each of the kernel's best tile.

    Args:
        tutorials: Folder with the tutorials' files; without it, they are left out.
        liger: Folder that `liger_kernel` is installed in; without it, Liger is left out.
    """
    places = [("", architecture, number) for number in range(len(_candidates(architecture, tutorials, liger)))]
    counted = variants.on_each(partial(_count, tutorials, liger), places)
    best: dict[tuple[str, str], Row] = {}
    for row in (row for found in counted for row in found):
        key = row["loop"], row["kernel"]
        if key not in best or row["instructions_per_unit"] < best[key]["instructions_per_unit"]:
            best[key] = row
    return sorted(best.values(), key=place)


def figures(candidate: Candidate, architecture: str) -> list[Row]:
    """Compile the kernel and return a row for each of its loops; none if it does not fit the device."""
    machine_code.fix_addresses()
    with TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        try:
            built, _ = machine_code.assemble(candidate.launch, architecture)
        except (CompileTimeAssertionFailure, PTXASError):  # the autotuner skips such a tile too
            return []
    columns = getattr(built.metadata, "tmem_size", None) or 0
    if built.metadata.shared > launch.SHARED_LIMIT_BYTES[architecture] or columns > _TENSOR_MEMORY_COLUMNS:
        return []
    code = sass.parsed(machine_code.disassembled(built.asm["cubin"], "nvdisasm", "-c"))
    registers, spilled = machine_code.registers_of(built.asm["cubin"])
    warps = candidate.launch.warps
    product_turns = _product_turns(code)
    found = []
    for loop in candidate.loops:
        if loop.products:
            turn = next((each for each in product_turns if _computes(each, loop.products, warps)), [])
        else:
            turn = _loss_turn(code, loop, warps)
        if not turn:
            continue  # the compiler has unrolled the loop
        product_turns = [each for each in product_turns if each is not turn]
        tensor = sum(map(_is_tensor, turn))
        others = len(turn) - tensor
        work = sum(map(math.prod, loop.products)) / UNIT / warps if loop.products else loop.logits / (32 * warps)
        found.append(
            {
                "loop": loop.name,
                "architecture": architecture,
                "kernel": candidate.kernel,
                "tile": str(candidate.launch),
                "registers": registers,
                "spilled_bytes": spilled,
                "shared_bytes": built.metadata.shared,
                "tensor_instructions": tensor,
                "other_instructions": others,
                "instructions_per_unit": round(others / work, 3),
                "reason": EXCEPTIONS.get((loop.name, architecture), "") if candidate.kernel == "weft" else "",
            }
        )
    return found


def _is_tensor(instruction: sass.Instruction) -> bool:
    return re.match(r"HMMA|HGMMA|UTC\w*MMA", instruction.opcode) is not None


def _product_turns(code: sass.Code) -> list[list[sass.Instruction]]:
    """Return a turn of each innermost loop with products, the shortest first."""
    turns = [code.turn(points, inside) for inside, points in code.loops_with(_is_tensor)]
    return sorted(([code.instructions[at] for at in turn] for turn in turns), key=len)


def _computes(turn: list[sass.Instruction], products: Products, warps: int) -> bool:
    """Return True if all warps together compute these products in the turn."""
    opcodes = [instruction.opcode for instruction in turn if _is_tensor(instruction)]
    if opcodes[0].startswith("UTC"):  # its sizes are in a register: each is of 128 rows and 16 deep
        return len(opcodes) == sum(-(-m // 128) * k // 16 for m, _, k in products)
    done = 0
    for opcode in opcodes:
        if size := re.match(r"HGMMA\.(\d+)x(\d+)x(\d+)", opcode):
            done += math.prod(map(int, size.groups())) * warps // 4
        elif opcode.startswith("HMMA.16816"):
            done += UNIT * warps
        else:
            raise ValueError(f"{opcode} has no known size")
    return done == sum(map(math.prod, products))


def _loss_turn(code: sass.Code, loop: Loop, warps: int) -> list[sass.Instruction]:
    """Return a turn of the statistics' loop, or of the gradient's, which stores."""

    def is_load(instruction: sass.Instruction) -> bool:
        return instruction.opcode.startswith("LDG")

    def is_store(instruction: sass.Instruction) -> bool:
        return instruction.opcode.startswith("STG")

    stores = "gradient" in loop.name
    turns = []
    for inside, points in code.loops_with(is_store if stores else is_load):
        if any(is_load(code.instructions[at]) for at in inside):
            turns += [code.turn([point], inside) for point in points]
    whole = [[code.instructions[at] for at in turn] for turn in turns]
    loads = 2 * loop.logits // (32 * warps) // 16
    whole = [turn for turn in whole if sum("LDG.E.128" in instruction.opcode for instruction in turn) == loads]
    return min(whole, key=len, default=[])


@lru_cache
def _candidates(architecture: str, tutorials: Path | None, liger: Path | None) -> list[Candidate]:
    found = [*_own_products(architecture), *_own_losses(architecture)]
    if tutorials:
        found += _tutorial_products(architecture, tutorials)
        found += _tutorial_attention(architecture, tutorials)
    if liger:
        found += _liger_losses(architecture, liger)
    return found


def _count(tutorials: Path | None, liger: Path | None, _: str, architecture: str, number: int) -> list[Row]:
    return figures(_candidates(architecture, tutorials, liger)[number], architecture)


def _own_products(architecture: str) -> Iterator[Candidate]:
    def empty(*shape: int, dtype=torch.float16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def recorded(call: Callable, *arguments: object, **options: object) -> list[Launch]:
        with launch.recording(architecture) as made:
            call(*arguments, **options)
        return made

    a = empty(4096, 1024)
    for layout, b in (("nn", empty(1024, 4096)), ("nt", empty(4096, 1024).t())):
        for config in matmul_tiles.listed(architecture, a.dtype):
            (made,) = recorded(matmul, a, b, config=config)
            products = ((config.block_m, config.block_n, config.block_k),)
            yield Candidate("weft", made, (Loop(f"matmul {layout}", products),))
    for dim in HEAD_DIMS:
        q, lse = empty(2, 8, 4096, dim), empty(2, 8, 4096, dtype=torch.float32)
        forward = partial(attention_forward, q, q, q, Rules(right=0))
        backward = partial(attention_backward, q, q, q, q, lse, lse, Rules(right=0))
        for kind, call, option, at in (
            ("forward", forward, "config", 0),
            ("dkdv", backward, "dkdv_config", 0),
            ("dq", backward, "dq_config", 1),
        ):
            for tile in attention_tiles.listed(kind, architecture, dim):
                made = recorded(call, **{option: tile})[at]
                loops = [_attention_loop(kind, tile.block_m, tile.block_n, dim, masked) for masked in (False, True)]
                yield Candidate("weft", made, tuple(loops))


def _attention_loop(kind: str, queries: int, keys: int, dim: int, masked: bool = False) -> Loop:
    scores, of_queries, of_keys = (queries, keys, dim), (queries, dim, keys), (keys, dim, queries)
    turned = (keys, queries, dim)
    products: dict[str, Products] = {
        "forward": (scores, of_queries),
        "dkdv": (turned, turned, of_keys, of_keys),
        "dq": (scores, scores, of_queries),
    }
    return Loop(f"attention {kind}, head dim {dim}{', masked' if masked else ''}", products[kind])


def _own_losses(architecture: str) -> Iterator[Candidate]:
    for made in variants.record("cross_entropy", architecture):
        loop = {"_statistics_kernel": "loss statistics", "_gradient_kernel": "loss gradient"}.get(made.kernel.__name__)
        if loop and made.arguments[0].dtype == torch.bfloat16 and not made.constants.get("SMOOTHING"):
            yield Candidate("weft", made, (Loop(loop, logits=made.constants["BLOCK"]),))


def _tutorial_products(architecture: str, folder: Path) -> Iterator[Candidate]:
    a = torch.empty(1024, 1024, dtype=torch.float16)
    calls: list[tuple[str, str, str, tuple]] = [
        (file, function, layout, (a, b))
        for file, function in ((_MATMUL, "matmul"), (_PERSISTENT, "matmul_persistent"))
        for layout, b in (("nn", a), ("nt", a.t()))
    ]
    if architecture != "sm_80":  # without the copy engine, the tutorial does not run these
        functions = "matmul_tma_persistent", "matmul_descriptor_persistent"
        calls += [(_PERSISTENT, function, "nt", (a, a, False)) for function in functions]
    for file, function, layout, arguments in calls:
        with _recording(architecture, on_gpu=file == _MATMUL) as made:
            getattr(_imported(folder, file), function)(*arguments)
        for each in made:
            sizes = tuple(each.constants[f"BLOCK_SIZE_{letter}"] for letter in "MNK")
            name = f"{file[:2]} {each.kernel.__name__}"
            yield Candidate(name, each, (Loop(f"matmul {layout}", (sizes,)),))


def _tutorial_attention(architecture: str, folder: Path) -> Iterator[Candidate]:
    for dim, causal in ((dim, causal) for dim in HEAD_DIMS for causal in (False, True)):
        q = torch.zeros(1, 1, 1024, dim, dtype=torch.float16, requires_grad=True)
        with _recording(architecture) as made:
            out = _imported(folder, _ATTENTION).attention(q, q, q, causal, 0.5, False)
            out.backward(torch.zeros_like(out))
        for each in made:
            tile = each.constants
            if each.kernel.__name__ == "_attn_fwd":
                sizes = tile["BLOCK_M"], tile["BLOCK_N"]
                loops = [("forward", *sizes, dim, masked) for masked in (False, True)]
            elif each.kernel.__name__ == "_attn_bwd":
                m1, n1, m2, n2 = (tile[name] for name in ("BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2"))
                parts = tile["BLK_SLICE_FACTOR"]  # a masked tile is shorter in the direction of the loop
                loops = [("dkdv", m1, n1, dim, False), ("dq", m2, n2, dim, False)]
                loops += [("dkdv", m1 // parts, n1, dim, True), ("dq", m2, n2 // parts, dim, True)]
            else:
                continue
            counted = [_attention_loop(*loop) for loop in loops if causal or not loop[-1]]
            yield Candidate(f"06 {each.kernel.__name__}", each, tuple(counted))


def _liger_losses(architecture: str, folder: Path) -> Iterator[Candidate]:
    logits = torch.zeros(1, _VOCABULARY, dtype=torch.bfloat16, requires_grad=True)
    target = torch.zeros(1, dtype=torch.int64)
    with _recording(architecture) as made, mock.patch.object(sys, "path", [*sys.path, str(folder)]):
        module = importlib.import_module("liger_kernel.ops.cross_entropy")
        family = "blackwell" if architecture == "sm_100" else "hopper or earlier"
        with mock.patch.object(module, "infer_device_arch", lambda: family):
            module.cross_entropy_forward(logits, target, None, -100, 0.0, 0.0, "mean", None, False)
    for each in made:
        block = each.constants["BLOCK_SIZE"]
        loops = Loop("loss statistics", logits=block), Loop("loss gradient", logits=block)
        yield Candidate(f"liger {each.kernel.__name__}", each, loops)


class _Driver:
    """What peers ask Triton's driver, for a device that is not there. Its timer calls each tile of an autotuner."""

    def __init__(self, architecture: str, on_gpu: bool):
        self._target = GPUTarget("cuda" if on_gpu else "", int(architecture.removeprefix("sm_")), 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Callable:
        def run(call: Callable[[], object], quantiles: object) -> list[float]:
            call()
            return [0.0, 0.0, 0.0]

        return run


@contextlib.contextmanager
def _recording(architecture: str, on_gpu: bool = True) -> Iterator[list[Launch]]:
    """Collect the launches of any Triton kernels inside, as on a device of that architecture, without running them.

    Args:
        on_gpu: False to show no GPU, but its capability only.
    """
    made: list[Launch] = []

    def run(kernel: JITFunction, *arguments: object, grid: object, warmup: bool, **options: Any) -> None:
        values = {**dict(zip(kernel.arg_names, arguments, strict=False)), **options}
        constants = {each.name: values[each.name] for each in kernel.params if each.is_constexpr}
        given = [values[each.name] for each in kernel.params if not each.is_constexpr]
        # The autotuner sets the block of the one descriptor anew for each tile.
        given = [replace(each) if isinstance(each, TensorDescriptor) else each for each in given]
        warps, stages = options.get("num_warps", 4), options.get("num_stages", 3)
        made.append(Launch(kernel, (1,), tuple(given), constants, warps, stages))

    capability = divmod(int(architecture.removeprefix("sm_")), 10)
    driver = triton.runtime.driver
    with contextlib.ExitStack() as patches:
        for where, name, value in (
            (JITFunction, "run", run),
            (driver, "_active", _Driver(architecture, on_gpu)),
            (torch.cuda, "get_device_capability", lambda *_: capability),
            (torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(multi_processor_count=132)),
        ):
            patches.enter_context(mock.patch.object(where, name, value))
        yield made
    made[:] = {(repr(each.constants), str(each)): each for each in made}.values()


def _imported(folder: Path, name: str) -> ModuleType:
    """Return a new module with the tutorial's definitions up to the last that its launches need."""
    path = folder / f"{name}.py"
    tree = ast.parse(path.read_text())
    names = [_defined(statement) for statement in tree.body]
    tree.body = tree.body[: names.index(_LAST[name]) + 1]
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module  # where Triton looks for the names that a kernel refers to
    exec(compile(tree, str(path), "exec"), module.__dict__)
    return module


def _defined(statement: ast.stmt) -> str | None:
    target = statement.targets[0] if isinstance(statement, ast.Assign) else statement
    return getattr(target, "name", getattr(target, "id", None))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python tests/gate/static_figures.py", description=__doc__.split("\n\n")[0])
    parser.add_argument("--tutorials", type=Path, metavar="FOLDER", help="Triton's python/tutorials")
    parser.add_argument("--liger", type=Path, metavar="FOLDER", help="folder that liger_kernel is installed in")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FILE", help=f"default {RESULTS}")
    options = parser.parse_args(arguments)
    if launch.INTERPRETED:
        parser.error("TRITON_INTERPRET=1 is set: there is no machine code to count; unset it")
    saved = json.loads(options.out.read_text()) if options.out.exists() else {"peers": {}, "rows": []}
    peers = saved["peers"]
    if options.tutorials:
        files = {f"{name}.py": (options.tutorials / f"{name}.py").read_bytes() for name in _LAST}
        peers["tutorials, sha256"] = {name: sha256(text).hexdigest() for name, text in files.items()}
    if options.liger:
        (found,) = metadata.distributions(name="liger-kernel", path=[str(options.liger)])
        peers["liger-kernel"] = found.version
    for architecture in ARCHITECTURES:
        saved = {
            "command": "python tests/gate/static_figures.py --tutorials FOLDER --liger FOLDER",
            "triton": triton.__version__,
            "ptxas": {each: machine_code.assembler_version(each) for each in ARCHITECTURES},
            "peers": peers,
            "rows": merged(saved["rows"], rows(architecture, options.tutorials, options.liger)),
        }
        options.out.write_text(json.dumps(saved, indent=1) + "\n")
    for ours, peer in above(saved["rows"]):
        print(f"{ours['loop']}, {ours['architecture']}: more instructions than {peer['kernel']}")


def merged(old: list[Row], new: list[Row]) -> list[Row]:
    """Return the new rows, and those of the old ones that they do not replace, in the order of the table."""
    found = {(row["loop"], row["architecture"], row["kernel"]): row for row in [*old, *new]}
    compared = {place(row) for row in found.values() if row["kernel"] != "weft"}
    kept = [row for row in found.values() if place(row) in compared]
    return sorted(kept, key=lambda row: (*place(row), row["kernel"] != "weft", row["kernel"]))


def place(row: Row) -> tuple[int, int]:
    """Return the number of the row's loop, and that of its architecture."""
    return LOOPS.index(row["loop"]), ARCHITECTURES.index(row["architecture"])


def above(found: list[Row]) -> list[tuple[Row, Row]]:
    """Return our rows with more instructions than a peer's, each with each such peer's."""
    ours, peers = ([row for row in found if (row["kernel"] == "weft") == own] for own in (True, False))
    return [
        (row, peer)
        for row in ours
        for peer in peers
        if place(row) == place(peer) and row["instructions_per_unit"] > peer["instructions_per_unit"]
    ]


if __name__ == "__main__":
    main()
