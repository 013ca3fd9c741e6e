"""The verbs for models in memory: `qat.quantize`, `qat.load`, `qat.save`, `qat.distill`.

Each calls the same function as its verb. Additional keywords are the flags of the verb, with
underscores: `qat.distill(..., max_steps=60)` is `qat train --max-steps 60`.
"""

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qat.backend.device import select
from qat.convert.calibration_data import Calibration, calibration_batches
from qat.convert.config import ConvertConfig
from qat.convert.convert import convert_model
from qat.data.reader import TeacherCache
from qat.errors import ConfigError
from qat.models.checkpoint import save_checkpoint
from qat.models.decoding import read_packed
from qat.models.hf_quantizer import let_push
from qat.models.language_model import LanguageModel
from qat.models.load import load_model, load_tokenizer
from qat.models.split_check import check_split
from qat.ranks import joined
from qat.train.config import TrainConfig
from qat.train.start import Loaded, TrainReport, train_student


def load(
    source: str | Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load the model `source`, packed or float, on `device` and in eval mode.

    Args:
        source: model directory, run directory (its best student), GGUF file or hub id.
        device: auto, cpu, cuda, cuda:1, mps.
        dtype: dtype of everything that is not packed: auto, fp32, bf16, fp16.
        trust_remote_code: run the code that comes with the model.

    Raises:
        CheckpointError: there is no such model, or it is damaged.
        ConfigError: the device is not there or cannot compute in `dtype`.
    """
    how = {"device": device, "dtype": dtype, "trust_remote_code": trust_remote_code}
    return load_model(str(source), **how).model


def save(
    model: PreTrainedModel,
    out: str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    replace: bool = False,
) -> None:
    """Write a quantized model as a packed checkpoint to `out`, atomically.

    Args:
        model: quantized by `quantize`, `load` or 'qat convert'.
        out: directory to create.
        tokenizer: tokenizer to save with it; by default that of the model directory it was loaded
            from. A model that was never loaded is saved without one.
        replace: replace an older packed checkpoint at `out`.

    Raises:
        ConfigError: `out` is not empty; with `replace`, it is no packed checkpoint.
        CheckpointError: nothing of `model` is quantized, or it cannot be written.
    """
    save_checkpoint(model, tokenizer or _tokenizer_of(model), Path(out), replace=replace)


def quantize(
    model: PreTrainedModel,
    to: str | None = "q2a4",
    *,
    calibration: Calibration | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    base: PreTrainedModel | None = None,
    **settings: object,
) -> PreTrainedModel:
    """Quantize `model` in place, without training, and return it: `w = codebook[indices] * scale`.

    Afterwards it is in float32 and eval mode, on the device where it was.

    Args:
        model: a causal language model, float or quantized.
        to: a preset (q2a4, q4a4, ...), a TOML file with a plan, or None with `bits_budget=`.
        calibration: data that is run through the model to reduce the error: a teacher cache or its
            directory, a text file, a list of texts, or of token ids `(S,)` or `(N, S)`.
        tokenizer: for texts; by default that of the model directory it was loaded from.
        base: the float model to take weights from, if `model` is already quantized.
        settings: other flags of 'qat convert', such as `bits_budget`, `group_size` (features) and
            `calibration_sequences`.

    Raises:
        ConfigError: a setting is wrong, or does not fit the model.
        CacheError, DataError: the calibration data cannot be read or is of another tokenizer.
    """
    student = _in_memory(model)
    values = {"to": to, "device": str(student.device), **settings}
    if calibration is not None:
        values["calibration"] = str(getattr(calibration, "directory", calibration))[:80]
    config = ConvertConfig.parse(values, "qat.quantize")
    batches = []
    if calibration is not None:
        if not (isinstance(calibration, Sequence) and isinstance(calibration[0], Tensor)):
            tokenizer = tokenizer or _tokenizer_of(model)
        batches = calibration_batches(calibration, config, student, tokenizer)
    base = None if base is None else _in_memory(base)
    convert_model(student, config, base=base, calibration=batches)
    read_packed(model)
    let_push()
    return model


def distill(
    student: PreTrainedModel | str | Path,
    cache: TeacherCache | str | Path,
    *,
    out: str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    resume: bool = False,
    **settings: object,
) -> TrainReport:
    """Train a quantized student against a teacher cache; all results are in the run `out`.

    A student in memory is trained in place and should not be used afterwards:
    `qat.load(report.final)` is the best one.

    Args:
        student: quantized model in memory, or the directory of one.
        cache: teacher cache, its directory, or its address (s3://...).
        out: run directory to create; see 'qat train'.
        tokenizer: the student's; by default that of the model directory it was loaded from.
        resume: continue the run in `out`, if there is one.
        settings: other flags of 'qat train', such as `max_steps`, `batch_size` (sequences),
            `learn`, `mlp_only` and `loss`, which also accepts names from `qat.losses.register`.

    Returns:
        The checkpoint to use, the steps, and its held-out score in nats per token.

    Raises:
        ConfigError, CacheError, CheckpointError: a setting, the cache or the student does not fit.
        TrainingError: the loss is no longer a number.
        Stopped: the run was asked to stop; it was saved.
    """
    cache_dir = str(cache.directory if isinstance(cache, TeacherCache) else cache)
    values = {"cache_dir": cache_dir, **settings}
    loaded = None
    if isinstance(student, PreTrainedModel):
        values.setdefault("device", str(_in_memory(student).device))
    config = TrainConfig.parse(values, "qat.distill")
    backend = select(config.device)
    if isinstance(student, PreTrainedModel):
        tokenizer = tokenizer or _tokenizer_of(student)
        if tokenizer is None:
            raise ConfigError(
                "the student was not loaded from a directory, so its tokenizer is not known, "
                "expected the cache's; give tokenizer="
            )
        loaded = Loaded(LanguageModel(student.to(backend.device)), tokenizer)
        student = student.name_or_path or type(student).__name__
    session, is_safe = backend.session(config.xla_cache_dir), config.ranks == "safe"
    with session, joined(config.device, is_safe=is_safe) as ranks:
        return train_student(
            config, str(student), Path(out), resume=resume, ranks=ranks, loaded=loaded
        )


def _in_memory(model: PreTrainedModel) -> LanguageModel:
    """Return the model as the verbs load it: in float32 and eval mode."""
    nn.Module.float(model)  # transformers' own `float` refuses quantized models
    found = LanguageModel(model.eval())
    check_split(found)
    return found


def _tokenizer_of(model: PreTrainedModel) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of the directory that the model was loaded from; None if it was not."""
    return load_tokenizer(model.name_or_path) if model.name_or_path else None
