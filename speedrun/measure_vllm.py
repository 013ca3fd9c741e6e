"""Counts how many greedy tokens vLLM's engine says as `qat generate` does, of every preset.

In an environment that has vLLM's build for CPUs and `qat`, as `bash .ci/vllm` makes one:

    .venv-vllm/bin/python -m pip install scikit-learn
    .venv-vllm/bin/python speedrun/measure_vllm.py MODEL TEXT --group-size N --figures FILE.jsonl

The float MODEL is converted to each preset, and to one of them with rounded inputs and caches. The
engine opens the packed checkpoint in float32 and continues all prompts at once by 32 tokens,
whatever they are: the first tokens of documents of TEXT, a file, on which the conversions are
calibrated too. Over what the engine wrote it is counted at how many places its token is the one
that our model, which reads it at once, thinks the likeliest; and at how many our own likeliest
stays the same when every norm of our model gives each value off by one unit in the last place.

Of presets, whose inputs are not rounded, our own decoding continues the prompts too, one by one.
Where a prompt's tokens differ, the lead of our logit of our token over that of the engine's is held
against what it moves by when norms are put off: a lead below that is within rounding, and below 0
our model itself prefers the engine's token when it does not read one at a time.
"""

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from cyclopts import App
from figures import record
from speed_case import Row, show
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from qat.convert.checkpoint import convert_checkpoint
from qat.convert.config import ConvertConfig
from qat.convert.convert import check_conversion
from qat.data.sources import open_source
from qat.data.text import text_ids
from qat.errors import CheckpointError, ConfigError
from qat.export.parts import logits_of
from qat.generate.text import continue_rows, open_generator
from qat.models.language_model import LanguageModel
from qat.models.load import load_model, load_tokenizer
from qat.models.noise import hooked, signs
from qat.quant.spec import PRESETS

app = App(help=__doc__)
EPS = torch.finfo(torch.float32).eps
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    # threads that are bound would all be bound to the same core
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
SUFFIXES = ("a8", "a8z", "a8s", "f8", "kv8", "kv4", "a8kv8", "f8kv4")
STUDENTS = (*PRESETS, *(f"q2a4_{suffix}" for suffix in SUFFIXES))
WORDS = 32  # tokens that both write after a prompt
CALIBRATION = {"calibration_sequences": 8, "calibration_length": 128}
DRAWS = 32  # times that norms are put off, to see how far a lead moves
COLUMNS = (
    ("Student", "student", "{}"),
    ("served", "served", "{:.40}"),
    ("prompts", "prompts", "{}"),
    ("all tokens equal", "equal", "{}"),
    ("others within rounding", "within", "{}"),
    ("the same likeliest token", "places", "{:.4%}"),
    ("ours, norms off by a unit", "own_places", "{:.4%}"),
)


@app.default
def measure(
    model: str,
    text: Path,
    *,
    to: tuple[str, ...] = STUDENTS,
    group_size: int | None = None,
    prompts: int = 64,
    length: int = 8,
    rows: Path | None = None,
    figures: Path | None = None,
) -> None:
    """Print a table of all students, write its ROWS, and append the figures to FIGURES.

    A preset whose own groups do not divide the rows of MODEL takes GROUP_SIZE.
    """
    torch.set_num_threads(1)
    asked = first_words(text, load_tokenizer(model), prompts, length)
    teacher = load_model(model, device="cpu", dtype="fp32")
    found: list[Row] = []
    for name in to:
        config = settings(name, text, teacher, group_size)
        with tempfile.TemporaryDirectory() as place:
            convert_checkpoint(model, config, Path(place, name))
            row = {"student": name, "group_size": config.group_size, "prompts": prompts}
            found.append(row | compare(Path(place, name), asked, decoded=name in PRESETS))
        print(f"{name} is done", flush=True)
    show(found, columns=COLUMNS)
    if rows is not None:
        rows.write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")
    conclude(found, figures)


def first_words(
    text: Path, tokenizer: PreTrainedTokenizerBase, count: int, length: int
) -> list[list[int]]:
    """The first `length` tokens of documents that have so many, no two alike, `count` of them."""
    documents = (text_ids(document, tokenizer) for document in open_source(str(text)).documents)
    begun = dict.fromkeys(tuple(ids[:length]) for ids in documents if len(ids) >= length)
    if len(begun) < count:
        raise SystemExit(
            f"{text} has {len(begun)} documents that begin in {length} tokens of their own, "
            f"expected {count}; give a longer text or fewer --prompts"
        )
    return [[*ids] for ids in islice(begun, count)]


def settings(
    preset: str, text: Path, model: LanguageModel, group_size: int | None
) -> ConvertConfig:
    """Return the settings to convert `model`; `group_size` is used if the preset's does not fit."""
    config = ConvertConfig(to=preset, calibration=str(text), device="cpu", **CALIBRATION)
    try:
        check_conversion(model, config)
    except ConfigError as error:
        if group_size is None:
            raise SystemExit(f"{preset}: {error}; give --group-size") from None
        config = config.model_copy(update={"group_size": group_size})
    return config


def compare(path: Path, prompts: list[list[int]], *, decoded: bool) -> Row:
    """Return the table row of the student in `path`.

    With `decoded`, our own decoding is compared too, and the places where tokens differ are listed.
    """
    try:
        theirs = their_words(path, prompts)
    except CheckpointError as error:
        return {"served": str(error)}
    model, _ = open_generator(str(path), device="cpu", dtype="fp32")
    places, own = likeliest(model.model, prompts, theirs)
    row = {"served": "yes", "places": places, "own_places": own}
    if not decoded:
        return row
    differ = differences(model.model, prompts, our_words(model, prompts), theirs)
    within = sum(is_rounding(each) for each in differ)
    return row | {"equal": len(prompts) - len(differ), "within": within, "differ": differ}


