"""Random sources of a strategy's noise, also for rounds that share draws."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from fedsim.mechanisms import NoiseSource
from fedsim.mechanisms.releaser import NUMBERS
from fedsim.privacy.noise import Noise
from fedsim.randomness import Purpose, Randomness


class NoiseSources:
    """Sources of a noise, round by round.

    Noise that is correlated over rounds needs the draws of earlier rounds again, also in a process
    that resumes the run. With entropy from the operating system all draws are therefore keyed by
    one 256-bit secret of the plan, which is in `state` and nowhere else.
    """

    def __init__(self, randomness: Randomness, noise: Noise) -> None:
        self._randomness, self._noise = randomness, noise
        self._secret = ""
        self._attempts: dict[int, int] = {}
        if noise.correlated and randomness.seed is None:
            self._take_secret(secrets.token_hex(32))

    def _take_secret(self, secret: str) -> None:
        self._secret, self._randomness = secret, Randomness(0, secret)

    def share(self, server_round: int, client: int) -> NoiseSource:
        """The source of a client's share of this round's noise."""
        generator = self._randomness.generator(
            Purpose.SHARE, level="client", round=server_round, client=client
        )
        return NoiseSource(generator, self._noise.hardened)

    def of_round(self, server_round: int) -> NoiseSource:
        """The source of this round's noise; to be called once a round."""
        generator = self._generator(server_round, 0, 0)
        elsewhere = partial(self._generator, server_round)
        return NoiseSource(generator, self._noise.hardened, server_round, elsewhere)

    def _generator(self, server_round: int, age: int, number: int) -> np.random.Generator:
        randomness = self._randomness.repeated() if age else self._randomness
        drawn_in = server_round - age
        # An attempt's draws follow those of the one before.
        part = self._attempts.get(drawn_in, 0) * NUMBERS + number
        return randomness.generator(Purpose.NOISE, level="client", round=drawn_in, part=part)

    def begin(self, server_round: int, attempt: int) -> None:
        """Use other addresses for a round that was drawn ``attempt`` times before."""
        if attempt:
            self._attempts[server_round] = attempt

    def state(self) -> dict[str, Any] | None:
        """What a resumed run needs; a secret, unlike the rest of a strategy's state."""
        if not self._noise.correlated:
            return None
        return {"secret": self._secret, "attempts": {str(r): n for r, n in self._attempts.items()}}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Continue from what `state` gave."""
        if state is None:
            return
        self._attempts = {int(r): n for r, n in state["attempts"].items()}
        if state["secret"]:
            self._take_secret(state["secret"])
