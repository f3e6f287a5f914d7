"""The page in a crowd: how long a visitor waits while others hold connections and streams, and a run writes.

The crowd is a process of its own. It opens connections whose requests never end (a byte a second), and streams of changes; what the
server drops or refuses is opened again a second later.
"""

import argparse
import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

from fedgauge.server.store.ledger_types import Participation
from fedgauge.server.store.run import Run
from fedgauge.simulations.benchmarks.page_speed import large_run, peak_memory, seconds_of
from fedgauge.simulations.benchmarks.reporting import BenchmarkReport, Figure, Progress
from fedgauge.simulations.reports.screenshots import watching

# how many of this machine's own addresses the crowd comes from; the visitor's is 127.0.0.1
CROWDS: Mapping[str, int] = {"from 100 other addresses": 100, "from the visitor's own address": 0}
PAUSE = 1.0  # seconds until a dropped connection is opened again, and between two bytes
WRITES = 0.1  # seconds between two rounds of the run


def crowd(
    progress: Progress, half_open: int = 1000, streams: int = 500, asked: int = 60, rounds: int = 50, clients: int = 20
) -> BenchmarkReport:
    """Seconds that a visitor's requests take in each crowd, and what the server keeps in memory."""
    figures, done, total = [], rounds, rounds + (len(CROWDS) + 1) * asked
    with TemporaryDirectory(prefix="fedgauge-crowd-") as scratch:
        run = large_run(Path(scratch) / "large", rounds, clients, lambda written, _: progress(written, total))
        with watching(run.folder.parent) as (base, pid), _writing(run):
            views = [f"{base}/run/large", f"{base}/api/runs", f"{base}/api/runs/large/overview"]
            for name, addresses in {"nobody else": None, **CROWDS}.items():
                waits = []
                with _around(base, half_open, streams, addresses):
                    for i in range(asked):
                        waits.append(seconds_of(views[i % len(views)]))
                        progress(done := done + 1, total)
                note = f"median {median(waits):.3f} s of {asked}"
                figures.append(Figure(f"slowest request, {name}", max(waits), "s", at_most=2.0, note=note))
            figures.append(Figure("server's largest resident memory", peak_memory(pid), "MB", at_most=400.0))
    settings = dict(half_open=half_open, streams=streams, rounds=rounds, clients=clients, asked=asked, seed=0)
    return BenchmarkReport(tuple(figures), settings)


@contextmanager
def _writing(run: Run) -> Iterator[None]:
    """A round is written again and again."""
    ended = threading.Event()

    def write() -> None:
        scenario = run.scenario()
        with run.ledger() as ledger:
            for round in count(10**5):
                if ended.wait(WRITES):
                    return
                seen = [Participation(c, "accepted", "", 1, f"digest {round} {c}") for c in range(5)]
                ledger.record_intake(round, seen, scenario.plan)
                ledger.record_round(round, 0.5, 1.0, 1.0, 0.0)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def _around(base: str, half_open: int, streams: int, addresses: int | None) -> Iterator[None]:
    """The crowd, once all of it has come; addresses None: there is none."""
    if addresses is None:
        yield
        return
    numbers = [urlsplit(base).port, half_open, streams, addresses]
    command = [sys.executable, "-P", "-m", "fedgauge.simulations.benchmarks.page_crowd", *map(str, numbers)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n", "the crowd did not come"
        yield
    finally:
        process.kill()
        process.communicate()


async def _come(port: int, half_open: int, streams: int, addresses: int) -> None:
    came = 0

    async def one(i: int, first: bytes) -> None:
        nonlocal came
        source = (f"127.0.0.{2 + i % addresses}" if addresses else "127.0.0.1", 0)
        for attempt in count():
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=source)
                writer.write(first)
                came += not attempt
                if first.endswith(b"\r\n\r\n"):
                    while await reader.read(1 << 16):
                        continue
                while not first.endswith(b"\r\n\r\n") and not reader.at_eof():
                    writer.write(b"x")
                    await writer.drain()
                    await asyncio.sleep(PAUSE)
                writer.close()
            except OSError:  # dropped: it comes again
                pass
            await asyncio.sleep(PAUSE)

    def begin(i: int) -> bytes:
        return b"GET / HTTP/1.1\r\nX: " if i < half_open else b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n"

    tasks = [asyncio.create_task(one(i, begin(i))) for i in range(half_open + streams)]
    while came < len(tasks):
        await asyncio.sleep(0.1)
    print("here", flush=True)
    await asyncio.gather(*tasks)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("port", "half_open", "streams", "addresses"):
        parser.add_argument(name, type=int)
    asyncio.run(_come(**vars(parser.parse_args())))
