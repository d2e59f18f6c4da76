"""Test, when a trainer is built, that per-example gradients depend on one example each.

A bound on an example's gradient is void if other examples contribute to it. That they do not is
ensured by how rows are computed (`fedsim.training.paths.examples`): from a graph that was read, or
one example at a time. The probe is a second check. It uses made-up examples and never real data,
since its result must not depend on anyone's data. It refuses a model that visibly mixes examples
(one at a time, it would be trained as a different model), a model that does not take one example
alone, and a model or a loss that changes its buffers or attributes. Of the gradient methods it
picks the fastest one that gives the same as one example at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.errors import FedsimError, printable
from fedsim.models.parameters import call_with
from fedsim.named_tensors import each
from fedsim.training.own_state import OwnState
from fedsim.training.paths.dropout import DropoutPath
from fedsim.training.paths.examples import (
    GradientMethod,
    OpacusMethod,
    SingleExampleMethod,
    VmapMethod,
    is_recurrent,
)
from fedsim.training.paths.factored import (
    HookMethod,
    ProgramMethod,
    owned_by_layers,
    product_layers,
)
from fedsim.training.paths.masks import with_masks
from fedsim.training.paths.path_choice import TrainedModel
from fedsim.training.paths.recurrent import with_products
from fedsim.training.side_effects import reproducible_arithmetic, seeded

_log = logging.getLogger(__name__)

EXAMPLES = 5
WATCHED = (0, 2, EXAMPLES - 1)  # first, middle and last
TOLERANCE = 1e-5
"""Relative tolerance for rounding in single precision; see `Probe._tolerance` for half."""

SEED = 1


def gradient_methods(
    trained: TrainedModel, path: DropoutPath | None = None
) -> list[GradientMethod]:
    """Methods that a model's structure allows, from the fastest to one that takes every model.

    With the path of a model with dropout, they take its masks among the inputs.
    """
    model, packing, loss, program = trained.model, trained.packing, trained.loss, trained.program
    state = OwnState(model, loss, packing.slices)
    structure, read_loss = trained.reading.structure, trained.reading.loss
    methods: list[GradientMethod] = []
    if path is not None and structure is not None:
        model, loss = path.model, path.loss
        if layers := product_layers(structure, packing):
            methods.append(HookMethod(model, packing, loss, layers))
        methods.append(VmapMethod(model, packing, loss, None))
        state = OwnState(model, loss, packing.slices)
        return [*methods, SingleExampleMethod(model, packing, loss, state, draws=False)]
    if structure is not None and read_loss is not None:
        module = structure.module
        # On a GPU a program's convolutions go one client at a time, and hooks take a block.
        on_gpu = next(module.parameters()).is_cuda
        rows = program is not None and program.has_example_rows
        if program is not None and rows and not (on_gpu and program.convolutions):
            methods.append(ProgramMethod(module, packing, read_loss, program))
        elif layers := product_layers(structure, packing):
            methods.append(HookMethod(module, packing, read_loss, layers))
        if on_gpu:  # all clients at once, which only what changes nothing can be
            products = with_products(module) or module
            methods.append(VmapMethod(products, packing, read_loss, None))
        if is_recurrent(module) and owned_by_layers(structure, packing):
            methods.append(OpacusMethod(module, packing, read_loss))
    methods.append(VmapMethod(model, packing, loss, state))
    drawing = trained.draws.training or trained.draws.evaluation
    return [*methods, SingleExampleMethod(model, packing, loss, state, drawing)]


@dataclass(frozen=True)
class Probe:
    """Tests a model and a loss on made-up examples of its data's shapes and dtypes.

    The model's random draws are fixed where other examples change, and switched off (by evaluation
    mode) where batches of different sizes are compared.
    """

    trained: TrainedModel

    def fastest(self, methods: Sequence[GradientMethod]) -> GradientMethod:
        """The first of the methods, from fast to slow, that gives correct per-example gradients.

        Raises
        ------
        FedsimError
            If the model or the loss mixes examples, or cannot take one alone.
        """
        x = self.trained.data.x
        if not len(x):
            return methods[0]  # no client has an example whose gradient could be taken
        with reproducible_arithmetic(x.device):
            state = OwnState(self.trained.model, self.trained.loss, self.trained.packing.slices)
            with state.restored():
                batch, other_batch = self._made_up_batches()
                self._require_separate(batch, other_batch)
                changed = state.changed
            if changed:
                raise FedsimError(
                    f"{' and '.join(changed)} changes as examples go through, so that one could "
                    "leave a trace in the next one's gradient; with example-level privacy a model "
                    "and a loss must leave their buffers and attributes as they are."
                )
            if self.trained.draws.evaluation:
                methods = methods[-1:]  # draws would differ: two methods cannot be compared
            correct_method: GradientMethod | None = None
            last_fault = ""
            for method in methods:
                try:
                    fault = self._fault(method, methods[-1], batch, other_batch)
                # A user's code may raise anything in surroundings that it was not written for.
                except (Exception, SystemExit) as error:
                    fault = printable(f"{type(error).__name__}: {error}")
                if not fault:
                    correct_method = method
                    break
                last_fault = f"{method.name}: {fault}"
            self._set_mode(True)
        if correct_method is None:
            raise FedsimError(
                f"the model's examples cannot be taken one at a time ({last_fault}), so that it "
                "cannot be trained with example-level privacy."
            )
        if correct_method is methods[-1] and len(methods) > 1:
            _log.warning(
                "examples go through this model one by one, which is slow (%s)", last_fault
            )
        return correct_method

    def _set_mode(self, drawing: bool) -> None:
        """Set training mode, or, if not ``drawing``, a mode in which the model does not draw."""
        structure = self.trained.reading.structure
        for module in (self.trained.model, *((structure.module,) if structure else ())):
            module.train(drawing or not self.trained.draws.training)

    def _made_up_batches(self) -> tuple[_Batch, _Batch]:
        """Two batches without a common example, which the model takes.

        If a loss is not finite, other batches are tried: NaN would hide what it depends on.
        """
        generator = torch.Generator().manual_seed(SEED)
        data, dtype = self.trained.data, self.trained.packing.layout.dtype
        x, y = data.empty(dtype)

        def inputs(k: int, positive: bool) -> Tensor:
            public = data.public_inputs(EXAMPLES, dtype, k)
            return _made_up_like(x, generator, k, positive) if public is None else public

        pairs: list[tuple[_Batch, _Batch]] = []
        failure: BaseException | None = None
        for positive in (False, True):
            first, second = (
                _Batch(inputs(k, positive), _made_up_like(y, generator, k, positive))
                for k in (0, 1)
            )
            try:
                losses = torch.cat([self._run(batch)[1] for batch in (first, second)])
            except FedsimError:
                raise
            # A user's model need not take negative numbers, or class 0.
            except (Exception, SystemExit) as error:
                failure = error
                continue
            pairs.append((first, second))
            if bool(torch.isfinite(losses).all()):
                return first, second
        if pairs:
            _log.warning(
                "the loss is not finite on made-up examples at the initial model; an example whose "
                "gradient is not finite adds nothing to a sum, so that training may go nowhere"
            )
            return pairs[0]
        raise FedsimError(
            "the model or its loss could not be tried on made-up examples "
            f"({type(failure).__name__}: {failure}), as is required before training with "
            "example-level privacy; it must take any real inputs, or the classes or tokens 1 and "
            "2, or model.example must name a file of public inputs that it takes."
        ) from failure

    @property
    def _tolerance(self) -> float:
        """Tolerance between batches of different sizes: larger if the model has half precision."""
        model = self.trained.model
        numbers = [t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()]
        return max(TOLERANCE, *(8 * torch.finfo(number.dtype).eps for number in numbers))

    @property
    def _theta(self) -> Tensor:
        """Parameters near the initial ones: layers that start at zero would hide what they do."""
        generator = torch.Generator().manual_seed(SEED)
        row = self.trained.packing.layout.flatten(dict(self.trained.model.named_parameters()))
        noise = torch.randn(row.shape, generator=generator, dtype=torch.float64)
        return self.trained.packing.pack((row + 0.05 * noise.to(row))[None])[0]

    @torch.no_grad()
    def _run(self, batch: _Batch, *, drawing: bool = True) -> tuple[Tensor | None, Tensor]:
        """Outputs, if they are one tensor with a row for each example, and losses ``[B]``."""
        self._set_mode(drawing)
        theta, before = self._theta, self._theta
        named = self.trained.packing.named(theta)
        with seeded(SEED, batch.x.device):
            outputs = call_with(self.trained.model, named, batch.x.clone())
            losses = self.trained.loss(outputs, batch.y)
        if not torch.equal(theta, before):
            raise FedsimError(
                "the model or its loss writes to trained parameters while examples go through; "
                "with example-level privacy only the noisy step may."
            )
        if not isinstance(losses, Tensor) or losses.shape != batch.y.shape[:1]:
            shape = list(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            raise FedsimError(
                f"the loss gives {shape} for {len(batch.y)} examples; with example-level privacy "
                f"it must give one number for each, [{len(batch.y)}]."
            )
        rows = isinstance(outputs, Tensor) and outputs.shape[:1] == losses.shape
        return outputs if rows else None, losses

    def _require_separate(self, batch: _Batch, other_batch: _Batch) -> None:
        """Refuse a model or a loss in which an example's result depends on other examples."""
        results = self._run(batch)
        quiet_results = self._run(batch, drawing=False)
        for j in WATCHED:
            changed_results = self._run(other_batch.with_example(j, batch))
            self._require_same(results, changed_results, j, j, "what the other examples are")
            if not self.trained.draws.evaluation:
                try:
                    single = self._run(batch.only(j), drawing=False)
                except (Exception, SystemExit) as error:
                    raise FedsimError(
                        "the model does not take one example alone "
                        f"({type(error).__name__}: {error}), so that it cannot be trained with "
                        "example-level privacy."
                    ) from error
                number = "how many examples there are"
                self._require_same(quiet_results, single, j, 0, number, self._tolerance)

    @staticmethod
    def _require_same(
        first: tuple[Tensor | None, Tensor],
        second: tuple[Tensor | None, Tensor],
        j: int,
        k: int,
        depends: str,
        tolerance: float = TOLERANCE,
    ) -> None:
        for result_name, a, b in zip(("output", "loss"), first, second, strict=True):
            if a is None or b is None:
                continue
            if a.shape[1:] != b.shape[1:] or _distance(a[j], b[k]) > tolerance * _size(a, b):
                culprit = "model" if result_name == "output" else "model or its loss"
                raise FedsimError(
                    f"the {culprit} mixes examples: the {result_name} of one depends on {depends}, "
                    "so that no bound on an example's gradient would hold; with example-level "
                    "privacy each example must be processed by itself (sequences batch-first, no "
                    "statistics over a batch)."
                )

    def _fault(
        self, method: GradientMethod, reference: GradientMethod, batch: _Batch, other_batch: _Batch
    ) -> str:
        """What is wrong with a method's gradients; empty if nothing is."""
        rows, losses = self._rows(method, batch)
        if rows.shape != (EXAMPLES, self.trained.packing.layout.d):
            return f"it gives {len(rows)} gradients for {EXAMPLES} examples"
        for j in WATCHED:
            changed, their_losses = self._rows(method, other_batch.with_example(j, batch))
            if not (_same_bits(rows[j], changed[j]) and _same_bits(losses[j], their_losses[j])):
                return "an example's gradient has other bits in a batch with other examples"
        if method is reference or self.trained.draws.evaluation:
            return ""
        quiet_rows, _ = self._rows(method, batch, drawing=False)
        for j in range(EXAMPLES):
            single_row, _ = self._rows(reference, batch.only(j), drawing=False)
            size = _size(single_row, quiet_rows)
            if _distance(quiet_rows[j], single_row[0]) > self._tolerance * size:
                return "an example's gradient in a batch differs from that alone"
        return ""

    def _rows(
        self, method: GradientMethod, batch: _Batch, *, drawing: bool = True
    ) -> tuple[Tensor, Tensor]:
        self._set_mode(drawing)
        x = batch.x.clone()
        if drawing:
            key, counter = (torch.full((1, k), SEED, device=x.device) for k in (2, 3))
            dtype = self.trained.packing.layout.dtype
            x = with_masks(method.model, x[None], key, counter, dtype)[0]
        with seeded(SEED, x.device):
            rows, losses = method.of_client(self._theta, x, batch.y)
        return rows.dense()[0], losses


