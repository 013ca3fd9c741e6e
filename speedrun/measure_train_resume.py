"""Kills `qat train` with SIGKILL at random steps, again and again; the finished run must not show.

python speedrun/measure_train_resume.py --kills 20 --figures FILE.jsonl
"""

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from figures import record
from measure_cache_resume import VOCAB, build, byte_tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from qat.logs import read_json_lines
from qat.models.checkpoint import save_checkpoint
from qat.models.language_model import LanguageModel
from qat.models.quantize import quantize_model
from qat.quant.spec import PRESETS

STEPS = 60
KILLS_PER_RUN = 4
FLAGS = f"""--max-steps {STEPS} --batch-size 4 --save-every 7 --eval-every 15 --eval-sequences 8
    --log-every 1 --warmup-steps 5 --learn weights,scales,codebook,norms --device cpu"""


def main() -> None:
    """Kill as often as asked, compare, and record how many kills left no trace."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--figures", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        build(place / "cache")
        make_student(place / "student")
        equal = kill_and_compare(place, arguments.kills, random.Random(arguments.seed))
    print(f"{equal} of {arguments.kills} kills ended byte-equal")
    if arguments.figures:
        goal = ">= 20, all byte-equal"
        record(arguments.figures, "train_resume_kills", equal, "kills", goal)
    raise SystemExit(equal != arguments.kills)


def make_student(out: Path) -> None:
    """A random model of two layers over bytes, at two and four bits."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
    )
    model = Qwen3ForCausalLM(config).eval()
    quantize_model(LanguageModel(model), PRESETS["q2a4"])
    save_checkpoint(model, byte_tokenizer(), out)


def kill_and_compare(place: Path, kills: int, rng: random.Random) -> int:
    """How many of `kills` kills lie in runs that end in the bytes of an unbroken one."""
    train(place, place / "whole", None, 0.0)
    equal = done = 0
    while done < kills:
        out, count = place / f"killed-{done}", min(KILLS_PER_RUN, kills - done)
        for target in sorted(rng.sample(range(STEPS), count)):
            delay_s = rng.uniform(0.0, 0.1)
            while not train(place, out, target, delay_s):
                print("it ended before the signal: not a kill")
                out = out.with_name(f"{out.name}x")
            print(f"killed at step {last_step(out)}, after the wish for {target}")
        train(place, out, None, 0.0)
        is_equal = contents(out) == contents(place / "whole")
        print(f"{count} kills in {out.name}, byte-equal: {is_equal}")
        equal, done = equal + count * is_equal, done + count
    return equal


def train(place: Path, out: Path, kill_at_step: int | None, delay_s: float) -> bool:
    """Begin or resume the run; whether it was killed, `delay_s` after it logged that step."""
    command = [sys.executable, "-m", "qat", "train", str(place / "student"), "--resume"]
    command += ["--cache-dir", str(place / "cache"), "--out", str(out), *FLAGS.split()]
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(command, stdout=log, stderr=log)
        if kill_at_step is not None:
            while child.poll() is None and not has_reached(out, kill_at_step):
                time.sleep(0.002)
            time.sleep(delay_s)
            child.kill()
        status = child.wait()
        if status not in (0, -signal.SIGKILL):
            log.seek(0)
            raise RuntimeError(f"the run in {out} failed: {log.read().decode()}")
    return status == -signal.SIGKILL


def has_reached(out: Path, step: int) -> bool:
    """Whether the run has logged `step`; step 0 is the first judgement, before any checkpoint."""
    return (out / "metrics.jsonl").exists() and last_step(out) >= step


def last_step(out: Path) -> int:
    """The last step in the metrics, -1 where there is none."""
    return max((line["step"] for line in read_json_lines(out / "metrics.jsonl")), default=-1)


def contents(out: Path) -> dict[str, bytes]:
    """The metrics, the pointers, and the final model, by name."""
    names = ("metrics.jsonl", "latest", "best")
    (final,) = (path for path in out.glob("q*_fp32") if path.is_dir())
    files = [*(out / name for name in names), final / "model.safetensors"]
    return {str(path.relative_to(out)): path.read_bytes() for path in files}


if __name__ == "__main__":
    main()
