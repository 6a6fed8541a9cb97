"""weft bench's common code: what it prints, draws, keeps and compares, of a bench that is made for the test; and the
machine that it measures for the planner."""

import base64
import csv
import importlib
import io
import json
import random
import re
import shutil
import subprocess
import sys
import time
import types
from dataclasses import asdict, replace
from html.parser import HTMLParser

import on_gpu
import pytest
from rich.console import Console

from weft.bench import command, compare, figures, html_report, machine, measure, mpi, progress, report, suites
from weft.bench.device_time import Ceilings
from weft.bench.measure import Quantiles
from weft.bench.table import Row
from weft.cli import main
from weft.testing.ranks import run_ranks
from weft.tools.planner.hardware import Hardware

SHAPES = ["8x8", "<script>alert('x')</script> & 4x4", "[bold]16x16[/bold]"]


def rows_of(generator, shapes=SHAPES):
    def times(least):
        return Quantiles(*sorted(generator.uniform(least, 2 * least) for _ in range(3)))

    return [
        Row(
            {"shape": shape, "world": 2},
            {"ours": times(20), "gloo": times(100), "DTensor": times(300), "limit": times(5)},
            "gloo",
            {"of_limit": 0.25},
            "[2x]",
        )
        for shape in shapes
    ]


@pytest.fixture
def fake(monkeypatch):
    """A bench called fake-one of three rows; `calls` counts how often it ran."""
    module = types.ModuleType("weft.bench.fake_one")
    module.LIMIT, module.calls, module.rows = "the speed of light", 0, rows_of(random.Random(0))
    module.add_arguments = lambda parser: parser.add_argument("--wrong", action="store_true")

    def run(options):
        module.calls += 1
        if options.wrong:
            raise AssertionError("8x8 is off by 3; not measured")
        return iter(module.rows)

    module.run = run
    monkeypatch.setitem(sys.modules, "weft.bench.fake_one", module)
    monkeypatch.setitem(suites.SUITES, "fake_one", suites.Suite("a bench of this test", caches=suites.COLD))
    return module


