from __future__ import annotations

import html
import importlib.util
import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load, load_file
from torch import nn

import fedsim
from fedsim import RunConfig
from fedsim.cli import main
from fedsim.config.release_keys import keys_outside_release
from fedsim.datasets import Dataset
from fedsim.datasets import load as load_data
from fedsim.errors import FedsimError
from fedsim.reports.verification import verify_run
from fedsim.runs.export import BUNDLE, export, publish
from fedsim.runs.saved import SavedRun

SMALL = {"rounds": 3, "partition.clients": 20, "client.lr": 0.5}
PRIVATE = SMALL | {"mechanism.name": "clipping", "noise.multiplier": 1.0}


@pytest.fixture(scope="module")
def private_run(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("saved") / "run"
    fedsim.run(RunConfig().replace(title="A private run", **PRIVATE), out=out)
    return out


def pictures(path: Path, channels: int) -> None:
    """uint8 pictures that a linear model can learn, channels last, with their statistics."""
    generator = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", 200), ("test", 60)):
        y = generator.integers(0, 3, count)
        x = generator.integers(0, 80, (count, 6, 6, channels))
        x[np.arange(count), y, :, 0] += 150
        arrays |= {f"x_{split}": x.astype(np.uint8), f"y_{split}": y}
    statistics = {"mean": np.full(channels, 0.2), "std": np.full(channels, 0.3)}
    np.savez(path, **arrays, **statistics)


def test_the_round_is_the_models_also_where_a_resumed_run_has_more_rows(tmp_path: Path) -> None:
    fedsim.run(RunConfig().replace(**SMALL), out=tmp_path / "run")
    with (tmp_path / "run" / "metrics.csv").open("a") as rows:
        rows.write("4\n")
    assert fedsim.load(tmp_path / "run").round == 3


def test_public_names_are_listed() -> None:
    assert dir(fedsim) == [
        "Callback",
        "FedsimError",
        "Live",
        "RunConfig",
        "RunStatus",
        "__version__",
        "load",
        "run",
    ]
    assert all(getattr(fedsim, name) for name in dir(fedsim))


def test_a_loaded_run_predicts_what_the_run_measured(private_run: Path) -> None:
    saved = fedsim.load(private_run)
    test = load_data("digits").test
    right = (saved.predict(test.x.numpy()) == test.y.numpy()).mean()
    assert right == pytest.approx(saved.metrics[-1]["test-accuracy"])
    assert saved.labels == tuple("0123456789")
    assert saved.config.title == "A private run"
    assert saved.privacy is not None
    assert saved.privacy.epsilon == pytest.approx(saved.metrics[-1]["epsilon"])


class Halving(nn.Linear):
    """Writes to its inputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mul_(0.5))


def test_a_model_that_writes_to_its_inputs_trains_and_leaves_the_callers_array(
    tmp_path: Path,
) -> None:
    fedsim.run(RunConfig().replace(**SMALL), model=Halving(64, 10), out=tmp_path / "run")
    x = np.ones((3, 64), dtype=np.float32)
    fedsim.load(tmp_path / "run", model=Halving(64, 10)).predict(x)
    assert (x == 1).all()


def test_evaluating_anew_gives_the_last_rounds_numbers(private_run: Path) -> None:
    saved = fedsim.load(private_run)
    anew = saved.evaluate()
    assert anew["loss"] == saved.metrics[-1]["test-loss"]
    assert anew["accuracy"] == saved.metrics[-1]["test-accuracy"]


def test_normalisation_comes_with_the_model_and_raw_images_go_in(tmp_path: Path) -> None:
    pictures(tmp_path / "own.npz", channels=3)
    config = RunConfig().replace(
        **SMALL, **{"data.name": str(tmp_path / "own.npz"), "data.normalize": True}
    )
    fedsim.run(config, out=tmp_path / "run")
    with np.load(tmp_path / "own.npz") as file:
        x, y = file["x_test"], file["y_test"]
    saved = fedsim.load(tmp_path / "run")
    loss = saved.metrics[-1]["test-loss"]
    # Gone: the model's shape stands in the summary.
    (tmp_path / "own.npz").rename(tmp_path / "other.npz")
    saved = fedsim.load(tmp_path / "run")
    outputs = saved.model(torch.from_numpy(x).permute(0, 3, 1, 2))
    again = torch.nn.functional.cross_entropy(outputs, torch.from_numpy(y).long())
    assert again.item() == pytest.approx(loss, rel=1e-5)
    assert (saved.predict(x) == outputs.argmax(1).numpy()).all()
    assert (saved.predict(x.transpose(0, 3, 1, 2)) == saved.predict(x)).all()
    assert saved.evaluate(tmp_path / "other.npz")["loss"] == pytest.approx(loss, rel=1e-6)


def test_examples_of_another_shape_are_refused(private_run: Path, tmp_path: Path) -> None:
    saved = fedsim.load(private_run)
    with pytest.raises(FedsimError, match=r"this model takes \('N', 64\)"):
        saved.predict(np.zeros((2, 63), dtype=np.float32))
    with pytest.raises(FedsimError, match=r"this model takes \('N', 64\), such as x\[None\]"):
        saved.predict(np.zeros(64, dtype=np.float32))
    pictures(tmp_path / "own.npz", channels=1)
    with pytest.raises(FedsimError, match="this model takes"):
        saved.evaluate(str(tmp_path / "own.npz"))


def features(path: Path, *, classes: int = 3, **changes: np.ndarray) -> Path:
    """Four features; ``changes`` replace arrays, or leave out what is None."""
    generator = np.random.default_rng(0)
    arrays: dict[str, object] = {}
    for split, count in (("train", 60), ("test", 30)):
        y = np.arange(count) % classes
        x = generator.normal(size=(count, 4)) + y[:, None]
        arrays |= {f"x_{split}": x.astype(np.float32), f"y_{split}": y, f"owner_{split}": y}
    arrays |= changes
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return path


@pytest.fixture
def of_owners(tmp_path: Path) -> Path:
    """A private run whose clients are owners, of 3 classes."""
    data = features(tmp_path / "own.npz", owner_test=None)
    settings = {
        "data.name": str(data),
        "partition.name": "by-owner",
        "partition.clients": 3,
        "mechanism.name": "clipping",
        "noise.multiplier": 0.1,
        "rounds": 1,
    }
    fedsim.run(
        RunConfig.from_overrides([f"{k}={v}" for k, v in settings.items()]), out=tmp_path / "run"
    )
    return tmp_path / "run"


def test_others_examples_need_neither_owners_nor_every_class(of_owners, tmp_path: Path) -> None:
    on_its_own_data = fedsim.load(of_owners).evaluate()
    changes = dict.fromkeys(("owner_train", "owner_test"))
    one_class = features(tmp_path / "one_class.npz", y_train=np.zeros(60, np.int64), **changes)
    assert fedsim.load(of_owners).evaluate(str(one_class)) == on_its_own_data
    two_classes = features(tmp_path / "two_classes.npz", classes=2, **changes)
    assert 0 <= fedsim.load(of_owners).evaluate(str(two_classes))["accuracy"] <= 1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"classes": 4}, "label 3 in y_train; labels must be below 3"),
        (
            {"x_train": np.ones((60, 4), np.int64), "x_test": np.ones((30, 4), np.int64)},
            "examples of dtype int64; this model takes float32",
        ),
        (
            {"y_train": np.ones((60, 2), np.int64), "y_test": np.ones((30, 2), np.int64)},
            r"targets of shape \('N', 2\) and dtype int64; this model was trained for \('N',\)",
        ),
        ({"y_train": np.ones(60), "y_test": np.ones(30)}, "labels must be whole numbers"),
    ],
)
def test_others_examples_that_do_not_fit_are_one_sentence(
    changes: dict, says: str, of_owners, tmp_path: Path
) -> None:
    data = features(tmp_path / "others.npz", **changes)
    with pytest.raises(FedsimError, match=says) as error:
        fedsim.load(of_owners).evaluate(str(data))
    assert "\n" not in str(error.value)


def run_of_owners(data: Path, out: Path, **changes: object) -> SavedRun:
    """A private run whose test examples are its clients' own."""
    settings = {
        "partition.name": "by-owner", "partition.clients": 3, "evaluate.every": 0, "rounds": 1,
        "mechanism.name": "clipping", "noise.multiplier": 1.0, "data.name": str(data),
        "data.classes": 3, **changes,
    }  # fmt: skip
    fedsim.run(RunConfig().replace(**settings), out=out)
    return fedsim.load(out)


def test_clients_own_test_examples_of_a_private_run_are_not_measured_under_any_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = features(tmp_path / "own.npz")
    saved = run_of_owners(own, tmp_path / "run")
    (tmp_path / "link.npz").symlink_to(own)
    (tmp_path / "second.npz").hardlink_to(own)
    monkeypatch.chdir(tmp_path)
    for name in ("", str(own), "own.npz", "./own.npz", "link.npz", "second.npz", Path("own.npz")):
        with pytest.raises(FedsimError, match="are clients' own, and metrics of them have no"):
            saved.evaluate(name)
    shutil.copy(own, "copy.npz")  # which is the user's own act
    shown = saved.evaluate("copy.npz")
    open_run = run_of_owners(own, tmp_path / "open", **{"evaluate.unprotected": True})
    assert open_run.evaluate("own.npz") == open_run.evaluate() == open_run.evaluate("copy.npz")
    assert shown.keys() == open_run.evaluate().keys()
    unbound = {"mechanism.name": "none", "noise.multiplier": 0.0}
    assert run_of_owners(own, tmp_path / "bare", **unbound).evaluate("link.npz")


def test_metrics_by_owner_are_those_of_each_owners_test_examples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = features(tmp_path / "own.npz")
    saved = run_of_owners(own, tmp_path / "run", **{"evaluate.unprotected": True})
    table, arrays = saved.evaluate_by("owner"), dict(np.load(own))
    owners = arrays["owner_test"].astype(str)
    assert list(table) == sorted(set(owners))
    for owner, metrics in table.items():
        rows = owners == owner
        alone = {k: v[rows] if k.endswith("_test") else v for k, v in arrays.items()}
        np.savez(tmp_path / "alone.npz", **alone)
        expected = saved.evaluate(tmp_path / "alone.npz")
        assert metrics == pytest.approx({"examples": rows.sum(), **expected}, rel=1e-6)
    with pytest.raises(SystemExit):
        main(["evaluate", str(tmp_path / "run"), "--by", "owner"])
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed if line.strip()][-len(table) :] == list(table)
    with pytest.raises(FedsimError, match="no column 'hospital' in the test data, only owner"):
        saved.evaluate_by("hospital")
    # Figures without noise of a private run's clients need the same permission as all others.
    with pytest.raises(FedsimError, match="are clients' own, and metrics of them have no"):
        run_of_owners(own, tmp_path / "private").evaluate_by("owner")


