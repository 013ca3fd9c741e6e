"""Model cards: the README.md of an export or a repository, with the metadata that a hub reads."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from transformers import PreTrainedModel

import qat
from qat.convert.config import REPORT_NAME
from qat.data.sources import is_text_file
from qat.errors import QatError
from qat.export.config import TargetName
from qat.export.model import CARD, damaged, float_base
from qat.export.targets import load_target
from qat.files import parse_json, parse_toml
from qat.hooks import hooks
from qat.hub.registry import read_receipt
from qat.logs import FACTS, METRICS, RECIPE, SUMMARY, read_json_lines
from qat.models.cost import parameter_count
from qat.models.directory import GGUF, resolve
from qat.models.gguf_header import read_metadata
from qat.models.opening import auto_class, read_table
from qat.models.sizes import Sizes
from qat.models.stored_state import quantized_modules
from qat.online import hub_file
from qat.quant.spec import LutSpec

TEMPLATE = Path(__file__).with_suffix(".jinja")
"""The template of every card; others extend it by its blocks."""
MEASURES = {
    "kl_tail_nats": "KL to the teacher, tail included (nats a token)",
    "kd_nats": "distillation loss (nats a token)",
    "top1_frac": "agrees with the teacher's first choice (fraction)",
    "ppl": "perplexity",
}
"""Rows of the model card, by key of the metrics."""
LARGEST = "largest difference of a logit from the checkpoint"
LIBRARIES: dict[str, str] = {
    "packed": "qat",
    "gguf": "gguf",
    "mlx": "mlx",
    "coreml": "coreml",
    "onnx": "onnx",
    "openvino": "openvino",
    "executorch": "executorch",
}
"""The name of a target's library on a hub; transformers, or a library like it, reads the others."""
BY_NAME = {"qat", "transformers", "mlx"}
"""Libraries that read a repository by its name; for the others it is downloaded first."""
HEADER = re.compile(r"---\n(.*?)\n---\n", re.DOTALL)
"""The metadata of a card."""
LINE = re.compile(r"^(\w+): *['\"]?(.+?)['\"]? *$", re.MULTILINE)
"""A line of it with a single value."""
LICENSES = ("license", "license_name", "license_link")
GGUF_PAGE = "general.base_model.0.repo_url"
"""The key in a GGUF file of the page of the model that it was made from."""
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
MODEL_PAGE = re.compile(rf"(?:https://huggingface\.co/|hf:(?://)?)({HUB_ID.pattern})(?:/|@.*)?")
"""The page of a model on a hub, or the mirror that it was pulled from."""
DATA_ID = re.compile(rf"({HUB_ID.pattern})(:[^@]*)?(@.*)?")
"""A data set of a hub with its configuration and split."""


class Table(NamedTuple):
    """A table of a card."""

    title: str
    columns: tuple[str, ...]
    rows: list[list[str]]
    caption: str = ""


def card_of(
    model: PreTrainedModel,
    target: TargetName,
    sizes: Sizes,
    *,
    dtype: str,
    source: Path,
    name: str,
    difference: float | None = None,
    repository: str | None = None,
) -> str:
    """Return the card about files of `model` in the directory `name`, or to be in `repository`.

    The run and the conversion of the checkpoint `source` are read if they exist, and suites in the
    run.

    Args:
        dtype: dtype of the numbers that are not quantized.
        difference: the largest difference of a logit from the checkpoint's; None if these are its
            files.

    Raises:
        CheckpointError: a file of the run is damaged.
    """
    history = _history(source)
    specs = Counter(module.spec for module in quantized_modules(model).values())
    formats = [
        [str(count), f"{spec.index_bits:g}", spec.described_codebook(), _scale(spec)]
        for spec, count in specs.items()
    ]
    tables: list[object] = [Table("Formats", ("modules", "bits", "levels", "scale"), formats)]
    if history.measures:
        rows = [[text, f"{value:.4f}"] for text, value in history.measures]
        tables.append(Table("Measured on held-out text", ("measure", "value"), rows))
    base = history.base
    bits, is_local = [spec.index_bits for spec in specs], repository is None
    metadata = metadata_of(base, target, data=history.data, bits=bits, local_only=is_local)
    # for a local directory only its name: a card shows no paths of its author's disk
    shown = Path(base).name if Path(base).is_absolute() else base
    whole = sizes.source_megabytes
    facts = {
        "base model": shown,
        "recipe": history.plan,
        "size": f"{sizes.megabytes:.1f} MB" + (f", from {whole:.1f} MB" if whole else ""),
        "bits per weight": f"{sizes.bits_per_weight:.3f} over all weights of these files, "
        f"{sizes.linear_bits:.3f} of linears",
        "numbers that are not quantized": dtype,
        LARGEST: None if difference is None else f"{difference:.2g}",
        **history.facts,
    }
    parts = (_short(shown), history.plan, target)
    return render(
        TEMPLATE,
        metadata=metadata,
        title=", ".join(part for part in parts if part),
        architecture=type(model).__name__,
        parameters=parameter_count(model),
        version=qat.__version__,
        target=target,
        facts=[(name, value) for name, value in facts.items() if value is not None],
        tables=[*tables, *_suites(source)],
        usage=_usage(model, target, name, repository),
    )


