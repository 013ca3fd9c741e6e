"""Conversion of a model directory to a packed checkpoint with fewer bits per weight."""

import heapq
import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import tomli_w
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qat.backend.device import select
from qat.config import Settings
from qat.convert.activations import inputs_to_quantize
from qat.convert.bits_budget import formats_to_try, plan_within_budget
from qat.convert.calibrate import TokenBatch
from qat.convert.config import REPORT_NAME, ConvertConfig, check_asked, read_kv
from qat.convert.quantize import QuantizeReport, check_experts, quantize_model
from qat.convert.rotate import Rotation, rotate
from qat.convert.shipping import Shipping
from qat.convert.tables import (
    USUAL_BITS,
    StoredTable,
    join_tables,
    plan_tables,
    round_float_tables,
    stored_tables,
)
from qat.data.cache import MANIFEST
from qat.data.packing import Packer, position_ids
from qat.data.reader import TeacherCache
from qat.data.sources import Document, open_source
from qat.data.text import (
    check_vocabulary,
    encode,
    end_token,
    num_characters,
    render,
    special_tokens,
    tokenizer_hash,
)
from qat.errors import ConfigError
from qat.files import check_free, import_command, real
from qat.models.attention import (
    SPARSE,
    LayerFit,
    change_attention,
    load_sparse_attention,
    read_attention,
)
from qat.models.checkpoint import check_written, write_model
from qat.models.directory import atomic_directory
from qat.models.language_model import LanguageModel
from qat.models.load import load_model, load_tokenizer
from qat.models.regions import kv_spec, quantize_kv
from qat.nn.swap import linear_names, table_names, weight_shape, with_tables
from qat.quant.spec import QuantPlan, by_group

logger = logging.getLogger(__name__)

PLAN_NAME = "plan.toml"
"""File of a checkpoint with the plan that a budget chose."""
BATCH = 16
"""Sequences of a calibration batch."""
CHARACTERS_A_TOKEN = 64
"""Characters drawn from a text for each calibration token, sixteen times the need of English."""
MOST_CHARACTERS = 2**28
"""Characters that are read at most of a longer text, or of a data set over a network."""


def convert_checkpoint(
    source: str, config: ConvertConfig, out: Path, shipping: Shipping | None = None
) -> QuantizeReport:
    """Quantize the model `source` by the plan of `config` and write it to `out` with its report.

    Rotation and a change of attention come before quantization. With `shipping` the plan is adapted
    to formats that its targets hold without loss.

    Raises:
        ConfigError, CheckpointError, CacheError, ExportError: see their messages.
    """
    check_free(out)
    plan, _ = _read_settings(config)  # refuse bad settings before a model is read
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
    base = None if config.base is None else load_model(config.base, **how)
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
    )
    with atomic_directory(out) as partial:
        write_model(student.model, tokenizer, partial)
        check_written(partial, student.model)
        values = {"source": source, **_report(student, config, calibration, done)}
        (partial / REPORT_NAME).write_text(json.dumps(values, indent=1) + "\n")
        if done.report.budget is not None:
            rules = tomli_w.dumps(done.plan.model_dump(exclude_none=True))
            (partial / PLAN_NAME).write_text(rules, encoding="utf-8")
    return done.report


def _report(
    student: LanguageModel,
    config: ConvertConfig,
    calibration: Sequence[TokenBatch],
    done: "Converted",
) -> dict[str, object]:
    """Return the entries of the report file except `source`."""
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
        "rotation": None if done.rotation is None else done.rotation._asdict(),
        SPARSE: getattr(student.model.config, SPARSE, None),
        **asdict(done.report),
    }
    if math.isnan(done.report.bits_per_weight):
        values["bits_per_weight"] = None
    return values


class Converted(NamedTuple):
    """The results of converting a model in memory."""

    report: QuantizeReport
    plan: QuantPlan
    """The plan with the formats that a budget or a target chose."""
    fits: list[LayerFit]
    """The fits of new sparse attention."""
    rotation: Rotation | None
    """The rotation; None if the model was not rotated."""


