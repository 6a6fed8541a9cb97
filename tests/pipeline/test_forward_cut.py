"""weft.Pipeline: every stage runs the model's own forward, whatever that does between its layers."""

import copy
import pickle
import random
import re
import warnings
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_flatten
from torch.utils.checkpoint import checkpoint

import weft
from weft.pipeline.absent import Absent, AbsentValueError, like
from weft.pipeline.forward_plan import LayerResult
from weft.pipeline.microbatches import microbatches_of
from weft.pipeline.split_backward import can_be_halved
from weft.testing.ranks import run_ranks

BATCH, LENGTH, VOCABULARY = 8, 6, 17
TEXT = dict(
    **dict(hidden_size=16, intermediate_size=32, num_attention_heads=4, num_hidden_layers=3, vocab_size=VOCABULARY),
    **dict(max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2),
)
PAIR = dict(
    **dict(d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4),
    **dict(encoder_ffn_dim=32, decoder_ffn_dim=32, vocab_size=VOCABULARY, max_position_embeddings=32, pad_token_id=0),
    **dict(bos_token_id=1, eos_token_id=2, decoder_start_token_id=1),
)
IMAGES = dict(hidden_size=16, intermediate_size=32, num_attention_heads=4, num_hidden_layers=4, image_size=16)
IMAGES |= dict(patch_size=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
CAUSAL = TEXT | dict(num_key_value_heads=2, attention_dropout=0.0)
T5 = dict(d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4, vocab_size=VOCABULARY, decoder_start_token_id=0)
WAVES = dict(hidden_size=16, num_hidden_layers=3, num_attention_heads=4, intermediate_size=32, conv_dim=(8, 8))
WAVES |= dict(conv_stride=(5, 4), conv_kernel=(10, 8), num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2)
WAVES |= dict(layerdrop=0.0, num_feat_extract_layers=2, feat_extract_norm="layer", classifier_proj_size=8)
WAVES |= dict(feat_proj_dropout=0.0, hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0)
WAVES |= dict(mask_time_prob=0.0, final_dropout=0.0)
NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
EXPERTS = dict(num_local_experts=4, experts_implementation="eager")
FAMILIES = {  # name -> class, its configuration, the kind of its batch
    "llama": ("LlamaForCausalLM", CAUSAL, "causal"),
    "gpt2": (
        "GPT2LMHeadModel",
        dict(n_embd=16, n_layer=3, n_head=4, vocab_size=VOCABULARY, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
        "causal",
    ),
    "gemma3": ("Gemma3ForCausalLM", CAUSAL | dict(head_dim=4), "causal"),
    "mixtral": ("MixtralForCausalLM", CAUSAL | EXPERTS, "causal"),
    "bloom": (
        "BloomForCausalLM",
        dict(hidden_size=16, n_layer=3, n_head=4, vocab_size=VOCABULARY, hidden_dropout=0.0, attention_dropout=0.0),
        "causal",
    ),
    "mamba": ("MambaForCausalLM", dict(hidden_size=16, num_hidden_layers=3, vocab_size=17, state_size=4), "causal"),
    "bert": ("BertForSequenceClassification", TEXT | NO_DROPOUT | dict(classifier_dropout=0.0), "classes"),
    "albert": (
        "AlbertForSequenceClassification",
        TEXT | dict(embedding_size=8, classifier_dropout_prob=0.0, **NO_DROPOUT),
        "classes",
    ),
    "bart": ("BartForConditionalGeneration", PAIR | dict(dropout=0.0), "pair"),
    "t5": ("T5ForConditionalGeneration", T5 | dict(dropout_rate=0.0), "pair"),
    "whisper": (
        "WhisperForConditionalGeneration",
        PAIR | dict(num_mel_bins=4, max_source_positions=10, max_target_positions=16, dropout=0.0),
        "spectrum",
    ),
    "vit": ("ViTForImageClassification", IMAGES, "image"),
    "swin": (
        "SwinForImageClassification",
        dict(image_size=16, patch_size=2, embed_dim=8, depths=[1, 1, 2], num_heads=[1, 2, 4], window_size=2)
        | dict(drop_path_rate=0.0),
        "image",
    ),
    "wav2vec2": ("Wav2Vec2ForSequenceClassification", WAVES, "wave"),
    "clip": (
        "CLIPModel",
        dict(text_config=TEXT | dict(projection_dim=16), vision_config=IMAGES | dict(projection_dim=16)),
        "both",
    ),
}
TO_EVERY_SCHEDULE = ("llama", "t5")


def model_of(family, **changes):
    transformers = pytest.importorskip("transformers")
    kind, options, _ = FAMILIES[family]
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    kind = getattr(transformers, kind)
    return kind(kind.config_class(**{**options, **changes})).double()


def batch_of(family, step=0):
    generator = torch.Generator().manual_seed(step)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    tokens = torch.randint(3, VOCABULARY, (2, BATCH, LENGTH), generator=generator)
    mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    mask[::2, -2:] = 0  # in every micro-batch, so that masks are made
    classes = torch.arange(BATCH) % 2
    return {
        "causal": dict(input_ids=tokens[0], attention_mask=mask, labels=tokens[0]),
        "classes": dict(input_ids=tokens[0], attention_mask=mask, labels=classes),
        "pair": dict(input_ids=tokens[0], attention_mask=mask, labels=tokens[1][:, :-1].contiguous()),
        "spectrum": dict(input_features=draw(BATCH, 4, 20), labels=tokens[1]),
        "image": dict(pixel_values=draw(BATCH, 3, 16, 16), labels=classes),
        "wave": dict(input_values=draw(BATCH, 600), labels=classes),
        "both": dict(input_ids=tokens[0], attention_mask=mask, pixel_values=draw(BATCH, 3, 16, 16), return_loss=True),
    }[FAMILIES[family][2]]


def part_of(batch, number, microbatches):
    return {name: x.chunk(microbatches)[number] if isinstance(x, torch.Tensor) else x for name, x in batch.items()}


def assert_trains_as_plain(model, batches, world, loss_of, rtol, **options):
    """Loss, gradients and three AdamW steps are those of the plain model. Returns this rank's names and layers."""
    plain = copy.deepcopy(model)
    pipe = weft.Pipeline(model, weft.init_mesh(pp=world, device_type="cpu"), **options)
    ours, theirs = (torch.optim.AdamW(part.parameters(), lr=1e-2) for part in (pipe, plain))
    for batch in batches:
        theirs.zero_grad()
        ours.zero_grad()
        expected = loss_of(plain, batch)
        expected.backward()
        loss = pipe.step(batch)
        torch.testing.assert_close(loss.double(), expected.detach().double(), rtol=1e-6, atol=1e-6)
        for name, parameter in pipe.named_parameters():
            gradient = plain.get_parameter(name).grad
            assert (gradient is None) == (parameter.grad is None), name
            if gradient is not None:
                torch.testing.assert_close(parameter.grad, gradient, rtol=rtol, atol=1e-4 * rtol)
        ours.step()
        theirs.step()
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter, plain.get_parameter(name), rtol=100 * rtol, atol=10 * rtol)
    torch.testing.assert_close(
        pipe.evaluate(batches[0]), loss_of(plain, batches[0]).to(loss.dtype), rtol=1e-6, atol=1e-6
    )
    return set(pipe.state_dict()), sum(x.numel() for x in pipe.parameters())


def train_family(rank, cases):
    world, results = torch.distributed.get_world_size(), []
    for family, schedule in cases:
        model = model_of(family)
        batches = [batch_of(family, step) for step in range(3)]
        microbatches = 4 if world == 2 else 6
        if world == 3:
            batches = [{k: x[:6] if isinstance(x, torch.Tensor) else x for k, x in batch.items()} for batch in batches]
        contrast = family == "clip"  # its loss compares the examples of a micro-batch
        rtol = 1e-4 if family in ("gemma3", "mamba") else 1e-8  # norms and scans in fp32

        def loss_of(plain, batch, parts=microbatches if contrast else 1):
            return sum(plain(**part_of(batch, number, parts)).loss for number in range(parts)) / parts

        example = part_of(batches[0], 0, microbatches) if family in ("clip", "swin") else None
        options = dict(schedule=schedule, microbatches=microbatches, example=example)
        results.append(assert_trains_as_plain(model, batches, world, loss_of, rtol, **options))
    return results


def check_families(world, cases):
    per_rank = run_ranks(train_family, world, cases, timeout_s=240)
    for (family, schedule), held in zip(cases, zip(*per_rank, strict=True), strict=True):
        names, sizes = zip(*held, strict=True)
        model = model_of(family)
        assert set().union(*names) == set(model.state_dict()), (family, schedule)
        assert max(sizes) < sum(x.numel() for x in model.parameters()), (family, schedule)


def test_models_of_transformers_train_as_the_plain_model():
    check_families(2, [("llama", "1f1b"), ("bert", "zero-bubble"), ("t5", "1f1b"), ("vit", "zbv")])


@pytest.mark.slow("pipeline")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_trains_as_the_plain_model(family):
    check_families(2, [(family, "1f1b")])


@pytest.mark.slow("pipeline")
@pytest.mark.parametrize("schedule", ["afab", "interleaved", "zero-bubble", "zbv", "dualpipev"])
def test_every_schedule_trains_models_of_transformers(schedule):
    layered = [(family, schedule) for family in TO_EVERY_SCHEDULE]
    check_families(2, layered[1:] if schedule == "dualpipev" else layered)
    if schedule != "dualpipev":  # six micro-batches for six stages
        check_families(3, layered[1:])


def pad(rank):
    batch = batch_of("llama")
    batch["labels"] = batch["labels"].clone()
    batch["labels"][0, :4] = -100
    counted = (batch["labels"][:, 1:] != -100).sum()
    mesh = weft.init_mesh(pp=2, device_type="cpu")
    pipe = weft.Pipeline(model_of("llama"), mesh, microbatches=4)
    with pytest.raises(ValueError, match=r"\[8, 12, 12, 12\] labels that count.*reduction=.sum"):
        pipe.step(batch)
    with pytest.raises(ValueError, match="num_items_in_batch divides .*reduction=.sum"):
        pipe.step(batch | dict(num_items_in_batch=counted))
    plain = model_of("llama")
    pipe = weft.Pipeline(model_of("llama"), mesh, microbatches=4, reduction="sum")
    loss, expected = pipe.step(batch | dict(num_items_in_batch=counted)), plain(**batch).loss
    expected.backward()
    torch.testing.assert_close(loss, expected.double(), rtol=1e-6, atol=1e-6)
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad, rtol=1e-8, atol=1e-12)

    def loss_of(output, targets):
        return F.cross_entropy(output.logits.flatten(0, 1), targets.flatten())

    tokens = batch_of("llama")["input_ids"]
    pipe = weft.Pipeline(model_of("llama"), mesh, microbatches=2, loss=loss_of)
    loss = pipe.step({"input_ids": tokens}, tokens)
    torch.testing.assert_close(loss, loss_of(model_of("llama")(tokens), tokens).detach())
    short = {"input_ids": tokens[:, :3]}  # another length
    torch.testing.assert_close(
        pipe.step(short, tokens[:, :3]), loss_of(plain.eval()(**short), tokens[:, :3]), rtol=1, atol=1
    )
    with pytest.raises(ValueError, match="without a scalar loss: give it labels"):
        weft.Pipeline(model_of("llama"), mesh, microbatches=2).step({"input_ids": tokens})
    with pytest.raises(ValueError, match=r"position_ids is \(1, 6\), and the batch is 8"):
        pipe.step({"input_ids": tokens, "position_ids": torch.arange(6)[None]}, tokens)


