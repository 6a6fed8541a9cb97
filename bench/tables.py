"""`make tables`: write the measured tables of README.md and docs/ from the committed results, and lines of sources.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`, lines between `<!-- lines: FILE | FIRST | AFTER -->`
and `<!-- end -->`; the text between is replaced. The lines are those of the file from the first that has the text FIRST
to the one before the next that has the text AFTER.
"""

import json
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

RESULTS = Path("bench") / "results"
_CPU = "amd-epyc-2-cores"
_PLACE = re.compile(r"(<!-- table: ([a-z_ ]+) -->\n)(.*?)(<!-- end -->)", re.S)
_LINES = re.compile(r"(<!-- lines: (\S+) \| (.+?) \| (.+?) -->\n)(.*?)(<!-- end -->)", re.S)
_LANGUAGES = {".py": "py", ".cpp": "cpp", ".h": "cpp"}
Row = dict[str, Any]


def written(page: str, root: Path) -> str:
    """Return the page with tables and lines from the files under `root`.

    Raises:
        KeyError: there is no such table.
        StopIteration: a file has no such lines.
    """

    def table(place: re.Match) -> str:
        files, make = TABLES[place[2]]
        rows = [row for file in sorted((root / RESULTS).glob(f"{files}.json")) for row in _rows(file)]
        return f"{place[1]}\n{_markdown(make(rows))}\n{place[4]}"

    def lines(place: re.Match) -> str:
        marker, file, first, after, _, end = place.groups()
        source = (root / file).read_text().splitlines()
        begin = next(number for number, line in enumerate(source) if first in line)
        stop = next(number for number in range(begin + 1, len(source)) if after in source[number])
        code = textwrap.dedent("\n".join(source[begin:stop])).rstrip()
        return f"{marker}\n```{_LANGUAGES[Path(file).suffix]}\n{code}\n```\n\n{end}"

    return _LINES.sub(lines, _PLACE.sub(table, page))


def pages(root: Path) -> list[Path]:
    return [root / "README.md", root / "bench" / "README.md", *sorted((root / "docs").glob("*.md"))]


def _rows(file: Path) -> list[Row]:
    return json.loads(file.read_text()).get("rows", [])


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    heading, *rest = lines
    return "".join(f"| {' | '.join(line)} |\n" for line in (heading, ["---"] * len(heading), *rest))


def _ms(time: Row | None, digits: int = 0) -> str:
    return "" if time is None else f"{time['p50_us'] / 1e3:.{digits}f} ms"


def _short(us: float) -> str:
    return f"{us:.1f} us" if us < 1000 else f"{us / 1e3:.2f} ms"


def _linear(rows: list[Row]) -> list[list[str]]:
    return [["shape", "weft", "DTensor over gloo", "ratio", "limit"]] + [
        [
            row["shape"],
            _ms(row["times"]["weft"], 2),
            _ms(row["times"].get("DTensor over gloo"), 2) or "refuses uneven sizes",
            f"{row['ratio']:.1f}x" if row["ratio"] else "",
            _ms(row["times"]["limit"], 2),
        ]
        for row in rows
    ]


def _host_calls(rows: list[Row]) -> list[list[str]]:
    return [["", "Python calls a step", "to the plain model", "tokens a second"]] + [
        [
            row["name"],
            f"{row['calls']:,}",
            f"{row['calls'] / row['plain_calls']:.1f}x",
            f"{row['tokens_per_s']:,.0f}",
        ]
        for row in rows
    ]


def _collectives(rows: list[Row]) -> list[list[str]]:
    found = [["size", "in place", "ordinary", "gloo", "in place / ordinary to gloo", "limit", "of limit"]]
    for row in rows:
        bytes = row["bytes"]
        if row["operation"] != "all_reduce" or row["dtype"] != "float32" or bytes not in (4096, 1 << 20, 25 << 20):
            continue
        times = [_short(row["times"][name]["p50_us"]) for name in ("symmetric", "ordinary", "gloo")]
        ratios = f"{row['ratio']:.0f}x / {row['ordinary_ratio']:.1f}x"
        size = f"{bytes >> 20} MiB" if bytes >= 1 << 20 else f"{bytes >> 10} KiB"
        found.append([size, *times, ratios, _short(row["times"]["limit"]["p50_us"]), f"{row['of_limit']:.0%}"])
    return found


