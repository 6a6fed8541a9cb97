"""weft tune: measure every tile configuration and the library's function, and write the winners' tables."""

import argparse
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F

from weft.bench import grouped_matmul as grouped_bench
from weft.bench.environment import environment
from weft.bench.matmul import products, shards
from weft.kernels import attention_tiles, launch
from weft.kernels import config as configs
from weft.kernels import grouped_matmul as grouped
from weft.kernels.attention import attention_backward, attention_delta, attention_forward
from weft.kernels.attention_rules import Positions, Rules
from weft.ops import kernel_choice, library_attention
from weft.ops.attention_blocks import AttentionChunk
from weft.ops.matmul import gated
from weft.testing import cases
from weft.tools import tuning

# A row serves sizes within a factor of two, so these serve 1k to 16k tokens and 1 to 16 ranks.
TOKENS, TENSOR_PARALLEL = (2048, 8192), (2, 8)
ATTENTIONS = [
    cases.AttentionCase(32, 8, sequence, head_dim, causal)
    for head_dim in (64, 128)
    for sequence in (2048, 8192)
    for causal in (True, False)
]
_CHECKED = 64  # rows that are compared with fp64
_POSITIONS = 16384  # batch times sequence

Named = Iterator[tuple[str, configs.Entry | None]]  # with the name of its table; None if no tile was right


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", action="append", choices=cases.MODELS, help="for matmul; all by default")
    parser.add_argument("--out", metavar="FOLDER", help="where the tables go; by default into the installed package")


def run(op: str, options) -> int:
    """Write the op's tables, anew after each entry, and return the exit code; raise SystemExit without a GPU."""
    if not torch.cuda.is_available():
        raise SystemExit("weft tune: there is no CUDA device here, and only measurements go into a table")
    device, dtype = torch.device("cuda"), torch.bfloat16
    named = {
        "attention": lambda: attentions(ATTENTIONS, device, dtype, _POSITIONS),
        "grouped": lambda: experts(grouped_bench.MIXTURES.values(), TOKENS, device, dtype),
        "matmul": lambda: layers(shards(options.model, TENSOR_PARALLEL, TOKENS), device, dtype),
    }
    folder = Path(options.out or Path(configs.__file__).parent / "configs" / launch.architecture_of(device))
    folder.mkdir(parents=True, exist_ok=True)
    measured_on = {"device": torch.cuda.get_device_name(), **environment()}
    tables: dict[str, list[configs.Entry]] = {}
    for name, entry in named[op]():
        if entry is not None:
            tables.setdefault(name, []).append(entry)
            (folder / f"{name}.json").write_text(configs.table_text(tables[name], measured_on))
    for name, entries in tables.items():
        faster = sum(entry.ours_us <= entry.peer_us for entry in entries)
        print(f"{len(entries)} problems, ours at least as fast as torch's in {faster}: {folder / name}.json")
    return 0


def layers(shards, device: torch.device, dtype: torch.dtype) -> Named:
    """Yield an entry for each product of each layer."""
    problems = [problem for _, layer, m in shards for problem in products(layer, m, dtype).values()]
    for problem in dict.fromkeys(problems):
        yield "matmul", tuning.measured(problem, device)


def experts(
    mixtures: Iterable[tuple[int, int, int, int]], tokens: Iterable[int], device: torch.device, dtype: torch.dtype
) -> Named:
    """Yield an entry for each product of the mixtures' gated experts: two forward, two dgrads, two wgrads.

    Args:
        mixtures: number of experts, chosen for each token, hidden and intermediate size.
        tokens: as many tokens.
    """
    for (number, chosen, hidden, inner), count in product(mixtures, tokens):
        for entry in _of_mixture(number, count * chosen, hidden, inner, device, dtype):
            yield "grouped_matmul", entry


def _of_mixture(experts: int, rows: int, hidden: int, inner: int, device, dtype) -> Iterator[configs.Entry | None]:
    generator = torch.Generator(device).manual_seed(experts)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator).to(dtype)

    offsets = grouped_bench.uneven_offsets(experts, rows, device)
    first = slice(0, min(_CHECKED, int(offsets[1])))
    x, up, down = matrix(rows, hidden), matrix(experts, 2 * inner, hidden), matrix(experts, hidden, inner)
    y, dy, dz = matrix(rows, inner), matrix(rows, hidden), matrix(rows, 2 * inner)
    gate_t, up_t = up.transpose(1, 2).chunk(2, 2)

    def entry(problem, calls: tuning.TileCalls, **kind: bool) -> configs.Entry | None:
        tiles = grouped.tiles_of(launch.architecture_of(device), dtype, **kind)
        return tuning.fastest(problem.key(), dtype, tiles, calls, device)

    calls: tuning.TileCalls[configs.MatmulConfig] = tuning.TileCalls(
        lambda tile: grouped.grouped_matmul(
            x, gate_t, offsets, b_up=up_t, activation="silu", keep_z=True, config=tile
        )[0],
        lambda: gated(F.grouped_mm(x, up.transpose(1, 2), offs=offsets[1:]), "silu"),
        gated(x[first].double() @ up[0].double().t(), "silu"),
    )  # fmt: skip
    yield entry(grouped.problem_of(x, gate_t, up_t, "silu"), calls, gated=True)
    for a, b in ((y, down.transpose(1, 2)), (dy, down), (dz, up)):
        yield entry(grouped.problem_of(a, b), grouped_bench.product_calls(a, b, offsets))
    for g, h in ((dz, x), (dy, y)):
        yield entry(grouped.wgrad_problem_of(g, h, experts, False), grouped_bench.wgrad_calls(g, h, offsets))


