"""The cohort trainer: local work of many clients at once, with a leading client axis.

To read it, begin with `trainer` (what the parts are), `local_rounds` (a block from what it is sent
to where it ends) and `steps`, with `plain_steps` or `private_steps` for one step. Then `paths`, how
a step's gradients are computed: `paths.choice` has the rule, `paths.program` the fast way for
chains of layers, `paths.plain` the one that takes everything, `paths.examples` gradients of single
examples. What a model is known to do is read in `structure.reading`, tried in `probe`, and watched
in `side_effects`. Beside the gradients: `client_state`, `payload`, and `graphs` for a GPU.
"""

from __future__ import annotations

from fedsim.training.data import ClientData
from fedsim.training.example_privacy import ExamplePrivacy, example_epsilon, example_events
from fedsim.training.trainer import Trainer

__all__ = ["ClientData", "ExamplePrivacy", "Trainer", "example_epsilon", "example_events"]
