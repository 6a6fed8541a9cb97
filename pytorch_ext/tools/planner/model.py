"""The shape of a transformer, from presets and Hugging Face configurations: the input of memory and time."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

# Whether the MLP has a gate. The configuration of another model type must say it ("gated_mlp": true or false).
_WITH_A_GATE = (
    *("llama", "mistral", "ministral3", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "olmo", "olmo2"),
    *("olmo3", "cohere", "cohere2", "granite", "smollm3", "glm", "glm4", "exaone4", "ernie4_5", "seed_oss", "stablelm"),
    *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe"),
)
_WITHOUT = (
    *("gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "falcon", "phi", "starcoder2", "mpt", "apertus"),
    "arcee",
)
_GATED = {**dict.fromkeys(_WITH_A_GATE, True), **dict.fromkeys(_WITHOUT, False)}
# Linear layers and norms with a bias throughout.
_BIASED = {"gpt2", "gpt_neo", "gpt_neox", "opt", "bloom", "phi", "starcoder2"}
_LEARNED_POSITIONS = {"gpt2", "gpt_neo", "opt"}
_FOUR_TIMES = {"gpt2", "gpt_neo", "gptj", "bloom", "falcon", "mpt"}  # the MLP is 4 x hidden by default
# Tied embeddings, if the configuration does not say.
_TIED = _FOUR_TIMES - {"gptj"} | {"opt", "gemma", "gemma2", "gemma3_text", "cohere", "cohere2", "starcoder2"}
_TIED |= {"smollm3", "ernie4_5"}
# Sizes that transformers' class of a model type takes for a missing key; null does not count as missing.
_DEFAULTS = {
    "mistral": {"kv_heads": 8},
    "ministral3": {"kv_heads": 8, "head_dim": 128},
    "qwen3": {"head_dim": 128},
    "gemma": {"head_dim": 256},
    "gemma2": {"head_dim": 256, "kv_heads": 4},
    "gemma3_text": {"head_dim": 256, "kv_heads": 4, "heads": 8, "vocab": 262208},
    "starcoder2": {"kv_heads": 2},
    "smollm3": {"kv_heads": 4},
    "cohere2": {"head_dim": 128},
    "glm": {"head_dim": 128, "kv_heads": 2},
    "glm4": {"head_dim": 128, "kv_heads": 2},
    "ernie4_5": {"head_dim": 128, "kv_heads": 2},
    "seed_oss": {"head_dim": 128, "kv_heads": 8},
    "mixtral": {"kv_heads": 8, "experts": 8, "experts_per_token": 2},
    "qwen2_moe": {"experts": 60, "experts_per_token": 4, "expert_intermediate": 1408, "shared_intermediate": 5632},
    "qwen3_moe": {"kv_heads": 4, "experts": 128, "experts_per_token": 8, "expert_intermediate": 768},
    "olmoe": {"experts": 64, "experts_per_token": 8},
    "granitemoe": {"experts": 8, "experts_per_token": 2},
}
_MLP_IN_THE_LAYER = {"opt"}
# Entries of a configuration with dense layers between those with experts, and their values if there are none.
_SOME_LAYERS: dict[str, tuple] = {
    "first_k_dense_replace": (None, 0),
    "decoder_sparse_step": (None, 1),
    "mlp_only_layers": (None, []),
    "moe_layer_start_index": (None, 0),
    "moe_layer_interval": (None, 1),
    "interleave_moe_layer_step": (None, 1),
}
_ENCODERS = {"bert", "roberta", "xlm-roberta", "distilbert", "albert", "electra", "deberta", "deberta-v2", "modernbert"}
_OF_IMAGES = {"vit", "deit", "swin", "dinov2", "clip"}
_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "n_embed", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim",),
    "intermediate": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "vocab": ("vocab_size",),
    "positions": ("n_positions", "max_position_embeddings"),
    "context_length": ("max_position_embeddings", "n_positions"),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "experts_per_token": ("num_experts_per_tok",),
    "expert_intermediate": ("moe_intermediate_size",),
    "shared_intermediate": ("shared_expert_intermediate_size",),
}


@dataclass(frozen=True)
class Model:
    """A decoder-only transformer.

    Args:
        layers, hidden, intermediate, heads, vocab: its sizes; intermediate is the inner width of the MLP, or of each
            expert.
        kv_heads: fewer than heads with grouped-query attention; 0 takes heads.
        head_dim: 0 takes hidden / heads.
        gated_mlp: the MLP has three products (SwiGLU) instead of two.
        tied_embeddings: the output layer's weight is the embedding's.
        bias, qkv_bias: a bias on every linear layer and norm (LayerNorm; without it, RMSNorm), or on query, key and
            value only.
        qk_norm: a norm on queries and keys.
        positions: rows of a learned position embedding; 0 if positions are rotated into queries and keys.
        context_length: tokens of the longest sequence that the model is made for; 0 if nobody says.
        dropout: after attention and MLP, and in attention; its masks take memory.
        mlp_module: the MLP is its own module, so weft.parallelize(recompute="selective") computes it again.
        experts: experts in place of each layer's MLP; 0 for a dense model.
        experts_per_token: experts that the router chooses for a token.
        shared_intermediate: inner width of the MLP beside the experts that all tokens pass through; 0 for none.
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
    mlp_module: bool = True
    experts: int = 0
    experts_per_token: int = 0
    shared_intermediate: int = 0
    context_length: int = 0
    name: str = "model"

    def __post_init__(self):
        for name in ("layers", "hidden", "intermediate", "heads", "vocab"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"Model: {name}={value!r} must be a whole number of at least 1")
        counts = ("kv_heads", "head_dim", "positions", "experts", "experts_per_token", "shared_intermediate")
        for name in (*counts, "context_length"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"Model: {name}={value!r} must be a whole number of at least 0")
        if not self.head_dim and self.hidden % self.heads:
            raise ValueError(
                f"Model: hidden={self.hidden} is not a multiple of heads={self.heads}; say how wide a head is, head_dim"
            )
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden // self.heads)
        if self.heads % self.kv_heads:
            raise ValueError(f"Model: kv_heads={self.kv_heads} does not divide heads={self.heads}")
        if bool(self.experts) != bool(self.experts_per_token) or self.experts_per_token > self.experts:
            raise ValueError(
                f"Model: experts_per_token={self.experts_per_token} must be from 1 to experts={self.experts}, or both 0"
            )
        if self.shared_intermediate and not self.experts:
            raise ValueError(
                f"Model: shared_intermediate={self.shared_intermediate} is the width of an MLP beside "
                "experts, and experts=0: pass intermediate for the MLP of a dense model"
            )

    @property
    def qkv_width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def mlp_width(self) -> int:
        """Inner width of the MLP that all tokens pass through."""
        return self.shared_intermediate if self.experts else self.intermediate

    @property
    def products_per_layer(self) -> int:
        """Elements of a layer's matrices with which each token is multiplied: of the experts, those of its own."""
        attention = self.hidden * self.qkv_width + self.heads * self.head_dim * self.hidden
        mlp = self.mlp_width + self.experts_per_token * self.intermediate
        return attention + self.hidden * self.experts + (3 if self.gated_mlp else 2) * self.hidden * mlp

    @property
    def expert_parameters(self) -> int:
        """Number of parameters of one expert."""
        up = self.intermediate * (2 if self.gated_mlp else 1)
        return self.hidden * (up + self.intermediate) + (up + self.hidden if self.bias else 0)

    def vectors_per_layer(self, qkv_width: int, intermediate: int) -> int:
        """Return the number of elements of a layer's norms and biases, without those of experts.

        Tensor parallelism splits the biases of query, key, value and of the MLP's inner width, and leaves the rest
        whole.

        Args:
            qkv_width: a rank's width of query, key and value together.
            intermediate: a rank's part of the MLP's inner width; 0 if all of the MLP is experts.
        """
        norms = 2 * self.hidden * (2 if self.bias else 1) + (2 * self.head_dim if self.qk_norm else 0)
        qkv = qkv_width if self.bias or self.qkv_bias else 0
        up = intermediate * (2 if self.gated_mlp else 1)
        outputs = self.hidden * (2 if intermediate else 1) + self.experts
        return norms + qkv + (outputs + up if self.bias else 0)

    @property
    def final_norm(self) -> int:
        return self.hidden * (2 if self.bias else 1)

    @property
    def parameters(self) -> int:
        """Number of parameters; for GPT the P of Narayanan et al. 2021, equation 2."""
        embeddings = self.vocab * self.hidden * (1 if self.tied_embeddings else 2) + self.positions * self.hidden
        layer = self.products_per_layer + self.vectors_per_layer(self.qkv_width, self.mlp_width)
        if self.experts:  # the biases of experts are not among the vectors
            chosen = self.experts_per_token * (3 if self.gated_mlp else 2) * self.hidden * self.intermediate
            layer += self.experts * self.expert_parameters - chosen
        return self.layers * layer + embeddings + self.final_norm

    @property
    def active_parameters(self) -> int:
        """Number of parameters that one token uses."""
        idle = self.experts - self.experts_per_token
        return self.parameters - self.layers * idle * self.expert_parameters

    def flops_per_token(self, sequence_length: int, *, causal: bool, recomputed: bool = False) -> float:
        """Return the floating-point operations of forward and backward for one token: 6 N, and attention.

        N counts the matrices that the token is multiplied with, and the output layer. Attention is 12 x layers x heads
        x head_dim x sequence, or half of it if causal. recomputed adds another forward of the layers, as equation 3 of
        Narayanan et al. 2021 does (8 N in place of 6 N for the layers).

        Args:
            causal: count only the causal half of attention.
            recomputed: count the recomputation of the layers.
        """
        attention = 4 * self.heads * self.head_dim * sequence_length * (0.5 if causal else 1)
        layer = 2 * self.products_per_layer + attention
        return (4 if recomputed else 3) * self.layers * layer + 6 * self.vocab * self.hidden

    @staticmethod
    def of(source: Any) -> "Model":
        """Return a Model from a Model, a preset's name, a config.json (path or content), or a module with a .config.

        Raises:
            ValueError: the name is neither a preset nor a file; fields are missing (the message names them) or
                impossible; or the planner does not know this kind of model (one with experts in some layers only, an
                encoder, attention over latent vectors).
            TypeError: source is anything else.
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
            f"weft.tools.planner.Model(...), and not a {type(source).__name__}"
        )


@cache
def presets() -> dict[str, Model]:
    """Return the models that are known by name."""
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
        return _near(str(source))
    try:
        config = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:  # not JSON, not text, or nested too deep
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold an object with the model's sizes, and holds a {type(config).__name__}")
    return _from_config(config, path.parent.name if path.name == "config.json" and path.parent.name else path.stem)


def _near(name: str) -> Model:
    """Return the one model whose name begins like this, after any publisher's: "meta-llama/Llama3-8B".

    Raises:
        ValueError: there is none, or there are several; the message has the names.
    """
    letters = {known: re.sub(r"[^a-z0-9]", "", known) for known in presets()}
    asked = re.sub(r"[^a-z0-9]", "", name.lower().rpartition("/")[2])
    begin = [known for known, text in letters.items() if asked and text.startswith(asked)]
    if len(begin) == 1:
        return presets()[begin[0]]
    near = begin or [known for known, text in letters.items() if text in get_close_matches(asked, letters.values(), 1)]
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise ValueError(f"model {name!r} is neither a file nor one of {', '.join(presets())}{hint}")


def _from_config(config: Mapping, name: str) -> Model:
    """Read a Hugging Face configuration, or one with the planner's own names."""
    if isinstance(config.get("text_config"), Mapping):  # a model of text and images: its language half
        outer = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
        config = {**outer, **config["text_config"]}
        name += " (its language half)"
    kind = str(config.get("model_type", ""))
    unknown = _unknown(config, kind)
    if unknown:
        raise ValueError(f"{name}: {unknown}: the planner computes decoder-only transformers with equal layers alone")
    found: dict[str, Any] = {}
    for field, aliases in _NAMES.items():
        value = next((config[key] for key in (field, *aliases) if config.get(key) is not None), None)
        if value is not None:
            found[field] = value
        elif not any(key in config for key in (field, *aliases)) and field in _DEFAULTS.get(kind, {}):
            found[field] = _DEFAULTS[kind][field]
    if "intermediate" not in found and kind in _FOUR_TIMES and isinstance(found.get("hidden"), int):
        found["intermediate"] = 4 * found["hidden"]
    if kind == "falcon" and not config.get("new_decoder_architecture"):  # reads no num_kv_heads
        found["kv_heads"] = 1 if config.get("multi_query", True) else found.get("heads", 0)
    if kind not in _LEARNED_POSITIONS and "positions" not in config:
        found.pop("positions", None)
    width = found.pop("expert_intermediate", None)
    if found.get("experts") in (None, 0, 1):
        for field in ("experts", "experts_per_token", "shared_intermediate"):
            found.pop(field, None)
    elif width is not None:
        found["intermediate"] = width
        if config.get("n_shared_experts"):
            found["shared_intermediate"] = config["n_shared_experts"] * width
    if "gated_mlp" in config or kind in _GATED:
        found["gated_mlp"] = _flag(config, ("gated_mlp",), _GATED.get(kind, False), name)
    wanted = ["layers", "hidden", "intermediate", "heads", "vocab", "gated_mlp"]
    if kind in _LEARNED_POSITIONS:
        wanted.append("positions")
    if "experts" in found:
        wanted.append("experts_per_token")
    unknown_type = f"whether the MLP has a gate, true or false: model_type {kind!r} is not known"
    missing = [
        f"{field} ({' or '.join(_NAMES[field]) if field in _NAMES else unknown_type})"
        for field in wanted
        if field not in found
    ]
    if missing:
        raise ValueError(f"{name}: the configuration lacks {', '.join(missing)}")
    found |= {
        "tied_embeddings": _flag(config, ("tied_embeddings", "tie_word_embeddings"), kind in _TIED, name),
        "bias": bool(config.get("bias", config.get("mlp_bias", kind in _BIASED))),
        "qkv_bias": bool(config.get("qkv_bias", config.get("attention_bias", kind in ("qwen2", "qwen2_moe")))),
        "qk_norm": bool(config.get("qk_norm", kind in ("qwen3", "qwen3_moe"))),
        "mlp_module": bool(config.get("mlp_module", kind not in _MLP_IN_THE_LAYER)),
        "dropout": bool(config.get("dropout", any(config.get(key) for key in ("resid_pdrop", "hidden_dropout")))),
    }
    own = {field.name for field in fields(Model)}
    return replace(Model(**{key: value for key, value in found.items() if key in own}), name=name)


