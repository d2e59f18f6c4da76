"""What must not be told is told nowhere, and what a node refuses its operator hears."""

from __future__ import annotations

import base64
import os
import threading
import time
from pathlib import Path

import pytest
import yaml

from fedsim.config import RunConfig
from fedsim.deploy.bundle import write_app
from fedsim.deploy.rehearsal import Rehearsal
from fedsim.deploy.services import Node

pytestmark = pytest.mark.slow

PLANTED = "hunter2-of-another-service"
WILLING, RELUCTANT = 0, 1
RUN = {
    "name": "secrets",
    "rounds": 2,
    "partition": {"clients": 2},
    "client": {"batch-size": 8},
    "mechanism": {"name": "clipping"},
    "noise": {"multiplier": 1.0},
    "engine": {"name": "deployment", "device": "cpu", "timeout": 60.0},
}


class Watch:
    """What everybody on the machine can read of our processes, and of their environment."""

    def __init__(self):
        self.words: set[str] = set()
        self.surroundings: dict[str, bytes] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()

    def _look(self):
        while not self._over.wait(0.02):
            for process in descendants():
                try:
                    words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    self.words.add(words)
                    if b"fedsim.deploy" in words.encode() or "flower-" in words:
                        self.surroundings[process.name] = (process / "environ").read_bytes()
                except OSError:
                    continue


def descendants() -> list[Path]:
    """Processes that this one has started, and those that they have."""
    parents = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(process.name)] = int(
                (process / "stat").read_text().rpartition(")")[2].split()[1]
            )
        except OSError:
            continue
    ours, size = {os.getpid()}, 0
    while len(ours) > size:
        size = len(ours)
        ours |= {pid for pid, parent in parents.items() if parent in ours}
    return [Path("/proc") / str(pid) for pid in ours - {os.getpid()}]


def secrets_of(directory: Path) -> set[str]:
    """Every secret that the federation's parties hold, as text."""
    found = {path.read_text().strip() for path in directory.rglob("*.secret")}
    for pattern in ("*.key",):
        # The middle of a key: its first and last lines are alike in all.
        found |= {path.read_text().splitlines()[2] for path in directory.rglob(pattern)}
    store = yaml.safe_load((directory / "operator" / "credentials.yaml").read_text())
    tokens = {base64.b64decode(value).decode() for value in store.values()}
    return {secret for secret in found | tokens if len(secret) > 16}


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """A private run in which one node refuses to take part, and what was to be seen of it."""
    place = tmp_path_factory.mktemp("story")
    patch = pytest.MonkeyPatch()
    patch.setenv("PLANTED_SECRET", PLANTED)
    variables = {"FEDSIM_RUNS": str(place / "runs")}
    with Watch() as watch, Rehearsal.temporary(2, logs=place / "logs", variables=variables) as up:
        party = Node.load(up.federation.node(RELUCTANT))
        party.save({"least-noise-multiplier": 1.5})
        up.start_all()
        app = write_app(place / "app", RunConfig.parse(RUN).to_tree())
        run_id = up.operator.submit(app)
        deadline = time.monotonic() + 400

        def alive():
            up.check()
            assert time.monotonic() < deadline, up.operator.log(run_id)

        status = up.operator.follow(run_id, alive)
        (place / "operators.log").write_text(up.operator.log(run_id))
        secrets = secrets_of(up.federation.directory)
        homes = [path for path in up._homes.rglob("*") if path.is_file()]
        left = {
            str(path): path.read_bytes() for path in [*homes, *place.rglob("*")] if path.is_file()
        }
    patch.undo()
    return watch, status, secrets, left, (place / "operators.log").read_text()


def test_a_node_refuses_what_its_policy_excludes_and_the_operator_reads_why(story):
    _, status, _, left, log = story
    assert status == "finished:completed", log
    assert (
        "this node's policy refuses the run: noise.multiplier is 1; here it must be at least 1.5"
        in log
    )
    (metrics,) = (
        content.decode() for path, content in left.items() if path.endswith("metrics.csv")
    )
    header, *rows = (line.split(",") for line in metrics.splitlines())
    for row in rows:
        counted = dict(zip(header, row, strict=True))
        if counted["asked"]:
            assert (counted["asked"], counted["usable"], counted["failed"]) == ("2", "1", "1")


def test_no_secret_is_in_a_log_an_artefact_a_bundle_or_flowers_files(story):
    _, _, secrets, left, _ = story
    assert len(secrets) >= 6
    assert any(path.endswith("ledger.jsonl") for path in left)
    assert any(path.endswith("superlink.db") for path in left)
    assert any(path.endswith("superlink.log") for path in left)
    told = [
        (path, secret)
        for path, content in left.items()
        for secret in [*secrets, PLANTED]
        if secret.encode() in content
    ]
    assert told == []


def test_no_secret_and_no_token_is_on_a_command_line(story):
    watch, _, secrets, _, _ = story
    assert any("fedsim.deploy.flower_programs" in words for words in watch.words)
    for words in watch.words:
        assert "--token" not in words
        assert not any(secret in words for secret in secrets)


def test_nothing_of_this_processes_environment_goes_to_a_party(story):
    watch, _, secrets, _, _ = story
    assert len(watch.surroundings) >= 6
    for surroundings in watch.surroundings.values():
        assert PLANTED.encode() not in surroundings
        assert not any(secret.encode() in surroundings for secret in secrets)
