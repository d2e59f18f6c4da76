"""The cohort trainer: local training of many clients at once, with a leading client axis.

Where to begin: `trainer` (the parts), `local_rounds` (a block's round, from received parameters to
trained ones) and `steps`, with `plain_steps` or `private_steps` for a single step. Then `paths`,
the ways to compute a step's gradients: `paths.path_choice` has the rule that picks one,
`paths.program` the fast path for chains of layers, `paths.plain` the path that takes every model,
`paths.examples` per-example gradients. What a model does is read from its graph in
`structure.reading`, tested on made-up examples in `probe`, and checked for side effects in
`side_effects`. The rest: `client_state`, `payload`, and `graphs` (CUDA graphs).
"""

from __future__ import annotations

from fedsim.arguments import explain_calls
from fedsim.training.data import ClientData
from fedsim.training.example_privacy import ExamplePrivacy, example_epsilon, example_events
from fedsim.training.trainer import Trainer

__all__ = ["ClientData", "ExamplePrivacy", "Trainer", "example_epsilon", "example_events"]

explain_calls(__name__)
