"""Models of transformers share their sequence: attention with its windows, softcaps and sinks, labels, caches."""

import copy

import pytest
import torch
import torch.distributed as dist

import weft
import weft.parallelization
import weft.tools.verification
from weft.testing.ranks import run_ranks

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SIZES = dict(
    vocab_size=60,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
DRY = dict(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=1, eos_token_id=2)
MODELS = {
    "Llama": lambda kind: kind(**SIZES),
    "Mistral": lambda kind: kind(**SIZES, sliding_window=5),
    "Gemma2": lambda kind: kind(**SIZES, sliding_window=5, query_pre_attn_scalar=8),
    "GPT2": lambda kind: kind(vocab_size=60, n_embd=32, n_layer=2, n_head=4, n_positions=64, **DRY),
}


def models(name):
    """A model that will be split, and one of the same configuration that will not."""
    config = MODELS[name](getattr(transformers, f"{name}Config"))
    head = {"GPT2": "GPT2LMHeadModel"}.get(name, f"{name}ForCausalLM")
    torch.manual_seed(0)
    reference = getattr(transformers, head)(config)
    model = copy.deepcopy(reference)
    model.config = reference.config  # which a user's models may share
    if name == "Gemma2":
        reference.set_attn_implementation("eager")  # transformers' own for softcaps
    return model, reference


def tokens_of(length):
    return torch.randint(3, 60, (2, length), generator=torch.Generator().manual_seed(length))


def step(model, batch):
    """The model's own loss, by labels, and its logits, as one tensor."""
    output = model(**batch, use_cache=False)
    output.loss.backward()
    return torch.cat([output.loss.detach().view(1), output.logits.detach().flatten()])


def shares(rank, name):
    model, reference = models(name)
    weft.parallelize(model, weft.init_mesh(cp=dist.get_world_size(), device_type="cpu"), context={"strict": True})
    for length in (16, 13):
        tokens = tokens_of(length)
        model.zero_grad()
        report = weft.verify(model, reference, {"labels": tokens, "input_ids": tokens}, step=step)
        assert report.ok, str(report)
    seen = [row.name for row in weft.explain(model).sequence if row.kind == "attention"]
    assert len(seen) == 2
    assert reference.config._attn_implementation in ("sdpa", "eager"), "the other model's configuration is its own"


@pytest.mark.parametrize("name", MODELS)
def test_logits_loss_and_gradients_are_the_unsplit_models(name):
    """None of it gathered but labels (strict)."""
    run_ranks(shares, 2, name, timeout_s=120)


def shares_experts(rank, family):
    from families import small_model

    torch.manual_seed(0)
    reference, call = small_model(family, batch=2)
    reference.config.output_attentions = False
    tokens = call["input_ids"] if call else tokens_of(5)
    model = copy.deepcopy(reference).float()
    weft.parallelize(model, weft.init_mesh(cp=2, device_type="cpu"))
    report = weft.verify(model, reference.float(), {"input_ids": tokens, "labels": tokens}, step=step)
    assert report.ok, str(report)
    gathered = {row.kind for row in weft.explain(model).sequence} - {"attention"}
    assert not {kind for kind in gathered if "scatter" in kind or "index_add" in kind or "copy" in kind}, gathered


@pytest.mark.parametrize(
    "family",
    [
        "deepseek_v2",  # keys that are written in two slices
        "deepseek_v32",  # an indexer that chooses keys
        "glm4_moe",  # groups of experts
        "llama4_text",
        "mixtral",
        "gpt_oss",
    ],
)
def test_experts_and_latent_attention_work_on_parts(family):
    run_ranks(shares_experts, 2, family, timeout_s=120)


def is_eager(rank, family):
    from families import small_model

    torch.manual_seed(0)
    reference, call = small_model(family, batch=2)
    reference = reference.float().eval()
    batch = {name: call[name] for name in ("input_ids", "pixel_values") if name in call}
    batch = {name: x.float() if x.is_floating_point() else x for name, x in batch.items()}
    model = weft.parallelize(copy.deepcopy(reference), weft.init_mesh(cp=2, device_type="cpu"))
    found, expected = (part(**batch)[0] for part in (model, reference))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "family",
    [
        "git",  # adds its mask itself
        "splinter",  # has no mask, and is not causal
    ],
)
def test_a_model_that_has_eager_attention_alone(family):
    run_ranks(is_eager, 2, family)