def attentions(
    attention_cases: Iterable[cases.AttentionCase], device: torch.device, dtype: torch.dtype, positions: int
) -> Named:
    """Yield the entries of forward, and of backward by the tiles of its two kernels.

    An entry of backward has the time of the whole backward, with the fastest tile of the other kernel.

    Args:
        positions: batch times sequence of each case.
    """
    for case in attention_cases:
        yield from _of_attention(case, max(1, positions // case.sequence), device, dtype)


def _of_attention(case: cases.AttentionCase, batch: int, device, dtype) -> Named:
    generator = torch.Generator(device).manual_seed(case.sequence)
    q, k, v, dout = (
        torch.randn(batch, heads, case.sequence, case.head_dim, device=device, generator=generator).to(dtype)
        for heads in (case.heads, case.kv_heads, case.kv_heads, case.heads)
    )
    rules, positions = Rules(right=0 if case.causal else None), Positions(0, case.sequence)
    chunk = AttentionChunk(rules, positions, positions, library="deterministic")
    with kernel_choice.prefer("library"):
        parts, reason = library_attention.choose("forward", q, k, v, chunk)
    if not parts:
        raise RuntimeError(f"weft tune attention: torch's function does not compute {case}: {reason}")
    key = attention_tiles.AttentionProblem.of(q, k, v, rules).key()
    listed = partial(
        attention_tiles.listed, architecture=launch.architecture_of(device), head_dim=case.head_dim, features=()
    )
    out, lse = library_attention.forward(q, k, v, chunk, parts)
    delta = attention_delta(out, dout)
    exact = _first_rows(q, k, v, dout, lse, delta, case)

    def entry(tiles, ours, library, exact) -> configs.Entry | None:
        return tuning.fastest(key, dtype, tiles, tuning.TileCalls(ours, library, exact), device)

    yield (
        "attention_forward",
        entry(
            listed("forward"),
            lambda tile: attention_forward(q, k, v, rules, config=tile)[0][0, 0],
            lambda: library_attention.forward(q, k, v, chunk, parts)[0][0, 0],
            exact["out"],
        ),
    )

    def library() -> Sequence[torch.Tensor]:
        (part,) = parts
        return library_attention.part_backward((q, dout, out, lse), (k, v), part, chunk)

    def ours(**tiles) -> Sequence[torch.Tensor]:
        return attention_backward(q, k, v, dout, lse, delta, rules, **tiles)

    def of_keys(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        _, dk, dv = gradients
        return torch.cat([dk[0, 0, :_CHECKED], dv[0, 0, :_CHECKED]])

    dkdv = entry(
        listed("dkdv"), lambda tile: of_keys(ours(dkdv_config=tile)), lambda: of_keys(library()), exact["dk and dv"]
    )
    best = None if dkdv is None else dkdv.config
    dq = entry(
        listed("dq"),
        lambda tile: ours(dkdv_config=best, dq_config=tile)[0][0, 0],
        lambda: library()[0][0, 0],
        exact["dq"],
    )
    if dkdv is not None and dq is not None:
        dkdv = dataclasses.replace(dkdv, ours_us=dq.ours_us, peer_us=dq.peer_us)
    yield "attention_dkdv", dkdv
    yield "attention_dq", dq


def _first_rows(q, k, v, dout, lse, delta, case: cases.AttentionCase) -> dict[str, torch.Tensor]:
    """Return out and dq of the first rows of the first head, and dk and dv of the first keys, in fp64."""
    scale, few, group = case.head_dim**-0.5, slice(0, _CHECKED), slice(0, case.heads // case.kv_heads)
    q, dout, lse, delta = (x[0, group].double() for x in (q, dout, lse, delta))
    k, v = k[0, 0].double(), v[0, 0].double()

    def probabilities(rows: slice, keys: slice) -> torch.Tensor:
        """Return those of the group's heads [G, rows, keys], by lse."""
        scores = q[:, rows] @ k[keys].t() * scale - lse[:, rows, None]
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).triu(1)
        return torch.exp(scores.masked_fill(hidden, -torch.inf) if case.causal else scores)

    every = slice(None)
    p = probabilities(few, every)[0]
    dq = (p * (dout[0, few] @ v.t() - delta[0, few, None])) @ k * scale
    p_keys = probabilities(every, few)
    ds = p_keys * (dout @ v[few].t() - delta[..., None])
    dk, dv = (ds.mT @ q).sum(0) * scale, (p_keys.mT @ dout).sum(0)
    return {"out": p @ v, "dq": dq, "dk and dv": torch.cat([dk, dv])}
