"""The figures of docs/quality.md: equal time counts our steps."""

import json
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "speedrun" / "records"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "speedrun"))
    import quality_figures

    return quality_figures


def test_minimind2_is_judged_on_whole_documents(script) -> None:
    """Pieces without their beginning had its teacher at a perplexity of 46 and of 185,792."""
    rows = script.read(RECORDS / "2026-11-23_whole_documents/minimind2/results.jsonl")
    assert {row["sequence_length"] for row in rows} == {256}
    assert max(row["teacher_ppl"] for row in rows) < 20


def test_the_embedded_teacher_is_judged_on_text_that_it_never_learned(script) -> None:
    rows = script.read(RECORDS / "2026-11-23_whole_documents/tiny_qwen3/results.jsonl")
    (perplexity,) = {row["teacher_ppl"] for row in rows if row["text"] == "held_out"}
    page = (ROOT / "checkpoints/tiny-qwen3/README.md").read_text(encoding="utf-8")
    assert "52.25" in page
    assert perplexity == pytest.approx(52.25, rel=0.03)


def test_a_teacher_far_from_ours_in_equal_time_is_the_figure(
    script, tmp_path: Path, capsys
) -> None:
    """The worst of three as recorded, each at the rate that is the reference's best."""
    record = RECORDS / "2026-11-23_whole_documents"
    places = [record / name for name in ("tiny_qwen3", "minimind2", "teacher88m_equal_time")]
    out = tmp_path / "figures.jsonl"
    script.equal_time(*places, figures=out)
    lines = (record / "figures.jsonl").read_text(encoding="utf-8").splitlines()
    kept = {line["figure"]: line["value"] for line in map(json.loads, lines)}
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["value"] == kept["kl_over_formed_reference_time"]
    rows = script.read(places[-1] / "results.jsonl")
    ours, twin = (
        statistics.fmean(
            row["kl_nats"] for row in rows if row["recipe"] == name and row["text"] == "report"
        )
        for name in ("mixed bits, the reference's size", script.FORMED)
    )
    assert found["value"] == pytest.approx(ours / twin, abs=1e-4)


def test_the_budget_is_ours_and_not_that_of_recipes_on_equal_time(script) -> None:
    rows = [
        {"method": method, "recipe": method, "text": "held_out", "steps": steps, "kl_nats": 1.0}
        for method, steps in (("reference", 935), ("teacher", 0), ("qat", 600))
    ]
    assert script.Results("teacher", rows).steps == 600


def test_ours_no_larger_is_compared_with_the_best_baseline(script, tmp_path: Path) -> None:
    facts = {"text": "held_out", "commit": "c0ffee", "device": "cpu"}
    rows = [
        {"method": method, "recipe": recipe, "steps": steps, "kl_nats": kl, "bits_per_weight": bits}
        for method, recipe, steps, kl, bits in (
            ("teacher", "teacher", 0, 0.0, 16.0),
            ("gptq", "GPTQ", 0, 2.0, 3.06),
            ("torchao_int2", "torchao, lr 1e-3", 50, 0.8, 3.06),
            ("torchao_int2", "torchao, lr 1e-3", 50, 1.2, 3.06),
            ("qat", "mixed bits", 50, 0.25, 3.0),
            ("qat", "mixed bits, larger", 50, 0.1, 3.5),
        )
    ]
    path = tmp_path / "small" / "results.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps(facts | row) + "\n" for row in rows))
    out = tmp_path / "figures.jsonl"
    script.over_baselines(path.parent, figure="ratio", goal="<= 0.4", figures=out, kl="small_kl")
    found = {line["figure"]: line for line in map(json.loads, out.read_text().splitlines())}
    assert found["ratio"]["value"] == 0.25 and found["ratio"]["commit"] == "c0ffee"
    assert found["small_kl_torchao_lr_1e_3"]["spread"] == pytest.approx(0.2828, abs=1e-4)
    assert set(found) == {
        "ratio", "small_kl_gptq", "small_kl_torchao_lr_1e_3", "small_kl_mixed_bits",
        "small_kl_mixed_bits_larger",
    }  # fmt: skip
    script.over_baselines(
        path.parent, figure="named", goal="", figures=out, recipe="mixed bits, larger"
    )
    assert json.loads(out.read_text().splitlines()[-1])["value"] == 0.1


