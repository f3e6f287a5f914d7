"""The server's certificate is believed under its names alone, and keys are as ssh-keygen writes them."""

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from fedgauge.server.pki import write_authority, write_node_key
from fedgauge.simulations.deploy.folder import Deployment


def handshake(server: Path, trusted: Path, name: str, client: Path | None = None) -> None:
    """TLS between the server's files and a client that trusts one authority, by OpenSSL, in memory.

    Args:
        client: the folder of the certificate that the client shows; the server then wants one of its own authority.
    """
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(server / "server.crt", server / "server.key")
    asking = ssl.create_default_context(cafile=trusted / "ca.crt")
    if client is not None:
        serving.verify_mode = ssl.CERT_REQUIRED
        serving.load_verify_locations(server / "ca.crt")
        asking.load_cert_chain(client / "server.crt", client / "server.key")
    up, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        asking.wrap_bio(back, up, server_hostname=name),
        serving.wrap_bio(up, back, server_side=True),
    ]
    left = list(ends)
    for _ in range(10):
        for end in list(left):
            try:
                end.do_handshake()
                left.remove(end)
            except ssl.SSLWantReadError:
                continue
    assert not left


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "superlink", "fed.example", "192.0.2.7"])
def test_the_server_is_believed_under_each_of_its_names(made: Deployment, name: str) -> None:
    handshake(made.folder / "tls", made.folder / "tls", name)


def test_the_server_is_not_believed_under_another_name(made: Deployment) -> None:
    with pytest.raises(ssl.SSLCertVerificationError) as refused:
        handshake(made.folder / "tls", made.folder / "tls", "elsewhere.example")
    assert refused.value.verify_code == 62  # X509_V_ERR_HOSTNAME_MISMATCH


def test_a_mutual_certificate_is_believed_of_who_connects_too_and_no_other_is(made: Deployment, tmp_path: Path) -> None:
    for name in ("here", "elsewhere"):
        (tmp_path / name).mkdir()
        write_authority(tmp_path / name, mutual=True)
    here, elsewhere, deployed = tmp_path / "here", tmp_path / "elsewhere", made.folder / "tls"
    handshake(here, here, "127.0.0.1", client=here)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(here, here, "127.0.0.1", client=elsewhere)
    with pytest.raises(ssl.SSLCertVerificationError) as refused:
        handshake(deployed, deployed, "127.0.0.1", client=deployed)
    assert refused.value.verify_code == 26  # X509_V_ERR_INVALID_PURPOSE


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")
def test_keys_are_what_ssh_keygen_writes(tmp_path: Path) -> None:
    write_node_key(tmp_path / "ours")
    subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", tmp_path / "theirs"], check=True)
    derived = subprocess.run(
        ["ssh-keygen", "-y", "-f", tmp_path / "ours"], capture_output=True, text=True, check=True
    ).stdout
    assert derived.split()[:2] == (tmp_path / "ours.pub").read_text().split()[:2]
    for name in ("ours", "theirs"):
        private, public = (tmp_path / name).read_bytes(), (tmp_path / f"{name}.pub").read_bytes()
        key = load_ssh_private_key(private, None)
        assert isinstance(key, ec.EllipticCurvePrivateKey) and key.curve.name == "secp384r1"
        assert private.splitlines()[0] == b"-----BEGIN OPENSSH PRIVATE KEY-----"
        assert public.split()[0] == b"ecdsa-sha2-nistp384"
        shown = load_ssh_public_key(public)
        assert isinstance(shown, ec.EllipticCurvePublicKey)
        assert shown.public_numbers() == key.public_key().public_numbers()