def engine() -> Any:
    """The module `vllm`, its engine in this process, where it raises what it refuses."""
    os.environ.update(ENVIRONMENT)  # noqa: TID251
    try:
        import vllm
    except ImportError:
        raise SystemExit(
            "vllm is not installed, expected its build for CPUs; run: bash .ci/vllm"
        ) from None
    return vllm


def their_words(path: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens of vLLM's engine, all prompts at once."""
    vllm = engine()
    llm = vllm.LLM(
        model=str(path),
        dtype="float32",
        enforce_eager=True,
        max_model_len=len(prompts[0]) + WORDS,
        disable_log_stats=True,
    )
    try:
        how = vllm.SamplingParams(temperature=0, max_tokens=WORDS, ignore_eos=True)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        said = llm.generate(asked, how, use_tqdm=False)
        return [[*each.outputs[0].token_ids] for each in said]
    finally:
        llm.llm_engine.engine_core.shutdown()


def our_words(model: LanguageModel, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens as `qat generate` decodes them, a prompt at a time."""
    config = GenerationConfig(max_new_tokens=WORDS, do_sample=False)
    return [continue_rows(model, torch.tensor([prompt]), config)[0] for prompt in prompts]


def differences(
    model: PreTrainedModel,
    prompts: Sequence[list[int]],
    ours: Sequence[list[int]],
    theirs: Sequence[list[int]],
) -> list[dict[str, float]]:
    """Return the first differing place of each prompt and how near a tie it is.

    `lead` is our logit of our token less that of theirs, after one forward over the tokens before;
    `moved` is the largest change of `lead` when norms are perturbed.
    """
    found = []
    for index, (prompt, mine, said) in enumerate(zip(prompts, ours, theirs, strict=True)):
        if mine == said:
            continue
        place = next(i for i, (a, b) in enumerate(zip(mine, said, strict=True)) if a != b)
        ids = torch.tensor([prompt + mine[:place]])
        pair = torch.tensor([mine[place], said[place]])
        lead = leads(model, ids, pair).item()
        with hooked(norms(model), off_by(EPS)):
            moved = (leads(model, ids.expand(DRAWS, -1), pair) - lead).abs().max().item()
        found.append({"prompt": index, "place": place, "lead": lead, "moved": moved})
    return found


def is_rounding(difference: dict[str, float]) -> bool:
    """Return whether the rounding of float32 alone may turn our token into theirs."""
    return difference["lead"] <= difference["moved"]


def leads(model: PreTrainedModel, ids: Tensor, pair: Tensor) -> Tensor:
    """The logit of the first of two tokens after each row of `ids` less that of the second."""
    first, second = logits_of(model, ids)[:, -1, pair].double().T
    return first - second


def norms(model: PreTrainedModel) -> list[nn.Module]:
    """The modules that are called norms."""
    return [each for name, each in model.named_modules() if "norm" in name.rpartition(".")[2]]


def off_by(eps: float) -> Callable:
    """A hook that puts each value of a tensor off by `eps` of it, up or down."""
    generator = torch.Generator().manual_seed(0)

    def off(_module: nn.Module, _args: tuple, output: Tensor | tuple) -> Tensor | tuple:
        is_bare = isinstance(output, Tensor)
        return output * (1 + eps * signs(output, generator)) if is_bare else output

    return off


def likeliest(
    model: PreTrainedModel, prompts: list[list[int]], said: list[list[int]]
) -> tuple[float, float]:
    """Return two shares of the places of `said`.

    The first counts places where the token in `said` is our likeliest one, the second those where
    our likeliest token stays the same when norms are perturbed.
    """
    ids = torch.tensor([prompt + words for prompt, words in zip(prompts, said, strict=True)])
    N = len(prompts[0])
    ours = logits_of(model, ids)[:, N - 1 : -1].argmax(-1)
    with hooked(norms(model), off_by(EPS)):
        own = logits_of(model, ids)[:, N - 1 : -1].argmax(-1)
    return share(ours == ids[:, N:]), share(ours == own)


def share(is_so: Tensor) -> float:
    """Return the share of a mask that is true."""
    return is_so.double().mean().item()


def conclude(rows: Sequence[Row], path: Path | None) -> None:
    """Say where presets differ and what is within rounding; say and record the figures."""
    presets = [row for row in rows if row["student"] in PRESETS]
    rounded = [row for row in rows if row["student"] not in PRESETS]
    for row in rows:
        if row["served"] != "yes":
            print(f"{row['student']} is not served: {row['served']}")
    for name, each in ((row["student"], each) for row in presets for each in row.get("differ", ())):
        print(
            f"{name}, prompt {each['prompt']}: another token at place {each['place']}, "
            f"where ours leads by {each['lead']:.2g}; a unit in the last place of our norms moves "
            f"that by up to {each['moved']:.2g}: "
            f"{'within rounding' if is_rounding(each) else 'more than rounding does'}"
        )
    found = []
    if presets:
        equal = sum(row.get("equal", 0) for row in presets) / sum(row["prompts"] for row in presets)
        served = sum(row["served"] == "yes" for row in presets)
        found += [
            ("vllm_cpu_greedy_equal", equal, "fraction", "== 1", len(presets)),
            ("vllm_cpu_formats", served, "presets", f"== {len(PRESETS)}", 1),
        ]
    if rounded:
        least = min(row.get("places", 0.0) for row in rounded)
        found.append(("vllm_cpu_rounded_equal", least, "fraction", "", len(rounded)))
    for name, value, unit, goal, runs in found:
        print(f"{name}: {value:.6g} {unit} (goal {goal or 'none'})")
        record(path, name, round(value, 6), unit, goal, runs=runs)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    app()
