"""A federation's own certificate authority, its server's certificate and its nodes' keys."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedsim import regular_files
from fedsim.errors import FedsimError
from fedsim.privacy import durable

_PEM = serialization.Encoding.PEM
_DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Authority:
    """A certificate authority that signs one federation's server certificates.

    Attributes
    ----------
    key : private key
    certificate : x509.Certificate
    """

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @classmethod
    def create(cls, days: int = 3650) -> Authority:
        """Create an authority, valid for ``days`` days; from yesterday on, since clocks differ."""
        key = ec.generate_private_key(ec.SECP384R1())
        subject = _name("fedsim federation")
        builder = _builder(subject, subject, key.public_key(), days)
        usage = _key_usage(signs_certificates=True)
        certificate = (
            builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
            )
            .sign(key, hashes.SHA384())
        )
        return cls(key, certificate)

    @classmethod
    def load(cls, directory: Path) -> Authority:
        """Read ``ca.key`` and ``ca.crt``."""
        key = serialization.load_pem_private_key(
            regular_files.read_bytes(directory / "ca.key"), None
        )
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        return cls(
            key, x509.load_pem_x509_certificate(regular_files.read_bytes(directory / "ca.crt"))
        )

    def save(self, directory: Path) -> None:
        """Write ``ca.key`` (for its owner only) and ``ca.crt``."""
        write_private(directory / "ca.key", _private_pem(self.key))
        write_public(directory / "ca.crt", self.certificate.public_bytes(_PEM))

    def issue(self, hosts: Sequence[str], days: int = 365) -> tuple[bytes, bytes]:
        """Create a certificate and key for a server with these names.

        Parameters
        ----------
        hosts : sequence of str
            Host names and addresses; all become subject alternative names.
        days : int
            Days until it expires; with a negative number it has expired already.

        Returns
        -------
        tuple of bytes
            Certificate and private key, as PEM.

        Raises
        ------
        FedsimError
            If it would outlive the authority's own certificate, and be refused from then on.
        """
        end = self.certificate.not_valid_after_utc
        if datetime.datetime.now(datetime.UTC) + days * _DAY > end:
            raise FedsimError(
                f"--days is {days}; the authority's own certificate ends on {end:%Y-%m-%d}, and "
                "the server's must end before."
            )
        key = ec.generate_private_key(ec.SECP384R1())
        # A common name has at most 64 characters; clients check the alternative names instead.
        builder = _builder(_name(hosts[0][:64]), self.certificate.subject, key.public_key(), days)
        authority_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        certificate = (
            builder.add_extension(
                x509.SubjectAlternativeName([_alternative(host) for host in hosts]), critical=False
            )
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(authority_id, critical=False)
            .sign(self.key, hashes.SHA384())
        )
        return certificate.public_bytes(_PEM), _private_pem(key)


def valid_until(certificate: Path) -> str:
    """The day on which a certificate expires.

    Raises
    ------
    FedsimError
        If the file holds no certificate, or one that has expired.
    """
    try:
        content = regular_files.read_bytes(certificate)
        end = x509.load_pem_x509_certificate(content).not_valid_after_utc
    except (OSError, ValueError):
        raise FedsimError(
            f"{certificate} holds no certificate; `fedsim deploy renew` makes one."
        ) from None
    if end <= datetime.datetime.now(datetime.UTC):
        raise FedsimError(
            f"{certificate} expired on {end:%Y-%m-%d}, so that no node would trust the server; "
            "`fedsim deploy renew` makes a new one."
        )
    return f"{end:%Y-%m-%d}"


def node_key() -> tuple[bytes, bytes]:
    """New private and public key of a SuperNode, in Flower's format: EC P-384, OpenSSH."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        _PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    return private, public


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read, from its creation on."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    durable.replace(path, content, mode=0o600)


def write_public(path: Path, content: bytes) -> None:
    """Write a file that all users may read, and only its owner may change."""
    path.parent.mkdir(parents=True, exist_ok=True)
    durable.replace(path, content)
    path.chmod(0o644)


def _builder(
    subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    start = now + min(-1, days - 1) * _DAY  # yesterday, or a day before an end in the past
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(now + days * _DAY)
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
