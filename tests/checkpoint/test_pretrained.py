"""Weights go from safetensors files into each rank's part of a model, and nowhere else."""

import json

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

import weft
from weft.checkpoint import safetensors_io
from weft.checkpoint.pretrained_files import load_safetensors
from weft.testing.ranks import run_ranks

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SIZES = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=46,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
)


def model_of(tied):
    """The tied one is Gemma, whose embedding has a buffer that no file holds."""
    torch.manual_seed(5)
    if tied:
        return transformers.GemmaForCausalLM(transformers.GemmaConfig(**SIZES, tie_word_embeddings=True))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def written(folder, model, tied, several):
    """As transformers stores it: once what is tied, in one file or in several with an index."""
    tensors = {name: tensor for name, tensor in model.state_dict().items() if not (tied and name == "lm_head.weight")}
    names = sorted(tensors)
    if not several:
        save_file(tensors, folder / "model.safetensors")
        return
    shards = {f"model-0000{n}-of-00002.safetensors": names[n - 1 :: 2] for n in (1, 2)}
    for file, inside in shards.items():
        save_file({name: tensors[name] for name in inside}, folder / file)
    index = {name: file for file, inside in shards.items() for name in inside}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def counted(monkeypatch):
    """Elements that are read, and the most at a time."""
    read = []

    def counting(self, box, inside=None):
        tensor = original(self, box, inside)
        read.append(tensor.numel())
        return tensor

    original = safetensors_io.Files.read
    monkeypatch.setattr(safetensors_io.Files, "read", counting)
    return read


def check_reading(rank, folder):
    with pytest.MonkeyPatch.context() as monkeypatch:
        for tied, several in ((False, True), (True, False)):
            whole = model_of(tied)
            with torch.device("meta"):
                model = model_of(tied)
            model = weft.parallelize(model, plan="auto")
            assert all(parameter.is_meta for parameter in model.parameters())
            read = counted(monkeypatch)
            load_safetensors(model, folder / f"{tied}-{several}")
            own = sum(parameter.numel() for parameter in model.parameters())
            assert sum(read) == own < 0.8 * sum(parameter.numel() for parameter in whole.parameters())
            assert max(read) <= max(parameter.numel() for parameter in model.parameters())
            monkeypatch.undo()
            for name, parameter in model.named_parameters():
                shard = weft.shard_of(parameter)
                expected = whole.get_parameter(name)
                assert torch.equal(parameter, expected if shard is None else shard.take(expected)), name
                assert parameter.untyped_storage().nbytes() == parameter.nbytes
            assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
            tokens = torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(1))
            torch.testing.assert_close(model(tokens).logits, whole(tokens).logits, rtol=1e-4, atol=1e-5)
            loss = model(tokens, labels=tokens).loss
            loss.backward()
            whole(tokens, labels=tokens).loss.backward()
            for name, parameter in model.named_parameters():
                shard, expected = weft.shard_of(parameter), whole.get_parameter(name).grad
                expected = expected if shard is None else shard.take(expected)
                torch.testing.assert_close(parameter.grad, expected, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow("pytorch_ext/checkpoint")), 3])
def test_a_rank_reads_its_own_part_and_no_more(world, tmp_path):
    for tied, several in ((False, True), (True, False)):
        folder = tmp_path / f"{tied}-{several}"
        folder.mkdir()
        written(folder, model_of(tied), tied, several)
    run_ranks(check_reading, world, tmp_path)


class Table(nn.Module):
    """A buffer that is stored nowhere."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x):
        return self.linear(x) + self.table


def check_refusals(rank, folder):
    whole = model_of(False).state_dict()

    def refused(model, error, message, **changes):
        tensors = {name: tensor for name, tensor in {**whole, **changes}.items() if tensor is not None}
        if rank == 0:
            save_file(tensors, folder / "wrong.safetensors")
        dist.barrier()
        before = {name: id(parameter) for name, parameter in model.named_parameters()}
        with pytest.raises(error, match=message):
            load_safetensors(model, folder / "wrong.safetensors")
        assert before == {name: id(parameter) for name, parameter in model.named_parameters()}, "it is as it was"
        dist.barrier()

    with torch.device("meta"):
        model = model_of(False)
    model = weft.parallelize(model, plan="auto")
    query = "model.layers.1.self_attn.q_proj.weight"
    refused(model, weft.CheckpointError, f"{query} is not stored", **{query: None})
    refused(model, weft.CheckpointError, "other is stored, and the model has no such tensor", other=torch.ones(2))
    refused(
        model,
        weft.CheckpointError,
        rf"{query} is F32 \[32, 32\] in the model, F32 \[30, 32\] stored",
        **{query: torch.ones(30, 32)},
    )
    refused(model, weft.CheckpointError, f"{query} is F32 .* in the model, BF16", **{query: whole[query].bfloat16()})
    with pytest.raises(weft.CheckpointError, match="there is no such file or folder"):
        load_safetensors(model, folder / "nowhere")
    with torch.device("meta"):
        plain = Table()
    with pytest.raises(ValueError, match="table: no file holds them.*register_buffer"):
        load_safetensors(plain, folder / "wrong.safetensors")
    assert plain.linear.weight.is_meta
    plain.register_buffer("table", torch.arange(4.0), persistent=False)
    if rank == 0:
        save_file(Table().state_dict(), folder / "table.safetensors")
    dist.barrier()
    assert not load_safetensors(plain, folder / "table.safetensors").linear.weight.is_meta


def check_options(rank, folder):
    """Other types are converted and odd tensors passed over where that is asked for; one rank may load by itself."""
    stored = {name: tensor.bfloat16() for name, tensor in model_of(False).state_dict().items()}
    del stored["model.norm.weight"]
    if rank == 0:
        save_file({**stored, "other": torch.ones(2)}, folder / "odd.safetensors")
    dist.barrier()
    alone = dist.new_subgroups(1)[0]
    with torch.device("meta"):
        split, own = weft.parallelize(model_of(False), plan="auto"), model_of(False)
    for model, group in ((split, None), (own, alone)):
        if model is split or rank == 1:
            load_safetensors(model, folder / "odd.safetensors", device="cpu", strict=False, cast=True, group=group)
            for name, parameter in model.named_parameters():
                if name in stored:
                    shard, expected = weft.shard_of(parameter), stored[name].float()
                    assert torch.equal(parameter, expected if shard is None else shard.take(expected)), name
            assert model.model.norm.weight.device.type == "cpu"


def test_types_are_converted_and_odd_tensors_passed_over_where_asked(tmp_path):
    run_ranks(check_options, 2, tmp_path)


def test_what_does_not_fit_is_named_and_changes_nothing(tmp_path):
    run_ranks(check_refusals, 2, tmp_path)