def render(template: Path, **values: object) -> str:
    """Return the card of `template`, which is `TEMPLATE` or extends it, with these values."""
    loader = FileSystemLoader([template.parent, TEMPLATE.parent])
    environment = Environment(  # noqa: S701 - no HTML
        loader=loader, undefined=StrictUndefined, keep_trailing_newline=True
    )
    return environment.get_template(template.name).render(values)


def metadata_of(
    base: str, target: TargetName, *, data: str | None, bits: list[float], local_only: bool = True
) -> dict[str, object]:
    """Return the metadata for a hub: base model, licence, library, tags and data set.

    Args:
        base: path or hub id of the float model.
        data: the texts that it learned from, as `--data` names them.
        bits: those of an index, for tags.
        local_only: do not ask a hub for the card of `base`.
    """
    licence, origin = _origin(base, local_only)
    found: dict[str, object] = dict(licence)
    if origin is not None:
        found |= {"base_model": origin, "base_model_relation": "quantized"}
    tags = ["qat", target, *sorted({f"{each:g}-bit" for each in bits})]
    found |= {
        "library_name": LIBRARIES.get(target, "transformers"),
        "pipeline_tag": "text-generation",
        "tags": tags,
    }
    is_local = data is None or Path(data).exists() or is_text_file(Path(data))
    named = None if is_local else DATA_ID.fullmatch(data)
    return found | ({"datasets": [named[1]]} if named else {})


def _origin(base: str, local_only: bool) -> tuple[dict[str, str], str | None]:
    """Return the licence that a model's own card, file or configuration states, and its hub id."""
    place, is_id = Path(base), False
    try:
        if not place.exists():
            is_id = HUB_ID.fullmatch(base) is not None
            place = hub_file(base, CARD, local_only=local_only).parent
        stated = _stated(place)
    except (QatError, OSError, ValueError):  # it is not on this disk, or damaged
        stated = {}
    page = MODEL_PAGE.fullmatch(str(stated.get("page")))
    licence = {key: stated[key] for key in LICENSES if isinstance(stated.get(key), str)}
    if "quantization_config" in stated:  # a student, whose own base its directory would name
        return licence, None
    return licence, base if is_id else page and page[1]


def _stated(place: Path) -> dict[str, object]:
    """Return what a model's configuration and card, or its GGUF file, say of licence and origin."""
    card = place / CARD
    if not card.is_file() and (path := Path(resolve(str(place)))).suffix == GGUF:
        keys = {key: f"general.{key.replace('_', '.')}" for key in LICENSES} | {"page": GGUF_PAGE}
        fields = read_metadata(path)
        return {key: fields[k].parts[0].decode() for key, k in keys.items() if k in fields}
    config, receipt = place / "config.json", read_receipt(place)
    words = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    header = HEADER.match(words)
    lines = LINE.findall(header[1]) if header else []
    page = {"page": receipt.mirror} if receipt else {}
    return {**(read_table(config) if config.is_file() else {}), **dict(lines), **page}


class _History(NamedTuple):
    """The origin of a checkpoint, and its evaluation at its step."""

    base: str
    plan: str | None
    data: str | None = None
    facts: dict[str, str | None] = {}
    measures: list[tuple[str, float]] = []