def test_probabilities_are_the_softmax_of_outputs_and_agree_with_predictions(
    private_run: Path,
) -> None:
    saved, digits = fedsim.load(private_run), load_data("digits").test
    probabilities = saved.predict_proba(digits.x)
    logits = saved.model(digits.x).detach().double()
    assert probabilities == pytest.approx(torch.softmax(logits, -1).numpy(), abs=1e-12)
    assert (probabilities.argmax(1) == saved.predict(digits.x)).all()
    assert probabilities.shape[1] == 10


def test_a_part_of_a_private_runs_own_files_is_not_measured_either(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    people = {k: v.tolist() for k, v in np.load(features(tmp_path / "own.npz")).items()}
    for split, owners in (("train", "abc"), ("test", "xyz")):  # the test rows are nobody's
        rows = zip(people[f"x_{split}"], people[f"y_{split}"], strict=True)
        lines = [",".join(map(str, [*x, y, owners[y]])) for x, y in rows]
        (folder / f"{split}.csv").write_text("\n".join(["a,b,c,d,y,who", *lines]) + "\n")
    table = {"data.columns": "y=y,owner=who", "data.classes": 0}
    types = {"data.types": "y=0|1|2," + ",".join(f"{c}=-9:9" for c in "abcd")}
    saved = run_of_owners(folder, tmp_path / "run", **table, **types)
    assert saved.evaluate() == saved.evaluate(folder)
    with pytest.raises(FedsimError, match=r"train\.csv has files of .*, the run's own data"):
        saved.evaluate(folder / "train.csv")


def test_a_model_of_which_clients_keep_a_part_is_not_used_as_a_whole(tmp_path: Path) -> None:
    changes = {"model.name": "mlp", "model.widths": "8", "model.personal": "fc2.*"}
    config = RunConfig().replace(
        **SMALL, **changes, **{"client.state": "client", "evaluate.every": 0}
    )
    fedsim.run(config, out=tmp_path / "run")
    saved = fedsim.load(tmp_path / "run")
    for use in (
        saved.evaluate,
        lambda: saved.predict(np.zeros((1, 64), np.float32)),
        lambda: export(saved, "torchscript"),
    ):
        with pytest.raises(FedsimError, match=r"^/\S+/run has model\.personal = 'fc2\.\*'"):
            use()
    assert set(load(export(saved, "safetensors"))) == {"fc1.weight", "fc1.bias"}
    assert repr(saved) == f"SavedRun('{tmp_path / 'run'}', round 3)"


@pytest.mark.parametrize("adapter", [{}, {"adapter.name": "lora", "adapter.targets": "1"}])
def test_a_model_from_python_is_given_again_to_be_loaded(
    adapter: dict[str, Any], tmp_path: Path
) -> None:
    def network() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))

    settings = {"rounds": 2, "partition.clients": 6, "engine.device": "cpu", **adapter}
    config = RunConfig().replace(**settings)
    result = fedsim.run(config, model=network(), out=tmp_path)
    given = network()
    before = given[1].weight.clone()
    saved = fedsim.load(tmp_path, model=given)
    if adapter:  # it has layers that the model has not
        assert torch.equal(given[1].weight, before)
        given = network()
        fedsim.load(tmp_path, model=given, merge=True)
        assert not torch.equal(given[1].weight, before)
    with torch.no_grad():
        logits = given(torch.ones(2, 64))
    torch.testing.assert_close(saved.model(torch.ones(2, 64)), logits)
    accuracy = saved.evaluate()["accuracy"]
    assert accuracy == pytest.approx(result.metrics[-1]["test-accuracy"], abs=1e-12)
    with pytest.raises(FedsimError, match=r"trained from an object, model=.*fedsim\.load\("):
        _ = fedsim.load(tmp_path).model


