"""Runs docker-compose.yml without Docker: each service in a network namespace of its own.

A service's very command is run as a process, with the service names resolving to addresses
on a private bridge, its environment, and its volumes' files bound to where it expects them.
Needs root on Linux. Start order and health checks are the file's.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from pathlib import Path

import yaml

from fedsim.deploy.processes import Processes, Running, environment

BRIDGE = "fedsim0"
SUBNET = "10.213.77"


class Compose:
    """The services of a file; `directory` is where its relative volume paths start."""

    def __init__(self, file: Path, directory: Path, logs: Path) -> None:
        self.services = yaml.safe_load(file.read_text())["services"]
        self.directory = directory
        self.processes = Processes(logs)
        self.running: dict[str, Running] = {}
        self.address = {name: f"{SUBNET}.{n}" for n, name in enumerate(self.services, start=10)}
        self._made_mount_point = not Path("/federation").exists()

    def __enter__(self) -> Compose:
        Path("/federation").mkdir(exist_ok=True)
        _ip("link", "add", BRIDGE, "type", "bridge")
        _ip("link", "set", BRIDGE, "up")
        hosts = "127.0.0.1 localhost\n" + "".join(
            f"{address} {name}\n" for name, address in self.address.items()
        )
        for number, name in enumerate(self.services):
            space = self.space(name)
            _ip("netns", "add", space)
            _ip("link", "add", f"fsv{number}", "type", "veth", "peer", "name", "eth0",
                "netns", space)  # fmt: skip
            _ip("link", "set", f"fsv{number}", "master", BRIDGE, "up")
            _ip("-n", space, "link", "set", "lo", "up")
            _ip("-n", space, "addr", "add", f"{self.address[name]}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            place = Path("/etc/netns") / space
            place.mkdir(parents=True)
            (place / "hosts").write_text(hosts)
        return self

    def __exit__(self, *exception: object) -> None:
        self.processes.close()
        for name in self.services:
            _ip("netns", "del", self.space(name), check=False)
            shutil.rmtree(Path("/etc/netns") / self.space(name), ignore_errors=True)
        _ip("link", "del", BRIDGE, check=False)
        if self._made_mount_point:
            Path("/federation").rmdir()

    def space(self, name: str) -> str:
        return f"fedsim-{name}"

    def set_link(self, name: str, *, up: bool) -> None:
        """Plug a service's cable in, or pull it."""
        _ip("link", "set", f"fsv{list(self.services).index(name)}", "up" if up else "down")

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