def test_labels_that_do_not_count_are_counted_over_the_batch_or_refused():
    run_ranks(pad, 2, timeout_s=120)


class Own(nn.Module):
    """Its own code branches on values, uses parameters and a buffer, writes in place, and passes on what it made."""

    def __init__(self):
        super().__init__()
        self.token, self.scale = nn.Parameter(torch.randn(1, 4)), nn.Parameter(torch.randn(4))
        self.unused = nn.Parameter(torch.ones(4))
        self.register_buffer("shift", torch.randn(4))
        self.layers = nn.ModuleList(Pair() for _ in range(4))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 4)
        self.head.weight = self.layers[0].linear.weight

    def forward(self, x, *, flip=False):
        x = torch.cat([self.token.expand(len(x), -1), x], 1)[:, :4] * self.scale + self.shift
        first = side = None
        for layer in self.layers:
            if x.sum() < 1e9:
                x, side, kept = layer(x, side)
                assert kept["shape"] == x.size(1)
                first = kept["x"] if first is None else first
        with torch.no_grad():
            weights = torch.rand(4)  # the same on every stage
        x = self.norm(x * weights)
        x[:, 0] = 0
        return self.head(x - first if flip else x + first) * weights + side


class Pair(nn.Module):
    """Layer that gives its first argument's sum once, passes on its second one, and returns a dict as well."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, side=None):
        side = x.sum(1, keepdim=True) if side is None else side
        y = torch.tanh(self.linear(x))
        return y, side, {"x": y * 2, "shape": 4}


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), Adding(), nn.Linear(4, 4)])

    def forward(self, x):
        if x.sum() < 1e9:  # no trace
            for layer in self.layers:
                x = layer(x)
        return x


class Adding(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)

    def forward(self, x):
        return super().forward(x.add_(1))


class Writing(InPlace):
    """The code between its layers changes a result that a later stage needs too."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x):
        first = self.layers[0](x)
        if x.sum() < 1e9:
            first.mul_(2)
        return self.layers[2](self.layers[1](first) + first) + first


