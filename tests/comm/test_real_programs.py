"""Programs of other projects, unchanged, over gloo and over weft in its place: they pass, and print the same numbers."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gloo_exit import succeeded

pytestmark = pytest.mark.slow("pytorch_ext/comm")

TRAINER = """
import torch, torch.distributed as dist, transformers
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
transformers.utils.logging.set_verbosity_error()
torch.manual_seed(0)
class Words(torch.utils.data.Dataset):
    def __len__(self):
        return 48
    def __getitem__(self, i):
        x = torch.randint(0, 60, (12,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": x, "labels": x}
found = []
class Keep(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        found.extend(value for name, value in logs.items() if name in ("loss", "grad_norm", "eval_loss"))
model = GPT2LMHeadModel(GPT2Config(vocab_size=60, n_positions=12, n_embd=16, n_layer=2, n_head=2))
options = dict(per_device_train_batch_size=4, max_steps=6, logging_steps=1, gradient_accumulation_steps=2)
saving = dict(save_strategy="steps", save_steps=3, eval_strategy="steps", eval_steps=3)
arguments = TrainingArguments("saved", use_cpu=True, report_to=[], disable_tqdm=True, **options, **saving)
Trainer(model, arguments, train_dataset=Words(), eval_dataset=Words(), callbacks=[Keep()]).train()
assert len(found) == 14
if dist.get_rank() == 0:
    print("found", type(dist.group.WORLD).__name__, found, sum(p.double().sum().item() for p in model.parameters()))
dist.barrier()
"""

SHARDED = """
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
dist.init_process_group("gloo")
rank, mesh = dist.get_rank(), dist.init_device_mesh("cpu", (2,))
def new():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.GELU(), torch.nn.Linear(7, 3))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)
def step(model, optimizer, seed):
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * seed + rank))
    loss = model(x).square().mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), norm.item()
model, optimizer = new()
found = [step(model, optimizer, seed) for seed in range(3)]
state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
dcp.save(state, checkpoint_id="saved")
found += [step(model, optimizer, seed) for seed in range(3, 6)]
model, optimizer = new()
step(model, optimizer, 9)
state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
dcp.load(state, checkpoint_id="saved")
set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
assert [step(model, optimizer, seed) for seed in range(3, 6)] == found[3:], "resumed"
a, b = (torch.randn(6, 6, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
product = distribute_tensor(a, mesh, [Shard(1)]) @ distribute_tensor(b, mesh, [Shard(0)])
found.append(product.redistribute(placements=[Replicate()]).to_local().sum().item())
if rank == 0:
    print("found", type(dist.group.WORLD).__name__, found)
dist.barrier()
dist.destroy_process_group()
"""

FABRIC = """
import torch, torch.distributed as dist
from lightning_fabric import Fabric
fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
found = []
for seed in range(4):
    loss = model(torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * seed + fabric.global_rank))).square().mean()
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    found.append(fabric.all_reduce(loss.detach(), reduce_op="mean").item())
count = fabric.all_reduce(torch.tensor([7]), reduce_op="mean")
found += [fabric.all_gather(torch.tensor(fabric.global_rank)).tolist(), fabric.broadcast({"from": fabric.global_rank}), count.tolist()]
if fabric.global_rank == 0:
    print("found", type(dist.group.WORLD).__name__, found)
dist.barrier()
"""


METRICS = """
import torch, torch.distributed as dist, torchmetrics
from torchmetrics.classification import BinaryAUROC, MulticlassConfusionMatrix
dist.init_process_group("gloo")
rank, found = dist.get_rank(), []
random = torch.Generator().manual_seed(rank)
confusion, curve, values = MulticlassConfusionMatrix(5), BinaryAUROC(), torchmetrics.CatMetric()
for _ in range(2 + rank):
    confusion.update(torch.randn(7 + rank, 5, generator=random), torch.randint(0, 5, (7 + rank,), generator=random))
    curve.update(torch.rand(9, generator=random), torch.randint(0, 2, (9,), generator=random))
    values.update(torch.arange(3 + 2 * rank).float())
found = [metric.compute().tolist() for metric in (confusion, curve, values)]
if rank == 0:
    print("found", type(dist.group.WORLD).__name__, found)
dist.barrier()
dist.destroy_process_group()
"""

# DeepSpeed is no requirement of the tests: its source needs torch to build (pip install --no-build-isolation).
ZERO = """
import os
os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed, torch, torch.distributed as dist
from deepspeed.pipe import PipelineModule
from torch import nn
deepspeed.init_distributed(dist_backend="gloo")
found = []
def layers():
    torch.manual_seed(0)
    return [nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)]
def started(model, **more):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    config = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "zero_allow_untested_optimizer": True, **more}
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
for stage in range(4):
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    engine = started(nn.Sequential(*layers()), gradient_clipping=0.1, zero_optimization=zero)
    random = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(6):
        loss = engine(torch.randn(4, 6, generator=random)).square().mean()
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
engine = started(PipelineModule(layers=layers(), loss_fn=nn.MSELoss(), num_stages=2))
random = torch.Generator().manual_seed(0)
def batches():
    while True:
        yield torch.randn(4, 6, generator=random), torch.randn(4, 4, generator=random)
found += [engine.train_batch(batches()).item() for _ in range(3)]
if dist.get_rank() == 0:
    print("found", type(dist.group.WORLD).__name__, found)
dist.barrier()
dist.destroy_process_group()
"""


def needed(module):
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"{module} is not installed")


def torchrun(program, folder, as_gloo):
    folder.mkdir()
    environment = {
        **os.environ,
        "WEFT_AS_GLOO": str(int(as_gloo)),
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
    }
    launch = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, str(program)], cwd=folder, env=environment, capture_output=True, text=True, timeout=250
    )
    assert succeeded(done, over_gloo=not as_gloo), done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


@needed("accelerate")
@pytest.mark.parametrize("script", ["test_script", "test_ops", "test_sync"])
def test_what_accelerate_checks_holds(script, tmp_path):
    folder = Path(importlib.util.find_spec("accelerate").origin).parent / "test_utils" / "scripts"
    torchrun(folder / f"{script}.py", tmp_path / "over_weft", True)


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(TRAINER, id="transformers.Trainer", marks=needed("transformers")),
        pytest.param(SHARDED, id="FSDP2, DTensor and checkpoints"),
        pytest.param(FABRIC, id="Lightning Fabric", marks=needed("lightning_fabric")),
        pytest.param(METRICS, id="torchmetrics", marks=needed("torchmetrics")),
        pytest.param(ZERO, id="DeepSpeed", marks=needed("deepspeed")),
    ],
)
def test_a_program_prints_the_same_numbers(program, tmp_path):
    path = tmp_path / "program.py"
    path.write_text(program)
    lines = [torchrun(path, tmp_path / f"over_{name}", name == "weft") for name in ("gloo", "weft")]
    over_gloo, over_weft = ([line for line in text.splitlines() if line.startswith("found")] for text in lines)
    assert over_gloo[0].split()[1] == "ProcessGroup" and over_weft[0].split()[1] == "WeftProcessGroup"
    assert over_gloo[0].split()[2:] == over_weft[0].split()[2:]
