"""weft bench generate: greedy generation by a Llama that ranks share; time to the first token, and of each further one.

Beside it: one process with a thread for each rank, the same split over gloo, and transformers' own split over gloo.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

import weft
from weft.adapters import need
from weft.bench.measure import Quantiles, alternate, slowest_rank
from weft.bench.suites import RefusedError, positive
from weft.bench.table import Row
from weft.testing.ranks import run_ranks

LIMIT = "none measured: for a token each rank reads every weight of its part once"
ALONE = "one process"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_sizes(parser)
    parser.add_argument("--prompt", type=positive, default=64, help="tokens of the prompt (default 64)")
    parser.add_argument("--tokens", type=positive, default=32, help="tokens to generate, at least 2 (default 32)")


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add the sizes of the Llama; the defaults have 98 million parameters."""
    parser.add_argument("--layers", type=positive, default=12, help="layers of the model (default 12)")
    parser.add_argument("--hidden", type=positive, default=768, help="hidden size, a multiple of 64 (default 768)")


def run(options: argparse.Namespace) -> Iterator[Row]:
    check_packages("transformers")
    if options.tokens < 2:
        raise RefusedError(f"--tokens {options.tokens}: the time of a token needs at least 2")
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(save_llama, 1, folder, options.layers, options.hidden, timeout_s=600)
        per_rank = run_ranks(
            _measure,
            options.world,
            folder,
            (options.prompt, options.tokens),
            options.rounds,
            backend="gloo",
            timeout_s=7200,
        )
    shape = f"Llama {options.layers}x{options.hidden}, prompt {options.prompt}, {options.tokens} tokens, fp32"
    for number, name in enumerate(("first token", "further token")):
        times = slowest_rank([rank[number] for rank in per_rank])
        of: dict[str, str | int] = {"name": name, "shape": shape, "world": options.world}
        yield Row(of, times, "gloo", {"tokens_per_second": _rates(times)} if number else {})


def check_packages(*packages: str) -> None:
    """Raise RefusedError for a package that is missing."""
    for package in packages:
        try:
            need("weft bench", package, "0")
        except ImportError as error:
            raise RefusedError(str(error)) from None


def _rates(times: dict[str, Quantiles]) -> dict[str, float]:
    return {name: 1e6 / quantiles.p50_us for name, quantiles in times.items()}


def save_llama(_: int, folder: str, layers: int, hidden: int) -> None:
    """Write a Llama with random weights to a folder, in files of 50 MB; runs as a rank of its own."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads, vocabulary = hidden // 64, 8192
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=4096,
    )
    model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder, max_shard_size="50MB")


class Generation:
    """Contender that generates and keeps the times of each call, as a streamer of `generate`.

    Attributes:
        first_us: time to the first token, of each call.
        token_us: mean time of the further tokens, of each call.
        tokens: the tokens of the last call.
    """

    def __init__(self, model: torch.nn.Module | None, prompt: torch.Tensor, count: int, threads: int = 1):
        self._model, self._prompt, self._count, self._threads = model, prompt, count, threads
        self.first_us: list[float] = []
        self.token_us: list[float] = []
        self.tokens: torch.Tensor | None = None

    def __call__(self) -> None:
        """Generate; a rank without a model does nothing."""
        if self._model is None:
            self.first_us.append(0.0)
            self.token_us.append(0.0)
            return
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        self._at = [time.perf_counter()]
        options = {"max_new_tokens": self._count, "do_sample": False, "streamer": self, "pad_token_id": 0}
        self.tokens = self._model.generate(self._prompt, **options)  # type: ignore[operator]
        begin, _, first, *_, last = self._at
        self.first_us.append((first - begin) * 1e6)
        self.token_us.append((last - first) / (self._count - 1) * 1e6)
        torch.set_num_threads(before)

    def put(self, _: torch.Tensor) -> None:
        self._at.append(time.perf_counter())  # the first call has the prompt

    def end(self) -> None:
        """Do nothing; `generate` calls it after the last token."""


def _measure(
    rank: int, folder: str, sizes: tuple[int, int], rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the times to the first token, and of a further token, by contender.

    Args:
        sizes: Tokens of the prompt, and to generate.
    """
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    (prompt, count), world = sizes, dist.get_world_size()
    split = {"distributed_config": DistributedConfig(tp_size=world, tp_plan="auto")}
    models = {
        "weft": weft.from_pretrained(folder, dist.new_group(backend="weft")),
        "gloo": weft.from_pretrained(folder, dist.new_group(backend="gloo")),
        "transformers over gloo": AutoModelForCausalLM.from_pretrained(folder, **split).eval(),
        ALONE: AutoModelForCausalLM.from_pretrained(folder).eval() if rank == 0 else None,
    }
    tokens = torch.randint(8192, (1, prompt), generator=torch.Generator().manual_seed(1))
    contenders = {
        name: Generation(model, tokens, count, world if name == ALONE else 1) for name, model in models.items()
    }
    for name, contender in contenders.items():
        contender()
        dist.barrier()
        expected = contenders["weft"].tokens
        if contender.tokens is not None and expected is not None and not torch.equal(contender.tokens, expected):
            raise AssertionError(f"{name} generates other tokens than weft: not measured")
    alternate(contenders, meet=dist.barrier, rounds=rounds, calls=1)
    first = {name: contender.first_us[-rounds:] for name, contender in contenders.items()}
    return first, {name: contender.token_us[-rounds:] for name, contender in contenders.items()}