def test_data_from_python_are_given_again_to_be_evaluated(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(200, 64)).astype(np.float32), rng.integers(0, 10, 200)
    data = {"x_train": x, "y_train": y, "x_test": x[:50], "y_test": y[:50]}
    config = RunConfig().replace(**{"rounds": 3, "partition.clients": 6})
    result = fedsim.run(config, data=data, out=tmp_path)
    saved = fedsim.load(tmp_path)
    # Not those of the data set that the config would name without it.
    with pytest.raises(FedsimError, match="trained from an object, data="):
        saved.evaluate()
    assert saved.evaluate(data)["loss"] == pytest.approx(result.metrics[-1]["test-loss"])
    report = (tmp_path / "report.html").read_text()
    assert "on data given in Python (data=)" in report
    assert "on digits" not in report

    class Interrupt(fedsim.Callback):
        def on_round(self, status: Any) -> None:
            if status.round == 1:
                raise KeyboardInterrupt

    fedsim.run(config, data=data, out=tmp_path / "part", callbacks=[Interrupt()])
    with pytest.raises(FedsimError, match="trained from an object, data="):
        fedsim.load(tmp_path / "part").evaluate()


def test_examples_may_have_dtypes_that_torch_lacks(private_run: Path) -> None:
    saved = fedsim.load(private_run)
    x = np.arange(3 * 64).reshape(3, 64) % 17
    for dtype in (">f4", ">i8", np.longdouble, np.uint16):
        assert (saved.predict(x.astype(dtype)) == saved.predict(x)).all()


