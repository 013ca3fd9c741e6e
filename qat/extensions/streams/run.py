"""`qat run --stream`: the teacher answers prompts, and a student learns meanwhile.

DIR/  answers.jsonl  first/  and what `qat run` makes

`qat sample` and `qat cache` work in processes of their own, each of which reads what the one before
it has written so far; converting and training take place here. `first` holds the shards with which
the cache begins, as a finished cache, for what cannot wait: the calibration.
"""

import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NoReturn

from qat.cli.run import OwnConfig, Pipeline, Run, Table
from qat.data.cache import MANIFEST
from qat.data.reader import TeacherCache
from qat.data.sources import check_source, sampled_parts
from qat.errors import ConfigError, QatError, Stopped
from qat.export.config import TargetName
from qat.extensions.decode.corpus import SETTINGS
from qat.extensions.streams.arrival import save_beginning
from qat.files import LOOK_S, is_held

logger = logging.getLogger(__name__)

ANSWERS, FIRST = "answers.jsonl", "first"
SHARD_SIZE = 256
"""Sequences per shard if not set: training begins sooner than with large shards."""
FAREWELL_S = 20.0
"""Seconds that a process may take to stop before it is killed."""


class Feeder:
    """A verb of `qat` in a process of its own; its lines are logged here behind its name."""

    def __init__(self, verb: str, *words: object) -> None:
        self.verb = verb
        self._last = ""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "qat", verb, *map(str, words)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C stops training first, which may need what is written
        )
        self._reader = threading.Thread(target=self._relay, daemon=True)
        self._reader.start()

    def _relay(self) -> None:
        for line in self._process.stderr or ():
            if line.strip():
                self._last = line.strip()
                logger.info("%s: %s", self.verb, self._last)

    @property
    def is_running(self) -> bool:
        """True until the process has ended."""
        return self._process.poll() is None

    def check(self) -> None:
        """Raise an error if the process has failed.

        Raises:
            ConfigError: with its last line, or the signal that killed it.
        """
        code = self._process.poll()
        if code is None or code == 0:
            return
        self._reader.join(FAREWELL_S)
        said = self._last or "it said nothing"
        if code < 0:
            said = f"its process was killed by signal {-code}, expected it to end by itself"
        raise ConfigError(f"stage {self.verb}: {said}; here the same 'qat run' goes on")

    def stop(self) -> None:
        """End the process; what it has finished stays."""
        self._process.terminate()
        try:
            self._process.wait(FAREWELL_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(FAREWELL_S)
        if self._process.stderr is not None:
            self._process.stderr.close()


def _leave(number: int, _frame: object) -> NoReturn:
    raise Stopped("stopped by SIGTERM; the same command goes on", 128 + number)


class StreamedPipeline(Pipeline):
    """The stages of a directory, of which the first ones work while later ones do."""

    def __init__(self, verb: str, out: Path) -> None:
        super().__init__(verb, out)
        self.feeders: list[Feeder] = []
        self.judged = 1
        """Held-out sequences that judge the run; set once its settings are known."""

    @contextmanager
    def working(self) -> Iterator[None]:
        """End all processes behind the block.

        Raises:
            ConfigError: the block lacked something because a process had failed.
            Stopped: SIGTERM came, which would otherwise leave the processes alone.
        """
        before = signal.signal(signal.SIGTERM, _leave)
        try:
            yield
        except Stopped:
            raise
        except QatError:
            self.check()  # why a process failed says more than what is lacking
            raise
        finally:
            self.stop()
            signal.signal(signal.SIGTERM, before)

    def feed(self, verb: str, *words: object, out: Path, begun: Path) -> None:
        """Have a verb write `out` in a process of its own; wait until it does, with a file `begun`.

        Raises:
            ConfigError: a process failed before that.
        """
        words = (*words, "--out", out)
        self.say(f"\n$ qat {verb} {' '.join(map(str, words))} &", style="bold")
        self.feeders.append(Feeder(verb, *words))
        while self.feeders[-1].is_running and not (begun.is_file() and is_held(out)):
            self.check()
            time.sleep(LOOK_S)
        self.check()

    def check(self) -> None:
        """Raise the error of the first process that failed, in the order of the stages."""
        for feeder in self.feeders:
            feeder.check()

    def stop(self) -> None:
        """End all processes, the last one first: nobody is left without what it reads."""
        while self.feeders:
            self.feeders.pop().stop()

    def make(self, name: str, verb: str, *words: object) -> Path:
        """Make a stage; the cache is returned as its beginning, and is whole after training."""
        if verb == "cache":
            return self._begin_cache(*words)
        made = super().make(name, verb, *words)
        if verb == "train":
            while any(feeder.verb == "cache" and feeder.is_running for feeder in self.feeders):
                self.check()
                time.sleep(LOOK_S)
            self.check()
            self.stop()  # the cache needs no more answers
        return made

    def _begin_cache(self, *words: object) -> Path:
        cache, first = self.out / "cache", self.out / FIRST
        if self.is_done("cache", "cache"):
            self.say(f"cache: done before, in {cache}")
        else:
            self.has_news = True
            self.feed("cache", *words, out=cache, begun=cache / MANIFEST)
        save_beginning(cache, first, self.judged)
        return first


class StreamedRun(Run):
    """A run on what the teacher answers to `config.data`, while the teacher answers."""

    def __init__(
        self,
        pipeline: Pipeline,
        model: str,
        *,
        config: OwnConfig,
        targets: tuple[TargetName, ...],
        tables: Mapping[str, Table],
    ) -> None:
        """Start sampling, and check every stage on the first answers.

        Raises:
            QatError: see `Run`; or sampling failed.
        """
        check_source(config.data)
        self._feeders = StreamedPipeline(pipeline.verb, pipeline.out)
        with ExitStack() as stack:
            stack.enter_context(self._feeders.working())
            self._sample(config, config.teacher or model, tables.get("sample", {}))
            answers = str(pipeline.out / ANSWERS)
            super().__init__(
                self._feeders,
                model,
                config=config.model_copy(update={"data": answers}),
                targets=targets,
                tables=tables,
            )
            self._working = stack.pop_all()  # until `go` ends
        self._feeders.judged = self.configs["train"].eval_sequences

    def _sample(self, config: OwnConfig, teacher: str, table: Table) -> None:
        """Start sampling unless all answers are there; wait for the settings of the first shard.

        Raises:
            ConfigError: the recipe sets what `qat run` sets itself, or sampling failed.
        """
        pipeline = self._feeders
        answers = pipeline.out / ANSWERS
        settings = {name.replace("-", "_"): value for name, value in table.items()}
        if taken := sorted({"model", "prompts", "out"} & settings.keys()):
            raise ConfigError(
                f"[sample] {taken[0]} is for 'qat run' itself to say, expected other keys; drop it"
            )
        if answers.exists():
            pipeline.say(f"sample: done before, in {answers}")
            return
        if not pipeline.recorded:  # so that the next call knows whose directory it is
            pipeline.record({"run": {}})
        everywhere = {"device": config.device, "dtype": config.dtype}
        settings = {name: value for name, value in everywhere.items() if value} | settings
        words = (teacher, "--prompts", config.data, *words_of(settings))
        pipeline.feed("sample", *words, out=answers, begun=sampled_parts(answers) / SETTINGS)

    def go(self) -> dict[str, object]:
        """Make what is not made yet; end all processes, whatever happens."""
        with self._working:
            return super().go()

    def _table(self, stage: str, tables: Mapping[str, Table], flags: dict[str, Table]) -> Table:
        own: dict[str, Table] = {"cache": {"shard_size": SHARD_SIZE}, "train": {"order": "arrival"}}
        return own.get(stage, {}) | super()._table(stage, tables, flags)

    def _wired(self, stage: str) -> list[object]:
        """Return a stage's words; the calibration reads the beginning of the cache."""
        cache, first = (self.pipeline.out / name for name in ("cache", FIRST))
        words = super()._wired(stage)
        return [first if stage == "convert" and word == cache else word for word in words]

    def _fit_to(self, sequences: int) -> None:
        """Fit batch size and steps to what the cache will hold; `sequences` is its beginning."""
        if self.text is None:
            sequences = TeacherCache.open(self.pipeline.out / "cache").num_sequences("train")
        super()._fit_to(sequences if self.text is None else self.text.sequences)


def words_of(settings: Table) -> list[object]:
    """Return settings as the words of a command line."""
    words: list[object] = []
    for name, value in settings.items():
        if value is not False:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [value])]
    return words
