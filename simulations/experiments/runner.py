"""Run the cells of an experiment: one after the other in this process, or several at once, each in a process of its own."""

import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import connection, get_context
from typing import Any, cast

import torch

from fedgauge.client.components import SpecError
from fedgauge.server.child_processes import die_with_parent
from fedgauge.simulations.checks.check_result import sentence

# Given its place among the cells at work; it prepares the cell, yields nothing once, and then rows as they are there.
Work = Callable[[int], Iterator[list[Any]]]
Found = list[Any] | Exception


def run_cells(works: Mapping[str, Work], jobs: int) -> Iterator[tuple[str, Found]]:
    """Yield rows as soon as they are there, with their cell's name, or the exception with which a cell ended.

    With one job every cell is prepared, and what is wrong with it raised, before the first one is computed.
    """
    if jobs > 1:
        yield from _apart(works, jobs)
        return
    begun = {name: work(0) for name, work in works.items()}
    for steps in begun.values():
        next(steps)
    for name, steps in begun.items():
        try:
            for rows in steps:
                yield name, rows
        except Exception as error:  # a user's code may raise anything
            yield name, error


def _apart(works: Mapping[str, Work], jobs: int) -> Iterator[tuple[str, Found]]:
    context, waiting = get_context("spawn"), dict(works)
    at_work: dict[Any, tuple[str, int, Any]] = {}
    try:
        while waiting or at_work:
            while waiting and len(at_work) < jobs:
                name = next(iter(waiting))
                place = min(set(range(jobs)) - {place for _, place, _ in at_work.values()})
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(waiting.pop(name), place, theirs), daemon=True)
                process.start()
                theirs.close()
                at_work[ours] = name, place, process
            for ready in connection.wait(list(at_work)):
                name, _, process = at_work[ready]
                try:
                    found = cast(connection.Connection, ready).recv()
                except EOFError:
                    process.join()
                    found = SpecError(f"its process ended with status {process.exitcode}")
                if not isinstance(found, list):
                    del at_work[ready]
                if found is not None:
                    yield name, found
    finally:
        for _, _, process in at_work.values():
            process.kill()


def _work(work: Work, place: int, pipe: Any) -> None:
    """Send the rows of one cell, then None or what went wrong; it ends with the process that started it."""
    if sys.platform == "linux":
        die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)  # cells share the machine, and equal seeds give equal bits
    try:
        steps = work(place)
        next(steps)
        for rows in steps:
            pipe.send(rows)
        pipe.send(None)
    except SpecError as error:
        pipe.send(error)
    except Exception as error:  # which other processes may not be able to read
        traceback.print_exc()
        pipe.send(SpecError(sentence(error)))
