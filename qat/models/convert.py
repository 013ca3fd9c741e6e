"""`qat convert`: from a model directory to a packed checkpoint with fewer bits per weight."""

import json
import logging
import math
import tomllib
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import tomli_w
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qat.backend.device import select
from qat.config import Settings
from qat.data.cache import MANIFEST
from qat.data.chat import render
from qat.data.packing import Packer, position_ids
from qat.data.reader import TeacherCache
from qat.data.sources import open_source
from qat.data.text import begin_token, encode, end_token, tokenizer_hash
from qat.errors import ConfigError
from qat.files import check_free
from qat.kernels.nsa.config import NSAConfig
from qat.models.bits_budget import BudgetReport, plan_within_budget
from qat.models.calibrate import TokenBatch
from qat.models.checkpoint import write_model
from qat.models.config import ConvertConfig
from qat.models.directory import atomic_directory
from qat.models.language_model import LanguageModel
from qat.models.load import load_model, load_tokenizer
from qat.models.nsa_fit import LayerFit, fit_attention
from qat.models.nsa_swap import change_attention, nsa_config, read_attention
from qat.models.quantize import QuantizeReport, quantize_model
from qat.models.shipping import Shipping
from qat.models.tables import with_tables
from qat.quant.spec import PRESETS, PlanRule, QuantPlan, by_group

logger = logging.getLogger(__name__)

REPORT_NAME = "convert_report.json"
PLAN_NAME = "plan.toml"
BATCH = 16
ALL_LINEARS = QuantPlan(name="all linears", rules=(PlanRule(pattern="*", spec=by_group(2)),))
"""Which linears share a budget of bits where no plan says so."""
NOTHING = QuantPlan(name="none", rules=())


class PlanFile(Settings):
    """A plan in a TOML file: `name` and a list of `rules`, each a `pattern` and a `spec`."""

    name: str
    rules: tuple[PlanRule, ...]


def read_plan(config: ConvertConfig) -> QuantPlan:
    """The plan that `config.to` names, with its group size if one is given.

    Else all linears for a budget, and nothing without one.

    Raises:
        ConfigError: neither a preset nor a readable plan file.
    """
    unnamed = NOTHING if config.bits_budget is None else ALL_LINEARS
    plan = PRESETS.get(config.to) if config.to is not None else unnamed
    if plan is None:
        path = Path(config.to)
        if not path.is_file():
            known = ", ".join(PRESETS)
            raise ConfigError(f"to={config.to} is neither a file nor a preset; use one of {known}")
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(
                f"to={path} is not TOML ({error}), expected a plan; mend that line"
            ) from None
        plan = QuantPlan(**PlanFile.parse(values, str(path)).model_dump())
    if config.group_size is None:
        return plan
    rules = tuple(
        rule.model_copy(
            update={
                "spec": rule.spec and rule.spec.model_copy(update={"group_size": config.group_size})
            }
        )
        for rule in plan.rules
    )
    return plan.model_copy(update={"rules": rules})


def convert_checkpoint(
    source: str, config: ConvertConfig, out: Path, shipping: Shipping | None = None
) -> QuantizeReport:
    """Quantize the model `source` by the plan of `config` and write it to `out` with its report.

    Its attention becomes what `config` says before anything is quantized. With `shipping` the plan
    is bent to what that target holds without loss.

    Raises:
        ConfigError, CheckpointError, CacheError, ExportError: see their messages.
    """
    check_free(out)
    check_budget(config)
    if select(config.device).fixed_shapes():
        raise ConfigError(
            f"device={config.device}, but fitting reads values after every few operators, expected "
            "a device that does not compile for that; use --device cpu"
        )
    plan = read_plan(config)
    attention = None if config.attention is None else read_attention(config.attention)
    how = {"device": config.device, "dtype": "fp32", "trust_remote_code": config.trust_remote_code}
    student = load_model(source, **how)
    tokenizer = load_tokenizer(source, trust_remote_code=config.trust_remote_code)
    if config.attention is not None:
        change_attention(student.model, attention)
    if shipping is not None:  # refuses before any work
        bits = 8 if config.embedding_bits == "auto" else config.embedding_bits
        shipping.plan(with_tables(plan, student.model, bits), student.model)
    base = None
    if config.base is not None:
        base = load_model(config.base, **how)
    calibration = []
    if config.calibration is not None:
        calibration = calibration_batches(config, student, tokenizer)
    fits = [] if attention is None else _fitted(student, attention, calibration, config)
    budget = None
    if config.bits_budget is not None:
        plan, budget = _budgeted(plan, config, base or student, calibration, shipping=shipping)
    if config.embedding_bits in {4, 8}:
        plan = with_tables(plan, student.model, config.embedding_bits)
    if shipping is not None:
        plan = shipping.plan(plan, student.model)
    report = quantize_model(
        student, plan, base=base, calibration=calibration, workers=config.workers
    )
    report = replace(report, budget=budget)
    with atomic_directory(out) as partial:
        write_model(student.model, tokenizer, partial)
        values = {"source": source, "trust_remote_code": config.trust_remote_code}
        values["attention_fit"] = [asdict(fit) for fit in fits]
        _write_report(student.model, report, partial, values)
        if budget is not None:
            rules = tomli_w.dumps(plan.model_dump(exclude_none=True))
            (partial / PLAN_NAME).write_text(rules, encoding="utf-8")
    return report


