"""Check a client's own file before the client connects to a server."""

import math
from functools import partial

from fedgauge.attacks.plan import describe
from fedgauge.attacks.problem import Problem
from fedgauge.client.data.corpora import Text
from fedgauge.client.deployment.deployed_client import DeployedClient
from fedgauge.client.deployment.owner import OwnerConfig
from fedgauge.client.deployment.state_folder import ClientFolder
from fedgauge.client.deployment.terms import ServerTerms
from fedgauge.simulations.checks.check_result import CheckResult, Found, attempt
from fedgauge.simulations.checks.scenario_check import describe_data


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
        terms = _small_terms(owner) if protocol is None else ServerTerms.parse(protocol)
        clients.append(DeployedClient.of(owner, terms))
        return " > ".join(map(describe, owner.chain))

    results.append(attempt("chain, loss, guard", build_all))
    for client in clients:
        results.append(attempt("one step", partial(_one_step, client)))
        if client.secure_sum is not None:
            results.append(CheckResult("secure sum", None, False, client.secure_sum.tolerance.words))
    return results


def _small_terms(owner: OwnerConfig) -> ServerTerms:
    models = {"classification": {"use": "tiny_bert"}, "next_token": {"use": "tiny_gpt2"}}
    mlp = {"use": "mlp", "hidden": [16]}
    model = models[owner.dataset.task] if isinstance(owner.dataset, Text) else mlp
    return ServerTerms(seed=0, rounds=1, clients=owner.client + 1, model=model, canaries=int(owner.canary))


def _one_step(client: DeployedClient) -> Found:
    params, buffers = client.initial()
    update = client.compute(params, buffers, client.owner.batch(client.draw(1)), {})
    norm = math.sqrt(sum(float(t.double().square().sum()) for t in update.values()))
    if math.isfinite(norm):
        return f"an update of norm {norm:.3g}"
    return Problem("not finite", "", "the update is not finite", "is the rate too high?")
