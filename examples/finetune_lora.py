"""Fine-tune a model of transformers with LoRA; the adapter is the same however many ranks hold the model.

torchrun --nproc-per-node 2 examples/finetune_lora.py --tp 2 --out adapter
python examples/finetune_lora.py --out adapter
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import weft


def small_llama():
    """Return a model that is the same in every process. Put AutoModelForCausalLM.from_pretrained(...) in its place."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4, "num_attention_heads": 8}
    return LlamaForCausalLM(LlamaConfig(vocab_size=128, **sizes))


def batches(steps):
    """Yield sentences to learn, as bytes."""
    text = Path(__file__).read_bytes()
    for step in range(steps):
        starts = torch.randint(len(text) - 65, (4,), generator=torch.Generator().manual_seed(step))
        yield torch.tensor([list(text[start : start + 64]) for start in starts])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", help="folder for the adapter")
    options = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("weft")
    mesh = weft.init_mesh(tp=options.tp, device_type="cpu")
    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = weft.parallelize(get_peft_model(small_llama(), config), mesh)
    optimizer = torch.optim.AdamW([x for x in model.parameters() if x.requires_grad], lr=1e-2)
    for step, tokens in enumerate(batches(options.steps)):
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        norm = weft.clip_grad_norm_(model, 1.0)
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.6f}, norm {norm.item():.4f}")
    if options.out:
        model.save_pretrained(options.out)  # the whole adapter, as an unsplit run writes it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
