"""Keys of a deployment, and of Ray: the server's with its certificate, and a key pair for each client's node."""

import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedgauge.client.components import SpecError

HOSTS = ("localhost", "127.0.0.1", "superlink")  # the server's names on one machine and among its containers
DAYS = 825  # a certificate is valid
_PUBLIC = 0o644


def write_authority(folder: Path, hosts: Sequence[str] = (), mutual: bool = False) -> None:
    """Write the server's key and its certificate, which is also the authority that clients trust: ca.crt, server.*.

    Args:
        hosts: names and addresses under which clients reach the server, in addition to `HOSTS`.
        mutual: the server also requires certificates of its clients; this one serves both.
    """
    key = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedgauge deployment")])
    now = datetime.datetime.now(datetime.UTC)
    since, until = now - datetime.timedelta(days=1), now + datetime.timedelta(days=DAYS)  # clocks differ
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    made = made.serial_number(x509.random_serial_number()).not_valid_before(since).not_valid_after(until)
    purposes = [ExtendedKeyUsageOID.SERVER_AUTH, *([ExtendedKeyUsageOID.CLIENT_AUTH] if mutual else [])]
    for extension in (x509.ExtendedKeyUsage(purposes), x509.SubjectAlternativeName(alternative_names(hosts))):
        made = made.add_extension(extension, critical=False)
    signed = made.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True).sign(
        key, hashes.SHA384()
    )
    for file in ("ca.crt", "server.crt"):
        write_new(folder / file, signed.public_bytes(serialization.Encoding.PEM), _PUBLIC)
    pem, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    write_new(folder / "server.key", key.private_bytes(serialization.Encoding.PEM, pem, plain))


def alternative_names(hosts: Sequence[str]) -> list[x509.GeneralName]:
    """The server's names for its certificate; SpecError for text that is neither a name nor an address."""
    return [_alternative(host) for host in dict.fromkeys([*HOSTS, *hosts])]


def write_node_key(path: Path) -> None:
    """Write a node's key pair as `ssh-keygen -t ecdsa -b 384` does: the private key at path, the public one at path.pub."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    write_new(path, private)
    write_new(path.with_name(f"{path.name}.pub"), public + f" {path.name}\n".encode(), _PUBLIC)


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if re.fullmatch(r"[A-Za-z0-9.-]+", host) is None:
            raise SpecError(f"--host: {host!r} is neither an address nor a name that a certificate can hold") from None
        return x509.DNSName(host)


def write_new(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Write a new file with this mode from its creation; by default only its owner can read it."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
