"""The same bits on any number of ranks: the CPU's product, the tree of units, layers and whole models."""

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from interpreter import by_kernels, in_the_interpreter
from same_bits import DROPS, assert_same_bits, make_model
from torch import nn

import weft
from weft import _C
from weft.comm.registry import communicator
from weft.invariant.exact_functions import same_bits
from weft.kernels import launch
from weft.ops import invariant
from weft.ops.activation import ACTIVATIONS
from weft.testing.ranks import run_ranks, try_ranks

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def product(a, b, leaves=1, threads=1, instruction_set=""):
    out = torch.empty(a.size(0), b.size(1))
    sizes = (a.size(0), b.size(1), a.size(1))
    code = _C.dtypes[str(a.dtype).removeprefix("torch.")]
    operands = [(x.data_ptr(), *x.stride()) for x in (a, b)]
    _C.multiply(*operands, (out.data_ptr(), out.stride(0)), sizes, code, leaves, False, threads, instruction_set)
    return out


def matrices(rows, depth, columns, dtype=torch.float32, turned=(False, False)):
    shapes = ((rows, depth), (depth, columns))
    return [
        torch.randn(shape[::-1]).to(dtype).t() if turn else torch.randn(shape).to(dtype)
        for shape, turn in zip(shapes, turned, strict=True)
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("turned", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize(("rows", "depth", "columns", "leaves"), [(1, 1, 1, 1), (37, 60, 83, 12), (15, 5000, 40, 8)])
def test_products_are_near_fp64_and_the_same_on_every_instruction_set(rows, depth, columns, leaves, turned, dtype):
    a, b = matrices(rows, depth, columns, dtype, turned)
    y = product(a, b, leaves)
    torch.testing.assert_close(y, (a.double() @ b.double()).float(), atol=1e-5 * math.sqrt(depth), rtol=1e-5)
    for instruction_set in _C.instruction_sets():
        assert torch.equal(product(a, b, leaves, 1, instruction_set), y), instruction_set
    assert torch.equal(invariant.product_sum(a, b, leaves, dtype), y.to(dtype))


def test_an_element_has_the_same_bits_beside_any_others():
    a, b = matrices(300, 4104, 700)
    whole = product(a, b, 8)
    for rows, columns in ((slice(0, 1), slice(0, 1)), (slice(17, 40), slice(3, 99)), (slice(5, 300), slice(660, 700))):
        assert torch.equal(product(a[rows], b[:, columns], 8), whole[rows, columns])
    for threads in (2, 3, 7):
        assert torch.equal(product(a, b, 8, threads), whole), threads


def test_threads_treat_denormals_as_their_caller_does():
    a, b = (x * 2.0**-64 for x in matrices(256, 64, 1024))
    with_denormals = product(a, b)
    assert torch.set_flush_denormal(True)
    try:
        without = [product(a, b, 1, threads) for threads in (1, 3)]
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(*without) and not torch.equal(without[0], with_denormals)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_leaves_keep_denormals_in_the_tree_as_ranks_do(dtype):
    a, b = (x.to(dtype) for x in (torch.tensor([[1.5, 1.0]]) * 2.0**-63, torch.tensor([[1.0], [-1.0]]) * 2.0**-63))
    apart = invariant.add_in_tree([product(a[:, k : k + 1], b[k : k + 1]) for k in range(2)])
    assert apart.item() == 2.0**-127
    for instruction_set in _C.instruction_sets():
        assert torch.equal(product(a, b, 2, 1, instruction_set), apart), instruction_set


@pytest.mark.parametrize("leaves", [1, 2, 3, 5, 8, 12])
def test_leaves_are_added_in_the_tree_that_ranks_add(leaves):
    a, b = matrices(9, 7 * leaves, 33)
    sums = {(i, i + 1): product(a[:, 7 * i : 7 * i + 7], b[7 * i : 7 * i + 7]) for i in range(leaves)}
    assert torch.equal(product(a, b, leaves), invariant.add_in_tree(list(sums.values())))
    exact = [float(total[0, 0]) for total in sums.values()]

    def check_sizes(left, right):
        assert left & (left - 1) == 0 and right <= left
        return left + right

    for total in (leaves, leaves - 1):
        sizes = {(unit, unit + 1): 1 for unit in range(total)}
        invariant.add_up(sizes, total, check_sizes)
        assert sizes == ({(0, total): total} if total else {})
    assert math.isclose(float(product(a, b, leaves)[0, 0]), sum(exact), abs_tol=1e-4)


def zero_denormals(x):
    return torch.where(x.abs() < torch.finfo(torch.float32).tiny, 0.0, x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", [40, 41])
@pytest.mark.parametrize("scales", [(0, 0), (-64, -64), (-128, 3)])  # normal numbers; denormal sums; denormal operands
def test_a_leaf_is_one_chain_of_fused_multiply_adds(scales, depth, dtype):
    if dtype == torch.float16 and any(scales):
        pytest.skip("fp16 has no such numbers")
    a, b = ((x * 2.0**scale).to(dtype) for x, scale in zip(matrices(3, depth, 5), scales, strict=True))
    a *= 2.0 ** torch.randint(-6, 7, (depth,))  # or a sum of few bf16 is exact in any order
    in_pairs = dtype == torch.bfloat16
    order = [k ^ 1 if in_pairs and k ^ 1 < depth else k for k in range(depth)]
    y = torch.zeros(3, 5)
    for k in order:  # in fp64 a product of two fp32 is exact; torch rounds its sum with an fp32 twice, seldom seen
        column, row = (zero_denormals(x) if in_pairs else x for x in (a[:, k : k + 1], b[k : k + 1]))
        y = (column.double() * row.double() + y.double()).float()
        y = zero_denormals(y) if in_pairs else y
    for instruction_set in _C.instruction_sets():
        assert torch.equal(product(a, b, 1, 1, instruction_set), y), instruction_set


def test_products_without_rows_columns_or_depth():
    for rows, depth, columns in ((0, 3, 4), (3, 0, 4), (3, 4, 0)):
        assert torch.equal(product(*matrices(rows, depth, columns)), torch.zeros(rows, columns))


def test_products_that_do_not_exist():
    a, b = matrices(2, 10, 2)
    with pytest.raises(ValueError, match="depth of 10 does not divide into 3 leaves"):
        product(a, b, 3)
    with pytest.raises(ValueError, match="no product of float64"):
        product(a.double(), b.double())
    for other in (a.double(), a.bfloat16(), a.to("meta")):
        with pytest.raises(TypeError, match="both must be float32, bfloat16 or float16 on the CPU"):
            invariant.multiply(other, b if other.dtype != torch.float64 else b.double())


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("leaves", [1, 2, 5, 12])
def test_kernels_add_leaves_as_the_cpus_product_does(leaves, dtype, device):
    a, b = matrices(37, 7 * leaves, 29, dtype)
    one_of_each_leaf = torch.zeros(7 * leaves, dtype=dtype)
    one_of_each_leaf[torch.arange(leaves) * 7 + torch.randint(7, (leaves,))] = 1
    sparse = a * one_of_each_leaf  # a leaf has one term: every order within it has the same bits
    exact = a.double() @ b.double()
    with by_kernels():
        y = invariant.product_sum(sparse.to(device), b.to(device), leaves)
        assert torch.equal(y.cpu(), product(sparse, b, leaves))
        whole = invariant.product_sum(a.to(device), b.to(device), leaves)
        torch.testing.assert_close(whole.cpu().double(), exact, atol=2e-5, rtol=1e-5)
        for rows, columns in ((slice(0, 1), slice(0, 1)), (slice(17, 30), slice(3, 9)), (slice(5, 37), slice(16, 29))):
            part = invariant.product_sum(a[rows].to(device), b[:, columns].to(device), leaves)
            assert torch.equal(part, whole[rows, columns])
        with pytest.raises(ValueError, match="does not divide into"):
            invariant.product_sum(a.to(device), b.to(device), 7 * leaves + 1)


@pytest.mark.parametrize("architecture", launch.ARCHITECTURES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_take_one_block_for_all_sizes_and_alignments(architecture, dtype):
    blocks = set()
    for rows, each, columns, leaves in (
        (1, 2, 8, 8),
        (37, 6, 29, 4),
        (4096, 12, 1000, 3),
        (512, 16, 4096, 8),
        (9, 5000, 64, 1),
    ):
        for turned in (False, True):
            a = torch.empty(rows, each * leaves, dtype=dtype, device="meta")
            b = torch.empty(columns, each * leaves, dtype=dtype, device="meta").t()
            with launch.recording(architecture) as launches:
                invariant._sum_by_kernel(*((b.t(), a.t()) if turned else (a, b)), leaves)
            assert len(launches) == leaves
            blocks |= {tuple(one.constants[f"BLOCK_{letter}"] for letter in "MNK") for one in launches}
    # Without a tensor core (fp32) an element is one chain of multiply-adds over BLOCK_K, whatever the other two are.
    assert len({block[2] for block in blocks} if dtype == torch.float32 else blocks) == 1


@pytest.mark.parametrize("total", [1, 2, 3, 6, 8, 12, 24])
def test_nodes_of_ranks_make_the_tree(total):
    for world in (world for world in range(1, total + 1) if total % world == 0):
        each = total // world
        nodes = [node for r in range(world) for node in invariant.nodes_within(r * each, (r + 1) * each, total)]
        assert [low for low, _ in nodes] == [0, *(high for _, high in nodes[:-1])] and nodes[-1][1] == total
        sums = {node: torch.tensor([float(sum(range(*node)))]) for node in nodes}
        invariant.add_up(sums, total)
        assert sums == {(0, total): sum(range(total))}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("threads", [1, 2, 3, 9])
def test_activations_do_not_depend_on_an_elements_place(name, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        activation = invariant.activation_in_any_shape(ACTIVATIONS[name])
        z, dy = torch.randn(2, 70_003)
        y, dz = activation.apply(z), activation.backward(dy, z)
        for part in (slice(0, 1), slice(1, 38), slice(777, 70_003), slice(70_000, 70_003)):
            assert torch.equal(activation.apply(z[part]), y[part])
            assert torch.equal(activation.backward(dy[part], z[part]), dz[part])
        torch.testing.assert_close(y, ACTIVATIONS[name].apply(z))
    finally:
        torch.set_num_threads(before)


def train_an_mlp(rank, units, kind, dtype):
    world = dist.get_world_size()
    parts = {"parts": [48, 24, 24]} if kind == "parts" else {}
    options = {"invariant": units, "dtype": dtype, "sequence_parallel": kind == "sequence", **parts}
    torch.manual_seed(1)
    up = weft.ParallelLinear(40, 96, style="column", activation="silu", **options)
    down = weft.ParallelLinear(96, 40, style="row", **options)
    x, dy = (torch.randn(3, 26, 40).to(dtype) for _ in range(2))
    sizes = weft.split_sizes(26, world)
    if kind == "sequence":
        x, dy = (t.split(sizes, 1)[rank].contiguous() for t in (x, dy))
    x.requires_grad_()
    y = down(up(x))
    y.backward(dy)
    found = {"y": y.detach(), "dx": x.grad}
    if kind == "sequence":
        found = {name: communicator(None).all_gather(t.contiguous(), 1, sizes) for name, t in found.items()}
    for layer in (up, down):
        for name, parameter in layer.named_parameters():
            shard = weft.shard_of(parameter)
            whole = parameter.grad if shard is None else shard.gather(parameter.grad)
            found[f"{layer.style} {name}"] = whole.clone()
    return found


@pytest.mark.parametrize(("units", "worlds"), [(8, (2, 4, 8)), (12, (2, 3, 6))])
@pytest.mark.parametrize("kind", ["plain", "sequence", "parts"])
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_layers_have_the_bits_of_one_rank(units, worlds, kind, dtype):
    (of_one,) = run_ranks(train_an_mlp, 1, units, kind, dtype)
    plain = nn.Sequential(nn.Linear(40, 96, dtype=dtype), nn.SiLU(), nn.Linear(96, 40, dtype=dtype))
    assert of_one["y"].shape == plain(torch.zeros(3, 26, 40, dtype=dtype)).shape
    for world in worlds:
        assert_same_bits(of_one, run_ranks(train_an_mlp, world, units, kind, dtype))


@in_the_interpreter
@pytest.mark.kernel
@pytest.mark.parametrize(
    "kind", [pytest.param("sequence", marks=pytest.mark.slow("kernels", "pytorch_ext/ops")), "parts"]
)
def test_layers_by_kernels_have_the_bits_of_one_rank(kind):
    with by_kernels():
        (of_one,) = run_ranks(train_an_mlp, 1, 12, kind, torch.bfloat16)
        for world in (2, 3):
            assert_same_bits(of_one, run_ranks(train_an_mlp, world, 12, kind, torch.bfloat16))


def compare_with_the_ordinary_layer(rank, style):
    torch.manual_seed(1)
    layers = []
    for units in (None, 8):
        torch.manual_seed(2)
        layers.append(weft.ParallelLinear(48, 32, style=style, activation="gelu", invariant=units))
    x = torch.randn(7, layers[0].weight.size(1))
    dy = torch.randn(7, layers[0].weight.size(0))
    results = []
    for layer in layers:
        own = x.clone().requires_grad_()
        layer(own).backward(dy)
        results.append([layer(own).detach(), own.grad, *(p.grad for p in layer.parameters())])
    for ordinary, in_units in zip(*results, strict=True):
        torch.testing.assert_close(in_units, ordinary, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("style", ["column", "row"])
def test_layers_are_near_the_ordinary_ones(style):
    run_ranks(compare_with_the_ordinary_layer, 2, style)


def make_what_is_refused(rank, options, error, text):
    with pytest.raises(error, match=text):
        weft.ParallelLinear(48, 36, **{"style": "column", "invariant": 8, **options})


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({}, ValueError, r"36 features must be that many equal units.*possible here are \[2, 4, 6, 12, 18, 36\]"),
        ({"style": "row", "invariant": 3}, ValueError, "each of 2 ranks"),
        ({"invariant": 4, "unit": 18, "heads": (4, 2)}, ValueError, r"possible here are \[2\]"),
        ({"invariant": 4, "overlap": "always"}, ValueError, "is not supported with invariant"),
    ],
)
def test_units_that_do_not_exist_are_refused(options, error, text):
    run_ranks(make_what_is_refused, 2, options, error, text)


def train_a_model(rank, family, attention, dtype, drops=False, recompute="none", steps=3, **options):
    if drops:
        options |= DROPS[family]
    model = make_model(family, attention, use_cache=False, **options).to(dtype).train()
    weft.parallelize(model, weft.init_mesh(tp=dist.get_world_size())["tp"], invariant=4, recompute=recompute)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = {}

    def keep(step, what, value_of):
        for name, parameter in model.named_parameters():
            shard, value = weft.shard_of(parameter), value_of(parameter).detach()
            found[f"{step} {what} {name}"] = (value if shard is None else shard.gather(value)).clone()

    torch.manual_seed(5)
    for step in range(steps):
        tokens = torch.randint(0, 104, (3, 13))
        output = model(input_ids=tokens, labels=tokens)
        output.loss.backward()
        found |= {f"{step} loss": output.loss.detach(), f"{step} logits": output.logits.detach()}
        keep(step, "gradient", lambda parameter: parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        keep(step, "parameter", lambda parameter: parameter)
    return found


@pytest.mark.parametrize(
    ("family", "attention", "dtype"),
    [
        ("llama", "sdpa", torch.float32),
        ("gpt2", "eager", torch.bfloat16),
        *(
            pytest.param(
                family,
                attention,
                dtype,
                marks=pytest.mark.slow("csrc", "pytorch_ext/ops", "pytorch_ext/tensor_parallel"),
            )
            for family in ("llama", "gpt2", "qwen2", "gemma")
            for attention, dtype in (("sdpa", torch.bfloat16), ("eager", torch.float32))
        ),
    ],
)
def test_models_train_to_the_same_bits_on_any_number_of_ranks(family, attention, dtype):
    (of_one,) = run_ranks(train_a_model, 1, family, attention, dtype)
    for world in (2, 4):
        assert_same_bits(of_one, run_ranks(train_a_model, world, family, attention, dtype))


@pytest.mark.parametrize(
    ("family", "attention", "recompute"),
    [
        ("gpt2", "eager", "selective"),
        *(
            pytest.param(*case, marks=pytest.mark.slow("csrc", "pytorch_ext/ops", "pytorch_ext/tensor_parallel"))
            for case in (("gpt2", "sdpa", "full"), ("llama", "sdpa", "none"), ("gemma", "eager", "full"))
        ),
    ],
)
def test_models_drop_the_same_on_any_number_of_ranks_and_when_recomputed(family, attention, recompute):
    (of_one,) = run_ranks(train_a_model, 1, family, attention, torch.float32, True)
    (kept,) = run_ranks(train_a_model, 1, family, attention, torch.float32)
    assert not torch.equal(of_one["0 loss"], kept["0 loss"])
    for world in (2, 4):
        assert_same_bits(of_one, run_ranks(train_a_model, world, family, attention, torch.float32, True, recompute))


@in_the_interpreter
@pytest.mark.kernel
@pytest.mark.slow("kernels", "pytorch_ext/ops", "pytorch_ext/tensor_parallel")
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_models_by_kernels_train_to_the_same_bits(dtype):
    def train(rank):
        return train_a_model(rank, "llama", "sdpa", dtype, steps=1, num_hidden_layers=1)

    with by_kernels():
        (of_one,) = run_ranks(train, 1)
        for world in (2, 4):
            assert_same_bits(of_one, run_ranks(train, world))


class Merged(nn.Module):
    """Attention whose weights are [batch * heads, T, S], as some models of transformers write it."""

    def __init__(self, written_out):
        super().__init__()
        self.written_out = written_out
        self.query, self.key, self.value, self.out = (nn.Linear(16, 16, bias=False) for _ in range(4))

    def forward(self, x):
        batch, length, _ = x.shape

        def heads(y):
            return y.view(batch, length, -1, 4).transpose(1, 2).reshape(-1, length, 4)

        q, k, v = heads(self.query(x)), heads(self.key(x)), heads(self.value(x))
        if self.written_out:
            weights = F.dropout(torch.bmm(q, k.transpose(1, 2)).softmax(-1), 0.3, self.training)
            y = torch.bmm(weights, v)
        else:
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3 if self.training else 0.0)
        return self.out(y.view(batch, -1, length, 4).transpose(1, 2).reshape(batch, length, -1))


def train_merged_heads(rank, written_out):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 16), Merged(written_out), nn.Linear(16, 20))
    weft.parallelize(model, weft.init_mesh(tp=dist.get_world_size())["tp"], invariant=4)
    torch.manual_seed(3)
    y = model(torch.randint(0, 20, (2, 5)))
    y.square().sum().backward()
    weight = model[1].query.weight
    return {"y": y.detach(), "gradient": weft.shard_of(weight).gather(weight.grad)}


@pytest.mark.parametrize("written_out", [True, False])
def test_heads_beside_the_batch_drop_the_same(written_out):
    (of_one,) = run_ranks(train_merged_heads, 1, written_out)
    for world in (2, 4):
        assert_same_bits(of_one, run_ranks(train_merged_heads, world, written_out))


def attend(query, key, value, dy, heads, together, mask=None):
    """Return output and gradients of the attention of some KV heads, each with so many query heads."""
    queries = slice(heads.start * together, heads.stop * together)
    own = [x[:, part].clone().requires_grad_() for x, part in ((query, queries), (key, heads), (value, heads))]
    with same_bits():
        y = F.scaled_dot_product_attention(*own, mask, is_causal=mask is None, enable_gqa=together > 1)
    y.backward(dy[:, queries])
    grads = [x.grad.unflatten(1, (len(range(heads.start, heads.stop)), -1)) for x in own]
    return [y.detach().unflatten(1, (heads.stop - heads.start, together)), *grads]


@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize("size", [5, 6, 8])
def test_heads_attend_alike_beside_any_others(size, together):
    query, dy = torch.randn(2, 2, 13, 4 * together, size).transpose(2, 3)
    key, value = torch.randn(2, 2, 13, 4, size).transpose(2, 3)
    whole = attend(query, key, value, dy, slice(0, 4), together)
    for heads in (slice(0, 1), slice(1, 4), slice(2, 4)):
        part = attend(query, key, value, dy, heads, together)
        assert all(torch.equal(x[:, heads], y) for x, y in zip(whole, part, strict=True)), heads
    exact = F.scaled_dot_product_attention(
        *(x.double() for x in (query, key, value)), is_causal=True, enable_gqa=together > 1
    )
    torch.testing.assert_close(whole[0].flatten(1, 2).double(), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.kernel
@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(one, marks=() if one == torch.bfloat16 else pytest.mark.slow("kernels", "pytorch_ext/ops"))
        for one in DTYPES
    ],
)
@pytest.mark.parametrize("masked", [False, True])
def test_heads_attend_alike_by_kernels(dtype, masked, device):
    query, dy, key, value = (torch.randn(2, heads, 37, 24, dtype=dtype, device=device) for heads in (8, 8, 4, 4))
    mask = torch.ones(37, 37, dtype=torch.bool, device=device).tril() if masked else None
    with by_kernels():
        whole = attend(query, key, value, dy, slice(0, 4), 2, mask)
        for heads in (slice(0, 1), slice(1, 4)):
            part = attend(query, key, value, dy, heads, 2, mask)
            assert all(torch.equal(x[:, heads], y) for x, y in zip(whole, part, strict=True)), heads
    exact = F.scaled_dot_product_attention(*(x.double() for x in (query, key, value)), is_causal=True, enable_gqa=True)
    atol = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(whole[0].flatten(1, 2).double(), exact, atol=atol, rtol=0)


@pytest.mark.kernel
def test_attention_that_the_kernel_does_not_take_is_atens(device):
    for shapes in (
        ((2, 4, 5, 300), (2, 4, 5, 300)),  # the largest head of the kernel has 256 elements
        ((2, 4, 5, 8), (1, 4, 5, 8)),  # one batch for all
        ((2, 0, 5, 8), (2, 0, 5, 8)),
        ((4, 5, 8), (4, 5, 8)),
    ):
        query, key = (torch.randn(shape, device=device) for shape in shapes)
        with by_kernels(), same_bits():
            y = F.scaled_dot_product_attention(query, key, key, is_causal=True)
        exact = F.scaled_dot_product_attention(query.double(), key.double(), key.double(), is_causal=True)
        torch.testing.assert_close(y.double(), exact, atol=1e-5, rtol=1e-5)


class Drops(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.up, self.drop, self.down = (
            nn.Embedding(9, 16),
            nn.Linear(16, 32),
            nn.Dropout(),
            nn.Linear(32, 16),
        )

    def forward(self, tokens):
        return self.down(self.drop(self.up(self.words(tokens))))


def parallelize_what_is_refused(rank):
    mesh = weft.init_mesh(tp=2)["tp"]
    plan = {"up": "column", "down": "row"}
    with pytest.raises(ValueError, match="drop drops elements of a part of up, and would drop others"):
        weft.parallelize(Drops(), mesh, plan=plan, invariant=4)
    weft.parallelize(Drops(), mesh, plan={**plan, "drop": "dropout"}, invariant=4)
    images = nn.Sequential(nn.Conv2d(3, 8, 3))
    with pytest.raises(ValueError, match="0: style 'column' of nn.Conv2d is not supported with invariant=4"):
        weft.parallelize(images, mesh, plan={"0": "column"}, invariant=4)
    with pytest.raises(ValueError, match="invariant on a mesh with cp needs context="):
        weft.parallelize(nn.Sequential(nn.Linear(8, 8)), weft.init_mesh(cp=2), plan={}, invariant=2)


def test_what_has_no_invariant_form_is_refused():
    run_ranks(parallelize_what_is_refused, 2)


def parallelize_a_model_of_few_heads(rank):
    weft.parallelize(make_model("llama", "sdpa"), weft.init_mesh(tp=2), invariant=8)


def test_a_plan_that_would_split_other_layers_on_more_ranks_is_refused():
    for outcome in try_ranks(parallelize_a_model_of_few_heads, 2):
        assert isinstance(outcome.error, ValueError) and "invariant=8" in str(outcome.error), outcome


def explain_layers(rank):
    row = weft.ParallelLinear(48, 32, style="row", invariant=4, sequence_parallel=True, dtype=torch.bfloat16)
    return weft.explain(row, tokens=10).as_dict()


def test_explain_names_the_product_and_its_sums():
    report = str(run_ranks(explain_layers, 2)[0])
    assert "weft CPU product" in report and "4 units" in report and "all_reduce" in report


def test_batched_products_cast_under_autocast_as_torchs():
    a, b = torch.randn(2, 3, 5), torch.randn(2, 5, 4)
    with torch.autocast("cpu", torch.bfloat16):
        for left, right in ((a, b), (a, b.bfloat16())):
            y = invariant.batched_product(left, right)
            assert y.dtype == (left @ right).dtype == torch.bfloat16
            assert torch.equal(y, invariant.batched_product(a.bfloat16(), b.bfloat16()))