class Dropping(nn.Module):
    """Stages must drop the same elements of what two of them use."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Noisy(), Noisy(), Noisy()])

    def forward(self, x):
        x = F.dropout(self.layers[0](x), 0.5, self.training)
        y = self.layers[1](x)  # on the stage before the last one
        return self.layers[2](y) * (x == 0)  # zero only if the stages agree


class Noisy(nn.Linear):
    """Identity that draws random numbers of its own."""

    def __init__(self):
        super().__init__(4, 4, bias=False)
        nn.init.eye_(self.weight)

    def forward(self, x):
        return super().forward(x) + 0 * F.dropout(x, 0.5, self.training)


class Hooked(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False))
        self.register_forward_hook(lambda module, inputs, output: 2 * output)


class Frozen(nn.Module):
    """Switches gradients off around a layer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        with torch.no_grad() if self.training else nullcontext():
            x = self.layers[0](x)
        return self.layers[2](F.relu(self.layers[1](x)))


def train_own(rank, schedule):
    world = torch.distributed.get_world_size()
    mesh, x, y = weft.init_mesh(pp=world, device_type="cpu"), torch.randn(8, 4).double(), torch.randn(8, 4).double()
    names = []
    for kind in (Own, Writing, Hooked, Frozen):
        torch.manual_seed(0)
        model = kind().double()
        plain = copy.deepcopy(model)
        drawn = kind is Own
        example = {"x": x[:2], "flip": True} if drawn else None
        options = dict(schedule=schedule, microbatches=4, loss=F.mse_loss, example=example)
        pipe = weft.Pipeline(model, mesh, **options)
        batch = {"x": x, "flip": True} if drawn else x
        loss = pipe.step(batch, y)
        if drawn:  # with the first rank's seed, which the step drew
            names = list(pipe.state_dict())
            seeds = [number * 1_000_003 for number in range(4)]
        for part, target, number in zip(x.chunk(4), y.chunk(4), range(4), strict=True):
            if drawn:
                torch.manual_seed(pipe._stages[min(pipe._stages)]._batch[2] + seeds[number])
                for _ in range(4):
                    torch.randint(2**62, (1,))
            output = plain(part, flip=True) if drawn else plain(part)
            part_loss = F.mse_loss(output, target) / 4
            part_loss.backward()
            loss = loss - part_loss.detach()
        torch.testing.assert_close(loss, torch.zeros_like(loss), rtol=0, atol=1e-12)
        for name, parameter in pipe.named_parameters():
            expected = plain.get_parameter(name).grad
            assert (expected is None) == (parameter.grad is None), (kind, name)
            if expected is not None:
                torch.testing.assert_close(parameter.grad, expected, rtol=1e-10, atol=1e-14)
        for name, buffer in pipe.named_buffers():
            torch.testing.assert_close(buffer, plain.get_buffer(name))
    torch.manual_seed(rank)
    sizes = [2, 1] if world == 2 else [1, 1, 1]
    options = dict(schedule=schedule, microbatches=4, balance=sizes)
    pipe = weft.Pipeline(Dropping(), mesh, loss=lambda output, _: output.abs().sum(), **options)
    for _ in range(3):
        assert pipe.step(torch.ones(64, 4), torch.ones(64, 4)) == 0
    return names


