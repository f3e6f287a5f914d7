"""fedgauge doctor CLIENT.toml: what is wrong with an owner's file, and what its client has sent and leaked."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from fedgauge.attacks.plan import describe
from fedgauge.client.app import app
from fedgauge.client.deployment.owner_file import OwnerConfig
from fedgauge.client.deployment.state_folder import ClientFolder, DrawnBatch
from fedgauge.client.protocol import Protocol
from fedgauge.defenses.accounting import Accountant, mechanism
from fedgauge.simulations.checks.owner_check import privacy
from fedgauge.simulations.cli.main import main
from fedgauge.simulations.run.in_memory import flower
from tests.client.deployment.test_app_deployment import ask, context

CHAIN = [
    {"use": "clip", "max_norm": 1.0, "each": True},
    {"use": "gaussian", "sigma": 1.0},
    {"use": "local_sgd", "rate": 0.1},
]
DATA = {"use": "mnist5k", "batch_size": 2, "auxiliary": 200}
RUN = 2**64 - 1  # Flower's numbers of runs have no sign
ENTRIES = 784 * 256 + 256 + 256 * 10 + 10  # of the server's network
SERVERS = {"seed": 0, "rounds": 3, "clients": 2, "data": DATA, "model": {"use": "mlp"}, "chain": CHAIN}


def write(folder: Path, **changes: Any) -> tuple[Path, ClientFolder]:
    path = folder / "client.toml"
    tables = {"client": 1, "data": DATA, "chain": CHAIN, "grading": {"mode": "scores"}, **changes}
    path.write_text(tomli_w.dumps(tables))
    return path, ClientFolder(folder / "state")


def lived(state: ClientFolder) -> None:
    """Three rounds: one graded, one without, one held back."""
    state.keep_protocol(Protocol.from_tables(SERVERS).to_json())
    state.keep_drawn(1, DrawnBatch(RUN, (1, 2), "ab"))
    state.note("sent", run=RUN, round=1, examples=2, entries=ENTRIES)
    state.note("sent", run=RUN, round=2, examples=2, entries=ENTRIES)
    reported, exact = (
        {"dlg": [21.0, 14.0], "mean_image": [55.0, 55.0]},
        {"dlg": [21.18, 14.1], "mean_image": [55.1, 55.0]},
    )
    state.note(
        "graded",
        round=1,
        run=RUN,
        reported=reported,
        answered=2,
        precision=0.5,
        exact=exact,
        refused={"idlg": "too many"},
    )
    state.note("graded", round=1, run=RUN, reported=reported, answered=2, precision=0.5, exact={}, refused={})
    state.note("withheld", run=RUN, round=3, entries=ENTRIES, cause="its norm is 9, above max_norm 5")
    for _ in range(2):
        state.note("refused", run=RUN, what="train", reason="this client has already answered in round 2 of this run")


def test_the_report_says_what_was_sent_answered_and_leaked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, state = write(tmp_path, guard={"max_norm": 5.0})
    lived(state)
    assert main(["doctor", str(path)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "2 sent, 2 graded, 1 withheld, 2 refused" in out
    assert "21.18 dB PSNR (dlg, round 1;" in out, "a baseline's is no leak"
    assert "above max_norm 5 (1 x)" in out
    assert "of this run (2 x)" in out
    assert "not the 2 scores" in out


@pytest.mark.parametrize("name", ["[/x]", "[bold]dlg", "\x1b]0;owned\x07dlg", "dlg\nno round yet"])
def test_a_name_that_the_server_gave_is_text(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    path, state = write(tmp_path)
    lived(state)
    state.note(
        "graded", round=2, run=RUN, reported={name: [30.0]}, answered=3, precision=0.5, exact={name: [30.1]}, refused={}
    )
    assert main(["doctor", str(path)]) == 0
    out = capsys.readouterr().out
    assert not {"\x1b", "\x07"} & set(out)
    words = " ".join(name.replace("\x1b", " ").replace("\x07", " ").split())
    assert f"({words}, round 2;" in " ".join(out.split()).replace("( ", "(")


@pytest.mark.parametrize(
    ("sampling", "whole", "amplified"), [("secret", True, True), ("agreed", True, False), ("secret", False, False)]
)
def test_privacy_is_that_of_the_updates_that_were_made_and_amplified_by_secret_draws_from_the_owners_shard_alone(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    make_federation: Any,
    sampling: str,
    whole: bool,
    amplified: bool,
) -> None:
    """Of shared data the server sets the shard by `clients` and `seed`, in each run anew: it may be the batch itself."""
    split = {} if whole else {"auxiliary": 200}
    path, state = write(
        tmp_path, data={"use": "mnist5k", "batch_size": 2, "sampling": sampling, "whole": whole, **split}
    )
    lived(state)
    assert main(["doctor", str(path)]) == 0
    fed = make_federation(**SERVERS)
    found = replace(mechanism(fed.chain.deployed, 2), sampled=amplified)
    entries = sum(p.numel() for p in fed.model.parameters())
    spent = Accountant(found, 2, 1e-5, entries).spent(3, len(fed.shards.dataset.y))  # silence follows from the third
    out = " ".join(capsys.readouterr().out.split())
    assert f"epsilon {spent.record:.3g} for" in out and f" {spent.client:.3g} for all" in out


def test_privacy_counts_the_largest_update_whatever_network_the_server_named_last(
    tmp_path: Path, make_federation: Any
) -> None:
    """Laplace noise costs the more, the more entries it hides: a last network of 6 made 3.17 out of 4.73."""
    chain = [{"use": "clip", "max_norm": 1.0}, {"use": "laplace", "scale": 2.0}, {"use": "local_sgd", "rate": 0.1}]
    path, state = write(tmp_path, chain=chain)
    state.note("sent", run=1, round=1, examples=2, entries=10**6)
    last = {**SERVERS, "chain": chain, "model": {"use": "mlp", "hidden": [1]}}
    state.keep_protocol(Protocol.from_tables(last).to_json())
    fed = make_federation(**last)
    of_last = sum(p.numel() for p in fed.model.parameters())
    state.note("sent", run=2, round=1, examples=2, entries=of_last)

    def spent(entries: int) -> float:
        return Accountant(replace(mechanism(fed.chain.deployed, 2), sampled=False), 2, 1e-5, entries).spent(2, 2).record

    found = privacy(OwnerConfig.load(path))
    assert found is not None and found.record == spent(10**6) > spent(of_last)


def test_updates_of_several_chains_have_no_epsilon(tmp_path: Path) -> None:
    """An owner who asks for more noise later does not make earlier updates more private."""
    agreed = Protocol.from_tables(SERVERS)
    for round, sigma in ((1, 0.5), (2, 4.0)):
        path, _ = write(tmp_path, chain=[CHAIN[0], {"use": "gaussian", "sigma": sigma}, CHAIN[2]])
        with flower():
            assert not app(ask(round, agreed), context(path, agreed)).has_error()
        found = privacy(OwnerConfig.load(path))
        assert found is not None and (found.record is None) == (round > 1)
        assert (found.record is None) == (found.client is None) == (round == 2)


@pytest.mark.parametrize("before", [True, False])
def test_privacy_is_reported_to_an_owner_who_stops_or_begins_to_be_a_canary(tmp_path: Path, before: bool) -> None:
    path, state = write(tmp_path, canary=not before)
    canaries = {"canaries": {"clients": 2}} if before else {}
    state.keep_protocol(Protocol.from_tables({**SERVERS, "clients": 3, **canaries}).to_json())
    state.note("sent", run=1, round=1, examples=2, entries=1000)
    found = privacy(OwnerConfig.load(path))
    assert found is not None and found.record and "1 round)" in found.words


def test_ungraded_rounds_are_no_sign_of_safety(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, state = write(tmp_path)
    state.note("sent", run=1, round=1, examples=2)
    assert main(["doctor", str(path)]) == 0
    assert "no sign" in capsys.readouterr().out
    state.log.unlink()
    assert main(["doctor", str(path)]) == 0
    out = capsys.readouterr().out
    assert "worst leak" not in out and "privacy" not in out


def test_the_doctor_examines_an_owners_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, state = write(tmp_path)
    for met in (False, True):
        assert main(["doctor", str(path)]) == 0
        out = capsys.readouterr().out
        assert " > ".join(map(describe, CHAIN)) in " ".join(out.split()) and "update of norm" in out
        assert ("no protocol" in out) != met
        assert not (tmp_path / "state" / "log.jsonl").exists(), "looking leaves nothing behind"
        state.keep_protocol(Protocol.from_tables(SERVERS).to_json())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"chain": CHAIN[:2]}, "local_sgd"),
        ({"data": {"use": "npz", "path": "none.npz"}}, "none.npz"),
        ({"data": {**DATA, "batch_size": 10**6}}, "batch_size"),
        ({"chain": [{"use": "mychain:own"}, CHAIN[2]]}, "'mychain:own'"),
        ({"loss": {"use": "next_token"}}, "[loss]"),
        ({"grading": {"mode": "all"}}, "'scores'"),
    ],
)
def test_the_doctor_says_what_is_wrong_with_an_owners_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], words: str
) -> None:
    path, _ = write(tmp_path, **changes)
    assert main(["doctor", str(path)]) == 2
    reported = capsys.readouterr()
    assert words in " ".join((reported.out + reported.err).split())


def test_a_damaged_log_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, state = write(tmp_path)
    state.note("sent", run=1, round=1)
    with state.log.open("a") as log:
        log.write('{"event": "se')
    assert main(["doctor", str(path)]) == 2
    assert "log.jsonl: " in capsys.readouterr().err
