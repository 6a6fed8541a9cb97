"""The shape of a transformer: what memory and time are computed from. Reads presets and Hugging Face configurations."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

# Whether the MLP has a gate; a model type that is not listed must say so itself ("gated_mlp": true or false).
_WITH_A_GATE = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi3",
    "olmo",
    "olmo2",
    "cohere",
]
_WITHOUT = ["gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "falcon", "phi", "starcoder2", "mpt"]
_GATED = {**dict.fromkeys(_WITH_A_GATE, True), **dict.fromkeys(_WITHOUT, False)}
# Linear layers and norms with a bias throughout.
_BIASED = {"gpt2", "gpt_neo", "gpt_neox", "opt", "bloom", "phi", "starcoder2"}
_LEARNED_POSITIONS = {"gpt2", "gpt_neo", "opt"}
_FOUR_TIMES = {"gpt2", "gpt_neo", "gptj", "bloom", "falcon", "mpt"}  # the MLP is 4 x hidden where nothing else is said
_TIED = {*_FOUR_TIMES, "opt", "gemma", "gemma2", "gemma3_text"} - {"gptj"}  # where the configuration does not say
_MIXTURES = ("num_experts", "num_local_experts", "n_routed_experts")
_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "intermediate": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "vocab": ("vocab_size",),
    "positions": ("n_positions", "max_position_embeddings"),
}


@dataclass(frozen=True)
class Model:
    """A decoder-only transformer.

    Args:
        layers, hidden, intermediate, heads, vocab: its sizes; intermediate is the MLP's inner width.
        kv_heads: fewer than heads with grouped-query attention; 0 takes heads.
        head_dim: 0 takes hidden / heads.
        gated_mlp: three products in the MLP (SwiGLU) and not two.
        tied_embeddings: the output layer's weight is the embedding's.
        bias, qkv_bias: on every linear layer and norm (LayerNorm; without, RMSNorm), or on query, key and value only.
        qk_norm: a norm on queries and keys.
        positions: rows of a learned position embedding; 0 where positions are rotated into queries and keys.
        dropout: after attention and MLP, and in attention; its masks take memory.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    vocab: int
    kv_heads: int = 0
    head_dim: int = 0
    gated_mlp: bool = True
    tied_embeddings: bool = False
    bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    positions: int = 0
    dropout: bool = False
    name: str = "model"

    def __post_init__(self):
        for name in ("layers", "hidden", "intermediate", "heads", "vocab"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"Model: {name}={value!r} must be a whole number of at least 1")
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden // self.heads)
        if self.heads % self.kv_heads:
            raise ValueError(f"Model: kv_heads={self.kv_heads} does not divide heads={self.heads}")

    @property
    def qkv_width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def products_per_layer(self) -> int:
        """Elements of a layer's matrices: what a token is multiplied with."""
        attention = self.hidden * self.qkv_width + self.heads * self.head_dim * self.hidden
        return attention + (3 if self.gated_mlp else 2) * self.hidden * self.intermediate

    @property
    def vectors_per_layer(self) -> int:
        """Elements of a layer's norms and biases, which tensor parallelism does not (or hardly) split."""
        norms = 2 * self.hidden * (2 if self.bias else 1) + (2 * self.head_dim if self.qk_norm else 0)
        qkv = self.qkv_width if self.bias or self.qkv_bias else 0
        return norms + qkv + (2 * self.hidden + self.intermediate if self.bias else 0)

    @property
    def final_norm(self) -> int:
        return self.hidden * (2 if self.bias else 1)

    @property
    def parameters(self) -> int:
        """All of them; for GPT the P of Narayanan et al. 2021, equation 2."""
        embeddings = self.vocab * self.hidden * (1 if self.tied_embeddings else 2) + self.positions * self.hidden
        return self.layers * (self.products_per_layer + self.vectors_per_layer) + embeddings + self.final_norm

    def flops_per_token(self, sequence_length: int, *, causal: bool, recomputed: bool = False) -> float:
        """Floating-point operations of forward and backward for one token: 6 N, and attention.

        N counts the matrices and the output layer. Attention is 12 x layers x heads x head_dim x sequence in full, half
        of that where only the causal half is counted. recomputed adds another forward of the layers, as equation 3
        of Narayanan et al. 2021 does (8 N in place of 6 N for the layers).
        """
        attention = 4 * self.heads * self.head_dim * sequence_length * (0.5 if causal else 1)
        layer = 2 * self.products_per_layer + attention
        return (4 if recomputed else 3) * self.layers * layer + 6 * self.vocab * self.hidden

    @staticmethod
    def of(source: Any) -> "Model":
        """A Model from a Model, a preset's name, the path of a config.json, its content, or a module with a .config.

        Raises:
            ValueError: the name is no preset and no file, fields are missing (named), or the model is a mixture of
                experts, which the planner does not know.
            TypeError: anything else.
        """
        if isinstance(source, Model):
            return source
        if isinstance(source, Mapping):
            return _from_config(source, str(source.get("model_type", "config")))
        if isinstance(source, str | Path):
            return _from_name(source)
        config = getattr(source, "config", source)
        if hasattr(config, "to_dict"):
            config = config.to_dict()
        if isinstance(config, Mapping):
            return _from_config(config, type(source).__name__)
        raise TypeError(
            f"a model for the planner is a preset's name, a config.json, its content, a module with a .config or a "
            f"weft.planner.Model(...), and not a {type(source).__name__}"
        )


