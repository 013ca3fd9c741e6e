"""The engine vLLM for the answers of a suite (`--engine vllm`), if it is installed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from qat.errors import ConfigError, how_to_install, is_installed
from qat.models.directory import resolve

if TYPE_CHECKING:  # it loads torch
    from qat.extensions.decode.slots import Batch, Request

MEMORY = {"gpu_memory_utilization": 0.85}
"""The share of the memory that vLLM takes: its own default refuses a GPU with anything on it."""


def check_engine(sources: Iterable[str]) -> None:
    """Refuse models that vLLM does not open, or a Python without it.

    Raises:
        ConfigError: vLLM is missing, or a model is no directory and no hub id.
    """
    if not is_installed("vllm"):
        raise ConfigError(
            "engine=vllm, but vllm is not installed; expected it beside qat and lm-eval, in an "
            f"environment of its own; run: {how_to_install('vllm')}"
        )
    for source in sources:
        if Path(resolve(source)).is_file():
            raise ConfigError(
                f"engine=vllm, but {source} is a file, expected a directory, which vLLM opens; "
                "leave out --engine"
            )


class VllmSampler:
    """A `Sampler` that lets vLLM continue prompts, each token the most likely one."""

    def __init__(self, source: str, dtype: str, batch: Batch) -> None:
        from vllm import LLM

        self._ends, self._num_slots = sorted(batch.ends), batch.num_slots
        self._llm = LLM(
            model=resolve(source),
            dtype=dtype,
            max_model_len=batch.num_positions,
            max_num_seqs=batch.num_slots,
            disable_log_stats=True,
            **MEMORY,
        )

    def sample(self, requests: Iterable[Request]) -> Iterator[tuple[int, list[int]]]:
        """Continue as many rows at once as the engine takes; see `Sampler`."""
        from vllm import SamplingParams

        waiting = enumerate(requests)
        while part := dict(islice(waiting, self._num_slots)):
            how = [
                SamplingParams(
                    temperature=0.0,
                    max_tokens=request.limit,
                    stop_token_ids=self._ends,
                    detokenize=False,
                )
                for request in part.values()
            ]
            prompts = [{"prompt_token_ids": request.ids} for request in part.values()]
            found = self._llm.generate(prompts, how, use_tqdm=False)
            yield from zip(part, ([*each.outputs[0].token_ids] for each in found), strict=True)

    def close(self) -> None:
        """End the engine's processes."""
        self._llm.llm_engine.engine_core.shutdown()
