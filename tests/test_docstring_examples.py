"""The examples in the docstrings of the public names: every name has one, and two ranks run each."""

import copy
import doctest

import torch
import torch.distributed as dist
from torch import nn

import weft
from weft.testing.ranks import run_ranks

EXCEPTIONS = {name for name in weft.__all__ if name.endswith("Error")}
EXAMPLES = {
    test.name: test
    for name in weft.__all__
    if name not in EXCEPTIONS | {"__version__"}
    for test in [doctest.DocTestParser().get_doctest(getattr(weft, name).__doc__, {}, name, None, 0)]
}


def failures(rank: int, examples: dict[str, doctest.DocTest], folder: str) -> dict[str, str]:
    """Run every example; return the reports of those that fail. Ranks begin each with the same random numbers."""
    failed: dict[str, str] = {}
    for name, test in examples.items():
        torch.manual_seed(0)
        report: list[str] = []
        names = {"copy": copy, "dist": dist, "nn": nn, "path": f"{folder}/{name}", "torch": torch, "weft": weft}
        copied = doctest.DocTest(test.examples, names, name, None, 0, None)
        if doctest.DocTestRunner(verbose=False).run(copied, out=report.append).failed:
            failed[name] = "".join(report)
    return failed


def test_every_public_name_has_an_example():
    assert [name for name, test in EXAMPLES.items() if not test.examples] == []


def test_two_ranks_run_the_examples(tmp_path):
    for failed in run_ranks(failures, 2, EXAMPLES, str(tmp_path), timeout_s=120):
        assert failed == {}, "\n".join(failed.values())


def test_an_example_that_is_wrong_is_reported(tmp_path):
    wrong = doctest.DocTestParser().get_doctest(">>> weft.split_sizes(4, 2)\n[3, 1]\n", {}, "wrong", None, 0)
    for failed in run_ranks(failures, 2, {"wrong": wrong}, str(tmp_path)):
        assert "[2, 2]" in failed["wrong"]
