"""The server's protocol at a deployed client: what the client takes from it, and what it refuses."""

import json
from dataclasses import dataclass

from fedgauge.client.components import Table, coerce

NO_FILE = "[model]: a server must not make a client read a file"


class RequestRefused(Exception):
    """The client does not do what the server asked for.

    The message is for the server: a sentence without details of the data, the owner's file or this machine. The cause, if
    there is one, is only for the owner.
    """

    @property
    def for_owner(self) -> str:
        """The sentence, and what caused it."""
        why = self.__cause__
        return f"{self} ({str(why) or type(why).__name__})" if why is not None else str(self)


@dataclass(frozen=True)
class ServerTerms:
    """The parts of the server's protocol that a client accepts."""

    seed: int
    rounds: int
    clients: int
    model: Table
    canaries: int = 0  # that the server expects; they are the last clients

    @classmethod
    def parse(cls, text: str) -> "ServerTerms":
        """From the protocol's JSON.

        Raises:
            RequestRefused: it cannot be read, or names a file of weights.
        """
        try:
            spec = coerce(json.loads(text), dict, "the protocol")
            numbers = {key: coerce(spec.get(key), int, key) for key in ("seed", "rounds", "clients")}
            model = coerce(spec.get("model"), dict, "[model]")
            table = coerce(spec.get("canaries", {}), dict, "[canaries]")
            canaries = 0 if table.get("examples") else coerce(table.get("clients", 0), int, "[canaries]: clients")
        except (ValueError, RecursionError) as error:
            raise RequestRefused(f"the protocol cannot be read: {error}") from error
        if "weights" in model:
            raise RequestRefused(NO_FILE)
        return cls(**numbers, model=model, canaries=canaries)
