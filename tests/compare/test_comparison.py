"""`weft compare` on programs written by hand: what is right agrees, and what is wrong is found where it is wrong."""

import os
import re
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import parallel_programs as programs
import pytest
import recorded_runs
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import optimizer

import weft
from weft.cli import main
from weft.testing.ranks import run_ranks
from weft.tools.compare.alignment import Alignment
from weft.tools.compare.comparison import compare_recordings
from weft.tools.compare.seen import Key, Seen, flat_parts, place_of

DROPS = {"p": 0.2}
MIXTURE = {"block": programs.MixtureBlock}


def compared(name, *args, world=2, of=None, **options):
    of = {"p": 0.0, "block": programs.Block, "seed": 0} | (of or {})
    program = partial(getattr(programs, name), *args, **options)
    return recorded_runs.compared((programs.unsplit, *of.values()), program, world)


RIGHT = [
    *(("over_tp", world, {}) for world in (2, 4)),
    ("over_tp", 2, {"p": 0.2, "of": DROPS}),
    *(("over_dp", world, {"micro": micro}) for world, micro in ((2, 1), (2, 2), (4, 1))),
    ("over_ddp", 2, {}),
    *(("over_cp", world, {}) for world in (2, 4)),
    *(("over_ep", world, {"of": MIXTURE}) for world in (2, 4)),
    *(("over_fsdp", world, {"tp": tp}) for world, tp in ((2, 1), (2, 2), (4, 2))),
    *(("over_weft", 2, {"sizes": {dim: 2}}) for dim in ("tp", "dp", "cp", "pp")),
    *(("over_weft", 2, {"sizes": {"dp": 2}, "zero": zero}) for zero in (1, 3)),
    *(("over_weft", 4, {"sizes": sizes}) for sizes in ({"tp": 2, "dp": 2}, {"tp": 2, "cp": 2}, {"dp": 2, "cp": 2})),
    ("over_weft", 4, {"sizes": {"tp": 2, "dp": 2}, "zero": 3}),
    ("over_weft", 2, {"sizes": {"pp": 2}, "pipeline": {"loss": programs.loss_of_scores, "microbatches": 2}}),
    ("over_weft", 2, {"recompute": "full"}),
    ("over_weft", 2, {"sequence_parallel": True}),
    ("over_weft", 2, {"p": 0.2, "of": DROPS}),
    ("over_weft", 2, {"sizes": {"dp": 2}, "p": 0.2, "of": DROPS}),
]


@pytest.mark.parametrize(("name", "world", "options"), RIGHT)
def test_what_is_right_agrees(name, world, options):
    found = compared(name, world=world, **options)
    assert found.ok, found
    assert not found.unknown and found.compared > 400 * world / 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 1 + int(os.environ.get("WEFT_COMPARED_SEEDS", "2"))))
def test_what_is_right_agrees_with_other_numbers(seed):
    for name, world, options in RIGHT:
        found = compared(name, world=world, **{**options, "of": {**options.get("of", {}), "seed": seed}}, seed=seed)
        assert found.ok, (name, world, options, str(found))


