"""The script that holds predictions against published throughputs, on its own data and on ours."""

import json
from dataclasses import replace
from pathlib import Path

import measure_predictor as script
import pytest

from qat.bench.run import RATES, SPREAD, SPREADS, Rates
from qat.errors import ConfigError
from qat.models.cost import devices_named

ROOT = Path(__file__).parents[2]
HEAD = """
[shapes.small]
model_type = "llama"
hidden_size = 64
intermediate_size = 128
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 1
vocab_size = 512
[[sources]]
repo = "somebody/something"
file = "README.md"
commit = "0"
about = "a test"
all = { card = "H100", batch = 4, seq_len = 128 }
"""
H200, A100 = devices_named(("h200", "a100-80"))


def points_in(tmp_path: Path, rows: str) -> list:
    path = tmp_path / "points.toml"
    path.write_text(HEAD + f"points = [{rows}]\n")
    return script.read_points(path)[0]


@pytest.fixture(scope="module")
def fitted() -> tuple[Rates, dict[bool, Rates]]:
    return script.fit(script.read_rows(script.OURS), H200)


@pytest.fixture(scope="module")
def found(fitted: tuple) -> list:
    points, shapes = script.read_points(script.HERE / "public.toml")
    models = {name: script.model_of(sizes) for name, sizes in shapes.items()}
    each = (script.predictions(point, models[point.shape], *fitted) for point in points)
    return [script.Found(*pair) for pair in zip(points, each, strict=True)]


def test_a_source_says_once_what_its_points_share(tmp_path: Path) -> None:
    first, second = points_in(
        tmp_path,
        '{ shape = "small", tokens_per_s = 10 }, '
        '{ shape = "small", tokens_per_s = 5, card = "A100-80", recompute = 1.0, fused = false }',
    )
    assert first.card == "H100" and first.seq_len == 128 and first.fused and first.gpus == 8
    assert second.card == "A100-80" and second.recompute == 1.0 and not second.fused
    assert first.source == "somebody/something" and first.device.bandwidth_gb_s == 3350


def test_a_source_may_state_a_bandwidth(tmp_path: Path) -> None:
    row = '{ shape = "small", tokens_per_s = 10, bandwidth_gb_s = 2400 }'
    assert points_in(tmp_path, row)[0].device.bandwidth == 2.4e12


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{ shape = "small" }', "a point of somebody/something is not whole .*tokens_per_s"),
        ('{ shape = "small", tokens_per_s = 1, tps = 2 }', "is not whole .*tps"),
        ('{ shape = "huge", tokens_per_s = 1 }', "shape=huge has no sizes; expected one of small;"),
        ('{ shape = "small", tokens_per_s = 1, card = "H300" }', "H300 is no device of the table"),
    ],
)
def test_a_mistake_in_the_points_is_named(tmp_path: Path, row: str, message: str) -> None:
    with pytest.raises((SystemExit, ConfigError), match=message):
        points_in(tmp_path, row)


def test_there_are_points_enough_each_of_a_cited_file(found: list) -> None:
    assert len(found) >= 20
    assert len({each.point for each in found}) == len(found)
    text = (script.HERE / "public.toml").read_text()
    assert text.count("[[sources]]") == text.count("\nfile = ") == text.count("\ncommit = ")


def test_what_the_plan_uses_is_what_our_rows_say(fitted: tuple, found: list) -> None:
    ours, plain = fitted
    for name, value in vars(RATES).items():
        assert value == pytest.approx(getattr(ours, name), rel=5e-3)
    assert script.spreads(found) == {**SPREADS, "all": SPREAD}
    assert ours.traffic < plain[True].traffic < plain[False].traffic


def test_the_fit_finds_the_rates_that_made_the_rows() -> None:
    true = Rates(matmul=0.7, attention=0.4, traffic=10.0, weight=20.0, layer_s=1e-3)
    rows = []
    sizes = [("qwen3-0.6b", 64, 256), ("qwen3-0.6b", 64, 512), ("qwen3-0.6b", 4096, 8)]
    for shape, S, batch in [
        *sizes,
        ("qwen3-0.6b", 64, 1),
        ("qwen3-1.7b", 64, 256),
        ("qwen3-1.7b", 1024, 32),
    ]:
        work = script.our_work(script.shape_called(shape), S, recompute=0.0)
        seconds = true.seconds(work, H200, "bf16", S * batch)
        rows.append(script.OwnRow("step", "NVIDIA H200", "bf16", S * batch, work, 1 / seconds))
    for fused, traffic in ((True, 30.0), (False, 90.0)):
        plain = replace(true, traffic=traffic, weight=script.ADAMW_BYTES)
        seconds = plain.seconds(work, H200, "bf16", 4096)
        case = script.PLAIN[fused]
        rows.append(script.OwnRow(case, "NVIDIA H200", "bf16", 4096, work, 1 / seconds))
    ours, plain = script.fit(rows, H200)
    assert vars(ours) == pytest.approx(vars(true))
    assert [plain[fused].traffic for fused in (True, False)] == pytest.approx([30.0, 90.0])


def test_conditions_that_cost_time_lower_a_prediction(fitted: tuple) -> None:
    ours, plain = fitted
    model = script.shape_called("qwen3-0.6b")
    point = script.Point("s", "H100", "qwen3-0.6b", batch=64, seq_len=512, tokens_per_s=1.0)

    def speed(**changed: object) -> float:
        return script.predictions(replace(point, **changed), model, ours, plain)[-1]

    base = speed()
    slower = [{"seq_len": 1024, "batch": 32}, {"recompute": 1.0}, {"fused": False}, {"batch": 32}]
    slower += [{"card": "A100-80"}, {"bandwidth_gb_s": 2400}, {"gpus": 16}]
    for changed in slower:
        assert speed(**changed) < base, changed
    assert speed(gpus=1) > base


def test_rows_of_another_card_are_predicted_and_too_few_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture, fitted: tuple
) -> None:
    row = {"kind": "step", "student": "tiny", "loss": "tail", "top_k": 64, "scope": "e2e"}
    row |= {"device": "NVIDIA H100 80GB HBM3", "dtype": "bf16", "gradient_checkpointing": False}
    (h100,) = devices_named(("h100",))
    lines = []
    for batch in (64, 128, 256, 512, 1024):
        work = script.our_work(script.shape_called("tiny"), 64, recompute=0.0)
        speed = 1 / fitted[0].seconds(work, h100, "bf16", 64 * batch)
        own = {"case": f"step, batch {batch}", "batch_size": batch, "tokens_per_s": speed / 1.1}
        lines.append(json.dumps({**row, **own, "seq_len": 64, "grad_accum_steps": 1}) + "\n")
    path = tmp_path / "results.jsonl"
    path.write_text("".join(lines))
    script.measure(out=tmp_path, rows=(path,))
    figure = json.loads((tmp_path / "figures.jsonl").read_text())
    assert figure["figure"] == "predict_error_h100" and figure["value"] == pytest.approx(0.1)
    assert figure["device"] == "NVIDIA H100 80GB HBM3" and figure["runs"] == 5
    path.write_text(lines[0])
    with pytest.raises(SystemExit, match="rows: 1 steps of 4096 tokens and more on a known devi"):
        script.measure(out=tmp_path, rows=(path,))


def test_the_page_and_the_record_have_the_tables(found: list) -> None:
    table, page = script.cards_table(found), (ROOT / "docs" / "bench.md").read_text()
    assert table in page and "({:.2f} to {:.2f})".format(*SPREAD) in page
    assert script.ways_table(found) in (script.HERE / "README.md").read_text()
    assert "| all | 54 |" in table
