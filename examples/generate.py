"""Load a model of transformers onto several ranks, each its own part, and generate text that is one process's.

torchrun --nproc-per-node 2 examples/generate.py path/of/the/model --prompt "one two three" --tokens 20
python examples/generate.py path/of/the/model --prompt "one two three" --tokens 20
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoTokenizer, TextStreamer

import weft


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="folder of the model; without a tokenizer, a prompt's bytes are its tokens")
    parser.add_argument("--prompt", default="one two three")
    parser.add_argument("--tokens", type=int, default=20)
    parser.add_argument("--sample", action="store_true")
    options = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("weft")
    model = weft.from_pretrained(
        options.path, weft.init_mesh(tp=int(os.environ.get("WORLD_SIZE", 1)), device_type="cpu")
    )
    first = dist.get_rank() == 0
    tokenizer, streamer = None, None
    if (Path(options.path) / "tokenizer_config.json").exists():
        tokenizer = AutoTokenizer.from_pretrained(options.path)
        streamer = TextStreamer(tokenizer) if first else None  # all ranks generate, one of them prints
    tokens = tokenizer(options.prompt)["input_ids"] if tokenizer else list(options.prompt.encode())
    torch.manual_seed(0)  # the same on every rank, so that all draw the same tokens
    inputs = torch.tensor([tokens])
    output = model.generate(inputs, max_new_tokens=options.tokens, do_sample=options.sample, streamer=streamer)
    if first:
        print("tokens:", *output[0, len(tokens) :].tolist())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
