"""The script that times generation: it runs, small, on a CPU, and its baseline is right."""

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from tiny import tiny_model

from qat.generate.step import DecodeStep
from qat.models.language_model import LanguageModel

SPEEDRUN = Path(__file__).parents[2] / "speedrun"


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SPEEDRUN))
    torch.set_num_threads(1)


@pytest.mark.slow
def test_the_tiny_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    import measure_generate

    from qat.bench.measure import Roofline

    out = tmp_path / "figures.jsonl"
    rates = Roofline(None, 1e12, 1e10)
    monkeypatch.setattr(measure_generate, "measure_roofline", lambda *_: rates)
    measure_generate.main(asked=measure_generate.Asked(tiny=True, device="cpu", figures=out))
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    ratios = ["generate_over_bf16", "generate_over_compiled_bf16"]
    names = ["vector_generate_over_scalar", *ratios, "generate_tok_s", "generate_mbu_frac"]
    assert [line["figure"] for line in lines] == names
    assert lines[1]["value"] > 0 and lines[1]["goal"] == ">= 2.0" and lines[1]["runs"] == 2
    printed = capsys.readouterr().out
    assert "off float32" in printed and "q2a4, tables of 4 bits" in printed


@pytest.mark.slow
def test_tiles_are_tuned_matrix_by_matrix(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the interpreter runs where no GPU is")
    import measure_generate

    from qat.backend.device import select
    from qat.extensions.lab.kernels import tune as spaces

    monkeypatch.setattr(spaces, "DENSE", ((2, 64, 1, 1),))
    cases = measure_generate.decode_cases

    def one(**bits: int) -> list:
        return [*cases(**bits)][3:4] if bits["mlp"] == 16 else []

    monkeypatch.setattr(measure_generate, "decode_cases", one)
    asked = measure_generate.Asked(shape="tiny", tiny=True)
    with ExitStack() as tiles:
        measure_generate.show_tiles(asked, select("cpu"), 1e9, tiles)
    printed = capsys.readouterr().out
    assert "matvec, down, 16-bit" in printed and "2 64 1 1" in printed


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_the_plain_step_is_the_decode_step(architecture: str) -> None:
    from plain_decode import PlainStep

    step = DecodeStep(LanguageModel(tiny_model(architecture, initializer_range=0.3)))
    ids, place = torch.randint(320, (2, 9)), torch.tensor([8])
    found = []
    for way in (step, PlainStep(step, is_compiled=False)):
        _, caches = step.prefill(ids[:, :8], 16)
        found.append((way.logits(ids[:, 8], place, caches, step.angles(16)), caches))
    assert torch.allclose(found[0][0], found[1][0], atol=1e-4)
    assert torch.allclose(found[0][1][1].keys, found[1][1][1].keys, atol=1e-5)