def test_the_worst_size_says_what_own_words_are_worth(script, tmp_path: Path) -> None:
    facts = {"text": "held_out", "commit": "c0ffee", "device": "cpu", "method": "qat"}
    rows = [
        {"recipe": recipe, "steps": 50, "kl_nats": kl, "kl_own_nats": own}
        for recipe, kl, own in (
            ("2.5 bits, converted only", 9.0, 9.0),
            ("2.5 bits, cached", 0.5, 1.0),
            ("2.5 bits, cached", 0.5, 3.0),
            ("2.5 bits, own words", 0.8, 1.0),
            ("2.5 bits, half and half", 0.6, 1.5),
            ("2.5 bits, own words, equal seconds", 0.1, 0.1),
            ("3.0 bits, cached", 0.2, 0.4),
            ("3.0 bits, cached, then own words", 0.1, 0.3),
        )
    ]
    path = tmp_path / "small" / "results.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps(facts | row) + "\n" for row in rows))
    out = tmp_path / "figures.jsonl"
    script.own_words(path.parent, figures=out)
    found = {line["figure"]: line for line in map(json.loads, out.read_text().splitlines())}
    assert found["onpolicy_gain_own_samples"]["value"] == 0.75
    assert found["onpolicy_gain_teacher_text"]["value"] == 1.2
    assert found["onpolicy_gain_own_samples"]["commit"] == "c0ffee"


def test_what_inputs_cost_is_that_of_the_worst_teacher(script, tmp_path: Path, capsys) -> None:
    nats = {"near": (0.2, 0.21, 0.3), "far": (0.1, 0.12, None)}
    for name, values in nats.items():
        rows = [
            {"recipe": recipe, "text": "held_out", "kl_nats": kl + seed, "commit": name}
            | {"device": "card", "method": "qat", "steps": 10}
            for recipe, kl in zip(("q2a4", "q2a4_a8", "q2a4_a8s"), values, strict=True)
            if kl is not None
            for seed in (-0.01, 0.01)
        ]
        (tmp_path / name).mkdir()
        text = "\n".join(map(json.dumps, rows))
        (tmp_path / name / "results.jsonl").write_text(text, encoding="utf-8")
    out = tmp_path / "figures.jsonl"
    script.activations(tmp_path / "near", tmp_path / "far", figures=out)
    found = {line["figure"]: line for line in script.read(out)}
    assert found.keys() == {"a8_kl_gap", "a8_static_kl_gap"}
    assert found["a8_kl_gap"]["value"] == 1.2 and found["a8_kl_gap"]["commit"] == "far"
    assert found["a8_static_kl_gap"]["value"] == 1.5 and found["a8_static_kl_gap"]["runs"] == 2
    assert "'near': 1.05" in capsys.readouterr().out


def test_edgerazor_is_compared_on_a_real_model_with_inputs_and_cache_alike(
    script, tmp_path: Path
) -> None:
    ours, theirs = "v2a2 mixed, 2.79, a8kv8", "EdgeRazor, 2.79 bits, a8kv8"
    recipes = (ROOT / "speedrun/recipes/quality_smollm2.toml").read_text(encoding="utf-8")
    assert f'"{ours}"' in recipes and f'"{theirs}"' in recipes
    nats = {
        "stories15m": {ours: 0.3, theirs: 0.3},
        "smollm2": {ours: 0.1, theirs: 0.4, "EdgeRazor, 2.79 bits": 0.2, "v2a2 mixed, 2.5": 0.01},
    }
    for name, values in nats.items():
        facts = {"text": "held_out", "commit": name, "device": "card", "method": "qat", "steps": 9}
        rows = [{"recipe": recipe, "kl_nats": kl, **facts} for recipe, kl in values.items()]
        (tmp_path / name).mkdir()
        text = "\n".join(map(json.dumps, rows))
        (tmp_path / name / "results.jsonl").write_text(text, encoding="utf-8")
    out = tmp_path / "figures.jsonl"
    script.activations(tmp_path / "stories15m", figures=out)
    assert not out.exists()
    script.activations(tmp_path / "stories15m", tmp_path / "smollm2", figures=out)
    (found,) = script.read(out)
    assert found["figure"] == "edgerazor_kl_ratio" and found["value"] == 0.25
    assert found["commit"] == "smollm2" and found["device"] == "card" and found["runs"] == 1