def pads_eager(rank):
    """A row that sees no key has the mean of all values, and its gradients, in eager attention alone."""
    for name in ("Llama", "Mistral", "Gemma2"):
        model, reference = models(name)
        for part in (model, reference):
            part.set_attn_implementation("eager")
        weft.parallelize(model, weft.init_mesh(cp=2, device_type="cpu"))
        tokens = tokens_of(9)
        attention_mask = (torch.arange(9) >= torch.tensor([[0], [3]])).long()
        batch = {"input_ids": tokens, "labels": tokens, "attention_mask": attention_mask}
        torch.testing.assert_close(step(model, batch), step(reference, batch))
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_left_padding_of_eager_attention_has_its_gradients():
    run_ranks(pads_eager, 2)


def pads(rank):
    model, reference = models("Llama")
    mesh = weft.init_mesh(cp=2, device_type="cpu")
    weft.parallelize(model, mesh)
    tokens = tokens_of(13)
    attention_mask = (torch.arange(13) < torch.tensor([[13], [9]])).long()
    documents = torch.cat([torch.arange(6), torch.arange(7)]).expand(2, -1)
    for extra in ({"attention_mask": attention_mask}, {"position_ids": documents}):
        model.zero_grad()
        batch = {"input_ids": tokens, "labels": tokens, **extra}
        report = weft.verify(model, reference, batch, step=step)
        assert report.ok, f"{list(extra)}\n{report}"
        message = " ".join(row.kind for row in weft.explain(model).sequence)
        assert "has a mask that is not the causal one" in message
    strict, _ = models("Llama")
    weft.parallelize(strict, mesh, context={"strict": True})
    with pytest.raises(ValueError, match="strict: .* has a mask that is not the causal one"):
        strict(tokens, attention_mask=attention_mask, use_cache=False)


def test_padding_and_packed_documents_are_right_and_reported():
    run_ranks(pads, 2)


def caches(rank):
    model, reference = (part.eval() for part in models("Llama"))
    weft.parallelize(model, weft.init_mesh(cp=2, device_type="cpu"))
    tokens = tokens_of(7)
    with torch.no_grad():
        expected = reference.generate(tokens, max_new_tokens=5, do_sample=False)
        found = model.generate(tokens, max_new_tokens=5, do_sample=False)
    assert torch.equal(found, expected) and found.shape == (2, 12)


def test_a_cache_is_whole_on_every_rank():
    run_ranks(caches, 2)


def takes_one_token(rank):
    """Of two sequences: a view of [2, 1, 32] as heads could also be read as one sequence of two positions."""
    model, reference = models("Mistral")
    weft.parallelize(model, weft.init_mesh(cp=2, device_type="cpu"))
    token = tokens_of(1)
    torch.testing.assert_close(model(token).logits, reference(token).logits)


def test_one_token_of_each_sequence_is_a_sequence():
    run_ranks(takes_one_token, 2)


def refuses(rank):
    mesh = weft.init_mesh(cp=2, device_type="cpu")
    model, _ = models("Gemma2")
    weft.parallelize(model, mesh)
    tokens = tokens_of(13)
    with pytest.raises(ValueError, match="got a sequence that is not shared"):
        model.model(tokens)
    windowed, reference = models("Mistral")
    weft.parallelize(windowed, mesh)
    found, expected = (part.model(tokens, use_cache=False).last_hidden_state for part in (windowed, reference))
    torch.testing.assert_close(found, expected, msg="a part of the model that is called by itself")


def test_a_softcap_or_a_window_is_never_dropped():
    run_ranks(refuses, 2)


def sinks(rank):
    """As the attention of gpt-oss passes them."""
    from attention_reference import attention as plain

    from weft.context_parallel.transformers_attention import Pattern, attention
    from weft.kernels.attention_rules import Rules

    class Sinking(torch.nn.Module):
        is_causal = True

        def __init__(self):
            super().__init__()
            self.sinks = torch.nn.Parameter(torch.tensor([0.5, -1.0]))

        def forward(self, x):
            x = x.unflatten(-1, (2, 4)).transpose(1, 2)
            if type(x) is not torch.Tensor:
                options = {"sliding_window": 4, "s_aux": self.sinks, "scaling": 0.7}
                return attention(self, x, x, x, Pattern(4), **options)[0]
            return plain(x, x, x, Rules(left=3, right=0, scale=0.7), sinks=self.sinks)[0].transpose(1, 2)

    model = weft.parallelize(Sinking(), weft.init_mesh(cp=2, device_type="cpu"))
    report = weft.verify(model, Sinking(), torch.randn(2, 11, 8, generator=torch.Generator().manual_seed(0)))
    assert report.ok, str(report)