def test_whole_numbers_are_numbers_and_a_tables_names_are_not_ignored(private_run: Path) -> None:
    saved = fedsim.load(private_run)
    x = np.arange(3 * 64).reshape(3, 64) % 17
    assert (saved.predict(x) == saved.predict(x.astype(np.float32))).all()
    pandas = pytest.importorskip("pandas")
    for table in (pandas.DataFrame(x), {"x": x}, "x.csv"):
        with pytest.raises(FedsimError, match="trained on arrays, not on a table"):
            saved.predict(table)
    with pytest.raises(FedsimError, match="examples cannot be made an array"):
        saved.predict([[1.0, 2.0], [3.0]])
    for value in (np.nan, np.inf, 1e300, "7", None, 1j):
        with pytest.raises(FedsimError, match=r"must be (finite|real numbers)\."):
            saved.predict([[value] * 64])


@pytest.mark.parametrize("inner", [(), (4,)], ids=["example", "positions"])
def test_one_output_without_an_axis_is_a_logit_of_each_class(tmp_path: Path, inner: Any) -> None:
    x = np.random.default_rng(0).normal(size=(300, *inner, 3)).astype(np.float32)
    y = (x.sum(-1) > 0).astype(np.int64)
    model = torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Flatten(-2))
    config = fedsim.RunConfig().replace(
        **{"rounds": 1, "partition.clients": 2, "task.loss": "binary-cross-entropy"}
    )
    data = Dataset.from_arrays("mine", {"x": x, "y": y}, {"x": x, "y": y}, layout="as-is")
    fedsim.run(config, data=data, model=model, out=tmp_path)
    saved = fedsim.load(tmp_path, model=model)
    predicted = saved.predict(x)
    assert predicted.shape == y.shape
    assert (predicted == y).mean() == saved.evaluate(data)["accuracy"]


