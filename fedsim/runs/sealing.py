"""Sealing what a run has left: its manifest, and a signature where there is a key for one."""

from __future__ import annotations

import os
from pathlib import Path

from fedsim.privacy.fingerprint import Fingerprints
from fedsim.privacy.manifest import Manifest
from fedsim.privacy.signing import LEDGER_KEY, private_key, signature
from fedsim.reports.record import clients_ledgers, read_config
from fedsim.runs.artefacts import RunDirectory

__all__ = ["seal"]


def seal(directory: RunDirectory) -> None:
    """Write the manifest of a run's files as they are now, and sign it where there is a key.

    Whatever changes one of these files afterwards has to seal them again.

    Parameters
    ----------
    directory : RunDirectory
        Its config or `LEDGER_KEY` may name a key.

    Raises
    ------
    FedsimError
        If what should be the key is none.
    """
    config = read_config(directory.config)
    clients = clients_ledgers(directory.path, config)
    manifest = Manifest.of(directory.path, clients, Fingerprints(directory.path)).to_json()
    key = str(config.get("noise.ledger-key") or os.environ.get(LEDGER_KEY, ""))
    signed = signature(private_key(Path(key)), manifest.encode()) if key else ""
    directory.save_manifest(manifest, signed)
