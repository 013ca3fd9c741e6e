"""Tiny models, made in the test: nothing here reaches a network or a downloaded file."""

import gc
import logging
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

# without a GPU, Triton's kernels run in its interpreter; it looks at this when it is imported
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")
# what tests start computes with one thread, as they do: a second one spins where others compute
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

gc.disable()  # while modules are imported there is next to no garbage


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--threads`, with which .ci/other_processors computes in another order."""
    parser.addoption("--threads", type=int, default=1, help="how many threads torch computes with")


def pytest_collection_finish() -> None:
    """Leave what is imported by now out of garbage collection: each would take half a second."""
    if "triton.runtime.interpreter" in sys.modules:
        from triton_interpreter import without_waste

        without_waste()
    if "cyclopts.argument" in sys.modules:
        from cyclopts.argument import _collection

        # each command line would parse the source of its classes again, and go through all flags
        # twice, first for their groups: 10 s of the suite, and 0.07 of 0.17 s of each command line
        for name in ("extract_docstring_help", "_resolve_groups_from_callable"):
            setattr(_collection, name, cache(getattr(_collection, name)))
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)  # models are let go without it: a twentieth of the suite's time
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _no_wait_for_the_disk() -> Iterator[None]:
    """Check descriptors instead of flushing them: no file of a test must outlive a power loss."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)
        yield


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Inodes of the files and directories that a test flushes to disk, in order."""
    inodes: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda open_file: inodes.append(os.fstat(open_file).st_ino))
    return inodes


@pytest.fixture(params=["reference", "kernel"])
def is_kernel(request: pytest.FixtureRequest) -> bool:
    """Compute by the plain reference, or by the kernel in Triton's interpreter."""
    if request.param == "kernel":
        import torch

        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("tests/gpu runs the kernel itself")
    return request.param == "kernel"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache and a student of one layer, which no test changes."""
    from train_case import make_place  # not where tests are only handed out to workers

    return make_place(tmp_path_factory.mktemp("place"), layers=1)


@pytest.fixture
def no_extensions(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Find none of the project's entry points."""
    from qat import hooks

    monkeypatch.setattr(hooks, "entry_points", lambda group: ())
    hooks.hooks.cache_clear()
    yield
    hooks.hooks.cache_clear()


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave pictures empty but for their sign, for a test of what stands beside them."""
    from qat.observe.charts import Chart
    from qat.observe.page import SIGNS

    monkeypatch.setattr(Chart, "render", lambda chart, form: SIGNS[1])


@pytest.fixture
def short_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convert and judge with the fewest rounds, for a test of what comes before and behind them."""
    monkeypatch.setattr("qat.quant.error_feedback.SWEEPS", 1)
    monkeypatch.setattr("qat.quant.fit.ROUNDS", 2)
    monkeypatch.setattr("qat.train.judge.SAMPLE_TOKENS", 4)


@pytest.fixture
def plain_signals() -> Iterator[None]:
    """Let signals act as in a program that a terminal started: `nohup`, and a shell that runs its
    commands in the background, have a test's process ignore some."""
    plain = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    before = {number: signal.signal(number, handler) for number, handler in plain.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _seeded(pytestconfig: pytest.Config) -> None:
    import torch  # not where tests are only handed out to workers

    # without a GPU, `torch.manual_seed` notes the call and its stack for when there will be one
    seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
    seed(0)
    # on small weights a second thread costs more than it gives, and sums in another order
    torch.set_num_threads(pytestconfig.getoption("threads"))


@pytest.fixture(autouse=True)
def _own_log_level() -> Iterator[None]:
    yield
    # a command line, or a rank that is not the first, chooses a level for its whole process
    logging.getLogger("qat").setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def _own_gguf_cache(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keep what tests open out of the user's cache."""
    if "qat.models.opening" in sys.modules:  # which loads that cache when it opens a GGUF file
        root = tmp_path_factory.getbasetemp() / "gguf-cache"
        monkeypatch.setattr("qat.models.gguf_cache.GGUF_CACHE", root)
