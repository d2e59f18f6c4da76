"""What lets a verdict stand, and that the stored results are what is said of them."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from matplotlib.colors import to_hex
from release_helpers import plan_of
from scipy import stats
from slow_cases import slow_but
from typer.testing import CliRunner

from experiments.adaclip.regression import descend, make_mechanism
from experiments.command import experiment
from experiments.framework.base import (
    BestOfGrid,
    ExperimentClaim,
    Report,
    Result,
    Table,
    digest,
    read_table,
)
from experiments.framework.config_runs import chosen
from experiments.framework.judge import NOTHING, Judged, Judgement, judge, overview
from experiments.framework.run import Stored, directories, find, load, shortened
from experiments.framework.spread import all_ahead, listed, paired
from fedsim.config import RunConfig
from fedsim.errors import FedsimError
from fedsim.mechanisms import NoiseSource, Releaser
from fedsim.privacy import Independent
from fedsim.randomness import Purpose, Randomness
from fedsim.reports.plots import COLOURS, DARK, LIGHT, SERIES
from fedsim.rows import DenseRows, Layout

STORED = [name for name in directories() if Stored.load(find(name)).members]
NOT_RUN = [name for name in directories() if Judgement.load(find(name)).not_run]
"""Experiments that lack results, some of them or all."""
FAST = ("adaclip-mnist", "das-local-steps", "koskela-scale", "niid-private", "quadratic", "xu")
"""Experiments whose results are judged in less than a second, one of each kind."""


@cache
def judged_again(name: str) -> Judged:
    """A committed experiment's stored results, judged again: seconds, for many tests once."""
    return stored_judged(find(name))


def stored_judged(directory: Path) -> Judged:
    return judge(load(directory, data=Path()), Stored.load(directory))


def faults_in(directory: Path) -> list[str]:
    judged = stored_judged(directory)
    return [*judged.faults(), *judged.faults_of_page()]


@pytest.fixture(scope="module")
def page() -> str:
    """The page of the four papers, which checks every experiment."""
    return overview()


@pytest.mark.parametrize("name", slow_but(FAST, directories()))
def test_stored_results_are_judged_as_they_were_and_the_page_says_so(name: str) -> None:
    judged = judged_again(name)
    assert [*judged.faults(), *judged.faults_of_page()] == []


@pytest.mark.parametrize("name", directories())
def test_no_sentence_says_by_hand_how_many_seeds_there_are(name: str) -> None:
    judgement = Judgement.load(find(name))
    texts = [judgement.about, *judgement.remarks, *(panel.setting for panel in judgement.panels)]
    for sentence in [*texts, *(claimed.why for claimed in judgement.claims.values())]:
        assert not re.search(r"(?i)\b(two|three|four|five|six|ten|\d+) (\w+ )?seeds\b", sentence)


@pytest.mark.parametrize("name", slow_but(FAST, STORED))
def test_lines_of_pictures_have_colours_of_the_palette(name: str) -> None:
    report = judged_again(name).report
    if report is NOTHING:  # too few results are stored to judge any
        assert name in NOT_RUN
        return
    known = {*SERIES, *COLOURS.values(), LIGHT.ink, LIGHT.grid, LIGHT.frame}
    for picture in report.pictures.values():
        for axes in picture.axes:
            assert {to_hex(line.get_color()) for line in axes.lines} <= known
    assert DARK.series != LIGHT.series


@pytest.mark.slow
@pytest.mark.parametrize("name", NOT_RUN)
def test_what_is_not_measured_says_so_and_how_many_runs_it_would_take(name: str, page: str) -> None:
    app = typer.Typer()
    app.command()(experiment)
    result = CliRunner().invoke(app, [name, "--check"])
    said = " ".join(result.output.split())
    assert result.exit_code == 0
    assert "Not measured: nothing here is judged." in said
    count = len(load(find(name), data=Path()).members())
    assert f"{count} runs" in said
    assert f"| `{name}` |  | not measured |" in page


@pytest.mark.slow
def test_every_panel_of_the_four_papers_is_on_the_page(page: str) -> None:
    for name in directories():
        for panel in Judgement.load(find(name)).panels:
            assert f"| {panel.name} | `{name}` |" in page
            assert f"*In the paper:* {panel.shows}" in page
    pictures = re.findall(r"\]\(pictures/(.*?)\)", page)
    root = Path(__file__).parents[2] / "experiments"
    assert len(pictures) > 20
    assert all((root / picture).is_file() for picture in pictures)