def _beside_mpi(rows: list[Row]) -> list[list[str]]:
    head = ["operation", "size", "symmetric memory", "`torch.distributed`", "best MPI, C", "best MPI, Python", "to C"]
    found = [head]
    for row in rows:
        times = {name: time["p50_us"] for name, time in row["times"].items()}
        from_python = {name: us for name, us in times.items() if name.endswith("from Python")}
        from_c = {name: us for name, us in times.items() if "MPI" in name and name not in from_python}
        best, best_python = min(from_c, key=from_c.__getitem__), min(from_python.values())
        bytes = row["bytes"]
        size = f"{bytes >> 20} MiB" if bytes >= 1 << 20 else f"{bytes >> 10} KiB" if bytes >= 1024 else f"{bytes} B"
        here = [_short(times[name]) for name in ("symmetric", "ordinary")]
        ratio = from_c[best] / times["symmetric"]
        there = [f"{_short(from_c[best])} ({best})", _short(best_python)]
        found.append([row["operation"], "" if row["operation"] == "barrier" else size, *here, *there, f"{ratio:.2g}x"])
    return found


_DDP = ("weft", "DDP on weft", "DDP on gloo")


def _data_parallel(rows: list[Row]) -> list[list[str]]:
    return [["step of", "weft.DataParallel", "DDP on weft", "DDP on gloo", "to them", "limit"]] + [
        [
            f"{row['name']} ({row['parameters'] / 1e6:.1f} M)",
            *(_ms(row["times"][name], 1) for name in _DDP),
            f"{row['ratio_to_ddp_on_weft']:.1f}x, {row['ratio']:.1f}x",
            _ms(row["times"]["limit"], 1),
        ]
        for row in rows
        if row["times"]
    ]


def _data_parallel_memory(rows: list[Row]) -> list[list[str]]:
    return [["", "weft.DataParallel", "DDP on weft", "DDP on gloo"]] + [
        [row["name"], *(f"{row['peak_mb'][name]:.0f} MB" for name in _DDP)] for row in rows if row["times"]
    ]


def _sharded_optimizer(rows: list[Row]) -> list[list[str]]:
    names = ("weft", "ZeroRedundancyOptimizer")
    return [["step of", "weft", "ZeroRedundancyOptimizer", "limit"]] + [
        [row["name"], *(_ms(row["times"][name], 1) for name in (*names, "limit"))] for row in rows
    ]


def _sharded_parameters(rows: list[Row]) -> list[list[str]]:
    peers = "FSDP2 over gloo", "FSDP2 without waiting"
    found = [["step on", "weft", *peers, "ratio", "without waiting", "parameters, gradients and moments of a rank"]]
    for row in (row for row in rows if "memory_of_share" in row):
        gloo, alone = (row["times"][name]["p50_us"] for name in peers)
        times = [_ms(row["times"][name]) for name in ("weft", *peers)]
        ratios = [f"{ratio:.2f}x" for ratio in (row["ratio"], gloo / alone)]
        found.append([row["mesh"], *times, *ratios, f"{row['memory_of_share']:.3f} of its share"])
    return found


def _muon(rows: list[Row]) -> list[list[str]]:
    found = [["step of the optimizer", "weft.Muon", "torch.optim.Muon, one process", "share of one process"]]
    for row in (row for row in rows if "memory_of_share" not in row):
        times = [_ms(row["times"][name]) for name in ("weft", row["peer"])]
        found.append([row["mesh"].removeprefix("Muon, "), *times, f"{1 / row['ratio']:.2f}"])
    return found


def _invariance(rows: list[Row]) -> list[list[str]]:
    found = [["training step", "mesh", "with `invariant`", "without", "time", "memory", "Python calls"]]
    for row in (row for row in rows if "mesh" in row):
        times = [_ms(row["times"][name]) for name in ("weft", "without invariant")]
        held, calls = row.get("memory_ratio"), row.get("calls")
        more = f"{1 / row['ratio']:.2f}x", f"{held:.2f}x" if held else "", f"{calls:,}" if calls else ""
        found.append([row["model"], row["mesh"], *times, *more])
    return found


