"""The documentation: its blocks of Python run, its commands can be given, its messages are the package's."""

import ast
import contextlib
import importlib
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
import transformers

from weft import cli
from weft.bench.tables import written
from weft.tensor_parallel.auto.example_inputs import calls
from weft.tensor_parallel.auto.plan import automatic_plan
from weft.tensor_parallel.auto.propagation import Flow
from weft.tensor_parallel.auto.search import runs_of
from weft.testing.ranks import run_ranks

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
IMPORTS = "import torch\nimport weft\nfrom torch import nn\n"
MODEL = "torch.manual_seed(0)\nmodel = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 5))\n"
BATCH = "inputs, targets = torch.randn(8, 6), torch.arange(8) % 5\n"
LLAMA = """
from weft.testing.models import LLAMA_PLAN, Llama
torch.manual_seed(0)
model = Llama(4)
tokens = torch.randint(Llama.WORDS, (2, 12))
labels = inputs = targets = tokens
def loss(logits, targets): return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""
SAVED = """
import tempfile, os
import torch.distributed as dist
folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)
os.chdir(folder[0])
"""
HUGGING_FACE = """
import transformers
config = transformers.LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
)
torch.manual_seed(0)
model = transformers.LlamaForCausalLM(config)
data = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(64, (32, 6))]
"""
LAUNCHED = """
rank = str(dist.get_rank())
os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", OMP_NUM_THREADS="1")
"""
TORCHTITAN = (  # which is not installed here: a layer with its forward
    "from torchtitan.models.common.linear import Linear, ScaledBiasRowwiseLinear\n",
    """
class Linear(nn.Linear):
    Config = dict
    tp_degree = 1

    def __init__(self, sizes):
        super().__init__(**sizes)

    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias / self.tp_degree)


ScaledBiasRowwiseLinear = Linear
""",
)
LIGHTNING = """
os.environ.update(GROUP_RANK="0", TORCHELASTIC_RUN_ID="test", MASTER_ADDR="localhost", MASTER_PORT="1")
import pytorch_lightning

class Module(pytorch_lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def training_step(self, batch, _):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

module = Module()
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 3)), batch_size=2)
"""
PARTS = """
head_dim, mesh = 4, weft.init_mesh(tp=2)
attention = nn.ModuleDict({"query": nn.Linear(8, 8), "output": nn.Linear(8, 8)})
stem = {"conv1": nn.Conv2d(3, 4, 1), "norm1": nn.BatchNorm2d(4), "conv2": nn.Conv2d(4, 4, 1)}
torch.manual_seed(0)
model = nn.ModuleDict({
    "layers": nn.ModuleList([nn.ModuleDict({"attention": attention})]),
    "encoder": nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 16)]),
    "stem": nn.ModuleDict(stem),
})
"""
CONTEXT = """
class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.qkv, self.logits = nn.Embedding(9, 8), nn.Linear(8, 24), nn.Linear(8, 9)
    def forward(self, tokens):
        q, k, v = (x.unflatten(-1, (2, 4)).transpose(1, 2) for x in self.qkv(self.embedding(tokens)).chunk(3, -1))
        y = weft.context_attention(q, k, v, group=mesh["cp"], causal=True)
        return self.logits(y.transpose(1, 2).flatten(-2))
torch.manual_seed(0)
model = Decoder()
tokens = labels = torch.randint(9, (2, 12))
tokens_of_all_replicas = 2 * labels.numel()
"""
# What stands before a page's blocks, which follow one another in one program, and on how many ranks they run.
# What a block needs to run here is put in its place: (page, number of the block) -> (ranks, before, replacements).
BLOCKS = {
    ("README.md", 0): (2, "", {}),
    ("checkpoints.md", 0): (
        2,
        SAVED
        + MODEL
        + """
model = weft.DataParallel(model)
optimizer, step, steps = torch.optim.AdamW(model.parameters()), 3, 4
schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
nn.functional.cross_entropy(model(torch.randn(8, 6)), torch.arange(8) % 5).backward()
optimizer.step()
""",
        {},
    ),
    ("data_parallel.md", 0): (
        2,
        MODEL + BATCH + "batches, loss = [(inputs, targets)] * 2, nn.functional.cross_entropy\n",
        {},
    ),
    ("data_parallel.md", 1): (2, MODEL, {}),
    ("data_parallel.md", 2): (4, MODEL, {}),
    ("data_parallel.md", 3): (4, CONTEXT, {}),
    ("data_parallel.md", 4): (
        2,
        MODEL
        + """
