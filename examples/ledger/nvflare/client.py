"""What a site trains: a step towards the mean of its data."""

import numpy as np
import nvflare.client as flare

flare.init()
data = np.random.default_rng(1).normal(3.0, 1.0, (50, 4)).mean(0)
while flare.is_running():
    model = flare.receive()
    flare.send(
        flare.FLModel(
            params={"w": 0.5 * (data - model.params["w"])}, params_type=flare.ParamsType.DIFF
        )
    )
