"""The tables of a config about what a client does, and how it protects its examples."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from fedsim.config.bounding import BoundingSection
from fedsim.config.choices import Choice
from fedsim.config.keys import Maybe, Multiplier, Section, TargetEpsilon, Work, setting
from fedsim.settings import Doc

__all__ = ["ClientMechanismSection", "ClientNoiseSection", "ClientSection"]


class ClientMechanismSection(BoundingSection):
    """How an example's gradient is bounded, in a client with example-level privacy."""

    table: ClassVar[str] = "client.mechanism"
    filled: ClassVar[tuple[str, ...]] = ("weighting",)


class ClientNoiseSection(Section):
    """The noise on a client's sums of per-example gradients."""

    table: ClassVar[str] = "client.noise"
    multiplier: Annotated[
        Multiplier, Doc("Standard deviation of the noise on a sum of gradients, over C.")
    ] = None
    target_epsilon: Annotated[
        TargetEpsilon,
        Doc("In its place: the epsilon of the client that pays most, over all rounds."),
    ] = None
    max_epsilon: Annotated[
        Maybe, Doc("A budget: the run ends before any client's epsilon exceeds it.")
    ] = setting(None, affects_release=False)
    delta: Annotated[float, Doc("Of epsilon; below one over a client's examples.")] = Field(
        1e-5, ge=1e-100, lt=1
    )
    sampling: Annotated[
        Literal["poisson", "shuffle"],
        Doc("Batches drawn anew for each step, or a shuffled pass over the examples."),
    ] = "poisson"
    hardened: Annotated[
        bool, Doc("Draw noise so that its last bits tell nothing; slower, and right for real data.")
    ] = True
    chunk: Annotated[
        int,
        Doc(
            "Rows of a batch that are bounded at a time; 0 to choose. It changes last digits only."
        ),
    ] = setting(0, affects_release=False, ge=0)


class ClientSection(Choice):
    """What a client does with its examples."""

    table: ClassVar[str] = "client"
    kind: ClassVar[str] = "client"
    name: Annotated[str, Doc("The local algorithm.")] = "sgd"
    batch_size: Annotated[int, Doc("Examples of a local step; 0 for all that the client has.")] = (
        Field(10, ge=0)
    )
    epochs: Annotated[int, Doc("Passes over the client's examples in a round.")] = Field(
        1, ge=0, le=10_000
    )
    steps: Annotated[
        int, Doc("In place of epochs: local steps in a round, the same for every client.")
    ] = Field(0, ge=0, le=1_000_000)
    work: Annotated[
        Work,
        Doc(
            "Each client's own number of epochs, or of steps where those are set, in its place: "
            "whole(1,5) draws it from the seed, a file has one a line; empty for the same for all."
        ),
    ] = ""
    proximal: Annotated[
        float,
        Doc(
            "FedProx's mu: how strongly a client is pulled towards the global model; where it is "
            "above 0, a server that says another (Flower's FedProx) is obeyed."
        ),
    ] = Field(0.0, ge=0)
    max_grad_norm: Annotated[
        float,
        Doc(
            "The largest L2 norm of a batch's gradient, longer ones are shortened to it; 0 for "
            "any. It protects nobody: mechanism and client.mechanism do."
        ),
    ] = Field(0.0, ge=0)
    compression: Annotated[
        str,
        Doc(
            "What of an update is sent: 'top-k(0.01)', the largest of its coordinates, or "
            "'bits(8)' a coordinate; clients keep what is left out for the next round. Empty for "
            "all."
        ),
    ] = ""
    state: Annotated[
        Literal["reset", "client", "server"],
        Doc(
            "What outlives a round of an algorithm's state: nothing, what each client keeps, or "
            "the mean that the server sends."
        ),
    ] = "reset"
    state_dir: Annotated[
        str, Doc("The folder in which clients keep that, and their ledgers; empty for the run's.")
    ] = setting("", affects_release=False)
    path: Annotated[
        Literal["auto", "plain", "func", "stacked", "layered"],
        Doc("How gradients of a block of clients are computed; all agree to rounding."),
    ] = "auto"
    block_size: Annotated[
        int, Doc("Clients that are trained at a time; 0 to choose. It changes no result.")
    ] = setting(0, affects_release=False, ge=0)
    mechanism: ClientMechanismSection = ClientMechanismSection()
    noise: ClientNoiseSection = ClientNoiseSection()

    @property
    def private(self) -> bool:
        """Whether clients claim privacy for their examples."""
        return self.mechanism.name != "none" and not self.mechanism.gives_none

    @model_validator(mode="after")
    def _epochs_or_steps(self) -> ClientSection:
        self.require(
            bool(self.epochs or self.steps),
            "client.epochs",
            self.epochs,
            "at least 1 unless client.steps is set",
        )
        self.require(
            not self.steps or self.epochs <= 1,
            "client.epochs",
            self.epochs,
            f"unset while client.steps = {self.steps}",
        )
        return self

    @model_validator(mode="after")
    def _example_level(self) -> ClientSection:
        noise, bounded = self.noise, self.mechanism.name != "none"
        self.require(
            noise.max_epsilon is None or (self.private and noise.max_epsilon > 0),
            "client.noise.max-epsilon",
            noise.max_epsilon,
            "greater than 0, and unset where clients do not protect their examples",
        )
        self.require(
            not (bounded and self.work),
            "client.work",
            self.work,
            f"empty while client.mechanism.name = '{self.mechanism.name}': a client's number of "
            "noisy steps is a declared constant of the plan, the same for all",
        )
        self.require(
            not (bounded and self.max_grad_norm),
            "client.max-grad-norm",
            self.max_grad_norm,
            f"0 while client.mechanism.name = '{self.mechanism.name}', which bounds the "
            "gradient of each example",
        )
        self.require(
            not self.mechanism.is_robust,
            "client.mechanism.name",
            self.mechanism.name,
            "a bound of an example's gradient, such as 'clipping': a robust mean of gradients "
            "protects nobody",
        )
        amounts = (noise.multiplier, noise.target_epsilon)
        self.require(
            bounded or amounts == (None, None),
            "client.mechanism.name",
            "none",
            "set, to 'clipping' for one, while client.noise says how much noise there is",
        )
        self.require(
            not bounded or amounts.count(None) == 1,
            "client.noise.multiplier",
            "" if noise.multiplier is None else noise.multiplier,
            "set, or client.noise.target-epsilon, and not both, while client.mechanism.name = "
            f"'{self.mechanism.name}'",
        )
        return self