def refused(capsys, *arguments):
    """The one line that it is refused with."""
    assert main(["bench", *map(str, arguments)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("weft bench: ") and said.err.count("\n") == 1
    return said.err


def test_every_bench_has_what_the_common_code_asks_for():
    for name in suites.SUITES:
        module = importlib.import_module(f"weft.bench.{name}")
        assert callable(module.run) and module.LIMIT
        options = command._parser(name, module).parse_args(["--rounds", "3", "--csv", "x"])
        assert (options.rounds, options.csv, options.json, options.html, options.record) == (3, "x", None, None, None)


def test_all_outputs_hold_every_row_with_what_it_was_measured_on(fake, tmp_path, capsys):
    paths = {name: tmp_path / "new" / f"out.{name}" for name in ("json", "csv", "html")}
    outputs = [part for name, path in paths.items() for part in (f"--{name}", str(path))]
    assert main(["bench", "fake-one", "--rounds", "9", *outputs]) == 0
    said = capsys.readouterr().out
    for text in (
        *SHAPES,
        "[2x]",
        "limit: the speed of light",
        f"caches: {suites.COLD}",
        "of up to 9 rounds",
        "20th to the",
    ):
        assert text in said, said
    saved = json.loads(paths["json"].read_text())
    assert (saved["weft_bench"], saved["bench"], saved["rounds"]) == (report.VERSION, "fake_one", 9)
    assert {"torch", "weft", "commit", "processor", "cores"} <= set(saved["environment"])
    assert saved["rows"] == [row.as_dict() for row in fake.rows]
    lines = list(csv.DictReader(io.StringIO(paths["csv"].read_text())))
    assert [line["shape"] for line in lines] == SHAPES and {line["bench"] for line in lines} == {"fake_one"}
    for line, row in zip(lines, fake.rows, strict=True):
        assert float(line["times.gloo.p50_us"]) == row.times["gloo"].p50_us
        assert float(line["times.limit.p80_us"]) == row.times["limit"].p80_us


@pytest.mark.parametrize(
    "option", [["-n", "0"], ["-f", "1"], ["-f", "-2"], ["-b", ""], ["--op"], ["--world", "0"], ["--rounds", "0"]]
)
def test_an_option_that_would_be_ignored_is_refused(option, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "collectives", *option])
    assert ended.value.code == 2 and "error: argument" in capsys.readouterr().err


def test_results_are_kept_where_nobody_reads_the_table(fake, tmp_path, monkeypatch):
    def leave(*arguments):
        raise SystemExit(1)  # rich's answer to a broken pipe

    monkeypatch.setattr(report, "print_table", leave)
    with pytest.raises(SystemExit):
        main(["bench", "fake-one", "--json", str(tmp_path / "out.json"), "--html", str(tmp_path / "out.html")])
    assert len(json.loads((tmp_path / "out.json").read_text())["rows"]) == 3 and (tmp_path / "out.html").exists()


def test_an_interrupted_bench_says_so_and_keeps_nothing(fake, tmp_path, monkeypatch, capsys):
    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(fake, "run", interrupted)
    assert main(["bench", "fake-one", "--json", str(tmp_path / "out.json")]) == 130
    assert capsys.readouterr().err == "weft: interrupted\n" and not list(tmp_path.iterdir())


class Page(HTMLParser):
    """The cells of each table by its id, the references, and that every element is closed."""

    VOID = ("meta", "img")

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tables, self.references, self.tags = [], {}, [], set()
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.references += [value for name, value in attributes if name in ("src", "href", "data", "action", "srcset")]
        if tag == "table":
            self.tables[dict(attributes)["id"]] = self.rows = []
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def pictures(text):
    from matplotlib.image import imread

    found = [reference.removeprefix("data:image/png;base64,") for reference in Page(text).references]
    return [imread(io.BytesIO(base64.b64decode(data, validate=True))) for data in found]


def test_the_page_is_whole_in_itself(fake, tmp_path):
    pytest.importorskip("matplotlib", reason="--html needs matplotlib")
    path = tmp_path / "page.html"
    assert main(["bench", "fake_one", "--html", str(path)]) == 0
    text = path.read_text()
    found = Page(text)
    assert "script" not in found.tags and "link" not in found.tags and "url(" not in text
    assert all(reference.startswith("data:image/png;base64,") for reference in found.references)
    assert [row[0] for row in found.tables["results"]] == ["shape", *SHAPES]
    assert len(found.tables["times"]) == 1 + 4 * len(SHAPES)
    for row, cells in zip(fake.rows, found.tables["times"][1::4], strict=True):
        ours = row.ours
        assert cells[1:] == ["ours", f"{ours.p20_us:.1f}", f"{ours.p50_us:.1f}", f"{ours.p80_us:.1f}", "1x"]
    assert {"device", "torch", "weft", "commit"} <= {cells[0] for cells in found.tables["versions"]}
    assert "weft bench fake_one --html" in text
    (picture,) = pictures(text)
    assert picture.std() > 0.01, "a blank picture has no contrast"


@pytest.mark.slow("bench")
def test_a_page_opens_in_a_browser_without_network(fake, tmp_path):
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next((found for name in names if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"none of {', '.join(names)} is installed")
    pytest.importorskip("matplotlib", reason="--html needs matplotlib")
    from matplotlib.image import imread

    path, shot = tmp_path / "page.html", tmp_path / "shot.png"
    assert main(["bench", "fake_one", "--html", str(path)]) == 0
    offline = ["--host-resolver-rules=MAP * ~NOTFOUND", "--no-first-run", f"--user-data-dir={tmp_path / 'profile'}"]
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1300,1800", *offline]
    subprocess.run(
        [browser, *options, f"--screenshot={shot}", path.as_uri()], check=True, capture_output=True, timeout=60
    )
    seen = imread(shot)[..., :3]
    for colour in ((31, 119, 180), (255, 127, 14), (44, 160, 44)):  # what matplotlib draws three contenders in
        same = (abs(seen * 255 - colour) < 3).all(-1)
        assert same.sum() > 50, f"the browser shows nothing of {colour}"
    dom = subprocess.run([browser, *options, "--dump-dom", path.as_uri()], check=True, capture_output=True, timeout=60)
    assert dom.stdout.decode().count("<tr>") == path.read_text().count("<tr>")


def test_a_bench_without_a_picture_of_its_own_gets_one_of_times_and_ratios(fake, tmp_path):
    pytest.importorskip("matplotlib", reason="--plot needs matplotlib")
    from matplotlib.image import imread

    drawn = []
    for rows in (fake.rows, fake.rows[:1], []):
        fake.rows = rows
        assert main(["bench", "fake_one", "--plot", str(tmp_path / "plot.png")]) == 0
        drawn.append(imread(tmp_path / "plot.png"))
    assert drawn[0].shape[0] > drawn[1].shape[0] >= drawn[2].shape[0], "the height grows with the rows"


@pytest.mark.slow("bench")
def test_a_real_bench_has_both_pictures_on_its_page(tmp_path, capfd):
    pytest.importorskip("matplotlib", reason="--html needs matplotlib")
    path = tmp_path / "page.html"
    measured = ["--rounds", "2", "--op", "all_reduce", "-b", "4096", "-e", "4096", "--html", str(path)]
    assert main(["bench", "collectives", *measured]) == 0
    assert "caches: warm" in capfd.readouterr().out
    assert len(pictures(path.read_text())) == 2
    contenders = {cells[1] for cells in Page(path.read_text()).tables["times"][1:]}
    assert contenders == {"ordinary", "symmetric", "gloo", "limit"}


def test_runs_are_appended_to_the_device_s_folder(fake, tmp_path, monkeypatch):
    for _ in range(2):
        assert main(["bench", "fake_one", "--record", str(tmp_path)]) == 0
    (path,) = tmp_path.rglob("*.jsonl")
    runs = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(runs) == 2 and path.name == "fake_one.jsonl"
    assert re.fullmatch(r"[a-z0-9-]+", path.parent.name) and "commit" in runs[0]["environment"]
    (tmp_path / "checkout" / "bench" / "results").mkdir(parents=True)
    monkeypatch.setattr(report, "checkout", lambda: tmp_path / "checkout")
    assert main(["bench", "fake_one", "--record"]) == 0
    assert (tmp_path / "checkout" / "bench" / "results" / path.parent.name / path.name).is_file()


def test_a_wheel_keeps_no_results_of_its_own(fake, capsys, monkeypatch):
    monkeypatch.setattr(report, "checkout", lambda: None)
    assert "installed from a wheel" in refused(capsys, "fake_one", "--record")
    assert fake.calls == 0


def test_what_cannot_be_kept_is_refused_before_anything_is_measured(fake, tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("")
    for option in ("--json", "--csv", "--plot", "--html", "--record"):
        assert "cannot write" in refused(capsys, "fake_one", option, tmp_path / "file" / "out")
        assert "cannot write" in refused(capsys, "fake_one", option, "/proc/nowhere/out")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for option in ("--plot", "--html"):
        assert "need matplotlib: pip install 'weft[plot]'" in refused(capsys, "fake_one", option, tmp_path / "out")
    assert fake.calls == 0 and [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "say one of"),
        (["abacus"], "there is no bench 'abacus'; there are linear, "),
        (["linear", "--compare", "a", "b"], None),  # an option of the bench, which has none of that name
        (["--compare", "a", "--save", "b"], "say one of"),
        (["--ranks", "2", "--compare", "a"], "--ranks needs --save"),
        (["--tolerance", "0.1", "--save", "a"], "--tolerance needs --compare"),
        (["--save", "/proc/nowhere/hw.json"], "cannot write /proc/nowhere/hw.json"),
        (["--compare", "a", "b", "c"], "takes two files"),
        (["linear", "--rounds", "0"], None),
        (["linear", "--world", "two"], None),
        (["collectives", "--datatype", "float31"], None),
        (["collectives", "-b", "8K", "-e", "16K"], "there is no size from -b 8192 to -e 16384"),
        (["--save", "hw.json", "--ranks", "-1"], None),
        (["--tolerance", "2", "--compare", "a", "b"], None),
    ],
    ids=str,
)
def test_bad_usage_is_reported_with_exit_code_2(arguments, said, capsys):
    if said is not None:
        assert said in refused(capsys, *arguments)
        return
    with pytest.raises(SystemExit) as stopped:  # argparse's, with the usage above it
        main(["bench", *arguments])
    assert stopped.value.code == 2 and ": error: " in capsys.readouterr().err


def test_a_wrong_result_is_not_timed(fake, tmp_path, capsys):
    assert main(["bench", "fake_one", "--wrong", "--json", str(tmp_path / "out.json")]) == 1
    assert capsys.readouterr().err == "weft bench: 8x8 is off by 3; not measured\n"
    assert list(tmp_path.iterdir()) == []


# Comparing


def scaled(rows, ours=1.0, others=1.0):
    def times(each, by):
        return Quantiles(*(value * by for value in asdict(each).values()))

    return [
        replace(
            row, times={name: times(each, ours if name == "ours" else others) for name, each in row.times.items()}
        ).as_dict()
        for row in rows
    ]


def tight(rows):
    """The same medians with a spread of 1% on either side."""
    middles = [row.ours.p50_us for row in rows]
    return [
        replace(row, times={**row.times, "ours": Quantiles(middle * 0.99, middle, middle * 1.01)})
        for row, middle in zip(rows, middles, strict=True)
    ]


@pytest.fixture
def rows():
    return rows_of(random.Random())


def verdicts(before, after, **options):
    return [change.verdict for change in compare.changes(before, after, **options)]


def test_what_is_faster_in_one_direction_is_slower_in_the_other(rows):
    first = scaled(tight(rows))
    for by in (1.0, 1.03, 1.1, 2.0):
        second = scaled(tight(rows), ours=by)
        forth, back = verdicts(first, second), verdicts(second, first)
        assert set(forth) == {compare.SLOWER if by > compare.TOLERANCE + 1 else compare.NOISE}
        assert set(back) == {compare.FASTER if by > compare.TOLERANCE + 1 else compare.NOISE}
    assert set(verdicts(first, scaled(tight(rows), ours=1.1), tolerance=0.2)) == {compare.NOISE}


def test_medians_apart_are_noise_where_the_spreads_meet():
    wide, within = ([{"shape": "a", "times": {"ours": asdict(Quantiles(10, middle, 20))}}] for middle in (11, 19))
    assert verdicts(wide, within) == verdicts(within, wide) == [compare.NOISE]
    beyond = [{"shape": "a", "times": {"ours": asdict(Quantiles(20.1, 21, 22))}}]
    assert verdicts(wide, beyond) == [compare.SLOWER] and verdicts(beyond, wide) == [compare.FASTER]


def test_only_our_times_are_judged_and_the_others_show_the_machine(rows):
    first, second = scaled(tight(rows)), scaled(tight(rows), others=3.0)
    changes = compare.changes(first, second)
    assert {change.verdict for change in changes} == {compare.NOISE}
    assert [change.others for change in changes] == pytest.approx([3.0] * len(SHAPES))


@pytest.mark.parametrize(("ours", "others", "verdict"), [(1.5, 1.6, compare.NOISE), (2, 1.6, compare.SLOWER), (0.5, 0.6, compare.FASTER), (0.7, 1.6, compare.NOISE)])  # fmt: skip
def test_what_differs_no_more_than_what_runs_nothing_of_weft_is_noise(rows, ours, others, verdict):
    first, second = scaled(tight(rows)), scaled(tight(rows), ours=ours, others=others)
    assert set(verdicts(first, second)) == {verdict}
    for row in second:  # a peer over our backend is slow because ours is
        for name in ("gloo", "DTensor"):
            row["times"][f"{name} on weft"] = row["times"].pop(name)
    for row, before in zip(second, first, strict=True):
        row["times"]["limit"] = before["times"]["limit"]
    assert set(verdicts(first, second)) == {compare.SLOWER if ours > 1 else compare.FASTER}


def test_rows_are_matched_by_what_they_are_of(rows):
    first, second = scaled(rows), scaled(rows)
    random.shuffle(second)
    assert [change.ratio for change in compare.changes(first, second)] == [1.0] * len(SHAPES)
    found = {change.row: change.verdict for change in compare.changes(first[:2], first[1:])}
    assert list(found.values()) == ["only in the first", compare.NOISE, "only in the second"]
    again = figures.identities([first[0], first[0], {**first[0], "world": 3}])
    assert again == ["8x8 W=2", "8x8 W=2 #2", "8x8 W=3"]
    for nothing in (None, 0, -1, "fast", True):
        times = first[0]["times"]
        broken = {**first[0], "times": {**times, "ours": {**times["ours"], "p50_us": nothing}}}
        assert verdicts(first[:1], [broken]) == ["only in the first"], "a time is a positive number"
    unmeasured = [{**first[0], "times": {}}]
    assert verdicts(first[:1], unmeasured) == ["only in the first"]


def saved(folder, name, of, **changed):
    run = {
        "weft_bench": report.VERSION,
        "bench": "fake",
        "device": "this",
        "command": "weft bench fake",
        "environment": {"weft": "0.1.0", "commit": "abc"},
        "rounds": 21,
        "rows": of,
        **changed,
    }
    (folder / name).write_text(json.dumps(run))
    return str(folder / name)


def test_the_exit_code_gives_a_regression(rows, tmp_path, capsys):
    a = saved(tmp_path, "a.json", scaled(tight(rows)))
    slow = scaled(tight(rows))
    slow[1] = scaled(tight(rows), ours=1.5)[1]
    b = saved(tmp_path, "b.json", slow, environment={"weft": "0.2.0", "commit": "def"})
    assert main(["bench", "--compare", a, a]) == 0
    assert "0 slower, 0 faster, 3 within noise" in capsys.readouterr().out
    assert main(["bench", "--compare", a, b]) == 1
    said = capsys.readouterr().out
    assert "1 slower, 0 faster, 2 within noise, 0 only in one" in said and "1.50x" in said and SHAPES[2] in said
    assert "weft 0.1.0, commit abc" in said and "weft 0.2.0, commit def" in said
    assert main(["bench", "--compare", b, a]) == 0
    assert main(["bench", "--compare", a, b, "--tolerance", "0.6"]) == 0
    history = tmp_path / "runs.jsonl"
    history.write_text("\n".join((tmp_path / name).read_text() for name in ("b.json", "a.json", "b.json")) + "\n")
    assert main(["bench", "--compare", str(history)]) == 1, "of one history, the last two runs"
    assert main(["bench", "--compare", b, str(history)]) == 0, "beside another file, its last run"


def test_few_rounds_are_reported_as_too_few(rows, tmp_path, capsys):
    a = saved(tmp_path, "a.json", scaled(rows), rounds=2)
    assert main(["bench", "--compare", a, a]) == 0 and "2 rounds say little" in capsys.readouterr().out


def test_files_that_cannot_be_compared_are_refused_in_a_line(rows, tmp_path, capsys):
    good = saved(tmp_path, "good.json", scaled(rows))
    bad = {
        "other version": (dict(weft_bench=7), "weft_bench is 7, and this weft compares results of version 2"),
        "no version": (dict(weft_bench=None), "weft_bench is None"),
        "other bench": (dict(bench="linear"), "of bench 'fake', "),
        "other device": (dict(device="that"), "measure both on one machine"),
        "no rows": (dict(rows=None), "lacks rows"),
        "rows of numbers": (dict(rows=[1]), "lacks rows"),
        "no environment": (dict(environment="here"), "lacks environment"),
        "rounds in words": (dict(rounds="many"), "lacks rounds"),
    }
    for name, (changed, said) in bad.items():
        assert said in refused(capsys, "--compare", good, saved(tmp_path, name, [], **changed))
    for text, said in (("", "is empty"), ("[1]", "weft_bench is None"), ("{", "is not JSON")):
        (tmp_path / "text.json").write_text(text)
        assert said in refused(capsys, "--compare", good, tmp_path / "text.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty.jsonl").write_text("\n")
    assert "is not JSON" in refused(capsys, "--compare", tmp_path / "bytes.json", good)
    assert "is empty" in refused(capsys, "--compare", tmp_path / "empty.jsonl", good)
    assert "No such file" in refused(capsys, "--compare", good, tmp_path / "none.json")
    assert "holds one run" in refused(capsys, "--compare", good)


def test_make_gpu_keeps_what_can_be_compared(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(on_gpu, "ceilings", lambda: Ceilings(1.0, 1.0))
    peers = {"library": Quantiles(2, 3, 4)}
    fake.rows = [Row({"op": "op", "shape": "8x8"}, {"ours": Quantiles(1, 1, 1), **peers}, "library")]
    assert on_gpu.bench("fake_one", tmp_path, 0.0) == 0
    (kept,) = compare.read(str(tmp_path / "fake_one.json"))
    assert kept["geometric_mean_ratio"] == {"op": pytest.approx(3.0)} and kept["build"]["version"]
    assert main(["bench", "--compare", *[str(tmp_path / "fake_one.json")] * 2]) == 0


# How far it is


def prints(rank):
    progress.set_round(3, 5)
    assert progress._drawing.acquire(blocking=False), "forked in the middle of a line"


def test_ranks_report_their_progress_to_the_process_that_started_them(monkeypatch):
    """Also while it draws without pause, and no rank is forked in the middle of a line."""
    monkeypatch.setattr(progress, "_EVERY_S", 0.0)
    drawn = io.StringIO()
    with progress.Bar("fake", Console(file=drawn, force_terminal=True, width=100)) as bar:
        for number in range(4):
            run_ranks(prints, 2, backend=None, timeout_s=20)
            bar.rows = number + 1
        assert list(progress._shared) == [3, 5]
        deadline = time.monotonic() + 20
        while "fake: 4 rows" not in drawn.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert "fake: 4 rows" in drawn.getvalue() and "round 3 of 5" in drawn.getvalue()


def test_every_round_is_reported_and_nothing_is_drawn_where_nobody_watches(monkeypatch):
    reported = []
    monkeypatch.setattr(progress, "set_round", lambda *call: reported.append(call))
    measure.alternate({"a": lambda: None, "b": lambda: None}, meet=lambda: None, rounds=3, calls=1)
    assert reported == [(0, 3), (1, 3), (2, 3), (3, 3)], "the first round warms up"
    drawn = io.StringIO()
    with progress.Bar("fake", Console(file=drawn)):
        pass
    assert drawn.getvalue() == ""


# The machine


def test_the_fit_of_a_link_finds_latency_and_rate():
    for _ in range(20):
        link = machine.Link(random.uniform(1e-6, 1e-3), random.uniform(1e8, 1e11))
        found = machine.fit([(size, link.gather_s(size)) for size in machine.MESSAGES])
        assert found.latency_s == pytest.approx(link.latency_s, rel=1e-6)
        assert found.bytes_s == pytest.approx(link.bytes_s, rel=1e-6)
    without = machine.fit([(size, size**1.1 / 1e9) for size in machine.MESSAGES])
    assert without.latency_s == 0 and without.bytes_s > 0
    with pytest.raises(suites.RefusedError, match="quiet machine"):
        machine.fit([(size, 1 / size) for size in machine.MESSAGES])


def test_a_measured_machine_is_hardware_for_the_planner(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(machine, "SHAPES", [(64, 64, 64), (64, 128, 32)])
    monkeypatch.setattr(machine, "COPIED_BYTES", 1 << 20)
    monkeypatch.setattr(machine, "ATTENTION", [(1, 2, length, width) for length in (64, 256) for width in (8, 128)])
    monkeypatch.setattr(machine, "MESSAGES", [4096, 4 << 20])
    monkeypatch.setattr(machine, "NETWORK_MESSAGES", [4096, 4 << 20])
    monkeypatch.setattr(machine, "_CALL_S", 0.001)
    # These refuse what so short calls take on a busy machine; tests of their own are above and in test_planner_machine.
    monkeypatch.setattr(machine, "fit", lambda points: machine.Link(1e-5, 1e9))
    monkeypatch.setattr(machine, "fit_attention", lambda times: machine.Attention(1e-8, 1e-9, 50.0))
    path = tmp_path / "hw.json"
    assert main(["bench", "--save", str(path), "--ranks", "3"]) == 0
    said = capfd.readouterr().out
    assert "fp32 product 64x128x32" in said and "shared by 3 ranks" in said
    saved_file, hardware = json.loads(path.read_text()), Hardware.of(path)
    assert hardware.devices_per_node == 3 and hardware.full_speed_ranks == saved_file["environment"]["cores"]
    assert hardware.memory_bytes * 3 == pytest.approx(machine.memory_bytes(), rel=1e-6)
    assert 0 < hardware.matmul_fraction <= 1 and hardware.launch_s > 0 and hardware.reserved_bytes > 1 << 20
    fastest = max(
        2 * m * n * k / saved_file["measured"]["times"][f"{m}x{n}x{k}"]["p50_us"] * 1e6 for m, n, k in machine.SHAPES
    )
    assert hardware.peak_flops["fp32"] == pytest.approx(fastest)
    assert len(saved_file["measured"]["node"]) == len(saved_file["measured"]["network"]) == 3 * 2
    assert saved_file["command"].startswith("weft bench --save") and saved_file["environment"]["torch"]

    job = ["--gpus", "3", "--sequence-length", "64", "--global-batch", "6", "--precision", "fp32"]
    assert main(["plan", "gpt2", *job, "--hardware", str(path)]) == 0
    assert hardware.name in capfd.readouterr().out
    path.write_text(json.dumps({**saved_file, "weft_hardware": 1}))
    assert main(["plan", "gpt2", *job, "--hardware", str(path)]) == 2
    assert "weft_hardware is 1, and this weft reads version 2" in capfd.readouterr().err


def test_a_page_s_cells_are_text(rows):
    found = {
        **dict.fromkeys(("bench", "command", "date", "device", "limit", "caches", "rounds"), "text"),
        "environment": {"torch": "<b>"},
        "rows": [row.as_dict() for row in rows],
    }
    text = html_report.page(found, ["<i>"], [["</td>"]], [])
    assert Page(text).tables["results"] == [["<i>"], ["</td>"]]
    assert ["torch", "<b>"] in Page(text).tables["versions"]


def test_our_side_of_the_comparison_with_mpi():
    found = run_ranks(mpi._measured, 2, (64,), False)[0]
    assert set(found) == {f"{name} 64, {way}" for name in mpi.OPERATIONS for way in ("ordinary", "symmetric")}
    assert all(us > 0 for us in found.values())


@pytest.mark.skipif(shutil.which("mpicc") is None, reason="no MPI here to compile for")
def test_the_program_of_mpis_side_compiles(tmp_path):
    (tmp_path / "peer.c").write_text(mpi._PROGRAM_IN_C)
    subprocess.run(["mpicc", "-Wall", "-Werror", tmp_path / "peer.c", "-o", tmp_path / "peer"], check=True)
