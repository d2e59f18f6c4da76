from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from fedsim.cohorts import PoissonCohort
from fedsim.errors import FedsimError
from fedsim.privacy import Accountant, Entry, Event, Ledger
from fedsim.privacy.digest import Fingerprints
from fedsim.privacy.ledger_lines import GENESIS, sealed_line
from fedsim.privacy.manifest import (
    MANIFEST,
    Manifest,
    check_signature,
    new_key,
    signature,
    signing_key,
)
from fedsim.privacy.verification import METADATA, verify

DELTA = 1e-5


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """What a run leaves behind, as far as a verifier looks."""
    ledger = Ledger(tmp_path / "ledger.jsonl", delta=DELTA)
    rows = ["round,epsilon,asked"]
    for t in (1, 2, 3):
        ledger.record(
            Entry(
                round=t,
                event=Event.of(PoissonCohort(0.2, 100), 1.5),
                entropy="config",
                release="digest",
            )
        )
        rows.append(f"{t},{ledger.epsilon()},20")
    (tmp_path / "metrics.csv").write_text("\n".join(rows) + "\n")
    (tmp_path / "config.toml").write_text("rounds = 3\n")
    save_model(tmp_path, ledger)
    seal(tmp_path)
    return tmp_path


def seal(run: Path) -> None:
    (run / MANIFEST).write_text(Manifest.of(run, None, Fingerprints(run)).to_json())