def convert_model(
    student: LanguageModel,
    config: ConvertConfig,
    *,
    base: LanguageModel | None = None,
    calibration: Sequence[TokenBatch] = (),
    shipping: Shipping | None = None,
    stored: Mapping[str, StoredTable] = MappingProxyType({}),
) -> Converted:
    """Convert `student` by `config`, in memory and in float32; nothing is read or written.

    `stored` are its tables as a quantized file holds them.

    Raises:
        ConfigError, ExportError: see their messages.
    """
    plan, attention = _read_settings(config)
    check_experts(plan, student.model)
    rotation = rotate(student) if config.rotate else None
    if config.attention is not None:
        change_attention(student.model, attention)
    kv = read_kv(config) or kv_spec(student.model.config)
    if kv is not None:
        quantize_kv(student.model, kv, student.device)
    room = _room(config)
    if rotation is not None:  # rotated tables no longer match those of the file
        stored = {}
    tables = {"config": config, "stored": stored, "shipping": shipping}
    if shipping is not None:  # adapt the plan now, so that a refusal comes before any work
        asked = plan
        if room["levels"] is not None:  # levels stand in for vectors where a target has none
            change = {"spec": room["levels"]}
            rules = tuple(rule.model_copy(update=change) for rule in plan.rules)
            asked = plan.model_copy(update={"rules": rules})
        if config.embedding_bits == "auto":
            asked = with_tables(asked, student.model, USUAL_BITS)
        shipping.plan(plan_tables(asked, student.model, **tables), student.model)
    fits = []
    if attention is not None:
        steps = config.attention_steps
        fits = load_sparse_attention().fit(student, calibration, steps=steps)
    budget = None
    if config.bits_budget is not None:
        bend = None if shipping is None else shipping.bend
        plan, budget = plan_within_budget(
            base or student, plan, config.bits_budget, calibration, **room, bend=bend
        )
    plan = plan_tables(plan, student.model, **tables)
    if shipping is not None:
        plan = shipping.plan(plan, student.model, group_size=config.group_size)
    round_float_tables(student.model, plan, stored)
    report = quantize_model(
        student, plan, base=base, calibration=calibration, workers=config.workers
    )
    return Converted(replace(report, budget=budget), plan, fits, rotation)


def check_conversion(model: LanguageModel, config: ConvertConfig) -> None:
    """Refuse formats and budgets that do not fit the shapes of `model`; no weight is read.

    Raises:
        ConfigError: see its message.
    """
    plan, _ = _read_settings(config)
    if config.bits_budget is not None:
        formats_to_try(model, plan, config.bits_budget, **_room(config))
        return
    linears = linear_names(model.model)
    specs = plan.assign(linears, table_names(model.model))
    inputs_to_quantize(model.model, plan, specs)
    for name, spec in specs.items():
        if name in linears:
            spec.check_shape(name, *weight_shape(model.model.get_submodule(name)))


def _room(config: ConvertConfig) -> dict[str, Any]:
    """Return what else a budget may be spent on, as arguments of `formats_to_try`."""
    return {
        "levels": by_group(4, config.group_size or 16) if config.to is None else None,
        "with_tables": config.embedding_bits == "auto",
        "wider_groups": config.group_size is None,
    }


def _read_settings(config: ConvertConfig) -> tuple[QuantPlan, Settings | None]:
    """Return the plan and the new sparse attention; None for dense or unchanged attention.

    Raises:
        ConfigError: nothing is named to do, a budget lacks what it needs, or the device cannot do
            it.
    """
    plan = check_asked(config)
    if select(config.device).fixed_shapes():
        raise ConfigError(
            f"device={config.device}, but fitting reads values after every few operators, expected "
            "a device that does not compile for that; use --device cpu"
        )
    attention = None if config.attention is None else read_attention(config.attention)
    return plan, attention


Calibration = str | Path | TeacherCache | Sequence[str] | Sequence[Tensor]
"""Calibration tokens: a cache or its directory, a text file, texts, or token ids."""


def calibration_batches(
    calibration: Calibration,
    config: ConvertConfig,
    student: LanguageModel,
    tokenizer: PreTrainedTokenizerBase | None,
) -> list[TokenBatch]:
    """Return calibration sequences from a cache's training split, a file, texts or token ids.

    At most `calibration_sequences` are drawn from all there are, by `calibration_seed`, because
    neighbours in a file are much alike. From texts, a surplus of documents is drawn first and then
    sequences from these. Token ids are `(S,)` or `(N, S)` each and need no `tokenizer`; rows of
    equal length form batches.

    Raises:
        CacheError, DataError: it cannot be read, or a cache is of another tokenizer.
        ConfigError: there is no whole sequence, sequences are too long for the model, or the
            calibration is text and there is no tokenizer.
    """
    is_path = isinstance(calibration, str | Path)
    if is_path and ((Path(calibration) / MANIFEST).exists() or import_command(Path(calibration))):
        calibration = TeacherCache.open(calibration)
    if isinstance(calibration, TeacherCache):
        tokens = [_cached_tokens(calibration, config, student, tokenizer)]
    elif is_path:
        documents = open_source(str(calibration), setting="calibration").documents
        tokens = [_packed_text(documents, config, student, tokenizer)]
    elif any(isinstance(each, Tensor) for each in calibration):
        tokens = _own_tokens(calibration, config, student)
    else:
        tokens = [_packed_text(calibration, config, student, tokenizer)]
    pieces = (zip(*(ids.split(BATCH) for ids in each), strict=True) for each in tokens)
    return [TokenBatch(*pair) for pairs in pieces for pair in pairs]


