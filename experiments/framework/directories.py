"""Find and load experiments, those of this checkout or in a user's own directory."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import experiments
from experiments.framework.base import Context, Experiment
from experiments.framework.config_runs import ConfigRuns
from fedsim import allowed_code, regular_files
from fedsim.config import RunConfig, Scalar
from fedsim.errors import FedsimError
from fedsim.synonyms import closest

KINDS = {
    "quadratic": "experiments.das.quadratic:Quadratic",
    "das": "experiments.das.tables:Das",
    "das-local-steps": "experiments.das.local_steps:LocalSteps",
    "adaclip-regression": "experiments.adaclip.regression:Regression",
    "adaclip-mnist": "experiments.adaclip.mnist:Mnist",
    "adaclip-whitening": "experiments.adaclip.whitening:Whitening",
    "adaclip-pca": "experiments.adaclip.pca:Pca",
    "xu": "experiments.xu.xu:Xu",
    "comparison": "experiments.comparisons.comparison:Comparison",
    "plans": "experiments.plans.plans:Plans",
    "niid": "experiments.niid.niid:Niid",
    "landscape": "experiments.landscape.landscape:Landscape",
    "koskela-federated": "experiments.koskela.federated:KoskelaFederated",
    "koskela-private": "experiments.koskela.private:KoskelaPrivate",
    "koskela-rate": "experiments.koskela.rate:KoskelaRate",
    "koskela-scale": "experiments.koskela.scale:KoskelaScale",
}
"""Class of each value of the key ``experiment``."""


def find(name: str) -> Path:
    """Directory of an experiment, given by name or as a path to a user's own directory.

    Raises
    ------
    FedsimError
        If there is none.
    """
    known = _directories()
    directory = Path(name)
    if (directory / "experiment.toml").is_file():
        return directory
    if name not in known:
        hint = closest("experiment", name, known)
        raise FedsimError(
            f"there is no experiment '{name}';{hint} must be one of {', '.join(sorted(known))}, or "
            "a directory with an experiment.toml."
        )
    return known[name]


def names() -> list[str]:
    """Names of this checkout's experiments."""
    return sorted(_directories())


def _directories() -> dict[str, Path]:
    root = Path(experiments.__file__).parent
    return {path.parent.name: path.parent for path in root.rglob("experiment.toml")}


def load(
    directory: Path,
    *,
    data: Path,
    seeds: int | None = None,
    quick: bool = False,
    engine: Iterable[str] = (),
) -> Experiment:
    """Load the experiment of a directory.

    Parameters
    ----------
    directory : path
    data : path
        Folder of data sets.
    seeds : int, optional
        Replaces the file's own number of seeds.
    quick : bool
        Apply the table ``[quick]``: a small version, to see that everything works.
    engine : iterable of str
        ``engine.KEY=VALUE``: the engine of members that are runs of a config.

    Raises
    ------
    FedsimError
        If anything in the file is wrong.
    """
    path = directory / "experiment.toml"
    try:
        tree = regular_files.read_toml(path)
    except (OSError, ValueError) as error:
        raise FedsimError(f"{path} cannot be read: {error}.") from None
    smaller = tree.pop("quick", {})
    if quick:
        tree |= smaller
    if seeds is not None:
        tree["seeds"] = seeds
    return _make(tree, Context(directory, data, _engine_keys(engine)))


def _make(tree: dict[str, Any], context: Context) -> Experiment:
    key = tree.get("experiment")
    if key not in KINDS:
        raise FedsimError(f"experiment = {key!r}; it must be one of {', '.join(KINDS)}.")
    module, _, name = KINDS[key].partition(":")
    experiment: type[Experiment] = getattr(import_module(module), name)
    allowed_code.allow([experiments.__name__])  # their configs name code of this package
    if context.engine and not issubclass(experiment, ConfigRuns):
        raise FedsimError(
            f"--set {', '.join(context.engine)}; it must be left out: the members of "
            f"{context.directory.name} are no runs of a config, and have no engine."
        )
    return experiment(experiment.settings_type.read(tree), context)


def _engine_keys(overrides: Iterable[str]) -> dict[str, Scalar]:
    """Parse ``engine.KEY=VALUE`` to the config keys that it changes.

    Raises
    ------
    FedsimError
        If it is a key of another table, which only the experiment's directory may set.
    """
    for text in overrides:
        if not text.startswith("engine."):
            raise FedsimError(
                f"--set {text}; it must be engine.KEY=VALUE, which no result depends on: what an "
                "experiment is made of stands in its directory."
            )
    chosen, defaults = (RunConfig.of(texts).to_run_config() for texts in (overrides, ()))
    return {key: value for key, value in chosen.items() if value != defaults.get(key)}
