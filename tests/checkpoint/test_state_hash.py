"""A hash of the model and its training: of every bit, and the same on any mesh."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from weft.testing.ranks import run_ranks


def net(dtype=torch.float32):
    torch.manual_seed(0)
    layers = [nn.Embedding(11, 12), nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 12), nn.Linear(12, 11, bias=False)]
    model = nn.Sequential(*layers)
    model[4].weight = model[0].weight
    model.register_buffer("count", torch.zeros((), dtype=torch.int64))
    return model.to(dtype)


PLAN = {"0": "vocabulary", "1": "column", "3": "row", "4": {"style": "column", "gather_output": True}}


def trained(model, optimizer):
    for _ in range(2):
        model(torch.arange(8).view(2, 4)).float().square().mean().backward()
        optimizer.step()
    return model, optimizer


def saved(folder, dtype):
    """Save a trained model, and return its hashes with the optimizer and without."""
    model = net(dtype)
    model, optimizer = trained(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    weft.save_checkpoint(model, optimizer, folder)
    return weft.state_hash(model, optimizer), weft.state_hash(model)


def hashes_of(rank, folder, dtype, tp, shard_optimizer):
    mesh = weft.init_mesh(dp=dist.get_world_size() // tp, tp=tp, device_type="cpu")
    model = weft.parallelize(net(dtype), mesh["tp"], plan=PLAN)
    model = weft.DataParallel(model, group=mesh["dp"], shard_optimizer=shard_optimizer)
    adamw = torch.optim.AdamW
    optimizer = model.optimizer(adamw, lr=0.1) if shard_optimizer else adamw(model.parameters(), lr=0.1)
    weft.load_checkpoint(model, optimizer, folder)
    return weft.state_hash(model, optimizer), weft.state_hash(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("ranks", "tp", "shard_optimizer"), [(2, 2, False), (3, 3, False), (2, 1, False), (3, 1, True), (4, 2, True)]
)
def test_every_mesh_has_the_hash_of_one_process(ranks, tp, shard_optimizer, dtype, tmp_path):
    alone = saved(tmp_path, dtype)
    if dtype == torch.bfloat16 and shard_optimizer:
        alone = None, alone[1]  # its fp32 copies of the parameters are state that one process has not
    for found in run_ranks(hashes_of, ranks, tmp_path, dtype, tp, shard_optimizer):
        assert found[1] == alone[1] and alone[0] in (None, found[0])


def test_any_other_bit_is_another_hash():
    model = net()
    model, optimizer = trained(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    seen = [weft.state_hash(model, optimizer), weft.state_hash(model)]
    weight = model[1].weight.data

    def see():
        seen.append(weft.state_hash(model, optimizer))

    weight.view(torch.int32)[3, 4] ^= 1
    see()
    weight.view(torch.int32)[3, 4] ^= 1
    assert weft.state_hash(model, optimizer) == seen[0]
    weight[[3, 4]] = weight[[4, 3]]  # the same numbers at other places
    see()
    weight[[3, 4]] = weight[[4, 3]]
    first, second = model[1].bias.data, model[3].bias.data[:10]
    first[:], second[:] = second.clone(), first.clone()
    see()
    first[:], second[:] = second.clone(), first.clone()
    model.count += 1
    see()
    model.count -= 1
    state = optimizer.state[model[3].weight]
    state["exp_avg_sq"].view(torch.int32)[11, 9] ^= 1 << 30
    see()
    state["exp_avg_sq"].view(torch.int32)[11, 9] ^= 1 << 30
    state["step"] += 1
    see()
    state["step"] -= 1
    assert weft.state_hash(model, optimizer) == seen[0]
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float32, torch.bfloat16, torch.bool])
@pytest.mark.parametrize("shape", [(), (3,), (2, 300, 300)])
def test_a_number_has_the_hash_of_no_other_at_its_place(shape, dtype):
    model = nn.Module()
    model.register_buffer("numbers", torch.zeros(shape, dtype=dtype))
    of = model.numbers.view(-1).view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    seen = {weft.state_hash(model)}
    for place in {0, len(of) // 2, len(of) - 1}:
        for bits in (1,) if dtype == torch.bool else (1, -1, 5, ~5):
            of[place] = bits
            seen.add(weft.state_hash(model))
            of[place] = 0
    count = 1 if dtype == torch.bool else 4
    assert len(seen) == 1 + count * len({0, len(of) // 2, len(of) - 1})


def test_quantised_weights_are_refused():
    quantization = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(64, 64))
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    with pytest.raises(TypeError, match="is quantised"):
        weft.state_hash(model)


def different_models(rank):
    model = nn.Linear(3, 4 + rank)
    with pytest.raises(weft.CheckpointError, match="weight is .* on an earlier rank"):
        weft.state_hash(model)


def test_models_that_differ_are_refused_on_every_rank():
    run_ranks(different_models, 2)
