"""An NVFlare filter that bounds and noises what leaves a site, and keeps the site's own ledger."""

import numpy as np
from nvflare.apis.dxo import DataKind
from nvflare.apis.dxo_filter import DXOFilter

from fedsim.cohorts import FullCohort
from fedsim.privacy import DeclaredMechanism, Independent, Ledger, ReleasePlan


class ChargedFilter(DXOFilter):
    """Each result is clipped, charged and noised; one beyond the budget does not leave."""

    def __init__(self, directory: str, clip_norm: float, multiplier: float, max_epsilon: float):
        kinds = [DataKind.WEIGHT_DIFF]
        super().__init__(supported_data_kinds=kinds, data_kinds_to_filter=kinds)
        self.directory, self.clip_norm, self.multiplier = directory, clip_norm, multiplier
        self.max_epsilon = max_epsilon
        self._ledger = None

    def process_dxo(self, dxo, shareable, fl_ctx):
        path = f"{self.directory}/{fl_ctx.get_identity_name()}"
        self._ledger = self._ledger or Ledger(
            f"{path}.jsonl", delta=1e-5, max_epsilon=self.max_epsilon
        )
        # What one site sends is a sum over one row, which may be any other.
        plan = ReleasePlan(
            level="client",
            sampler=FullCohort(1, adjacency="replace-one"),
            mechanism=DeclaredMechanism("clipping in a filter", self.clip_norm),
            noise=Independent(self.multiplier),
        )
        norm = np.sqrt(sum(np.square(move).sum() for move in dxo.data.values()))
        scale = min(1.0, self.clip_norm / max(norm, 1e-12))
        release = self._ledger.last_round + 1
        with self._ledger.release(plan, release):
            std, draws = self.multiplier * self.clip_norm, np.random.default_rng()
            dxo.data = {
                key: scale * move + std * draws.standard_normal(np.shape(move))
                for key, move in dxo.data.items()
            }
        with open(f"{path}.csv", "a") as table:
            table.write(f"{release},{self._ledger.epsilon(1e-5):.6g}\n")
        return dxo
