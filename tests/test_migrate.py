"""docs/migrate.md: its scripts give the same weights before and after, and whatever is forgotten is refused or right."""

import os
import re
import socket
from pathlib import Path

import pytest
import torch
from torch import nn

from weft.testing.ranks import try_ranks

PAGE = Path(__file__).parent.parent / "docs" / "migrate.md"
YOURS = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
torch.set_default_dtype(torch.float64)
torch.manual_seed(1)
dataset = TensorDataset(torch.randn(32, 8), torch.randn(32, 8))
loss_of = nn.functional.mse_loss
def Model():
    return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
"""
OF_TRAINER = """
import torch
import transformers
config = transformers.LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
)
def Model():
    return transformers.LlamaForCausalLM(config)
generator = torch.Generator().manual_seed(1)
dataset = [{"input_ids": row, "labels": row} for row in torch.randint(64, (32, 6), generator=generator)]
"""
OF_LIGHTNING = """
import pytorch_lightning
class Module(pytorch_lightning.LightningModule):
    def __init__(self, model, loss_of):
        super().__init__()
        self.model, self.loss_of = model, loss_of
    def training_step(self, batch, _):
        return self.loss_of(self.model(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)
"""
# Of each section: what is yours, ranks before and after, and what may be forgotten: text after -> instead.
COUNTED = "DistributedSampler(dataset, num_replicas=dp.size(), rank=dp.get_local_rank(), shuffle=False)"
UNCOUNTED = "DistributedSampler(dataset, shuffle=False)"
WHOLE = "state = weft.full_state_dict(model)"
SCRIPTS = {
    "A plain loop": (
        YOURS,
        1,
        4,
        {
            "a sampler over all ranks": (COUNTED, UNCOUNTED),
            "no sampler": ("batch_size=8 // dp.size(), sampler=sampler", "batch_size=8"),
            "shards in the file": (WHOLE, "state = model.state_dict()"),
            "saved by every rank": ("if torch.distributed.get_rank() == 0:", "if True:"),
            "DistributedDataParallel as well": (
                "model = weft.parallelize(model, mesh)",
                'model = nn.parallel.DistributedDataParallel(weft.parallelize(model, mesh["tp"]))',
            ),
            "no group": (
                "model = weft.parallelize(model, mesh)",
                'model = weft.DataParallel(weft.parallelize(model, mesh["tp"]))',
            ),
            "initialised after": (
                "model = weft.parallelize(model, mesh)",
                "model = weft.parallelize(model, mesh)\nfor p in model.parameters(): nn.init.normal_(p)",
            ),
            "Muon": (
                "optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)",
                "optimizer = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.01)",
            ),
        },
    ),
    "DistributedDataParallel": (
        YOURS,
        2,
        4,
        {
            "a sampler over all ranks": (COUNTED, UNCOUNTED),
            "no_sync": ("if last else model.no_sync()", "if True else None"),
            "shards in the file": ("torch.save(state", "torch.save(model.module.state_dict()"),
            "a seed for each rank": ("torch.manual_seed(0)", "torch.manual_seed(dist.get_rank())"),
        },
    ),
    "FSDP2": (
        YOURS,
        2,
        4,
        {
            "weft's clipping": (
                "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
                "weft.clip_grad_norm_(model, 1.0)",
            ),
            "the optimizer's state alone": (
                "model = weft.parallelize(Model(), mesh, zero=3)",
                "model = weft.parallelize(Model(), mesh, zero=1)",
            ),
            "a sampler over all ranks": (COUNTED, UNCOUNTED),
        },
    ),
    "accelerate": (
        YOURS,
        1,
        2,
        {
            "prepare": (
                "for inputs, targets in loader:",
                "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)\nfor inputs, targets in loader:",
            ),
            "prepare of the loader": (
                "for inputs, targets in loader:",
                "loader = accelerator.prepare(loader)\nfor inputs, targets in loader:",
            ),
            "accelerate's clipping": ("torch.nn.utils.clip_grad_norm_(", "accelerator.clip_grad_norm_("),
        },
    ),
    "Trainer": (
        OF_TRAINER,
        1,
        2,
        {
            "plain arguments": (
                'settings(mesh, output_dir="out", max_steps=4, max_grad_norm=1.0, report_to="none")',
                'dict(args=__import__("transformers").TrainingArguments(output_dir="out", max_steps=4, use_cpu=True))',
            ),
        },
    ),
    "Lightning": (YOURS + OF_LIGHTNING, 2, 2, {}),
}


def programs(section):
    """The script before, and after."""
    diff = re.search(rf"^## {section}$.*?^```diff\n(.*?)^```", PAGE.read_text(), re.M | re.S)[1]
    lines = [(line[:1], line[1:]) for line in diff.splitlines()]
    return tuple("\n".join(text for mark, text in lines if mark != other) for other in "+-")


def run_program(rank, text, world, port, folder):
    os.chdir(folder)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), GROUP_RANK="0", TORCHELASTIC_RUN_ID="test")
    if world == 1:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
    exec(compile(text, "script", "exec"), {"__name__": "__main__"})


def run(text, world, folder):
    """What went wrong; "" if nothing did, and there is model.pt."""
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    outcomes = try_ranks(run_program, world, text, world, port, folder, backend=None, timeout_s=120)
    return "\n".join(outcome.traceback or f"exit code {outcome.exit_code}" for outcome in outcomes if outcome.exit_code)


def weights(folder):
    file = folder / "model.pt"
    if file.exists():
        return torch.load(file)
    return torch.load(folder / "model.ckpt", weights_only=False)["state_dict"]


def same(one, other):
    return one.keys() == other.keys() and all(
        one[name].shape == other[name].shape and torch.allclose(one[name], other[name], rtol=1e-4, atol=1e-5)
        for name in one
    )


CASES = [
    pytest.param(section, mistake, id=f"{section}: {mistake or 'as it stands'}")
    for section, (_, _, _, mistakes) in SCRIPTS.items()
    for mistake in (None, *mistakes)
]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The weights that a section's script gave before."""
    known = {}

    def of(section):
        if section not in known:
            yours, world, _, _ = SCRIPTS[section]
            folder = tmp_path_factory.mktemp("before") / "run"
            assert not (wrong := run(yours + programs(section)[0], world, folder)), wrong
            known[section] = weights(folder)
        return known[section]

    return of


@pytest.mark.slow("docs")
@pytest.mark.parametrize(("section", "mistake"), CASES)
def test_a_script_trains_the_same_model_or_is_refused(section, mistake, expected, tmp_path):
    if section == "Lightning":
        pytest.importorskip("pytorch_lightning", reason="pytorch-lightning is not installed")
    yours, _, world, mistakes = SCRIPTS[section]
    text = programs(section)[1]
    if mistake is not None:
        right, instead = mistakes[mistake]
        assert text.count(right) == 1, text
        text = text.replace(right, instead)
    wrong = run(yours + text, world, tmp_path / "run")
    if mistake is None:
        assert not wrong, wrong
    if not wrong:
        found = weights(tmp_path / "run")
        assert same(found, expected(section)) or (mistake and shapes_differ(found, expected(section)))
    else:
        assert "weft" in wrong or "ValueError" in wrong, wrong  # words, and no accident


def shapes_differ(one, other):
    """A file that the unsplit model does not take."""
    plain = nn.ParameterDict({name.replace(".", "_"): x for name, x in other.items()})
    try:
        plain.load_state_dict({name.replace(".", "_"): x for name, x in one.items()})
    except RuntimeError:
        return True
    return False
