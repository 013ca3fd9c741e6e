"""llama.cpp through its Python bindings: the tokens of a text and the logits of a GGUF file."""

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from qat.errors import CheckpointError, ConfigError, how_to_install, is_installed

EXTRA = "llamacpp"


class Engine(Protocol):
    """An open GGUF file."""

    vocab_size: int
    """Width of the logits."""

    def tokens(self, text: str) -> list[int]:
        """Tokenize a text as llama.cpp does, beginning with what the file says texts begin with."""

    def begin_token(self) -> int | None:
        """Return the token that every context begins with; None if the file asks for none."""

    def logits(self, ids: Sequence[int]) -> Tensor:
        """Return the logits behind every token, `(S, V)` float32, valid until the next call."""

    def close(self) -> None:
        """Free the model."""


def library() -> ModuleType:
    """Return the bindings of llama.cpp.

    Raises:
        ConfigError: they, or the package that reads the headers of GGUF files, are not installed.
    """
    for name in ("llama_cpp", "gguf"):
        if not is_installed(name):
            raise ConfigError(
                f"the library {name} is not installed, expected it to run GGUF files; run: "
                f"{how_to_install(EXTRA)}"
            )
    import llama_cpp

    return llama_cpp


class LlamaCpp:
    """A GGUF file in llama.cpp, on a GPU if the bindings were built for one, else on the CPU.

    The number of CPU threads is torch's.
    """

    def __init__(self, path: Path, context: int, *, is_exact: bool = False) -> None:
        """Open the file for up to `context` tokens at once.

        An `is_exact` one keeps keys and values in float32, otherwise they are float16.

        Raises:
            CheckpointError: llama.cpp does not open it.
            ConfigError: the bindings are not installed.
        """
        self._library = library()
        threads = torch.get_num_threads()
        try:
            self._model = self._library.Llama(
                str(path),
                n_ctx=context,
                logits_all=True,
                n_threads=threads,
                n_threads_batch=threads,
                n_gpu_layers=-1,  # all layers; means nothing in a build for the CPU
                type_k=self._library.GGML_TYPE_F32 if is_exact else None,
                type_v=self._library.GGML_TYPE_F32 if is_exact else None,
                verbose=False,
            )
        except ValueError as error:
            raise CheckpointError(
                f"llama.cpp ({self._library.__version__}) does not open {path} ({error}), expected "
                "an architecture and types that it knows; its own programs say why: "
                f"llama-cli -m {path}"
            ) from None
        self.vocab_size = self._model.n_vocab()

    def tokens(self, text: str) -> list[int]:
        """Tokenize a text as llama.cpp does, beginning with what the file says texts begin with."""
        return self._model.tokenize(text.encode(), add_bos=True, special=False)

    def begin_token(self) -> int | None:
        """Return the token that every context begins with; None if the file asks for none."""
        vocabulary = self._library.llama_model_get_vocab(self._model.model)
        if not self._library.llama_vocab_get_add_bos(vocabulary):
            return None
        return self._model.token_bos()

    def logits(self, ids: Sequence[int]) -> Tensor:
        """Return the logits behind every token, `(S, V)` float32, valid until the next call."""
        self._model.reset()
        self._model.eval(ids)
        return torch.from_numpy(self._model.scores[: len(ids)])

    def close(self) -> None:
        """Free the model."""
        self._model.close()


def runs_on_gpu() -> bool:
    """Return whether the bindings were built for a GPU.

    Raises:
        ConfigError: they are not installed.
    """
    return bool(library().llama_supports_gpu_offload())
