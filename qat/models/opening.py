"""The single way in which untrusted model files reach transformers.

transformers does not validate what it reads. So before it reads, checksums are compared and tables
are validated. An error that it, or a library below it, still raises over a file becomes one line.
An error that began in our own code is our bug and keeps its traceback.
"""

import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Literal, TypeVar

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    __version__,
)
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from qat.errors import CheckpointError, QatError, how_to_install, is_installed
from qat.files import parse_json
from qat.models.attention import check_attention
from qat.models.directory import (
    ADAPTER,
    GGUF,
    SOURCES,
    as_transformers_asks,
    check_checksums,
    check_indices,
    needs_no_hub,
)
from qat.process import is_out_of_memory

T = TypeVar("T")
TABLES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    ADAPTER,
)
"""Small files of a model directory that must hold a JSON object, if they exist."""
MOST = {
    r"(^|_)layers?$|_layers_|^depth|(^|_)blocks$": 2**12,
    "experts": 2**14,
    "heads": 2**16,
    "(size|width|dim|positions|length)$|^n_(embd|ctx|inner)$": 2**28,
}
"""Upper bounds on numbers in config.json, by patterns of their names."""
READERS = (
    "transformers",
    "transformers_modules",
    "huggingface_hub",
    "tokenizers",
    "safetensors",
    "gguf",
    "peft",
    "mlx_lm",
    "compressed_tensors",
    "torchao",
)
"""Packages that read a model's files, and the code that a model brings."""
GGUFS = sorted({*GGUF_SUPPORTED_ARCHITECTURES} - {"general", "tokenizer", "t5", "umt5"})
"""Decoder architectures that transformers reads from llama.cpp's files."""
KNOWN = {
    "trust_remote_code": (
        "brings code of its own, expected {wished} that transformers knows; read that code, and if "
        "you trust it add --trust-remote-code (qat cache, convert, train)"
    ),
    "GGUF model with architecture (.{1,60}?) is not supported": (
        "holds a model of the GGUF architecture {name}, expected one that transformers "
        f"{__version__} reads from such files ({', '.join(GGUFS)}); name the directory "
        "or the hub id of the model that it was made from"
    ),
    r"Unrecognized configuration class <class '[\w.]*?(\w+)'> for this kind of AutoModel": (
        "has a configuration of the class {name}, for which transformers has no causal language "
        "model, expected one that has; name the whole model if this is a part of one, or choose "
        "another"
    ),
    "has model type `(.{1,60}?)` but Transformers does not recognize": (
        "holds a model of type {name}, expected one that transformers "
        f"{__version__} knows; choose another model, or update transformers"
    ),
    "compressed-tensors>=.{1,20} is required": (
        "holds weights of compressed-tensors, expected the package that reads them; start from the "
        "float model, or run: {ship}"
    ),
    "automatic conversion of the weights": (
        "holds quantized weights whose parts are missing, or do not fit each other, expected what "
        "its quantization_config says; copy or download it anew"
    ),
    "sentencepiece or tiktoken installed|`tiktoken` is required": (
        "holds no tokenizer.json, expected one; copy it there, or, where the tokenizer is in "
        "another file (such as tokenizer.model), install what reads that: {python} -m pip install "
        "sentencepiece tiktoken protobuf"
    ),
}
"""Messages for the user, by patterns of transformers' errors."""
PLACES = {"generation": "generation_config.json", "token": "the tokenizer's files"}
"""The file that a transformers module reads, by a word in the module's name."""


class Opening:
    """A block that reads the content of a resolved `source`, which should be `wished`.

    Every file with a checksum is compared with it first; without `weights`, all but the weights.

    Raises:
        CheckpointError: a file is not the one that was written, is no JSON object, or is not
            supported by transformers.
    """

    def __init__(self, source: str | Path, wished: str, *, weights: bool = False) -> None:
        self._source, self._wished, self._weights = source, wished, weights

    def __enter__(self) -> None:
        directory = Path(self._source)
        if directory.suffix == GGUF:
            if not is_installed("gguf"):
                raise CheckpointError(
                    f"{self._source} is a GGUF file, expected the package that reads such; run: "
                    f"{how_to_install('ship')}"
                )
            from qat.models.gguf_header import check_gguf  # other models need no reader of GGUF

            if directory.is_file():
                check_gguf(directory)
            # transformers 5.23 assumes 128 for every Qwen3, whatever the file states
            GGUF_CONFIG_MAPPING["qwen3"].setdefault("attention.key_length", "head_dim")
        if directory.is_dir():
            check_checksums(directory, weights=self._weights)
            _check_tables(directory)
            check_indices(directory)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None or not is_of_files(error, trace):
            return
        for pattern, sentence in KNOWN.items():
            if found := re.search(pattern, str(error)):
                name = found[1] if found.groups() else ""
                said = sentence.format(
                    name=name,
                    wished=self._wished,
                    python=sys.executable,
                    ship=how_to_install("ship"),
                )
                raise CheckpointError(f"{self._source} {said}") from None
        raise CheckpointError(
            f"{self._source} does not give {self._wished} ({_place(trace)}{_short(error)}); "
            f"expected {SOURCES}: check the name, or copy the files anew"
        ) from error


