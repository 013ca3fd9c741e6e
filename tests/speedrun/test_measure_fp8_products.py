"""The casts to E4M3 that a script measures, the products of codes, and what it projects."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

RESEARCH = Path(__file__).parents[2] / "speedrun" / "research"
CPU = torch.device("cpu")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(str(RESEARCH.parent))
    monkeypatch.syspath_prepend(str(RESEARCH))
    import measure_fp8_products

    return measure_fp8_products


@pytest.fixture
def rounding(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter rounds as a GPU does."""
    if torch.cuda.is_available():
        pytest.skip("the script checks the compiled kernels itself")
    from triton.runtime import interpreter

    nearest = script.nearest_codes(interpreter._convert_float)
    monkeypatch.setattr(interpreter, "_convert_float", nearest)


@pytest.mark.usefixtures("rounding")
def test_our_casts_are_the_textbooks_bit_by_bit(script: ModuleType) -> None:
    torch.manual_seed(0)
    tiles = script.TILES[2], script.TILES[5], script.TILES[0]
    assert script.check(script.OurCasts(*tiles), CPU) == []


@pytest.mark.usefixtures("rounding")
def test_a_cast_that_is_off_by_a_bit_is_told(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    textbook = script.cast

    def off(x: torch.Tensor, *, transposes: bool = True) -> tuple:
        found = textbook(x, transposes=transposes)
        found.codes.view(torch.uint8)[0, 0] ^= 1
        return found

    monkeypatch.setattr(script, "ODD", ((3, 5),))
    monkeypatch.setattr(script, "cast", off)
    wrong = script.check(script.OurCasts(), CPU)
    assert "X 3 x 5: 1 of codes differ" in wrong
    assert "dY 3 x 5: 1 of columns differ" in wrong


def test_products_of_codes_are_those_of_the_values(script: ModuleType) -> None:
    """Rows and columns are of any size: the scales that others' codes leave out are in dY's."""
    torch.manual_seed(0)
    M, site = 32, script.Site("", 48, 64)
    x, w, dY = script.random_factors(M, site, CPU)
    x, w = x * torch.logspace(-2, 2, M)[:, None], w * torch.logspace(2, -2, site.N)[:, None]
    X, W, ones = script.cast(x), script.cast(w), torch.ones(site.K, 1)
    G = script.cast_gradient(dY, X.scales, W.scales)
    read, weight, exact = X.values().double(), W.values().double(), dY.double()
    found = script.products(X, W, G, ones, sums="exact", fast=False)
    assert found["exact Y"]().shape == (M, site.N)
    assert script.relative(found["exact Y"](), read @ weight.t()) < 0.005  # rounded to bf16
    assert script.relative(found["exact dX"](), exact @ weight) < 0.04
    assert script.relative(found["exact G"](), exact.t() @ read) < 0.04


def test_a_step_repeats_the_forwards_that_its_backward_reads(script: ModuleType) -> None:
    seconds = {"bf16 Y": 10.0, "bf16 dX": 20.0, "bf16 G": 30.0}
    seconds |= {"fast Y": 1.0, "fast dX": 2.0, "fast G": 3.0}
    seconds |= {"ours X codes": 0.1, "ours X": 0.2, "ours W": 0.3, "ours dY": 0.4, "before dY": 0.5}
    sites = {site.name: site for site in script.sites_of("qwen3-4b")}
    assert (sites["gate, up"].N, sites["gate, up"].K) == (19456, 2560)
    found = script.of_a_step(sites["gate, up"], seconds)
    assert found == pytest.approx(
        {"bf16": 70.0, "raw fast": 7.0, "ours fast": 8.0, "before fast": 7.5}
    )
    assert script.of_a_step(sites["down"], seconds)["bf16"] == 60.0
    assert script.of_a_step(sites["out"], seconds)["before fast"] == pytest.approx(7.8)


def test_a_projected_step_is_the_measured_one_with_other_linears(script: ModuleType) -> None:
    steps, linears = {"plain": 1.0, "today": 1.25}, {"bf16": 0.02, "ours fast": 0.015}
    bf16, ours = script.projected("qwen3-4b", steps, linears)
    assert (bf16["step_s"], bf16["saved_of_today"]) == pytest.approx((1.0, 0.2))
    assert ours["step_s"] == pytest.approx(1 - 36 * 0.005)
    assert ours["saved_of_plain"] == pytest.approx(0.18)
    assert ours["status"] == "PROJECTED"
