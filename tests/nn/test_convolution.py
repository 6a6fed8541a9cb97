"""Split convolutions and the norms between them against torch's own: output, every gradient and running statistics."""

import copy
import re
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from layer_gradients import gradients_of
from torch import nn

import weft
import weft.nn
from weft.testing.ranks import run_ranks

WORLDS = [1, 2, 3]


@dataclass(frozen=True)
class Case:
    inputs: int
    outputs: int
    kernel: int | tuple = 3
    options: tuple = ()
    size: tuple = (2, 9, 8)  # batch, and one to three dimensions of space

    @property
    def name(self):
        return f"Conv{len(self.size) - 1}d"


PLAIN = [
    Case(5, 7),
    Case(4, 3, (1, 3), (("stride", (2, 1)), ("padding", (0, 2)), ("bias", False))),
    Case(3, 5, (3, 2), (("padding", "same"), ("dilation", 2))),
    Case(6, 4, 2, (("padding", "valid"), ("padding_mode", "reflect"))),
    Case(3, 4, (2, 3), (("padding", "same"), ("padding_mode", "circular"))),
    Case(3, 8, 3, (("padding", (2, 1)), ("padding_mode", "replicate"), ("stride", 2))),
    Case(5, 4, 3, (("padding", "same"), ("padding_mode", "reflect")), (2, 9)),
    Case(4, 5, 4, (("stride", 2), ("padding", 1)), (2, 11)),
    Case(3, 5, (1, 2, 3), (("padding", (0, 1, 2)), ("padding_mode", "circular")), (2, 4, 3, 5)),
    Case(4, 3, 2, (("stride", (1, 2, 1)), ("bias", False)), (2, 3, 4, 5)),
]
GROUPED = [
    Case(6, 6, 3, (("groups", 6), ("padding", 1))),  # depthwise
    Case(10, 15, 3, (("groups", 5), ("padding", (1, 2)), ("padding_mode", "reflect"))),
    Case(6, 12, 1, (("groups", 3), ("bias", False))),
    Case(6, 6, 3, (("groups", 6), ("padding", 2)), (2, 7)),
    Case(6, 9, 2, (("groups", 3),), (2, 3, 4, 3)),
]


def close(found, expected, what):
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12, msg=lambda text: f"{what}: {text}")


def take(parameter, whole):
    shard = weft.shard_of(parameter)
    return whole if shard is None else shard.take(whole)


def check_layers(rank, dtype):
    world = dist.get_world_size()
    dist.group.WORLD.engine.group.inject_faults(seed=rank + 1, longest_delay_us=100)
    for case in PLAIN + GROUPED:
        torch.manual_seed(1)
        options = dict(case.options)
        whole = getattr(nn, case.name)(case.inputs, case.outputs, case.kernel, **options, dtype=dtype)
        x = torch.randn(case.size[0], case.inputs, *case.size[1:], dtype=dtype)
        dy = torch.randn(whole(x).shape, dtype=dtype)
        expected = gradients_of(whole, x, dy)
        for style in ("column", "row", "channels"):
            if style == "channels" and "groups" not in options:
                continue
            for open_end in (False, True):
                if style == "channels" and open_end:
                    continue
                ends = {"gather_output": open_end} if style == "column" else {"split_input": open_end}
                ends = {} if style == "channels" else ends
                torch.manual_seed(1)
                layer = getattr(weft, f"Parallel{case.name}")(
                    case.inputs, case.outputs, case.kernel, **options, style=style, **ends, dtype=dtype
                )
                message = f"{case} {style} W={world} {ends}"
                assert torch.equal(layer.weight, take(layer.weight, whole.weight)), message
                ins = None if style == "column" or open_end else layer._inputs
                outs = None if style == "row" or open_end else layer._outputs
                y, dx, gradients = gradients_of(layer, own(x, ins, rank), own(dy, outs, rank))
                close(y, own(expected[0], outs, rank), f"{message} y")
                close(dx, own(expected[1], ins, rank), f"{message} dx")
                for name, gradient in gradients.items():
                    parameter = layer.get_parameter(name)
                    close(gradient, take(parameter, expected[2][name]), f"{message} d{name}")


def own(t, cut, rank):
    """This rank's channels; all of them where they are not cut."""
    return t if cut is None else t.split(cut.sizes, 1)[rank].contiguous()


@pytest.mark.parametrize("world", WORLDS)
def test_output_and_gradients_are_the_unsplit_layers(world):
    run_ranks(check_layers, world, torch.float64)


class Bottleneck(nn.Module):
    """Of a ResNet, with a depthwise convolution and both kinds of norms."""

    def __init__(self):
        super().__init__()
        self.narrow, self.norm1 = nn.Conv2d(7, 12, 1, bias=False), nn.BatchNorm2d(12)
        self.depth, self.norm2 = nn.Conv2d(12, 12, 3, padding=1, groups=12), nn.GroupNorm(6, 12)
        self.widen, self.norm3 = nn.Conv2d(12, 7, 1), nn.BatchNorm2d(7, momentum=None)

    def forward(self, x):
        inner = self.norm1(self.narrow(x)).relu()
        return (x + self.norm3(self.widen(self.norm2(self.depth(inner)).relu()))).relu()