def test_examples_of_another_kind_than_the_models_are_refused(tmp_path: Path) -> None:
    config = fedsim.RunConfig().replace(rounds=1, partition={"clients": 2})
    rng = np.random.default_rng(0)
    tokens, images = rng.integers(0, 9, (8, 4)), rng.integers(0, 256, (8, 5, 5)).astype(np.uint8)
    model = torch.nn.Sequential(
        torch.nn.Embedding(9, 3), torch.nn.Flatten(), torch.nn.Linear(12, 2)
    )
    for name, x, own in (("tokens", tokens, model), ("images", images, None)):
        fedsim.run(config, data=((x, np.arange(8) % 2),) * 2, model=own, out=tmp_path / name)
    saved = fedsim.load(tmp_path / "tokens", model=model)
    assert (saved.predict(tokens.astype(np.uint8)) == saved.predict(tokens)).all()
    for wrong, has in ((tokens + 1, "from 1 to 9"), (-tokens, "from -8"), (tokens / 2, "float64")):
        with pytest.raises(FedsimError, match=f"{has}.*; they must be tokens, .* from 0 to 8"):
            saved.predict(wrong)
    saved = fedsim.load(tmp_path / "images")
    assert (saved.predict(images) == saved.predict(images[:, None] / 255)).all()
    with pytest.raises(FedsimError, match="int64; they must be images of dtype uint8, or floating"):
        saved.predict(images[:, None].astype(np.int64))


@pytest.mark.parametrize("shape", [(), (1,), (2,), (2, 2)])
def test_predicted_numbers_have_the_shape_of_the_targets(tmp_path: Path, shape: Any) -> None:
    x, y = np.ones((8, 3), np.float32), np.ones((8, *shape), np.float32)
    config = fedsim.RunConfig().replace(
        rounds=1, partition={"clients": 2}, task={"loss": "squared-error", "metrics": "rmse"}
    )
    width = y[0].size
    model = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Unflatten(1, shape or (1,)))
    fedsim.run(config, data=((x, y),) * 2, model=model, out=tmp_path)
    saved = fedsim.load(tmp_path, model=model)
    assert saved.predict(x).shape == y.shape
    assert saved.predict(x[:0]).shape == (0, *shape)


@pytest.mark.parametrize("of_file", [False, True])
def test_predictions_take_the_tables_that_training_takes(tmp_path: Path, of_file: bool) -> None:
    path, out, columns = tmp_path / "people.csv", tmp_path / "out", "y=ill,x=age+sex+dose=mg"
    rows = [f"{k % 3},{'fm'[k % 2]},{20 + k},{k / 8},{k % 2}" for k in range(30)]
    path.write_text("\n".join(["clinic,sex,age,dose=mg,ill", *rows]))
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_csv(path)
    types = "age=0:100,ill=0|1"
    settings = {"rounds": 1, "partition.clients": 3, "model.name": "softmax"}
    if of_file:
        of_data = {"name": str(path), "columns": columns, "types": types, "normalize": True}
        settings |= {f"data.{key}": value for key, value in of_data.items()}
        fedsim.run(fedsim.RunConfig().replace(**settings), out=out)
        data = load_data(str(path), columns=columns, types=types)
    else:
        data = fedsim.datasets.from_table(frame, columns=columns, types=types, normalize=True)
        fedsim.run(fedsim.RunConfig().replace(**settings), data=data, out=out)
    saved = fedsim.load(out)
    is_test = np.arange(30) % 5 == 4
    predicted = saved.predict(frame)
    assert len(set(predicted.tolist())) == 2
    assert (predicted[is_test] == saved.predict(data.test.x)).all()
    for same in (path, str(path), frame.to_dict("list"), frame[["sex", "dose=mg", "age"]]):
        assert (saved.predict(same) == predicted).all()
    path.write_text("sex,dose=mg,age\n")
    for empty in (frame.iloc[:0], {"age": [], "sex": [], "dose=mg": []}, path):
        assert saved.predict(empty).shape == (0,)
    assert saved.predict(frame.iloc[:1]).shape == (1,)
    for wrong, words in (
        (frame.drop(columns="age"), "none is that of the input 'age scaled from 0:100'"),
        (frame.assign(sex="x"), "'x' in column 'sex' of its input example 1; .* one of f, m"),
        (frame.assign(age=np.nan), "'nan' in column 'age' .* a finite number"),
        (tmp_path / "none.csv", "No such file"),
        (frame.iloc[0].to_dict(), "columns of the lengths {'clinic': None"),
        (frame[["age", "sex"]].to_numpy(), r"examples have shape \(30, 2\)"),
    ):
        with pytest.raises(FedsimError, match=words):
            saved.predict(wrong)
    with pytest.raises(FedsimError, match=r"digits has examples of shape \(64,\); this model"):
        saved.evaluate("digits")


