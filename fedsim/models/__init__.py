"""Models: the papers' own, the usual small ones, and a user's."""

from fedsim.models.build import NAMES, build
from fedsim.models.checks import refuse_running_statistics
from fedsim.models.trainable import freeze

__all__ = ["NAMES", "build", "freeze", "refuse_running_statistics"]
