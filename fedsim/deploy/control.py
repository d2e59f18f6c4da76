"""A SuperLink whose Control API answers to the operator's token only.

Run as ``python -m fedsim.deploy.control DIGEST ARGUMENTS``, the last as for Flower's
``flower-superlink``. DIGEST is a file with the SHA-256 of the operator's token in hex; the token
itself is not on the server. Flower asks a plugin whether a token is good, and has none of its
own but for OpenID Connect in another edition; the operator's ``flwr`` is the ordinary one and
reads the token from ``credentials.yaml`` in its FLWR_HOME.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedsim import regular_files
from fedsim.deploy import flower_replacements

if TYPE_CHECKING:
    from flwr.supercore.auth.typing import AccountInfo
    from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin


def new_token() -> str:
    """A token that nobody guesses."""
    return secrets.token_urlsafe(32)


def token_digest(token: str) -> str:
    """What the server knows of a token."""
    return hashlib.sha256(token.encode()).hexdigest()


def credentials(token: str, address: str) -> bytes:
    """The ``credentials.yaml`` with which ``flwr`` presents a token to one address."""
    store = f"flower.account-auth.{address}"
    values = {"authn-type": "oidc", "oidc-access-token": token, "oidc-refresh-token": "-"}
    entries = {
        f"{store}.{key}": base64.b64encode(value.encode()).decode() for key, value in values.items()
    }
    # JSON is YAML.
    return json.dumps(entries, indent=1).encode()


def operator_plugin(digest: str) -> type[NoOpControlAuthnPlugin]:
    """Flower's question who somebody is, answered by one token's digest."""
    from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin

    class OperatorToken(NoOpControlAuthnPlugin):
        """Knows the operator by a token, and nobody else."""

        def validate_tokens_in_metadata(
            self, metadata: Sequence[tuple[str, str | bytes]]
        ) -> tuple[bool, AccountInfo | None]:
            """Whether the operator's token is among what was sent."""
            for _, value in metadata:
                sent = token_digest(value if isinstance(value, str) else value.decode("latin1"))
                if hmac.compare_digest(sent, digest):
                    # Flower's community edition knows one account.
                    return super().validate_tokens_in_metadata(metadata)
            return False, None

        def refresh_tokens(self, metadata: Sequence[tuple[str, str | bytes]]) -> tuple[None, None]:
            """No token is made from another."""
            del metadata
            return None, None

    return OperatorToken


def main(digest_file: Path, arguments: Sequence[str]) -> None:
    """Run the SuperLink."""
    from flwr.superlink.cli.flower_superlink import flower_superlink

    digest = regular_files.read_text(digest_file).strip()
    if len(digest) != 64:
        sys.exit(f"{digest_file} holds no SHA-256 of the operator's token.")
    flower_replacements.accept_operator_only(operator_plugin(digest))
    flower_replacements.wait_for_database()
    sys.argv = ["flower-superlink", *arguments]
    flower_superlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
