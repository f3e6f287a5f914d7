"""The tables of docs/reference/ledger.md: every table and column of a run's ledger."""

from collections.abc import Mapping

from docs.generate.markdown import escaped
from fedgauge.server.store.ledger_connection import VERSION, columns_of

HEADER = "| column | type | meaning |\n|---|---|---|\n"
MEANINGS: Mapping[str, Mapping[str, str]] = {
    "meta": {
        "key": "the name of a fact about the whole run, such as `state`, `replay` or `main_metric`",
        "value": "the fact, as text",
    },
    "rounds": {
        "round": "0 is the untrained model",
        "accuracy": "on the test part, after the round, from 0 to 1",
        "loss": "the same",
        "seconds": "of the whole round",
        "intercept_seconds": "that the recording of the updates took of them",
        "metrics": "of your own app: what its clients and its evaluation returned, as JSON",
    },
    "observations": {
        "round": "",
        "client": "its number, from 0",
        "status": "`accepted`, `rejected` by the validator, or `missing`",
        "reason": "why it is not accepted, in words that may be the client's own",
        "examples": "that the client says it trained on",
        "digest": "of the update on the tape (xxh3)",
        "alarm": "1: the client's guard says that the weights are suspicious; empty: it says nothing",
        "suspicion": "of the weights, as the client's guard says; an alarm from 1 on",
        "silent": "1: a missing client sent neither an update nor an error in time",
    },
    "problems": {
        "code": "a short name of the kind of problem",
        "round": "empty: it concerns all rounds",
        "client": "empty: it concerns all clients",
        "words": "a sentence for the user, which may quote a client",
    },
    "attacks": {
        "id": "",
        "name": "as in every row of scores",
        "planned": "the `[[attack]]` table, as JSON",
        "knowledge": "the knowledge card: what the attacker knew and spent",
        "seed": "from which its randomness follows",
        "remembers": "1: it keeps a memory of each client from round to round",
        "flat": "1: the defense gives it no derivative",
        "training": "of your own app: whether the assumed training fits, which ends the card",
        "grading": "who grades it, which ends the card",
    },
    "jobs": {
        "id": "",
        "key": "of the attack, round, client and update: the same job is queued once",
        "attack_id": "the attack's `id`",
        "round": "",
        "client": "whose update is attacked",
        "other": "the client against whose truth it is graded again (`wrong_client`)",
        "wave": "jobs of one round that advance together have the same number",
        "state": "`queued`, `leased`, `done` or `failed`",
        "attempts": "how often it was begun",
        "error": "of a failed job; of a finished one the reason that the attack gave",
        "finished": "a number that grows with each job that ends",
        "ended": "when, in seconds since 1970",
        "memory": "digest of what the attack remembers of the client after it",
        "graded": "why nobody graded it; empty where somebody did",
        "graded_to": "in a deployment: the step to which the client rounded its grade",
        "numerics_id": "the `id` of the device that computed it",
    },
    "scores": {
        "job_id": "the job's `id`",
        "attack": "the attack, baseline or limit",
        "client": "",
        "example": "its place in the batch, or in the reconstruction if a client graded; -1 speaks of the whole batch",
        "metric": "see [measurement](../measurement.md#metrics)",
        "round": "",
        "value": "infinite: an exact hit; empty: there was nothing to grade",
        "status": "how it ended: `converged`, `out_of_budget`, `diverged`, `not_applicable`, or `failed`",
        "seconds": "that the job took, shared among the examples",
    },
    "numerics": {
        "id": "",
        "device": "`cpu` or `cuda:0`",
        "name": "of the processor or card",
        "precision": "of matrix products",
        "deterministic": "1: only deterministic algorithms",
        "torch": "its version",
        "driver": "of the card",
    },
}


def block(name: str) -> str:
    """Return the columns of a table of the schema."""
    if name == "version":
        return f"The version of the schema is {VERSION} (`PRAGMA user_version`).\n"
    rows = (f"| `{column}` | {kind} | {escaped(MEANINGS[name][column])} |\n" for column, kind in columns_of(name))
    return HEADER + "".join(rows)
