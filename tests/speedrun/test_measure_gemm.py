"""What the script that tunes products of packed weights tries, and its figures."""

import json
from itertools import product
from pathlib import Path
from types import ModuleType

import pytest

from qat.kernels.lut_gemm import INPUTS, SHARED_BYTES, WIDTHS, tile_for

SPEEDRUN = Path(__file__).parents[2] / "speedrun"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(str(SPEEDRUN))
    import measure_gemm

    return measure_gemm


def test_few_kernels_serve_all_tiles_that_are_tried(script: ModuleType) -> None:
    kernels = set()
    for (O, I), width in product(script.SHAPES.values(), (*WIDTHS, 512, 4096)):
        tiles = script.candidates(O, I, width)
        assert tiles[0] == tile_for(O, I, script.BITS, width, has_groups=True)
        assert len(set(tiles)) == len(tiles) <= 13
        for tile in tiles:
            is_apart = tile.together == 1
            assert 2 * INPUTS * tile.columns * tile.stages <= (SHARED_BYTES if is_apart else 2**17)
            spans = -(-I // 256)
            assert not tile.own or tile.stages >= 4 * -(-spans // tile.splits)
            assert tile.splits <= max(I // 256, 8)
        kernels |= {script.kernel_of(tile) for tile in tiles if tile.columns}
    assert len(kernels) <= 5 * script.WORKERS


def test_the_figures_are_of_the_square_and_of_the_slowest(
    script: ModuleType, tmp_path: Path
) -> None:
    rows = [
        {"O": O, "I": O, "M": M, "over_bf16": O / 8192 * M, "over_humming": 1.5}
        for O, M in product((8192, 4096), script.GOALS)
    ]
    script.report(tmp_path / "figures.jsonl", rows, {"commit": "abc"})
    lines = [json.loads(line) for line in (tmp_path / "figures.jsonl").read_text().splitlines()]
    found = {line["figure"]: line["value"] for line in lines}
    assert found["lut_gemm_over_bf16_m16"] == 16
    assert found["lut_gemm_over_bf16"] == 0.5
    assert found["lut_gemm_over_humming"] == 1.5
    assert {line["commit"] for line in lines} == {"abc"}