def save_model(run: Path, ledger: Ledger) -> None:
    about = json.dumps({"ledger-head": ledger.head, "ledger-lines": len(ledger.heads)})
    header = json.dumps({"__metadata__": {METADATA: about}}).encode()
    (run / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


def failing(run: Path, public_key: Path | None = None) -> list[str]:
    return [check.subject for check in verify(run, DELTA, None, public_key) if not check.passed]


def resealed(run: Path, noise: float) -> None:
    """What anybody can do who may write the file: the chain has no secret."""
    lines, previous = [], GENESIS
    for line in (run / "ledger.jsonl").read_bytes().splitlines():
        entry = dict(json.loads(line)["entry"])
        del entry["previous"]
        if "event" in entry:
            entry["event"]["noise-multiplier"] = noise
        text, previous = sealed_line(entry, previous)
        lines.append(text)
    (run / "ledger.jsonl").write_bytes(b"".join(lines))


def test_what_a_run_left_fits_together(run):
    assert failing(run) == []


def test_a_resealed_a_cut_and_an_emptied_ledger_are_found_out(run):
    whole = (run / "ledger.jsonl").read_bytes()
    resealed(run, 9.0)
    assert failing(run) == ["manifest", "model", "metrics"]
    (run / "ledger.jsonl").write_bytes(b"".join(whole.splitlines(keepends=True)[:-1]))
    assert failing(run) == ["manifest", "model", "metrics"]
    (run / "ledger.jsonl").write_bytes(b"".join(whole.splitlines(keepends=True)[:1]))
    assert "model" in failing(run)
    (run / "ledger.jsonl").write_bytes(b"")
    with pytest.raises(FedsimError, match="is empty"):
        verify(run, DELTA)


def test_a_ledger_that_went_on_after_the_model_says_so(run):
    ledger = Ledger(run / "ledger.jsonl", delta=DELTA)
    ledger.record(Entry(round=4, event=Event.of(PoissonCohort(0.2, 100), 1.5)))
    failed = {check.subject: check.detail for check in verify(run, DELTA) if not check.passed}
    assert set(failed) == {"manifest", "model", "metrics"}
    assert "names line 4; the ledger has 5" in failed["model"]
    assert "rows end at round 3, and the ledger at round 4" in failed["metrics"]


def test_edited_notes_that_no_hash_covers_are_found_out_but_in_older_manifests(run):
    ledger = run / "ledger.jsonl"
    ledger.write_text(ledger.read_text().replace('"noted":{"time"', '"noted":{"run":"x","time"'))
    assert failing(run) == ["ledger.jsonl"]
    older = json.loads((run / MANIFEST).read_text())
    del older["hmac"]["ledger.jsonl"]
    (run / MANIFEST).write_text(json.dumps(older))
    assert failing(run) == []


def test_an_incomplete_last_line_has_no_hash_that_a_verifier_could_name(run):
    with open(run / "ledger.jsonl", "ab") as file:
        file.write(b'{"entry":{"kind":"rel')
    chain, *others = verify(run, DELTA)
    assert chain.detail.startswith("5 lines, the last of which is incomplete")
    failed = [check.subject for check in others if not check.passed]
    assert failed == ["manifest", "model", "ledger.jsonl"]
    assert "Final hash" not in str(Ledger.read(run / "ledger.jsonl").statement(DELTA))


@pytest.mark.parametrize("content", [b"", b"12345678", b"\xff" * 64, b"\x02" + bytes(7) + b"[]"])
def test_a_file_that_is_no_model_of_a_run_does_not_verify(run, content):
    (run / "model.safetensors").write_bytes(content)
    assert "model" in failing(run)
    (run / "model.safetensors").unlink()
    assert "model" in failing(run)


def test_a_signature_shows_forgers_what_a_chain_cannot(run, tmp_path):
    key = tmp_path / "key.pem"
    public = new_key(key)
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    manifest = (run / MANIFEST).read_bytes()
    signer = signing_key(str(key))
    assert signer is not None
    text = signature(signer, manifest)
    assert failing(run, public) == ["signature"]  # there is none yet
    (run / "ledger.sig").write_text(text)
    assert failing(run, public) == []
    # Everything forged that needs no key: ledger, model, metrics and manifest agree again.
    resealed(run, 9.0)
    forged = Ledger.read(run / "ledger.jsonl", delta=DELTA)
    save_model(run, forged)
    events = [entry.event for entry in forged.entries]
    rows = [f"{t},{Accountant(events[:t]).epsilon(DELTA)},20" for t in (1, 2, 3)]
    (run / "metrics.csv").write_text("\n".join(["round,epsilon,asked", *rows]) + "\n")
    seal(run)
    assert failing(run) == []
    assert failing(run, public) == ["signature"]
    other = new_key(tmp_path / "other.pem")
    assert "not of this manifest and this key" in check_signature(text, other, manifest)
    for spoilt in ("{}", "[]", "", '{"format":3,"signature":"xx"}'):
        assert check_signature(spoilt, public, manifest) is not None
    old = '{"head":"00","lines":4,"signature":"00"}'
    assert "format 2 and this fedsim reads 3" in check_signature(old, public, manifest)


@pytest.mark.parametrize("file", ["model.safetensors", "config.toml", "metrics.csv", MANIFEST])
@pytest.mark.parametrize("damage", ["deleted", "emptied", "cut", "flipped", "random"])
def test_no_file_is_lost_cut_or_changed_unnoticed(run, file, damage):
    path, content = run / file, bytearray((run / file).read_bytes())
    if damage == "deleted":
        path.unlink()
    else:
        content[len(content) // 2] ^= 1
        changed = {"emptied": b"", "cut": content[:-9], "flipped": content, "random": bytes(50)}
        path.write_bytes(changed[damage])
    checks = verify(run, DELTA)
    assert not all(check.passed for check in checks)
    # Whatever is there, there is a line for each of them.
    subjects = {"chain", "manifest", "model", "config", "metrics"}
    assert subjects <= {check.subject for check in checks}


def test_another_runs_metrics_with_the_same_epsilons_are_not_this_runs(run):
    metrics = run / "metrics.csv"
    metrics.write_text(metrics.read_text().replace(",20\n", ",21\n"))
    assert failing(run) == ["metrics.csv"]
    (run / "fingerprint.key").unlink()
    assert failing(run) == ["files"]
    assert not (run / "fingerprint.key").exists()  # looking makes none


def test_an_epsilon_of_any_row_is_computed_again(run):
    header, *rows = (run / "metrics.csv").read_text().splitlines()
    for at in range(3):
        number, epsilon, asked = rows[at].split(",")
        for wrong in ("", repr(float(epsilon) * 0.9999), repr(float(epsilon) * 1.0001)):
            changed = [*rows[:at], f"{number},{wrong},{asked}", *rows[at + 1 :]]
            (run / "metrics.csv").write_text("\n".join([header, *changed]) + "\n")
            seal(run)
            assert failing(run) == ["metrics"]


def test_archived_ledgers_and_configs_are_those_that_the_manifest_names(run):
    archived = run / "archive" / "1"
    archived.mkdir(parents=True)
    earlier = Ledger(archived / "ledger.jsonl")
    earlier.record(Entry(round=1, event=Event.of(PoissonCohort(0.2, 100), 1.5)))
    (archived / "config.toml").write_text("rounds = 1\n")
    assert "archive" in failing(run)  # added since
    seal(run)
    assert "archive" not in failing(run)
    (archived / "config.toml").unlink()
    (check,) = [c for c in verify(run, DELTA) if c.subject == "archive"]
    assert (check.passed, check.detail.split(": ")[1]) == (False, "archive/1/config.toml")
    earlier.record(Entry(round=2, event=Event.of(PoissonCohort(0.2, 100), 1.5)))
    seal(run)
    (archived / "ledger.jsonl").unlink()
    assert "archive" in failing(run)


def test_what_is_no_key_is_refused_in_a_sentence(run, tmp_path):
    path = tmp_path / "key.pem"
    new_key(path)
    with pytest.raises(FedsimError, match="exists"):
        new_key(path)
    (tmp_path / "text").write_text("hello")
    for wrong in (tmp_path / "none", tmp_path / "text"):
        with pytest.raises(FedsimError, match=r"noise\.ledger-key = .*Ed25519"):
            signing_key(str(wrong))
        with pytest.raises(FedsimError, match=r"--public-key = .*Ed25519"):
            verify(run, DELTA, None, wrong) if (run / "ledger.sig").write_text("{}") else None
