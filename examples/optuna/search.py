"""A search by Optuna: `python search.py OUT TRIALS`, started again, continues where it ended."""

import sys
from pathlib import Path

import optuna
from optuna.distributions import FloatDistribution
from optuna.trial import TrialState

import fedsim
from fedsim.privacy import Ledger

BASE = fedsim.RunConfig.load(Path(__file__).with_name("run.toml"))
# Keys that change no run's cost: the sum over a number of trials is then fixed before the first.
SPACE = {
    "client.lr": FloatDistribution(0.01, 3.0, log=True),
    "mechanism.clip-norm": FloatDistribution(0.1, 10.0, log=True),
}


def search(out: Path, trials: int, base: fedsim.RunConfig = BASE) -> optuna.Study:
    """Make trials until the study in ``out`` has ``trials`` of them."""
    out.mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(
        study_name=base.name,
        storage=f"sqlite:///{out / 'study.db'}",
        direction="maximize",
        load_if_exists=True,
    )
    while True:
        # A trial that was interrupted is finished first.
        if unfinished := study.get_trials(states=[TrialState.RUNNING]):
            trial = unfinished[0]
        elif (made := len(study.trials)) < trials:
            # By the trial's number: a study that is continued repeats no draws.
            study.sampler = optuna.samplers.TPESampler(seed=made)
            trial = study.ask(SPACE)
        else:
            return study
        if trial.params.keys() == SPACE.keys():
            study.tell(trial.number, score(base, out, trial.number, trial.params))
        else:  # it was interrupted while its parameters were drawn
            study.tell(trial.number, state=TrialState.FAIL)


def score(base: fedsim.RunConfig, out: Path, number: int, params: dict[str, float]) -> float:
    """Accuracy on held-out examples of a trial's run, which is resumed if it has begun."""
    run = out / f"trial-{number}"
    shared = {"name": run.name, "privacy.ledger": str(out / "ledger.jsonl")}
    begun = (run / "config.toml").exists()
    result = fedsim.run(base.replace(**params, **shared), out=run, resume=begun)
    return result.metrics[-1]["validation-accuracy"]


if __name__ == "__main__":
    out, trials = Path(sys.argv[1]), int(sys.argv[2])
    study = search(out, trials)
    ledger = Ledger.read(out / "ledger.jsonl", delta=BASE.noise.delta)
    print(f"Best of {len(study.trials)} trials, {study.best_value:.3f}: {study.best_params}")
    print(f"All trials together: epsilon {ledger.epsilon():.3f} at delta {BASE.noise.delta}")
