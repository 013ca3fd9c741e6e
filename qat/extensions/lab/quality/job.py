"""One job: a recipe and a seed, from the converted student to rows of results.

`python -m qat.extensions.lab.quality.job JOB.json` runs one in its own process, which ends when its
standard input closes, so that no job outlives its parent. Students train through the functions of
`qat train`, and all students are evaluated on the same texts and samples.
"""

import logging
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qat.backend.device import seeded, select
from qat.convert.calibrate import TokenBatch
from qat.convert.calibration_data import calibration_batches
from qat.convert.checkpoint import convert_checkpoint
from qat.data import packing
from qat.data.config import chosen_targets
from qat.data.packing import Batch
from qat.data.reader import TeacherCache
from qat.data.sources import open_source
from qat.data.text import encode, end_token, render, special_tokens
from qat.errors import DataError
from qat.evaluate.divergence import divergence_by_source, exact_divergence
from qat.evaluate.judge import split_batches
from qat.evaluate.text import without_teacher
from qat.extensions.bench.results import IN_EVERY_ROW, environment
from qat.extensions.decode.rollout import OwnRow, laid_in, prompt_of
from qat.extensions.lab.baselines.methods import train_baseline
from qat.extensions.lab.jobs import run_as_process
from qat.extensions.lab.quality.conversion import shipping_of
from qat.extensions.lab.quality.plan import (
    HELD_OUT,
    OURS,
    QualityJob,
    QualityRecipe,
    baseline_settings,
    cache_config,
    cache_dir,
    convert_config,
    student_dir,
    train_config,
)
from qat.generate.text import (
    closing_tokens,
    continue_rows,
    distinct_frac,
    encode_prompt,
    generation_config,
    repeated_frac,
)
from qat.logs import HEARTBEAT, read_json_lines
from qat.models.cost import linear_bits, parameter_count, tensor_bytes, whole_model_bits
from qat.models.language_model import LanguageModel
from qat.models.load import load_model, load_teacher, load_tokenizer
from qat.models.stored_state import packed_state_dict
from qat.nn.step import form_weights
from qat.nn.swap import linear_names
from qat.train.run import MANIFEST, STATE
from qat.train.saver import STATE_TENSORS
from qat.train.start import train_student

MB = 1e6
BATCH = 32  # sequences per batch of an evaluation
NUM_PROMPTS, PROMPT_TOKENS = 8, 8
SAMPLE_SEED = 0

Numbers = dict[str, float | int | None]
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trained:
    """A student with its size and training cost."""

    model: LanguageModel  # the float32 model, ready for evaluation
    linear_bits: float  # bits per weight of the quantized linears, everything counted
    megabytes: float  # size of the whole model as stored
    bits_per_weight: float  # bits per weight over all weights: that size
    steps: int = 0
    tokens: int = 0  # positions that it was trained on
    seconds: float = 0.0  # time of the training loop without compilation, evaluation and saving
    peak_gib: float | None = None


def run_job(job: QualityJob) -> None:
    """Train, evaluate, and write the rows to the job's file; an interrupted job is resumed."""
    recipe = job.recipe
    is_ours = job.plan is not None and job.plan.method == OURS
    # before the teacher is loaded, which would count towards the peak memory
    trained = train_ours(job) if is_ours else None
    teacher = load_teacher(recipe.teacher, device=job.device, dtype="fp32")
    if trained is None:
        is_teacher = job.plan is None
        trained = as_teacher(teacher) if is_teacher else train_baseline_student(job, teacher)
    cache = TeacherCache.open(cache_dir(job.out, recipe.cache))
    found = judge(trained.model, teacher, recipe, cache)
    job.finish([_row(job, trained, text, numbers) for text, numbers in found.items()])
    # optimizer states are many times the student, and only needed to resume a run
    for checkpoint in job.directory.glob("stage*/checkpoints/step-*"):
        for name in (STATE, STATE_TENSORS, MANIFEST):
            (checkpoint / name).unlink(missing_ok=True)
        with suppress(OSError):  # it is missing, or holds files that are not ours
            (checkpoint / STATE).parent.rmdir()


def as_teacher(teacher: LanguageModel) -> Trained:
    """Return the teacher as its own student; linears count in the dtype they are stored in."""
    model = teacher.model
    state = packed_state_dict(model)
    weights = [state[f"{name}.weight"] for name in linear_names(model)]
    num_bytes = sum(weight.numel() * weight.element_size() for weight in weights)
    linear_bits = 8 * num_bytes / sum(weight.numel() for weight in weights)
    return Trained(teacher, linear_bits, tensor_bytes(model) / MB, whole_model_bits(model))