def _flag(config: Mapping, keys: tuple[str, ...], default: bool, name: str) -> bool:
    """Return the first of the keys that is present. Raise ValueError for a text, since "false" would count as true."""
    value = next((config[key] for key in keys if config.get(key) is not None), default)
    if not isinstance(value, bool):
        raise ValueError(f"{name}: {' or '.join(keys)}={value!r} must be true or false")
    return value


def _unknown(config: Mapping, kind: str) -> str:
    """Return the entry of a configuration that shows an unknown kind of model, or ""."""
    some = next((key for key, none in _SOME_LAYERS.items() if config.get(key) not in none), None)
    if some:
        return f"{some}={config[some]} (experts in some layers only)"
    if config.get("is_encoder_decoder"):
        return "is_encoder_decoder"
    if config.get("add_cross_attention"):
        return "add_cross_attention"
    if kind in _ENCODERS:
        return f"{kind} is an encoder, whose attention is not causal"
    if kind in _OF_IMAGES:
        return f"{kind} is of images"
    if config.get("kv_lora_rank"):
        return f"kv_lora_rank={config['kv_lora_rank']} (latent attention)"
    narrow = config.get("word_embed_proj_dim")
    if narrow not in (None, config.get("hidden_size")):
        return f"word_embed_proj_dim={narrow} is not hidden_size={config.get('hidden_size')}"
    return ""
