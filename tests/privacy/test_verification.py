from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from fedsim.cohorts import PoissonCohort
from fedsim.errors import FedsimError
from fedsim.privacy import Ledger
from fedsim.privacy.chain import GENESIS, sealed
from fedsim.privacy.signing import check_signature, new_key, private_key, signature
from fedsim.privacy.verification import METADATA, verify

DELTA = 1e-5


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """What a run leaves behind, as far as a verifier looks."""
    ledger = Ledger(tmp_path / "ledger.jsonl", delta=DELTA)
    rows = ["round,epsilon,asked"]
    for t in (1, 2, 3):
        ledger.record(
            round=t, event=PoissonCohort(0.2, 100).event(1.5), entropy="config", release="digest"
        )
        rows.append(f"{t},{ledger.epsilon()},20")
    (tmp_path / "metrics.csv").write_text("\n".join(rows) + "\n")
    save_model(tmp_path, ledger)
    return tmp_path


def save_model(run: Path, ledger: Ledger) -> None:
    about = json.dumps({"ledger-head": ledger.head, "ledger-lines": len(ledger.heads)})
    header = json.dumps({"__metadata__": {METADATA: about}}).encode()
    (run / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


def failing(run: Path, public_key: Path | None = None) -> list[str]:
    return [check.subject for check in verify(run, DELTA, None, public_key) if not check.holds]


def resealed(run: Path, noise: float) -> None:
    """What anybody can do who may write the file: the chain has no secret."""
    lines, previous = [], GENESIS
    for line in (run / "ledger.jsonl").read_bytes().splitlines():
        entry = dict(json.loads(line)["entry"])
        del entry["previous"]
        if "event" in entry:
            entry["event"]["noise-multiplier"] = noise
        text, previous = sealed(entry, previous)
        lines.append(text)
    (run / "ledger.jsonl").write_bytes(b"".join(lines))


def test_what_a_run_left_fits_together(run):
    assert failing(run) == []


def test_a_resealed_a_cut_and_an_emptied_ledger_are_found_out(run):
    whole = (run / "ledger.jsonl").read_bytes()
    resealed(run, 9.0)
    assert failing(run) == ["model", "metrics"]
    (run / "ledger.jsonl").write_bytes(b"".join(whole.splitlines(keepends=True)[:-1]))
    assert failing(run) == ["model", "metrics"]
    (run / "ledger.jsonl").write_bytes(b"".join(whole.splitlines(keepends=True)[:1]))
    assert "model" in failing(run)
    (run / "ledger.jsonl").write_bytes(b"")
    with pytest.raises(FedsimError, match="is empty"):
        verify(run, DELTA)


def test_a_ledger_that_went_on_after_the_model_says_so(run):
    ledger = Ledger(run / "ledger.jsonl", delta=DELTA)
    ledger.record(round=4, event=PoissonCohort(0.2, 100).event(1.5))
    (check,) = [check for check in verify(run, DELTA) if not check.holds]
    assert check.subject == "model"
    assert "names line 4; the ledger has 5" in check.seen


@pytest.mark.parametrize("content", [b"", b"12345678", b"\xff" * 64, b"\x02" + bytes(7) + b"[]"])
def test_a_file_that_is_no_model_of_a_run_does_not_verify(run, content):
    (run / "model.safetensors").write_bytes(content)
    assert failing(run) == ["model"]
    (run / "model.safetensors").unlink()
    assert failing(run) == ["model"]


def test_a_signature_shows_forgers_what_a_chain_cannot(run, tmp_path):
    key = tmp_path / "key.pem"
    public = new_key(key)
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    ledger = Ledger.read(run / "ledger.jsonl")
    text = signature(private_key(key), ledger.head, len(ledger.heads))
    assert failing(run, public) == ["signature"]  # there is none yet
    (run / "ledger.sig").write_text(text)
    assert failing(run, public) == []
    # Everything forged that needs no key: ledger, model and metrics agree again.
    resealed(run, 9.0)
    forged = Ledger.read(run / "ledger.jsonl", delta=DELTA)
    save_model(run, forged)
    (run / "metrics.csv").write_text(f"round,epsilon\n3,{forged.epsilon()}\n")
    assert failing(run) == []
    assert failing(run, public) == ["signature"]
    other = new_key(tmp_path / "other.pem")
    assert check_signature(text, other, ledger.head, 4) == "the signature is not of this key"
    assert "not one that fedsim wrote" in check_signature("{}", public, ledger.head, 4)


def test_what_is_no_key_is_refused_in_a_sentence(run, tmp_path):
    path = tmp_path / "key.pem"
    new_key(path)
    with pytest.raises(FedsimError, match="exists"):
        new_key(path)
    (tmp_path / "text").write_text("hello")
    for wrong in (tmp_path / "none", tmp_path / "text"):
        with pytest.raises(FedsimError, match=r"noise\.ledger-key = .*Ed25519"):
            private_key(wrong)
        with pytest.raises(FedsimError, match=r"--public-key = .*Ed25519"):
            verify(run, DELTA, None, wrong) if (run / "ledger.sig").write_text("{}") else None
