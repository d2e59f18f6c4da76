"""What cannot be run is refused before anything is written, and an earlier run survives it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedsim
from fedsim import RunConfig
from fedsim.clients import SGD
from fedsim.errors import FedsimError
from fedsim.runs.sweep import grid_runs, parse_axes, run_sweep
from fedsim.strategies import RunFailedError
from fedsim.tasks import Metric

BASE = RunConfig().replace(
    **{
        "rounds": 1,
        "partition.clients": 20,
        "cohort.name": "poisson",
        "cohort.rate": 0.3,
        "mechanism.name": "clipping",
        "noise.multiplier": 1.0,
        "client.batch-size": 5,
    }
)
EXAMPLES = {"client.mechanism.name": "clipping", "client.noise.multiplier": 1.0}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"mechanism.name": "quantile-clipping", "noise.multiplier": 5.0}, "bit-noise"),
    ({"mechanism.name": "quantile-clipping", "mechanism.per-layer": True}, "bit-noise"),
    ({"mechanism.private-scalar": "accuracy"}, "clients report: num-examples, loss"),
    ({"mechanism.private-scalar": "loss", **EXAMPLES}, "clients report: num-examples"),
    ({"mechanism.private-scalar": "asked"}, "clients report"),
    (
        {"noise.placement": "client", "mechanism.name": "none", "noise.multiplier": ""},
        "must be 'server' with NoPrivacy",
    ),
    ({"noise.max-epsilon": 1e-6}, "max-epsilon.* at least 2.* the cost of one round"),
    ({"model.name": "mlp", "model.widths": "8", "model.trainable": "no*"}, "model.trainable"),
    ({"model.weights": "/etc/passwd"}, "model.weights"),
    ({"data.train": "9:9"}, "data.train"),
    ({"partition.clients": 2000}, "partition.clients"),
    ({"client.name": "tests.runs.test_preflight:starts_with_nan"}, "LocalAlgorithm"),
    (
        {"client.name": "tests.runs.test_preflight:Returning"},
        "whose step returns a dict",
    ),
    (
        {"client.name": "tests.runs.test_preflight:Returning", "client.proximal": 0.1},
        "whose step returns a dict",
    ),
    (
        {"task.metrics": "tests.runs.test_preflight:Unfinished"},
        "task.metrics is .* an abstract class: it lacks finish, merge",
    ),
    ({"task.loss": "tests.runs.test_preflight:wrong_examples"}, "task.loss.*have no gradient"),
    (
        {"task.loss": "tests.runs.test_preflight:wrong_examples", "client.path": "func"},
        "have no gradient",
    ),
    ({"client.name": "os:getpid"}, "'os' is of the standard library"),
    (
        {"model.name": "tests.runs.test_preflight:starts_with_nan"},
        "NaN or infinite numbers in weight",
    ),
    ({"model.name": "tests.runs.test_preflight:complex_numbers"}, "complex"),
    (
        {**EXAMPLES, "client.batch-size": 1000, "mechanism.name": "none", "noise.multiplier": ""},
        "client.batch-size",
    ),
]


class Returning(SGD):
    """Gives a new state, and leaves the one that it was given as it was."""

    def step(self, state, gradient, at):
        return {**state, "theta": state["theta"] - gradient.dense()}


class Unfinished(Metric):
    def init(self) -> int:
        return 0

    def update(self, state: int, outputs: torch.Tensor, targets: torch.Tensor) -> int:
        return state + len(targets)


def wrong_examples(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(-1) != targets).float()


def starts_with_nan() -> nn.Module:
    model = nn.Linear(64, 10)
    nn.init.constant_(model.weight, float("nan"))
    return model


def complex_numbers() -> nn.Module:
    return nn.Linear(64, 10, dtype=torch.complex64)


class RunOutcome(nn.Module):
    """Ten outputs, and what is done with them."""

    def __init__(self, ending: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.ending = nn.Linear(64, 10), ending

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ending(self.linear(x))


class Unread(nn.Sequential):
    """Gives the logarithm of what its last module gives, by code of which there is no graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y.log() if float(y.detach().sum()) else y


