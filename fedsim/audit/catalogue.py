"""Checks of noise and of samples: name, test, and likely cause of a violation."""

from __future__ import annotations

from fedsim.audit import noise_checks as noise
from fedsim.audit import sampling_checks as sampling
from fedsim.audit.findings import make_checks

NOISE = make_checks(
    "noise",
    ("size in each round", noise.round_sizes, "noise of another size"),
    ("size in each layer", noise.layer_sizes, "another size in a layer"),
    ("size in each coordinate", noise.coordinate_sizes, "a coordinate without noise"),
    ("size in each direction", noise.direction_sizes, "a direction without noise"),
    ("mean", noise.means, "something is added beside noise"),
    (
        "accumulated over rounds",
        noise.accumulated,
        "noise of one round is cancelled or repeated in another",
    ),
    ("extreme values", noise.extremes, "noise is truncated"),
    ("shape of the distribution", noise.shape, "not Gaussian"),
    ("exact repeats", noise.exact_repeats, "noise is used again"),
    ("pairs of rounds", noise.round_pairs, "noise is used again"),
    (
        "pairs of rounds, without signs",
        noise.round_pairs_without_signs,
        "noise is used again with other signs",
    ),
    ("pairs of coordinates", noise.coordinate_pairs, "coordinates share noise"),
    ("shifts in rounds and coordinates", noise.shifts, "overlapping streams of random numbers"),
    ("size against the cohort's", noise.against_sizes, "noise depends on who was sampled"),
)
DRAWS = (
    *make_checks("sampler", ("sampled ids", sampling.ids, "sampling with replacement")),
    *make_checks(
        "sampler",
        ("charged rate", sampling.charged_rate, "more is sampled than charged"),
        fits=lambda sampled: sampled.client_rates,
    ),
    *make_checks(
        "sampler",
        ("sizes", sampling.sizes, "another sampler, or rate"),
        fits=lambda sampled: sampled.has_law,
    ),
    *make_checks(
        "sampler",
        ("inclusion frequencies", sampling.frequencies, "some are sampled more often"),
        ("pairs sampled together", sampling.together, "rows are not drawn independently"),
        ("overlap of rounds", sampling.overlaps, "a draw is used again"),
        fits=lambda sampled: sampled.is_random,
    ),
    *make_checks(
        "sampler",
        ("spread of sizes", sampling.spread, "cohorts of a fixed size, announced as Poisson"),
        ("rounds after being sampled", sampling.succession, "rounds are not drawn independently"),
        ("periodicity", sampling.periodicity, "rounds are not drawn independently"),
        fits=lambda sampled: sampled.equal_rates,
    ),
)
DECLARED_LAW = make_checks(
    "sampler",
    (
        "declared inclusion probabilities",
        sampling.declared_law,
        "the sampler does not follow its own law",
    ),
)
