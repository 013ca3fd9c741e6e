"""`qat bench attention` on a CPU: rows, what cannot run, and where sparse begins to pay."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from nsa_case import small

from qat.backend.device import on
from qat.errors import ConfigError
from qat.extensions.bench.config import AttentionConfig
from qat.extensions.nsa.bench import (
    call_of,
    crossovers,
    ready,
    run_attention,
    thresholds,
    variants_of,
    write_thresholds,
)
from qat.extensions.nsa.kernels import reference
from qat.extensions.nsa.kernels.config import PRESETS, NSAConfig
from qat.extensions.nsa.kernels.router import Route, Threshold, attend, threshold_key
from qat.extensions.nsa.variants import Attend, Layer, Variant, Work, inputs_of, layer_of, problem

TINY = dict(lengths="96", groups="2", key_heads=1, head_dim=16, device="cpu", repeats=2)


@pytest.mark.slow
def test_every_way_has_a_row_that_says_how_fast_or_why_not(tmp_path: Path) -> None:
    config = AttentionConfig(**TINY, attention="nsa")
    _, measured, lengths = run_attention(config, tmp_path / "out")
    rows = {(row["way"], row["pass"]): row for row in measured}
    assert len(rows) == 2 * 7 + 4
    for which in ("forward", "train"):
        flex, reference = rows["nsa flex", which], rows["nsa reference", which]
        assert flex["status"] == "UNSUPPORTED" and "no kernels for cpu" in flex["reason"]
        assert reference["status"] == "OK"
        best = min(rows[f"dense {name}", which]["p50_s"] for name in ("flash", "math"))
        assert reference["over_dense"] == pytest.approx(best / reference["p50_s"])
        assert reference["compile_s"] > 0 and len(reference["samples"]) == 5
    assert rows["nsa decode", "decode"]["status"] == "OK"
    whole = json.loads((tmp_path / "out" / "results.json").read_text())
    assert whole["crossovers"] == lengths
    assert {row["way"] for row in lengths} == {"nsa reference", "nsa decode"}


def row(length: int, over_dense: float | None, **more: object) -> dict:
    common = {"way": "nsa flex", "pass": "train", "heads": 16, "key_heads": 8, "status": "OK"}
    return {**common, "is_dense": False, "length": length, "over_dense": over_dense, **more}


def test_sparse_pays_from_where_it_always_does() -> None:
    rows = [row(512, 1.1), row(1024, 0.9), row(4096, 1.2), row(2048, 1.1)]
    rows += [row(8192, 2.0, way="dense cudnn", is_dense=True)]
    rows += [row(512, 0.5, heads=32), row(1024, None, heads=64), row(99, 9.0, status="OOM")]
    found = {found["heads"]: found["length"] for found in crossovers(rows)}
    assert found == {16: 2048, 32: None, 64: None}
    timed = [
        row(length, over, way=f"nsa {way}", width=128)
        for way, overs in {"flex": (0.5, 1.1, 1.5), "gather": (0.4, 0.9, 2.0)}.items()
        for length, over in zip((512, 1024, 4096), overs, strict=True)
    ]
    timed += [row(9, 0.1, way="nsa flex", **{"pass": "decode"}), row(9, 0.1, way="nsa reference")]
    limits = {("nsa_route", threshold_key(PRESETS["nsa"], 2, 128)): Threshold(512, 1024)}
    assert thresholds(timed) == limits and thresholds(timed[-2:]) == {}


@pytest.mark.parametrize("which", ["forward", "decode"])
def test_ways_to_attend_agree_where_every_key_is_selected(which: str) -> None:
    work = Work(length=100, group=2, key_heads=2, width=16, batch=2)
    layer = layer_of(work, which, device=torch.device("cpu"), dtype=torch.float32)
    names = {"dense math", "nsa-merged reference", "nsa-merged decode"}
    ways = [way for way in variants_of(which, ("nsa-merged",)) if way.name in names]
    found = [call_of(way.prepare(layer, work), layer, which)() for way in ways]
    assert len(found) == 2
    torch.testing.assert_close(*found)


def attending(config: NSAConfig, length: int = 700) -> tuple[Attend, Layer]:
    """The reference on a layer of three key-value heads, which is longer than what is checked."""
    work = Work(length=length, group=2, key_heads=3, width=16, batch=2)
    layer = layer_of(work, "forward", device=torch.device("cpu"), dtype=torch.float32)
    route = Route("reference", "reference", "")
    return lambda layer: attend(inputs_of(layer, config), config, route), layer


@pytest.mark.parametrize("mode", ["residual", "merged"])
@pytest.mark.parametrize("length", [50, 700])
def test_what_computes_the_definition_passes(mode: str, length: int) -> None:
    config = small(mode=mode)
    assert config.reach == 64
    assert problem(*attending(config, length), config) is None


WRONG = {
    "dense attention": lambda right, layer: reference.attend_densely(
        inputs_of(layer, small(mode="merged"))
    ),
    "another row's": lambda right, layer: right(layer).flip(0),
    "zeros": lambda right, layer: torch.zeros_like(right(layer)),
    "nothing finite": lambda right, layer: right(layer) * torch.nan,
}


@pytest.mark.parametrize("name", WRONG)
def test_what_computes_something_else_is_not_timed(name: str) -> None:
    config = small(mode="merged")
    right, layer = attending(config)
    assert "computes something else: " in problem(partial(WRONG[name], right), layer, config)
    work = Work(length=700, group=2, key_heads=3, width=16, batch=2)
    wrong = partial(problem, config=config)
    way = Variant(name, lambda layer, work: partial(WRONG[name], right), wrong)
    row, sample = ready(way, work, "forward", on(torch.device("cpu")))
    assert (
        sample is None and row["status"] == "WRONG" and "computes something else" in row["reason"]
    )


def test_gradients_reach_the_whole_layer() -> None:
    work = Work(length=80, group=2, key_heads=1, width=16, batch=1)
    layer = layer_of(work, "train", device=torch.device("cpu"), dtype=torch.float32)
    way = next(way for way in variants_of("train", ("nsa",)) if way.name == "nsa reference")
    assert all(gradient.any() for gradient in call_of(way.prepare(layer, work), layer, "train")())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"passes": "backward"}, "'backward' is unknown; use any of forward,train,decode"),
        ({"lengths": ""}, "at least one size"),
    ],
)
def test_settings_that_mean_nothing(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AttentionConfig.parse({**TINY, **changes}, "flags")


def test_a_kind_of_attention_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ConfigError, match="'linear' is unknown; use any of nsa,.*,nsa-paper"):
        run_attention(AttentionConfig(**TINY, attention="nsa,linear"), None)
    with pytest.raises(ConfigError, match="tune=True on"):
        write_thresholds([], on(torch.device("cpu")), {})
