"""What fuzzing scripts share: their arguments, limits of a case, and the count of clean ones."""

import argparse
import collections
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

GOAL = 10_000
Outcomes = collections.Counter[tuple[str, str]]
"""How often a kind of mutant came to which end; WRONG begins an end that is not clean."""


class TookTooLong(BaseException):
    """A case did not end in time; no handler of exceptions may take it."""


def asked_for(doc: str) -> tuple[range, Path | None]:
    """The seeds and the file for figures that the command line names."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--cases", type=int, default=GOAL)
    parser.add_argument("--first", type=int, default=0, help="seed of the first case")
    parser.add_argument("--figures", type=Path)
    arguments = parser.parse_args()
    return range(arguments.first, arguments.first + arguments.cases), arguments.figures


def settle(figure: str, outcomes: Outcomes, figures: Path | None) -> None:
    """Print what came of the cases, record the number of clean ones, and exit."""
    wrong = told(outcomes)
    if figures is not None:
        from fault_records import record  # imports torch, which takes more memory than a case may

        value = 0 if wrong else outcomes.total()
        record(figures, figure, value, "cases", f">= {GOAL}, all clean")
    raise SystemExit(wrong > 0)


def told(outcomes: Outcomes) -> int:
    """Print what came of the cases; how many did not end as they should."""
    for (kind, outcome), count in sorted(outcomes.items()):
        print(f"{kind:15s} {count:6d}  {outcome}")
    wrong = sum(count for (_, outcome), count in outcomes.items() if outcome.startswith("WRONG"))
    print(f"{outcomes.total()} cases, {wrong} not clean")
    return wrong


@contextmanager
def in_time(seconds: float) -> Iterator[None]:
    """Stop the block after so long."""

    def stop(_: int, frame: FrameType | None) -> None:
        raise TookTooLong

    old = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


@contextmanager
def bounded_memory(more_bytes: int) -> Iterator[None]:
    """Let this process take so much more than it has now; beyond that is a MemoryError."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    old, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (old, hard))