def test_best_value_at_an_edge_is_at_it_however_flat_the_grid_is() -> None:
    assert BestOfGrid("c", {0.1: 80.0, 0.3: 85.0, 1.0: 90.0}).at_edge
    assert BestOfGrid("c", {0.1: 90.0, 0.3: 85.0, 1.0: 80.0}).at_edge
    inside = BestOfGrid("c", {1.0: 80.0, 0.3: 90.0, 0.1: 85.0})
    assert (inside.value, inside.at_edge) == (0.3, False)
    assert BestOfGrid("c", {0.1: 69.1, 0.3: 69.2, 1.0: 69.6}).at_edge
    assert BestOfGrid("c", {0.1: 80.0}).at_edge is False
    assert inside.flat_ends == []
    assert BestOfGrid("c", {0.1: 69.4, 0.3: 69.6, 1.0: 69.0}).flat_ends == [0.1]


def test_paired_interval_is_that_of_the_t_test() -> None:
    draws = np.random.default_rng(0)
    first, second = draws.normal(1.0, 1.0, 6), draws.normal(0.0, 1.0, 6)
    interval = stats.ttest_rel(first, second).confidence_interval(0.95)
    difference = paired(list(first), list(second))
    assert (difference.low, difference.high) == pytest.approx((interval.low, interval.high))
    assert paired([1.0], [0.0]).positive is None
    ahead, behind, open_ = paired([2, 2.1], [1, 1.1]), paired([1, 1.1], [2, 2.1]), paired([1], [0])
    assert all_ahead([ahead, ahead]) is True
    assert all_ahead([ahead, open_]) is None
    assert all_ahead([ahead, open_, behind]) is False


@pytest.mark.slow
def test_one_of_k_intervals_below_0_is_no_verdict_by_itself() -> None:
    """Five differences whose true values are 0: at most 5 % of such claims are not reproduced."""
    draws = np.random.default_rng(3)
    trials = 2000
    rejected = alone = 0
    for _ in range(trials):
        differences = [paired(list(draws.normal(0, 1, 5)), [0.0] * 5) for _ in range(5)]
        rejected += all_ahead(differences) is False
        alone += any(difference.high < 0 for difference in differences)
    # Each side has half of the error; three standard errors of 2,000 trials above it.
    assert rejected / trials <= 0.025 + 3 * np.sqrt(0.025 * 0.975 / trials)
    assert alone / trials > 0.08


def test_intervals_of_several_differences_hold_together() -> None:
    draws = np.random.default_rng(0).normal(0.0, 1.0, 6)
    # The interval of this difference alone ends just below 0.
    values = list(draws - stats.ttest_1samp(draws, 0.0).confidence_interval(0.95).high - 0.05)
    difference = paired(values, [0.0] * 6)
    alone = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    together = stats.ttest_1samp(values, 0.0).confidence_interval(1 - 0.05 / 8)
    assert difference.interval() == pytest.approx((alone.low, alone.high))
    assert difference.interval(8) == pytest.approx((together.low, together.high))
    assert alone.high < 0 < together.high
    ahead = [paired([2, 2.1], [1, 1.1])] * 7
    assert all_ahead([difference]) is False
    assert all_ahead([*ahead, difference]) is None
    text = listed([difference, *ahead], "abcdefgh")
    assert f"(with all 8 together [{together.low:+.2f}, {together.high:+.2f}])" in text
    assert text.count("together") == 1


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [
        (True, True, True),
        (False, False, False),
        (None, None, None),
        (True, False, None),
        (True, None, None),
        (None, False, None),
    ],
)
def test_a_verdict_that_turns_with_what_the_paper_leaves_open_is_not_decided(
    first: bool | None, second: bool | None, verdict: bool | None
) -> None:
    claim = ExperimentClaim.under(
        "c", "Fig. 1", "so", "its unit", {"a": (first, "1"), "b": (second, "2")}
    )
    assert (claim.reproduced, claim.turns) == (verdict, first is not second)
    assert claim.measured == "a: 1; b: 2"


def test_page_shows_both_sides_of_a_verdict_that_turns() -> None:
    turning = {"source": "section 2: it is so", "verdict": "not decided"}
    judgement = read_table(Judgement, TREE | {"claims": {"c": turning}}, "judgement")
    claim = ExperimentClaim.under(
        "c", "Fig. 1", "so", "its unit", {"a": (True, "1"), "b": (False, "2")}
    )
    judged = reported(judgement, claim)
    assert [*judged.faults()] == []
    assert (
        "- **Not decided** (it turns with its unit). The paper "
        "(section 2: it is so): so.\n    - Reproduced a: *1*\n    - Not reproduced b: *2*\n"
    ) in judged.page
    with_cause = read_table(
        Judgement, TREE | {"claims": {"c": {**turning, "cause": "seeds"}}}, "judgement"
    )
    assert any("that is the cause" in fault for fault in reported(with_cause, claim).faults())