@pytest.mark.parametrize("schedule", ["1f1b"])
@pytest.mark.parametrize("world", [2, 3])
def test_the_code_between_layers_may_do_anything(world, schedule):
    per_rank = run_ranks(train_own, world, schedule, timeout_s=120)
    assert set().union(*per_rank) == set(Own().state_dict())


class Residual(nn.Module):
    """Blocks that may be cut in the middle, around a residual stream that the code between them adds to."""

    def __init__(self):
        super().__init__()
        self.place, self.scale = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)) for _ in range(3))

    def forward(self, x):
        x = self.first(x) + self.place
        start = 2 * x
        for block in self.blocks:
            x = x + block(x)
        return x * self.scale + start


class Aliasing(Residual):
    """Writes to a view of what crosses, before the cut and after it."""

    def forward(self, x):
        x = self.blocks[0](self.first(x)) + x
        kept = x * 2
        row = kept[0]
        row += 1
        y = self.blocks[1](x)
        row += y.sum()
        same = kept
        kept += 1
        return self.blocks[2](y) + same


CROSSING = {  # model, layers of each stage -> values that leave each stage, and names of parameters around the layers
    "in the middle of a block": (Residual, [4, 3], [3], [{"place"}, {"scale"}]),
    "between two blocks": (Residual, [3, 4], [2], [{"place"}, {"scale"}]),
    "twice": (Residual, [2, 2, 3], [3, 3], [{"place"}, set(), {"scale"}]),
    "writes": (Aliasing, [4, 3], [2], None),
}


