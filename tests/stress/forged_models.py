"""Forged models: every file beside the weights of a checkpoint, a teacher and a run, and settings.

A packed checkpoint whose damage is not in its hashes must be refused, or give what it always gave.
Where no hash speaks for the files, or the hashes were made anew to fit them, another model may come
of them: what is asked there is one line or a model, in time, and that no code runs.
"""

import copy
import json
import random
import shutil
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import tomli_w
from cyclopts import CycloptsError
from fuzzing import Forged
from kill_case import build, byte_tokenizer, make_student, tiny_model
from measure_mutations import COURSE, digest, read_recipe, read_run
from mutants import Files, at, mutate, walk
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, PreTrainedModel

from qat.bench.sweep.plan import make_groups, read_sweep
from qat.cli.parser import mistake
from qat.convert.config import ConvertConfig, read_plan
from qat.data.text import render, tokenizer_hash
from qat.errors import ConfigError
from qat.extensions.lab.quality.plan import read_quality
from qat.extensions.lab.quality.prepare import resolve as resolve_quality
from qat.models.checkpoint import load_skeleton
from qat.models.directory import CHECKSUMS, write_checksums
from qat.models.load import load_config, load_model, load_tokenizer, model_identity
from qat.models.opening import Opening
from qat.models.stored_state import quantized_modules
from qat.train import start
from qat.train.config import TrainConfig

