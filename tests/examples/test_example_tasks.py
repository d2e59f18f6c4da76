"""Every command of the examples' own pages runs, at a small size."""

from __future__ import annotations

import csv
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from slow_cases import slow_but

from fedsim.cli import main

EXAMPLES = Path(__file__).parents[2] / "examples"
TASKS = ("regression", "drift", "labels", "personal", "pfl", "ratings", "resnet", "tabular", "text")
SMALL = {
    "text": {"MOST": 12, "LENGTH": 6},
    "pfl": {"MOST": 4, "IMAGES": 200},
    "ratings": {"EACH": 6},
}
"""What of a page's data is made smaller."""
BLOCK = re.compile(r"^(?:<!-- (not run[^>]*) -->\n)?```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def commands(task: str) -> Iterator[list[str]]:
    for note, text in BLOCK.findall((EXAMPLES / task / "README.md").read_text()):
        if not note:
            yield from map(shlex.split, text.splitlines())


def run(arguments: list[str], rounds: int = 2, epochs: bool = False) -> None:
    small = ["--set", f"rounds={rounds}"]
    if not epochs and not any(word.startswith("client.steps") for word in arguments):
        small += ["--set", "client.epochs=1"]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, *small])
    assert not ended.value.code, arguments


@pytest.fixture
def page(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch) -> Iterator[str]:
    task: str = request.param
    shutil.copytree(EXAMPLES / task, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    yield task
    for name in ("nets", "losses", "mixes", "prox"):
        sys.modules.pop(name, None)  # another page has another module of this name


def make_data(task: str) -> None:
    made = runpy.run_path("make_data.py")
    made["main"].__globals__.update(SMALL.get(task, {}))
    made["main"]()


@pytest.mark.parametrize("page", slow_but(1, TASKS), indirect=True)
def test_what_an_examples_page_says_runs(page: str) -> None:
    for program, *arguments in commands(page):
        if program == "python":
            make_data(page)
        else:
            run(arguments)
    for metrics in Path("runs").glob("*/metrics.csv"):
        with metrics.open(newline="") as file:
            last = list(csv.DictReader(file))[-1]
        losses = [last[name] for name in last if name.endswith("-loss") and last[name]]
        assert all(np.isfinite(float(loss)) for loss in losses), metrics


@pytest.mark.slow
@pytest.mark.parametrize("page", ["text"], indirect=True)
def test_adapters_leave_the_model_that_they_adapt_as_it_is(page: str) -> None:
    from safetensors.numpy import load_file

    make_data(page)
    run(["run", "lstm.toml"], rounds=1)
    run(["run", "transformer.toml"], rounds=1)
    run(["run", "adapter.toml"], rounds=1)
    before = load_file("runs/text-transformer/model.safetensors")
    after = load_file("runs/text-adapter/model.safetensors")
    own = {name.replace(".base_layer", ""): values for name, values in after.items()}
    for name, values in before.items():
        np.testing.assert_array_equal(own[name], values)
    assert any(after[name].any() for name in after if name.endswith(".lora_B.weight"))


@pytest.mark.slow
@pytest.mark.parametrize("page", ["personal"], indirect=True)
def test_a_head_of_its_own_suits_a_writer_of_few_classes(page: str) -> None:
    make_data(page)
    reached = {}
    for kind in ("fedavg", "fedper", "ditto"):
        run(["run", f"{kind}.toml"], rounds=5, epochs=True)
        with Path(f"runs/personal-{kind}/metrics.csv").open(newline="") as file:
            reached[kind] = float(list(csv.DictReader(file))[-1]["clients-accuracy"])
    assert min(reached["fedper"], reached["ditto"]) > reached["fedavg"]


@pytest.mark.slow
@pytest.mark.parametrize("page", ["drift"], indirect=True)
def test_control_variates_serve_clients_of_two_classes(page: str) -> None:
    reached = {}
    for kind in ("fedavg", "scaffold"):
        run(["run", f"{kind}.toml"], rounds=12, epochs=True)
        with Path(f"runs/drift-{kind}/metrics.csv").open(newline="") as file:
            reached[kind] = float(list(csv.DictReader(file))[-1]["test-loss"])
    assert reached["scaffold"] < 0.8 * reached["fedavg"]
