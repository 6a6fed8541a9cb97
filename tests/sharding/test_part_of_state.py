"""A rank's part is never written as the whole, and a layer knows its parts after they are replaced."""

import copy
from datetime import timedelta

import accelerate
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch import nn

import weft
from weft.sharding.part_of_state import is_part
from weft.testing.ranks import on_machines, run_ranks, try_ranks

PLAN = {"0": "vocabulary", "1": "column", "3": "row"}
TOKENS = torch.tensor([[3, 1, 6], [0, 2, 5]])


def whole_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 5))


def split_model():
    return weft.parallelize(whole_model(), plan=PLAN)


def gradients_of(model):
    model.zero_grad()
    model(TOKENS).square().sum().backward()
    return model


def writes_parts(rank, folder):
    model = split_model()
    state = model.state_dict()
    assert [is_part(x) for x in state.values()] == [True, True, True, True, False]
    own = folder / f"{rank}.safetensors"
    for write in (
        lambda: safetensors.torch.save_file(state, own),
        lambda: safetensors.torch.save(state),
        lambda: safetensors.torch.save_model(model, own),
        lambda: safetensors.torch.save_file({name: x.cpu().clone().contiguous() for name, x in state.items()}, own),
        lambda: safetensors.torch.save_file({name: x.half() for name, x in copy.deepcopy(state).items()}, own),
        lambda: accelerate.Accelerator(cpu=True).save_model(model, folder),
    ):
        with pytest.raises(ValueError, match=r"this rank's part .* and would be written as if it was the whole"):
            write()
    for what in (state, {"model": state, "step": 1}):
        with pytest.raises(dcp.CheckpointException, match=r"is this rank's part .*weft.as_dtensors"):
            dcp.save(what, checkpoint_id=folder / "distributed")
    torch.save(state, folder / f"{rank}.pt")  # a file of its own
    again = torch.load(folder / f"{rank}.pt")
    assert {type(x) for x in again.values()} == {torch.Tensor}
    for found in (again, copy.deepcopy(state), {name: x.clone() for name, x in state.items()}):
        model.load_state_dict(found, assign=True)
        assert all(type(x) is nn.Parameter for x in model.parameters())
        assert [weft.shard_of(x) is not None for x in model.parameters()] == [True, True, True, True, False]
    assert type(state["1.weight"] * 2) is type(state["1.weight"].sum()) is torch.Tensor


def test_a_part_is_not_written_as_the_whole(tmp_path):
    run_ranks(writes_parts, 2, tmp_path)


def language_model():
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    )


def saves_the_whole(rank, folder):
    model = weft.parallelize(language_model(), weft.init_mesh(tp=2))
    model.save_pretrained(folder / "all")
    copy.deepcopy(model).save_pretrained(folder / "copy", max_shard_size="9KB")
    model.save_pretrained(folder / "state", is_main_process=rank == 0, state_dict=model.state_dict())
    state = weft.full_state_dict(model)
    if rank == 0:
        model.save_pretrained(folder / "given", state_dict=state)
    dist.barrier()
    if rank == 0:
        model.save_pretrained(folder / "alone")
    model(TOKENS)


def test_save_pretrained_writes_the_whole_from_all_ranks_and_nothing_from_one(tmp_path):
    for outcome in try_ranks(saves_the_whole, 2, tmp_path):
        assert "rank 0 called all_gather" in str(outcome.error), outcome.traceback
        assert "for save_pretrained of a split model, which every rank calls, rank 1 called" in str(outcome.error)
    assert not (tmp_path / "alone").exists()
    expected = language_model().state_dict()
    for name in ("all", "copy", "state", "given"):
        found = transformers.LlamaForCausalLM.from_pretrained(tmp_path / name).state_dict()
        assert all(torch.equal(found[key], value) for key, value in expected.items())


# Replaced parameters


def new(tensor):
    return nn.Parameter(tensor.detach().clone())


