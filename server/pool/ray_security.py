"""The environment in which Ray is for one user only, by default only on this machine.

Ray runs any code that reaches its ports, and by itself listens on every network interface without asking who is there.
"""

import secrets
from collections.abc import Sequence
from pathlib import Path

# beginnings of the variables that say how Ray is reached
SETTINGS = ("RAY_ADDRESS", "RAY_AUTH_", "RAY_ENABLE_WINDOWS", "RAY_USE_TLS", "RAY_TLS_")


def ray_access(folder: Path, hosts: Sequence[str] = ()) -> dict[str, str]:
    """The environment in which Ray listens only on the loopback address and requires fresh secrets.

    Args:
        folder: a private folder of this user without them, which gets the token's file, and the key and certificates of TLS.
        hosts: names and addresses of a cluster's machines, in addition to the loopback's.
    """
    from fedgauge.server.pki import write_authority, write_new  # slow to load, and only a start of Ray needs them

    token, tls = folder / "ray-token", folder / "ray-tls"
    write_new(token, secrets.token_hex(32).encode())
    tls.mkdir(mode=0o700)
    write_authority(tls, hosts, mutual=True)
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # despite its name it holds for Linux: the node's address is the loopback's
        # Ray ends, before it asks for the token, at a message that its own processes never send: TLS with certificates on both
        # sides keeps strangers from sending any
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": str(tls / "server.crt"),
        "RAY_TLS_SERVER_KEY": str(tls / "server.key"),
        "RAY_TLS_CA_CERT": str(tls / "ca.crt"),
    }