def test_claims_of_the_paper_and_ours_are_counted_apart(judgement: Judgement) -> None:
    theirs = {"source": "section 2: it is so", "verdict": "reproduced"}
    mixed = read_table(
        Judgement, TREE | {"claims": {"c": theirs, "d": {"verdict": "confirmed"}}}, "judgement"
    )
    judged = reported(mixed, CLAIM, replace(CLAIM, name="d"))
    assert [*judged.faults()] == []
    assert "Claims of the paper: 1 reproduced. Ours: 1 confirmed.\n" in judged.page
    assert judged.counts(mixed.panels[0].name) == ["1 reproduced", "1 confirmed"]
    ours = reported(judgement, CLAIM)
    assert "Claims of the paper: none. Ours: 1 confirmed." in ours.page
    assert "- **Confirmed**. Ours: it is so: *1.0*" in ours.page
    wrong = read_table(Judgement, TREE | {"claims": {"c": {"verdict": "reproduced"}}}, "judgement")
    assert any("came out 'confirmed'" in fault for fault in reported(wrong, CLAIM).faults())


def test_page_names_grids_that_end_where_they_are_flat(judgement: Judgement) -> None:
    flat = BestOfGrid("rate of x", {0.1: 79.8, 1.0: 80.0, 10.0: 70.0})
    judged = reported(judgement, CLAIM, choices=(flat,))
    assert "rate of x (best 1, end 0.1)" in judged.page
    assert [*judged.faults()] == []
    steep = BestOfGrid("rate of x", {0.1: 70.0, 1.0: 80.0, 10.0: 70.0})
    assert "rate of x" not in reported(judgement, CLAIM, choices=(steep,)).page


def test_the_start_decides_what_comes_of_figure_2() -> None:
    """At the paper's rate, with h2 tuned: the printed form is ahead from near the optimum only."""
    report = judged_again("adaclip-regression").report
    claims = {claim.name: claim for claim in report.claims}
    assert claims["clipping-grows"].reproduced
    readings = claims["below"].readings
    assert readings["as printed from .01 N(0, I)"][0] is True
    assert readings["as printed from N(0, I/d)"][0] is False
    assert claims["below"].reproduced is None
    # lr sigma^2 (d - 1) / (2 - lr), and .005 by the gradients' own variance.
    for start in (".01 N(0, I)", "N(0, I/d)", "N(0, I)"):
        error = report.figures[f"error clipping {start} d=1000"]
        assert error == pytest.approx(5.03e-5 * 999 + 0.005, rel=0.05)


def test_the_printed_adaclips_best_rate_is_inside_a_grid_to_1e6() -> None:
    report = judged_again("adaclip-mnist").report
    printed = [choice for choice in report.choices if choice.of.startswith("rate of literal")]
    assert len(printed) == 5
    for choice in printed:
        assert max(choice.scores) == 1e6
        assert choice.value >= 1e4
        assert choice.flat_ends == []


TREE: dict[str, Any] = {
    "title": "T",
    "paper-of": "das",
    "about": "A",
    "panels": [{"name": "Fig. 1", "shows": "s", "setting": "s", "tables": ["t"]}],
    "claims": {"c": {"verdict": "confirmed"}},
    "paper": {"f": 2.0},
}
CLAIM = ExperimentClaim("c", "Fig. 1", "it is so", True, "1.0")
CONFIRMED = {"verdict": "confirmed"}


def reported(
    judgement: Judgement,
    *claims: ExperimentClaim,
    choices: tuple[BestOfGrid, ...] = (),
    seeds: int = 3,
) -> Judged:
    """A made-up report of some claims, with its page."""
    experiment = load(find("quadratic"), data=Path())
    experiment.settings = replace(experiment.settings, seeds=seeds)
    report = Report([Table("t", "", ["a"], [])], {"f": 1.0}, claims, choices=choices)
    stored = Stored({"m": {"settings": "", "result": {}}})
    return Judged(experiment, judgement, stored, {}, report)


@pytest.fixture
def judgement() -> Judgement:
    return read_table(Judgement, TREE, "judgement")


def test_report_that_agrees_with_its_judgement_has_no_fault(judgement: Judgement) -> None:
    assert [*reported(judgement, CLAIM).faults()] == []