def test_sinks_and_a_window_reach_the_attention():
    run_ranks(sinks, 2)


def test_a_mask_of_chunks_is_not_taken_for_a_window():
    from transformers.masking_utils import (
        causal_mask_function,
        chunked_causal_mask_function,
        sdpa_mask,
        sliding_window_causal_mask_function,
    )

    from weft.context_parallel.transformers_attention import Pattern, mask

    def made(function, length, size):
        return mask(1, length, length, mask_function=function, local_size=size, otherwise=sdpa_mask)

    for length in range(2, 14):
        assert made(causal_mask_function, length, None) == Pattern(None)
        assert made(sliding_window_causal_mask_function(4), length, 4) == Pattern(4)
        chunked = made(chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64)), length, 4)
        expected = torch.ones(length, length, dtype=torch.bool).tril()
        expected &= torch.arange(length)[:, None] // 4 == torch.arange(length) // 4
        assert chunked == Pattern(4) if length <= 4 else torch.equal(chunked, expected.view(1, 1, length, length))
    assert isinstance(mask(1, 1, 5, 4, mask_function=causal_mask_function, otherwise=sdpa_mask), torch.Tensor)
    with pytest.raises(ValueError, match="the model asks for 'ndim' of its causal mask"):
        made(causal_mask_function, 5, None).ndim  # as PaliGemma does
    with pytest.raises(ValueError, match="the model asks for a part of its causal mask"):
        made(causal_mask_function, 5, None)[:, 0]


def refuses_weights(rank):
    mesh, message = (
        weft.init_mesh(cp=2, device_type="cpu"),
        "no rank computes attention weights: .*output_attentions=False",
    )
    for asked in (False, True):
        model, _ = models("Llama")
        model.set_attn_implementation("eager")
        model.config.output_attentions = model.model.config.output_attentions = asked
        model = weft.parallelize(model, mesh)
        with pytest.raises(ValueError, match=message):
            model(tokens_of(9), **({} if asked else {"output_attentions": True}))
        assert len(model(tokens_of(9), output_attentions=False, output_hidden_states=True).hidden_states) == 3


def test_attention_weights_of_a_shared_sequence_are_refused():
    run_ranks(refuses_weights, 2)


def masks_by_vmap(rank, dtype):
    """Embedding Gemma: transformers builds its two masks, of padding and both windows, with torch.func.vmap."""
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(**SIZES, sliding_window=5, use_bidirectional_attention=True)
    plain = transformers.Gemma3TextModel(config).to(dtype)
    model = weft.parallelize(copy.deepcopy(plain), weft.init_mesh(cp=2, device_type="cpu"))
    tokens = tokens_of(13)
    for hidden in (slice(0, 0), slice(0, 4), slice(9, None), slice(0, 4)):
        mask = torch.ones_like(tokens)
        mask[0, hidden] = 0
        kept = mask.bool().unsqueeze(-1)
        results = []
        for each in (plain, model):
            each.zero_grad()
            output = each(input_ids=tokens, attention_mask=mask).last_hidden_state * kept
            (output * torch.linspace(-1, 1, output.size(-1), dtype=dtype)).sum().backward()
            results.append((output, *(p.grad for p in each.parameters())))
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max() + 1))


def windows_in_fp64(rank):
    torch.manual_seed(0)
    plain = transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=5)).double()
    model = weft.parallelize(copy.deepcopy(plain), weft.init_mesh(cp=2, device_type="cpu"))
    for each in (plain, model):
        each(input_ids=tokens_of(13)).logits.square().mean().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_masks_that_transformers_builds_with_vmap_are_those_of_the_whole(dtype):
    run_ranks(masks_by_vmap, 2, dtype)


def test_a_window_in_fp64_is_a_mask():
    run_ranks(windows_in_fp64, 2)
