"""Run and conversion directories as `qat train` and `qat convert` leave them, made up."""

import json
import math
from pathlib import Path


def write_run(path: Path, steps: int = 200, floor: float = 0.2) -> Path:
    """A run of `steps` steps whose loss decays to `floor`, judged every 50 steps."""
    path.mkdir(parents=True)
    metrics = []
    for step in range(1, steps + 1):
        loss = floor + 1.2 * math.exp(-step / 60) + 0.05 * math.sin(step * 1.7)
        metrics.append({"kind": "train", "step": step, "loss_nats": loss, "lr": 1e-3})
    for step in range(0, steps + 1, 50):
        kl = floor + 0.9 * math.exp(-step / 80)
        metrics.append(
            {"kind": "eval", "step": step, "kd_nats": 1.6 * kl, "kl_tail_nats": kl}
            | {"top1_frac": 1 - kl / 2, "ppl": 12 * math.exp(kl), "sample": "Return <the> list."}
        )
    beats = [
        {"step": step, "tokens_per_s": 9000 + 300 * math.sin(step), "step_s": 0.4}
        | {"peak_gib": 1.5, "elapsed_s": step * 0.4}
        for step in range(1, steps + 1, 10)
    ]
    info = {"device": "cpu", "commit": "0123abc", "versions": {"torch": "2.13.0"}, "student": "q2"}
    write_lines(path / "metrics.jsonl", metrics)
    write_lines(path / "heartbeat-rank0.jsonl", beats)
    (path / "run.json").write_text(json.dumps(info))
    (path / "recipe.toml").write_text("[train]\nmax_steps = 200\n")
    return path


def write_conversion(path: Path, layers: int = 6) -> Path:
    """A converted checkpoint's report: MLP at 2 bits, attention at 4."""
    path.mkdir(parents=True)
    kinds = [("self_attn.q_proj", 4, 0.08), ("self_attn.k_proj", 4, 0.085)]
    kinds += [("self_attn.v_proj", 4, 0.075), ("self_attn.o_proj", 4, 0.09)]
    kinds += [("mlp.gate_proj", 2, 0.33), ("mlp.up_proj", 2, 0.31), ("mlp.down_proj", 2, 0.3)]
    modules = [
        {"name": f"model.layers.{layer}.{kind}", "bits": bits, "codebook": "lut", "scale": "group"}
        | {"group_size": 32, "rank": 0, "seconds": 0.1 + 0.01 * layer}
        | {"relative_error": error + 0.01 * math.sin(layer + bits), "bits_per_weight": bits + 0.51}
        | {"weighted_error": 0.9 * error + 0.008 * math.cos(layer * 2 + len(kind))}
        for layer in range(layers)
        for kind, bits, error in kinds
    ]
    report = {"source": "checkpoints/tiny-qwen3", "plan": "q2a4", "seconds": 12.5}
    report |= {"bits_per_weight": 3.6, "linear_bits": 2.98, "modules": modules}
    (path / "convert_report.json").write_text(json.dumps(report))
    return path


def write_lines(path: Path, rows: list[dict]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_pipeline(path: Path, **student: float) -> Path:
    """A directory as `qat run` leaves it; `student` changes numbers of the trained one."""
    write_conversion(path / "converted")
    run = write_run(path / "trained")
    checkpoint = run / "checkpoints" / "step-000200"
    checkpoint.mkdir(parents=True)
    (run / "best").write_text("checkpoints/step-000200\n")
    rounded = {"kl_nats": 0.2374, "top1_frac": 0.708, "ppl": 54.56, "megabytes": 2.6}
    rounded |= {"bits_per_weight": 3.6, "linear_bits": 2.5}
    exams = {
        "teacher": {"kl_nats": 0.0, "top1_frac": 1.0, "ppl": 49.3, "megabytes": 11.55},
        "converted": rounded,
        "trained": rounded | {"kl_nats": 0.15, "top1_frac": 0.78, "ppl": 51.5} | student,
    }
    texts = {"teacher": " bytes <b>read</b>", "converted": " the the", "trained": " bytes"}
    (path / "eval.json").write_text(json.dumps(exams))
    (path / "samples.json").write_text(json.dumps({"prompt": "Return <i>", "texts": texts}))
    recipe = '[run]\nmodel = "Qwen/Qwen3-0.6B"\ndata = "texts/chats.jsonl"\n'
    (path / "recipe.toml").write_text(recipe)
    return path
