"""pfl-research: its Gaussian mechanism, adaptive clipping, and user samplers."""

from pfl.privacy.adaptive_clipping import AdaptiveClippingGaussianMechanism
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism

from fedsim.audit.adapters.pfl import mechanism_target


def _gaussian(f):
    mechanism = GaussianMechanism(f.clip_norm, f.noise_multiplier)
    return CentrallyAppliedPrivacyMechanism(mechanism)


def _adaptive(f):
    return AdaptiveClippingGaussianMechanism(
        lambda bound: GaussianMechanism(bound, f.noise_multiplier),
        initial_clipping_bound=f.clip_norm,
        clipping_indicator_noise_stddev=0.5 * f.population,
        adaptive_clipping_norm_quantile=0.5,
    )


gaussian, adaptive = mechanism_target(_gaussian), mechanism_target(_adaptive)
random_users = mechanism_target(_gaussian, "random")
minimize_reuse = mechanism_target(_gaussian, "minimize_reuse")