@cache
def presets() -> dict[str, Model]:
    """The models that are known by name."""
    stored = json.loads(files(__package__).joinpath("data/models.json").read_text())["models"]
    return {name: Model(**values, name=name) for name, values in stored.items()}


def _from_name(source: str | Path) -> Model:
    known = presets().get(str(source).lower())
    if known:
        return known
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise ValueError(f"model {str(source)!r} is neither a file nor one of {', '.join(presets())}")
    try:
        config = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold an object with the model's sizes, and holds a {type(config).__name__}")
    return _from_config(config, path.parent.name if path.name == "config.json" and path.parent.name else path.stem)


def _from_config(config: Mapping, name: str) -> Model:
    """A Hugging Face configuration, or the planner's own names."""
    if isinstance(config.get("text_config"), Mapping):  # a model of text and images: its language half
        config = config["text_config"]
    experts = next((key for key in _MIXTURES if (config.get(key) or 0) > 1), None)
    if experts:
        raise ValueError(f"{name}: {experts}={config[experts]}: the planner knows dense transformers only")
    kind = str(config.get("model_type", ""))
    found: dict[str, Any] = {}
    for field, aliases in _NAMES.items():
        value = next((config[key] for key in (field, *aliases) if config.get(key) is not None), None)
        if value is not None:
            found[field] = value
    if "intermediate" not in found and kind in _FOUR_TIMES and "hidden" in found:
        found["intermediate"] = 4 * found["hidden"]
    if kind not in _LEARNED_POSITIONS and "positions" not in config:
        found.pop("positions", None)
    if "gated_mlp" in config or kind in _GATED:
        found["gated_mlp"] = bool(config.get("gated_mlp", _GATED.get(kind)))
    wanted = ("layers", "hidden", "intermediate", "heads", "vocab", "gated_mlp")
    missing = [
        f"{field} ({' or '.join(_NAMES[field])})" if field in _NAMES else field
        for field in wanted
        if field not in found
    ]
    if missing:
        raise ValueError(f"{name}: the configuration lacks {', '.join(missing)}")
    tied = config.get(
        "tied_embeddings", config.get("tie_word_embeddings", kind in _FOUR_TIMES | {"opt", "gemma", "gemma2"})
    )
    found |= {
        "tied_embeddings": bool(tied),
        "bias": bool(config.get("bias", config.get("mlp_bias", kind in _BIASED))),
        "qkv_bias": bool(config.get("qkv_bias", config.get("attention_bias", kind == "qwen2"))),
        "qk_norm": bool(config.get("qk_norm", kind == "qwen3")),
        "dropout": bool(config.get("dropout", any(config.get(key) for key in ("resid_pdrop", "hidden_dropout")))),
    }
    own = {field.name for field in fields(Model)}
    return replace(Model(**{key: value for key, value in found.items() if key in own}), name=name)