@pytest.mark.parametrize(
    ("model", "loss", "warned"),
    [
        (nn.Sequential(nn.Linear(64, 10), nn.Softmax(dim=1)), "cross-entropy", "softmax"),
        (
            nn.Sequential(nn.Linear(64, 10), nn.Sequential(nn.Dropout(0.1), nn.Softmax(-1))),
            "cross-entropy",
            "softmax",
        ),
        (RunOutcome(nn.Softmax(dim=1)), "cross-entropy", "softmax"),
        (RunOutcome(lambda y: nn.functional.softmax(y, 1)), "cross-entropy", "softmax"),
        (RunOutcome(lambda y: torch.softmax(y, dim=-1)), "cross-entropy", "softmax"),
        (RunOutcome(lambda y: y.softmax(-1)), "cross-entropy", "softmax"),
        (RunOutcome(lambda y: y.softmax(-1).log()), "cross-entropy", ""),
        (Unread(nn.Linear(64, 10), nn.Softmax(dim=1)), "cross-entropy", ""),
        (nn.Sequential(nn.Linear(64, 10), nn.LogSoftmax(dim=1)), "cross-entropy", ""),
        (nn.Sequential(nn.Linear(64, 10), nn.Sigmoid()), "cross-entropy", ""),
        (nn.Linear(64, 10), "cross-entropy", ""),
        (nn.Sequential(nn.Linear(64, 10), nn.Softmax(1)), "tests.runs.test_preflight:nll", ""),
        (None, "cross-entropy", ""),  # the one called 'softmax', which gives logits
    ],
)
def test_a_model_that_does_what_its_loss_does_is_warned_of(
    model: nn.Module | None, loss: str, warned: str, caplog: pytest.LogCaptureFixture
) -> None:
    fedsim.run(BASE.replace(**{"task.loss": loss}), model=model)
    told = [record.message for record in caplog.records if "the model ends in" in record.message]
    assert len(told) == bool(warned)
    if warned:
        assert told[0].startswith(
            f"Warning: the model ends in a {warned}, and task.loss = '{loss}'"
        )


def test_a_sigmoid_under_binary_cross_entropy_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    x, y = torch.randn(40, 3), torch.arange(40).remainder(2).float()
    config = BASE.replace(**{"task.loss": "binary-cross-entropy", "task.metrics": ""})
    data = {"x_train": x, "y_train": y, "x_test": x, "y_test": y}
    fedsim.run(config, data=data, model=nn.Sequential(nn.Linear(3, 1), nn.Sigmoid()))
    assert "ends in a sigmoid, and task.loss = 'binary-cross-entropy'" in caplog.text


