"""Read, tokenize and pack the text of a cache in a child process.

Python runs one thread of a process at a time. A thread that tokenizes beside the one that launches
the teacher's kernels delays every operator, by up to 5 ms, and the device runs out of work.
"""

import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from logging.handlers import QueueHandler
from threading import Thread
from traceback import format_exception

from qat.data.config import CacheConfig, CacheSettings
from qat.data.sources import open_source
from qat.data.stream import ShardBlock, blocks
from qat.data.template import start_rendering
from qat.errors import CacheError
from qat.models.load import load_tokenizer

CHILD = """
import sys
sys.path[:] = {path!r}
from qat import logs
logs.configure()
logs.keep_to_warnings()  # its parent opens text and tokenizer too, and logs what is to be known
from qat.models.block_process import serve
serve()
"""


@contextmanager
def blocks_apart(config: CacheConfig, settings: CacheSettings) -> Iterator[Iterator[ShardBlock]]:
    """Start the process, and yield an iterator over its blocks, which raises its errors.

    The blocks are those of `qat.data.stream.blocks` for the text and the tokenizer of `config`. The
    process is killed at the end of the `with` statement, and ends by itself if this one is killed.

    Raises:
        DataError, ConfigError: see `blocks`; raised in the place of a block.
        CacheError: the process was killed.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD.format(path=[*map(str, sys.path)])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C must not reach the child
    )
    try:
        level = logging.getLogger("qat").getEffectiveLevel()
        with suppress(BrokenPipeError):  # it died at once, which the first block reports
            pickle.dump((config, settings, level), process.stdin)
            process.stdin.flush()
        yield _received(process)
    finally:
        process.kill()
        process.communicate()


def _received(process: subprocess.Popen) -> Iterator[ShardBlock]:
    while True:
        try:
            item = pickle.load(process.stdout)  # noqa: S301 - of our own process
        except (EOFError, pickle.UnpicklingError):
            raise CacheError(
                f"the process that reads the text ended with status {process.wait()}, expected all "
                "blocks of it; finished shards are kept: run the same command again, with more "
                "memory if it was killed"
            ) from None
        if item is None:
            return
        if isinstance(item, Exception):
            raise item
        if isinstance(item, logging.LogRecord):
            logging.getLogger(item.name).handle(item)
        else:
            yield item


class _Pipe(QueueHandler):
    """Sends objects to the parent process, and log records among them."""

    def enqueue(self, item: object) -> None:
        with self.lock:  # records come from several threads
            pickle.dump(item, self.queue)
            self.queue.flush()


def serve() -> None:
    """Send the blocks of what standard input asks for to standard output."""
    config, settings, level = pickle.load(sys.stdin.buffer)  # noqa: S301 - of our own process
    Thread(target=_end_with_parent, daemon=True).start()
    pipe = _Pipe(os.fdopen(os.dup(1), "wb"))
    os.dup2(2, 1)  # a library that prints must not print among the blocks
    try:
        if settings.format != "plain" and settings.thinking != "none":
            start_rendering()
        source = open_source(config.data, config.format, config.text_field)
        tokenizer = load_tokenizer(config.described_by, trust_remote_code=config.trust_remote_code)
        logger = logging.getLogger("qat")
        logger.addHandler(pipe)
        logger.setLevel(level)
        logger.propagate = False
        for block in blocks(source.rows, tokenizer, settings):
            pipe.enqueue(block)
        pipe.enqueue(None)
    except Exception as error:  # noqa: BLE001 - the parent raises it
        error.add_note("".join(format_exception(error)))  # else the traceback of a bug is lost
        pickle.loads(pickle.dumps(error))  # noqa: S301 - prints here an error that cannot be sent
        pipe.enqueue(error)


def _end_with_parent() -> None:
    os.read(0, 1)  # returns when the parent's end is closed
    os._exit(1)