def cross(rank, kind, sizes, numbers, around):
    torch.manual_seed(0)
    model, x, y = kind().double(), torch.randn(4, 4).double(), torch.randn(4, 4).double()
    plain = copy.deepcopy(model)
    mesh = weft.init_mesh(pp=len(sizes), device_type="cpu")
    pipe = weft.Pipeline(model, mesh, microbatches=4, balance=sizes, loss=F.mse_loss, example=x[:1])
    loss = pipe.step(x, y)
    parts = [F.mse_loss(plain(part), target) for part, target in zip(x.split(1), y.split(1), strict=True)]
    (sum(parts) / 4).backward()
    torch.testing.assert_close(loss, sum(parts).detach() / 4)
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)
    (schedule,) = pipe._schedules.values()
    assert [len(schedule.plan.leaving(stage)) for stage in range(len(sizes) - 1)] == numbers
    if around is not None:
        assert {name for name, _ in pipe.named_parameters() if name in ("place", "scale")} == around[rank]


@pytest.mark.parametrize("case", CROSSING)
def test_each_value_in_use_after_the_cut_crosses_once(case):
    kind, sizes, numbers, around = CROSSING[case]
    run_ranks(cross, len(sizes), kind, sizes, numbers, around)


class Doing(nn.Module):
    """Three layers, and `between(model, x)` after each."""

    def __init__(self, between, layer=nn.Linear):
        super().__init__()
        self.layers, self.between = nn.ModuleList(layer(4, 4) for _ in range(3)), between
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        for layer in self.layers:
            x = self.between(self, layer(x))
        return x


class Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return (x * 2).sin()

    @staticmethod
    def backward(ctx, dy):
        return -dy


class Twofold(nn.Linear):
    """Layer that returns one tensor twice."""

    def forward(self, x):
        y = super().forward(x)
        return y, {"again": y}


