"""Flower's DP wrappers and mods, as their documentation uses them."""

from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import FedAvg

from fedsim.audit.adapters.flower import strategy_target


def _fixed(wrapper, *mods):
    def make(f):
        inner = FedAvg(fraction_train=f.rate, fraction_evaluate=0.0)
        return wrapper(inner, f.noise_multiplier, f.clip_norm, round(f.rate * f.population))

    return strategy_target(make, lambda f: mods)


def _adaptive(wrapper, *mods):
    def make(f):
        inner = FedAvg(fraction_train=f.rate, fraction_evaluate=0.0)
        return wrapper(
            inner,
            f.noise_multiplier,
            round(f.rate * f.population),
            initial_clipping_norm=f.clip_norm,
            clipped_count_stddev=10.0,
        )

    return strategy_target(make, lambda f: mods)


server_fixed = _fixed(flower.DifferentialPrivacyServerSideFixedClipping)
client_fixed = _fixed(flower.DifferentialPrivacyClientSideFixedClipping, fixedclipping_mod)
server_adaptive = _adaptive(flower.DifferentialPrivacyServerSideAdaptiveClipping)
client_adaptive = _adaptive(
    flower.DifferentialPrivacyClientSideAdaptiveClipping, adaptiveclipping_mod
)


class _Last(FedAvg):
    """Releases the last client's message alone: the view of an untrusted server."""

    def aggregate_train(self, server_round, replies):
        last = max(replies, key=lambda reply: reply.metadata.src_node_id)
        return last.content["arrays"], None


def _local(sensitivity):
    return strategy_target(
        lambda f: _Last(fraction_evaluate=0.0),
        lambda f: [LocalDpMod(f.clip_norm, sensitivity * f.clip_norm, 8.0, 1e-5)],
    )


local_1c, local_2c = _local(1.0), _local(2.0)