DEEP = "[" * 5000 + "]" * 5000
NUMBERS = (*(0, -1, 1, 2, 3, 7, 2**31, 2**63, 10**30, 1e-300, 1e308, 0.5), float("nan"), 1e400)
WORDS = ("", "x", "../../sentinel/secret", "/etc/passwd", "a\0b", "\x1b[31m[bold]", "\ud800", "{}")
WORDS = (*WORDS, "org/kernel", "flash_attention_2", "qat", "llama", "gpt2", "bert", "t5", "mamba")
WORDS = (
    *WORDS,
    "float8_e4m3fn",
    "float64",
    "int4",
    "relu",
    "linear",
    "yarn",
    "\u202e\uff0e\uff0e/x",
)
OTHERS = (None, True, False, [], {}, [[]], {"": {}}, [None], {"a": [1, {"b": None}]}, ["x"] * 50)
ATTENTION = ("attn_implementation", "_attn_implementation", "experts_implementation")
KEYS = (
    *(*ATTENTION, "auto_map", "transformers_weights", "quantization_config", "architectures"),
    *("model_type", "rope_parameters", "rope_scaling", "sliding_window", "layer_types", "dtype"),
    *("tie_word_embeddings", "head_dim", "num_key_value_heads", "pad_token_id", "is_decoder"),
    *("tp_plan", "id2label", "num_labels", "problem_type", "text_config", "output_attentions"),
    *("tokenizer_class", "tokenizer_file", "vocab_file", "added_tokens_decoder", "chat_template"),
    *("extra_special_tokens", "model_max_length", "fast_tokenizer_files", "init_inputs", "nsa"),
    *("add_bos_token", "eos_token", "cache_implementation", "max_new_tokens", "temperature"),
)
TEMPLATES = (
    *(
        "{% for m in messages %}",
        "{{ messages",
        "{% endfor %}",
        "{{ 1 / 0 }}",
        "{{ messages.x.y }}",
    ),
    *("{{ raise_exception('no') }}", "{{ messages[99].content }}", "{{ none.x }}", "{% bad %}"),
    *("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "{{ [].pop() }}", "{{ 'a' + 1 }}"),
    "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}",
    "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    *("{{ 7 ** (10 ** 9) }}", "{{ 'x' * 10 ** 11 }}", "{{ '%099999999999d' % 1 }}"),
    *(
        "{{ range(99999999) | list }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages | tojson(10**9) }}",
    ),
    *("{% include 'config.json' %}", "{% import 'x' as y %}", "{% extends '/etc/passwd' %}"),
    *(
        "{{ strftime_now(1) }}",
        "{{ strftime_now('%' * 99999) }}",
        "\x1b]0;x\x07",
        "",
        "{{ messages }}",
    ),
)
INDEXES = (
    "../sentinel/secret",
    "/etc/passwd",
    "",
    "..",
    "model.safetensors/../../x",
    "a\0b",
    3,
    None,
)
CHAT = [{"role": "user", "content": "hi [x]"}, {"role": "assistant", "content": "so"}]
QUALITY = """
name = "tiny"
teacher = "teacher"
max_steps = 4
batch_size = 2
sequence_length = 32
seeds = [0, 1]
[texts]
distil = "text.txt"
report = { held_out = "held_out" }
[cache]
top_k = 4
[convert]
to = "q2a4"
[train]
warmup_steps = 1
[[recipes]]
name = "a"
stages = [{ mlp_only = true, max_steps = 2 }, { attention_only = true }]
[[recipes]]
name = "b"
method = "rtn"
seeds = [1]
"""
SWEEP = """
name = "s"
student = "tiny"
repeats = 2
[settings]
steps = 4
[[groups]]
name = "a"
settings = { gradient_checkpointing = true }
[product]
batch_size = [2, 4]
[tiny]
repeats = 1
"""
PLAN = """
name = "mixed"
[[rules]]
pattern = "mlp"
spec = { bits = 2, group_size = 16 }
[[rules]]
pattern = "self_attn"
spec = { bits = 4, scale = "low_rank", rank = 2 }
"""


class Subject(NamedTuple):
    """A directory, the files in it that are forged, and who reads it."""

    root: Path
    files: Files
    readers: dict[str, Callable[[Path], str]]
    has_hashes: bool
    """Whether what reads other than before was believed against its hashes."""


@contextmanager
def opened(work: Path) -> Iterator[Callable[[int], Forged]]:
    """Models, a run and files of settings, one of which each case forges."""
    subjects = make_subjects(work)
    sound = {
        (name, reader): {read(subject.root)}
        for name, subject in subjects.items()
        for reader, read in subject.readers.items()
    }
    sound["run", "run"] |= older_checkpoints(subjects["run"])

    def case_of(seed: int) -> Forged:
        rng = random.Random(seed)
        name = rng.choice(sorted(subjects))
        subject = subjects[name]
        reader = rng.choice(sorted(subject.readers))
        how, files = forged(rng, seed, subject.files)

        def act() -> str:
            for path, data in files.items():
                (subject.root / path).write_bytes(data)
            if name == "sealed":
                write_checksums(subject.root)
            try:
                found = subject.readers[reader](subject.root)
            finally:
                restore(subject)
            if found in sound[name, reader]:
                return "read as ever"
            if subject.has_hashes:
                return f"WRONG: {how} of {', '.join(files)} was believed by {reader}: {found[:90]}"
            return "read as another, which no hash denies"

        return Forged(f"{name} {reader}", act)

    yield case_of


def make_subjects(work: Path) -> dict[str, Subject]:
    """All of them, sound."""
    text = work / "text.txt"
    text.write_text("\n".join(f"line {i} of {i * i} says {'so ' * (i % 7)}" for i in range(60)))
    build(work / "cache", text=text)
    make_student(work / "packed", width=16, layers=1)
    add_template(work / "packed")
    write_checksums(work / "packed")
    for name in ("sealed", "bare"):
        shutil.copytree(work / "packed", work / name)
    (work / "bare" / CHECKSUMS).unlink()
    tiny_model(16, 1).save_pretrained(work / "teacher")
    byte_tokenizer().save_pretrained(work / "teacher")
    add_template(work / "teacher")
    config = TrainConfig(cache_dir=work / "cache", **COURSE)
    start.train_student(config, str(work / "packed"), work / "run", resume=False)
    values = tomllib.loads((work / "run" / "recipe.toml").read_text())["train"]
    del values["student"]
    texts = {"recipe": tomli_w.dumps({"train": values}), "quality": QUALITY}
    for name, words in {**texts, "sweep": SWEEP, "plan": PLAN}.items():
        (work / name).mkdir()
        (work / name / "recipe.toml").write_text(words)
    models = {
        "model": read_model,
        "transformers": read_by_transformers,
        "tokenizer": lambda root: tokenizer_hash(load_tokenizer(str(root))),
        "config": lambda root: load_config(str(root)).model_type + model_identity(str(root)),
        "chat": read_chat,
    }
    packed = {**models, "skeleton": lambda root: f"{len(quantized_modules(load_skeleton(root)))}"}
    del packed["config"]  # whose identity is every byte's
    teacher = {name: read for name, read in models.items() if name != "transformers"}
    whole = {"run": partial(read_run, config, str(work / "packed"))}
    quality = {"quality": partial(read_quality_plans, teacher=work / "teacher", text=text)}
    return {
        "packed": subject(work / "packed", packed, has_hashes=True),
        "sealed": subject(work / "sealed", packed, has_hashes=False),
        "bare": subject(work / "bare", packed, has_hashes=False),
        "teacher": subject(work / "teacher", teacher, has_hashes=False),
        "run": subject(work / "run", whole, has_hashes=True),
        "recipe": subject(work / "recipe", {"recipe": read_settings}, has_hashes=False),
        "quality": subject(work / "quality", quality, has_hashes=False),
        "sweep": subject(work / "sweep", {"sweep": read_groups}, has_hashes=False),
        "plan": subject(work / "plan", {"plan": read_rules}, has_hashes=False),
    }


def older_checkpoints(run: Subject) -> set[str]:
    """What a run whose newest checkpoint is damaged goes on from."""
    found = set()
    for checkpoint in sorted((run.root / "checkpoints").iterdir()):
        (run.root / "latest").write_text(f"checkpoints/{checkpoint.name}\n")
        found.add(run.readers["run"](run.root))
    restore(run)
    return found


def add_template(model: Path) -> None:
    """A chat template of its own."""
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|end|>{% endfor %}"
    )


