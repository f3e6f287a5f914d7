"""Runs and owner's files, changed at random by somebody who knows what they mean, and shown to everything that reads them.

`python -m tests.security.tampering FOLDER NUMBER SEED [KIND ...]` tries so many, of these kinds if any are named, in a process
whose memory and time are bounded, and prints as JSON what did not end in an answer or a sentence, and how long each kind took.
"""

import contextlib
import io
import json
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fedgauge.client.components import SpecError
from fedgauge.client.deployment.owner import OwnerConfig
from fedgauge.server.dashboard.web import make_app
from fedgauge.server.store.ledger_connection import LedgerError
from fedgauge.server.store.run import Run, RunBusy
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.store.tape import TapeError
from fedgauge.server.views.reading import run_summary
from fedgauge.simulations.cli.main import main
from fedgauge.simulations.reports.client_report import read as read_client
from fedgauge.simulations.reports.report import write_report
from fedgauge.simulations.run.create import resume
from fedgauge.simulations.run.retention import prune
from tests.security.tampered_files import KINDS
from tests.server.dashboard.pages import Http

MEMORY = 3 << 30  # bytes of address space beyond what the process has when it begins
SECONDS = 120  # of the processor for one input: an honest one takes less than three


# ------------------------------------------------------------------------------------------------------------- readers


def _page(*addresses: str) -> Callable[[Path], None]:
    def ask(run: Path) -> None:
        with Http(make_app(run.parent), base_url="http://localhost") as http:
            for address in addresses:
                answer = http.get(address)
                assert answer.status_code in (200, 400, 404, 503), (address, answer.status_code)
                json.loads(answer.text, parse_constant=lambda token: 1 / 0)

    return ask


def _command(*words: str) -> Callable[[Path], None]:
    def ask(run: Path) -> None:
        status = main([*words, str(run)] if words[-1] != "--runs" else [*words, str(run.parent)])
        assert status in (0, 1, 2, 3), status

    return ask


def _scenario(run: Path) -> None:
    Run.open(run).scenario()


HERE = "/api/runs/run"
READERS: dict[str, Callable[[Path], None]] = {
    "runs": _command("runs", "--runs"),
    "summary": lambda run: run_summary(Run(run)) and None,
    "list": _page("/api/runs"),
    "overview": _page(f"{HERE}/overview"),
    "gallery": _page(
        f"{HERE}/gallery",
        f"{HERE}/gallery?round=all&sort=hidden",
        f"{HERE}/trace?round=1&client=0&example=0&attack=dlg",
    ),
    "clients": _page(f"{HERE}/clients", f"{HERE}/clients/0", f"{HERE}/image/0?client=0"),
    "compare": _page("/api/compare?runs=run,good", "/api/compare"),
    "report": lambda run: write_report(Run.open(run)) and None,
    "export": _command("export"),
    "gate": _command("gate", "--fail-above", "psnr=20", "--fail-above", "worst.psnr=20"),
    "verify": _command("verify"),
    "stop": _command("stop"),
    "resume": lambda run: resume(Run.open(run)) and None,
    "prune": lambda run: prune(Run.open(run), 0, 1e12) and None,
    "scenario": _scenario,
    "audit": _command("audit", "--force", "--log", "quiet"),
}
OWNERS: dict[str, Callable[[Path], None]] = {
    "owner": lambda run: OwnerConfig.load(run / "owner" / "client.toml") and None,
    "client-report": lambda run: read_client(run / "owner" / "client.toml") and None,
    "doctor": lambda run: None if main(["doctor", str(run / "owner" / "client.toml")]) in (0, 1, 2) else 1 / 0,
}
UNTRIED = {"scenario": {"audit"}}  # a scenario may order any number of iterations
MOST_TRIED = {"ledger values", "ledger facts", "ledger rows", "ledger pages"}


def _late(number: int, frame: object) -> None:
    raise TimeoutError("took too long")


def attempt(
    rng: random.Random, base: Path, place: Path, counts: Counter[str], kinds: Sequence[str] = tuple(KINDS)
) -> dict[str, str] | None:
    """Tamper with a copy of a run, and show it to some readers; what went wrong, or None."""
    shutil.rmtree(place, ignore_errors=True)
    run = place / "run"
    shutil.copytree(base / "run", run)
    (place / "good").symlink_to(base / "run")  # not shown, as a link leads anywhere
    kind = rng.choices(kinds, [KINDS[k][1] for k in kinds])[0]
    said = "; ".join(str(KINDS[kind][0](rng, run)) for _ in range(rng.choice((1, 1, 2)) if kind in MOST_TRIED else 1))
    counts[kind] += 1
    asked = OWNERS if kind == "owner" else {k: v for k, v in READERS.items() if k not in UNTRIED.get(kind, ())}
    asked = {"verify": READERS["verify"]} if kind == "record" else asked
    for reader in rng.sample(sorted(asked), min(3, len(asked))):
        out, err = io.StringIO(), io.StringIO()
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                asked[reader](run)
            counts["answered"] += 1
        except (LedgerError, SpecError, TapeError, RunBusy) as error:
            counts["refused"] += 1
            if not str(error).strip():
                return {"kind": kind, "said": said, "reader": reader, "error": f"{type(error).__name__} without a word"}
        except BaseException:
            return {"kind": kind, "said": said, "reader": reader, "error": traceback.format_exc()[-1500:]}
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        if "Traceback" in err.getvalue():
            return {"kind": kind, "said": said, "reader": reader, "error": err.getvalue()[-1500:]}
    return None


def try_many(base: Path, number: int, seed: int, kinds: Sequence[str] = ()) -> dict[str, Any]:
    """Try so many inputs, of these kinds or of all; counts, seconds of the processor by kind, and what went wrong."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGPROF, _late)
    run = Run(base / "run")
    Scenario.load(run.folder / "scenario.toml")  # what is imported and read once counts for nobody's memory
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    counts, seconds, wrong = Counter[str](), Counter[str](), []
    with tempfile.TemporaryDirectory(dir=base) as place:
        for i in range(number):
            began, before = time.process_time(), counts.copy()
            failure = attempt(random.Random(f"{seed} {i}"), base, Path(place) / "runs", counts, kinds or tuple(KINDS))
            seconds[next(k for k in KINDS if counts[k] > before[k])] += time.process_time() - began
            if failure:
                wrong.append({**failure, "case": f"{seed} {i}"})
                if len(wrong) >= 200:
                    break
    return {
        "tried": sum(counts[k] for k in KINDS),
        "counts": dict(counts),
        "seconds": {kind: round(spent, 1) for kind, spent in seconds.items()},
        "wrong": wrong,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


if __name__ == "__main__":
    print(json.dumps(try_many(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])))
