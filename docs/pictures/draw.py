"""The pictures of the documentation: `python docs/pictures/draw.py` writes them beside this file.

One style: a colour is a rank, a dashed box is split over ranks, an arrow is what travels. Each picture carries colours
for a light and for a dark page.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path

WIDTH = 760
ALL_RESULTS = Path(__file__).parent.parent.parent / "bench" / "results"
RESULTS = ALL_RESULTS / "amd-epyc-2-cores"
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1b1f24; }
.small { font-size: 11px; fill: #57606a; } .title { font-weight: 600; } .on { fill: #ffffff; }
.r0 { fill: #3b6fd4; } .r1 { fill: #d9822b; } .r2 { fill: #2c9a78; } .r3 { fill: #a1529f; }
.pale { fill-opacity: .28; } .plain { fill: #eef1f4; } .edge { fill: none; } rect { stroke: #8c959f; }
.cut { stroke-dasharray: 4 3; } line, path { stroke: #57606a; stroke-width: 1.4; fill: none; } .head { fill: #57606a; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .small { fill: #9aa4af; } .plain { fill: #2a3038; } rect { stroke: #6e7681; }
  line, path { stroke: #9aa4af; } .head { fill: #9aa4af; }
}
"""


class Drawing:
    def __init__(self, title: str, height: int):
        self.title, self.height = title, height
        self.parts: list[str] = []

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> None:
        words = words.replace("&", "&amp;").replace("<", "&lt;")
        self.parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{words}</text>')

    def box(self, x: float, y: float, width: float, height: float, words: str = "", kind: str = "plain") -> None:
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" class="{kind}"/>')
        ink = "on" if kind[:1] == "r" and "pale" not in kind else ""
        for number, line in enumerate(lines := words.split("\n") if words else []):
            self.text(x + width / 2, y + height / 2 + 4.5 + 15 * (number - (len(lines) - 1) / 2), line, ink)

    def arrow(self, x0: float, y0: float, x1: float, y1: float, both: bool = False) -> None:
        start = ' marker-start="url(#head)"' if both else ""
        line = f'<line x1="{x0:g}" y1="{y0:g}" x2="{x1:g}" y2="{y1:g}" marker-end="url(#head)"{start}/>'
        self.parts.append(line)

    def svg(self) -> str:
        head = (
            '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" class="head" stroke="none"/></marker>'
        )
        size = f'viewBox="0 0 {WIDTH} {self.height}" width="{WIDTH}" height="{self.height}"'
        start = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><title>{self.title}</title>'
        return "\n".join([start, f"<style>{STYLE}</style><defs>{head}</defs>", *self.parts, "</svg>", ""])