def train_ours(job: QualityJob) -> Trained:
    """Convert and train through all stages; each stage has its own run directory."""
    plan = job.plan
    cache = cache_dir(job.out, plan.cache)
    student = str(student_dir(job.out, plan.convert, plan.cache))
    sequences, times, peaks = 0, [], []
    for number, stage in enumerate(plan.stages, 1):
        if stage.convert is not None:
            converted = job.directory / f"student{number}"
            if not converted.exists():
                settings = convert_config(stage.convert, cache, job.device)
                convert_checkpoint(student, settings, converted, shipping_of(stage.convert))
            student = str(converted)
        run = job.directory / f"stage{number}"
        config = train_config(stage, cache, job.seed, job.device)
        trained = train_student(config, student, run, resume=True, begins_anew=True)
        student = str(trained.final)
        seconds, peak_gib = heartbeat_facts(run, stage.steps)
        sequences += config.sequences_per_step * stage.steps
        times.append(seconds)
        peaks += [] if peak_gib is None else [peak_gib]
    model = load_model(student, device=job.device, dtype="fp32")
    form_weights(model.model, torch.float32)
    return Trained(
        model=model,
        linear_bits=linear_bits(model.model),
        megabytes=tensor_bytes(model.model) / MB,
        bits_per_weight=whole_model_bits(model.model),
        steps=plan.steps,
        tokens=job.recipe.sequence_length * sequences,
        seconds=sum(times),
        peak_gib=max(peaks, default=None),
    )


def heartbeat_facts(run: Path, steps: int) -> tuple[float, float | None]:
    """Return the seconds that `steps` steps of a run take, and its peak in GiB.

    Seconds are the steps times the median over the lines of the heartbeat. The first line, which
    includes compilation, is left out if there are others. A resumed run compiles again, which the
    median ignores.
    """
    lines = read_json_lines(run / HEARTBEAT)
    later = lines[1:] or lines
    peaks = [line["peak_gib"] for line in lines if line["peak_gib"] is not None]
    return steps * statistics.median(line["step_s"] for line in later), max(peaks, default=None)


def train_baseline_student(job: QualityJob, teacher: LanguageModel) -> Trained:
    """Train by another method; its size is the teacher's with linears of the method's bits."""
    plan, cache = job.plan, cache_dir(job.out, job.plan.cache)
    tokenizer = load_tokenizer(job.recipe.teacher)
    settings = baseline_settings(plan, job.seed, job.device)
    found = train_baseline(
        plan.method,
        teacher,
        tokenizer,
        TeacherCache.open(cache),
        settings=settings,
        calibration=_calibration(job, cache, teacher, tokenizer),
    )
    model = teacher.model
    num_weights = sum(model.get_submodule(name).weight.numel() for name in linear_names(model))
    share = num_weights / parameter_count(model)
    rest = tensor_bytes(model) * (1 - share)
    return Trained(
        model=found.model,
        linear_bits=found.linear_bits,
        megabytes=(rest + num_weights * found.linear_bits / 8) / MB,
        bits_per_weight=whole_model_bits(model) * (1 - share) + share * found.linear_bits,
        steps=found.steps,
        tokens=found.steps * settings.batch_size * job.recipe.sequence_length,
        seconds=found.seconds if found.steps else 0.0,  # rounding is not training
        peak_gib=found.peak_gib,
    )


def _calibration(
    job: QualityJob, cache: Path, teacher: LanguageModel, tokenizer: PreTrainedTokenizerBase
) -> list[TokenBatch]:
    """Return the default calibration batches of conversions, for baselines that calibrate."""
    given = job.recipe.convert.items()
    table = {key: value for key, value in given if key.startswith("calibration")}
    if job.recipe.texts.calibration is not None:
        table = {"calibration": job.recipe.texts.calibration, **table}
    config = convert_config({"to": "q4a4", **table}, cache, job.device)
    if config.calibration is None:
        return []
    return calibration_batches(config.calibration, config, teacher, tokenizer)


def judge(
    student: LanguageModel, teacher: LanguageModel, recipe: QualityRecipe, cache: TeacherCache
) -> dict[str, Numbers]:
    """Return numbers by evaluation text; KD on the held-out split and samples are the same for all.

    Both models should compute in float32, with quantized weights formed.

    Raises:
        DataError, CacheError: a text cannot be read or is empty.
        ConfigError: a prompt has no tokens.
    """
    tokenizer = load_tokenizer(recipe.teacher)
    texts = {
        name: _batches(recipe, text, cache, tokenizer) for name, text in recipe.texts.report.items()
    }
    prompts = _prompts(recipe, next(iter(texts.values())), tokenizer)
    held_out = split_batches(cache, "held_out", BATCH, recipe.kd_sequences)
    common: Numbers = {"kd_nats": divergence_by_source(student, held_out)[0].kd_nats}
    rows: list[OwnRow] = []
    ends = closing_tokens(student, tokenizer.eos_token_id)
    config = generation_config(ends, recipe.generate_tokens, temperature=1.0, top_p=0.95)
    with seeded(SAMPLE_SEED):
        for group in prompts:
            prompts_BN = group.repeat_interleave(recipe.generate_samples, 0)
            samples = continue_rows(student, prompts_BN, config)
            pairs = zip(prompts_BN.tolist(), samples, strict=True)
            rows += [OwnRow([*prompt, *ids], len(prompt)) for prompt, ids in pairs]
    written = [row.ids[row.begin :] for row in rows]
    common |= {
        "kl_own_nats": exact_divergence(student, teacher, own_batches(rows)).kl_nats,
        "repeated_frac": statistics.fmean(map(repeated_frac, written)),
        "distinct_frac": statistics.fmean(map(distinct_frac, written)),
        "sample_tokens": statistics.fmean(map(len, written)),
    }
    return {
        name: {**exact_divergence(student, teacher, text)._asdict(), **common}
        for name, text in texts.items()
    }


