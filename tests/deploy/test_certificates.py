from __future__ import annotations

import datetime
import ipaddress
import stat

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from fedsim.deploy.certificates import Authority, node_key, valid_until, write_private
from fedsim.errors import FedsimError


@pytest.fixture(scope="module")
def authority():
    return Authority.create()


def verify(authority: Authority, certificate: bytes, host: str, when=None) -> None:
    try:
        subject = x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        subject = x509.DNSName(host)
    builder = PolicyBuilder().store(Store([authority.certificate]))
    if when is not None:
        builder = builder.time(when)
    builder.build_server_verifier(subject).verify(x509.load_pem_x509_certificate(certificate), [])


@pytest.mark.parametrize("host", ["superlink", "link.example.org", "10.0.0.7", "::1"])
def test_a_server_certificate_holds_for_every_name_given(authority, host):
    certificate, _ = authority.issue(["superlink", "link.example.org", "10.0.0.7", "::1"])
    verify(authority, certificate, host)


def test_a_server_certificate_holds_for_no_other_name(authority):
    certificate, _ = authority.issue(["superlink"])
    with pytest.raises(VerificationError):
        verify(authority, certificate, "elsewhere")


def test_a_certificate_of_another_authority_is_worth_nothing(authority):
    certificate, _ = Authority.create().issue(["superlink"])
    with pytest.raises(VerificationError):
        verify(authority, certificate, "superlink")


def test_a_certificate_expires(authority):
    certificate, _ = authority.issue(["superlink"], days=30)
    later = datetime.datetime.now() + datetime.timedelta(days=31)
    with pytest.raises(VerificationError):
        verify(authority, certificate, "superlink", later)
    expired, _ = authority.issue(["superlink"], days=-1)
    with pytest.raises(VerificationError):
        verify(authority, expired, "superlink")


def test_a_server_key_belongs_to_its_certificate(authority):
    certificate, key = authority.issue(["superlink"])
    public = serialization.load_pem_private_key(key, None).public_key()
    assert public == x509.load_pem_x509_certificate(certificate).public_key()


def test_node_keys_are_of_the_kind_that_flower_wants():
    private, public = node_key()
    key = serialization.load_ssh_private_key(private, None)
    assert isinstance(key.curve, ec.SECP384R1)
    assert serialization.load_ssh_public_key(public) == key.public_key()


def test_private_files_are_for_their_owner_only(tmp_path, authority):
    authority.save(tmp_path)
    write_private(tmp_path / "deep" / "secret", b"x")
    for path in (tmp_path / "ca.key", tmp_path / "deep" / "secret"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "deep").stat().st_mode) == 0o700
    assert Authority.load(tmp_path).certificate == authority.certificate


def test_a_certificate_does_not_outlive_its_authority():
    with pytest.raises(FedsimError, match="--days is 30; the authority's own certificate ends on"):
        Authority.create(days=20).issue(["superlink"], days=30)


def test_a_file_without_a_certificate_is_named(tmp_path):
    (tmp_path / "server.pem").write_text("no certificate")
    with pytest.raises(FedsimError, match=r"server\.pem holds no certificate"):
        valid_until(tmp_path / "server.pem")