def _products(rows: list[Row]) -> list[list[str]]:
    shares: dict[tuple[str, str], dict[str, list[float]]] = {}
    for row in (row for row in rows if row.get("op", "").startswith("product")):
        size, threads = row["shape"].split(", ")
        of = shares.setdefault((row["dtype"], row["op"].removeprefix("product ")), {})
        of.setdefault(f"{size.split()[0]}, {threads}", []).append(1 / row["ratio"])
    columns = list(next(iter(shares.values())))
    return [["", "instruction set", *columns]] + [
        [*of, *(f"{min(found[column]):.2f} to {max(found[column]):.2f}" for column in columns)]
        for of, found in shares.items()
    ]


def _attention(rows: list[Row]) -> list[list[str]]:
    alone = rows[0]["times"]["one process"], rows[0]["alone_peak_bytes"]
    found = [["", "time", "of one process's", "peak memory of a rank", "of one process's", "sent by a rank"]]
    found.append(["one process", _ms(alone[0]), "", f"{alone[1] / 2**20:.0f} MiB", "", ""])
    for row in rows:
        memory = f"{row['peak_bytes'] / 2**20:.0f} MiB", f"{row['share_of_memory']:.2f}"
        found.append(
            [
                row["method"],
                _ms(row["times"]["ours"]),
                f"{row['share_of_time']:.2f}",
                *memory,
                f"{row['sent_bytes'] >> 20} MiB",
            ]
        )
    return found


def _paradigms(rows: list[Row]) -> list[list[str]]:
    found = [["paradigm", "mesh", "a step", "to one process", "peak memory of a rank", "sent by a rank", "bubble"]]
    for world in sorted({row["world"] for row in rows}):
        of_world = [row for row in rows if row["world"] == world]
        alone = of_world[0]
        found.append(
            [
                f"one process, beside {world} ranks",
                "",
                _ms(alone["times"]["one process"]),
                "",
                f"{alone['alone_peak_mb']:.0f} MB",
                "",
                "",
            ]
        )
        for row in of_world:
            bubble = "" if row["bubble"] is None else f"{row['bubble']:.0%} ({row['formula']:.0%})"
            sent = f"{row['sent_bytes'] / 2**20:.1f} MiB"
            found.append(
                [
                    row["paradigm"],
                    f"`{row['mesh']}`",
                    _ms(row["times"]["ours"]),
                    f"{row['ratio']:.2f}x",
                    f"{row['peak_mb']:.0f} MB",
                    sent,
                    bubble,
                ]
            )
    return found


def _static_figures(rows: list[Row]) -> list[list[str]]:
    heading = ["loop", "", "weft", "its turn", "kernel", "the best peer", "its turn", "kernel"]
    reasons = any(row["reason"] for row in rows)
    found = [[*heading, "why more"] if reasons else heading]
    for ours in (row for row in rows if row["kernel"] == "weft"):
        place = ours["loop"], ours["architecture"]
        peers = [row for row in rows if (row["loop"], row["architecture"]) == place and row is not ours]
        peer = min(peers, key=lambda row: float(row["instructions_per_unit"]))
        cells = [*_static(ours), f"{peer['instructions_per_unit']:.2f} ({peer['kernel']})", *_static(peer)[1:]]
        found.append([*place, *cells, *([ours["reason"]] if reasons else [])])
    return found


def _static(row: Row) -> list[str]:
    tensor = f"{row['tensor_instructions']} + " if row["tensor_instructions"] else ""
    spilled = f", {row['spilled_bytes']} B spilled" if row["spilled_bytes"] else ""
    kernel = f"{row['registers']} registers, {row['shared_bytes'] / 1024:.0f} KiB{spilled}"
    return [f"{row['instructions_per_unit']:.2f}", f"{tensor}{row['other_instructions']}", kernel]


