"""Whether what is taken for gradients of single examples is that: tried when a trainer is built.

A bound on an example's gradient bounds nothing if other examples have a part in it. Rows are rows
of one example by how they are made (`fedsim.training.paths.examples`): from a graph that was read,
or one example at a time. This is a second look, on made-up examples, never on anybody's data: what
a probe finds must not tell of them. It refuses a model that mixes them where it could be seen to,
which would be trained as something else one example at a time; one that takes no example alone; and
one that changes its buffers or attributes, or whose loss does. Of the methods to compute gradients
the fastest that gives what one example at a time gives is used.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.errors import FedsimError
from fedsim.models.parameters import call_with
from fedsim.training.own_state import OwnState
from fedsim.training.paths.choice import TrainedModel
from fedsim.training.paths.examples import (
    GradientMethod,
    OneByOne,
    Unrolled,
    Vmapped,
    is_recurrent,
)
from fedsim.training.paths.factored import Hooked, ProgramRows, owned_by_layers, product_layers
from fedsim.training.side_effects import exact, seeded

_log = logging.getLogger(__name__)

EXAMPLES = 5
WATCHED = (0, 2, EXAMPLES - 1)
TOLERANCE = 1e-5
"""Of what rounding may do to an example in a batch of another size, or by another method."""

SEED = 1


def gradient_methods(trained: TrainedModel) -> list[GradientMethod]:
    """All that a model's structure allows, from the fastest to the one that takes everything."""
    model, packing, loss, program = trained.model, trained.packing, trained.loss, trained.program
    state = OwnState(model, loss, packing.slices)
    structure, read_loss = trained.reading.structure, trained.reading.loss
    methods: list[GradientMethod] = []
    recurrent: list[GradientMethod] = []
    if structure is not None and read_loss is not None:
        module = structure.module
        if program is not None and program.by_example:
            methods.append(ProgramRows(module, packing, read_loss, program))
        elif layers := product_layers(structure, packing):
            methods.append(Hooked(module, packing, read_loss, layers))
        if is_recurrent(module) and owned_by_layers(structure, packing):
            recurrent.append(Unrolled(module, packing, read_loss))
    vmapped = Vmapped(model, packing, loss, state)
    drawing = trained.draws.training or trained.draws.evaluation
    return [*methods, vmapped, *recurrent, OneByOne(model, packing, loss, state, drawing)]


