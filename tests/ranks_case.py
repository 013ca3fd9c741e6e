"""Several ranks on one machine: forked from the test's process, so that nothing is loaded again."""

import json
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from qat.backend.base import Launch
from qat.errors import QatError
from qat.ranks import Ranks, process_group

LIMIT_S = 40


def run_ranks(size: int, act: Callable[[Ranks], object], place: Path) -> list[object]:
    """Return the result of `act` on each of `size` ranks, as JSON keeps it.

    A rank that fails gives {"error": line}, one that was killed gives None. Every rank is a
    process; ranks that are not done within `LIMIT_S` are ended, and the test fails.
    """
    _end(_start(size, act, place))
    results = [place / f"result-{rank}.json" for rank in range(size)]
    return [json.loads(path.read_text()) if path.exists() else None for path in results]


def _start(size: int, act: Callable[[Ranks], object], place: Path) -> list[BaseProcess]:
    place.mkdir(parents=True, exist_ok=True)
    for old in [place / "meeting", *place.glob("result-*.json")]:
        old.unlink(missing_ok=True)
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=_rank, args=(n, size, act, place)) for n in range(size)]
    with warnings.catch_warnings():
        # Python 3.12 warns of forks beside threads; the children use none of the parent's
        warnings.simplefilter("ignore", DeprecationWarning)
        for child in children:
            child.start()
    return children


def _end(children: list[BaseProcess]) -> None:
    end = time.monotonic() + LIMIT_S
    for child in children:
        child.join(max(0.0, end - time.monotonic()))
    hanging = [child for child in children if child.is_alive()]
    for child in hanging:
        child.kill()
        child.join()
    assert not hanging, f"{len(hanging)} ranks hang"


def _rank(rank: int, size: int, act: Callable[[Ranks], object], place: Path) -> None:
    torch.set_num_threads(1)
    code = 0
    try:
        address = f"file://{place / 'meeting'}"
        with process_group(Launch(rank, rank, size), torch.device("cpu"), address) as ranks:
            result = act(ranks)
    except QatError as error:
        result, code = {"error": str(error), "kind": type(error).__name__}, error.exit_code
    except RuntimeError as error:  # what a collective says when its peer is gone
        result, code = {"error": str(error), "kind": "RuntimeError"}, 1
    (place / f"result-{rank}.json").write_text(json.dumps(result))
    os._exit(code)  # pytest's own endings belong to the parent
