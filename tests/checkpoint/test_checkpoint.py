"""A checkpoint is the whole model and its training to the bit, on whatever mesh it was saved and is loaded; what is torn,
altered, missing or of another model is refused by name; and a killed run leaves a whole one."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import weft
from weft.checkpoint.boxes import TensorPart, boxes_of_stretch
from weft.checkpoint.safetensors_io import Box, Files, StoredTensor, dtype_of, source_at
from weft.checkpoint.save_plan import Written, check_seen
from weft.testing.ranks import run_ranks, try_ranks


class Net(nn.Module):
    """Tied embedding and logits, a buffer, dropout, a weight that lies channels last; sizes that no mesh divides."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.embedding = nn.Embedding(11, 12)
        self.up, self.down = nn.Linear(12, 10), nn.Linear(10, 12)
        self.conv = nn.Conv2d(3, 5, (3, 2))
        self.logits = nn.Linear(12, 11, bias=False)
        self.logits.weight = self.embedding.weight
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.to(dtype)
        self.conv.weight.data = self.conv.weight.data.contiguous(memory_format=torch.channels_last)

    def forward(self, tokens):
        self.count += 1
        x = self.embedding(tokens)
        x = x + self.down(nn.functional.dropout(self.up(x).relu(), 0.2, self.training))
        kernel = (self.conv.weight * torch.arange(90).view(5, 3, 3, 2)).sum() / 90  # no two gradients are alike
        kernel = kernel * self.conv.bias.square().sum()
        return self.logits(x) * (1 + kernel)


PLAN = {
    "embedding": "vocabulary",
    "logits": {"style": "column", "gather_output": True},
    "up": "column",
    "down": "row",
}