class Viewing(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y, y[:, :2]


class Again(Doing):
    """Its last stage begins again, after its first layer, for what the first stage gave."""

    def forward(self, x):
        first = self.layers[0](x)
        y, part = self.layers[1](first.sin())
        part.add_(1)
        return self.layers[2](y) + first


def of_views(between):
    model = Again(between)
    model.layers[1] = Viewing(4, 4)
    return model


class Wrapping(nn.Linear):
    def forward(self, x):
        return SimpleNamespace(y=super().forward(x))


class Numbering(nn.Linear):
    def forward(self, x):
        return super().forward(x), x.sum().item()


def twice(model, out):
    y, again = out
    y = y * 1
    again["again"] += 1
    return y + out[0]


def replace_mean(model, x):
    model.mean = x.detach().mean(0)
    return x


def hooked(model, x):
    (x * 1).register_hook(lambda dx: 2 * dx)
    return x


RIGHT = {
    "a custom autograd function": (Doing, lambda model, x: Turned.apply(x)),
    "a checkpoint of the code": (Doing, lambda model, x: checkpoint(lambda x: x.sin().cos(), x, use_reentrant=False)),
    "a reentrant one": (Doing, lambda model, x: checkpoint(lambda x: x.sin().cos(), x, use_reentrant=True)),
    "gradients are on": (Doing, lambda model, x: x.sin() if torch.is_grad_enabled() else x.cos()),
    "a list of its values": (Doing, lambda model, x: x * len(x.tolist())),
    "one tensor twice": (partial(Doing, layer=Twofold), twice),
}
REFUSED = {
    "a number that differs": (
        partial(Doing, layer=Numbering),
        lambda model, out: out[0] + out[1],
        "must not depend on",
    ),
    "an object": (partial(Doing, layer=Wrapping), lambda model, out: out.y, "returns a SimpleNamespace.*let it return"),
    "a view": (partial(Doing, layer=Viewing), lambda model, out: out[1].add_(1) + out[0][:, 2:], "that share memory"),
    "a view in a stage that begins again": (of_views, None, "that share memory"),
    "Python's numbers": (Doing, lambda model, x: x * random.random(), "draws from Python's random numbers"),
    "another buffer": (Doing, replace_mean, "puts another tensor in the place of its buffer mean"),
    "a hook": (Doing, hooked, "calls register_hook between its layers"),
}


def do_between(rank, names):
    mesh, x = weft.init_mesh(pp=2, device_type="cpu"), torch.randn(4, 4).double()
    for name in names:
        kind, between, *text = (RIGHT | REFUSED)[name]
        torch.manual_seed(0)
        model = kind(between).double()
        plain = copy.deepcopy(model)
        cut = partial(weft.Pipeline, mesh=mesh, microbatches=2, loss=F.mse_loss, balance=[1, 2])
        if text:
            with pytest.raises((ValueError, RuntimeError)) as found:
                cut(model).step(x, x)
            causes = [found.value, found.value.__cause__]
            if rank == 0 or name != "a number that differs":  # the other rank loses this one
                assert any(re.search(text[0], str(cause)) for cause in causes), (name, causes)
            continue
        parts, pipe = [F.mse_loss(plain(part), part) for part in x.chunk(2)], cut(model)
        (sum(parts) / 2).backward()
        torch.testing.assert_close(pipe.step(x, x), sum(parts).detach() / 2)
        for own, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, plain.get_parameter(own).grad, msg=f"{name}: {own}")


def test_the_code_between_layers_is_right_or_refused():
    run_ranks(do_between, 2, [*RIGHT, *list(REFUSED)[1:]], timeout_s=120)
    run_ranks(do_between, 2, list(REFUSED)[:1])


class Taking(nn.Module):
    """No guessed inputs run; its first layer in order is never called."""

    def __init__(self, last_first=False):
        super().__init__()
        self.never = nn.Linear(4, 4)
        self.layers, self.last_first = nn.ModuleList(nn.Linear(4, 4) for _ in range(4)), last_first

    def forward(self, batch):
        x = batch["x"]
        for layer in [*self.layers][:: -1 if self.last_first else 1]:
            x = layer(x)
        return x