def test_torchscript_takes_batches_of_any_size(private_run: Path) -> None:
    saved = fedsim.load(private_run)
    model = torch.jit.load(io.BytesIO(export(saved, "torchscript")))
    x = load_data("digits").test.x[:7]
    assert torch.equal(model(x), saved.model(x))


def test_safetensors_say_what_a_caller_must_know(private_run: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(export(fedsim.load(private_run), "safetensors"))
    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["about"])
    assert about["input-shape"] == [64]
    assert about["labels"] == list("0123456789")
    weights, before = load_file(path), load_file(private_run / "model.safetensors")
    assert all(torch.equal(weights[name], before[name]) for name in before)


def test_onnx_says_what_is_missing_or_agrees(private_run: Path) -> None:
    saved = fedsim.load(private_run)
    if not (importlib.util.find_spec("onnx") and importlib.util.find_spec("onnxscript")):
        with pytest.raises(
            FedsimError, match=r"needs onnx, which is not installed; .*fedsim-dp\[onnx\]"
        ):
            export(saved, "onnx")
        return
    content = export(saved, "onnx")
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(content)
    x = load_data("digits").test.x[:7].numpy()
    (outputs,) = session.run(None, {"inputs": x})
    assert outputs == pytest.approx(saved.model(torch.from_numpy(x)).numpy(), abs=1e-4)


def test_a_bundle_holds_what_is_covered_and_no_operators_fact(
    private_run: Path, tmp_path: Path
) -> None:
    publish(fedsim.load(private_run), tmp_path / "bundle")
    names = sorted(path.name for path in (tmp_path / "bundle").iterdir())
    statements = [f"statement.{kind}" for kind in ("html", "json", "txt")]
    assert names == ["config.toml", "model.safetensors", *statements] == sorted(BUNDLE)
    everything = b"".join(path.read_bytes() for path in (tmp_path / "bundle").iterdir())
    assert str(private_run).encode() not in everything
    config = (tmp_path / "bundle" / "config.toml").read_text()
    assert "seed" not in config  # noise follows from it
    assert "[engine]" not in config
    (statement,) = json.loads((tmp_path / "bundle" / "statement.json").read_text())
    ledger = (private_run / "ledger.jsonl").read_bytes()
    assert statement["lines"] == ledger.count(b"\n")
    assert statement["head"] == ""  # the seed could be found by it, too
    told = (tmp_path / "bundle" / "statement.txt").read_text()
    assert "The ledger's final hash is left out" in told
    hashes = re.findall(rb"[0-9a-f]{32,}", ledger)
    assert not [one for one in hashes if one in everything]
    with pytest.raises(FedsimError, match="already exists"):
        publish(fedsim.load(private_run), tmp_path / "bundle")


def test_a_bundle_has_the_final_hash_where_no_seed_determines_it(tmp_path: Path) -> None:
    config = RunConfig().replace(**PRIVATE, **{"noise.entropy": "system"})
    fedsim.run(config, out=tmp_path / "run")
    saved = fedsim.load(tmp_path / "run")
    publish(saved, tmp_path / "bundle")
    head = saved.record.statements[0].head
    assert re.fullmatch("[0-9a-f]{64}", head)
    for name in ("statement.json", "statement.txt", "model.safetensors"):
        content = (tmp_path / "bundle" / name).read_bytes()
        assert head.encode() in content
        assert b"left out" not in content