# (program, fault, where it is, options)
PLANTED = [
    ("over_tp", "blocks.1.o: sum", "blocks.1.o"),
    ("over_tp", "blocks.0.down: sum", "blocks.0.down"),
    ("over_tp", "blocks.0.down: bias", "blocks.0.down", "its bias is added 2 times"),
    ("over_tp", "blocks.1.up: gradient", "blocks.1.up", "it is a part: the sum over ranks 0, 1"),
    ("over_tp", "blocks.0.q: gradient", "blocks.0.q", "it is a part: the sum over ranks 0, 1"),
    ("over_tp", "blocks.0.k: gradient", "blocks.0.k", "it is a part: the sum over ranks 0, 1"),
    ("over_tp", "blocks.0.up: shard", "blocks.0.up.weight", "no rank has 64 to 127 of its dimension 0"),
    ("over_tp", "blocks.1.v: shard", "blocks.1.v.weight", "no rank has 16 to 31 of its dimension 0"),
    ("over_tp", "blocks.1: no mask", "blocks.1"),
    ("over_tp", "blocks.0: scale", "blocks.0"),
    ("over_tp", "blocks.0.norm2: eps", "blocks.0.norm2"),
    ("over_tp", "tokens: mask", "tokens"),
    ("over_tp", "tokens: sum", "tokens", "it is a part: the sum over ranks 0, 1"),
    ("over_tp", "positions: off by one", "", "the input of positions .* it is shifted by -1"),
    ("over_tp", "norm: of a part", "norm"),
    ("over_tp", "loss: times ranks", "loss"),
    ("over_tp", "blocks.1.norm1: frozen", "blocks.1.norm1.weight", "it has none"),
    ("over_tp", "blocks.0: drops alike", "blocks.0", "different parts and drop the same", {"p": 0.2, "of": DROPS}),
    ("over_tp", "blocks.0: drops unlike", "blocks.0", "same tensor and drop different", {"p": 0.2, "of": DROPS}),
    ("over_dp", "other weights", "tokens.weight"),
    ("over_dp", "same batch", "", "no rank has 2 to 3 of its dimension 0"),
    ("over_dp", "labels of others", "loss"),
    ("over_dp", "stale bucket", "head.weight", "it is that of the step before"),
    ("over_dp", "no reduction", "tokens.weight", "it is a part: the sum over ranks 0, 1"),
    ("over_dp", "norm without reduction", "norm.weight", "it is a part"),
    ("over_dp", "sum", "tokens.weight", "it is 2 times the reference's"),
    ("over_dp", "one rank skips", "head.weight"),
    ("over_dp", "rate times ranks", "optimizer", "lr of tokens.weight and 37 other parameters: it is 0.02, the"),
    ("over_dp", "unscaled micro-batches", "loss", "", {"micro": 2}),
    ("over_ddp", "frozen part", "head.bias", "it has none"),
    ("over_cp", "keys keep their gradients", "blocks.1"),
    ("over_cp", "mask shifted", "blocks.0"),
    ("over_cp", "positions from 0", "", "no rank has 8 to 15"),
    ("over_cp", "labels within the part", "loss"),
    ("over_cp", "first part", "", "no rank has 8 to 15 of its dimension 1"),
    ("over_cp", "divided by own tokens", "tokens.weight", "it is 2 times the reference's"),
    ("over_cp", "norms not reduced", "blocks.0.norm1.weight", "it is a part"),
    ("over_ep", "next expert", "blocks.0.moe", "", {"of": MIXTURE}),
    ("over_ep", "not put back", "blocks.0.moe", "", {"of": MIXTURE}),
    ("over_ep", "router without gradient", "blocks.1.moe", "", {"of": MIXTURE}),
    ("over_ep", "weights twice", "blocks.0.moe", "it is 2 times the reference's", {"of": MIXTURE}),
    ("over_ep", "experts not reduced", "blocks.0.moe.experts.0.0.weight", "", {"of": MIXTURE}),
    ("over_ep", "experts not divided", "blocks.0.moe.experts.0.0.weight", "it is 2 times", {"of": MIXTURE}),
    ("over_fsdp", "added up", "tokens.weight", "it is 2 times the reference's"),
    ("over_weft", "counts", "blocks.0.down"),
]


@pytest.mark.parametrize(
    ("name", "fault", "where", "looks", "options"), [(*x, *("", {})[len(x) - 3 :]) for x in PLANTED]
)
def test_a_fault_is_found_where_it_is(name, fault, where, looks, options):
    found = compared(name, fault, **options)
    assert found.findings and found.findings[0].module in (where, where and f"{where}.experts"), found
    assert re.search(looks, str(found.findings[0])), found


PROGRAM = """
import sys
import torch.distributed as dist
sys.path.insert(0, {helpers!r})
import parallel_programs as programs
if len(sys.argv) > 1:
    dist.init_process_group("gloo")
    getattr(programs, sys.argv[1])(*sys.argv[2:])
    dist.destroy_process_group()
else:
    programs.unsplit()
"""


