"""The model card of an export: README.md, from what the checkpoint and its run left behind."""

import json
from collections import Counter
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from transformers import PreTrainedModel

import qat
from qat.convert.convert import REPORT_NAME as CONVERSION
from qat.errors import CheckpointError
from qat.export.config import TargetName
from qat.export.targets import load_target
from qat.files import parse_toml
from qat.logs import FACTS, METRICS, RECIPE, read_json_lines
from qat.models.cost import model_bits_per_weight, parameter_count, whole_model_bits
from qat.models.stored_state import quantized_modules
from qat.quant.spec import LutSpec

IMPORT = "import_report.json"
"""What an import of the reference's checkpoint says of itself, beside its tensors."""


# Which float model a checkpoint was made from, by what runs, conversions and imports wrote.


def float_base(checkpoint: str | Path) -> str:
    """The model that `checkpoint` began with, as far back as reports lead; else itself.

    Raises:
        CheckpointError: a report on the way is damaged.
    """
    found, seen = str(checkpoint), set()
    while found not in seen:
        seen.add(found)
        try:
            found = _made_from(Path(found)) or found
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{found}: what its run or its conversion wrote is damaged ({error}), expected "
                "JSON; restore it, or copy the checkpoint to a directory of its own"
            ) from None
    return found


def _made_from(checkpoint: Path) -> str | None:
    """What a checkpoint (or a run) says that it was made from; None if it says nothing."""
    if not checkpoint.is_dir():  # a hub id
        return None
    place = checkpoint.resolve()
    for run in (place, place.parent, place.parent.parent):
        if (run / RECIPE).is_file() and (run / FACTS).is_file():
            values = parse_toml((run / RECIPE).read_text(encoding="utf-8"))
            return str(values["train"]["student"])
    for name, key in ((IMPORT, "base"), (CONVERSION, "source")):
        if (checkpoint / name).is_file():
            return str(json.loads((checkpoint / name).read_text(encoding="utf-8"))[key])
    return None


CARD = "README.md"
MEASURES = {
    "kd_nats": "distillation loss (nats a token)",
    "kl_tail_nats": "KL to the teacher, tail included (nats a token)",
    "top1_frac": "agrees with the teacher's first choice (fraction)",
    "ppl": "perplexity",
}
TEMPLATE = """\
<!-- The licence follows from those of the base model and of the data: state it here. -->
# {{ name }}

A {{ architecture }} of {{ "%.1f"|format(parameters / 1e6) }}M parameters, quantized with qat \
{{ version }} and written in the form `{{ target }}`.

| | |
|---|---|
| base model | {{ base }} |
| bits a weight as a qat checkpoint | {{ "%.3f"|format(linear_bits) }} in quantized linears, \
{{ "%.3f"|format(whole_bits) }} in the whole model |
| these files | {{ "%.2f"|format(megabytes) }} MB, \
{{ "%.3f"|format(8e6 * megabytes / parameters) }} bits a weight |
| numbers that are not quantized | {{ dtype }} |
| largest difference of a logit from the checkpoint | {{ "%.2g"|format(difference) }} |
{% if step %}| trained | {{ step }} steps |
{% endif %}{% if commit %}| code | commit {{ commit }} |
{% endif %}
## Formats

| modules | bits | levels | scale |
|---|---|---|---|
{% for row in formats %}| {{ row }} |
{% endfor %}{% if measures %}
## Measured on held-out text

| measure | value |
|---|---|
{% for measure, value in measures %}| {{ measure }} | {{ "%.4f"|format(value) }} |
{% endfor %}{% endif %}
## How to load

{{ how_to_load }}"""


def write_card(
    directory: Path,
    *,
    name: str,
    target: TargetName,
    source: Path,
    model: PreTrainedModel,
    facts: dict[str, object],
) -> None:
    """Write README.md into `directory`.

    Args:
        name: what the export is called.
        target: the form.
        source: the checkpoint that was exported; its run and its conversion are read where they
            are.
        model: what it holds.
        facts: `megabytes`, `dtype` and `difference` of what was written.

    Raises:
        CheckpointError: a file of the run is damaged.
    """
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True)  # noqa: S701
    text = environment.from_string(TEMPLATE).render(
        name=name,
        target=target,
        how_to_load=load_target(target).HOW_TO_LOAD.replace("DIR", name),
        architecture=type(model).__name__,
        parameters=parameter_count(model),
        version=qat.__version__,
        linear_bits=model_bits_per_weight(model),
        whole_bits=whole_model_bits(model),
        formats=_formats(model),
        **_history(source),
        **facts,
    )
    (directory / CARD).write_text(text, encoding="utf-8")


def _formats(model: PreTrainedModel) -> list[str]:
    """A row for each format in use."""
    counts = Counter(module.spec for module in quantized_modules(model).values())
    return [
        f"{count} | {spec.bits} | {spec.codebook} | {_scale(spec)}"
        for spec, count in counts.items()
    ]


def _scale(spec: LutSpec) -> str:
    if spec.scale == "low_rank":
        return f"rank {spec.rank}"
    return f"one of {spec.scale_bits} bits for {spec.group_size} weights of a row"


def _history(checkpoint: Path) -> dict[str, object]:
    """Where a checkpoint comes from, and how it was judged."""
    run = checkpoint.resolve().parent.parent
    try:
        if (run / FACTS).is_file() and (run / METRICS).is_file():
            return _of_run(run, checkpoint)
        return {"base": _base(checkpoint), "step": None, "commit": None, "measures": []}
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{checkpoint}: what its run or its conversion wrote is damaged ({error}), expected "
            "JSON; restore it, or copy the checkpoint to a directory of its own"
        ) from None


def _of_run(run: Path, checkpoint: Path) -> dict[str, object]:
    facts = json.loads((run / FACTS).read_text(encoding="utf-8"))
    student = parse_toml((run / RECIPE).read_text(encoding="utf-8"))["train"]["student"]
    step = int(checkpoint.resolve().name.rpartition("-")[2])
    rows = [row for row in read_json_lines(run / METRICS) if row["kind"] == "eval"]
    judged = next((row for row in rows if row["step"] == step), {})
    measures = [
        (text, judged[key]) for key, text in MEASURES.items() if judged.get(key) is not None
    ]
    return {
        "base": _base(Path(student)),
        "step": step,
        "commit": facts.get("commit"),
        "measures": measures,
    }


def _base(checkpoint: Path) -> str:
    """The float model that a checkpoint began with; of a directory elsewhere its name alone."""
    base = Path(float_base(checkpoint))
    return base.name if base.is_absolute() else str(base)
