"""Small models of transformers, and the comparison of bits, for tests of `invariant`."""

import torch


def make_model(family, attention, **options):
    import transformers

    transformers.logging.set_verbosity_error()
    sizes = {"hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2, "vocab_size": 104}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "attn_implementation": attention}
    torch.manual_seed(0)
    if family == "gpt2":
        options = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **options}
        config = transformers.GPT2Config(
            n_embd=48, n_layer=2, n_head=8, vocab_size=104, attn_implementation=attention, **options
        )
        return transformers.GPT2LMHeadModel(config)
    name = {"llama": "Llama", "qwen2": "Qwen2", "gemma": "Gemma"}[family]
    more = {"head_dim": 6} if family == "gemma" else {}
    config = getattr(transformers, f"{name}Config")(**{**sizes, **heads, **more, **options})
    return getattr(transformers, f"{name}ForCausalLM")(config)


DROPS = {
    "gpt2": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.2},
    **{name: {"attention_dropout": 0.2} for name in ("llama", "qwen2", "gemma")},
}


def assert_same_bits(of_one, of_ranks):
    for found in of_ranks:
        assert found.keys() == of_one.keys()
        different = [name for name, value in of_one.items() if not torch.equal(value, found[name])]
        assert not different, different
