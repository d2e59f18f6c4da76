"""A SuperLink of one's own for Flower's simulation runtime."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import tomli_w

from fedsim.closing import Closed
from fedsim.deploy.federation import CONNECTION
from fedsim.deploy.flwr_cli import Operator
from fedsim.deploy.processes import Processes, free_ports, program, wait_for_port
from fedsim.errors import FedsimError

__all__ = ["Simulation", "replace_dead_actors", "resources"]


class Simulation(Closed):
    """A SuperLink on loopback that runs apps with virtual clients, and ends with this process.

    The one that Flower starts by itself outlives the run and keeps the environment of its
    first start.

    Parameters
    ----------
    variables : mapping, optional
        Environment variables of the apps.

    Attributes
    ----------
    operator : Operator
    """

    def __init__(self, variables: Mapping[str, str] | None = None) -> None:
        self._processes = Processes()
        try:
            (port,) = free_ports(1)
            self.directory = self._processes.directory
            home = self.directory / "operator"
            home.mkdir()
            link = {"address": f"127.0.0.1:{port}", "insecure": True}
            connection = {"superlink": {"default": CONNECTION, CONNECTION: link}}
            (home / "config.toml").write_text(tomli_w.dumps(connection), encoding="utf-8")
            self.operator = Operator(home, CONNECTION)
            self._superlink = self._processes.start(
                "superlink",
                [
                    *(program("flower-superlink"), "--simulation", "--insecure"),
                    *("--host", "127.0.0.1", "--port", str(port)),
                    "--disable-runtime-dependency-installation",
                ],
                {**(variables or {}), "FLWR_HOME": str(self.directory)},
            )
            wait_for_port(self._superlink, port)
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        """See that the SuperLink is alive.

        Raises
        ------
        FedsimError
            With the end of its log, if it is not.
        """
        if not self._superlink.alive():
            raise FedsimError(f"the SuperLink ended:\n{self._superlink.tail()}")

    def close(self) -> None:
        """End it."""
        self._processes.close()


def resources(clients: int, cpus: float, gpus: float) -> str:
    """Flower's federation config for so many virtual clients.

    Parameters
    ----------
    cpus, gpus : float
        What Ray reserves for each that runs.
    """
    return (
        f"num-supernodes={clients} client-resources-num-cpus={cpus:g} "
        f"client-resources-num-gpus={gpus:g}"
    )


def replace_dead_actors() -> None:
    """Have Flower's simulation, which runs in this process, replace a Ray actor that has died.

    A client that ends its process (``os._exit``, a crash in C, the system's out-of-memory killer)
    ends the actor that it ran on. Flower puts the dead actor back on top of its pool and gives it
    the next client, so that one client's death would be the failure of most others, in every
    round to come. A new actor takes its place: only that one client has failed.
    """
    from flwr.simulation.ray_transport.ray_actor import BasicActorPool
    from ray.exceptions import ActorDiedError

    pool: Any = BasicActorPool
    fetch = pool.fetch_result_and_return_actor_to_pool
    if hasattr(fetch, "__wrapped__"):
        return

    @functools.wraps(fetch)
    def fetch_or_replace(self: Any, future: Any) -> Any:
        try:
            return fetch(self, future)
        except ActorDiedError:
            # Flower answers the error by putting back what is noted here.
            self._future_to_actor[future] = self.create_actor_fn()
            raise

    pool.fetch_result_and_return_actor_to_pool = fetch_or_replace
