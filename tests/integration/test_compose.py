"""docker-compose.yml and the Dockerfile, as far as they can be tried without Docker."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import time
import tomllib
from importlib.util import find_spec
from pathlib import Path

import compose
import pytest
import yaml

from fedsim.deploy.federation import Federation

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docker-compose.yml"
DIGEST = f"sha256:{'0123456789abcdef' * 4}"
SERVICES = yaml.safe_load(FILE.read_text())["services"]


@pytest.mark.skipif(
    shutil.which("docker-compose") is None, reason="docker-compose is not installed"
)
def test_docker_compose_accepts_the_file():
    check = ["docker-compose", "-f", str(FILE), "config", "-q"]
    subprocess.run(check, check=True, env={**os.environ, "PYTHON_IMAGE": f"python@{DIGEST}"})
    assert subprocess.run(check, check=False, capture_output=True).returncode != 0


@pytest.mark.parametrize("name", SERVICES)
def test_no_service_is_root_can_write_its_image_or_gain_privileges(name):
    service = SERVICES[name]
    assert not service["user"].startswith(("0", "root"))
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert "ports" not in service
    assert service["pids_limit"] <= 256
    assert service["mem_limit"].endswith("g")
    assert service["cpus"] > 0


def test_networks_are_private_and_no_two_nodes_share_one():
    assert all(net["internal"] for net in yaml.safe_load(FILE.read_text())["networks"].values())
    nodes = [SERVICES[f"supernode-{node}"]["networks"] for node in range(3)]
    assert sorted(network for networks in nodes for network in networks) == sorted(
        SERVICES["superlink"]["networks"]
    )
    assert all(len(networks) == 1 for networks in nodes)
    # Only they are where the operator's API listens.
    for name in ("register", "run"):
        assert SERVICES[name]["network_mode"] == "service:superlink"
        assert "networks" not in SERVICES[name]


def test_the_superlink_is_started_again_and_keeps_its_state():
    service = SERVICES["superlink"]
    assert service["restart"] == "unless-stopped"
    assert "./federation/superlink/state:/federation/superlink/state" in service["volumes"]


@pytest.mark.parametrize(
    ("image", "accepted"),
    [
        (f"python@{DIGEST}", True),
        (f"registry.example.org/python:3.11-slim@{DIGEST}", True),
        *((text, False) for text in ("", "python", "python:3.11-slim", f"python@{DIGEST[:-1]}")),
    ],
)
def test_the_base_image_is_named_by_a_digest_that_whoever_builds_it_gives(image, accepted):
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert re.findall(r"^FROM (.*)$", dockerfile, flags=re.MULTILINE) == ["${PYTHON_IMAGE}"]
    assert re.findall(r"^ARG (.*)$", dockerfile, flags=re.MULTILINE) == ["PYTHON_IMAGE"] * 2
    (check,) = re.findall(r"^RUN (echo .*?[^\\])$", dockerfile, flags=re.MULTILINE | re.DOTALL)
    script = check.replace("\\\n", "")
    done = subprocess.run(
        ["sh", "-c", script], env={"PYTHON_IMAGE": image}, capture_output=True, check=False
    )
    assert (done.returncode == 0) is accepted


def test_what_the_image_installs_is_locked_with_hashes():
    dockerfile = (ROOT / "Dockerfile").read_text()
    installs = re.findall(r"^RUN pip install (.*)$", dockerfile, flags=re.MULTILINE)
    assert installs == [
        "--require-hashes --only-binary :all: --requirement requirements.lock",
        "--no-deps --no-index --no-build-isolation .",
    ]
    assert re.search(r"^USER fedsim$", dockerfile, flags=re.MULTILINE)
    assert all(re.fullmatch(r"fedsim:\d+\.\d+\.\d+", s["image"]) for s in SERVICES.values())


def test_the_lock_has_the_versions_that_a_fresh_set_up_installs():
    lock = (ROOT / "requirements.lock").read_text()
    entries = re.split(r"^(?=\S)", lock, flags=re.MULTILINE)[1:]
    locked = {}
    for entry in entries:
        name, version = re.match(r"([\w.-]+)==(\S+)", entry).groups()
        assert "--hash=sha256:" in entry, name
        locked[name] = version
    constraints = (ROOT / "constraints.txt").read_text()
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)", constraints, flags=re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.match(r"[\w-]+", line)[0] for line in project["dependencies"]}
    assert needed | {"hatchling"} <= set(locked)
    assert {name: locked[name] for name in needed & set(pinned)} == {
        name: pinned[name] for name in needed & set(pinned)
    }


def test_no_secret_is_in_the_file_or_in_the_image():
    text = FILE.read_text() + (ROOT / "Dockerfile").read_text()
    assert "PRIVATE KEY" not in text
    copied = re.findall(r"^COPY (.*) \S+$", text, flags=re.MULTILINE)
    assert " ".join(copied).split() == [
        *("requirements.lock", "pyproject.toml", "README.md", "LICENSE", "fedsim"),
    ]


def test_the_image_gets_all_that_the_package_is_built_from():
    copied = set(re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), flags=re.MULTILINE))
    assert copied <= set(re.findall(r"[\w.]+", (ROOT / "Dockerfile").read_text()))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {project["project"]["readme"], *project["project"]["license-files"]}
    assert needed | set(wheel["packages"]) <= copied


def test_every_service_sees_its_own_keys_only():
    private = {"superlink": "superlink", **{f"supernode-{n}": f"node-{n}" for n in range(3)}}
    for name, service in SERVICES.items():
        sources = {
            volume.split(":")[0].removeprefix("./federation/").removesuffix("/state")
            for volume in service["volumes"]
        }
        others = set(private.values()) - {private.get(name)} | {"authority", "."}
        assert not sources & others, name


def test_what_does_not_end_by_itself_has_a_health_check():
    for name in ("superlink", "supernode-0", "supernode-1", "supernode-2"):
        assert SERVICES[name]["healthcheck"]["retries"] > 0


def test_every_module_that_a_service_runs_is_there():
    commands = [service["command"] for service in SERVICES.values()]
    modules = [command[command.index("-m") + 1] for command in commands if "-m" in command]
    assert modules
    assert all(find_spec(module) for module in modules)


@pytest.mark.slow
@pytest.mark.skipif(not compose.possible(), reason="network namespaces need root, and ip(8)")
def test_the_services_commands_train_a_model_between_network_namespaces(tmp_path):
    federation = Federation.create(
        tmp_path / "federation", nodes=3, hosts=["superlink"], home=Path("/federation")
    )
    (tmp_path / "examples").mkdir()
    shutil.copy(ROOT / "examples" / "deployment.toml", tmp_path / "examples")
    with compose.Compose(FILE, tmp_path, tmp_path / "logs") as services:
        services.up("run")
        # From the networks that there are: the port for nodes, and nothing else of anybody.
        open_ports = {
            (name, other, port)
            for name in ("supernode-0", "supernode-1")
            for other in ("superlink", "supernode-0", "supernode-1")
            for port in (8000, 9092, 9094)
            if name != other and services.reaches(name, other, port)
        }
        assert open_ports == {(f"supernode-{node}", "superlink", 9092) for node in (0, 1)}
        status = services.wait("run", 600)
        logs = "\n".join(f"== {r.name}\n{r.tail(30)}" for r in services.running.values())
        assert status == 0, logs
    left = federation.runs / "latest"
    assert len((left / "metrics.csv").read_text().splitlines()) == 1 + 1 + 3
    assert (left / "model.safetensors").exists()
    ledger = (left / "ledger.jsonl").read_text().splitlines()
    entries = [json.loads(line)["entry"] for line in ledger[1:]]
    assert [[release["kind"] for release in entry["releases"]] for entry in entries] == [
        ["release"]
    ] * 3


@pytest.mark.slow
@pytest.mark.skipif(not compose.possible(), reason="network namespaces need root, and ip(8)")
def test_a_cut_cable_costs_the_rounds_of_its_node_and_no_more(tmp_path):
    federation = Federation.create(
        tmp_path / "federation", nodes=3, hosts=["superlink"], home=Path("/federation")
    )
    (tmp_path / "examples").mkdir()
    text = (ROOT / "examples" / "deployment.toml").read_text().replace("rounds = 3", "rounds = 500")
    (tmp_path / "examples" / "deployment.toml").write_text(f"{text}\n[engine]\ntimeout = 30.0\n")

    def usable() -> list[int]:
        found = list(federation.runs.glob("three-nodes-*/metrics.csv"))
        rows = csv.DictReader(found[0].open()) if found else []
        return [int(row["usable"]) for row in rows if row.get("usable")]

    def wait(condition, services, limit=300.0) -> None:
        deadline = time.monotonic() + limit
        while not condition():
            assert time.monotonic() < deadline, usable()
            assert services.running["run"].alive(), services.running["run"].tail(30)
            time.sleep(0.5)

    with compose.Compose(FILE, tmp_path, tmp_path / "logs") as services:
        services.up("run")
        wait(lambda: usable()[-1:] == [3], services)
        services.set_link("supernode-2", up=False)
        wait(lambda: usable()[-1] == 2, services)
        services.set_link("supernode-2", up=True)
        wait(lambda: usable()[-1] == 3, services)
    rounds = usable()
    charged = next(federation.runs.glob("three-nodes-*/ledger.jsonl")).read_text().splitlines()
    assert len(charged) >= len(rounds)
