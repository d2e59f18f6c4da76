from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from fedsim.cohorts import PoissonCohort
from fedsim.errors import FedsimError
from fedsim.privacy import Accountant, Entry, Event, Ledger
from fedsim.privacy.ledger import GENESIS, chained_line
from fedsim.privacy.manifest import (
    MANIFEST,
    Manifest,
    check_signature,
    new_key,
    signature,
    signing_key,
)
from fedsim.privacy.verification import METADATA, FileCheck, verify

DELTA, RUN = 1e-5, "id of the run"


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
                run=RUN,
            )
        )
        rows.append(f"{t},{ledger.epsilon()},20")
    (tmp_path / "metrics.csv").write_text("\n".join(rows) + "\n")
    (tmp_path / "config.toml").write_text("rounds = 3\n")
    save_model(tmp_path, ledger)
    seal(tmp_path)
    return tmp_path


def seal(run: Path) -> None:
    (run / MANIFEST).write_text(Manifest.of(run, ledgers_of(run)).to_json())


def ledgers_of(run: Path) -> dict[str, Path]:
    return {"client": run / "ledger.jsonl"}


def checks_of(run: Path, public_key: Path | None = None) -> list[FileCheck]:
    return verify(run, ledgers_of(run), {"client": DELTA}, run=RUN, public_key=public_key)


def save_model(run: Path, ledger: Ledger) -> None:
    about = json.dumps({"ledger-head": ledger.head, "ledger-lines": len(ledger.heads)})
    header = json.dumps({"__metadata__": {METADATA: about}}).encode()
    (run / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


def failing(run: Path, public_key: Path | None = None) -> list[str]:
    return [check.subject for check in checks_of(run, public_key) if not check.passed]


def resealed(run: Path, noise: float) -> None:
    """What anybody can do who may write the file: the chain has no secret."""
    lines, previous = [], GENESIS
    for line in (run / "ledger.jsonl").read_bytes().splitlines():
        whole = json.loads(line)
        entry = dict(whole["entry"])
        del entry["previous"]
        for release in entry.get("releases", ()):
            release["event"]["noise-multiplier"] = noise
        text, previous = chained_line(entry, previous, whole["noted"])
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
        checks_of(run)


def test_a_shared_ledger_that_other_runs_extend_still_fits(run):
    """Their lines count in its statement, and in no row that was written before."""
    ledger = Ledger(run / "ledger.jsonl", delta=DELTA)
    event = Event.of(PoissonCohort(0.2, 100), 1.5)
    ledger.record(Entry(round=1, event=event, entropy="config", run="another run"))
    assert failing(run) == []
    details = {check.subject: check.detail for check in checks_of(run)}
    assert "line 4 of this ledger, which other runs have extended" in details["manifest"]
    ledger.record(Entry(round=4, event=event, entropy="config", run=RUN))
    assert failing(run) == ["metrics"]


def test_a_last_line_that_is_cut_short_counts_only_where_it_was_counted(run):
    whole = (run / "ledger.jsonl").read_bytes()
    with open(run / "ledger.jsonl", "ab") as file:
        file.write(b'{"entry":{"releases":[{"kind":"rel')
    assert failing(run) == []
    (run / "ledger.jsonl").write_bytes(whole[:-1])
    assert failing(run) == ["manifest", "model", "metrics"]


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
    for spoilt in ("{}", "[]", "", '{"signature":"xx"}'):
        assert check_signature(spoilt, public, manifest) is not None


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
    checks = checks_of(run)
    assert not all(check.passed for check in checks)
    # Whatever is there, there is a line for each of them.
    subjects = {"chain", "manifest", "model", "config", "metrics"}
    assert subjects <= {check.subject for check in checks}


def test_the_last_rows_epsilon_is_computed_again_and_every_rows_is_in_the_manifest(run):
    header, *rows = (run / "metrics.csv").read_text().splitlines()
    for at in range(3):
        number, epsilon, asked = rows[at].split(",")
        for wrong in ("", repr(float(epsilon) * 0.9999), repr(float(epsilon) * 1.0001)):
            changed = [*rows[:at], f"{number},{wrong},{asked}", *rows[at + 1 :]]
            (run / "metrics.csv").write_text("\n".join([header, *changed]) + "\n")
            assert failing(run) == ["metrics"]
    seal(run)  # by someone who changed the last row
    assert failing(run) == ["metrics"]


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
            checks_of(run, wrong) if (run / "ledger.sig").write_text("{}") else None
