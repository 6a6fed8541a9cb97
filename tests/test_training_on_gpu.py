"""Training split in every way on CUDA, ranks that share one GPU: losses and parameters are those of one process."""

import pytest
import torch

import weft
from weft.testing.models import LLAMA_PLAN, Llama, loss_of
from weft.testing.ranks import SHARED_GPU, from_file, run_ranks

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
STEPS, BATCH, SEQUENCE = 4, 8, 32
PLAN = {"plan": LLAMA_PLAN}
SPLITS = {
    "tp": ({"tp": 2}, PLAN),
    "tp along the sequence": ({"tp": 2}, {"sequence_parallel": True}),
    "dp": ({"dp": 2}, {}),
    "cp": ({"cp": 2}, {"context": "all_gather"}),
    "units": ({"dp": 2}, {"invariant": 4}),
}


class EvenLlama(Llama):
    KV_HEADS, HIDDEN, WORDS = 4, 32, 40  # so that four units are equal


def model_and_batch():
    torch.manual_seed(0)
    model = EvenLlama(4).to(DEVICE)
    return model, torch.randint(EvenLlama.WORDS, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(1)).to(
        DEVICE
    )


def losses_of_steps(model, tokens):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for _ in range(STEPS):
        loss = loss_of(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    return losses


def trained(split):
    """Return the losses of all ranks' tokens, and the parameters after the steps by name."""
    sizes, options = split
    model, tokens = model_and_batch()
    mesh = weft.init_mesh(**sizes, device_type=DEVICE.type)
    model = weft.parallelize(model, mesh, **options)
    mine = tokens.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]
    losses = losses_of_steps(model, mine)
    return losses, {name: value.cpu() for name, value in weft.full_state_dict(model).items()}


def check(rank, name):
    model, tokens = model_and_batch()
    expected = losses_of_steps(model, tokens)
    losses, state = trained(SPLITS[name])
    if "dp" not in SPLITS[name][0]:  # there a rank has the loss of its part
        torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
    for key, value in state.items():
        torch.testing.assert_close(value, model.state_dict()[key].cpu(), rtol=1e-3, atol=1e-5)
    weft.check_waits()


def refused(rank):
    """A pipeline needs messages, and NCCL's ranks share no GPU."""
    model, _ = model_and_batch()
    mesh = weft.init_mesh(pp=2, device_type=DEVICE.type)
    with pytest.raises(RuntimeError, match="gloo sends no CUDA tensors"):
        weft.parallelize(model, mesh, pipeline={"microbatches": 4, "loss": loss_of})


def bits(rank, sizes):
    torch.use_deterministic_algorithms(True)
    return trained((sizes, {**PLAN, "invariant": 4}))[1]


def on_one_gpu(case, *given, world=2):
    environment = {SHARED_GPU: "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # for torch's deterministic algorithms
    options = {"backend": "cpu:weft,cuda:gloo", "environment": environment, "timeout_s": 100}
    return run_ranks(from_file(case), world, *given, start="spawn", group_timeout_s=60, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SPLITS)
def test_on_one_gpu(name):
    on_one_gpu(check, name)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [{"tp": 2}, {"dp": 2}], ids=str)
def test_units_have_the_same_bits_on_every_mesh(sizes):
    (alone,) = on_one_gpu(bits, {}, world=1)
    for state in on_one_gpu(bits, sizes):
        for name, value in state.items():
            assert torch.equal(value, alone[name]), name


@pytest.mark.gpu
def test_messages_over_gloo_are_refused():
    on_one_gpu(refused)