def subject(root: Path, readers: dict[str, Callable[[Path], str]], *, has_hashes: bool) -> Subject:
    """All that is read of a directory, as it is now."""
    ends = {".json", ".toml", ".jinja", ".safetensors", ".jsonl", ""}
    paths = [path for path in sorted(root.rglob("*")) if path.is_file() and path.suffix in ends]
    files = {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}
    return Subject(root, files, readers, has_hashes)


def restore(subject: Subject) -> None:
    """Make every file sound again, and take away what is no part of it."""
    for name, data in subject.files.items():
        path = subject.root / name
        if not path.is_file() or path.read_bytes() != data:
            path.write_bytes(data)
    for path in subject.root.rglob("*"):
        is_own = path.relative_to(subject.root).as_posix() in subject.files
        if path.is_file() and not is_own and path.name in ADDED:
            path.unlink()


def forged(rng: random.Random, seed: int, files: Files) -> tuple[str, Files]:
    """What was done, and the files that it was done to."""
    tables = sorted(name for name in files if name.endswith((".json", ".toml")))
    kinds = ["mutant", "value", "value", "key", "key"]
    kinds += ["template", "added"] if "tokenizer.json" in files else []
    kind = rng.choice(kinds)
    name = rng.choice(tables)
    if kind == "mutant":
        return kind, mutate(
            {each: files[each] for each in [*tables, *files][: len(files)]}, seed
        ).files
    if kind == "template":
        text = rng.choice(TEMPLATES)
        return kind, {"chat_template.jinja": text.encode("utf-8", "surrogatepass")}
    if kind == "added":
        return kind, added(rng)
    return kind, {name: edited(rng, name, files[name], kind)}


def edited(rng: random.Random, name: str, data: bytes, kind: str) -> bytes:
    """A table with one to three values, or keys, of somebody's choice."""
    is_toml = name.endswith(".toml")
    values = tomllib.loads(data.decode()) if is_toml else json.loads(data)
    for _ in range(rng.randint(1, 3)):
        places = walk(values)
        if not places:
            break
        place = rng.choice(places)
        owner, key = at(values, place[:-1]), place[-1]
        if kind == "value":
            owner[key] = anything(rng, owner[key])
        elif isinstance(owner, dict):
            owner[rng.choice((*KEYS, *map(str, owner)))] = anything(rng, owner[key])
    try:
        text = tomli_w.dumps(values) if is_toml else json.dumps(values)
    except (TypeError, ValueError):  # what TOML cannot hold
        text = f"[[[{values!r}"
    if rng.random() < 0.03:
        text = rng.choice((DEEP, "", "[]", "null", "NaN", '"x"', "\ufeff" + text, text + text))
    return text.encode("utf-8", "surrogatepass")


