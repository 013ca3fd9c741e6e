"""The card and the figures of a flagship, from the files that its stages leave."""

import json
from pathlib import Path

import flagship_card
import pytest

from qat.logs import HEARTBEAT

KL = {"2.5-0": 0.04, "2.5-1": 0.02, "3.25-0": 0.01}
LOG = [
    ("texts", 30, 143, 2),
    ("call", 40, 143, 2),
    ("texts", 20, 0, 2),
    ("train-2.5-0", 50, 0, 2),
    ("train-2.5-1", 40, 0, 2),
    ("train-3.25-0", 30, 0, 1),
    ("call", 110, 0, 2),
]
BEATS = [(4, 2.5, 0.5), (6, 2.0, 0.0), (5, 2.0, 0.0), (8, 5.5, 1.5)]
"""Step, its seconds and those of waiting: steps 5 and 6 were taken twice, 20 s without waits."""


def write_json(path: Path, values: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values))


def score(value: float) -> dict[str, float]:
    return {"value": value, "stderr": 0.03}


def suite(retention: float, student_s: float) -> dict:
    task = {"student": score(retention / 2), "teacher": score(0.5), "retention": score(retention)}
    return {
        "tasks": {"humaneval": {**task, "right_to_wrong": 7, "wrong_to_right": 3}},
        "seconds": {"teacher": 0.0, "student": student_s},
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
        trained = {"world_size": 2, "tokens": 999, "tokens_per_s": 5.0}
        write_json(run / "metrics.json", {**trained, "best_step": 8})
        beats = [dict(zip(("step", "step_s", "data_wait_s"), beat, strict=True)) for beat in BEATS]
        (run / HEARTBEAT).write_text("".join(json.dumps(beat) + "\n" for beat in beats))
        write_json(results / f"kl-{job}.json", {"kl_nats": kl, "top1_frac": 0.9})
        write_json(results / f"suite-{job}.json", suite(0.8 + number / 10, 20.0 + number))
        (results / f"job-{job}.json").touch()
        write_json(results / f"export-{job}.json", {"out": str(out / "exports" / job)})
    write_json(results / "suite-teacher.json", {"seconds": {"teacher": 38.0, "student": 30.0}})
    (results / "prompts.txt").write_text("prompts/functions.jsonl: 12 prompts\n")
    (results / "texts.command").write_text("qat sample /home/someone/teacher --top-p 0.95")
    words = {"MODEL": "/home/someone/coder.gguf", "SHARES": "functions:1", "TEMPERATURE": "0.8"}
    words |= {"ROWS": "100", "STEPS": "10"}
    lines = [f"{k}={v}\n" for k, v in {**words, "TOP_P": "0.95", "TRAIN_FLAGS": r"--lr\ 1"}.items()]
    (out / "settings.sh").write_text("".join(lines))
    names = ("name", "seconds", "exit", "gpus")
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
    # 3 students x 20 s x 2 GPUs of (40 + 110) s x 2 GPUs
    assert found["training_share"]["value"] == pytest.approx(0.4)
    assert found["training_share"]["stage_seconds"] == {"texts": 50, "call": 150, "train": 120}
    # the teacher's 38 s, and 22 s of the slowest student
    assert found["suite_minutes"]["value"] == pytest.approx(1.0)
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
    assert "qat generate runs/3.25-0/q " in card


def test_the_file_of_the_least_kl_is_shown_where_there_is_one(out: Path) -> None:
    (out / "results" / "export-3.25-0.json").unlink()
    recorded(out)
    card = (out / "README.md").read_text()
    assert "-m exports/2.5-1/model.gguf" in card and card.count("llama-cli") == 1


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
    # 50 s on two GPUs for 100 rows: 400 s on one for 400; 210 GPU seconds for 30 steps
    (out / "results" / "cache.json").unlink()
    flagship_card.costs(out, "texts=400", "cache=400", "train=60", "call=60", gpus=1)
    texts, cache, train, call = capsys.readouterr().out.splitlines()
    assert "texts" in texts and "7 min" in texts
    assert "cache" in cache and "not known" in cache
    assert "train" in train and "7 min" in train and "call" in call and "10 min" in call
    flagship_card.costs(tmp_path / "new", "train=60", gpus=1)
    assert "not known" in capsys.readouterr().out