def own_batches(rows: Sequence[OwnRow]) -> Iterator[Batch]:
    """Yield a student's samples as evaluation batches: generated tokens count, prompts do not."""
    S = max(len(row.ids) for row in rows)
    for start in range(0, len(rows), BATCH):
        some = rows[start : start + BATCH]
        nothing = torch.zeros(len(some), S, dtype=torch.int64)
        blank = without_teacher(nothing, nothing.clone(), nothing.bool(), nothing.clone())
        yield laid_in(blank, some)


def _batches(
    recipe: QualityRecipe, text: str, cache: TeacherCache, tokenizer: PreTrainedTokenizerBase
) -> list[Batch]:
    """Return the batches of a text, packed as in a cache; of the cache's own split, with targets.

    Raises:
        DataError: the text holds none.
    """
    if text == HELD_OUT:
        found = split_batches(cache, "held_out", BATCH, recipe.report_sequences)
        return [*chain.from_iterable(found.values())]
    config, source = cache_config(recipe, recipe.cache), open_source(text)
    plain = source.format == "plain"
    thinking = config.thinking if tokenizer.chat_template else "none"
    targets = "all" if plain else chosen_targets(config.targets, source.format, text)
    packer = packing.Packer(recipe.sequence_length, end_token(tokenizer), special_tokens(tokenizer))
    for document in source.documents:
        for ids, is_target in encode(render(document, tokenizer, thinking, targets), tokenizer):
            packer.push(ids, is_target)
        if packer.num_full >= recipe.report_sequences:
            break
    packer.finish()
    if packer.num_full == 0:
        raise DataError("the text holds no token to judge by; expected some; name another text")
    packed = packer.take(min(recipe.report_sequences, packer.num_full))
    tokens, starts, mask = (
        torch.from_numpy(array).split(BATCH)
        for array in (packed.tokens.astype("int64"), packed.starts, packed.mask)
    )
    return [
        without_teacher(
            ids, packing.position_ids(begins), counts, packing.labels(ids, begins, counts)
        )
        for ids, begins, counts in zip(tokens, starts, mask, strict=True)
    ]


def _prompts(
    recipe: QualityRecipe, batches: list[Batch], tokenizer: PreTrainedTokenizerBase
) -> list[Tensor]:
    """Return the prompts of samples, those of equal length N together `(B, N)`.

    They are the given ones, those of a text's chats, or beginnings of its sequences.
    """
    if recipe.generate_chats:
        most = max(1, recipe.sequence_length - recipe.generate_tokens)
        rows = (Batch(*row) for batch in batches for row in zip(*batch, strict=True))
        chats = enumerate(islice(rows, recipe.generate_chats))
        prompts = [torch.tensor([prompt_of(row, number, most)]) for number, row in chats]
    elif recipe.generate_prompts:
        prompts = [encode_prompt(tokenizer, text, raw=True) for text in recipe.generate_prompts]
    else:
        return [batches[0].input_ids[:NUM_PROMPTS, :PROMPT_TOKENS]]
    by_length = defaultdict(list)
    for ids in prompts:
        by_length[ids.shape[1]].append(ids)
    return [torch.cat(group) for _, group in sorted(by_length.items())]


def _row(job: QualityJob, trained: Trained, text: str, numbers: Numbers) -> dict[str, object]:
    plan = job.plan
    facts = environment(select(job.device), job.recipe)
    return {
        "kind": "quality",
        "name": job.recipe.name,
        "recipe": job.name,
        "method": "teacher" if plan is None else plan.method,
        "seed": job.seed,
        "text": text,
        "teacher": job.recipe.teacher,
        "distil": job.recipe.texts.distil,
        "sequence_length": job.recipe.sequence_length,
        **numbers,
        "bits_per_weight": trained.bits_per_weight,
        "linear_bits": trained.linear_bits,
        "megabytes": trained.megabytes,
        "steps": trained.steps,
        "tokens": trained.tokens,
        "seconds": trained.seconds,
        "peak_gib": trained.peak_gib,
        "workers": job.workers,
        "key": job.key,
        "settings": None if plan is None else plan.model_dump(mode="json"),
        **{name: facts[name] for name in (*IN_EVERY_ROW, "transformers", "time")},
    }


def main(job: QualityJob) -> None:
    """Run a job in its own process, with its share of the cores."""
    torch.set_num_threads(job.threads)
    logger.info("%s seed %d on %s", job.name, job.seed, select(job.device).name())
    run_job(job)


if __name__ == "__main__":
    run_as_process(QualityJob, main)