def test_the_command_runs_and_compares_two_programs(tmp_path, capfd):
    script = tmp_path / "train.py"
    script.write_text(PROGRAM.format(helpers=str(Path(programs.__file__).parent)))
    python = f"{sys.executable} {script}"
    ranks = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2 {script} over_ddp"
    keep = ["--keep", str(tmp_path / "recordings")]
    wrong = f"{ranks} 'frozen part'"
    assert main(["compare", "--reference", python, "--run", wrong, "--steps", "0", "--all", *keep]) == 1
    out = capfd.readouterr().out
    assert "the runs part in head.bias\n" in out and "the gradient before clipping of head.bias" in out
    assert main(["compare", "--reference", f"{python} over_nothing", "--run", ranks]) == 2
    assert "ended with status 1" in capfd.readouterr().err
    with pytest.raises(ValueError, match="is of 2 processes: run the plain program in one"):
        weft.compare(
            *[tmp_path / "recordings" / name for name in ("run", "run")], reordered=tmp_path / "recordings/run"
        )


def test_names_that_differ_are_said_or_given(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4))
    for name, module in (("plain", model), ("again", model), ("run", nn.ModuleDict({"first": model[0]})["first"])):
        wrapped = module if name != "run" else Named(module)
        with weft.record(tmp_path / name, reordered=name == "again"):
            wrapped(torch.ones(2, 4)).sum().backward()
    with pytest.raises(ValueError, match="no module of the run has a name of the reference's: it has .*first"):
        weft.compare(tmp_path / "plain", tmp_path / "run", reordered=tmp_path / "again")
    found = weft.compare(tmp_path / "plain", tmp_path / "run", reordered=tmp_path / "again", rename={"first": "0"})
    assert found.ok, found
    with pytest.raises(FileNotFoundError, match="has no recording"):
        weft.compare(tmp_path / "nothing", tmp_path / "run", reordered=tmp_path / "again")


class Named(nn.Module):
    def __init__(self, first):
        super().__init__()
        self.first = first

    def forward(self, x):
        return self.first(x)


def test_a_recording_leaves_torch_as_it_was(tmp_path):
    def patched():
        return nn.Module.__call__, torch.autograd.backward, F.dropout, nn.utils.clip_grad_norm_, weft.clip_grad_norm_

    before, hooks = patched(), len(optimizer._global_optimizer_pre_hooks)
    with pytest.raises(ZeroDivisionError), weft.record(tmp_path, reordered=True):
        assert patched() != before
        raise ZeroDivisionError
    assert patched() == before and len(optimizer._global_optimizer_pre_hooks) == hooks
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


@pytest.mark.parametrize(
    "index",
    [[4, 5, 6, 7], [1, 3, 5, 7], [0, 1, 6, 7], [5, 6], [3], list(range(8))],
    ids=["a chunk", "strided", "two ends", "anywhere", "one", "all"],
)
def test_a_part_is_found_by_its_values(index):
    whole = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    fit = Alignment().fit(whole[index] * (1 + 1e-7), whole, 1e-5)
    assert fit.error < 1e-6
    assert fit.indexes[0] is None if len(index) == 8 else fit.indexes[0].tolist() == index


def test_rows_in_any_order_are_found_by_the_nearest():
    whole = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    fit = Alignment().fit(whole[[7, 2, 31]], whole, 1e-6)
    assert fit.indexes[0].tolist() == [7, 2, 31]
    assert Alignment().fit(whole[[7, 2, 31]] + 0.5, whole, 1e-6).error > 0.1


def test_known_places_join_into_one_dimension():
    whole = torch.randn(4, 6, 3, generator=torch.Generator().manual_seed(0))
    alignment = Alignment()
    rows, columns = torch.tensor([1, 3]), torch.tensor([0, 1, 4, 5])
    part = whole[rows][:, columns]
    alignment.note((rows, columns, None), whole.shape)
    fit = alignment.fit(part.flatten(0, 1), whole.flatten(0, 1), 1e-6)
    assert fit.error == 0.0 and fit.indexes[0].tolist() == [6, 7, 10, 11, 18, 19, 22, 23]


def strided(rank):
    mesh = init_device_mesh("cpu", (2,))
    local = DTensor.from_local(torch.zeros(4, 3), mesh, [_StridedShard(0, split_factor=2)], shape=(8, 3), stride=(3, 1))
    return place_of(local)