def step_without_example(rank):
    mesh, x = weft.init_mesh(pp=2, device_type="cpu"), torch.randn(4, 4)
    torch.manual_seed(0)
    for last_first, example in ((False, False), (True, True)):
        model = Taking(last_first)
        expected = F.mse_loss(model({"x": x}), x).detach()
        options = dict(microbatches=2, loss=F.mse_loss, example={"batch": {"x": x[:2]}} if example else None)
        torch.testing.assert_close(weft.Pipeline(model, mesh, **options).step({"batch": {"x": x}}, x), expected)
    pipe = weft.Pipeline(Taking(last_first=True), mesh, microbatches=2, loss=F.mse_loss)
    with pytest.raises(ValueError, match="calls layers.0 later than the model has it.*pass example="):
        pipe.step({"batch": {"x": x}}, x)


def test_without_an_example_layers_are_taken_in_the_model_s_order():
    run_ranks(step_without_example, 2)


def refuse(rank):
    mesh = weft.init_mesh(pp=2, device_type="cpu")
    x = torch.randn(8, 4)
    pipe = weft.Pipeline(InPlace(), mesh, microbatches=4, loss=F.mse_loss)
    with pytest.raises(ValueError, match=r"layers.1, a Adding, changes its input in place.*inplace=False"):
        pipe.step(x, x)
    pipe = weft.Pipeline(InPlace(), mesh, microbatches=4, loss=F.mse_loss, example=x)
    pipe._cut.names[1] = "layers.2"  # as if the example had run others
    with pytest.raises(ValueError, match=r"calls layers.1 where it called layers.2 when it was cut.*example="):
        pipe.step(x, x)
    with pytest.raises(ValueError, match="did not run with example= .RuntimeError.*pass a micro-batch of its inputs"):
        weft.Pipeline(model := InPlace(), mesh, microbatches=4, loss=F.mse_loss, example=torch.randn(4, 5))
    assert not vars(model.layers[0]).get("forward")
    model = model_of("wav2vec2", layerdrop=0.1)
    pipe = weft.Pipeline(model, mesh, microbatches=4)
    with pytest.raises(ValueError, match="layerdrop=0.1 of Wav2Vec2.* skips layers at random"):
        pipe.step(batch_of("wav2vec2"))
    model = model_of("llama")
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="gradient_checkpointing_disable"):
        weft.Pipeline(model, mesh, schedule="zero-bubble", microbatches=4)
    with pytest.raises(ValueError, match="output_attentions asks for what is recorded"):
        weft.Pipeline(model_of("llama"), mesh, microbatches=4).step(batch_of("llama") | dict(output_attentions=True))


def test_what_a_forward_cannot_be_cut_into_is_refused():
    run_ranks(refuse, 2, timeout_s=120)


def test_absent_values_have_shapes_and_name_their_origins():
    x, y = like(torch.empty(2, 3), "x"), like(torch.empty(3), "y")
    z = (x + y)[:, :2]
    assert isinstance(z, Absent) and z.shape == (2, 2) and z.device.type == "cpu" and z.origins == {"x", "y"}
    assert not isinstance(torch.ones_like(z), Absent)
    z[0] = like(torch.empty(2), "z")
    assert z.origins == {"x", "y", "z"}
    view = x[0]
    view += y
    assert x.origins == {"x", "y"}  # the view's memory is x's
    for needing in (x.sum().item, lambda: torch.zeros(2, 3).copy_(x), lambda: x.nonzero(), lambda: bool(x.all())):
        with pytest.raises(AbsentValueError) as found:
            needing()
        assert found.value.origins == {"x", "y"}
    torch.manual_seed(0)
    F.dropout(x, 0.5)
    after = torch.rand(1)
    torch.manual_seed(0)
    F.dropout(torch.empty(2, 3), 0.5)
    assert torch.equal(after, torch.rand(1))


def test_the_structure_of_a_result_is_sent_without_a_warning():
    parts, structure = tree_flatten(({"x": 1, "y": (2, None)}, [3]))
    result = LayerResult(tuple(parts), structure)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pickle.loads(pickle.dumps(result)) == result