def _families(rows: list[Row]) -> list[list[str]]:
    built = [row for row in rows if "share" in row]
    few = [row for row in built if row["share"] <= MOST_HELD and "failed" not in row]
    found = [["families", "of the parameters on a rank", "whole layers, and why"]]
    for start, stop in ((0, 0.52), (0.52, 0.56), (0.56, MOST_HELD)):
        names = [row["family"] for row in few if start < row["share"] <= stop]
        found.append([f"{len(names)}: {', '.join(names)}", f"at most {stop:.0%}", ""])
    for row in sorted(built, key=lambda row: row["share"]):
        if row not in few:
            reasons = [f"{reason} ({share:.0%})" for reason, share in row["whole"].items()][:3]
            found.append([row["family"], f"{row['share']:.0%}", "; ".join(reasons).replace("|", "/")])
    compared = [row for row in built if "error" in row]
    not_compared = len(built) - len(compared)
    largest = max((row["error"] for row in compared if "float64" in row["type"]), default=0.0)
    found.append([f"compared: {len(compared)} of {len(built)}", f"largest error in fp64 {largest:.0e}", ""])
    found.append([f"not compared: {not_compared}", "", "no guessed input runs, or the model is random"])
    left = [row["family"] for row in rows if "share" not in row]
    found.append([f"not built: {len(left)}", "", ", ".join(left)])
    return found


def _pipelines_of_families(rows: list[Row]) -> list[list[str]]:
    built = [row for row in rows if "not built" not in row]
    groups = {
        "equal to the plain model in fp64": [row for row in built if row.get("error", 1) < 1e-9],
        "equal within the rounding of fp32, in which parts of them compute": [
            row for row in built if 1e-9 <= row.get("error", 1) < 1e-5
        ],
        "wrong": [row for row in built if row.get("error", 0) >= 1e-5],
    }
    for row in built:
        if reason := row.get("failed") or row.get("not compared"):
            groups.setdefault(reason, []).append(row)
    found = [["result", "number", "families"]]
    for reason, of_reason in groups.items():
        found.append([reason, str(len(of_reason)), ", ".join(sorted(row["family"] for row in of_reason))])
    return found


def _compared(rows: list[Row]) -> list[list[str]]:
    found = [["trained by", "families", "agree", "part", "raise"]]
    for way, of_way in _by(rows, lambda row: row["way"]).items():
        counts = [len([row for row in of_way if _kind_of(row) == kind]) for kind in ("agree", "part", "raise")]
        found.append([way, str(len(of_way)), *map(str, counts)])
    return found


def _parted(rows: list[Row]) -> list[list[str]]:
    found = [["trained by", "", "families"]]
    wrong = [row for row in rows if row["way"] and _kind_of(row) != "agree"]
    for (way, gist), alike in _by(wrong, lambda row: (row["way"], _gist(row))).items():
        found.append([way, gist.replace("|", "/"), ", ".join(row["family"] for row in alike)])
    return found


