"""Compiles kernels several at a time, before any of them runs."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

WORKERS = 12


@contextmanager
def compiling_only() -> Iterator[None]:
    """Inside, a launch of a Triton kernel compiles it and nothing more; all are ready at the end.

    One that does not compile says so when it is launched for real.
    """
    from triton import AsyncCompileMode
    from triton.runtime.jit import JITFunction

    launch = JITFunction.run

    def compiled(
        self: JITFunction,
        *args: object,
        grid: object,
        warmup: bool,
        **options: object,
    ) -> object:
        return launch(self, *args, grid=grid, warmup=True, **options)

    with ThreadPoolExecutor(WORKERS) as workers, AsyncCompileMode(workers, ignore_errors=True):
        JITFunction.run = compiled
        try:
            yield
        finally:
            JITFunction.run = launch