def net(tp=None, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    model = Net(dtype)
    return model if tp is None else weft.parallelize(model, tp, plan=PLAN)


def adamw(model, **options):
    """Two groups, with options of several kinds."""
    parameters = list(model.parameters())
    groups = [{"params": parameters[:2], "weight_decay": 0.3}, {"params": parameters[2:], "betas": (0.8, 0.95)}]
    return torch.optim.AdamW(groups, lr=0.01, **options)


def tokens(step, rank=0):
    return torch.randint(11, (4, 7), generator=torch.Generator().manual_seed(100 * step + rank))


def train(model, optimizer, steps, rank=0):
    for step in steps:
        optimizer.zero_grad()
        loss = model(tokens(step, rank)).float().square().mean()
        loss.backward()
        optimizer.step()


def whole(model, optimizer=None):
    """Every rank's parameters and state put together: name -> tensor, gathered over the group of each shard."""
    parameters = dict(model.named_parameters())
    found = {}
    for name, parameter in parameters.items():
        state = {} if optimizer is None else optimizer.state[parameter]
        for key, value in {"": parameter.detach(), **state}.items():
            shard = weft.shard_of(parameter)
            cut = shard is not None and value.shape == parameter.shape
            found[f"{name}/{key}"] = (
                shard.communicator.all_gather(value, shard.dim, shard.sizes) if cut else value.clone()
            )
    return found | {f"{name}/": buffer.clone() for name, buffer in model.named_buffers()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


def save_split(rank, path, dp=1):
    mesh = weft.init_mesh(dp=dp, tp=dist.get_world_size() // dp, device_type="cpu")
    model = net(mesh["tp"])
    optimizer = adamw(model)
    torch.manual_seed(5)  # dropout: the whole model's replicas draw alike
    train(model, optimizer, range(2))
    weft.save_checkpoint(model, optimizer, path, step=2, extras={"schedule": [1, {"a": 0.1}]})
    return whole(model, optimizer)


def load_split(rank, path, dp=1, again=None):
    mesh = weft.init_mesh(dp=dp, tp=dist.get_world_size() // dp, device_type="cpu")
    model = net(mesh["tp"], seed=1)
    optimizer = adamw(model)
    train(model, optimizer, range(1))  # what it had is gone
    loaded = weft.load_checkpoint(model, optimizer, path)
    assert (loaded.step, loaded.extras) == (2, {"schedule": [1, {"a": 0.1}]})
    if again:
        weft.save_checkpoint(model, optimizer, again, step=2, extras=loaded.extras)
    return whole(model, optimizer)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of tp=2, and what is in it."""
    path = tmp_path_factory.mktemp("saved") / "at" / "two"
    return path, run_ranks(save_split, 2, path)[0]


@pytest.mark.parametrize(("world", "dp"), [(1, 1), (3, 1), (4, 1), (4, 2), (2, 2), (3, 3)])
def test_it_loads_at_any_mesh(saved, world, dp, tmp_path):
    path, expected = saved
    for found in run_ranks(load_split, world, path, dp, tmp_path / "again"):
        assert_same(found, expected)
    model = Net()  # and one process without a process group reads what that mesh wrote
    optimizer = adamw(model)
    weft.load_checkpoint(model, optimizer, tmp_path / "again")
    assert_same(whole(model, optimizer), expected)
    assert model.logits.weight is model.embedding.weight
    assert optimizer.param_groups[1]["betas"] == (0.8, 0.95) and optimizer.param_groups[0]["weight_decay"] == 0.3
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)


def test_each_value_is_written_once(saved, tmp_path):
    run_ranks(save_split, 4, tmp_path, 2)
    elements = {"model": sum(t.numel() for t in [*Net().parameters(), *Net().buffers()])}
    states = [t for p in Net().parameters() for t in (p, p, torch.zeros(()))]
    elements["training"] = sum(t.numel() for t in states) + 4 * torch.get_rng_state().numel()
    shares = {}
    for section, count in elements.items():
        files = sorted(tmp_path.glob(f"weft-*/{section}-*.safetensors"))
        shares[section] = [sum(t.numel() for t in safetensors.torch.load_file(file).values()) for file in files]
        assert sum(shares[section]) == count and len(files) == 4
    assert max(shares["model"]) < 0.5 * elements["model"], "replicas take turns"


def load_from_nothing(rank, path):
    group = weft.init_mesh(tp=3, device_type="cpu")["tp"]
    with torch.device("meta"):
        model = Net()
    weft.parallelize(model, group, plan=PLAN).to_empty(device="cpu")
    model.logits.weight = model.embedding.weight  # torch's to_empty has made two of it
    weft.load_checkpoint(model, None, path)
    return whole(model)


def test_a_model_that_never_was_whole_is_loaded(saved):
    path, expected = saved
    for found in run_ranks(load_from_nothing, 3, path):
        assert_same(found, {name: value for name, value in expected.items() if name.endswith("/")})


# Sharded optimizers and other wrappers.


def save_wrapped(rank, path, wrapper, dtype):
    model = wrapped(net(dtype=dtype), wrapper)
    optimizer = optimizer_of(model, wrapper)
    train(model, optimizer, range(2), rank)
    weft.save_checkpoint(model, optimizer, path)
    return whole(model.module)


def wrapped(model, wrapper):
    options = {
        "ddp": {},
        "dp": {},
        "zero": {"shard_optimizer": True},
        "master": {"shard_optimizer": True, "main_grad": True},
    }
    kind = DistributedDataParallel if wrapper == "ddp" else weft.DataParallel
    return kind(model, **options[wrapper])


def optimizer_of(model, wrapper):
    if wrapper in ("zero", "master"):
        return model.optimizer(torch.optim.AdamW, lr=0.01)
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def load_wrapped(rank, path, wrapper, dtype):
    """Loads, saves again, and goes on for two steps."""
    model = wrapped(net(dtype=dtype, seed=1), wrapper)
    optimizer = optimizer_of(model, wrapper)
    weft.load_checkpoint(model, optimizer, path)
    weft.save_checkpoint(model, optimizer, f"{path}-again")
    train(model.eval(), optimizer, range(2, 4), rank)
    return whole(model.module)


@pytest.mark.parametrize("wrapper", ["ddp", "dp", "zero"])
def test_wrapped_models_are_stored_as_the_plain_one_is(wrapper, tmp_path):
    """Also a sharded optimizer, whose pieces are cut anywhere: its state becomes the plain optimizer's."""
    path = tmp_path / "checkpoint"
    expected = run_ranks(save_wrapped, 3, path, wrapper, torch.float32)[0]
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    weft.load_checkpoint(model, optimizer, path)
    assert_same(whole(model), expected)
    state = whole(model, optimizer)
    if wrapper == "zero":
        run_ranks(save_wrapped, 3, tmp_path / "unsharded", "dp", torch.float32)
        assert_same(stored(path), stored(tmp_path / "unsharded"))
    after = {}
    for other in ("ddp", "dp", "zero"):
        after[other] = run_ranks(load_wrapped, 2, path, other, torch.float32)[0]
        weft.load_checkpoint(model := Net(), optimizer := torch.optim.AdamW(model.parameters()), f"{path}-again")
        assert_same(whole(model, optimizer), state)
    for other in ("ddp", "zero"):
        assert_same(after[other], after["dp"])


def saved_and_loaded_frozen(rank, path, saves, loads):
    """Parameters of an optimizer that are frozen have no state, and a sharded optimizer leaves them out."""
    models = []
    for seed, wrapper in enumerate((saves, loads)):
        module = net(seed=seed)
        for parameter in list(module.parameters())[:2]:
            parameter.requires_grad_(False)
        models.append((model := wrapped(module.eval(), wrapper), optimizer_of(model, wrapper)))
    train(*models[0], range(2), rank)
    weft.save_checkpoint(*models[0], path)
    weft.load_checkpoint(*models[1], path)
    for one in models:
        train(*one, range(2, 4), rank)
    assert_same(whole(models[1][0].module), whole(models[0][0].module))


@pytest.mark.parametrize(("saves", "loads"), [("zero", "dp"), ("dp", "zero")])
def test_frozen_parameters_of_an_optimizer_need_no_state(saves, loads, tmp_path):
    run_ranks(saved_and_loaded_frozen, 2, tmp_path / "checkpoint", saves, loads)


def load_the_model_alone(rank, path):
    model = wrapped(net(dtype=torch.bfloat16, seed=1), "master")
    optimizer = model.optimizer(torch.optim.SGD, lr=0)
    weft.load_checkpoint(model, None, path)
    train(model, optimizer, range(1), rank)  # the parameters are those that the optimizer has
    kept = stored(path)
    for name, parameter in model.module.named_parameters():
        assert torch.equal(parameter, kept[name]), name


def test_fp32_copies_of_a_sharded_optimizer_survive(tmp_path):
    path = tmp_path / "checkpoint"
    run_ranks(save_wrapped, 3, path, "master", torch.bfloat16)
    first = stored(path)
    masters = {name: t for name, t in first.items() if name.endswith("weft_master")}
    assert len(masters) == 7 and all(t.dtype == torch.float32 for t in masters.values())
    assert any(not torch.equal(t, t.bfloat16().float()) for t in masters.values()), "finer than the model's own"
    run_ranks(load_wrapped, 2, path, "master", torch.bfloat16)
    assert_same(stored(f"{path}-again"), first)
    run_ranks(load_the_model_alone, 2, path)
    model = Net(torch.bfloat16)  # without such copies, the model's own values are what there is
    weft.load_checkpoint(model, torch.optim.AdamW(model.parameters()), path)
    for name, parameter in model.named_parameters():
        assert torch.equal(masters[f"optimizers/0/{name}/weft_master"].bfloat16(), parameter)


def stored(path):
    """All tensors of a checkpoint but random numbers, whole."""
    source, found = source_at(Path(path)), {}
    with Files(source.folder) as opened:
        for name, entry in {**source.model, **source.training}.items():
            if not name.startswith("random/"):
                found[name] = torch.empty(entry.shape, dtype=dtype_of(entry.code))
                opened.fill(TensorPart((0,) * len(entry.shape), found[name]), entry)
    return found


# What is not what was written.


def load_error(rank, path):
    model = net(weft.init_mesh(tp=2, device_type="cpu")["tp"], seed=1)
    optimizer = adamw(model)
    before = whole(model, optimizer)
    try:
        weft.load_checkpoint(model, optimizer, path)
    except weft.CheckpointError as error:
        assert_same(whole(model, optimizer), before)
        return str(error)
    return None


def flip(file, place):
    data = bytearray(file.read_bytes())
    data[int(len(data) * place)] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("damage", ["torn", "missing", 0.05, 0.9, 0.999])
@pytest.mark.parametrize("name", ["model-00000", "training-00001", "manifest"])
def test_a_damaged_file_is_named_on_every_rank_and_nothing_is_loaded(saved, tmp_path, name, damage):
    path = tmp_path / "copy"
    shutil.copytree(saved[0], path)
    (file,) = path.rglob(f"{name}.*")
    size = file.stat().st_size
    if damage == "torn":
        os.truncate(file, size * 2 // 3)
    elif damage == "missing":
        file.unlink()
    else:
        flip(file, damage)
    first, second = run_ranks(load_error, 2, path)
    assert first == second and name in first, first
    torn = "torn" if name == "manifest" else f"torn: it has {size * 2 // 3} bytes, and {size} were written"
    assert {"torn": torn, "missing": "missing" if name != "manifest" else "no checkpoint"}.get(
        damage, "altered"
    ) in first


def test_a_file_that_rank_0_does_not_see_whole_is_named(tmp_path):
    (tmp_path / "model").write_bytes(b"abc")
    assert check_seen(tmp_path, [Written({"model": 3})]) == {"model": 3}
    for written in ({"model": 4}, {"another": 3}):
        with pytest.raises(weft.CheckpointError, match=f"does not see .*{next(iter(written))} as it was written"):
            check_seen(tmp_path, [Written(written)])


def test_a_tensor_of_which_a_part_is_not_stored_is_refused(tmp_path):
    safetensors.torch.save_file({"half": torch.ones(2, 3)}, tmp_path / "file")
    entry = StoredTensor("F32", (4, 3), (Box("file", "half", (0, 0), (2, 3)),))
    with Files(tmp_path) as opened, pytest.raises(weft.CheckpointError, match="half have 6 of the 12 elements"):
        opened.fill(TensorPart((0, 0), torch.empty(4, 3)), entry)


def test_every_flipped_bit_of_the_data_is_noticed(saved, tmp_path):
    path = tmp_path / "copy"
    shutil.copytree(saved[0], path)
    (file,) = path.rglob("model-00000.*")
    data = file.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    for place in range(header, len(data), 97):
        flip(file, (place + 0.5) / len(data))
        with pytest.raises(
            weft.CheckpointError, match="model-00000.safetensors was altered: .* is not what was written"
        ):
            weft.export_safetensors(path, tmp_path / "file")
        file.write_bytes(data)
    weft.export_safetensors(path, tmp_path / "file")


def test_every_flipped_bit_of_the_manifest_is_noticed(saved, tmp_path):
    path = tmp_path / "copy"
    shutil.copytree(saved[0], path)
    (file,) = path.glob("manifest.json")
    data = file.read_bytes()
    for place in [*range(0, len(data), 97), *range(len(data) - 20, len(data))]:  # the checksum is in the last bytes
        for bit in range(8):
            file.write_bytes(data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :])
            with pytest.raises(weft.CheckpointError, match="manifest.json is torn or was altered"):
                source_at(path)
    file.write_bytes(data)
    source_at(path)


class Other(Net):
    """Two tensors more, one less, and one of another shape."""

    def __init__(self):
        super().__init__()
        self.more = nn.Linear(2, 3)
        self.up = nn.Linear(12, 10, bias=False)
        self.down = nn.Linear(10, 13)


def test_all_that_differs_of_another_model_is_named(saved):
    path, _ = saved
    with pytest.raises(weft.CheckpointError) as raised:
        weft.load_checkpoint(Other(), None, path)
    assert str(raised.value).splitlines()[1:] == [
        "down.weight is F32 [13, 10] in the model, F32 [12, 10] stored",
        "down.bias is F32 [13] in the model, F32 [12] stored",
        "more.weight is not stored",
        "more.bias is not stored",
        "up.bias is stored, and the model has no such tensor",
    ]


def test_strict_and_cast_can_be_left_out(saved):
    path, expected = saved
    model = Net().double()
    with pytest.raises(weft.CheckpointError, match="embedding.weight is F64 .* F32"):
        weft.load_checkpoint(model, None, path)
    weft.load_checkpoint(model, None, path, cast=True)
    assert torch.equal(model.up.weight, expected["up.weight/"].double())
    model = Net()
    model.more = nn.Linear(1, 1)
    del model.up
    before = model.more.weight.clone()
    weft.load_checkpoint(model, None, path, strict=False)
    assert torch.equal(model.more.weight, before) and torch.equal(model.down.weight, expected["down.weight/"])


def test_an_optimizer_of_other_groups_or_parameters_is_refused(saved):
    path, _ = saved
    model = Net()
    with pytest.raises(weft.CheckpointError, match="AdamW has 1 parameter groups, the stored one 2"):
        weft.load_checkpoint(model, torch.optim.AdamW(model.parameters()), path)
    with pytest.raises(weft.CheckpointError, match="up.bias of group 0 of SGD is not of the stored group"):
        parameters = list(model.parameters())
        groups = [{"params": parameters[:3]}, {"params": parameters[3:]}]
        weft.load_checkpoint(model, torch.optim.SGD(groups, lr=1), path)
    with pytest.raises(weft.CheckpointError, match="1 optimizers are stored, and 2"):
        weft.load_checkpoint(model, [adamw(model), adamw(model)], path)
    with pytest.raises(ValueError, match="parameter 0 .* is not a parameter of the model"):
        weft.save_checkpoint(model, adamw(Net()), path)
    with pytest.raises(TypeError, match="not JSON serializable"):
        weft.save_checkpoint(model, None, path, extras={"a": {1, 2}})
    with pytest.raises(ValueError, match="up.weight is on the meta device"):
        model.up = nn.Linear(12, 10, device="meta")
        weft.load_checkpoint(model, None, path)


class Counts(nn.Module):
    def get_extra_state(self):
        return torch.tensor([7])


def test_what_could_not_be_loaded_again_is_not_stored(tmp_path):
    with pytest.raises(TypeError, match="_extra_state of the state_dict is neither a parameter nor a buffer"):
        weft.save_checkpoint(Counts(), None, tmp_path)
    for name in ("__metadata__", "\ud800"):
        model = nn.Module()
        model.register_parameter(name, nn.Parameter(torch.ones(1)))
        with pytest.raises(ValueError, match="safetensors files cannot have the name"):
            weft.save_checkpoint(model, None, tmp_path)
    model = nn.Module()
    model.add_module("inner", nn.Module())
    model.inner.add_module("_orig_mod", nn.Linear(1, 1))
    model.inner.register_parameter("weight", nn.Parameter(torch.ones(1)))
    with pytest.raises(ValueError, match="two tensors of the model are called inner.weight"):
        weft.save_checkpoint(model, None, tmp_path)
    assert not list(tmp_path.rglob("*.json"))


def test_names_that_only_look_like_a_wrappers_are_kept(tmp_path):
    model, other = nn.Module(), nn.Module()
    for one in (model, other):
        one.add_module("x_orig_mod", nn.Linear(2, 2))
        one.register_parameter("xweight", nn.Parameter(torch.randn(2, 2)))
        one.register_buffer("turned", torch.randn(2, dtype=torch.complex64).conj())
    weft.save_checkpoint(model, None, tmp_path)
    weft.load_checkpoint(other, None, tmp_path)
    assert all(map(torch.equal, other.state_dict().values(), model.state_dict().values()))


def test_an_optimizer_of_another_class_is_refused(saved):
    path, _ = saved
    model = Net()
    sgd = torch.optim.SGD([{"params": group["params"]} for group in adamw(model).param_groups], lr=1)
    with pytest.raises(weft.CheckpointError, match="stored with .*betas.* without .*momentum, .* it is not of SGD"):
        weft.load_checkpoint(model, sgd, path)


def save_what_is_wrong(rank, path):
    mesh = weft.init_mesh(dp=2, tp=2, device_type="cpu")
    model = net(mesh["tp"])
    messages = []
    for wrong in ("half", "drifted", "one rank", "step"):
        other, group = None, None
        if wrong == "half":
            group = mesh["dp"]  # no rank of it has the other shard
        elif wrong == "drifted" and rank == 2:
            model.down.bias.data[3] += 1e-3
        elif wrong == "one rank" and rank == 1:
            other = adamw(Net())
        try:
            step = rank if wrong == "step" else 0
            weft.save_checkpoint(model, other, path / str(rank % 2) if group else path, group=group, step=step)
        except (weft.CheckpointError, ValueError) as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


def save_unlike_replicas(rank, path):
    mesh = weft.init_mesh(dp=2, tp=2, device_type="cpu")
    model = net(mesh["tp"])
    model.down.bias.data += mesh["dp"].get_local_rank()
    weft.save_checkpoint(model, None, path, check_replicas=False)
    other = net(mesh["tp"])
    weft.load_checkpoint(other, None, path)
    return other.down.bias.detach() - net(mesh["tp"]).down.bias.detach()


def test_unlike_replicas_are_stored_once_where_nobody_is_to_compare_them(tmp_path):
    found = run_ranks(save_unlike_replicas, 4, tmp_path / "saved")
    assert all(torch.equal(shift, found[0]) for shift in found), "every rank has the same again"
    assert float(found[0].std()) < 1e-6 and min(abs(float(found[0][0]) - one) for one in (0, 1)) < 1e-6


def test_what_ranks_do_not_have_together_is_refused_on_every_rank(tmp_path):
    per_rank = run_ranks(save_what_is_wrong, 4, tmp_path)
    assert all(len(messages) == 4 and messages[1:] == per_rank[0][1:] for messages in per_rank)
    half, drifted, one_rank, step = per_rank[0]
    assert step == "CheckpointError: the ranks save different steps: 0, 1, 2, 3"
    assert (
        "CheckpointError: the ranks together do not have every element of these tensors once: embedding.weight (72 of 132)"
        in half
    )
    assert "replicated tensors differ between ranks: down.bias of rank" in drifted
    assert one_rank.startswith("ValueError: rank 1: parameter 0") and one_rank.endswith("of this model")
    assert not list(tmp_path.rglob("*.safetensors")), "nothing is left of what failed"


# Faults while saving, and resuming.


def die_at_sync(rank, path, victim, count):
    """Saves step 2 over step 1; the victim is killed at that call of fsync."""
    mesh = weft.init_mesh(tp=2, device_type="cpu")
    model = net(mesh["tp"])
    optimizer = adamw(model)
    torch.manual_seed(5)
    train(model, optimizer, range(1))
    weft.save_checkpoint(model, optimizer, path, step=1)
    train(model, optimizer, range(1, 2))
    calls = []
    sync = os.fsync

    def counted(descriptor):
        calls.append(descriptor)
        if rank == victim and len(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        sync(descriptor)

    os.fsync = counted
    weft.save_checkpoint(model, optimizer, path, step=2)
    return len(calls)


@pytest.mark.parametrize(("victim", "calls"), [(0, 7), (1, 3)])
def test_a_rank_killed_at_any_point_of_a_save_leaves_a_whole_checkpoint(tmp_path, victim, calls):
    """Files, their folder; on rank 0 then the folders above, the manifest, its folder: all that is put on the disk."""
    path = tmp_path / "checkpoint"
    expected = {step: torch_run(step) for step in (1, 2)}
    steps = []
    for count in range(1, calls + 2):
        outcomes = try_ranks(die_at_sync, 2, path, victim, count)
        if count <= calls:
            assert outcomes[victim].exit_code == -signal.SIGKILL
            assert isinstance(outcomes[1 - victim].error, weft.RankLostError), outcomes
        else:
            assert outcomes[victim].value == calls
        model = Net()
        optimizer = adamw(model)
        steps.append(weft.load_checkpoint(model, optimizer, path).step)
        assert_same(run_ranks(load_whole, 2, path)[0], expected[steps[-1]])
    assert steps == ([1] * 6 + [2] * 2 if victim == 0 else [1] * 3 + [2])
    assert len(list(path.glob("weft-*"))) == 1, "what killed saves left is swept up"


def load_whole(rank, path):
    model = net(weft.init_mesh(tp=2, device_type="cpu")["tp"], seed=1)
    optimizer = adamw(model)
    weft.load_checkpoint(model, optimizer, path)
    return whole(model, optimizer)


def torch_run(steps):
    return run_ranks(straight, 2, steps)[0]


def straight(rank, steps):
    model = net(weft.init_mesh(tp=2, device_type="cpu")["tp"])
    optimizer = adamw(model)
    torch.manual_seed(5)
    train(model, optimizer, range(steps))
    return whole(model, optimizer)


STEPS = 7


def resume_and_run(rank, path, wrapper, victim=None, dies_at=None):
    """From the checkpoint, if there is one, to the last step, with a checkpoint at every second; unless killed."""
    model = wrapped(net(), wrapper)
    optimizer = optimizer_of(model, wrapper)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    torch.manual_seed(50 + rank)  # each rank drops its own
    start = 0
    if (path / "manifest.json").exists():
        loaded = weft.load_checkpoint(model, optimizer, path)
        assert loaded.random_numbers
        start = loaded.step
        schedule.load_state_dict(loaded.extras["schedule"])
    for step in range(start, STEPS):
        optimizer.zero_grad()
        loss = model(tokens(step, rank)).square().mean()
        if rank == victim and step == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 2 == 1:
            extras = {"schedule": schedule.state_dict()}
            weft.save_checkpoint(model, optimizer, path, step=step + 1, extras=extras)
    weft.save_checkpoint(model, optimizer, path, step=STEPS)
    return start


@pytest.mark.parametrize("wrapper", ["dp", "zero"])
def test_a_run_that_is_killed_goes_on_to_the_same_bits(tmp_path, wrapper):
    run_ranks(resume_and_run, 2, tmp_path / "straight", wrapper)
    path = tmp_path / "killed"
    for victim, dies_at, reached in ((1, 1, None), (0, 3, 2), (1, 6, 6)):
        outcomes = try_ranks(resume_and_run, 2, path, wrapper, victim, dies_at)
        assert outcomes[victim].exit_code == -signal.SIGKILL
        assert isinstance(outcomes[1 - victim].error, weft.RankLostError)
        assert (path / "manifest.json").exists() == (reached is not None)
        if reached is not None:
            assert source_at(path).about["step"] == reached
    assert run_ranks(resume_and_run, 2, path, wrapper) == [6, 6]
    assert_same(stored(path), stored(tmp_path / "straight"))


def test_a_load_at_another_number_of_ranks_says_that_random_numbers_are_new(saved):
    model = Net()
    assert not weft.load_checkpoint(model, adamw(model), saved[0]).random_numbers


# Plain safetensors.


def test_the_exported_file_is_the_plain_models(saved, tmp_path):
    path, expected = saved
    file = tmp_path / "model.safetensors"
    weft.export_safetensors(path, file)
    model = Net()
    model.load_state_dict(safetensors.torch.load_file(file))
    assert_same(whole(model), {name: t for name, t in expected.items() if name.endswith("/")})
    assert sorted(os.listdir(tmp_path)) == ["model.safetensors"]


def load_plain(rank, path):
    model = net(weft.init_mesh(tp=3, device_type="cpu")["tp"], seed=1)
    loaded = weft.load_checkpoint(model, None, path)
    assert (loaded.step, loaded.random_numbers) == (0, False)
    return whole(model)


@pytest.mark.parametrize("form", ["file", "folder", "index"])
def test_plain_files_are_loaded_in_shards(form, tmp_path):
    model = net()
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "logits.weight"}
    if form == "index":
        names = sorted(tensors)
        index = {}
        for number, part in enumerate((names[:4], names[4:])):
            file = f"model-{number + 1:05d}-of-00002.safetensors"
            safetensors.torch.save_file({name: tensors[name] for name in part}, tmp_path / file)
            index |= dict.fromkeys(part, file)
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    else:
        safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    path = tmp_path / "model.safetensors" if form == "file" else tmp_path
    for found in run_ranks(load_plain, 3, path):
        assert_same(found, whole(model))
    if form == "index":
        os.truncate(tmp_path / "model-00002-of-00002.safetensors", 300)
        with pytest.raises(weft.CheckpointError, match="model-00002-of-00002.safetensors is torn"):
            weft.load_checkpoint(model, None, path)


def test_a_tied_parameter_that_is_stored_as_two_must_be_of_equal_values(tmp_path):
    model = Net()
    tensors = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in model.state_dict().items()}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    weft.load_checkpoint(Net(), None, tmp_path)
    tensors["logits.weight"][0, 0] += 1
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(weft.CheckpointError, match="embedding.weight, logits.weight are one parameter of the model"):
        weft.load_checkpoint(model, None, tmp_path)


def test_where_nothing_is_stored_that_is_said(tmp_path):
    with pytest.raises(weft.CheckpointError, match="no checkpoint at .*nowhere: there is no such file or folder"):
        weft.load_checkpoint(Net(), None, tmp_path / "nowhere")
    with pytest.raises(weft.CheckpointError, match="the folder has none of these"):
        weft.load_checkpoint(Net(), None, tmp_path)


# Several optimizers, and kinds of state.


@pytest.mark.parametrize("kind", ["SGD", "Adam", "NAdam", "Adagrad", "RMSprop", "Adafactor", "ASGD", "Rprop", "LBFGS"])
def test_any_optimizer_of_torch_goes_on_to_the_same_bits(kind, tmp_path):
    options = {"SGD": {"momentum": 0.9}, "Adam": {"amsgrad": True, "lr": torch.tensor(0.01)}, "ASGD": {"lr": 1e-3}}.get(
        kind, {}
    )
    models = [net(seed=seed).eval() for seed in (0, 1)]
    first, second = (getattr(torch.optim, kind)(model.parameters(), **options) for model in models)
    first.param_groups[0]["lr"] = first.param_groups[0]["lr"] / 2  # by a schedule
    if kind == "LBFGS":  # keeps lists of tensors under its first parameter
        first.state[models[0].embedding.weight]["old_dirs"] = [torch.zeros(3)]
        with pytest.raises(TypeError, match="old_dirs=.* is neither a tensor nor a number"):
            weft.save_checkpoint(models[0], first, tmp_path)
        return
    train(models[0], first, range(2))
    weft.save_checkpoint(models[0], first, tmp_path)
    weft.load_checkpoint(models[1], second, tmp_path)
    for model, optimizer in zip(models, (first, second), strict=True):
        train(model, optimizer, range(2, 4))
    assert_same(whole(models[1], second), whole(models[0], first))


def refuse_factored(rank, path):
    model = net(weft.init_mesh(tp=2, device_type="cpu")["tp"]).eval()
    optimizer = torch.optim.Adafactor(model.parameters())
    with pytest.raises(weft.CheckpointError, match="row_var has shape .*, which is neither its parameter's"):
        weft.load_checkpoint(model, optimizer, path)
    model(tokens(0, 0)).float().square().mean().backward()
    for parameter in model.parameters():
        parameter.grad = parameter.grad.as_subclass(torch.Tensor)
    optimizer.elementwise = True  # it is not, and steps are not what is tested
    optimizer.step()
    with pytest.raises(ValueError, match="row_var has shape .*, which is neither its parameter's"):
        weft.save_checkpoint(model, optimizer, path)


def test_state_of_which_it_is_unknown_how_it_is_cut_is_refused(tmp_path):
    model = net()
    optimizer = torch.optim.Adafactor(model.parameters())
    train(model, optimizer, range(1))
    weft.save_checkpoint(model, optimizer, tmp_path)
    run_ranks(refuse_factored, 2, tmp_path)


def test_two_optimizers_of_one_model_and_a_compiled_model(tmp_path):
    model = net().eval()
    compiled = torch.compile(model)
    parameters = list(model.parameters())
    two = [torch.optim.Adam(parameters[:3]), torch.optim.SGD(parameters[3:], lr=0.1, momentum=0.5)]
    for optimizer in two:
        train(model, optimizer, range(2))
    weft.save_checkpoint(compiled, two, tmp_path)
    other = net(seed=1)
    parameters = list(other.parameters())
    others = [torch.optim.Adam(parameters[:3]), torch.optim.SGD(parameters[3:], lr=0.2)]
    weft.load_checkpoint(other, others, tmp_path)
    assert others[1].param_groups[0]["momentum"] == 0.5
    for mine, its in zip(two, others, strict=True):
        for a, b in zip(mine.state.values(), its.state.values(), strict=True):
            assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@settings(deadline=None)
@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_the_boxes_of_a_stretch_are_the_stretch(shape, data):
    count = torch.Size(shape).numel()
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    numbers = torch.arange(count).view(shape)
    boxes = list(boxes_of_stretch(shape, start, stop))
    found = [numbers[tuple(slice(a, a + n) for a, n in zip(*box, strict=True))].reshape(-1) for box in boxes]
    assert torch.equal(torch.cat(found) if found else numbers.reshape(-1)[:0], torch.arange(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def stages(rank):
    """Rank 0 has the first layers, rank 1 the others, under the names of the whole model."""
    model = net()
    for name in ("down", "logits") if rank == 0 else ("embedding", "up", "conv"):
        delattr(model, name)
    return model


def save_stages(rank, path, seed):
    model = stages(rank)
    if seed:
        for parameter in model.parameters():
            nn.init.constant_(parameter, seed)
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    if seed:
        weft.load_checkpoint(model, optimizer, path)
    else:
        weft.save_checkpoint(model, optimizer, path)
    return whole(model, optimizer)


def test_stages_of_a_pipeline_are_stored_as_one_model(tmp_path):
    first, second = run_ranks(save_stages, 2, tmp_path, 0)
    again = run_ranks(save_stages, 2, tmp_path, 3)
    assert_same(again[0], first)
    assert_same(again[1], second)
    model = Net()
    model.logits = nn.Linear(12, 11, bias=False)  # the stages have it each for itself
    optimizer = torch.optim.Adam(model.parameters())
    weft.load_checkpoint(model, optimizer, tmp_path)
    assert_same(whole(model, optimizer), first | second)


def manifest_fails(rank, path):
    weft.save_checkpoint(net(), None, path, step=1)
    before = sorted(os.listdir(path))
    replace = os.replace

    def full(*paths):
        raise OSError(28, "No space left on device")

    os.replace = full
    with pytest.raises(weft.CheckpointError, match="rank 0: OSError: .* No space left"):
        weft.save_checkpoint(net(), None, path, step=2)
    os.replace = replace
    dist.barrier()
    assert sorted(os.listdir(path)) == before
    assert weft.load_checkpoint(net(), None, path).step == 1


def test_a_manifest_that_cannot_be_written_leaves_the_checkpoint_and_nothing_else(tmp_path):
    run_ranks(manifest_fails, 2, tmp_path)


def save_to_a_file(rank, path):
    if rank == 0:
        path.write_text("")
    dist.barrier()
    with pytest.raises(weft.CheckpointError) as raised:
        weft.save_checkpoint(net(), None, path)
    return str(raised.value)


def test_a_path_that_cannot_be_written_is_one_error_on_all_ranks(tmp_path):
    first, second = run_ranks(save_to_a_file, 2, tmp_path / "file")
    assert first == second and "every rank: NotADirectoryError" in first
