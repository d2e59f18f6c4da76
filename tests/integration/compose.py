"""Runs docker-compose.yml without Docker: each service in a network namespace of its own.

A service's very command is run as a process, on the private bridges of its networks and no
other, with the names of those it shares one with, its environment, and its volumes' files bound
to where it expects them. Needs root on Linux. Start order and health checks are the file's.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from pathlib import Path

import yaml

from fedsim.deploy.processes import Processes, StartedProcess, environment

BRIDGE = "fedsim"
SUBNET = "10.213"


class Compose:
    """The services of a file; `directory` is where its relative volume paths start."""

    def __init__(self, file: Path, directory: Path, logs: Path) -> None:
        tree = yaml.safe_load(file.read_text())
        self.services = tree["services"]
        self.networks = list(tree["networks"])
        self.directory = directory
        self.processes = Processes(logs)
        self.running: dict[str, StartedProcess] = {}
        self._made_mount_point = not Path("/federation").exists()

    def address(self, name: str, network: str) -> str:
        """Address of a service on one of its networks."""
        return f"{SUBNET}.{self.networks.index(network)}.{10 + list(self.services).index(name)}"

    def __enter__(self) -> Compose:
        Path("/federation").mkdir(exist_ok=True)
        for number, _ in enumerate(self.networks):
            _ip("link", "add", f"{BRIDGE}{number}", "type", "bridge")
            _ip("link", "set", f"{BRIDGE}{number}", "up")
        for name, service in self.services.items():
            if "networks" not in service:
                continue
            space = self.space(name)
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
            hosts = ["127.0.0.1 localhost"]
            for network in service["networks"]:
                number = self.networks.index(network)
                cable, plug = self.cable(name, network), f"eth{number}"
                _ip("link", "add", cable, "type", "veth", "peer", "name", plug, "netns", space)
                _ip("link", "set", cable, "master", f"{BRIDGE}{number}", "up")
                _ip("-n", space, "addr", "add", f"{self.address(name, network)}/24", "dev", plug)
                _ip("-n", space, "link", "set", plug, "up")
                hosts += [
                    f"{self.address(other, network)} {other}"
                    for other, theirs in self.services.items()
                    if network in theirs.get("networks", [])
                ]
            place = Path("/etc/netns") / space
            place.mkdir(parents=True)
            (place / "hosts").write_text("\n".join([*hosts, ""]))
        return self

    def __exit__(self, *exception: object) -> None:
        self.processes.close()
        for name, service in self.services.items():
            if "networks" in service:
                _ip("netns", "del", self.space(name), check=False)
                shutil.rmtree(Path("/etc/netns") / self.space(name), ignore_errors=True)
        for number, _ in enumerate(self.networks):
            _ip("link", "del", f"{BRIDGE}{number}", check=False)
        if self._made_mount_point:
            Path("/federation").rmdir()

    def cable(self, name: str, network: str) -> str:
        return f"fsv{list(self.services).index(name)}n{self.networks.index(network)}"

    def space(self, name: str) -> str:
        mode = self.services[name].get("network_mode", f"service:{name}")
        return f"fedsim-{mode.removeprefix('service:')}"

    def set_link(self, name: str, *, up: bool) -> None:
        """Plug a service's cables in, or pull them."""
        for network in self.services[name]["networks"]:
            _ip("link", "set", self.cable(name, network), "up" if up else "down")

    def reaches(self, name: str, other: str, port: int) -> bool:
        """Whether a service can open a connection to another's port, on a network of theirs."""
        program = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 3)"
        for network in self.services[other]["networks"]:
            address = self.address(other, network)
            command = ["python3", "-c", program, address, str(port)]
            inside = ["ip", "netns", "exec", self.space(name), *command]
            if subprocess.run(inside, capture_output=True, check=False).returncode == 0:
                return True
        return False

    def up(self, name: str) -> None:
        """Start a service when those that it depends on are as it wants them."""
        for other, wish in self.services[name].get("depends_on", {}).items():
            if other not in self.running:
                self.up(other)
            if wish["condition"] == "service_healthy":
                self.wait_healthy(other)
            else:
                assert self.wait(other) == 0, self.running[other].tail()
        self.running[name] = self.processes.start(
            name, self._inside(name, self.services[name]["command"]), self._environment(name)
        )

    def wait(self, name: str, limit: float = 300) -> int:
        return self.running[name].process.wait(timeout=limit)

    def wait_healthy(self, name: str) -> None:
        check = self.services[name]["healthcheck"]
        word, *command = check["test"]
        assert word == "CMD"
        for _ in range(int(check["retries"]) * 5):
            done = subprocess.run(
                self._inside(name, command), env=environment(), capture_output=True, check=False
            )
            if done.returncode == 0:
                return
            assert self.running[name].alive(), self.running[name].tail(40)
            time.sleep(1)
        raise AssertionError(f"{name} is not healthy:\n{self.running[name].tail(40)}")

    def _inside(self, name: str, command: list[str]) -> list[str]:
        """In the service's network, and in a mount namespace with its volumes (ip makes one)."""
        steps = ["set -e", "mount -t tmpfs tmpfs /federation"]
        for volume in self.services[name]["volumes"]:
            source, target, *mode = volume.split(":")
            path = self.directory / source
            make = "mkdir -p" if path.is_dir() else "touch"
            steps += [f"mkdir -p {Path(target).parent}", f"{make} {target}"]
            steps += [f"mount --bind {shlex.quote(str(path))} {target}"]
            if mode == ["ro"]:
                steps += [f"mount -o remount,bind,ro {target}"]
        script = "; ".join([*steps, 'exec "$@"'])
        return ["ip", "netns", "exec", self.space(name), "sh", "-c", script, "sh", *command]

    def _environment(self, name: str) -> dict[str, str]:
        home = self.directory / f"home-{name}"
        home.mkdir(exist_ok=True)
        # /tmp is each container's own; here it is not.
        return {
            key: str(value).replace("/tmp", str(home))
            for key, value in self.services[name]["environment"].items()
        }


def _ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=not check)


def possible() -> bool:
    return os.geteuid() == 0 and shutil.which("ip") is not None