def test_every_key_of_a_bundle_bears_on_the_releases(private_run: Path, tmp_path: Path) -> None:
    publish(fedsim.load(private_run), tmp_path / "bundle")
    lines = (tmp_path / "bundle" / "config.toml").read_text().splitlines()
    table = ""
    for line in filter(None, lines):
        if line.startswith("["):
            table = line.strip("[]") + "."
            continue
        key = table + line.partition(" = ")[0]
        assert key in ("title", "rounds") or key not in keys_outside_release()


BOTH = PRIVATE | {
    "rounds": 2,
    "cohort.name": "poisson",
    "cohort.rate": 0.2,
    "client.mechanism.name": "clipping",
    "client.noise.multiplier": 1.0,
}


def test_neither_a_bundle_nor_a_callback_learns_by_examples_who_took_part(tmp_path: Path) -> None:
    seen: list[tuple[bool, bool]] = []

    class Watch(fedsim.Callback):
        def on_round(self, status: fedsim.RunStatus) -> None:
            seen.append(tuple("example-epsilon" in row for row in (status.row, status.metrics)))

    fedsim.run(RunConfig().replace(**BOTH), out=tmp_path / "run", callbacks=[Watch()])
    assert seen == [(False, False), (True, False), (True, False)]
    saved = fedsim.load(tmp_path / "run")
    assert [statement.level for statement in saved.record.statements] == ["client", "example"]
    publish(saved, tmp_path / "bundle")
    (told,) = json.loads((tmp_path / "bundle" / "statement.json").read_text())
    assert told["level"] == "client"
    words = (tmp_path / "bundle" / "statement.txt").read_text()
    assert "example level" not in words
    assert "Clients protect their examples too" in words


def test_a_bundle_tells_of_files_only_their_names_and_that_they_are_believed(
    tmp_path: Path,
) -> None:
    work, trace = tmp_path / "work.txt", tmp_path / "trace.npy"
    work.write_text("1\n2\n" * 10)
    np.save(trace, np.ones((1, 20), dtype=bool))
    config = RunConfig().replace(
        **PRIVATE, **{"client.work": str(work), "devices.trace": str(trace)}
    )
    fedsim.run(config, out=tmp_path / "run")
    publish(fedsim.load(tmp_path / "run"), tmp_path / "bundle")
    everything = b"".join(path.read_bytes() for path in (tmp_path / "bundle").iterdir())
    assert str(tmp_path).encode() not in everything
    assert b'work = "work.txt"' in everything
    assert b"assumed to be independent of clients' data (devices, client.work)" in everything


def test_a_statement_names_the_clients_metrics_that_the_run_has_released(tmp_path: Path) -> None:
    data = features(tmp_path / "own.npz")
    measured = {"evaluate.every": 1, "evaluate.unprotected": True, "rounds": 2}
    shown = run_of_owners(data, tmp_path / "shown", **measured, **{"evaluate.clients-every": 1})
    listed = (
        "metrics that the run has released without noise (accuracy, loss (means and quantiles) of "
        "clients' own evaluations; loss of clients' training; loss, accuracy of clients' test "
        "examples)"
    )
    assert shown.privacy.to_dict()["not-covered"][1:] == [listed]
    page = html.unescape((tmp_path / "shown" / "report.html").read_text())
    publish(shown, tmp_path / "bundle")
    assert listed in page
    assert listed in (tmp_path / "bundle" / "statement.txt").read_text()
    # What was not measured is not named, nor are metrics of test examples that are no client's.
    unmeasured = run_of_owners(data, tmp_path / "none")
    assert "metrics" not in str(unmeasured.privacy)
    others = RunConfig().replace(**PRIVATE, **{"evaluate.unprotected": True})
    public = fedsim.run(others, out=tmp_path / "public").privacy
    assert "without noise (loss of clients' training)." in str(public)
    for run in ("shown", "none", "public"):
        assert all(check.passed for check in verify_run(tmp_path / run)), run


def test_a_run_without_a_guarantee_has_nothing_to_publish(tmp_path: Path) -> None:
    fedsim.run(RunConfig().replace(**SMALL), out=tmp_path / "run")
    with pytest.raises(FedsimError, match="has no privacy guarantee"):
        publish(fedsim.load(tmp_path / "run"), tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda run: (run / "model.safetensors").unlink(), "--resume"),
        (lambda run: (run / "config.toml").write_text("[client]\nspeed = 3"), "another version"),
        (lambda run: (run / "config.toml").unlink(), "not a run's directory"),
    ],
)
def test_what_cannot_be_loaded_is_one_sentence(spoil, says: str, tmp_path: Path) -> None:
    fedsim.run(RunConfig().replace(**SMALL | {"rounds": 1}), out=tmp_path / "run")
    spoil(tmp_path / "run")
    with pytest.raises(FedsimError, match=says) as error:
        fedsim.load(tmp_path / "run")
    assert "\n" not in str(error.value)