@pytest.mark.parametrize(
    ("claim", "changes", "message"),
    [
        (replace(CLAIM, reproduced=False), {}, "came out 'not confirmed'"),
        (replace(CLAIM, reproduced=None), {}, "came out 'not decided'"),
        (replace(CLAIM, panel="Fig. 2"), {}, "panels of claims: there is no 'Fig. 2'"),
        (replace(CLAIM, name="d"), {}, "claims of the report: there is no 'd'"),
        (CLAIM, {"claims": {"c": {**CONFIRMED, "cause": "scale"}}}, "cause"),
        (CLAIM, {"claims": {"c": CONFIRMED, "e": CONFIRMED}}, "no 'e'"),
        (CLAIM, {"paper": {"g": 1.0}}, "no 'g'"),
        (CLAIM, {"remarks": ["{f:.1f} and {h:.1f}"]}, "sentences: there is no 'h'"),
        (CLAIM, {"claims": {"c": {**CONFIRMED, "why": "{h}"}}}, "sentences: there is no 'h'"),
    ],
)
def test_disagreement_of_report_and_judgement_is_a_sentence(
    claim: ExperimentClaim, changes: dict[str, Any], message: str
) -> None:
    changed = read_table(Judgement, TREE | changes, "judgement")
    assert any(message in fault for fault in reported(changed, claim).faults())


def test_difference_without_a_cause_is_a_fault() -> None:
    changed = read_table(
        Judgement, TREE | {"claims": {"c": {"verdict": "not confirmed"}}}, "judgement"
    )
    assert any("cause" in f for f in reported(changed, replace(CLAIM, reproduced=False)).faults())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"paper-of": "mine"}, "paper-of = 'mine'; it must be 'koskela'"),
        ({"claims": {"c": {"verdict": "true"}}}, "claims.c.verdict = 'true'; it must be"),
        ({"claims": {"c": {**CONFIRMED, "cause": "x"}}}, "claims.c.cause = 'x'; it must be"),
        ({"claims": [1]}, "claims = [1]; it must be a table"),
        ({"claims": {"c": 1}}, "claims.c = 1; it must be a table"),
        ({"panels": [3]}, "panels.0 = 3; it must be a table"),
        ({"panels": []}, "panels = []; it must be a list that is not empty"),
        ({"panels": [{"name": "a", "shows": "s"}]}, "panels.0.setting is not set"),
        ({"panels": [{"nam": "a"}]}, "unknown key 'judgement.panels.0.nam'; did you mean 'name'?"),
        ({"remarks": "one"}, "remarks = 'one'; it must be a list"),
        ({"paper": {"f": "2"}}, "paper.f = '2'; it must be a number"),
    ],
)
def test_mistake_in_a_table_names_its_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FedsimError, match=re.escape(message)):
        read_table(Judgement, TREE | changes, "judgement")


def test_edge_and_few_seeds_fail_an_experiment(judgement: Judgement) -> None:
    edge = BestOfGrid("rate of x", {0.1: 80.0, 1.0: 90.0})
    (fault,) = reported(judgement, CLAIM, choices=(edge,)).faults()
    assert "rate of x: the best of 0.1, 1 is 1, at the grid's edge" in fault
    assert any("seeds = 1" in fault for fault in reported(judgement, CLAIM, seeds=1).faults())


def test_stored_results_come_back_for_their_settings_only(tmp_path: Path) -> None:
    result: Result = {"v": [1 / 3, 2.0], "n": 3}
    untimed = {
        f"m{k}": {"settings": digest({"k": k}), "result": shortened(result)} for k in range(3)
    }
    Stored(untimed | {"m2": untimed["m2"] | {"seconds": 2.0}}, 12.4).save(tmp_path)
    stored = Stored.load(tmp_path)
    assert stored.results["m1"] == {"v": [0.333333, 2.0], "n": 3}
    assert [one.get("seconds") for one in stored.members.values()] == [None, None, 2.0]
    assert stored.core_seconds == 14
    assert stored.of({"m1": {"k": 1}}) == {"m1": stored.members["m1"]}
    assert stored.of({"m1": {"k": 2}, "m3": {"k": 3}}) == {}
    assert shortened({"a": (1.23456789, True)}) == {"a": [1.23457, True]}
    (tmp_path / "results.json").write_text("{")
    with pytest.raises(FedsimError, match="cannot be read"):
        Stored.load(tmp_path)