def _cached_tokens(
    cache: TeacherCache,
    config: ConvertConfig,
    student: LanguageModel,
    tokenizer: PreTrainedTokenizerBase | None,
) -> TokenBatch:
    known = cache.manifest.tokenizer if tokenizer is None else tokenizer_hash(tokenizer)
    cache.check_student(known, student.config.vocab_size, student.longest)
    if cache.num_sequences("train") == 0:
        raise ConfigError(
            f"calibration={cache.directory} has no training sequences, expected some; rebuild it "
            "from more documents or choose another"
        )
    batch = cache.batch(_draw(cache.num_sequences("train"), config))
    return TokenBatch(batch.input_ids, batch.position_ids)


def _own_tokens(
    rows: Sequence[Tensor], config: ConvertConfig, student: LanguageModel
) -> list[TokenBatch]:
    """Return one batch per length among the rows drawn."""
    by_length: dict[int, list[Tensor]] = {}
    singles = [row for each in rows for row in torch.atleast_2d(each)]
    for number in _draw(len(singles), config):
        row = singles[number]
        by_length.setdefault(len(row), []).append(row.long().cpu())
    longest, limit = max(by_length, default=0), student.longest
    if longest < 2 or longest > limit:
        raise ConfigError(
            f"calibration holds rows of up to {longest} tokens, expected 2 to {limit}, which is "
            "what the model reads; cut them"
        )
    batches = map(torch.stack, by_length.values())
    return [TokenBatch(ids, torch.arange(ids.shape[1]).expand_as(ids)) for ids in batches]


def _packed_text(
    documents: Iterable[Document],
    config: ConvertConfig,
    student: LanguageModel,
    tokenizer: PreTrainedTokenizerBase | None,
) -> TokenBatch:
    if tokenizer is None:
        raise ConfigError(
            "calibration is text, but the model was not loaded from a directory with a tokenizer; "
            "give tokenizer=, or token ids"
        )
    limit = student.longest
    if config.calibration_length > limit:
        raise ConfigError(
            f"calibration_length={config.calibration_length}, but the model reads at most {limit} "
            "positions; lower --calibration-length"
        )
    packer = Packer(config.calibration_length, end_token(tokenizer), special_tokens(tokenizer))
    wished = config.calibration_sequences * config.calibration_length * CHARACTERS_A_TOKEN
    for document in _drawn_documents(documents, wished, config.calibration_seed):
        for ids, _ in encode(render(document, tokenizer, "none"), tokenizer):
            packer.push(ids)
    packer.finish()
    packed = packer.take(packer.num_full) if packer.num_full else None
    if packed is None or packed.num_tokens < config.calibration_length:
        raise ConfigError(
            f"calibration={config.calibration} holds less than one sequence of "
            f"{config.calibration_length} tokens; give more text or lower --calibration-length"
        )
    check_vocabulary(int(packed.tokens.max()), student.config.vocab_size)
    drawn = _draw(len(packed.tokens), config)
    starts = torch.from_numpy(packed.starts[drawn])
    return TokenBatch(torch.from_numpy(packed.tokens[drawn]).long(), position_ids(starts))


def _draw(count: int, config: ConvertConfig) -> np.ndarray:
    """Return `calibration_sequences` numbers below `count`, or all of them, in random order."""
    generator = np.random.default_rng(config.calibration_seed)
    return generator.permutation(count)[: config.calibration_sequences]


def _drawn_documents(documents: Iterable[Document], wished: int, seed: int) -> list[Document]:
    """Return documents in random order, just enough of them to hold `wished` characters.

    Each document is equally likely to come first. Documents that are not drawn are dropped as they
    are read.
    """
    generator = np.random.default_rng(seed)
    kept: list[tuple[float, int, int, Document]] = []
    held = read = 0
    for number, document in enumerate(documents):
        size = num_characters(document)
        heapq.heappush(kept, (-generator.random(), number, size, document))
        held, read = held + size, read + size
        while held - kept[0][2] >= wished:
            held -= heapq.heappop(kept)[2]
        if read >= MOST_CHARACTERS:
            break
    return [document for *_, document in sorted(kept, reverse=True)]
