"""Bits per byte of one student that learns from its own teacher, or from one with other tokens.

    qat sample coder.gguf --prompts prompts.jsonl --out answers.jsonl
    python speedrun/records/2026-11-29_vocab/measure_vocab.py WORK --own smollm2.gguf \
        --other coder.gguf --answers answers.jsonl

writes texts, caches, students and what is measured of them into WORK, and goes on where it
stopped. Without `--answers` the text is code of Python's standard library. Arms:

- `own` and `other`: what the student's own teacher says, and what the other one says, realigned.
- `exact`: of the latter only the positions that need no chain rule.
- `both`: the rows of `own` and `other` in one cache, of which a run of as many steps reads a half.
- `gold`: TRL's GOLD, with the other teacher beside the student; it needs trl.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path.insert(0, str(ROOT / "speedrun"))

PIECE = 640  # bytes of a document: whole lines, which fit a row of 256 tokens of either tokenizer
LONGEST = 1300  # bytes of a line with a chat


def pieces(files: list[Path]) -> Iterator[str]:
    """Yield documents of whole lines."""
    for file in files:
        piece = ""
        for line in file.read_text(encoding="utf-8").splitlines(keepends=True):
            if len((piece + line).encode()) > PIECE and piece.strip():
                yield piece
                piece = ""
            piece += line
        if piece.strip():
            yield piece


def write_texts(work: Path, options: argparse.Namespace) -> None:
    """Write documents to learn from and others to judge by: a teacher's answers, or code."""
    if options.answers is None:
        library = Path(sysconfig.get_path("stdlib"))
        parts = {"learned": "[a-m]*.py", "judged": "[n-z]*.py"}
        found = {name: [*pieces(sorted(library.glob(each)))] for name, each in parts.items()}
        rows = {
            name: [json.dumps({"text": each}) for each in texts if len(each.encode()) <= PIECE + 20]
            for name, texts in found.items()
        }
    else:
        lines = options.answers.read_text(encoding="utf-8").splitlines()
        lines = [line for line in lines if len(line.encode()) <= LONGEST]
        random.Random(0).shuffle(lines)
        rows = {"learned": lines[options.judged :], "judged": lines[: options.judged]}
    counts = {"learned": options.documents, "judged": options.judged}
    for name, each in rows.items():
        if options.answers is None:
            random.Random(0).shuffle(each)
        text = "".join(f"{row}\n" for row in each[: counts[name]])
        if not (work / f"{name}.jsonl").exists():
            (work / f"{name}.jsonl").write_text(text, encoding="utf-8")


def once(path: Path, measure: Callable[[], dict]) -> dict:
    """Return the numbers kept in a file, which are measured if it is missing."""
    if not path.exists():
        path.write_text(json.dumps(measure()), encoding="utf-8")
    return json.loads(path.read_text(encoding="utf-8"))


def qat(work: Path, log: str, *words: object) -> dict:
    """Return the numbers of a verb, which are kept in WORK/LOG.json."""

    def run() -> dict:
        call = [sys.executable, "-m", "qat", *map(str, words)]
        done = subprocess.run(call, cwd=work, stdout=subprocess.PIPE, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])

    return once(work / f"{log}.json", run)


def train_gold(work: Path, other: Path, options: argparse.Namespace) -> None:
    """Train the student by TRL's GOLD: the teacher beside it, the same documents once."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl.experimental.gold import GOLDConfig, GOLDTrainer

    import qat as package
    from qat.extensions.integrations.transformers import StudentMixin
    from qat.models.load import load_teacher, load_tokenizer

    class Gold(StudentMixin, GOLDTrainer):
        """GOLD for a student in few bits."""

    (work / "other_tokenizer").mkdir(exist_ok=True)
    load_tokenizer(str(other)).save_pretrained(work / "other_tokenizer")
    student = package.prepare(AutoModelForCausalLM.from_pretrained(work / "start"), None)
    rows = [json.loads(line) for line in (work / "learned.jsonl").read_text().splitlines()]
    if options.answers is not None:  # the contents alone, as in the caches
        rows = [
            {"prompt": question["content"] + "\n\n", "completion": answer["content"]}
            for question, answer in (row["messages"] for row in rows)
        ]
    args = GOLDConfig(
        str(work / "gold_run"),
        use_cpu=True,
        bf16=True,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        max_steps=options.steps,
        per_device_train_batch_size=options.rows,
        max_length=2 * options.row,
        max_completion_length=options.row,  # of texts that the student writes: none
        lmbda=0.0,
        use_uld_loss=True,
        use_extended_uld=True,
        uld_use_hybrid_loss=True,
        teacher_tokenizer_name_or_path=str(work / "other_tokenizer"),
        lr_scheduler_type="cosine",
        warmup_steps=options.steps // 10,
    )
    teacher = load_teacher(str(other), device="cpu", dtype="bf16").model
    trainer = Gold(
        student,
        teacher,
        args,
        train_dataset=Dataset.from_list(rows),
        processing_class=load_tokenizer(str(work / "start")),
        rates={"lr": options.lr},
    )
    trainer.train()
    trainer.save_model(str(work / "gold"))


def exact_positions(work: Path, own: Path) -> dict:
    """Re-align the other teacher's cache without the chain rule: what needs it is dropped."""
    from qat.extensions.vocab import align, realign

    class Exact(align.Aligner):
        """Fills in the positions whose tokens begin together and end with the teacher's."""

        def _chain(self, *_: object) -> None:
            """Leave the position out."""

    realign.Aligner = Exact
    found = realign.realign(work / "coder", work / "exact", tokenizer=str(own))
    return realign.summary(found.counts)


