"""The cohort trainer: local work of many clients at once, with a leading client axis."""

from __future__ import annotations

from fedsim.training.data import ClientData
from fedsim.training.example_privacy import ExamplePrivacy, example_epsilon, example_events
from fedsim.training.trainer import Trainer

__all__ = ["ClientData", "ExamplePrivacy", "Trainer", "example_epsilon", "example_events"]