def paradigms() -> Drawing:
    d = Drawing("What each paradigm splits over two ranks", 292)
    panels = [
        ("data", "whole layers", "half of the batch", "gradients, once a step"),
        ("tensor", "half of each layer", "the whole batch", "a sum behind each block"),
        ("sequence", "whole layers", "half of each sequence", "keys and values"),
        ("pipeline", "half of the layers", "micro-batches", "activations at the cut"),
    ]
    for number, (name, weights, batch, travels) in enumerate(panels):
        x = 12 + 188 * number
        d.text(x + 84, 20, name, "title")
        for rank in (0, 1):
            left, kind = x + 92 * rank, f"r{rank}"
            for layer in range(4):
                y = 34 + 30 * layer
                if name == "tensor":
                    d.box(left, y, 76, 24, kind="edge cut")
                    d.box(left + 38 * rank, y, 38, 24, kind=kind)
                elif name == "pipeline" and layer // 2 != rank:
                    d.box(left, y, 76, 24, kind="edge cut")
                else:
                    d.box(left, y, 76, 24, kind=kind)
            for row in range(4):
                for piece in range(4):
                    here = {"data": row // 2 == rank, "sequence": piece // 2 == rank}.get(name, True)
                    d.box(left + 19 * piece, 172 + 12 * row, 19, 12, kind=f"{kind} pale" if here else "edge")
        d.arrow(x + 78, 94, x + 90, 94, both=name != "pipeline")
        d.text(x + 84, 240, weights, "small")
        d.text(x + 84, 256, batch, "small")
        d.text(x + 84, 280, travels)
    return d


def data_parallel() -> Drawing:
    d = Drawing("The life of a gradient in weft.DataParallel", 250)
    d.text(14, 22, "The life of a gradient", "title", "start")
    for rank in (0, 1):
        y, buckets = (40, 74) if rank == 0 else (166, 132)
        d.text(14, y + 18, f"rank {rank}", "", "start")
        for layer, x in enumerate((80, 190, 300, 410)):
            d.box(x, y, 106, 26, f"backward {4 - layer}", f"r{rank} pale")
        for number, x in enumerate((300, 520)):
            d.box(x, buckets, 150, 26, f"bucket {number}: sum", f"r{rank}")
        d.box(680, buckets, 70, 26, "step", f"r{rank} pale")
    for x in (375, 595):
        d.arrow(x, 102, x, 130, both=True)
    d.text(
        380,
        222,
        "A gradient is written into its bucket, which lies in memory that all ranks reach. A full bucket is",
        "small",
    )
    d.text(
        380,
        238,
        "summed in the order of ranks, in fp32, while backward goes on. Every rank steps with the same bits.",
        "small",
    )
    return d


def tensor_parallel() -> Drawing:
    d = Drawing("A column layer and a row layer over two ranks", 250)
    d.text(14, 22, "Two layers, split over two ranks", "title", "start")
    for rank in (0, 1):
        y, kind = 44 + 84 * rank, f"r{rank}"
        d.box(14, y, 90, 50, "x [M, K]\nwhole")
        d.box(146, y, 130, 50, f"W1, columns {rank}\n[N/2, K]", kind)
        d.box(318, y, 110, 50, "gelu\n[M, N/2]", f"{kind} pale")
        d.box(470, y, 130, 50, f"W2, rows {rank}\n[K, N/2]", kind)
        d.box(662, y, 84, 50, "y [M, K]\nwhole")
        for x0, x1 in ((104, 146), (276, 318), (428, 470), (600, 662)):
            d.arrow(x0, y + 25, x1, y + 25)
    d.arrow(632, 76, 632, 148, both=True)
    d.text(632, 198, "all_reduce", "small")
    d.text(
        380,
        222,
        "Forward sends one sum, behind the row layer. Backward sends one, in front of the column layer.",
        "small",
    )
    d.text(
        380, 238, "With sequence_parallel these become a reduce_scatter and an all_gather of the same bytes.", "small"
    )
    return d


def sequence_parallel() -> Drawing:
    d = Drawing("Ring attention over four ranks", 236)
    d.text(14, 22, "Ring attention: queries stay, keys and values go round", "title", "start")
    for rank in range(4):
        x = 30 + 186 * rank
        d.box(x, 40, 120, 30, f"queries {rank}", f"r{rank}")
        for step in range(4):
            block = (rank - step) % 4
            d.box(x, 82 + 26 * step, 120, 20, f"keys, values {block}", f"r{block} pale")
        if rank < 3:
            d.arrow(x + 122, 92, x + 184, 118)
    d.text(14, 200, "time runs down", "small", "start")
    d.text(
        380,
        214,
        "While a rank computes with one block, the next one arrives. Partial results are merged by their",
        "small",
    )
    d.text(380, 230, "log-sum-exp, so that the result is the attention over the whole sequence.", "small")
    return d


def pipeline() -> Drawing:
    d = Drawing("The 1F1B schedule of four stages and eight micro-batches", 226)
    d.text(14, 22, "1F1B: four stages, eight micro-batches", "title", "start")
    stages, batches, unit = 4, 8, 20.0
    forward_end: dict[tuple[int, int], float] = {}
    backward_end: dict[tuple[int, int], float] = {}
    orders = []
    for stage in range(stages):
        warm = min(batches, stages - stage)
        steps = [("f", b) for b in range(warm)]
        for b in range(batches):
            steps.append(("b", b))
            steps += [("f", b + warm)] if b + warm < batches else []
        orders.append(steps)
    clocks, placed = [0.0] * stages, []
    while any(orders):
        for stage, order in enumerate(orders):
            while order:
                kind, batch = order[0]
                before = (forward_end if kind == "f" else backward_end).get(
                    (stage - 1 if kind == "f" else stage + 1, batch)
                )
                edge = stage == 0 if kind == "f" else stage == stages - 1
                if not edge and before is None:
                    break
                order.pop(0)
                start = max(clocks[stage], before or 0.0)
                clocks[stage] = start + (1 if kind == "f" else 2)
                (forward_end if kind == "f" else backward_end)[stage, batch] = clocks[stage]
                placed.append((stage, start, kind, batch))
    unit = 680 / max(clocks)
    for stage, start, kind, batch in placed:
        width = unit * (1 if kind == "f" else 2)
        d.box(
            70 + unit * start, 36 + 36 * stage, width, 28, str(batch), f"r{stage}" if kind == "f" else f"r{stage} pale"
        )
    for stage in range(stages):
        d.text(14, 55 + 36 * stage, f"rank {stage}", "", "start")
    d.text(
        380,
        200,
        "Full colour is forward, pale is backward, which takes twice as long; time runs to the right. What is",
        "small",
    )
    d.text(380, 216, "empty is the bubble: (stages - 1) / (micro-batches + stages - 1) of a step.", "small")
    return d


def mesh() -> Drawing:
    d = Drawing("Eight ranks as a mesh of pp=2, dp=2, tp=2", 236)
    d.text(14, 22, "weft.init_mesh(pp=2, dp=2, tp=2): eight ranks", "title", "start")
    for stage in (0, 1):
        left = 40 + 370 * stage
        d.box(left, 40, 330, 150, kind="edge")
        d.text(left + 165, 58, f"stage {stage}: half of the layers", "small")
        for replica in (0, 1):
            for part in (0, 1):
                rank = 4 * stage + 2 * replica + part
                d.box(left + 30 + 150 * part, 70 + 58 * replica, 120, 40, f"rank {rank}", f"r{part}")
            d.arrow(left + 150, 90 + 58 * replica, left + 180, 90 + 58 * replica, both=True)
        d.arrow(left + 60, 112, left + 60, 126, both=True)
        d.arrow(left + 240, 112, left + 240, 126, both=True)
    d.arrow(372, 115, 408, 115, both=True)
    d.text(
        380,
        212,
        "Ranks side by side split each layer (tp): they talk most, so they are neighbours. Ranks one above the",
        "small",
    )
    d.text(380, 228, "other have the same weights and other data (dp). The two halves pass activations (pp).", "small")
    return d


def exchange() -> Drawing:
    d = Drawing("An all_reduce of the shared-memory engine", 262)
    d.text(14, 22, "An all_reduce in shared memory, two ranks", "title", "start")
    steps = [
        ("1  announce", "operation, type,\nsize in a header"),
        ("2  compare", "all headers alike,\nor all raise"),
        ("3  reduce", "own half of all,\nin rank order"),
        ("4  write", "that half to\nevery rank"),
        ("5  release", "a counter: all\nhave read"),
    ]
    for number, (title, words) in enumerate(steps):
        x = 20 + 148 * number
        d.text(x + 62, 46, title)
        for rank in (0, 1):
            d.box(x, 56 + 76 * rank, 124, 50, words, f"r{rank} pale")
            if number:
                d.arrow(x - 24, 81 + 76 * rank, x, 81 + 76 * rank)
        if number in (1, 3):
            d.arrow(x + 62, 108, x + 62, 130, both=True)
    d.text(
        380,
        230,
        "Every wait is bounded: a rank that dies is named by the others, which all raise. A tensor that lies",
        "small",
    )
    d.text(
        380, 246, "in symmetric memory is reduced in its place; another one is copied there in pieces first.", "small"
    )
    return d


def planner_passes() -> Drawing:
    d = Drawing("The passes of the automatic planner", 240)
    d.text(14, 22, 'plan="auto": how one attention block becomes a plan', "title", "start")
    passes = [
        ("1  call", "input_ids\n[3, 5]"),
        ("2  trace", "q, k, v, view,\nattention, o"),
        ("3  propagate", "16 features =\n4 heads"),
        ("4  dry run", "rank 0: 8 of 16\nshapes fit"),
        ("5  agree", "training, eval,\nshared weights"),
        ("6  entries", "q, k, v column\no row"),
    ]
    for number, (title, words) in enumerate(passes):
        x = 14 + 125 * number
        d.text(x + 52, 48, title)
        d.box(x, 58, 104, 54, words, f"r{min(number, 3)} pale")
        if number:
            d.arrow(x - 21, 85, x, 85)
    d.parts.append('<path d="M566 114 C566 165 316 165 316 116" marker-end="url(#head)"/>')
    d.text(441, 172, "again, without what was refused", "small")
    d.text(
        380,
        206,
        "A pass that cannot show something to be right refuses the layer and says why. Refused layers stay",
        "small",
    )
    d.text(380, 222, "whole on every rank; weft.explain(model) prints the reasons.", "small")
    return d


MEASURED = [  # of the committed results: file, what a row must have, its name here, our time, the peer's
    ("collectives", {"operation": "all_reduce", "bytes": 4 << 10}, "all_reduce, 4 KiB", "ordinary", "gloo"),
    ("collectives", {"operation": "all_reduce", "bytes": 1 << 20}, "all_reduce, 1 MiB", "ordinary", "gloo"),
    ("collectives", {"operation": "all_reduce", "bytes": 25 << 20}, "all_reduce, 25 MiB", "ordinary", "gloo"),
    ("collectives", {"operation": "all_to_all", "bytes": 25 << 20}, "all_to_all, 25 MiB", "ordinary", "gloo"),
    ("linear", {"shape": "256/1024/64 fp32"}, "split MLP, width 256", "weft", "DTensor over gloo"),
    ("linear", {"shape": "1024/4096/512 fp32"}, "split MLP, width 1024", "weft", "DTensor over gloo"),
    ("data_parallel", {"name": "BERT-base's gradients"}, "BERT-base's gradients", "weft", "DDP on gloo"),
    ("data_parallel", {"name": "demo GPT"}, "a GPT's training step", "weft", "DDP on gloo"),
]


def measured() -> Drawing:
    d = Drawing("Two CPU ranks: weft beside gloo, DTensor and DDP", 40 + 28 * len(MEASURED))
    d.text(14, 20, "Time beside the peer's, two ranks on two cores", "title", "start")
    for number, (file, has, name, ours, peer) in enumerate(MEASURED):
        rows = json.loads((RESULTS / f"{file}.json").read_text())["rows"]
        (row,) = (row for row in rows if has.items() <= row.items())
        mine, theirs = (row["times"][key]["p50_us"] for key in (ours, peer))
        y = 34 + 28 * number
        d.text(176, y + 15, name, "", "end")
        d.box(186, y, 300, 20)
        d.box(186, y, max(2.0, 300 * mine / theirs), 20, kind="r0")
        d.text(498, y + 15, f"{theirs / mine:.3g}x  ({_time(mine)}; {peer} {_time(theirs)})", "small", "start")
    return d


def beside_mpi() -> Drawing:
    rows = json.loads((ALL_RESULTS / "intel-xeon-2-cores" / "collectives_beside_mpi.json").read_text())["rows"]
    operations = [name for name in dict.fromkeys(row["operation"] for row in rows) if name != "barrier"]
    lines = {  # a contender's colour and dashes
        "symmetric": ("#3b6fd4", ""),
        "ordinary": ("#3b6fd4", "5 3"),
        **{name: (colour, "") for name, colour in zip(_MPIS, ("#d9822b", "#2c9a78", "#a1529f"), strict=True)},
    }
    d = Drawing("Time of collectives against their size, two ranks: weft beside three MPIs", 60 + 210 * 2)
    d.text(14, 20, "Time against size, two CPU ranks; both axes logarithmic", "title", "start")
    for number, operation in enumerate(operations):
        left, top, width, height = 50 + 240 * (number % 3), 56 + 210 * (number // 3), 180, 140
        d.box(left, top, width, height, "", "edge")
        d.text(left + width / 2, top - 8, operation)
        for power in (6, 12, 18, 24):
            d.text(left + width * (power - 6) / 18, top + height + 15, _bytes(2**power), "small")
        for power in range(5):
            d.text(left - 5, top + height * (1 - (power + 0.7) / 5) + 4, _time(10.0**power), "small", "end")
        of_operation = [row for row in rows if row["operation"] == operation]
        for name, (colour, dashes) in lines.items():
            points = [
                f"{left + width * (math.log2(row['bytes']) - 6) / 18:.1f},"
                f"{top + height * (1 - (math.log10(row['times'][name]['p50_us']) + 0.7) / 5):.1f}"
                for row in of_operation
            ]
            style = f"fill: none; stroke: {colour}; stroke-width: 1.6; stroke-dasharray: {dashes or 'none'}"
            d.parts.append(f'<polyline points="{" ".join(points)}" style="{style}"/>')
    for number, (name, (colour, dashes)) in enumerate(lines.items()):
        y = 290 + 24 * number
        style = f"stroke: {colour}; stroke-width: 2; stroke-dasharray: {dashes or 'none'}"
        d.parts.append(f'<line x1="530" y1="{y}" x2="560" y2="{y}" style="{style}"/>')
        d.text(
            568,
            y + 4,
            {"symmetric": "weft, symmetric memory", "ordinary": "weft, torch.distributed"}.get(name, name),
            "small",
            "start",
        )
    return d


_MPIS = ("Open MPI", "MPICH", "Intel MPI")


def _bytes(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB" if size >= 1024 else f"{size} B"


def _time(us: float) -> str:
    return f"{us:.3g} us" if us < 1000 else f"{us / 1e3:.3g} ms"


PICTURES: list[Callable[[], Drawing]] = [
    paradigms,
    data_parallel,
    tensor_parallel,
    sequence_parallel,
    pipeline,
    mesh,
    exchange,
    planner_passes,
    measured,
    beside_mpi,
]

if __name__ == "__main__":
    for picture in PICTURES:
        Path(__file__).with_name(f"{picture.__name__}.svg").write_text(picture().svg())
