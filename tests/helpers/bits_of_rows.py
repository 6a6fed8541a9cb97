"""Tries the functions that run on several units at once: a row's bits, forward and backward, beside any other rows.

Run as a script, it prints the functions with other bits. Torch reads ATEN_CPU_CAPABILITY and MKL_CBWR when it starts.
"""

import random
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.invariant.exact_functions import draws_of_units
from weft.invariant.trial import EVERY_ELEMENT

METHODS = """
    neg abs square reciprocal sqrt isnan isinf floor ceil round sign tanh sigmoid exp log erf rsqrt clone contiguous detach
    float half bfloat16 double int long bool logical_not
"""
FUNCTIONS = "relu silu gelu mish softplus elu selu celu logsigmoid"
PAIRS = "div maximum minimum eq ne lt le gt ge logical_and logical_or"
OF_ONE = {
    **{name: getattr(Tensor, name) for name in METHODS.split()},
    **{name: getattr(F, name) for name in FUNCTIONS.split()},
    "add": lambda x: x + 0.3,
    "radd": lambda x: 0.3 + x,
    "sub": lambda x: x - 0.3,
    "rsub": lambda x: 0.3 - x,
    "mul": lambda x: x * 0.3,
    "rmul": lambda x: 0.3 * x,
    "truediv": lambda x: x / 0.3,
    "rtruediv": lambda x: 0.3 / x,
    "rdiv": lambda x: 0.3 / x,
    "pow": lambda x: x**2.5,
    "pow 2": lambda x: x**2,
    "pow 3": lambda x: x**3,
    "pow -1/2": lambda x: x**-0.5,
    "clamp": lambda x: x.clamp(0.3, 0.7),
    "clamp_min": lambda x: x.clamp_min(0.3),
    "clamp_max": lambda x: x.clamp_max(0.7),
    "masked_fill": lambda x: x.masked_fill(x > 0.5, -1e9),
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softplus sharp": lambda x: F.softplus(x, 0.7),
    "to": lambda x: x.to(torch.float64),
    "type": lambda x: x.type(torch.float64),
    "type_as": lambda x: x.type_as(torch.ones(1, dtype=torch.float64)),
    "zeros_like": torch.zeros_like,
    "ones_like": torch.ones_like,
    "bitwise_not": lambda x: (x * 9).int().bitwise_not(),
    "invert": lambda x: ~(x * 9).int(),
}
OF_TWO = {
    **{name: getattr(torch, name) for name in PAIRS.split()},
    "add two": torch.add,
    "sub two": torch.sub,
    "mul two": torch.mul,
    "where": lambda x, y: torch.where(x > 0.5, x, y),
    "bitwise_and": lambda x, y: (x > 0.5).bitwise_and(y > 0.5),
    "bitwise_or": lambda x, y: (x > 0.5).bitwise_or(y > 0.5),
    "and": lambda x, y: (x > 0.5) & (y > 0.5),
    "or": lambda x, y: (x > 0.5) | (y > 0.5),
}
OF_ROWS = {
    "softmax": lambda x: F.softmax(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "sum": lambda x: x.sum(-1),
    "mean": lambda x: x.mean(-1, keepdim=True),
    "layer_norm": lambda x: F.layer_norm(x, (x.size(-1),)),
    "linear": lambda x: F.linear(x, torch.linspace(-1, 1, 7 * x.size(-1)).view(7, -1).to(x.dtype)),
}
MASK = torch.zeros(300, 300).masked_fill(torch.ones(300, 300).tril() == 0, -torch.inf)
ATTENTION = {
    "causal": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "grouped": lambda q, k, v: F.scaled_dot_product_attention(torch.cat([q, -q], 1), k, v, enable_gqa=True),
    "masked": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, MASK[: q.size(2), : k.size(2)].to(q.dtype)),
}


def differs(function, operands, splits):
    """Return whether some part of the batch has other bits than in the whole."""

    def run(xs, dy):
        xs = [x.detach().clone().requires_grad_() for x in xs]
        with draws_of_units(None):
            y = function(*xs)
        if not y.requires_grad or not y.is_floating_point():
            return y, []
        return y, torch.autograd.grad(y, xs, torch.randn_like(y) if dy is None else dy, allow_unused=True)

    y, _ = run(operands, None)
    dy = torch.randn(y.shape).to(y.dtype) if y.is_floating_point() else None
    y, gradients = run(operands, dy)
    for parts in splits:
        for number in range(parts):
            own, of_own = run(
                *[[x.chunk(parts)[number] for x in operands], None if dy is None else dy.chunk(parts)[number]]
            )
            if not torch.equal(own, y.chunk(parts)[number]):
                return True
            for g, whole in zip(of_own, gradients, strict=True):
                if g is not None and not torch.equal(g, whole.chunk(parts)[number]):
                    return True
    return False


def shapes(large):
    sizes = (
        (random.randint(100, 200), random.randint(300, 900))
        if large
        else (random.randint(1, 40), random.randint(1, 130))
    )
    batch = random.choice((4, 6, 12))
    return (batch, *sizes), (2, batch // 2, batch)


def main():
    torch.manual_seed(0)
    random.seed(0)
    found = []
    for threads in (1, 4):
        torch.set_num_threads(threads)
        for dtype in (torch.float32, torch.bfloat16):
            for large in (False, False, False, True):
                for name, function in {**OF_ONE, **OF_TWO, **OF_ROWS}.items():
                    shape, splits = shapes(large)
                    operands = [torch.rand(shape).add(0.01).to(dtype) for _ in range(1 + (name in OF_TWO))]
                    if differs(function, operands, splits):
                        found.append((name, dtype, threads))
            for name, heads, size in product(ATTENTION, (1, 2), (16, 64, 128)):
                for length in (16, 100, random.randint(1, 300)):
                    operands = list(torch.randn(3, 4, heads, length, size).to(dtype))
                    if differs(ATTENTION[name], operands, (2, 4)):
                        found.append((name, heads, size, length, dtype, threads))
    tried = {name.split()[0] for name in (*OF_ONE, *OF_TWO)}
    assert tried == EVERY_ELEMENT, tried ^ EVERY_ELEMENT
    print("other bits:", found)


if __name__ == "__main__":
    main()
