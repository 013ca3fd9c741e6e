"""Gives forged files and answers to the commands that read them, and counts those they accept.

A case is handled if it ends in time, within its memory, in one line that refuses it, or in what the
case itself calls harmless. It is accepted if it ends otherwise: believed, with a traceback, or with
anything changed outside the directory that it may write to.

    python tests/stress/measure_forged.py --cases 2000 --figures FILE.jsonl
    python tests/stress/measure_forged.py caches --first 17 --cases 1

`--cases` is the number for each source; the sources are named in `SOURCES`.
"""

import collections
import logging
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path

import forged_answers
import forged_archives
import forged_caches
from cyclopts import App
from fuzz_archives import snapshot
from fuzzing import Forged, Outcomes, TookTooLong, bounded_memory, in_time, told

from qat.errors import QatError

app = App(help=__doc__)
TIME_S = 10.0
MEMORY_BYTES = 2**30
Source = Callable[[Path], AbstractContextManager[Callable[[int], Forged]]]
"""Opens on a directory of its own, and then gives the case of each seed."""
SOURCES: dict[str, Source] = {
    "answers": forged_answers.opened,
    "archives": forged_archives.opened,
    "caches": forged_caches.opened,
}


@app.default
def main(*sources: str, cases: int = 2000, first: int = 0, figures: Path | None = None) -> None:
    """Run CASES seeds of each of SOURCES (by default of all) and record how many were accepted."""
    logging.disable(logging.CRITICAL)
    outcomes: Outcomes = collections.Counter()
    for name in sources or SOURCES:
        outcomes.update(attack(name, range(first, first + cases)))
    accepted = told(outcomes)
    if figures is not None:
        from fault_records import record

        total = outcomes.total()
        record(figures, "forged_inputs_accepted", accepted, "cases", "0", runs=total)
    raise SystemExit(accepted > 0)


def attack(name: str, seeds: Iterable[int]) -> Outcomes:
    """How often each kind of forgery of one source came to which end."""
    outcomes: Outcomes = collections.Counter()
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        outside = Path(folder)
        work = outside / "work"
        work.mkdir()
        (outside / "sentinel").mkdir()
        (outside / "sentinel" / "secret").write_text("as it was")
        with SOURCES[name](work) as case_of, bounded_memory(MEMORY_BYTES):
            for seed in seeds:
                forged = case_of(seed)
                outcome = run(forged, outside, work)
                if outcome.startswith("WRONG"):
                    outcome = outcome.replace("WRONG", f"WRONG: seed {seed}", 1)
                outcomes[f"{name} {forged.kind}", outcome] += 1
    return outcomes


def run(forged: Forged, outside: Path, work: Path) -> str:
    """What came of one case; WRONG begins an end that is not as it should be."""
    before = around(outside, work)
    try:
        with in_time(TIME_S), warnings.catch_warnings(action="ignore"):
            outcome = forged.act()
    except QatError as error:
        outcome = "refused" if "\n" not in str(error) else f"WRONG: several lines: {error}"
    except (Exception, TookTooLong):  # noqa: BLE001  any other end is what is looked for
        outcome = f"WRONG: {traceback.format_exc()}"
    if around(outside, work) != before:
        return f"WRONG: something changed outside; {outcome}"
    return outcome


def around(outside: Path, work: Path) -> dict[str, object]:
    """Everything that a case may not change."""
    found = snapshot(outside)
    return {name: state for name, state in found.items() if not Path(name).is_relative_to(work)}


if __name__ == "__main__":
    app()
