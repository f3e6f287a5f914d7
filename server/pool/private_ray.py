"""How Ray is started on this machine: for one user only.

Ray runs any code that reaches its ports, and by itself listens on every network interface without asking who is there.
"""

import secrets
from pathlib import Path

SETTINGS = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER")


def private_ray(folder: Path) -> dict[str, str]:
    """The environment in which Ray listens on the loopback address alone, and answers only those who hold a fresh token.

    Args:
        folder: a folder of this user alone, which gets the token's file.
    """
    token = folder / "ray-token"
    if not token.exists():
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # despite its name it holds for Linux: the node's address is the loopback's
    }
