"""Figures of `qat bench gguf`: a file's KL each, and the worst ratio of students to rivals."""

import json
from pathlib import Path

import measure_gguf_files

ENVIRONMENT = {"command": "qat bench gguf", "commit": "abc", "device": "cpu"}


def write_results(path: Path, ratios: dict[str, float]) -> Path:
    sizes = {"megabytes": 1.0, "bits_per_weight": 2.5, "types": {"Q2_K": 1.0}, "num_tokens": 9}
    rows = [
        {"kind": "file", "case": case, "kl_nats": ratio, "kl_stderr_nats": 0.01, **sizes}
        for case, ratio in ratios.items()
    ]
    path.mkdir()
    whole = {"environment": ENVIRONMENT, "rows": rows, "ratios": ratios}
    (path / "results.json").write_text(json.dumps(whole))
    return path


def recorded(path: Path) -> dict[str, dict]:
    return {row["figure"]: row for row in map(json.loads, path.read_text().splitlines())}


def test_the_ratio_is_the_worst_of_two_models_and_sizes(tmp_path: Path) -> None:
    one = write_results(tmp_path / "one", {"q2": 0.25, "Q3-k": 0.5})
    other = write_results(tmp_path / "other", {"q2": 0.75, "q3": 0.125})
    alone, both = tmp_path / "alone.jsonl", tmp_path / "both.jsonl"
    measure_gguf_files.write_figures(f"a={one}", figures=alone)
    assert {name: row["value"] for name, row in recorded(alone).items()} == {
        "gguf_kl_a_q2": 0.25,
        "gguf_kl_a_q3_k": 0.5,
    }
    assert recorded(alone)["gguf_kl_a_q2"].items() >= ENVIRONMENT.items()
    measure_gguf_files.write_figures(f"a={one}", f"b={other}", figures=both)
    found = recorded(both)["gguf_kl_ratio_equal_mb"]
    assert (found["value"], found["runs"]) == (0.75, 4)
    write_results(tmp_path / "single", {"q2": 0.75})
    measure_gguf_files.write_figures(f"a={one}", f"b={tmp_path / 'single'}", figures=alone)
    assert "gguf_kl_ratio_equal_mb" not in recorded(alone)


def test_the_mean_of_llama_perplexity_is_read() -> None:
    printed = "====\nMean    KLD:   0.021034 \u00b1   0.000412\nMaximum KLD:   1.2\n"
    assert measure_gguf_files.MEAN_KLD.search(printed).groups() == ("0.021034", "0.000412")
