"""Models: the papers' own, the usual small ones, and a user's."""

from fedsim.models.build import NAMES, build
from fedsim.models.checks import refuse_running_statistics, refuse_unusable_parameters
from fedsim.models.trainable import freeze
from fedsim.models.weights import load_weights, values_of

__all__ = [
    "NAMES",
    "build",
    "freeze",
    "load_weights",
    "refuse_running_statistics",
    "refuse_unusable_parameters",
    "values_of",
]