@dataclass(frozen=True)
class _Batch:
    x: Tensor
    y: Tensor

    def only(self, j: int) -> _Batch:
        return _Batch(self.x[j : j + 1], self.y[j : j + 1])

    def with_example(self, j: int, batch: _Batch) -> _Batch:
        """This batch with the example at ``j`` from another batch."""
        x, y = self.x.clone(), self.y.clone()
        x[j], y[j] = batch.x[j], batch.y[j]
        return _Batch(x, y)


def _made_up_like(tensor: Tensor, generator: torch.Generator, k: int, positive: bool) -> Tensor:
    """Made-up values: real numbers, larger for ``k = 1``; or else classes, tokens or lengths."""

    def made_up(one: Tensor) -> Tensor:
        shape = (EXAMPLES, *one.shape[1:])
        if not one.is_floating_point():
            values = torch.randint(2, shape, generator=generator)
            return ((1 - values if k else values) + int(positive)).to(one)
        draw = torch.rand if positive else torch.randn
        return (draw(shape, generator=generator) * (1 + 9 * k)).to(one)

    return each(made_up, tensor)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def _distance(a: Tensor, b: Tensor) -> float:
    """L2 norm of the difference; infinite if non-finite entries differ."""
    if _same_bits(a, b):
        return 0.0
    difference = float(torch.linalg.vector_norm((a - b).double()))
    return difference if difference == difference else float("inf")


def _size(a: Tensor, b: Tensor) -> float:
    """Largest L2 norm of a row of either."""
    rows = torch.cat([a.flatten(1) if a.dim() > 1 else a[:, None] for a in (a, b)])
    return float(torch.linalg.vector_norm(rows.double(), dim=1).max())