def _fitted(
    student: LanguageModel,
    attention: NSAConfig,
    calibration: list[TokenBatch],
    config: ConvertConfig,
) -> list[LayerFit]:
    """Bring the gates and pooling of new sparse attention closer to dense attention."""
    if not calibration or not config.attention_steps or attention.mode == "merged":
        return []
    length = calibration[0].input_ids.shape[1]
    if length <= attention.reach:
        logger.warning(
            "gates are not fitted: calibration rows have %d tokens, and sparse attention reads "
            "rows of up to %d whole; raise --calibration-length",
            length,
            attention.reach,
        )
        return []
    fits = fit_attention(student, calibration, steps=config.attention_steps)
    before, after = (
        sum(getattr(fit, name) for fit in fits) / len(fits)
        for name in ("error_before", "error_after")
    )
    logger.info("attention differs from dense by %.4f, before the fit by %.4f", after, before)
    return fits


def _budgeted(
    plan: QuantPlan,
    config: ConvertConfig,
    teacher: LanguageModel,
    calibration: list[TokenBatch],
    *,
    shipping: Shipping | None,
) -> tuple[QuantPlan, BudgetReport]:
    """A plan of the linears of `plan` that keeps to `config`'s bits, and how they were spent."""
    return plan_within_budget(
        teacher,
        plan,
        config.bits_budget,
        calibration,
        with_tables=config.embedding_bits == "auto",
        wider_groups=config.to is None and config.group_size is None,
        bend=None if shipping is None else shipping.bend,
    )


def _write_report(
    model: PreTrainedModel, report: QuantizeReport, directory: Path, values: dict[str, object]
) -> None:
    """`values` and what the conversion did, as JSON."""
    sparse = nsa_config(model)
    values["nsa"] = None if sparse is None else sparse.model_dump(mode="json")
    values |= asdict(report)
    if math.isnan(report.bits_per_weight):
        values["bits_per_weight"] = None
    (directory / REPORT_NAME).write_text(json.dumps(values, indent=1) + "\n")


def check_budget(config: ConvertConfig) -> None:
    """Refuse settings that name nothing to do, or a budget without what it needs.

    Raises:
        ConfigError: see above.
    """
    if config.to is None and config.bits_budget is None and config.attention is None:
        raise ConfigError(
            "neither a plan nor a budget is given, expected one of them; add --to PLAN or "
            "--bits-budget BITS (or --attention to change that alone)"
        )
    if config.bits_budget is not None and config.calibration is None:
        raise ConfigError(
            f"bits_budget={config.bits_budget:g} is given without a text to measure sensitivities "
            "on; add --calibration TEXT"
        )
    if config.embedding_bits == "auto" and config.bits_budget is None:
        raise ConfigError(
            "embedding_bits=auto is given without a budget to choose within; add --bits-budget "
            "BITS, or give --embedding-bits 4 or 8"
        )


def calibration_batches(
    config: ConvertConfig, student: LanguageModel, tokenizer: PreTrainedTokenizerBase
) -> list[TokenBatch]:
    """The first `calibration_sequences` sequences of the calibration cache or text.

    Raises:
        CacheError, DataError: it cannot be read, or a cache is of another tokenizer.
        ConfigError: its sequences are none or not even one, or too long for the model.
    """
    path = Path(config.calibration)
    if (path / MANIFEST).exists():
        count = config.calibration_sequences
        tokens = _cached_tokens(path, count, student, tokenizer_hash(tokenizer))
    else:
        tokens = _packed_text(config, student, tokenizer)
    pairs = zip(*(ids.split(BATCH) for ids in tokens), strict=True)
    return [TokenBatch(*pair) for pair in pairs]


def _cached_tokens(
    path: Path, num_sequences: int, student: LanguageModel, tokenizer: str
) -> TokenBatch:
    cache = TeacherCache.open(path)
    config = student.config
    cache.check_student(tokenizer, config.vocab_size, config.max_position_embeddings)
    if cache.num_sequences("train") == 0:
        raise ConfigError(
            f"calibration={path} has no training sequences, expected some; rebuild it from more "
            "documents or choose another"
        )
    batch = cache.batch(np.arange(min(num_sequences, cache.num_sequences("train"))))
    return TokenBatch(batch.input_ids, batch.position_ids)


def _packed_text(
    config: ConvertConfig, student: LanguageModel, tokenizer: PreTrainedTokenizerBase
) -> TokenBatch:
    limit = student.config.max_position_embeddings
    if config.calibration_length > limit:
        raise ConfigError(
            f"calibration_length={config.calibration_length}, but the model reads at most {limit} "
            "positions; lower --calibration-length"
        )
    packer = Packer(config.calibration_length, end_token(tokenizer), begin_token(tokenizer))
    for document in open_source(config.calibration).documents:
        for ids in encode(render(document, tokenizer, "none"), tokenizer):
            packer.push(ids)
        if packer.num_full >= config.calibration_sequences:
            break
    if packer.num_full == 0:
        raise ConfigError(
            f"calibration={config.calibration} holds less than one sequence of "
            f"{config.calibration_length} tokens; give more text or lower --calibration-length"
        )
    packed = packer.take(min(config.calibration_sequences, packer.num_left))
    starts = torch.from_numpy(packed.starts)
    return TokenBatch(torch.from_numpy(packed.tokens).long(), position_ids(starts))