def read_part(
    source: str, part: Literal["config", "tokenizer"], read: Callable[[str, dict[str, str]], T]
) -> T:
    """Apply `read` to a resolved source; for a GGUF file, to the cached conversion of that part.

    `read` gets the path and the GGUF file as arguments of `from_pretrained`.
    """
    place, file = as_transformers_asks(source)
    if not file:
        return read(place, file)
    from qat.models.gguf_cache import PARTS, opened  # other models need no reader of GGUF

    return opened(source, PARTS[part], read)


def read_config(source: str, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Return the configuration of a resolved `source`; no weights are read.

    Raises:
        CheckpointError: there is none, it is damaged, or names an attention kernel to fetch.
    """
    with Opening(source, "a model's configuration"):
        config = read_part(
            source,
            "config",
            lambda place, file: AutoConfig.from_pretrained(
                place,
                local_files_only=needs_no_hub(place),
                trust_remote_code=trust_remote_code,
                **file,
            ),
        )
    if Path(source).suffix == GGUF and Path(source).is_file():
        from qat.models.gguf_layout import read_rope_scaling  # other models need no reader of GGUF

        read_rope_scaling(Path(source), config)
    check_attention(config)
    _check_numbers(config)
    return config


def auto_class(
    config: PreTrainedConfig,
) -> type[AutoModelForCausalLM | AutoModelForImageTextToText]:
    """Return the class that opens a model of that configuration: of text, or of images and text."""
    kind = type(config)
    if kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def _check_numbers(config: PreTrainedConfig) -> None:
    """Refuse a configuration with more layers or larger sizes than any real model has.

    transformers would build as many layers, and tables of that size.
    """
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    for part in (config, *filter(None, parts)):
        for key, value in vars(part).items():
            most = next((most for sign, most in MOST.items() if re.search(sign, key)), None)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if most is not None and is_number and not value <= most:
                raise CheckpointError(
                    f"config.json of {config.name_or_path or 'the model'} has {key}={value!r:.40}, "
                    f"expected at most {most:,}; copy the model anew"
                )


def is_of_files(error: BaseException, trace: TracebackType | None) -> bool:
    """Return whether an error began in code that reads or runs a model's files, and not in ours."""
    if isinstance(error, QatError) or is_out_of_memory(error):
        return False
    is_panic = type(error).__name__ == "PanicException"  # Rust panics are no Exception
    if not (is_panic or isinstance(error, Exception)):
        return False
    frames = (frame for frame, _ in traceback.walk_tb(trace))
    packages = [str(frame.f_globals.get("__name__")).partition(".")[0] for frame in frames]
    known = [package for package in packages if package in (*READERS, "qat")]
    return known[-1:] not in ([], ["qat"])  # the innermost one


def _place(trace: TracebackType | None) -> str:
    """Return the file that was being read, as transformers' modules show it, with a colon."""
    modules = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(trace)]
    for module in reversed(modules):
        for word, place in PLACES.items():
            if word in module:
                return f"{place}: "
    return ""


def _short(error: BaseException) -> str:
    words = " ".join(str(error).split())
    kind = type(error).__name__
    text = words if isinstance(error, OSError | ValueError | RuntimeError) else f"{kind}: {words}"
    text = text if words else kind
    return text if len(text) <= 300 else f"{text[:300]}..."


def _check_tables(directory: Path) -> None:
    found = [name for name in TABLES if (directory / name).is_file()]
    for name in found:
        read_table(directory / name)
    if {ADAPTER, "config.json"} <= {*found}:
        raise CheckpointError(
            f"{directory} holds an adapter ({ADAPTER}), for which transformers would load another "
            "model, expected a model or an adapter; remove that file or config.json"
        )


def read_table(path: Path) -> dict[str, object]:
    """Return the object in a JSON file.

    Raises:
        CheckpointError: it holds something else.
    """
    try:
        values = parse_json(path.read_bytes())
    except ValueError as error:
        raise CheckpointError(
            f"{path} is not JSON ({error}), expected a table; copy it anew"
        ) from None
    if not isinstance(values, dict):
        raise CheckpointError(
            f"{path} holds no JSON object but a {type(values).__name__}, expected a table; copy it "
            "anew"
        )
    return values
