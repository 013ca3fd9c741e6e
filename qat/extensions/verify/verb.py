"""`qat verify-export`: does a file compute what the model computes that it was made from?"""

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from qat.cli.parser import print_result
from qat.cli.tables import row_table, wide_console
from qat.config import Required
from qat.extensions.verify.config import VerifyConfig

if TYPE_CHECKING:
    from qat.extensions.verify.facts import Finding
    from qat.extensions.verify.run import Verdict

WIDTH = 160
"""Columns of a table where output goes to a file."""
DISTANCE = (
    ("Tokens", "num_tokens", "{}", 1),
    ("KL, nats", "kl_nats", "{:.4g}", 1),
    ("+-", "kl_stderr_nats", "{:.2g}", 1),
    ("p99", "kl_p99_nats", "{:.3g}", 1),
    ("top-1 %", "top1_frac", "{:.2f}", 100),
    ("flips %", "flips_frac", "{:.2f}", 100),
    ("perplexity", "ppl", "{:.4g}", 1),
    ("reference's", "teacher_ppl", "{:.4g}", 1),
)
NAMES = {"teacher_ppl": "reference_ppl"}
"""Names of measures in the last line that differ from those of the measurement."""
TENSORS = (
    ("Most different tensors", "name", "{}", 1),
    ("type", "type", "{}", 1),
    ("error", "error", "{:.3g}", 1),
    ("rounding explains", "limit", "{:.3g}", 1),
)
FINDINGS = (("Found", "kind", "{}", 1), ("where", "place", "{}", 1), ("what", "words", "{}", 1))


def verify_export(
    reference: Required[str],
    file: Required[str],
    /,
    *,
    config: Annotated[VerifyConfig, Parameter(name="*")] = VerifyConfig(),  # noqa: B008 - frozen
) -> dict[str, object] | None:
    """Compare FILE with REFERENCE, the model that it was made from; exit code 1 if they differ.

    Args:
        reference: Float or QAT model, ours or not: directory, run, hub id or GGUF file.
        file: What was made of it: GGUF, MLX, ONNX, compressed-tensors, GPTQ, AWQ, packed or dense.
        config: Settings.
    """
    from qat.cli.inputs import check_inputs

    check_inputs(texts=[config.text])
    from qat.extensions.verify.run import verify

    verdict = verify(reference, file, config)
    _show(verdict, config)
    found = _told(verdict, reference, file, config)
    if verdict.passes:
        return found
    print_result(found)
    raise SystemExit(1)


def _show(verdict: "Verdict", config: VerifyConfig) -> None:
    console = wide_console(WIDTH)
    if verdict.distance is not None:
        console.print(row_table(DISTANCE, [verdict.distance._asdict()]))
    worst = [each._asdict() for each in verdict.tensors[: config.worst] if each.error]
    if worst:
        console.print(row_table(TENSORS, worst))
    elif verdict.tensors:
        console.print(f"all {len(verdict.tensors)} tensors are equal", highlight=False)
    if verdict.findings:
        console.print(row_table(FINDINGS, [*rows_of(verdict.findings)], justify="left"))


def rows_of(findings: "Iterable[Finding]") -> "Iterator[dict[str, str]]":
    """Yield a row for all findings of a kind whose places differ in numbers alone, by the first."""
    alike: dict[tuple[str, str], list[Finding]] = {}
    for each in findings:
        alike.setdefault((each.kind, re.sub(r"\d+", "", each.place)), []).append(each)
    for first, *others in alike.values():
        place = f"{first.place} and {len(others)} like it" if others else first.place
        yield first._replace(place=place)._asdict()


def _told(verdict: "Verdict", reference: str, file: str, config: VerifyConfig) -> dict[str, object]:
    distance = {} if verdict.distance is None else verdict.distance._asdict()
    return dict(
        reference=reference,
        file=file,
        form=verdict.form,
        passes=verdict.passes,
        **{NAMES.get(name, name): distance.get(name) for _, name, *_ in DISTANCE},
        worst={each.name: round(each.error, 8) for each in verdict.tensors[: config.worst]},
        findings=[each._asdict() for each in verdict.findings],
    )