def test_check_ends_with_1_where_a_stored_result_says_otherwise(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(experiment)
    copy = tmp_path / "xu"
    shutil.copytree(find("xu"), copy, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    assert CliRunner().invoke(app, [str(copy), "--check"]).exit_code == 0
    tree = json.loads((copy / "results.json").read_text())
    tree["members"]["lemma 1"]["result"]["paper (17, 8.5)"][0] = 1.5
    (copy / "results.json").write_text(json.dumps(tree))
    result = CliRunner().invoke(app, [str(copy), "--check"])
    assert result.exit_code == 1
    assert "lemma-1" in result.output


def test_check_without_a_name_judges_all_experiments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = typer.Typer()
    app.command()(experiment)
    copy = tmp_path / "xu"
    shutil.copytree(find("xu"), copy, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    both = {"koskela-rate": find("koskela-rate"), "xu": copy}
    monkeypatch.setattr("experiments.framework.run.directories", lambda: both)
    result = CliRunner().invoke(app, ["--check"])
    assert (result.exit_code, len(result.output.splitlines())) == (0, 2), result.output
    (copy / "README.md").write_text("")
    result = CliRunner().invoke(app, ["--check"])
    assert result.exit_code == 1
    assert "is not what results and judgement say" in " ".join(result.output.split())


def test_change_that_only_a_picture_would_show_is_a_fault(tmp_path: Path) -> None:
    copy = tmp_path / "xu"
    shutil.copytree(find("xu"), copy, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    tree = json.loads((copy / "results.json").read_text())
    path = tree["members"]["beale adaptive"]["result"]["runs"][0]["path"]
    path[3][0] += 1e-3
    (copy / "results.json").write_text(json.dumps(tree))
    (fault,) = faults_in(copy)
    assert "README.md is not what results and judgement say" in fault


def test_missing_seed_and_missing_or_left_over_picture_are_faults(tmp_path: Path) -> None:
    copy = tmp_path / "koskela-rate"
    shutil.copytree(find("koskela-rate"), copy)
    (copy / "rates.png").rename(copy / "old.png")
    faults_of_pictures = faults_in(copy)
    assert len(faults_of_pictures) == 1
    assert "old.png is missing, or of no figure" in faults_of_pictures[0]
    tree = json.loads((copy / "results.json").read_text())
    gone = next(name for name in tree["members"] if name.endswith("seed=3"))
    del tree["members"][gone]
    (copy / "results.json").write_text(json.dumps(tree))
    assert any(f"such as {gone}" in fault for fault in faults_in(copy))


@pytest.mark.parametrize("method", ["clipping", "literal", "stabilised"])
def test_descents_of_all_seeds_are_releases_of_one_row(method: str) -> None:
    d, steps, rate, bound = 6, 25, 0.1, 0.5
    settings = {
        "dimension": d, "steps": steps, "rates": [2.0, rate], "noise-multiplier": 1e-9,
        "method": method, "clip-norm": bound, "law": "two-point",
    }  # fmt: skip
    ended = [of_rate[1].tolist() for of_rate in descend(settings, [1, 2])]
    mechanism = make_mechanism(method, bound)
    layout = Layout.of({"theta": torch.zeros(d, dtype=torch.float64)})
    releaser = Releaser(plan_of(mechanism, Independent(1e-9), 1.0), layout)
    for seed, error, noise, clipped in zip((1, 2), *ended, strict=True):
        randomness = Randomness(seed)
        draws = randomness.generator(Purpose.SAMPLE, level="example")
        data = draws.permutation(np.resize([-1.0, 1.0], steps))
        start = randomness.generator(Purpose.INIT, level="run").standard_normal(d) / np.sqrt(d)
        theta, state = torch.from_numpy(start), mechanism.init(layout)
        noises, long = [], 0
        for step, x in enumerate(data, 1):
            row = -theta
            row[0] += x
            total = releaser.start(state)
            total.add(DenseRows(row[None]))
            source = NoiseSource(randomness.generator(Purpose.NOISE, level="example", round=step))
            release = releaser.release(total, source)
            state, theta = release.state, theta + rate * release.mean
            noises.append(float((release.mean - row).square().sum()))
            long += total.clipped
        assert float(theta.square().sum()) == pytest.approx(error, rel=1e-5)
        assert np.mean(noises) == pytest.approx(noise, rel=1e-5)
        assert long / steps == pytest.approx(clipped)


@pytest.mark.parametrize("name", ["sgd", "adam", "adadp-lr", "adadp-noise"])
def test_settings_of_a_member_are_those_of_its_config_whatever_its_algorithms_defaults_are(
    name: str,
) -> None:
    for rate in (0.1, 0.01, 0.001):
        config = RunConfig.from_run_config({"client.name": name, "client.lr": rate})
        again = RunConfig.from_run_config(chosen(config))
        assert again.client.lr == rate
        assert again == config
