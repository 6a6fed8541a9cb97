"""The code that `weft plan` prints trains the model as the plain one is trained."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import weft
from weft.nn import Experts
from weft.testing.models import Llama
from weft.testing.ranks import run_ranks
from weft.tools.planner import Hardware, Job, Layout, Model
from weft.tools.planner.layout_search import Plan

BATCH, SEQUENCE = 8, 12
JOB = Job(
    Model(4, 24, Llama.HIDDEN, 6, Llama.WORDS, kv_heads=3),
    Hardware("cpu", 1e12, {"fp32": 1e9}, 1e9, 1e9, 1e9),
    SEQUENCE,
    BATCH,
    "fp32",
    "sgd",
)
PAIR = Layout(micro_batch=2)
PLANS = {
    2: [
        replace(PAIR, dp=2),
        replace(PAIR, dp=2, zero=1, recompute="full"),
        replace(PAIR, cp=2, zero=1),
        replace(PAIR, dp=2, zero=2),
        replace(PAIR, dp=2, zero=3, recompute="full"),
        replace(PAIR, cp=2, zero=3),
        replace(PAIR, tp=2, recompute="selective"),
        replace(PAIR, pp=2),
        replace(PAIR, pp=2, schedule="interleaved", chunks=2, recompute="selective"),
        replace(PAIR, pp=2, schedule="zero-bubble"),
        replace(PAIR, pp=2, schedule="gpipe"),
    ],
    4: [
        replace(PAIR, dp=2, tp=2, zero=1),
        replace(PAIR, dp=2, cp=2, zero=1, micro_batch=1),
        replace(PAIR, dp=2, tp=2, zero=2, micro_batch=1),
        replace(PAIR, dp=2, cp=2, zero=3, micro_batch=1),
        replace(PAIR, pp=2, dp=2, zero=1, recompute="full"),
        replace(PAIR, pp=2, tp=2, micro_batch=1),
        replace(PAIR, pp=2, cp=2, micro_batch=4),
    ],
}


class MixtureOfExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(24, 5), Experts(5, 24, 7)

    def forward(self, x):
        weights, index = self.router(x).softmax(-1).topk(2, -1)
        return self.experts(x, index, weights)


class Mixture(Llama):
    def __init__(self, blocks):
        super().__init__(blocks)
        for block in self.blocks:
            block.mlp = MixtureOfExperts()


MIXTURE = replace(JOB, model=Model(4, 24, 7, 6, Llama.WORDS, kv_heads=3, experts=5, experts_per_token=2))
PLANS_OF_MIXTURES = {
    2: [replace(PAIR, dp=2, ep=2, zero=1)],
    4: [
        replace(PAIR, dp=4, ep=2),
        replace(PAIR, dp=2, tp=2, ep=2, zero=1, recompute="selective"),
        replace(PAIR, pp=2, dp=2, ep=2),
    ],
}


def train(rank, layouts, kind=Llama, job=JOB):
    torch.manual_seed(0)
    plain = kind(4)
    tokens, targets = torch.randint(Llama.WORDS, (2, BATCH, SEQUENCE))
    F.cross_entropy(plain(tokens).flatten(0, 1), targets.flatten()).backward()
    for layout in layouts:
        names = {"model": copy.deepcopy(plain)}
        names["model"].zero_grad()
        code = Plan(job, layout, None, None).code.replace("lr=1e-3", "lr=1.0")
        exec(compile(code, str(layout), "exec"), names)
        place = names["mesh"]["dp"].get_local_rank()
        names["step"](*(x.chunk(layout.dp)[place] for x in (tokens, targets)))
        for name, parameter in names["model"].named_parameters():
            before = plain.get_parameter(name.removeprefix("module."))
            expected, shard = before.detach() - before.grad, weft.shard_of(parameter)
            expected = expected if shard is None else shard.take(expected)
            found = parameter.detach()
            torch.testing.assert_close(
                found.full_tensor() if isinstance(found, DTensor) else found,
                expected,
                msg=lambda text, where=(layout, name): f"{where}: {text}",
            )


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param(ranks, marks=pytest.mark.slow("pytorch_ext/tools/planner")) if ranks > 2 else ranks
        for ranks in PLANS
    ],
)
def test_the_code_of_a_plan_takes_the_plain_step(ranks):
    run_ranks(train, ranks, PLANS[ranks], timeout_s=500)


@pytest.mark.slow("pytorch_ext/tools/planner", "pytorch_ext/pipeline")
@pytest.mark.parametrize("ranks", PLANS_OF_MIXTURES)
def test_so_does_the_code_of_a_plan_with_experts(ranks):
    run_ranks(train, ranks, PLANS_OF_MIXTURES[ranks], Mixture, MIXTURE, timeout_s=500)