def test_a_strided_shard_has_a_stretch_of_each_fused_weight():
    assert run_ranks(strided, 2) == [{0: [(0, 2), (4, 6)], 1: [(0, 3)]}, {0: [(2, 4), (6, 8)], 1: [(0, 3)]}]


def test_the_flat_tensors_that_zero_steps_are_parts_of_parameters():
    flat, parameters = torch.arange(10.0), [nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.zeros(5))]
    for parameter, here, there, count in ((parameters[0], 0, 8, 4), (parameters[1], 4, 0, 5)):
        address, place = (SimpleNamespace(start=start, numel=count) for start in (here, there))
        fragment = flat.narrow(0, here, count)
        parameter._hp_mapping = SimpleNamespace(
            hp_fragment=fragment, hp_fragment_address=address, lp_fragment_address=place
        )
    found = [(flat[part].tolist(), place) for _, part, place in flat_parts(flat, parameters)]
    assert found == [([0, 1, 2, 3], {"flat": [(8, 12)]}), ([4, 5, 6, 7, 8], {"flat": [(0, 5)]})]
    assert flat_parts(parameters[1], parameters)[0][0] is parameters[1]


def seen(tensors, **places):
    """Make a recording of one step of a model `a` by kinds of tensors."""
    keys = [Key(0, kind, "" if kind == "input" else "a", 0, 0, 0) for kind in tensors]
    return [Seen(key, x, place=places.get(key.kind)) for key, x in zip(keys, tensors.values(), strict=True)]


def test_a_gradient_of_which_some_columns_are_parts_is_right_if_it_is_summed_later():
    dy, dx, x = torch.randn(4, 6), torch.randn(4, 3), torch.randn(4, 3)
    parts = [torch.cat([dy[:, :4], dy[:, 4:] * share], 1) for share in (0.3, 0.7)]
    whole = seen({"input": x, "gradient of output": dy, "gradient of input": dx})
    for later, wrong in ((dx, ""), (dx * torch.arange(1, 4), "in some columns the sum over ranks 0, 1")):
        ranks = [seen({"input": x, "gradient of output": part, "gradient of input": later}) for part in parts]
        found = compare_recordings(whole, [], whole, ranks, {})
        assert found.ok if not wrong else wrong in str(found), found


def test_a_part_that_is_nothing_but_rounding_is_measured_by_its_own_rounding():
    x, real = torch.randn(4, 3), torch.randn(4, 3)
    noise = [torch.randn(4, 3) * 1e-9 for _ in range(3)]
    runs = [seen({"input": x, "gradient": torch.cat([other, real])}) for other in noise[:2]]
    ranks = [
        seen({"input": x, "gradient": part}, gradient={0: [(start, start + 4)]})
        for start, part in ((0, noise[2]), (4, real))
    ]
    assert compare_recordings(runs[0], [], runs[1], ranks, {}).ok
    ranks[1] = seen({"input": x, "gradient": real * 2}, gradient={0: [(4, 8)]})
    assert not compare_recordings(runs[0], [], runs[1], ranks, {}).ok


def test_gradients_without_names_are_not_missing():
    x = torch.randn(4, 3)
    whole = seen({"input": x, "output": x, "gradient": x})
    run = [*whole[:2], whole[2]._replace(key=whole[2].key._replace(module=""))]
    assert compare_recordings(whole, [], whole, [run], {}).ok


def test_bounds_that_each_rank_counts_from_its_first_are_right():
    x, bounds = torch.randn(4, 3), torch.tensor([0, 16, 32, 48, 64])
    whole = seen({"input": x, "output": bounds})
    ranks = [seen({"input": part, "output": bounds[:3]}) for part in x.chunk(2)]
    assert compare_recordings(whole, [], whole, ranks, {}).ok
    ranks = [seen({"input": part, "output": bounds[:2]}) for part in x.chunk(2)]
    assert "no rank has 2 to 4" in str(compare_recordings(whole, [], whole, ranks, {}))


def test_calls_that_ranks_share_out_are_not_taken_for_one_another():
    x, calls = torch.randn(4, 3), torch.randn(4, 2, 3)
    runs = [
        [*seen({"input": x}), *(Seen(Key(0, "output", "act", 0, n, 0), calls[number]) for n, number in enumerate(own))]
        for own in (range(4), (0, 1), (2, 3), (1, 0, 2, 3))
    ]
    assert compare_recordings(runs[0], [], runs[0], runs[1:3], {}).ok
    assert not compare_recordings(runs[0], [], runs[0], [runs[3]] * 2, {}).ok


