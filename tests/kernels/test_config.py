"""Which configuration runs: explicit, table, heuristic, error; and tables read back as they were written."""

import json
from pathlib import Path

import pytest

from weft.kernels import attention_tiles, config
from weft.kernels.config import AttentionConfig, Entry, choose, chosen, nearest, table, table_text

RESULTS = Path(__file__).parents[2] / "bench" / "results"
LISTED = (AttentionConfig(64, 64, 4, 2), AttentionConfig(128, 64, 8, 3), AttentionConfig(32, 32, 4, 2))
PROBLEM = {"m": 4096, "causal": True, "dtype": "bfloat16"}
ENTRY = Entry(PROBLEM, LISTED[1], ours_us=10.0, peer_us=12.0)


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """A folder that stands for the package's own; nothing of it is remembered."""
    monkeypatch.setattr(config.resources, "files", lambda package: tmp_path)
    table.cache_clear()
    yield tmp_path / "configs"
    table.cache_clear()


def write(tables, *entries):
    (tables / "sm_90").mkdir(parents=True)
    (tables / "sm_90" / "attention.json").write_text(table_text(entries, {"device": "a device"}))


def choice(explicit=None, problem=PROBLEM):
    return choose("attention", "sm_90", problem, explicit, LISTED, LISTED[0])


def test_the_explicit_one_comes_before_the_table_and_the_table_before_the_heuristic(tables):
    assert (choice().config, choice().source) == (LISTED[0], "heuristic")
    table.cache_clear()
    write(tables, ENTRY)
    assert (choice().config, choice().source, choice().entry) == (LISTED[1], "table", ENTRY)
    assert (choice(LISTED[2]).config, choice(LISTED[2]).source) == (LISTED[2], "explicit")


def test_a_row_of_a_plainer_kernel_or_without_triton_leaves_the_heuristics_tile(tables, monkeypatch):
    """Continued states, documents and caps have smaller tiles, and a table has none of them."""
    write(tables, ENTRY)
    assert chosen(choice(), LISTED, LISTED[0]) == LISTED[1]
    assert chosen(choice(), LISTED[:1], LISTED[0]) == LISTED[0]
    monkeypatch.setattr(config, "VERSION", None)
    assert chosen(choice(), LISTED, LISTED[0]) == LISTED[0]
    assert chosen(choice(LISTED[2]), LISTED, LISTED[0]) == LISTED[2]


def test_one_that_does_not_exist_is_an_error_that_lists_those_that_do(tables):
    with pytest.raises(
        ValueError, match=r"attention: AttentionConfig\(block_m=48.*does not exist on sm_90; there are .*128"
    ):
        choice(AttentionConfig(48, 48, 4, 2))


def test_a_row_serves_sizes_within_a_factor_of_two_and_equal_kinds_only():
    for change, found in [
        ({}, True),
        ({"m": 2048}, True),
        ({"m": 8192}, True),
        ({"m": 8193}, False),
        ({"m": 2047}, False),
        ({"m": 0}, False),
        ({"causal": False}, False),
        ({"dtype": "float16"}, False),
    ]:
        assert (nearest([ENTRY], {**PROBLEM, **change}) is ENTRY) == found, change


def test_the_nearest_row_is_the_one_of_the_least_ratio():
    near = Entry({**PROBLEM, "m": 5000}, LISTED[2], 1.0, 1.0)
    assert nearest([ENTRY, near], {**PROBLEM, "m": 4700}) is near
    assert nearest([ENTRY, near], {**PROBLEM, "m": 4300}) is ENTRY
    assert nearest([], PROBLEM) is None


def test_a_table_is_read_back_as_written_and_says_where_it_was_measured(tables):
    write(tables, ENTRY)
    assert table("attention", "sm_90", AttentionConfig) == (ENTRY,)
    assert json.loads((tables / "sm_90" / "attention.json").read_text())["measured_on"] == {"device": "a device"}
    assert table("attention", "sm_80", AttentionConfig) == ()


@pytest.mark.parametrize(("kind", "op"), [("forward", "forward"), ("dkdv", "backward"), ("dq", "backward")])
def test_the_shipped_table_of_attention_has_the_measured_rows(kind, op):
    """Beside torch's flash attention, and in the tiles that the heuristic takes, as the bench ran it."""
    rows = json.loads((RESULTS / "nvidia-h200" / "attention_chunk.json").read_text())["rows"]
    entries = config.table(f"attention_{kind}", "sm_90", AttentionConfig)
    expected = [row for row in rows if row["op"] == f"attention {op}"]
    assert len(entries) == len(expected) == 6
    for entry, row in zip(entries, expected, strict=True):
        problem = entry.problem
        mask = "causal" if problem["bounded"] else "full"
        assert row["shape"] == f"64:8 heads, {problem['queries']} x {problem['head_dim']}, {mask}"
        assert (entry.ours_us, entry.peer_us) == tuple(row["times"][name]["p50_us"] for name in ("ours", "flash"))
        assert entry.config == attention_tiles.listed(kind, "sm_90", problem["head_dim"])[0]


@pytest.mark.parametrize(("bounded", "faster"), [(True, True), (False, False)])
def test_a_measured_size_of_attention_decides_between_kernel_and_library(bounded, faster):
    problem = {"queries": 6000, "keys": 6000, "head_dim": 64, "value_dim": 64, "bounded": bounded}
    entry = config.measured(
        "attention_dkdv", "sm_90", problem | {"dropout": False, "dtype": "bfloat16"}, AttentionConfig
    )
    assert entry is not None and (entry.ours_us <= entry.peer_us) == faster
    other = problem | {"queries": 2000, "dropout": False, "dtype": "bfloat16"}
    assert config.measured("attention_dkdv", "sm_90", other, AttentionConfig) is None, "8192 serves 4096 and more"