def test_the_best_rounds_model_is_that_of_a_run_that_ended_there(tmp_path: Path) -> None:
    # With so much noise the loss soon grows again.
    config = RunConfig().replace(
        **PRIVATE | {"rounds": 6, "noise.multiplier": 30.0, "data.validation": 0.2},
        **{"checkpoint.best": "validation-loss"},
    )
    result = fedsim.run(config, out=tmp_path / "run")
    losses = [row["validation-loss"] for row in result.metrics[1:]]
    best = 1 + losses.index(min(losses))
    assert best < 6
    saved = fedsim.load(tmp_path / "run", best=True)
    assert saved.round == best
    assert saved.evaluate()["loss"] == pytest.approx(result.metrics[best]["test-loss"], rel=1e-5)
    fedsim.run(config.replace(rounds=best), out=tmp_path / "shorter")
    shorter = load_file(tmp_path / "shorter" / "model.safetensors")
    assert all(torch.equal(saved.weights[name], value) for name, value in shorter.items())
    assert saved.weights.keys() == shorter.keys()


def test_a_run_that_kept_no_best_round_says_so(private_run: Path) -> None:
    with pytest.raises(FedsimError, match=r"no checkpoint of the best round.*checkpoint\.best"):
        fedsim.load(private_run, best=True)


def test_a_result_prints_five_lines_on_privacy_also_as_a_table(tmp_path: Path) -> None:
    result = fedsim.run(RunConfig().replace(**PRIVATE), out=tmp_path / "<run>")
    ended, reached, epsilon, protected, attack, trusted, command, where = repr(result).splitlines()
    assert ended == "finished after round 3"
    assert "test accuracy" in reached
    said = result.privacy
    assert epsilon == (
        f"epsilon (simulated) = {said.epsilon:.4g} at delta = {said.delta:g}; noise from a known "
        "seed"
    )
    assert protected == "Protected: one client with all its data (neighbours: zero-out)."
    assert attack == said.tradeoff.brief()
    assert trusted == "Trusted: the server, which sees clients' updates before the noise."
    assert command == f"`fedsim privacy '{tmp_path / '<run>'}'` explains this."
    assert where == str(tmp_path / "<run>")
    table = result._repr_html_()
    assert "&lt;run&gt;" in table
    assert "<run>" not in table
    assert f"{protected}<br>" in table
    (claim,) = fedsim.run(RunConfig().replace(**SMALL)).guarantee
    assert claim.startswith("No privacy is claimed")


def test_a_tables_categories_name_the_classes_and_another_tables_are_held_against_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def table(name: str, sexes: str, outcomes: tuple[str, str]) -> str:
        rows = [f"{20 + i % 40},{sexes[i % 2]},{outcomes[i // 2 % 2]}\n" for i in range(60)]
        (tmp_path / name).write_text("age,sex,state\n" + "".join(rows))
        return str(tmp_path / name)

    settings = {"data.columns": "y=state", "data.normalize": True, "data.name": ""}
    settings["data.name"] = table("own.csv", "fm", ("well", "ill"))
    fedsim.run(RunConfig().replace(**SMALL, **settings), out=tmp_path / "run")
    saved = fedsim.load(tmp_path / "run")
    assert saved.labels == ("ill", "well")
    page = (tmp_path / "run" / "report.html").read_text()
    assert re.search(r"<th[^>]*>ill</th>\s*<th[^>]*>well</th>", page)
    caplog.clear()
    assert saved.evaluate(table("same.csv", "mf", ("ill", "well"))).keys() == {"loss", "accuracy"}
    assert not caplog.text  # of numbers that are not normalised, which they are
    # As many categories, but other ones: the model would take a man for a woman.
    for sexes, outcomes, words in (
        ("mx", ("well", "ill"), "features age, sex=m, sex=x; this model knows age, sex=f, sex=m"),
        ("fm", ("dead", "ill"), "classes dead, ill; this model knows ill, well"),
    ):
        with pytest.raises(FedsimError, match=words):
            saved.evaluate(table("other.csv", sexes, outcomes))