def test_roundings_that_have_nothing_in_common_differ_by_as_much_as_the_reference_s_two_runs():
    x, noise = torch.randn(4, 3), torch.eye(4) * 1e-10
    runs = [seen({"input": x, "gradient of output": row.view(2, 2)}) for row in noise]
    assert compare_recordings(runs[0], [], runs[1], runs[2:], {}).ok


def test_values_in_another_order_are_not_a_part():
    x, bias = torch.randn(4, 3), torch.randn(4)
    whole = seen({"input": x, "parameter": bias, "buffer": bias})
    for kind in ("parameter", "buffer"):
        for other in (bias.flip(0), bias[[0, 0, 1, 2]]):
            run = seen({"input": x, "parameter": bias, "buffer": bias} | {kind: other})
            found = compare_recordings(whole, [], whole, [run], {})
            assert [finding.what for finding in found.findings] == [f"the {kind} of a"], found
    run = seen({"input": x, "parameter": bias[[2, 0]], "buffer": bias})  # rows in any order, once
    assert "no rank has" in str(compare_recordings(whole, [], whole, [run], {}))


def test_masks_of_other_micro_batches_are_those_of_other_tensors():
    masks = torch.rand(2, 64, generator=torch.Generator().manual_seed(0)) > 0.5
    batches, dropped = torch.randn(2, 4, 3), torch.zeros(4, 16)

    def calls(*numbers):
        found = []
        for root, number in enumerate(numbers):
            found += [Seen(Key(0, "input", "", root, 0, 0), batches[number])]
            found += [Seen(Key(0, "input", "a", root, 0, "dropped"), dropped)]
            found += [Seen(Key(0, "dropout", "a", root, 0, 0), masks[number].view(4, 16))]
        return found

    whole = calls(0, 1)
    assert compare_recordings(whole, [], whole, [calls(0), calls(1)], {}).ok
    found = compare_recordings(whole, [], whole, [calls(0), [*calls(1)[:2], calls(0)[2]]], {})
    assert "have different parts and drop the same elements" in str(found)


def test_a_gradient_of_one_element_may_have_any_factor():
    x, dy = torch.randn(4, 3), torch.randn(4, 1)
    whole = seen({"input": x, "gradient of output": dy})
    ranks = [
        seen({"input": rows, "gradient of output": 4 * dx}) for rows, dx in zip(x.split(1), dy.split(1), strict=True)
    ]
    assert compare_recordings(whole, [], whole, ranks, {}).ok


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_rows_in_any_order_are_a_part_and_rows_that_none_has_are_missing(dtype):
    tokens = torch.randint(2, (8, 12), generator=torch.Generator().manual_seed(0)).to(dtype)
    tokens[5] = tokens[1]  # two rows are alike
    whole, order = seen({"input": tokens}), torch.tensor([3, 5, 0, 6, 1, 7, 2, 4])
    ranks = [seen({"input": tokens[rows]}) for rows in order.chunk(2)]
    assert compare_recordings(whole, [], whole, ranks, {}).ok
    found = compare_recordings(whole, [], whole, [ranks[0]] * 2, {})
    assert "no rank has 2 and 4 and 7 of its dimension 0" in str(found), found
    other = seen({"input": tokens.roll(1, 1)[:4]})
    assert not compare_recordings(whole, [], whole, [ranks[0], other], {}).ok


def test_complex_numbers_are_compared(tmp_path):
    for name in ("plain", "again", "run", "wrong"):
        torch.manual_seed(0)
        model = nn.Linear(3, 2, dtype=torch.complex64)
        with weft.record(tmp_path / name, reordered=name == "again"):
            model(torch.full((2, 3), 1 + 1j if name != "wrong" else 1 - 1j)).abs().sum().backward()
    compare = lambda name: weft.compare(tmp_path / "plain", tmp_path / name, reordered=tmp_path / "again")  # noqa: E731
    assert compare("run").ok and not compare("wrong").ok
