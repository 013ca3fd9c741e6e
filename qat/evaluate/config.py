"""Settings of `qat eval` and `qat generate`."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from qat.config import DeviceSettings, HowMuch, Judged, Sampling, Settings, Speed
from qat.config import Text as OfText
from qat.data.config import AnyTargets, DataFormat, Location, Thinking
from qat.errors import ConfigError
from qat.evaluate.tasks import load_harness


class EvalConfig(DeviceSettings):
    """Settings of `qat eval`: a cache, a teacher, a text and tasks to evaluate a student on."""

    cache_dir: Judged[Location | None] = None
    """Teacher cache: KD, tail KL, top-1 agreement and perplexity on its held-out split."""
    teacher: Judged[str | None] = None
    """Directory or hub id of the teacher: exact KL and its own perplexity, on the cache or the
    text."""
    text: Judged[Path | None] = None
    """UTF-8 text file, or a file of chats or other rows, for sliding-window perplexity."""
    format: OfText[DataFormat] = "auto"
    """Format of a row of the text file; `auto` looks at the fields of the first row."""
    text_field: OfText[str] = "text"
    """Field of a `plain` row that holds the text."""
    thinking: OfText[Thinking] = "false"
    """Chat rendering: thinking off (false), on (true), both, no chat template (none), or all
    three."""
    targets: OfText[AnyTargets] = "auto"
    """Tokens that count: those of assistants with the end of their turn, or all; auto is assistant
    for chats and all for plain text."""
    tasks: Judged[str | None] = None
    """Comma-separated tasks of lm-eval: arc_easy,hellaswag,... (needs the extra eval)."""
    tasks_dir: Judged[Path | None] = None
    """Directory with your own tasks as YAML files of lm-eval."""
    limit: HowMuch[int] = Field(0, ge=0)
    """Number of questions per task, from the first; 0 for all."""
    num_fewshot: HowMuch[int | None] = Field(None, ge=0)
    """Number of few-shot examples; by default as the task defines."""
    context: HowMuch[int] = Field(256, ge=2)
    """Tokens per window of the text."""
    stride: HowMuch[int] = Field(128, ge=1)
    """Tokens between the starts of two windows; each token is scored once."""
    split: HowMuch[Literal["held_out", "train"]] = "held_out"
    """Split of the cache to evaluate on."""
    batch_size: Speed[int] = Field(8, ge=1)
    """Sequences per forward."""
    max_sequences: HowMuch[int] = Field(0, ge=0)
    """Maximum number of sequences of the split, from the first; 0 for all."""
    dtype: Speed[Literal["auto", "fp32", "bf16", "fp16"]] = "auto"
    """Compute dtype; auto is bf16 where it is native."""

    def check_named(self) -> None:
        """Refuse settings that name nothing to evaluate on, or windows that skip tokens.

        Raises:
            ConfigError: no cache, text or tasks are given, `stride` is not less than `context`, or
                lm-eval is not installed or has no such task.
        """
        if self.cache_dir is None and self.text is None and self.tasks is None:
            raise ConfigError(
                "neither a cache nor a text nor tasks to judge by; expected one of them; give "
                "--cache-dir DIR, --text FILE or --tasks NAMES"
            )
        if self.text is not None and self.stride >= self.context:
            raise ConfigError(
                f"stride={self.stride} with context={self.context}; expected a stride below the "
                "context, so that every token has one before it; use --stride "
                f"{max(self.context // 2, 1)}"
            )
        if self.tasks is not None:
            load_harness().check_tasks(self.task_names, self.tasks_dir)

    @property
    def task_names(self) -> list[str]:
        """The names of the tasks."""
        return [name.strip() for name in (self.tasks or "").split(",")]


class SuiteConfig(Settings):
    """Settings of `qat eval --suite`; those of `EvalConfig` apply too."""

    suite: Judged[str | None] = None
    """Tasks on local data, on which student and teacher are both evaluated: names
    (humaneval,gsm8k=FILE,choice=FILE,cloze=FILE) or a TOML file with a table for each."""
    out: Judged[Path | None] = None
    """Directory for a suite's answers and results; a suite goes on with the answers there."""
    allow_code_execution: Judged[bool] = False
    """Run the programs that a model writes in a suite, with limits, as you."""
    engine: Speed[Literal["qat", "vllm"]] = "qat"
    """Program that writes the answers of a suite; vllm opens directories (needs the extra vllm)."""

    def is_asked(self, config: EvalConfig) -> bool:
        """Return whether there is a suite to judge on.

        Raises:
            ConfigError: it has no `out`, or `config` names something else to evaluate on.
        """
        others = [name for name in ("cache_dir", "text", "tasks") if getattr(config, name)]
        if self.suite is None and self.out is None:
            return False
        if others or self.suite is None or self.out is None:
            found = f"{others[0]} beside a suite" if others else "only one of --suite and --out"
            raise ConfigError(
                f"{found}, expected both of --suite and --out, and nothing else to judge by; write "
                "--suite NAMES --out DIR"
            )
        return True


class GenerateConfig(DeviceSettings):
    """Settings of `qat generate`."""

    prompt: Sampling[str] = "Once upon a time"
    """Text to continue, or message to answer."""
    max_new_tokens: Sampling[int] = Field(128, ge=1)
    """Maximum number of new tokens."""
    temperature: Sampling[float] = Field(0.7, ge=0)
    """Sampling temperature; 0 takes the most likely token."""
    top_p: Sampling[float] = Field(0.95, gt=0, le=1)
    """Nucleus sampling: draw from the smallest set of tokens with this probability mass."""
    seed: Sampling[int] = 0
    """Seed of the sampling."""
    raw: Sampling[bool] = False
    """Continue the prompt as it is, without the tokenizer's chat template."""
    draft: Speed[str | None] = None
    """Student with MODEL's tokenizer that drafts tokens, which MODEL checks several at a time; its
    text or its distribution stays the same."""
    draft_tokens: Speed[int] = Field(4, ge=1, le=7)
    """Number of tokens that the student drafts for each pass of MODEL, from 1 to 7."""
    dtype: Speed[Literal["auto", "fp32", "bf16", "fp16"]] = "auto"
    """Compute dtype; auto is bf16 where it is native."""
