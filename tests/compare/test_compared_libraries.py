"""Other libraries' parallel training beside one process: a few rows of docs/compared.md, made again."""

import importlib
import importlib.util
import json
from functools import cache
from pathlib import Path

import compared_libraries as libraries
import families
import pytest

from weft.bench.tables import RESULTS

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

SAVED = json.loads((Path(__file__).parents[2] / RESULTS / "compared.json").read_text())
SAMPLE = {
    "llama": ["transformers: tp", "transformers: fsdp", "torch: FSDP2", "torch: FSDP2 with tp", "accelerate: cp"],
    "mixtral": ["transformers: ep"],
    "apertus": ["transformers: tp", "transformers: fsdp"],
}


@pytest.fixture(scope="module", autouse=True)
def _import_models():
    for family in SAMPLE:
        importlib.import_module(f"transformers.models.{family}.modeling_{family}")


@cache
def rows_of(family):
    ways = [way for way in libraries.WAYS if way.name in SAMPLE[family]]
    found = families.in_a_process({}, 150, lambda: libraries.rows_of_family(family, ways))
    return {row["way"]: row for row in found["rows"]}


def saved(way, family):
    return next(row for row in SAVED["rows"] if (row["way"], row["family"]) == (way, family))


@pytest.mark.parametrize(("family", "way"), [(family, way) for family, ways in SAMPLE.items() for way in ways])
def test_a_row_of_the_table_comes_out_again(family, way):
    row, before = rows_of(family)[way], saved(way, family)
    kinds = [libraries.verdict(x).partition(" ")[0] for x in (row, before)]
    assert kinds[0] == kinds[1], (libraries.verdict(row), libraries.verdict(before))
    if kinds[0] == "agrees":
        assert row["compared"] > 300 and not row["unknown"], row
    elif "findings" in row:
        assert row["findings"][0][0] == before["findings"][0][0], row["findings"][0]


@pytest.mark.slow("compare")
@pytest.mark.parametrize("family", ["gpt2", "deepseek_v2", "qwen3_next"])
def test_more_rows_come_out_again(family):
    ways = [way for way in libraries.WAYS if "DeepSpeed" not in way.name]
    found = families.in_a_process({}, 300, lambda: libraries.rows_of_family(family, ways))["rows"]
    kinds = {
        row["way"]: libraries.verdict(row).partition(" ")[0] for row in found if row["way"].startswith("transformers")
    }
    assert kinds == {way: libraries.verdict(saved(way, family)).partition(" ")[0] for way in kinds} and kinds


@pytest.mark.slow("compare")
@pytest.mark.parametrize(("library", "family"), [("megatron", "Mixtral"), ("torchtitan", "Qwen 3 MoE")])
def test_rows_of_libraries_that_make_compared_installs_come_out_again(library, family, monkeypatch):
    for folder in libraries.INSTALLED:
        monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / folder))
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: make compared")
    ways = [way for way in libraries.WAYS if family in (way.families or ())]
    found = families.in_a_process({}, 400, lambda: libraries.rows_of_family(family, ways))["rows"]
    assert len(found) == len(ways)
    for row in found:
        assert libraries.verdict(row)[:100] == libraries.verdict(saved(row["way"], family))[:100]