from torch.distributed.fsdp import fully_shard
group = torch.distributed.group.WORLD
ddp = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
fsdp_module = fully_shard(model)
""",
        {},
    ),
    ("compared.md", 0): (2, SAVED + LAUNCHED, {'dist.init_process_group("gloo")\n': ""}),
    ("compared.md", 1): (2, "compared.md", {}),
    ("compared.md", 2): (2, "compared.md", {}),
    ("compared.md", 3): (1, "", {TORCHTITAN[0]: TORCHTITAN[1]}),
    ("compared.md", 4): (2, "", {'dist.init_process_group("gloo")\n': ""}),
    ("compared.md", 5): (2, "import torch.distributed as dist\n", {}),
    ("compared.md", 6): (2, 'import torch.distributed as dist\nmesh = dist.init_device_mesh("cpu", (2,))\n', {}),
    ("fine_tuning.md", 0): (
        2,
        SAVED + HUGGING_FACE + "import peft\ntokens = torch.randint(64, (2, 6))\n",
        {},
    ),
    ("fine_tuning.md", 1): (
        2,
        SAVED
        + HUGGING_FACE
        + "mesh = weft.init_mesh(tp=2)\nif dist.get_rank() == 0:\n    model.save_pretrained('.')\ndist.barrier()\n",
        {'"path/of/the/model"': '"."'},
    ),
    ("fine_tuning.md", 2): (
        2,
        HUGGING_FACE + "tokens = torch.randint(64, (2, 6))\nmodel = weft.parallelize(model, weft.init_mesh(tp=2))\n",
        {},
    ),
    ("fine_tuning.md", 3): (2, "", {}),
    ("first_hour.md", 0): (2, "", {}),
    ("first_hour.md", 1): (2, "", {}),
    ("first_hour.md", 2): (2, "first_hour.md", {}),
    ("debugging.md", 0): (
        1,
        """
import tempfile
folder = tempfile.mkdtemp()
def train():
    torch.manual_seed(0)
    nn.Linear(4, 2)(torch.ones(3, 4)).sum().backward()
for name in ("plain", "reordered"):
    with weft.record(f"{folder}/{name}", reordered=name == "reordered"):
        train()
""",
        {'"recordings': 'folder + "'},
    ),
    ("debugging.md", 1): (
        1,
        "import tempfile\ndef train():\n    nn.Linear(4, 2)(torch.ones(3, 4)).sum().backward()\n",
        {'"run.json"': 'tempfile.mkdtemp() + "/run.json"'},
    ),
    ("forward.md", 0): (4, LLAMA, {}),
    ("invariance.md", 0): (4, MODEL + BATCH + "from torch.nn import functional as F\n", {}),
    ("invariance.md", 1): (4, MODEL + BATCH + "from torch.nn import functional as F\n", {}),
    ("invariance.md", 2): (
        4,
        "import transformers\nsizes = dict(hidden_size=32, intermediate_size=32, num_attention_heads=8, vocab_size=24)\n"
        "model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=2, **sizes))\n",
        {},
    ),
    ("invariance.md", 3): (
        4,
        MODEL + BATCH + "import copy\nfrom torch import distributed as dist\n"
        "from torch.distributed.device_mesh import init_device_mesh\n",
        {},
    ),
    ("large_batches.md", 0): (4, MODEL + "mesh, plan = weft.init_mesh(dp=2, tp=2), {'0': 'column', '2': 'row'}\n", {}),
    ("large_batches.md", 1): (1, MODEL + "matrices, embeddings_and_vectors = [model[0].weight], [model[0].bias]\n", {}),
    ("large_batches.md", 2): (2, MODEL + "mesh = weft.init_mesh(dp=2)\n", {}),
    ("paradigms.md", 0): (8, LLAMA, {}),
    ("pipeline.md", 0): (
        4,
        "torch.manual_seed(0)\nmodel = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))\n" + BATCH,
        {},
    ),
    ("pipeline.md", 1): (1, "tokens_in_batch = 12\n", {}),
    ("pipeline.md", 2): (
        2,
        "import transformers\nsizes = dict(hidden_size=16, intermediate_size=32, num_attention_heads=4, vocab_size=17)\n"
        "model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=2, **sizes))\n"
        "labels = torch.randint(17, (8, 5), generator=torch.Generator().manual_seed(0))\nlabels[0, :3] = -100\n"
        'batch = {"input_ids": labels.clamp(min=0), "labels": labels}\nmesh = weft.init_mesh(pp=2)\n',
        {},
    ),
    ("pipeline.md", 3): (
        8,
        LLAMA
        + "tokens = torch.randint(Llama.WORDS, (16, 12))\ninputs = targets = tokens\noptimizer = torch.optim.SGD(model.parameters())\n",
        {},
    ),
    ("pipeline.md", 4): (4, SAVED + "pipeline.md", {}),
    ("pipeline.md", 5): (
        2,
        MODEL + BATCH + "import copy\nwhole, loss = copy.deepcopy(model), nn.functional.cross_entropy\n",
        {'"cuda:0", "cuda:1"': '"cpu", "cpu"', "LayerSplit(model, weft": "LayerSplit(whole, weft"},
    ),
    ("planner.md", 0): (1, "", {}),
    ("sequence_parallel.md", 0): (
        2,
        "length = 12\ntokens = torch.arange(24).view(2, length)\nq, k, v = torch.randn(3, 2, 4, 6, 8)\n",
        {},
    ),
    ("sequence_parallel.md", 1): (4, LLAMA, {"plan={...}": "plan=LLAMA_PLAN"}),
    ("sequence_parallel.md", 2): (2, LLAMA + "mesh = weft.init_mesh(cp=2)\n", {}),
    ("tensor_parallel.md", 0): (2, PARTS, {}),
    ("tensor_parallel.md", 1): (1, "F = 5\n", {}),
    ("tensor_parallel.md", 2): (1, "head_dim, n_heads, n_kv_heads = 4, 4, 2\n", {}),
    ("tensor_parallel.md", 3): (1, "", {}),
    ("tensor_parallel.md", 4): (2, "", {}),
    ("automatic_planner.md", 0): (1, "", {}),
    ("automatic_plans.md", 0): (1, LLAMA, {}),
    ("automatic_plans.md", 1): (
        2,
        SAVED
        + HUGGING_FACE
        + "mesh = weft.init_mesh(tp=2)\nif dist.get_rank() == 0:\n    model.save_pretrained('.')\ndist.barrier()\n",
        {'"path/of/the/model"': '"."'},
    ),
    ("experts.md", 0): (2, HUGGING_FACE, {}),
    ("experts.md", 1): (
        2,
        "mesh = weft.init_mesh(tp=2)\nrouter, x = nn.Linear(64, 8), torch.randn(3, 64)\n",
        {},
    ),
    ("experts.md", 2): (
        4,
        "model = nn.ModuleDict({'experts': weft.nn.Experts(4, 8, 8)})\n",
        {"parallelize(model, mesh)": "parallelize(model, mesh, plan={'experts': 'experts'})"},
    ),
    ("experts.md", 3): (
        2,
        "mesh = weft.init_mesh(dp=2)\nrouter, x = nn.Linear(64, 8), torch.randn(3, 64)\n"
        "scores = router(x).softmax(-1)\nindex = scores.topk(2).indices\n",
        {},
    ),
    ("adapters.md", 0): (
        2,
        """
