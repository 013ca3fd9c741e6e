"""Tuning within a token: tiles are chosen by the token's time, and only if they change nothing."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from qat.backend.device import select
from qat.errors import ConfigError
from qat.extensions.bench.measure import Clock, Roofline
from qat.extensions.bench.results import ROWS
from qat.extensions.bench.stats import Interval
from qat.extensions.lab import verbs
from qat.extensions.lab.config import KernelsConfig
from qat.extensions.lab.kernels import run as module
from qat.extensions.lab.kernels.gates import Space
from qat.extensions.lab.kernels.token_tiles import TunedToken, few_of, token_of, tune_token
from qat.extensions.lab.kernels.tune import Timed, Tuned
from qat.kernels import tuned
from qat.logs import read_json_lines

CPU = torch.device("cpu")
KEY = (8, 16, 2)
RATES = Roofline(None, 1.0, 1.0)


class Planted(NamedTuple):
    """A tile of a linear that does not exist."""

    rows: int
    fault: int = 0


DEFAULT, SMALL, LARGE = Planted(4), Planted(2), Planted(8)


def linear(kernel: str, *alone: tuple[Planted, float]) -> Tuned:
    """A linear whose tiles have these seconds alone."""
    others = tuple(tile for tile, _ in alone)
    best = [
        Timed(tile, (seconds,) * 8, Interval(*(1.0 / seconds,) * 3))
        for tile, seconds in ((DEFAULT, 1.0), *alone)
    ]
    best.sort(key=lambda each: each.median_s)
    return Tuned(kernel, Space(kernel, KEY, DEFAULT, others), 1, 0, tuple(best), {})


@dataclass
class Subject:
    """A token of planted linears, and the seconds that each choice of tiles takes per round."""

    kernels: tuple[str, ...]
    seconds: Callable[..., list[float]]

    def __call__(self) -> Tensor:
        self.tiles = [tuned.chosen(kernel, KEY, DEFAULT, CPU) for kernel in self.kernels]
        faults = [tile.fault for tile in self.tiles]
        if max(faults) > 1:
            raise ValueError("no such tile")
        return torch.arange(6.0)[None] + sum(faults)


@dataclass(frozen=True)
class PlantedClock(Clock):
    """A clock that reads the seconds of a subject instead of the device's."""

    subject: Subject | None = None

    def turns(self, runs: list[Callable[[], object]]) -> list[list[float]]:
        found = []
        for run in runs:
            run()
            found.append(self.subject.seconds(*self.subject.tiles))
        return found


def steady(table: dict[tuple[Planted, ...], float]) -> Callable[..., list[float]]:
    """Seconds by tiles, slower in every third round; 1 for tiles that are not in the table."""
    return lambda *tiles: [table.get(tiles, 1.0) * (1 + 0.3 * (n % 3 == 0)) for n in range(9)]


def tune(seconds: Callable[..., list[float]], *linears: Tuned) -> TunedToken:
    subject = Subject(tuple(each.space.kernel for each in linears), seconds)
    clock = PlantedClock(select("cpu"), repeats=9, limit_s=1.0, subject=subject)
    return tune_token("planted", subject, list(linears), clock)


@pytest.fixture(autouse=True)
def _tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(tuned, "FOLDER", tmp_path / "tables")
    tuned.forget_tables()
    yield
    tuned.forget_tables()


def kept(out: Path, alone: Tuned, token: TunedToken | None) -> tuple:
    """Write both results into the device's table, and return the tile that is read from there."""
    report = module.KernelsReport(out, [], RATES, "", [alone], token)
    table = tuned.table_path("cpu")
    module.write_found(report, table, dict.fromkeys(module.TABLE_FACTS, "known"))
    assert tuned.read_table(out / table.name) == tuned.read_table(table)
    return tuned.chosen("down", KEY, DEFAULT, CPU)


def test_a_tile_that_is_slower_alone_is_adopted_and_read_again(tmp_path: Path) -> None:
    down = linear("down", (SMALL, 1.2), (LARGE, 0.8))
    assert down.adopted.configuration == LARGE
    found = tune(steady({(SMALL,): 0.9, (LARGE,): 1.1}), down)
    assert found.chosen == {("down", KEY): SMALL}
    assert found.ratio == pytest.approx(1 / 0.9)
    assert found.row()["effective"] == {"down 8x16x2": {"rows": 2, "fault": 0}}
    assert kept(tmp_path, down, None) == LARGE
    assert kept(tmp_path, down, found) == SMALL


def test_the_default_stays_where_the_token_is_not_proven_faster(tmp_path: Path) -> None:
    def uneven(tile: Planted) -> list[float]:
        """By the median LARGE is faster by a third, but not in enough rounds."""
        return [0.75 if tile == LARGE and n % 9 < 5 else 1.0 + 0.1 * (tile == LARGE)
                for n in range(9)]  # fmt: skip

    alone = linear("down", (LARGE, 0.8))
    for seconds in (uneven, steady({(LARGE,): 1.01})):
        found = tune(seconds, alone)
        assert found.adopted is None and found.ratio == 1.0
        assert found.entries() == {("down", KEY): None}
    assert kept(tmp_path, alone, found) == DEFAULT