def _run_of(checkpoint: Path) -> tuple[Path, bool]:
    """Return the directory that would be the run of a checkpoint; and whether it is its student."""
    checkpoint = checkpoint.resolve()
    is_final = (checkpoint.parent / SUMMARY).is_file()
    return checkpoint.parent if is_final else checkpoint.parent.parent, is_final


def _history(checkpoint: Path) -> _History:
    run, is_final = _run_of(checkpoint)
    if not ((run / FACTS).is_file() and (run / METRICS).is_file()):
        return _History(float_base(checkpoint), _plan(checkpoint))
    try:
        facts = parse_json((run / FACTS).read_text(encoding="utf-8"))
        recipe = parse_toml((run / RECIPE).read_text(encoding="utf-8"))
        student = Path(recipe["train"]["student"])
        done = parse_json((run / SUMMARY).read_text(encoding="utf-8")) if is_final else {}
        step = done.get("best_step") if is_final else int(checkpoint.name.rpartition("-")[2])
        rows = [row for row in read_json_lines(run / METRICS) if row["kind"] == "eval"]
        judged = next((row for row in rows if row["step"] == step), {})
        data = facts.get("cache_settings", {}).get("data")
        measured = [(text, judged.get(key)) for key, text in MEASURES.items()]
        told = {
            "trained": _trained(step, _short(data) if data else None),
            "cost of training": _cost(done, facts),
            "code": f"commit {facts['commit']}" if facts.get("commit") else None,
        }
        return _History(
            base=float_base(student),
            plan=_plan(student),
            data=data,
            facts=told,
            measures=[(text, value) for text, value in measured if value is not None],
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(checkpoint, error) from None


def _trained(step: int | None, data: str | None) -> str | None:
    if not step:
        return None if step is None else "not: no step of its run made it better"
    return f"{step} steps" + (f" on {data}" if data else "")


def _cost(done: dict, facts: dict) -> str | None:
    """Return seconds, tokens and devices of a run that ended; None of one that did not."""
    if not done.get("train_s") or not facts.get("device"):
        return None
    return f"{done['train_s']:,.0f} s of steps, {done['tokens']:,} tokens, on " + (
        f"{facts['world_size']} x {facts['device']}"
    )


def _suites(checkpoint: Path) -> Iterator[object]:
    """Yield the tables of extensions about files in a run, or one folder below, that judge it."""
    run, _ = _run_of(checkpoint)
    for place in (checkpoint, run) if (run / FACTS).is_file() else (checkpoint,):
        for name, point in hooks("qat.sections").items():
            for file in (place / name, *sorted(place.glob(f"*/{name}"))):
                if file.is_file() and _judges(file, {checkpoint.resolve().name, run.name}):
                    yield point.load()(file)


def _judges(file: Path, names: set[str]) -> bool:
    try:
        return Path(parse_json(file.read_text(encoding="utf-8"))["student"]).name in names
    except (ValueError, KeyError, TypeError):
        return False


def _usage(model: PreTrainedModel, target: TargetName, name: str, repository: str | None) -> str:
    usage = load_target(target).HOW_TO_LOAD
    if repository is not None and LIBRARIES.get(target, "transformers") in BY_NAME:
        name = repository
    elif repository is not None:
        name = repository.rpartition("/")[2]
        usage = f"    hf download {repository} --local-dir {name}\n\n{usage}"
    usage = usage.replace("AutoModelForCausalLM", auto_class(model.config).__name__)
    return usage.replace("DIR", name)


def _scale(spec: LutSpec) -> str:
    if spec.scale == "low_rank":
        return f"rank {spec.rank}"
    return f"one of {spec.scale_bits} bits for {spec.group_size} weights of a row"


def _plan(checkpoint: Path) -> str | None:
    """Return the plan that a checkpoint was converted by; None if it was not converted."""
    report = checkpoint / REPORT_NAME
    if not report.is_file():
        return None
    try:
        return parse_json(report.read_text(encoding="utf-8")).get("plan")
    except (ValueError, AttributeError) as error:
        raise damaged(checkpoint, error) from None


def _short(source: str) -> str:
    return Path(source).name or source