def test_patches_of_images_are_cut_between_images():
    patches, grid = torch.arange(12)[:, None], torch.tensor([[1, 1, 2], [1, 2, 1], [1, 2, 2], [2, 2, 1]])
    named = {"pixel_values": patches, "input_ids": torch.zeros(4, 3), "image_grid_thw": grid}
    first, second = (part for _, part in microbatches_of(((), named), None, 2))
    assert torch.equal(first["pixel_values"], patches[:4]) and torch.equal(second["pixel_values"], patches[4:])
    assert torch.equal(second["image_grid_thw"], grid[2:])
    for other in (patches[:11], torch.cat([patches, patches])):
        with pytest.raises(ValueError, match="pixel_values is .*and the batch is 4"):
            list(microbatches_of(((), {"input_ids": torch.zeros(4, 3)} | named | {"pixel_values": other}), None, 2))
    with pytest.raises(ValueError, match=r"image_grid_thw is \(2, 3\), and the batch is 4"):
        list(microbatches_of(((), named | {"pixel_values": patches[:4], "image_grid_thw": grid[:2]}), None, 2))


def step_on_mesh(rank, sizes, family, options):
    model, mesh = model_of(family), weft.init_mesh(**sizes, device_type="cpu")
    plain, batch = copy.deepcopy(model), batch_of(family)
    with pytest.raises(ValueError, match='a DeviceMesh with a dimension "pp"'):
        weft.parallelize(model, mesh["tp"], pipeline={"microbatches": 2})
    pipe = weft.parallelize(model, mesh, pipeline={"microbatches": 2}, **options)
    assert isinstance(pipe, weft.Pipeline)
    loss = pipe.step(part_of(batch, mesh["dp"].get_local_rank(), mesh["dp"].size()))
    expected = plain(**batch).loss
    expected.backward()
    torch.testing.assert_close(loss.double(), expected.detach().double(), rtol=1e-6, atol=1e-6)
    for name, parameter in pipe.named_parameters():
        take = getattr(weft.shard_of(parameter), "take", lambda whole: whole)
        torch.testing.assert_close(parameter.grad, take(plain.get_parameter(name).grad), rtol=1e-8, atol=1e-12)
    assert any(weft.shard_of(parameter) for parameter in pipe.parameters()) == ("tp" in sizes)
    whole = nn.utils.get_total_norm([parameter.grad for parameter in plain.parameters()])
    torch.testing.assert_close(weft.clip_grad_norm_(pipe, 1.0), whole)


@pytest.mark.parametrize(
    ("sizes", "family", "options"),
    [
        ({"pp": 2, "tp": 2}, "llama", {"recompute": "full"}),
        ({"pp": 2, "cp": 2}, "llama", {}),
        pytest.param({"pp": 2, "cp": 2}, "t5", {}, marks=pytest.mark.slow("pipeline")),
        pytest.param({"pp": 2, "tp": 2}, "t5", {}, marks=pytest.mark.slow("pipeline")),
        pytest.param({"pp": 2, "dp": 2}, "llama", {"recompute": "selective"}, marks=pytest.mark.slow("pipeline")),
    ],
    ids=str,
)
def test_parallelize_gives_a_pipeline_over_a_whole_mesh(sizes, family, options):
    run_ranks(step_on_mesh, 4, sizes, family, options, timeout_s=120)


def test_a_backward_is_halved_only_where_each_weight_meets_the_inputs_once():
    x, weight, other = (torch.randn(3, 3, requires_grad=True) for _ in range(3))
    weights = (weight, other)
    assert can_be_halved([(x @ weight).relu() @ other], [x, None], weights)
    assert can_be_halved([x @ weight, x @ other], [x], weights)
    assert not can_be_halved([(x @ weight) @ weight], [x], weights)  # torch would count its gradient twice, or fail
    assert not can_be_halved([x @ (bias := weight * 2), bias * 1], [x], weights)  # and lose this output's
    assert not can_be_halved([x.exp(), other * 1], [x], weights)