@pytest.mark.parametrize(("fault", "says"), [(1, "errs by"), (2, "ValueError: no such tile")])
def test_a_tile_that_changes_the_logits_is_never_adopted(fault: int, says: str) -> None:
    wrong = Planted(2, fault)
    found = tune(steady({(wrong,): 0.1, (LARGE,): 0.9}), linear("down", (wrong, 0.5), (LARGE, 2.0)))
    assert found.chosen == {("down", KEY): LARGE}
    assert says in found.refused[f"down, {wrong}"] and says in found.refused["fastest alone"]


def test_a_linear_is_tried_again_after_its_neighbour_changed() -> None:
    times = {(SMALL, DEFAULT): 1.1, (DEFAULT, SMALL): 0.9, (SMALL, SMALL): 0.8}
    two = linear("up", (SMALL, 1.1)), linear("down", (SMALL, 1.1))
    assert set(tune(steady(times), *two).chosen.values()) == {SMALL}
    times[SMALL, SMALL] = 0.95
    assert [*tune(steady(times), *two).chosen.values()] == [DEFAULT, SMALL]


def test_tiles_that_win_only_together_are_tried_as_a_whole() -> None:
    two = linear("up", (SMALL, 0.9)), linear("down", (SMALL, 0.9))
    found = tune(steady({(SMALL, SMALL): 0.8, (SMALL, DEFAULT): 2.0, (DEFAULT, SMALL): 2.0}), *two)
    assert found.adopted == "fastest alone" and set(found.chosen.values()) == {SMALL}


def test_few_tiles_are_tried_the_default_among_them() -> None:
    fast = linear("down", (SMALL, 0.7), (LARGE, 0.8), (Planted(16), 0.9))
    assert few_of(fast) == [DEFAULT, SMALL, LARGE]
    assert few_of(linear("down")) == [DEFAULT]


def test_a_recorded_token_keeps_the_tiles_that_it_was_recorded_with() -> None:
    pytest.importorskip("triton")
    subject = Subject(("down",), steady({(LARGE,): 0.9}))

    def record(run: Subject) -> tuple[Callable[[], None], Tensor]:
        result, tiles = run(), run.tiles
        return lambda: setattr(run, "tiles", tiles), result

    backend = SimpleNamespace(records=True, record=record)
    clock = PlantedClock(backend, repeats=9, limit_s=1.0, subject=subject)
    found = tune_token("planted", subject, [linear("down", (LARGE, 1.1))], clock)
    assert found.chosen == {("down", KEY): LARGE}


def test_a_token_of_a_shape_says_the_same_at_each_call() -> None:
    token = token_of("tiny", "cpu")
    with torch.no_grad():
        logits = token()
        assert logits.shape == (1, 512) and logits.isfinite().all() and logits.std() > 0
        assert torch.equal(token(), logits)
    assert token_of("tiny-moe", "cpu") is None


def test_the_verb_tunes_the_linears_of_a_token_alone(tmp_path, monkeypatch, capsys) -> None:
    with pytest.raises(ConfigError, match="only=gated selects no linear of a token"):
        module.run_kernels(KernelsConfig(only="gated", tune="token"), None)
    with pytest.raises(ConfigError, match="tune=token on cpu, expected a GPU"):
        module.run_kernels(KernelsConfig(device="cpu", tune="token"), None)
    with pytest.raises(ConfigError, match="tune='all': expected true, false or token"):
        KernelsConfig.parse({"tune": "all"}, "flags")
    assert [KernelsConfig.parse({"tune": word}, "").tune for word in ("true", "token", False)] == [
        *(True, "token", False)
    ]
    found = tune(steady({(LARGE,): 0.9}), linear("down", (LARGE, 1.1)))
    report = module.KernelsReport(tmp_path, [], RATES, "", [], found)
    monkeypatch.setattr(module, "run_kernels", lambda config, out: report)
    said = verbs.kernels(config=KernelsConfig(tune="token"))
    assert said["autotune_token_ratio"] == pytest.approx(1.111)
    assert "tuned within the token (down 8x16x2): Planted(rows=8" in capsys.readouterr().out


def test_what_was_tuned_alone_is_kept_where_the_token_fails(tmp_path: Path, monkeypatch) -> None:
    backend = select("cpu")
    monkeypatch.setattr(type(backend), "records", True)
    monkeypatch.setattr(module, "measure_roofline", lambda *_: RATES)
    monkeypatch.setattr(module, "tune_alone", lambda *_: [linear("matvec, head, 4-bit")])
    monkeypatch.setattr(module, "token_of", lambda *_: {}["no room"])
    monkeypatch.setattr(
        module, "token_cases", lambda: [SimpleNamespace(name="matvec, head, 4-bit")]
    )
    with pytest.raises(KeyError, match="no room"):
        module.run_kernels(KernelsConfig(device="cpu", tune=True), tmp_path / "out", [])
    (row,) = read_json_lines(tmp_path / "out" / ROWS)
    assert row["kind"] == "tuned" and row["case"] == "matvec, head, 4-bit, tuned"
