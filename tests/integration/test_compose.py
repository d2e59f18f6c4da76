"""docker-compose.yml and the Dockerfile, as far as they can be tried without Docker."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
import time
import tomllib
from pathlib import Path

import compose
import pytest
import yaml

from fedsim.deploy.federation import Federation

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docker-compose.yml"
SERVICES = yaml.safe_load(FILE.read_text())["services"]


@pytest.mark.skipif(
    shutil.which("docker-compose") is None, reason="docker-compose is not installed"
)
def test_docker_compose_accepts_the_file():
    subprocess.run(["docker-compose", "-f", str(FILE), "config", "-q"], check=True)


@pytest.mark.parametrize("name", SERVICES)
def test_no_service_is_root_can_write_its_image_or_gain_privileges(name):
    service = SERVICES[name]
    assert not service["user"].startswith(("0", "root"))
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert "ports" not in service
    assert service["networks"] == ["federation"]


def test_the_network_is_private_and_versions_are_pinned():
    assert yaml.safe_load(FILE.read_text())["networks"]["federation"]["internal"] is True
    assert all(re.fullmatch(r"fedsim:\d+\.\d+\.\d+", s["image"]) for s in SERVICES.values())
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert re.search(r"^FROM python:\d+\.\d+\.\d+-", dockerfile, flags=re.MULTILINE)
    assert "--constraint constraints.txt" in dockerfile
    assert re.search(r"^USER fedsim$", dockerfile, flags=re.MULTILINE)


def test_no_secret_is_in_the_file_or_in_the_image():
    text = FILE.read_text() + (ROOT / "Dockerfile").read_text()
    assert "PRIVATE KEY" not in text
    copied = re.findall(r"^COPY (.*) \S+$", text, flags=re.MULTILINE)
    assert " ".join(copied).split() == [
        *("constraints.txt", "pyproject.toml", "README.md", "LICENSE", "fedsim"),
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
            volume.split(":")[0].removeprefix("./federation/") for volume in service["volumes"]
        }
        others = set(private.values()) - {private.get(name)} | {"authority", "."}
        assert not sources & others, name


def test_what_does_not_end_by_itself_has_a_health_check():
    for name in ("superlink", "supernode-0", "supernode-1", "supernode-2"):
        assert SERVICES[name]["healthcheck"]["retries"] > 0


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
        status = services.wait("run", 600)
        logs = "\n".join(f"== {r.name}\n{r.tail(30)}" for r in services.running.values())
        assert status == 0, logs
    left = federation.runs / "latest"
    assert len((left / "metrics.csv").read_text().splitlines()) == 1 + 1 + 3
    assert (left / "model.safetensors").exists()
    assert len((left / "ledger.jsonl").read_text().splitlines()) == 3


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