@dataclass(frozen=True)
class Probe:
    """A model and a loss, with made-up examples of its data's shapes and dtypes.

    What the model draws is held fixed where examples change, and left out (by evaluating) where
    batches of several sizes are compared.
    """

    trained: TrainedModel

    def fastest(self, methods: Sequence[GradientMethod]) -> GradientMethod:
        """The first of the methods, from fast to slow, that gives gradients of single examples.

        Raises
        ------
        FedsimError
            If the model or the loss mixes examples, or cannot take one alone.
        """
        x = self.trained.data.x
        if not len(x):
            return methods[0]  # no client has an example whose gradient could be taken
        with exact(x.device):
            state = OwnState(self.trained.model, self.trained.loss, self.trained.packing.slices)
            with state.restored():
                batch, others = self._made_up()
                self._require_separate(batch, others)
                changed = state.changed
            if changed:
                raise FedsimError(
                    f"{' and '.join(changed)} changes as examples go through, so that one could "
                    "leave a trace in the next one's gradient; with example-level privacy a model "
                    "and a loss must leave their buffers and attributes as they are."
                )
            if self.trained.draws.evaluation:
                methods = methods[-1:]  # no two of them could be compared
            found: GradientMethod | None = None
            why = ""
            for method in methods:
                try:
                    fault = self._fault(method, methods[-1], batch, others)
                # A user's code, in surroundings that it was not written for.
                except (Exception, SystemExit) as error:
                    fault = f"{type(error).__name__}: {error}"
                if not fault:
                    found = method
                    break
                why = f"{method.name}: {fault}"
            self._train(True)
        if found is None:
            raise FedsimError(
                f"the model's examples cannot be taken one at a time ({why}), so that it cannot be "
                "trained with example-level privacy."
            )
        if found is methods[-1] and len(methods) > 1:
            _log.warning("examples go through this model one by one, which is slow (%s)", why)
        return found

    def _train(self, drawing: bool) -> None:
        """The mode of training, or the one in which a model does not draw."""
        structure = self.trained.reading.structure
        for module in (self.trained.model, *((structure.module,) if structure else ())):
            module.train(drawing or not self.trained.draws.training)

    def _made_up(self) -> tuple[_Batch, _Batch]:
        """Two batches that have nothing in common, and that the model takes.

        Where not even the loss of one is finite, what it is made of hides behind NaN: others are
        tried.
        """
        generator = torch.Generator().manual_seed(SEED)
        x, y = self.trained.data.empty(self.trained.packing.layout.dtype)
        pairs: list[tuple[_Batch, _Batch]] = []
        failure: BaseException | None = None
        for positive in (False, True):
            first, second = (
                _Batch(_like(x, generator, k, positive), _like(y, generator, k, positive))
                for k in (0, 1)
            )
            try:
                losses = torch.cat([self._run(batch)[1] for batch in (first, second)])
            except FedsimError:
                raise
            # Numbers below zero, or classes of zero, need not suit a user's model.
            except (Exception, SystemExit) as error:
                failure = error
                continue
            pairs.append((first, second))
            if bool(torch.isfinite(losses).all()):
                return first, second
        if pairs:
            return pairs[0]
        raise FedsimError(
            "the model or its loss could not be tried on made-up examples "
            f"({type(failure).__name__}: {failure}), as it must before it is trained with "
            "example-level privacy; it must take any real inputs, or the classes or tokens 1 and 2."
        ) from failure

    @property
    def _theta(self) -> Tensor:
        """Somewhere near the initial parameters: layers that start at zero hide what they do."""
        generator = torch.Generator().manual_seed(SEED)
        row = self.trained.packing.layout.flatten(dict(self.trained.model.named_parameters()))
        noise = torch.randn(row.shape, generator=generator, dtype=torch.float64)
        return self.trained.packing.pack((row + 0.05 * noise.to(row))[None])[0]

    @torch.no_grad()
    def _run(self, batch: _Batch, *, drawing: bool = True) -> tuple[Tensor | None, Tensor]:
        """Outputs, if they are one tensor with a row for each example, and losses ``[B]``."""
        self._train(drawing)
        theta, before = self._theta, self._theta
        named = self.trained.packing.named(theta)
        with seeded(SEED, batch.x.device):
            outputs = call_with(self.trained.model, named, batch.x.clone())
            losses = self.trained.loss(outputs, batch.y)
        if not torch.equal(theta, before):
            raise FedsimError(
                "the model or its loss writes to parameters that are trained as examples go "
                "through; with example-level privacy only the noisy step may."
            )
        if not isinstance(losses, Tensor) or losses.shape != batch.y.shape[:1]:
            shape = list(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            raise FedsimError(
                f"the loss gives {shape} for {len(batch.y)} examples; with example-level privacy "
                f"it must give one number for each, [{len(batch.y)}]."
            )
        rows = isinstance(outputs, Tensor) and outputs.shape[:1] == losses.shape
        return outputs if rows else None, losses

    def _require_separate(self, batch: _Batch, others: _Batch) -> None:
        """Refuse a model or a loss in which an example's result follows from other examples."""
        results = self._run(batch)
        still = self._run(batch, drawing=False)
        for j in WATCHED:
            changed = self._run(others.with_example(j, batch))
            self._require_same(results, changed, j, j, "what the other examples are")
            if not self.trained.draws.evaluation:
                try:
                    alone = self._run(batch.only(j), drawing=False)
                except (Exception, SystemExit) as error:
                    raise FedsimError(
                        "the model does not take one example alone "
                        f"({type(error).__name__}: {error}), so that it cannot be trained with "
                        "example-level privacy."
                    ) from error
                self._require_same(still, alone, j, 0, "how many examples there are")

    @staticmethod
    def _require_same(
        first: tuple[Tensor | None, Tensor],
        second: tuple[Tensor | None, Tensor],
        j: int,
        k: int,
        depends: str,
    ) -> None:
        for what, a, b in zip(("output", "loss"), first, second, strict=True):
            if a is None or b is None:
                continue
            if a.shape[1:] != b.shape[1:] or _distance(a[j], b[k]) > TOLERANCE * _size(a, b):
                culprit = "model" if what == "output" else "model or its loss"
                raise FedsimError(
                    f"the {culprit} mixes examples: the {what} of one depends on {depends}, so "
                    "that no bound on an example's gradient would hold; with example-level privacy "
                    "each example must go through by itself (sequences batch-first, no statistics "
                    "over a batch)."
                )

    def _fault(
        self, method: GradientMethod, reference: GradientMethod, batch: _Batch, others: _Batch
    ) -> str:
        """What is wrong with a method; empty if nothing is."""
        rows, losses = self._rows(method, batch)
        if rows.shape != (EXAMPLES, self.trained.packing.layout.d):
            return f"it gives {len(rows)} gradients for {EXAMPLES} examples"
        for j in WATCHED:
            changed, their_losses = self._rows(method, others.with_example(j, batch))
            if not (_same_bits(rows[j], changed[j]) and _same_bits(losses[j], their_losses[j])):
                return "an example's gradient has other bits beside other examples"
        if method is reference or self.trained.draws.evaluation:
            return ""
        still, _ = self._rows(method, batch, drawing=False)
        for j in range(EXAMPLES):
            alone, _ = self._rows(reference, batch.only(j), drawing=False)
            if _distance(still[j], alone[0]) > TOLERANCE * _size(alone, still):
                return "an example's gradient is not what it is alone"
        return ""

    def _rows(
        self, method: GradientMethod, batch: _Batch, *, drawing: bool = True
    ) -> tuple[Tensor, Tensor]:
        self._train(drawing)
        with seeded(SEED, batch.x.device):
            rows, losses = method.of_client(self._theta, batch.x.clone(), batch.y)
        return rows.dense()[0], losses


@dataclass(frozen=True)
class _Batch:
    x: Tensor
    y: Tensor

    def only(self, j: int) -> _Batch:
        return _Batch(self.x[j : j + 1], self.y[j : j + 1])

    def with_example(self, j: int, batch: _Batch) -> _Batch:
        """These examples, but the one at ``j`` from another batch."""
        x, y = self.x.clone(), self.y.clone()
        x[j], y[j] = batch.x[j], batch.y[j]
        return _Batch(x, y)


def _like(tensor: Tensor, generator: torch.Generator, k: int, positive: bool) -> Tensor:
    """Made-up values: real numbers, larger ones for ``k = 1``; or classes, tokens or lengths."""
    shape = (EXAMPLES, *tensor.shape[1:])
    if not tensor.is_floating_point():
        values = torch.randint(2, shape, generator=generator)
        return ((1 - values if k else values) + int(positive)).to(tensor)
    draw = torch.rand if positive else torch.randn
    return (draw(shape, generator=generator) * (1 + 9 * k)).to(tensor)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def _distance(a: Tensor, b: Tensor) -> float:
    """Norm of the difference; infinite if not even what is not finite is the same."""
    if _same_bits(a, b):
        return 0.0
    difference = float(torch.linalg.vector_norm((a - b).double()))
    return difference if difference == difference else float("inf")


def _size(a: Tensor, b: Tensor) -> float:
    """Norm of the largest row."""
    rows = torch.cat([a.flatten(1) if a.dim() > 1 else a[:, None] for a in (a, b)])
    return float(torch.linalg.vector_norm(rows.double(), dim=1).max())
