"""Check a client's own file before the client connects to a server, and report what it has sent and leaked so far."""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fedgauge.attacks.modality.images import ImageModality
from fedgauge.attacks.modality.registry import modality_of
from fedgauge.attacks.plan import describe
from fedgauge.attacks.problem import Problem
from fedgauge.attacks.score_rows import WRONG_CLIENT
from fedgauge.client.components import errors_in
from fedgauge.client.deployment.deployed_client import DeployedClient
from fedgauge.client.deployment.owner_file import OwnerConfig
from fedgauge.client.deployment.server_terms import RequestRefused, ServerTerms
from fedgauge.client.deployment.state_folder import ClientFolder
from fedgauge.client.files import read_file
from fedgauge.defenses.accounting import DELTA, PrivacyStatement, privacy_statement
from fedgauge.server.store.run_files import printable
from fedgauge.simulations.checks.check_result import CheckResult, Found, attempt
from fedgauge.simulations.checks.scenario_check import describe_data

GRADED = ImageModality.main  # clients grade only images
SHOWN_REASONS = 10
MOST_BYTES = 1 << 30  # of a log
Event = Mapping[str, Any]


def check_owner(owner: OwnerConfig) -> list[CheckResult]:
    """Examine a client's file with the protocol that the last server sent, or with a small network in its place."""
    protocol = ClientFolder(owner.state).protocol()
    results = [attempt("data", lambda: describe_data(owner.dataset))]
    if not results[0].works:
        return results
    if protocol is None:
        message = "no protocol received yet: tried with a small network, as the last client"
        results.append(CheckResult("server", None, False, message))
    clients: list[DeployedClient] = []

    def build_all() -> str:
        model, count = modality_of(owner.dataset).small_model(), owner.client + 1
        small = ServerTerms(seed=0, rounds=1, clients=count, model=model, canaries=int(owner.canary))
        clients.append(DeployedClient.of(owner, small if protocol is None else ServerTerms.parse(protocol)))
        return " > ".join(map(describe, owner.chain))

    results.append(attempt("chain, loss, guard", build_all))
    for client in clients:
        results.append(attempt("one step", partial(_one_step, client)))
        if client.secure_sum is not None:
            results.append(CheckResult("secure sum", None, False, client.secure_sum.tolerance.words))
    return results


def _one_step(client: DeployedClient) -> Found:
    params, buffers = client.initial()
    update = client.compute(params, buffers, client.owner.batch(client.draw(1)), {})
    norm = math.sqrt(sum(float(t.double().square().sum()) for t in update.values()))
    if math.isfinite(norm):
        return f"an update of norm {norm:.3g}"
    return Problem("not finite", "", "the update is not finite", "is the rate too high?")


def history(owner: OwnerConfig) -> Iterator[CheckResult]:
    """Report what the client has sent, answered and leaked, from its own log; nothing before the first event.

    Raises:
        SpecError: the log cannot be read.
    """
    events = _events(owner)
    if not events:
        return
    counts = Counter(event["event"] for event in events)
    yield CheckResult("history", True, False, ", ".join(f"{n} {kind}" for kind, n in counts.items()))
    at_fault = (event for event in events if event["event"] in ("withheld", "refused", "failed"))
    reasons = Counter(f"{event['event']}: {event.get('cause') or event.get('reason')}" for event in at_fault)
    for reason, times in reasons.most_common(SHOWN_REASONS):
        yield CheckResult("history", False, False, _line(f"{reason} ({times} x)"))
    graded = [event for event in events if event["event"] == "graded"]
    exact = [
        (max(values), name, event)
        for event in graded
        for name, values in event["exact"].items()
        if values and name not in ImageModality.baselines and not name.startswith(WRONG_CLIENT)
    ]
    if worst := GRADED.leakiest(exact, lambda each: each[0]):
        value, name, event = worst
        highest = max(event["reported"].get(name, ()), default=None)
        reported = "not reported" if highest is None else f"reported to the server as {highest:g}"
        words = f"{value:.2f} {GRADED.unit} {GRADED.name} ({name}, round {event['round']}; {reported})"
        yield CheckResult("worst leak", False, False, _line(words))
    else:
        yield CheckResult("worst leak", None, False, "unknown, as nothing was graded; that is no sign of safety")
    if (statement := privacy(owner)) is not None:
        answers = len({(event["run"], event["round"], name) for event in graded for name in event["reported"]})
        beyond = f"; not the {answers} scores, which also depend on the examples" if answers else ""
        yield CheckResult("privacy", None, False, f"{statement.words}{beyond}")


def _line(text: str) -> str:
    return " ".join(printable(text).split())


def _events(owner: OwnerConfig) -> Sequence[Event]:
    log = ClientFolder(owner.state).log
    with errors_in(log, OSError, ValueError):
        if not log.exists():
            return ()
        return [json.loads(line) for line in read_file(log, MOST_BYTES).decode(errors="replace").splitlines()]


def privacy(owner: OwnerConfig) -> PrivacyStatement | None:
    """Return the privacy loss of all updates; unknown if the owner's chain or data changed between them, None before any."""
    protocol = ClientFolder(owner.state).protocol()
    made = [event for event in _events(owner) if event["event"] in ("sent", "withheld")]
    if protocol is None:
        return None
    with errors_in(f"{owner.state}: the last protocol cannot be used", RequestRefused, ValueError):
        # the loss does not depend on canaries
        own = DeployedClient.of(replace(owner, canary=False), replace(ServerTerms.parse(protocol), canaries=0))
    today = json.loads(json.dumps(own.terms))
    if any(event.get("terms", today) != today for event in made):
        words = "no epsilon is known, as some updates were made under another chain, batch size, sampling or share of the data"
        return PrivacyStatement(None, None, DELTA, words)
    # the server may have named larger networks than the last one
    largest = max((event.get("entries", owner.max_parameters) for event in made), default=None)
    return privacy_statement(own, {owner.client: len(made)}, secret=bool(own.terms["secret"]), entries=largest)