def both_teachers(work: Path) -> dict:
    """Put the rows of `own` and `other` into one cache."""
    from qat.data.cache import MANIFEST, read_manifest, write_atomic
    from qat.data.shard import in_order

    shutil.copytree(work / "own", work / "both")
    manifest, shards = read_manifest(work / "own"), []
    added = read_manifest(work / "other").of_split("train")
    for n, shard in enumerate(added, len(manifest.of_split("train"))):
        shards.append(shard.model_copy(update={"file": f"train-{n:05}.safetensors"}))
        shutil.copy(work / "other" / shard.file, work / "both" / shards[-1].file)
    shards = in_order([*manifest.shards, *shards])
    whole = manifest.model_copy(update={"shards": shards})
    write_atomic(work / "both" / MANIFEST, whole.to_bytes())
    return {"sequences": sum(shard.sequences for shard in shards)}


def arguments() -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--own", type=Path, required=True)
    parser.add_argument("--other", type=Path, required=True)
    parser.add_argument("--arms", default="own,other")
    parser.add_argument("--plan", default="q4a4")
    parser.add_argument("--answers", type=Path)
    parser.add_argument("--documents", type=int, default=40)
    parser.add_argument("--judged", type=int, default=14)
    parser.add_argument("--row", type=int, default=256)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--figures", type=Path)
    parser.add_argument("--label", default="vocab", help="first words of the figures' names")
    return parser.parse_args()


def train(work: Path, arm: str, options: argparse.Namespace) -> str:
    """Train the student of an arm, that of a cache or `gold`; return where it is."""
    if arm == "gold":
        if not (work / "gold").exists():
            train_gold(work, options.other.resolve(), options)
        return "gold"
    words = ["train", "start", "--cache-dir", arm, "--out", f"run_{arm}", "--dtype", "bf16"]
    words += ["--max-steps", options.steps, "--batch-size", options.rows, "--lr", options.lr]
    words += ["--skip-first-eval", "--eval-every", options.steps, "--eval-sequences", 2]
    qat(work, f"train_run_{arm}", *words)
    return f"run_{arm}"


def main() -> None:
    """Measure, and write the figures."""
    options = arguments()
    work, own, other = (path.resolve() for path in (options.work, options.own, options.other))
    work.mkdir(parents=True, exist_ok=True)
    write_texts(work, options)
    text = ("--sequence-length", options.row, "--held-out", 0.1, "--dtype", "bf16")
    # both tokenizers' templates would write other texts
    text += ("--thinking", "none", "--shard-size", 16)
    caches = {}
    for name, teacher in (("own", own), ("coder", other)):
        words = ("cache", "--teacher", teacher, "--data", "learned.jsonl", "--out", name, *text)
        caches[name] = qat(work, f"cache_{name}", *words)
    words = ("cache", "realign", "coder", "--tokenizer", own, "--out", "other")
    caches["other"] = qat(work, "cache_other", *words)
    makers = {"exact": lambda: exact_positions(work, own), "both": lambda: both_teachers(work)}
    for name in {*options.arms.split(",")} & makers.keys():
        caches[name] = once(work / f"cache_{name}.json", makers[name])
    qat(work, "convert", "convert", own, "--to", options.plan, "--out", "start")
    models = {"start": "start", "own_teacher": own, "other_teacher": other}
    models |= {arm: train(work, arm, options) for arm in options.arms.split(",")}
    judge = ("--text", "judged.jsonl", "--context", 2 * options.row, "--stride", options.row)
    judge += ("--thinking", "none", "--dtype", "bf16")
    bits = {
        name: qat(work, f"judged_{name}", "eval", model, *judge)["text_bits_per_byte"]
        for name, model in models.items()
    }
    print(json.dumps({"bits_per_byte": bits, "caches": caches}, indent=1))
    write_figures(options, bits, caches)


def write_figures(
    options: argparse.Namespace, bits: dict[str, float], caches: dict[str, dict]
) -> None:
    """Write what was measured to a record's figures.jsonl."""
    from figures import record

    path, label = options.figures, options.label
    for name, value in bits.items():
        record(path, f"{label}_bits_per_byte_{name}", round(value, 4), "bits", "stated")
    for name in ("chained_frac", "dropped_frac", "split_mass_frac", "lost_mass_frac"):
        record(path, f"{label}_{name}", round(caches["other"][name], 5), "fraction", "stated")
    for name in ("own", "other"):
        counted = caches[name]["counted_tokens"]
        record(path, f"{label}_counted_tokens_{name}", counted, "tokens", "stated")
    for arm in options.arms.split(",")[1:]:
        gain = round(100 * (1 - bits[arm] / bits["own"]), 2)
        record(path, f"{label}_gain_{arm}", gain, "%", "stated")
        if (label, arm) == ("vocab", "other"):
            record(path, "cross_vocab_gain", gain, "%", ">= 3")


if __name__ == "__main__":
    main()
