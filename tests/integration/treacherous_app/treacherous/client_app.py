"""The trainer as an ordinary Flower client."""

import functools

from fedsim.federation.engines.client_app import client_app
from treacherous import trainer


@functools.cache
def trainer_of(schedule):
    """One trainer a process, where a process serves several messages."""
    return trainer.trainer_for(schedule)


app = client_app(
    lambda context: trainer_of(str(context.run_config["schedule"])),
    seconds_for=lambda context: float(context.run_config.get("seconds", 3600.0)),
)