PLAN = {
    "narrow": {"style": "column", "unit": 2},
    "norm1": {"style": "channels", "unit": 2},
    "depth": {"style": "channels", "unit": 2},
    "norm2": "channels",
    "widen": {"style": "row", "unit": 2},
}


def bottleneck(seed=0):
    torch.manual_seed(seed)
    model = Bottleneck().double()
    for norm in (model.norm1, model.norm2, model.norm3):
        nn.init.normal_(norm.weight, 1, 0.3), nn.init.normal_(norm.bias)
    return model


def train(model, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # Adam would scale a zero's rounding up
    for step in range(steps):
        x = torch.randn(4, 7, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return optimizer


def check_block(rank, path):
    whole = bottleneck()
    model = copy.deepcopy(weft.parallelize(bottleneck(), plan=PLAN))
    optimizer = train(model)
    train(whole)
    state = dict(whole.named_parameters()) | dict(whole.named_buffers())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        close(tensor.detach(), take(tensor, state[name]).detach(), name)
    assert model.norm1.running_mean.numel() < 12 or dist.get_world_size() == 1
    x = torch.randn(2, 7, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    model.eval(), whole.eval()
    close(model(x), whole(x), "eval")
    weft.save_checkpoint(model, optimizer, path)
    other = bottleneck(seed=5)
    weft.load_checkpoint(other, None, path)  # the plain model, under its own names
    for name, tensor in [*other.named_parameters(), *other.named_buffers()]:
        close(tensor.detach(), state[name].detach(), name)
    again = weft.parallelize(bottleneck(seed=3), plan={**PLAN, "depth": {"style": "channels", "unit": 4}, **FOURS})
    again.load_state_dict(whole.state_dict())
    again.eval()
    close(again(x), whole(x), "a whole state_dict, cut elsewhere")
    with pytest.raises(RuntimeError, match=r"norm1.running_mean has shape \(5,\); expected .* or the whole \(12,\)"):
        again.load_state_dict({**whole.state_dict(), "norm1.running_mean": torch.zeros(5)})
    return {name: tensor.detach().clone() for name, tensor in other.state_dict().items()}


FOURS = {name: {"style": PLAN[name]["style"], "unit": 4} for name in ("narrow", "norm1", "widen")} | {
    "norm2": {"style": "channels", "unit": 4}
}


@pytest.mark.parametrize("world", WORLDS)
def test_a_residual_block_trains_and_is_stored_as_the_unsplit_one(world, tmp_path):
    found = run_ranks(check_block, world, tmp_path / "saved")
    assert all(torch.equal(found[0][name], one[name]) for one in found for name in found[0])


class Channels(nn.Module):
    """Channels of a sequence or a volume through norms that treat each channel, or each group, alone."""

    def __init__(self, space):
        super().__init__()
        kinds = ("Conv", "BatchNorm", "InstanceNorm")
        conv, batch, instance = (getattr(nn, f"{kind}{space}d") for kind in kinds)
        self.first, self.batch = conv(5, 12, 2), batch(12, track_running_stats=space == 1)
        self.instance = instance(12, affine=True, track_running_stats=space == 3)
        self.depth, self.groups, self.last = conv(12, 12, 2, groups=6), nn.GroupNorm(3, 12), conv(12, 5, 1)

    def forward(self, x):
        inner = self.instance(self.batch(self.first(x)).relu())
        return self.last(self.groups(self.depth(inner)).tanh())


def check_channels(rank):
    for space in (1, 3):
        torch.manual_seed(space)
        whole = Channels(space).double()
        for norm in (whole.batch, whole.instance, whole.groups):
            nn.init.normal_(norm.weight, 1, 0.3), nn.init.normal_(norm.bias)
        inside = {name: {"style": "channels", "unit": 4} for name in ("batch", "instance", "depth", "groups")}
        ends = {"first": {"style": "column", "unit": 4}, "last": {"style": "row", "unit": 4}}
        own_plan = weft.parallelize(copy.deepcopy(whole), plan={**inside, **ends})
        found = weft.parallelize(copy.deepcopy(whole), plan="auto")
        x = torch.randn(3, 5, *[5] * space, dtype=torch.float64)
        expected = gradients_of(whole, x, torch.ones_like(whole(x)))
        for model in (own_plan, found):
            assert type(model.instance) is weft.nn.ChannelInstanceNorm
            model(x)
            y, dx, gradients = gradients_of(model, x, torch.ones_like(expected[0]))
            close(y, expected[0], f"{space} y")
            close(dx, expected[1], f"{space} dx")
            for name, gradient in gradients.items():
                close(gradient, take(model.get_parameter(name), expected[2][name]), f"{space} d{name}")
            buffers = dict(whole.named_buffers())
            for name, buffer in model.named_buffers():
                close(buffer, take(buffer, buffers[name]), f"{space} {name}")
            whole.eval(), model.eval()
            close(model(x), whole(x), f"{space} eval")
            whole.train()


def test_norms_of_channels_are_the_unsplit_norms_in_sequences_and_volumes():
    run_ranks(check_channels, 2)


def check_details(rank):
    torch.manual_seed(0)
    whole = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
    layer = weft.ParallelConv2d.from_conv(whole, style="column", gather_output=True)
    assert layer.weight.is_contiguous(memory_format=torch.channels_last)
    x = torch.randn(4, 7, 5)  # without a batch
    torch.testing.assert_close(layer(x), whole(x))
    half = copy.deepcopy(layer).bfloat16()
    assert weft.shard_of(half.weight) == weft.shard_of(layer.weight)
    assert half(x.bfloat16()).dtype == torch.bfloat16
    row = weft.ParallelConv2d.from_conv(whole, style="row", split_input=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = row(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert row.weight.grad.dtype == torch.float32
    torch.manual_seed(3)
    row.reset_parameters()
    torch.manual_seed(3)
    assert torch.equal(row.weight, weft.shard_of(row.weight).take(nn.Conv2d(4, 6, 3).weight))
    whole.weight.requires_grad_(False)
    assert not weft.ParallelConv2d.from_conv(whole.eval(), style="row").weight.requires_grad
    gathered = [torch.empty(6) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, row.bias.grad)
    assert all(torch.equal(other, row.bias.grad) for other in gathered)


def test_layouts_types_resets_and_frozen_weights():
    run_ranks(check_details, 2)


def check_refusals(rank):
    column = dict(style="column")
    layer = weft.ParallelConv2d(4, 6, 3, **column)
    split = weft.ParallelConv2d(6, 4, 3, style="row", split_input=True)
    norm = weft.nn.ChannelBatchNorm.from_norm(nn.BatchNorm2d(6))
    depthwise = weft.ParallelConv2d(6, 6, 3, groups=6, **column)
    calls = dist.group.WORLD.engine.group.calls
    for error, message, call in (
        (
            ValueError,
            "style='filters' is not one of 'column', 'row'",
            lambda: weft.ParallelConv2d(4, 4, 3, style="filters"),
        ),
        (
            ValueError,
            "out_channels=2 in 1 groups: 2 elements cannot be split over 3 ranks",
            lambda: weft.ParallelConv2d(4, 2, 3, **column),
        ),
        (ValueError, "in_channels=2 in 1 groups", lambda: weft.ParallelConv2d(2, 4, 3, style="row")),
        (
            ValueError,
            "4 elements in units of 2 .2 units. cannot be split over 3 ranks",
            lambda: weft.ParallelConv2d(4, 4, 3, groups=2, **column),
        ),
        (
            ValueError,
            "unit=3 cuts a group of 2 channels",
            lambda: weft.ParallelConv2d(6, 6, 3, groups=3, unit=3, **column),
        ),
        (
            ValueError,
            "without groups every filter sees every channel",
            lambda: weft.ParallelConv2d(6, 6, 3, style="channels"),
        ),
        (
            ValueError,
            "gather_output=True needs",
            lambda: weft.ParallelConv2d(6, 6, 3, style="row", gather_output=True),
        ),
        (ValueError, "split_input=True needs", lambda: weft.ParallelConv2d(6, 6, 3, split_input=True, **column)),
        (
            TypeError,
            "ParallelConv2d takes an nn.Conv2d, got Conv1d",
            lambda: weft.ParallelConv2d.from_conv(nn.Conv1d(4, 4, 1), **column),
        ),
        (ValueError, r"shape \(2, 5, 8, 8\); it must be \[batch, 4, height", lambda: layer(torch.ones(2, 5, 8, 8))),
        (ValueError, r"shape \(2, 5, 8, 8\); its dimension -3 must be 6", lambda: split(torch.ones(2, 5, 8, 8))),
        (ValueError, r"shape \(2, 5, 8, 8\); its dimension -3 must be 6", lambda: depthwise(torch.ones(2, 5, 8, 8))),
        (
            ValueError,
            r"this rank has 2 of 6 channels. .* give both the same unit",
            lambda: norm(torch.ones(2, 6, 8, 8)),
        ),
        (
            ValueError,
            "unit=3 cuts a group of 2 channels",
            lambda: weft.nn.ChannelGroupNorm.from_norm(nn.GroupNorm(3, 6), unit=3),
        ),
        (
            TypeError,
            "norm is LayerNorm; style 'channels' takes nn.BatchNorm1d itself",
            lambda: weft.parallelize(Normed(), plan={"norm": "channels"}),
        ),
    ):
        with pytest.raises(error, match=re.compile(message, re.DOTALL)):
            call()
    assert dist.group.WORLD.engine.group.calls == calls, "nothing was communicated"


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)


def test_bad_input_is_refused_before_anything_is_communicated():
    run_ranks(check_refusals, 3)
