"""Any array that is handed to a compiled function is refused in a sentence or computed right."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from clients_helpers import joined, make_data, make_mlp

from fedsim.clients import SGD
from fedsim.errors import FedsimError
from fedsim.kernels import classes, convolutions, dense, normals, rows
from fedsim.kernels.classes import ClassBatches
from fedsim.kernels.convolutions import Patches, Windows
from fedsim.kernels.dense import DensePass, DenseShape, dense_kernel
from fedsim.randomness import Randomness
from fedsim.training import Trainer

MODULES = (classes, convolutions, dense, normals, rows)
compiled = pytest.mark.skipif(
    rows._compiled() is None or normals._compiled() is None, reason="there is no C compiler"
)


def normal(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(len(shape)))


SHAPES = [DenseShape(5, 4, 0, 20, relu=True), DenseShape(4, 3, 32, -1, relu=False)]
PATCHES, WINDOWS = Patches((6, 5, 2), (3, 2), (1, 1)), Windows((2, 2), (2, 2), (0, 0))


@functools.cache
def kernel():
    return dense_kernel(SHAPES, 44, 6, torch.float32)


def gradient(rows, x, delta):
    """A forward and a backward pass."""
    return kernel().gradient(rows, x, lambda _: delta, with_inputs=True)


def buffers():
    return gradient(normal(2, 44), normal(2, 6, 5), normal(2, 6, 3))[0].buffers


def dense_pass(x, values):
    return DensePass(kernel(), 2, x, values)


def winners():
    _, places = convolutions.convolve_and_pool(
        normal(2, 6, 5, 2), normal(7, 3, 4), None, PATCHES, WINDOWS
    )
    return places.flatten(1, 2)


def subtracted(rates, old, new, x, values):
    dense_pass(x, values).subtract(rates, old, new)
    return new


def added(block, factors, coarse, fine):
    rows.add_rounded(block, factors, coarse, fine, 2.0**20)
    return coarse, fine


def classified(outputs, targets, weights):
    batches = ClassBatches(targets, weights, torch.ones(3, 4, dtype=torch.bool))
    return batches.deltas(outputs, 1), batches.values()


# For each compiled function a call of it, and arrays that it takes.
CALLS = {
    "forward": (
        lambda r, x: gradient(r, x, normal(2, 6, 3))[0].values(1),
        lambda: (normal(2, 44), normal(2, 6, 5)),
    ),
    "backward": (
        lambda r, x, d: gradient(r, x, d)[1],
        lambda: (normal(2, 44), normal(2, 6, 5), normal(2, 6, 3)),
    ),
    "subtract": (
        subtracted,
        lambda: (normal(2), normal(2, 44), normal(2, 44), normal(2, 6, 5), buffers()),
    ),
    "inner": (
        lambda x, b, y, c: dense_pass(x, b).inner(dense_pass(y, c)),
        lambda: (normal(2, 6, 5), buffers(), normal(2, 6, 5), buffers()),
    ),
    "squares": (rows.squared_norms, lambda: (normal(3, 9),)),
    "add": (
        lambda r, f, c: added(r, f, c, None)[0],
        lambda: (normal(3, 9), normal(3, dtype=torch.float64), normal(9, dtype=torch.float64)),
    ),
    "add_fine": (
        added,
        lambda: (normal(3, 9), *(normal(n, dtype=torch.float64) for n in (3, 9, 9))),
    ),
    "gradients": (
        classified,
        lambda: (normal(2, 4, 3), torch.tensor([[0, 1, 2, 0]] * 3), normal(3, 4)),
    ),
    "convolve_and_pool": (
        lambda x, w, b: convolutions.convolve_and_pool(x, w, b, PATCHES, WINDOWS),
        lambda: (normal(2, 6, 5, 2), normal(7, 3, 4), normal(7)),
    ),
    "weight_gradient": (
        lambda x, d, p: convolutions.weight_gradient(x, d, p, PATCHES),
        lambda: (normal(2, 6, 5, 2), normal(2, 4, 7), winners()),
    ),
    "input_gradient": (
        lambda w, d, p: convolutions.input_gradient(w, d, p, PATCHES),
        lambda: (normal(7, 3, 4), normal(2, 4, 7), winners()),
    ),
    "normals": (
        lambda count, terms: normals.sums_of_normals(
            np.random.Generator(np.random.Philox(key=1)), count, terms
        ),
        lambda: (2000, 2),
    ),
}
WITHOUT_ARGUMENTS = {"learn"}


def gapped(t, axis):
    """The same numbers with gaps along an axis."""
    shape = list(t.shape)
    shape[axis] = 3 * max(shape[axis], 1)
    wide = t.new_zeros(shape)
    part = wide.transpose(0, axis)[::3].transpose(0, axis) if t.numel() else wide[:0]
    return part.copy_(t)


def unaligned(t):
    """The same numbers, beginning at an odd address."""
    memory = bytearray(t.numel() * t.element_size() + 65)
    array = np.frombuffer(memory, np.uint8)[1 : 1 + t.numel() * t.element_size()]
    array = array.view(t.numpy().dtype).reshape(t.shape)
    array[...] = t.numpy()
    return torch.from_numpy(array)


def emptied(t):
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


def negated(t):
    """The same numbers by a bit that says that those in memory have the other sign."""
    return torch._neg_view(-t)


def out_of_reach(t):
    return t.clone().fill_(2**40 if t.dtype == torch.int64 else 7)


SAME = {
    "as it is": lambda t: t,
    "unaligned": unaligned,
    "negated": negated,
    "with a gradient": lambda t: t.clone().requires_grad_() if t.is_floating_point() else t,
    **{f"gaps along {k}": lambda t, k=k: gapped(t, min(k, t.dim() - 1)) for k in range(4)},
    "from the end": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
}
"""The same numbers, laid out otherwise: refused, or the result is the same."""

NO_TENSOR = {
    "a number": lambda t: 3,
    "nothing": lambda t: None,
    "numpy's": lambda t: t.numpy(),
    "a list": lambda t: t.tolist(),
}
WRONG = {
    "half": lambda t: t.to(torch.float16),
    "other precision": lambda t: t.to(torch.float32 if t.dtype == torch.float64 else torch.float64),
    "int32": lambda t: t.to(torch.int32),
    "complex": lambda t: t.to(torch.complex64),
    "meta": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
    "no storage": emptied,
    "no rows": lambda t: t[:0],
    "a row less": lambda t: t[:-1],
    "a row more": lambda t: torch.cat([t, t[:1]]),
    "a number less": lambda t: t[..., :-1].contiguous(),
    "one number": lambda t: t.flatten()[0],
    "flat": lambda t: t.flatten() if t.dim() > 1 else t[None],
    "an axis more": lambda t: t.unsqueeze(-1),
    "negative": lambda t: t.clone().fill_(-5),
    "out of reach": lambda t: t.clone().fill_(2**40),
}
OTHER_NUMBERS = ("negative", "out of reach")  # which fit among floats
OWN_SHAPE = ("no rows", "a row less", "a row more")
FITS = {
    *(("squares", 0, name) for name in (*OWN_SHAPE, "a number less", "other precision")),
    *((name, 0, "other precision") for name in ("add", "add_fine")),
    *(("gradients", 0, name) for name in OWN_SHAPE[:2]),
    *(("convolve_and_pool", 0, name) for name in OWN_SHAPE),
    ("convolve_and_pool", 2, "nothing"),
    ("add_fine", 3, "nothing"),
    ("normals", 0, "none"),
}
"""Arguments of `WRONG` that fit where they are."""

VARIANTS = SAME | WRONG | NO_TENSOR
NUMBERS = {"negative": -1, "none": 0, "huge": 2**63, "half": 0.5, "nothing": None, "text": "2"}


def outcome(call, arguments):
    """What a call gives, or the error that it raises."""
    try:
        return call(*arguments)
    except Exception as error:
        return error


def same(one, other):
    ones, others = (r if isinstance(r, tuple) else (r,) for r in (one, other))
    return all(
        np.array_equal(*(t.detach().numpy() for t in map(torch.as_tensor, pair)))
        for pair in zip(ones, others, strict=True)
    )


def tries_of(entry):
    """For each wrong argument of a function: its position, what is wrong, and the arguments."""
    _, make = CALLS[entry]
    for k, argument in enumerate(make()):
        variants = VARIANTS if torch.is_tensor(argument) else NUMBERS
        for name, variant in variants.items():
            arguments = [*make()]
            try:
                arguments[k] = variant(arguments[k]) if callable(variant) else variant
            except (RuntimeError, NotImplementedError):  # torch has no such tensor
                continue
            yield k, name, arguments


def is_right(result, right, *, name, fits):
    """Whether a call with a wrong argument was refused in a sentence, or computed right."""
    if name in SAME and not isinstance(result, Exception):
        return same(result, right)
    if fits:
        return not isinstance(result, Exception)
    if name in NO_TENSOR:
        return isinstance(result, FedsimError | AttributeError | TypeError)
    return type(result) is FedsimError


def fuzz():
    """Print every fault; run in a process of its own, which a signal may end."""
    for entry, (call, make) in CALLS.items():
        right = call(*make())
        for k, name, arguments in tries_of(entry):
            floats = torch.is_tensor(make()[k]) and make()[k].is_floating_point()
            fits = (entry, k, name) in FITS or (floats and name in OTHER_NUMBERS)
            result = outcome(call, arguments)
            if not is_right(result, right, name=name, fits=fits):
                print(entry, k, name, str(result).partition("\n")[0], flush=True)
    print("all tried")


@compiled
def test_no_argument_of_any_compiled_function_ends_the_process() -> None:
    command = [sys.executable, "-c", "import test_arguments; test_arguments.fuzz()"]
    found = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    run = subprocess.run(command, env=found, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "all tried\n"), run.stdout + run.stderr


def test_every_compiled_function_is_tried_and_gets_no_address_of_another_place() -> None:
    entries = {name for module in MODULES for name in module._ARGUMENTS}
    assert entries == {*CALLS} | WITHOUT_ARGUMENTS
    for path in Path(rows.__file__).parent.glob("*.py"):
        code = path.read_text(encoding="utf-8")
        code = code.partition("\ndef _self_test")[0]
        assert bool(re.search(r"\bdata_ptr\b", code)) == (path.stem == "arguments"), path


class Indexes(SGD):
    """Takes a client's gradient by its number, as one would a tensor's row."""

    def step(self, state, gradient, at):
        state["theta"] -= torch.cat([gradient[k].dense() for k in range(len(state["theta"]))])


class Slices(SGD):
    """Takes every other client's gradient."""

    def step(self, state, gradient, at):
        theta = state["theta"]
        for first in (0, 1):
            theta[first::2] -= 0.1 * gradient[first::2].dense()


def trained(algorithm, **settings):
    trainer = Trainer(
        make_mlp(), algorithm, make_data([9] * 5), batch_size=3, randomness=Randomness(1),
        **settings,
    )  # fmt: skip
    return joined(trainer.train(trainer.initial(), np.arange(5), 1))[0]


HOW = {
    "compiled": {"kernel": "compiled"},
    "eager": {"kernel": "eager"},
    "func": {"path": "func"},
    "plain": {"path": "plain"},
}
HOW = {k: v for k, v in HOW.items() if k != "compiled" or dense.is_compiled(torch.float32)}


@pytest.mark.parametrize("how", HOW)
def test_a_gradient_is_refused_by_number_and_given_by_any_slice(how) -> None:
    with pytest.raises(FedsimError, match=r"sliced by client, such as gradient\[2:3\], .* by 0\."):
        trained(Indexes(), **HOW[how])
    torch.testing.assert_close(trained(Slices(), **HOW[how]), trained(SGD(lr=0.1), **HOW[how]))