class Scaled(nn.Module):
    """A loss with a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.temperature * outputs, targets, reduction="none")


def test_a_loss_whose_parameters_would_not_be_trained_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fedsim.run(BASE.replace(**{"task.loss": f"{__name__}:Scaled"}))
    assert "task.loss has parameters (temperature), which are not trained" in caplog.text


def nll(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return -outputs.gather(1, targets[:, None])[:, 0].log()


@pytest.mark.parametrize(("changes", "sentence"), REFUSED, ids=[str(c) for c, _ in REFUSED])
def test_what_cannot_be_run_is_refused_before_anything_is_touched(
    changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(FedsimError, match=sentence):
        fedsim.run(BASE.replace(**changes), out=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FedsimError, match=sentence):
        run_sweep(grid_runs(BASE.replace(**changes), parse_axes(["seed=1,2"])), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_metric_that_no_model_can_miss_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    for k, warned in ((10, True), (9, False)):
        caplog.clear()
        fedsim.run(BASE.replace(**{"task.metrics": f"top-k(k={k})"}))
        assert (f"k = {k} (task.metrics), and there are 10 classes" in caplog.text) == warned


@pytest.mark.parametrize(
    ("hook", "said"), [("on_round_end", r"did you mean on_round\?"), ("on_batch", "would never be")]
)
def test_a_callback_with_a_hook_that_there_is_not_is_refused(hook: str, said: str) -> None:
    with pytest.raises(FedsimError, match=said):
        type("Mine", (fedsim.Callback,), {hook: lambda self, status: None})
    type("Mine", (fedsim.Callback,), {"on_round": lambda self, status: None, "once": len})


def test_a_refused_run_leaves_the_one_that_it_would_have_overwritten(tmp_path: Path) -> None:
    fedsim.run(BASE, out=tmp_path / "run")

    def content() -> dict[str, bytes]:
        return {str(p): p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}

    before = content()
    for changes, _ in REFUSED[:6]:
        with pytest.raises(FedsimError):
            fedsim.run(BASE.replace(**changes), out=tmp_path / "run", overwrite=True)
    assert content() == before


@pytest.mark.parametrize("key", ["task.loss", "task.metrics"])
def test_a_users_function_that_fails_keeps_its_traceback_and_leaves_nothing(
    key: str, tmp_path: Path
) -> None:
    with pytest.raises(TypeError, match="starts_with_nan"):
        fedsim.run(
            BASE.replace(**{key: "tests.runs.test_preflight:starts_with_nan"}), out=tmp_path / "run"
        )
    assert list(tmp_path.iterdir()) == []


FEATURES = torch.randn(100, 8, generator=torch.Generator().manual_seed(0)).numpy()
CLASSES = (FEATURES[:, 0] > 0).astype("int64")
SMALL = [
    "rounds=4", "partition.clients=5", "client.steps=2", "engine.device=cpu", "model.name=mlp",
    "model.widths=8",
]  # fmt: skip


def arrays(x, y):
    return {"x_train": x, "y_train": y, "x_test": x[:20], "y_test": y[:20]}


def no_number(outputs, targets):
    """0/0 on each example."""
    gap = outputs[:, 0] - outputs[:, 0]
    return nn.functional.cross_entropy(outputs, targets, reduction="none") * gap / gap


NO_NUMBER = "tests.runs.test_preflight:no_number"


@pytest.mark.parametrize(
    ("scale", "settings", "cause"),
    [
        (1.0, {"task.loss": NO_NUMBER}, "not finite on 100 of 100"),
        (3e37, {}, r"a gradient is \S+ long, of examples with inputs up to \S*e\+3[78]"),
        (1.0, {"client.lr": 1e30}, None),
    ],
)
def test_a_run_that_fails_on_numbers_says_whether_it_was_the_learning_rate(scale, settings, cause):
    x = (FEATURES * scale).astype("float32")
    config = RunConfig.from_overrides([*SMALL, "evaluate.every=0"]).replace(**settings)
    with pytest.raises(RunFailedError, match="learning rate may be too high") as failure:
        fedsim.run(config, data=arrays(x, CLASSES))
    said = str(failure.value)
    assert ("It is no learning rate" in said) == (cause is not None)
    assert cause is None or re.search(f"at the initial model .*{cause}", said)


@pytest.mark.parametrize("private", [[], ["mechanism.name=clipping", "noise.multiplier=1.0"]])
@pytest.mark.parametrize(
    ("targets", "settings", "sentence"),
    [
        (FEATURES[:, 0], ["task.loss=squared-error"], "'accuracy', its default: .*'rmse,r2'"),
        (CLASSES * 1.0, ["task.loss=binary-cross-entropy"], "'accuracy', its default: .*'f1,auc'"),
        (CLASSES, ["task.metrics=rmse"], "'rmse': rmse does not compare .*'accuracy'"),
    ],
)
def test_a_metric_that_does_not_fit_is_named_and_not_the_loss(targets, settings, sentence, private):
    config = RunConfig.from_overrides([*SMALL, *settings, *private])
    y = targets.astype("float32") if targets.dtype.kind == "f" else targets
    with pytest.raises(FedsimError, match=f"^task.metrics = {sentence}.* or '' for the loss alone"):
        fedsim.run(config, data=arrays(FEATURES, y))


def test_a_loss_without_a_number_is_told_from_made_up_examples_alone(caplog):
    examples = ["client.mechanism.name=clipping", "client.noise.multiplier=1.0", "rounds=1"]
    for settings in ({}, {"task.loss": NO_NUMBER}):
        caplog.clear()
        config = RunConfig.from_overrides([*SMALL, *examples]).replace(**settings)
        fedsim.run(config, data=arrays(FEATURES, CLASSES))
        said = [r.message for r in caplog.records if "loss is not finite on made-up" in r.message]
        assert bool(said) == bool(settings)