block = nn.ModuleDict({"up": nn.Linear(6, 7), "down": nn.Linear(7, 6)})
model = nn.ModuleDict({"table": nn.Embedding(9, 6), "blocks": nn.ModuleList([block]), "head": nn.Linear(6, 9)})
""",
        {},
    ),
    ("adapters.md", 1): (1, "", {}),
    ("adapters.md", 2): (2, SAVED + HUGGING_FACE, {}),
    ("adapters.md", 3): (2, SAVED + LAUNCHED + HUGGING_FACE, {}),
    ("adapters.md", 4): (2, HUGGING_FACE + "mesh = weft.init_mesh(tp=2)\n", {}),
    ("adapters.md", 5): (4, HUGGING_FACE, {}),
    ("adapters.md", 6): (2, SAVED + LAUNCHED + LIGHTNING, {}),
}


def blocks_of(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)


def program(page, number):
    """A block with what stands before it; "page.md" there are all blocks before this one."""
    _, before, replacements = BLOCKS[page.name, number]
    if page.name in before:
        before = before.replace(
            page.name,
            "\n".join(
                program(page, n) for n in range(number) if BLOCKS[page.name, n][0] == BLOCKS[page.name, number][0]
            ),
        )
    block = blocks_of(page)[number]
    for text, instead in replacements.items():
        assert text in block, f"{page.name}, block {number}, has no {text!r} any more"
        block = block.replace(text, instead)
    return IMPORTS + before + block


def run_all(rank, programs):
    for name, text in programs:
        torch.manual_seed(0)
        try:
            exec(compile(text, name, "exec"), {"__name__": "__main__"})
        except Exception as error:
            raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error
    return len(programs)


@pytest.mark.parametrize("world", sorted({world for world, _, _ in BLOCKS.values()}))
def test_every_block_of_python_runs(world):
    pages = {page.name: page for page in PAGES}
    programs = [
        (f"{name} block {number}", program(pages[name], number))
        for (name, number), (ranks, _, _) in BLOCKS.items()
        if ranks == world
    ]
    assert run_ranks(run_all, world, programs, timeout_s=200) == [len(programs)] * world


def test_no_block_of_python_is_left_out():
    assert {(page.name, number) for page in PAGES for number in range(len(blocks_of(page)))} == set(BLOCKS)


COMMANDS = [
    (page, shlex.split(line.split("  #")[0]))
    for page in [*PAGES, ROOT / "bench" / "README.md"]
    for line in re.findall(r"^    ((?:weft|torchrun|python|make|pip) .*)$", page.read_text(), re.M)
]


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=lambda value: " ".join(value) if type(value) is list else "")
def test_every_command_can_be_given(page, words, tmp_path, monkeypatch, capsys):
    """Plans are made; of what takes long, the words are understood."""
    program, *rest = words
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert rest[0] in targets
    elif program == "weft" and rest[0] == "plan":
        monkeypatch.chdir(tmp_path)
        (tmp_path / "path/to").mkdir(parents=True)
        (tmp_path / "path/to/config.json").write_text(
            '{"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, '
            '"intermediate_size": 1024, "vocab_size": 1000, "max_position_embeddings": 4096}'
        )
        shutil.copy(next((ROOT / "bench/results").rglob("hw.json")), "hw.json")
        shutil.copy(ROOT / "pytorch_ext/tools/planner/data/published_training_runs.csv", "FILE.csv")
        assert cli.main(rest) == 0, capsys.readouterr()
    elif program == "weft":
        cli.make_parser().parse_args(rest)
    elif program != "pip":
        script = next(word for word in rest if word.endswith(".py"))
        given = rest[rest.index(script) + 1 :]
        text = (ROOT / script).read_text()
        assert all(f'"{word}"' in text for word in given if word.startswith("--"))


def test_every_message_that_is_explained_is_one_of_the_package():
    sources = [path.read_text() for folder in ("csrc", "pytorch_ext", "kernels") for path in (ROOT / folder).rglob("*")
               if path.suffix in (".py", ".cpp", ".h")]  # fmt: skip
    # Texts that go on in the next line of the source.
    texts = re.sub(r"""["']\s*\n\s*f?["']""", "", "\n".join(sources))
    explained = [
        quoted
        for line in (ROOT / "docs" / "troubleshooting.md").read_text().splitlines()
        if line.startswith("| ")
        for quoted in re.findall(r'"([^"]+)"', line.split("|")[1])
    ]
    assert len(explained) > 20
    assert [quoted for quoted in explained if quoted not in texts] == []


def test_the_attention_block_that_is_followed_is_what_the_passes_find():
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=40,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = transformers.LlamaModel(config)
    runs = runs_of(model, calls(model))
    (run, _) = (run for run in runs if any(node.op == "attention" for node in run.whole.nodes))
    found = Flow(run.twin, run.whole, 2).find()
    block, rows = "layers.0.self_attn", []
    for node in run.whole.nodes:
        if not f"{node.where}.".startswith(f"{block}.") or node.op not in ("layer", "attention", "view", "transpose"):
            continue
        layout = found.layouts.get(node.output)
        name = f"layer `{node.layer.rpartition('.')[2]}`" if node.layer else node.op
        place = ("whole", "", "")
        if layout is not None:
            place = (f"`{layout.axis.layer.rpartition('.')[2]}`", str(layout.dim), str(layout.units))
        rows.append((name, ", ".join(map(str, node.output.shape)), *place))
    page = (ROOT / "docs" / "automatic_planner.md").read_text()
    table = page.partition("<!-- trace: self_attn -->")[2].partition("\n\n")[0].strip().splitlines()[2:]
    assert [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in table] == rows

    (said,) = blocks_of(ROOT / "docs" / "automatic_planner.md")
    plan = automatic_plan(model, 2).plan
    assert ast.literal_eval(said) == {name: entry for name, entry in plan.items() if name.startswith(block)}


def is_there(name):
    """Of weft, a module in it, or what one of these has."""
    here = importlib.import_module("weft")
    for part in name.split(".")[1:]:
        if not hasattr(here, part):
            with contextlib.suppress(ImportError):
                importlib.import_module(f"{here.__name__}.{part}")
        if not hasattr(here, part):
            return False
        here = getattr(here, part)
    return True


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "CHANGELOG.md", ROOT / "bench" / "README.md"], ids=lambda page: str(page.relative_to(ROOT))
)
def test_every_name_of_weft_is_there(page):
    names = set(re.findall(r"\bweft(?:\.[A-Za-z_]\w*)+", page.read_text()))
    assert sorted(name for name in names if not is_there(name)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_to_a_file_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_measured_table_is_that_of_the_committed_results(page):
    """`make tables` writes them."""
    assert written(page.read_text(), ROOT) == page.read_text()
