"""Conversion of a model directory to a packed checkpoint with fewer bits per weight."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import tomli_w
from transformers import PreTrainedTokenizerBase

from qat.convert.calibrate import TokenBatch
from qat.convert.calibration_data import calibration_batches
from qat.convert.config import REPORT_NAME, ConvertConfig
from qat.convert.convert import Converted, convert_model, read_settings
from qat.convert.quantize import QuantizeReport
from qat.convert.shipping import Shipping
from qat.convert.stored_tables import join_tables, stored_tables
from qat.files import check_free, real
from qat.models.attention import SPARSE
from qat.models.checkpoint import check_written, write_model
from qat.models.directory import atomic_directory
from qat.models.language_model import LanguageModel
from qat.models.load import load_model, load_tokenizer

PLAN_NAME = "plan.toml"
"""File of a checkpoint with the plan that a budget chose."""


def convert_checkpoint(
    source: str, config: ConvertConfig, out: Path, shipping: Shipping | None = None
) -> QuantizeReport:
    """Quantize the model `source` by the plan of `config` and write it to `out` with its report.

    Rotation and a change of attention come before quantization. With `shipping` the plan is adapted
    to formats that its targets hold without loss.
    """
    check_free(out)
    plan, _ = read_settings(config)  # refuse bad settings before a model is read
    # load the whole model for a budget and for new sparse attention, which run it too often to read
    # layers from files, and for a rotation and static ranges, which change weights in place
    is_whole = config.rotate or config.bits_budget is not None or config.attention is not None
    is_whole |= plan.has_static
    how = {
        "device": config.device,
        "dtype": "fp32",
        "trust_remote_code": config.trust_remote_code,
        "folder": None if is_whole else next(filter(Path.is_dir, real(out).parents)),
    }
    student = load_model(source, **how)
    stored = join_tables(student.model, stored_tables(source, student.model))
    tokenizer = load_tokenizer(source, trust_remote_code=config.trust_remote_code)
    base = None
    if config.base is not None:
        base = load_model(config.base, **how)
        join_tables(base.model, stored_tables(config.base, base.model))
    calibration = []
    if config.calibration is not None:
        calibration = calibration_batches(config.calibration, config, student, tokenizer)
    done = convert_model(
        student,
        config,
        base=base,
        calibration=calibration,
        shipping=shipping,
        stored=stored,
        tokenizer=tokenizer,
    )
    write_converted(out, done, student, tokenizer, source=source, config=config, drawn=calibration)
    return done.report


def write_converted(
    out: Path,
    done: Converted,
    student: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    source: str,
    config: ConvertConfig,
    drawn: Sequence[TokenBatch] = (),
) -> None:
    """Write the student and its report, atomically, and open it again; it was fitted to `drawn`."""
    facts = {"source": source, **_report(student, config, drawn, done)}
    with atomic_directory(out) as partial:
        write_model(student.model, tokenizer, partial)
        check_written(partial, student.model)
        (partial / REPORT_NAME).write_text(json.dumps(facts, indent=1) + "\n")
        if done.report.budget is not None:
            rules = tomli_w.dumps(done.plan.model_dump(exclude_none=True))
            (partial / PLAN_NAME).write_text(rules, encoding="utf-8")


def _report(
    student: LanguageModel,
    config: ConvertConfig,
    calibration: Sequence[TokenBatch],
    done: Converted,
) -> dict[str, object]:
    ids = [batch.input_ids for batch in calibration]
    drawn = {
        "data": config.calibration,
        "seed": config.calibration_seed,
        "sequences": sum(map(len, ids)),
        "tokens": sum(each.numel() for each in ids),
    }
    values = {
        "trust_remote_code": config.trust_remote_code,
        "attention_fit": [asdict(fit) for fit in done.fits],
        "calibration": drawn if calibration else None,
        "rotation": done.rotation,
        SPARSE: getattr(student.model.config, SPARSE, None),
        **asdict(done.report),
    }
    if math.isnan(done.report.linear_bits):
        values["linear_bits"] = None
    return values
