"""What is claimed of a run, from what its ledgers say and nothing else."""

from __future__ import annotations

from dataclasses import replace

from fedsim.config import RunConfig
from fedsim.config.plan import beside, stopping
from fedsim.privacy import ClientLedgers, Ledger, Statement, claimed

__all__ = ["statements"]


def statements(
    config: RunConfig, ledger: Ledger, of_clients: ClientLedgers | None, ended: str
) -> tuple[Statement, Statement | None]:
    """What is claimed of the run, and at example level.

    Parameters
    ----------
    config : RunConfig
    ledger : Ledger
        The server's.
    of_clients : ClientLedgers or None
        Those of the clients, where anybody here has them.
    ended : str
        As in `RunResult`.
    """
    end = stopping(config.to_run_config(), ledger.rounds_made, ended)
    examples = None if of_clients is None else of_clients.statement(stopping=end)
    server = beside(config, ledger.statement(config.noise.delta, stopping=end))
    if examples is not None:
        of_run = claimed(server if config.private else None, examples)
        return of_run[0], of_run[-1]
    if config.client.private:
        note = (
            "Clients protect their own examples: what that has cost each of them is in a "
            "ledger where the client keeps it, and not here."
        )
        server = replace(server, note=f"{server.note} {note}".strip())
    return server, None
