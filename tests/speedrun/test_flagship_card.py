"""The card and the figures of a flagship, from the files that its stages leave."""

import json
from pathlib import Path

import flagship_card
import pytest
from flagship_card import Flagship

KL = {"2.5-0": 0.04, "2.5-1": 0.02, "3.25-0": 0.01}
LOG = [
    ("stage", "texts", 30, 143, 100, 2),
    ("stage", "texts", 20, 0, 100, 2),
    ("stage", "train", 100, 0, 30, 2),
    ("job", "suite-2.5-0", 60, 143, 1, 1),
    ("job", "suite-2.5-0", 30, 0, 1, 1),
    ("job", "suite-2.5-1", 45, 0, 1, 1),
]


def write_json(path: Path, values: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values))


def score(value: float) -> dict[str, float]:
    return {"value": value, "stderr": 0.03}


def suite(retention: float, teacher_s: float) -> dict:
    task = {"student": score(retention / 2), "teacher": score(0.5), "retention": score(retention)}
    return {
        "tasks": {"humaneval": {**task, "right_to_wrong": 7, "wrong_to_right": 3}},
        "seconds": {"teacher": teacher_s, "student": 9.0},
    }


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """The directory of a flagship of three students on two GPUs."""
    out, results = tmp_path / "out", tmp_path / "out" / "results"
    made = {"plan": "v2a2", "source_megabytes": 400.0, "megabytes": 1600.0, "bits_per_weight": 32.0}
    write_json(results / "teacher.json", made)
    texts = {"rows": 90, "tokens": 1234, "tokens_per_s": 50000.0}
    write_json(results / "texts.json", texts)
    cache = {"counted_tokens": 1200, "sequences": 80, "held_out_sequences": 4}
    write_json(results / "cache.json", {**cache, "bytes_per_token": 57.5, "teacher_ppl": 1.5})
    for size, megabytes in (("2.5", 120.0), ("3.25", 161.0)):
        sizes = {"megabytes": megabytes, "bits_per_weight": float(size)}
        write_json(results / f"convert-{size}.json", {"plan": f"plan{size}", **sizes})
    for number, (job, kl) in enumerate(KL.items()):
        run = out / "runs" / job
        write_json(results / f"train-{job}.json", {"run": str(run), "final": f"{run}/q"})
        trained = {"train_s": 20.0, "world_size": 2, "tokens": 999, "tokens_per_s": 5.0}
        write_json(run / "metrics.json", {**trained, "best_step": 8})
        write_json(results / f"kl-{job}.json", {"kl_nats": kl, "top1_frac": 0.9})
        write_json(results / f"suite-{job}.json", suite(0.8 + number / 10, 50.0 * (number == 0)))
    write_json(results / "export-3.25.json", {"out": str(out / "exports" / "3.25")})
    (results / "prompts.txt").write_text("prompts/functions.jsonl: 12 prompts\n")
    (results / "texts.command").write_text("qat sample /home/someone/teacher --top-p 0.95")
    words = {"MODEL": "/home/someone/coder.gguf", "SHARES": "functions:1", "TEMPERATURE": "0.8"}
    lines = [f"{k}={v}\n" for k, v in {**words, "TOP_P": "0.95", "TRAIN_FLAGS": r"--lr\ 1"}.items()]
    (out / "settings.sh").write_text("".join(lines))
    names = ("kind", "name", "seconds", "exit", "units", "gpus")
    rows = [json.dumps(dict(zip(names, line, strict=True))) + "\n" for line in LOG]
    (out / "log.jsonl").write_text("".join(rows))
    return out


def recorded(out: Path) -> dict[str, dict]:
    flagship_card.write(out, name="coder")
    rows = [*map(json.loads, (out / "figures.jsonl").read_text().splitlines())]
    found = {row["figure"]: row for row in rows}
    assert len(found) == len(rows)
    return found


def test_figures_are_means_over_seeds(out: Path) -> None:
    recorded(out)  # a second call replaces the first one's
    found = recorded(out)
    small = found["coder_humaneval_retention_2.5"]
    assert small["value"] == pytest.approx(0.85) and small["runs"] == 2
    assert small["spread"] == pytest.approx(0.0707, abs=1e-4)
    assert small["goal"] == ">= 0.80" and small["megabytes"] == 120.0
    assert small["humaneval_retention"] == pytest.approx([0.8, 0.9])
    assert found["coder_humaneval_retention_3.25"]["spread"] is None
    assert found["coder_kl_2.5"]["value"] == pytest.approx(0.03)
    # 3 students x 20 s x 2 GPUs of (50 + 100) s x 2 GPUs
    assert found["training_share"]["value"] == pytest.approx(0.4)
    assert found["training_share"]["stage_seconds"] == {"texts": 50, "train": 100}
    # both calls of the suite that asked the teacher
    assert found["suite_minutes"]["value"] == pytest.approx(1.5)
    assert found["suite_minutes"]["calls"] == 2
    (speed,) = (row for name, row in found.items() if name.startswith("sample_tok_s_coder_"))
    assert speed["value"] == 50000.0


def test_a_card_has_every_number_and_no_path_of_its_author(out: Path) -> None:
    recorded(out)
    card = (out / "README.md").read_text()
    (row,) = (line for line in card.splitlines() if line.startswith("| 2.5, plan2.5"))
    cells = [cell.strip() for cell in row.split("|")][1:-1]
    assert cells[1:3] == ["120.0", "2.500"]
    assert cells[3:] == ["42.5 +- 3.0", "85.0 +- 3.0", "0.0300 +- 0.0141", "999", "40"]
    (teacher,) = (line for line in card.splitlines() if line.startswith("| teacher |"))
    assert "| 400.0 | 8.00 |" in teacher  # 400 million weights
    assert "coder.gguf" in card and "--lr 1" in card and "-7 +3" in card
    assert "/home/someone" not in card and str(out) not in card
    assert "-m exports/3.25/model.gguf" in card and "qat generate runs/3.25-0/q " in card


def test_the_seed_of_the_least_kl_is_the_best(out: Path, capsys) -> None:
    flagship_card.best(out, "2.5")
    assert capsys.readouterr().out == "1\n"


def test_a_student_of_more_bits_than_its_name_is_refused(out: Path) -> None:
    made = {"plan": "x", "megabytes": 125.0, "bits_per_weight": 2.51}
    write_json(out / "results" / "convert-2.5.json", made)
    with pytest.raises(SystemExit, match=r"2\.5100 .*FORMATS"):
        recorded(out)
    assert not (out / "figures.jsonl").exists() and not (out / "README.md").exists()


def test_a_stage_that_is_not_done_is_named(out: Path) -> None:
    (out / "results" / "cache.json").unlink()
    with pytest.raises(SystemExit, match=r"cache\.json"):
        recorded(out)


def test_costs_follow_from_an_earlier_flagship(out: Path, tmp_path: Path, capsys) -> None:
    # 50 s on two GPUs for 100 rows: 400 s on one for 400
    flagship_card.costs(out, "texts=400", "cache=400", gpus=1)
    lines = capsys.readouterr().out.splitlines()
    assert "texts" in lines[0] and "7 min" in lines[0]
    assert "cache" in lines[1] and "not known" in lines[1]
    assert Flagship(tmp_path / "new").log == []