def anything(rng: random.Random, old: object) -> object:
    """What takes the place of a value; often of its own type."""
    if isinstance(old, bool):
        return rng.choice((not old, None, 1, "true"))
    if isinstance(old, int | float) and rng.random() < 0.7:
        return rng.choice((*NUMBERS, old + 1, old * 2, -old, old / 2, str(old)))
    return copy.deepcopy(rng.choice((*NUMBERS, *WORDS, *OTHERS, [old], {"x": old})))


ADDED = (
    *("model.safetensors.index.json", "adapter_config.json", "adapter_model.safetensors"),
    *("special_tokens_map.json", "added_tokens.json", "preprocessor_config.json", "vocab.json"),
    *("processor_config.json", "tokenizer.model", "merges.txt", "pytorch_model.bin", "own.py"),
)


def added(rng: random.Random) -> Files:
    """A file that was not there."""
    name = rng.choice(ADDED)
    weight = {"lm_head.weight": rng.choice(INDEXES), "model.norm.weight": "model.safetensors"}
    contents = (
        json.dumps({"metadata": {}, "weight_map": weight}),
        json.dumps({"base_model_name_or_path": "../sentinel", "peft_type": "LORA"}),
        json.dumps({rng.choice(KEYS): anything(rng, "x")}),
        *("[]", "", DEEP, "import os; os.mkdir('ran')", "\x80\x04."),
    )
    return {name: rng.choice(contents).encode("utf-8", "surrogatepass")}


def read_model(root: Path) -> str:
    """What the command opens."""
    return told(load_model(str(root), device="cpu", dtype="fp32").model)


def read_by_transformers(root: Path) -> str:
    """What `import qat` and transformers open."""
    try:
        model = AutoModelForCausalLM.from_pretrained(root, dtype="float32")
    except Exception as error:
        # whoever calls transformers sees its own errors; ours are judged
        Opening(root, "a model").__exit__(type(error), error, error.__traceback__)
        raise
    return told(model)


def told(model: PreTrainedModel) -> str:
    """A hash of a model."""
    settings = json.dumps(model.config.to_dict(), sort_keys=True, default=str)
    also = json.dumps(model.generation_config.to_dict(), sort_keys=True, default=str)
    return digest([*model.state_dict().values()], settings.replace(model.name_or_path, ""), also)


def read_chat(root: Path) -> str:
    """A chat as the model's template renders it."""
    tokenizer = load_tokenizer(str(root))
    return repr(render(CHAT, tokenizer, "false", "assistant"))


def read_settings(root: Path) -> str:
    """What the command line takes from a recipe."""
    try:
        return read_recipe(root)
    except CycloptsError as error:  # which the command line puts into a line
        raise ConfigError(mistake(["train"], error)) from error
    except ValidationError:  # a command line takes `true` for a text where one is meant
        return "as a text"


def read_quality_plans(root: Path, *, teacher: Path, text: Path) -> str:
    """The plans of a comparison of recipes."""
    path = root / "recipe.toml"
    words = path.read_bytes().replace(b'"teacher"', f'"{teacher}"'.encode())
    path.write_bytes(words.replace(b'"text.txt"', f'"{text}"'.encode()))
    return repr(resolve_quality(read_quality(path)))


def read_groups(root: Path) -> str:
    """The groups of a sweep."""
    return repr(make_groups(read_sweep(root / "recipe.toml", tiny=True)))


def read_rules(root: Path) -> str:
    """A plan as `qat convert` reads it."""
    return repr(read_plan(ConvertConfig(to=str(root / "recipe.toml"))))