def by_attribute(model):
    for number in (0, 1, 3):
        model[number].weight = new(model[number].weight)
    model[1].bias = new(model[1].bias)


def by_registration(model):
    for number in (0, 1, 3):
        weight = new(model[number].weight)
        del model[number].weight
        model[number].register_parameter("weight", weight)


def past_the_module(model):
    for number in (0, 1, 3):
        model[number]._parameters["weight"] = new(model[number].weight)


def swapped(model):
    torch.__future__.set_swap_module_params_on_conversion(True)
    model.double()
    model.load_state_dict(whole_model().double().state_dict())


def loaded(model):
    model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()}, assign=True)


def replaces(rank, replace):
    model, whole = split_model(), gradients_of(whole_model())
    replace(model)
    for name, value in weft.full_state_dict(model).items():
        torch.testing.assert_close(value, whole.state_dict()[name], check_dtype=False)
    replace(model)
    gradients_of(model)
    norms = [nn.utils.get_total_norm([x.grad for x in one.parameters()]) for one in (model, whole)]
    torch.testing.assert_close(*norms, check_dtype=False)
    torch.testing.assert_close(weft.clip_grad_norm_(model, 1e9), norms[1].double(), rtol=1e-5, atol=0)
    with pytest.raises(
        ValueError, match=r"weight has shape \(9, 6\), and rank . of 2 has the part \(., 6\) of \(9, 6\)"
    ):
        model[1].weight = new(whole[1].weight)


@pytest.mark.parametrize("replace", [by_attribute, by_registration, past_the_module, swapped, loaded])
def test_a_replaced_parameter_is_the_part_that_it_was(replace):
    run_ranks(replaces, 2, replace)


# What a rank may not call alone


def alone(rank, call):
    model = gradients_of(split_model())
    if rank == 0:
        call(model)
    gradients_of(model)


def norm(model):
    model[1].weight.grad.norm().item()


def total_norm(model):
    nn.utils.get_total_norm([x.grad for x in model.parameters()])


def largest(model):
    model[1].weight.grad.abs().max()


def mean(model):
    model[1].weight.grad.mean()


def whole_state(model):
    weft.full_state_dict(model)


def clip(model):
    weft.clip_grad_norm_(model, 1.0)


def compared(model):
    model.check_replicas()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (norm, "norm of a split gradient, which is over all its ranks: take it on each of them"),
        (total_norm, "norm of a split gradient"),
        (largest, "max of a split gradient"),
        (mean, "mean of a split gradient"),
        (whole_state, "weft.full_state_dict, which every rank calls"),
        (clip, "weft.clip_grad_norm_, which every rank calls"),
        (compared, "weft.check_replicas, which every rank calls"),
    ],
)
def test_who_calls_alone_is_told_what_it_is(call, text):
    for outcome in try_ranks(alone, 2, call, group_timeout_s=20):
        assert isinstance(outcome.error, weft.CollectiveMismatchError), outcome
        assert text in str(outcome.error) and "rank 0 called" in str(outcome.error)


def test_it_is_told_on_several_machines_too():
    for outcome in try_ranks(alone, 2, norm, before=on_machines("ab")):
        assert "rank 0 called" in str(outcome.error) and "norm of a split gradient" in str(outcome.error), outcome


def nobody_comes(rank):
    model = gradients_of(split_model())
    store = dist.distributed_c10d._get_default_store()
    if rank:
        return store.wait(["waited in vain"], timedelta(seconds=20))
    dist.group.WORLD.set_timeout(timedelta(seconds=1))
    try:
        return norm(model)
    finally:
        store.set("waited in vain", "")


def test_a_call_to_which_nobody_comes_says_what_it_is():
    error = try_ranks(nobody_comes, 2)[0].error
    assert isinstance(error, weft.CollectiveTimeoutError) and "for the norm of a split gradient" in str(error), error
