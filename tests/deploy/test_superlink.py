from __future__ import annotations

import base64
import importlib

import pytest
import yaml
from flwr.supercore import sql_mixin
from flwr.superlink import config_loader

from fedsim.deploy import flower_programs
from fedsim.deploy.flower_programs import credentials, new_token, operator_plugin, token_digest

TOKEN = new_token()


@pytest.fixture
def plugin():
    return operator_plugin(token_digest(TOKEN))()


@pytest.mark.parametrize("sent", [TOKEN, TOKEN.encode()], ids=["text", "bytes"])
def test_the_operator_is_known_by_the_token(plugin, sent):
    known, account = plugin.validate_tokens_in_metadata([("flwr-oidc-access-token", sent)])
    assert known
    assert account is not None


@pytest.mark.parametrize(
    "sent",
    ["", "x", TOKEN[:-1], TOKEN + "x", TOKEN.swapcase(), token_digest(TOKEN), b"\xff\x00"],
    ids=["nothing", "short", "cut", "longer", "other-case", "digest", "no-text"],
)
def test_nobody_else_is_not_even_who_has_read_what_the_server_knows(plugin, sent):
    assert plugin.validate_tokens_in_metadata([("token", sent)]) == (False, None)


def test_no_token_is_no_operator_and_none_is_made_from_another(plugin):
    assert plugin.validate_tokens_in_metadata([]) == (False, None)
    assert plugin.refresh_tokens([("flwr-oidc-refresh-token", TOKEN)]) == (None, None)


def test_flower_asks_the_plugin_that_it_is_given(monkeypatch, tmp_path):
    (tmp_path / "digest").write_text(token_digest(TOKEN))
    asked = []
    monkeypatch.setattr(
        config_loader, "get_control_authn_plugins", config_loader.get_control_authn_plugins
    )
    monkeypatch.setattr(sql_mixin, "SQLITE_PRAGMAS", sql_mixin.SQLITE_PRAGMAS)
    monkeypatch.setenv("FLWR_OIDC_ENABLED", "0")
    monkeypatch.setattr(flower_programs.sys, "argv", [])
    monkeypatch.setattr(
        importlib.import_module("flwr.superlink.cli.flower_superlink"),
        "flower_superlink",
        lambda: asked.append(config_loader.load_control_authn_plugin()),
    )
    flower_programs.run_superlink(tmp_path / "digest", ["--host", "127.0.0.1"])
    ((known, _),) = (plugin.validate_tokens_in_metadata([("t", TOKEN)]) for plugin in asked)
    assert known
    assert asked[0].validate_tokens_in_metadata([("t", "x")]) == (False, None)


def test_a_superlink_without_a_digest_does_not_start(tmp_path):
    (tmp_path / "digest").write_text("")
    with pytest.raises(SystemExit, match="no SHA-256"):
        flower_programs.run_superlink(tmp_path / "digest", [])


def test_the_operators_flwr_finds_the_token_where_it_looks():
    store = yaml.safe_load(credentials(TOKEN, "127.0.0.1:8000"))
    entries = {key: base64.b64decode(value).decode() for key, value in store.items()}
    prefix = "flower.account-auth.127.0.0.1:8000"
    assert entries[f"{prefix}.authn-type"] == "oidc"
    assert entries[f"{prefix}.oidc-access-token"] == TOKEN
    assert f"{prefix}.oidc-refresh-token" in entries