def _by(rows: list[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    found: dict[Any, list[Row]] = {}
    for row in rows:
        if row["way"]:
            found.setdefault(key(row), []).append(row)
    return found


def _kind_of(row: Row) -> str:
    if "raises" in row:
        return "raise"
    return "part" if row["findings"] or row["norm"] or row["evaluation"] or row["file"] else "agree"


def _gist(row: Row) -> str:
    """Return where a row parts and what its first difference looks like, without numbers of layers."""
    if "raises" in row:
        text = re.sub(r"\[/[^\]]*\] | \[[\d.]+\]:\d+", "", row["raises"])  # gloo's file and port
        return f"raises {text[:160]}"
    if row["findings"]:
        what, _, looks = row["findings"][0][1].partition(": ")[2].partition(" differs by ")
        looks = looks.partition(": ")[2]
        looks = re.sub(r"it differs at .* of dimension (\d+) alone.*", r"in some of dimension \1", looks)
        return re.sub(r"\.\d+\b", ".*", what) + (looks and f": {looks}")
    name = next(name for name in ("norm", "evaluation", "file") if row[name])
    if name == "file":
        return f"file: {row[name]}"
    found, _, wanted = row[name].partition(", not ")
    return f"{name}: {float(found) / float(wanted):.4g} times the plain program's"


def _generate(rows: list[Row]) -> list[list[str]]:
    names = ("weft", "gloo", "transformers over gloo", "one process")
    rates = rows[-1]["tokens_per_second"]
    return [
        ["", "weft", "the same split over gloo", "transformers over gloo", "one process, a thread for each rank"],
        *([f"time of {row['name']}", *(_ms(row["times"][name], 1) for name in names)] for row in rows),
        ["tokens a second", *(f"{rates[name]:.1f}" for name in names)],
    ]


def _experts(rows: list[Row]) -> list[list[str]]:
    peers = ("gloo", "one process", "transformers over gloo", "limit")
    found = [["", "weft", "gloo's all_to_all", "one process", "transformers over gloo", "a copy of as many bytes"]]
    for row in rows:
        name = row["shape"].partition(":")[0]
        found.append([name, *(_ms(row["times"].get(peer), 1) for peer in ("weft", *peers))])
    return found


def _lora(rows: list[Row]) -> list[list[str]]:
    step, memory = rows
    alone = [f"one process{threads}" for threads in ("", f", {step['world']} threads")]
    return [
        ["", f"tp={step['world']}", "one process", alone[1], "share of one process"],
        ["step of LoRA", *(_ms(step["times"][name]) for name in ("weft", *alone)), f"{step['share_of_time']:.2f}"],
        [
            "peak memory of a rank in `from_pretrained`",
            *(f"{memory[name]:.0f} MB" for name in ("peak_mb", "alone_peak_mb")),
            "",
            f"{memory['share_of_memory']:.2f}",
        ],
    ]


def _kernels(rows: list[Row]) -> list[list[str]]:
    """Return a line for each op and peer, with the geometric mean of the peer's medians over ours, and their range."""
    ratios: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if not row.get("times") or row["op"].endswith("tiles"):
            continue
        # Losses are of two sizes that differ in kind; the vocabulary is the last number of a shape.
        of = f", {int(re.findall(r'[0-9]+', row['shape'].split()[-2])[-1]):,} words" if "entropy" in row["op"] else ""
        ours = row["times"]["ours"]["p50_us"]
        for name, time in row["times"].items():
            if name != "ours":
                ratios.setdefault((row["op"] + of, name), []).append(time["p50_us"] / ours)
    lines = [["", "beside", "rows", "speed of ours"]]
    for (op, peer), found in ratios.items():
        spread = f" ({min(found):.2f} to {max(found):.2f})" if len(found) > 1 else ""
        lines.append([op, peer, str(len(found)), f"{geometric_mean(found):.2f}{spread}"])
    return lines


MOST_HELD = 0.6  # the share of the parameters that a split family holds on a rank of two


# Name between the marks: (file of results or a pattern of several, function that makes the heading and the lines).
TABLES: dict[str, tuple[str, Callable[[list[Row]], list[list[str]]]]] = {
    "linear": (f"{_CPU}/linear", _linear),
    "collectives": (f"{_CPU}/collectives", _collectives),
    "data_parallel": (f"{_CPU}/data_parallel", _data_parallel),
    "data_parallel memory": (f"{_CPU}/data_parallel", _data_parallel_memory),
    "sharded_optimizer": (f"{_CPU}/sharded_optimizer", _sharded_optimizer),
    "sharded_parameters": (f"{_CPU}/sharded_parameters", _sharded_parameters),
    "muon": (f"{_CPU}/sharded_parameters", _muon),
    "beside mpi": ("intel-xeon-2-cores/collectives_beside_mpi", _beside_mpi),
    "invariance": (f"{_CPU}/invariance", _invariance),
    "invariant products": (f"{_CPU}/invariance", _products),
    "host_calls": (f"{_CPU}/host_calls", _host_calls),
    "attention": (f"{_CPU}/attention", _attention),
    "paradigms": (f"{_CPU}/paradigms", _paradigms),
    "kernels": ("nvidia-h200/*", _kernels),
    "static figures": ("static_figures", _static_figures),
    "generate": (f"{_CPU}/generate", _generate),
    "lora": (f"{_CPU}/lora", _lora),
    "experts": (f"{_CPU}/experts", _experts),
    "families": ("families", _families),
    "compared": ("compared", _compared),
    "parted": ("compared", _parted),
    "pipelines of families": ("pipelines_of_families", _pipelines_of_families),
}


def main(root: Path) -> None:
    for page in pages(root):
        page.write_text(written(page.read_text(), root))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
