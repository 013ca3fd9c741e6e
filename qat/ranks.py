"""Ranks: the processes of a run, one device each, and their collective operations.

Sums of tensors use NCCL between GPUs and gloo between CPUs; exchanges between hosts always use
gloo. Received data is never unpickled.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from qat import errors
from qat.backend import device as backends
from qat.backend.base import Launch, launched
from qat.errors import ConfigError, QatError, Stopped
from qat.logs import keep_to_warnings

TIMEOUT = timedelta(minutes=30)
"""Timeout for collectives: long enough for an evaluation on the first rank."""
BUCKET_BYTES = 2**28
"""Largest size of one exchange, and of the additional memory that it needs."""
MOST_SUMS = 2**16
"""Exchanges whose times are kept until `exchange_s` is called."""
UNDER_WAY = 7
"""Exchanges of rows in flight: those of a dense layer's linears. A compiled layer returns all
gradients at once, and they are sent while the previous layer runs backward."""
EXCHANGING = 8
"""The most multiprocessors that an exchange takes from concurrent computation."""
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""All-gather of a single tensor, by its name from torch 2.13 on or by the older one."""

T = TypeVar("T")
Wait = Callable[[], object]
"""Waits for an exchange in flight: later work on the device runs after it."""


@dataclass(eq=False)
class Ranks:
    """All processes of a run, from the view of one; with one process nothing is exchanged."""

    rank: int
    """The index of this process, from 0."""
    size: int
    """The number of processes."""
    device: torch.device
    """The device of this process."""
    is_safe: bool = False
    """True to overlap nothing: each exchange ends before later work begins, and steps are not
    recorded."""
    bytes_moved: int = 0
    """Bytes that this process sent for sums and for rows of other ranks."""
    _begun: deque[Wait] | None = None
    """Exchanges to wait for after a block of `async_gathers`; None outside of one."""
    _deferred: deque[Wait] = field(default_factory=deque)
    """Actions on sums of rows that are still due, oldest first."""
    _sums: deque[tuple] = field(default_factory=lambda: deque(maxlen=MOST_SUMS))
    """Device time marks before and after each exchange since `exchange_s` was last called."""
    _devices: dist.ProcessGroup | None = None
    _hosts: dist.ProcessGroup | None = None

    @property
    def is_first(self) -> bool:
        """True if this rank writes the files that exist once: recipe, metrics, checkpoints."""
        return self.rank == 0

    def apart(self) -> "Ranks":
        """Return the same ranks with a process group of their own on the hosts, for another thread.

        All ranks must call it at the same point.
        """
        if self.size == 1:
            return self
        hosts = dist.new_group(backend="gloo", timeout=TIMEOUT)
        device = torch.device("cpu")
        return Ranks(self.rank, self.size, device, self.is_safe, _devices=hosts, _hosts=hosts)

    @torch.no_grad()
    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all ranks.

        Floats are summed in float32, integers in their dtype. The tensors are sent in buckets of up
        to `BUCKET_BYTES`, in their given order, which must be the same on all ranks. Does not
        synchronize with a GPU.
        """
        if self.size == 1:
            return
        for bucket in _buckets(tensors):
            dtype = _exchanged_dtype(bucket[0])
            flat = torch.cat([tensor.flatten().to(dtype) for tensor in bucket])
            self._noted(partial(self._all_reduce, flat))
            self.bytes_moved += flat.nbytes
            parts = flat.split([tensor.numel() for tensor in bucket])
            torch._foreach_copy_(
                list(bucket), [p.view_as(t) for p, t in zip(parts, bucket, strict=True)]
            )

    def rows(self, count: int, rank: int | None = None) -> slice:
        """Return the slice of `count` rows that this rank or `rank` owns: even parts, in order."""
        rank = self.rank if rank is None else rank
        return slice(count * rank // self.size, count * (rank + 1) // self.size)

    @torch.no_grad()
    def gather_rows(self, mine: Tensor, count: int, out: Tensor | None = None) -> Tensor:
        """Gather all of `count` rows, to which each rank contributes its own (`rows`).

        The dtype is that of `mine`. With `out`, which must be contiguous, the rows are written into
        it; `mine` may be a view of it. Inside `async_gathers` such a call only starts the exchange.
        """
        is_given = out is not None
        out = mine.new_empty(count, *mine.shape[1:]) if out is None else out.detach()
        most = -(-count // self.size)
        given = _padded(mine, most)  # parts differ by a row where `size` does not divide `count`
        parts = [out[self.rows(count, rank)] for rank in range(self.size)]
        pieces = [part if len(part) == most else torch.empty_like(given) for part in parts]
        wait = self._all_gather(out if count == most * self.size else pieces, given)
        self.bytes_moved += given.nbytes

        def end() -> None:
            self._noted(wait)
            for part, piece in zip(parts, pieces, strict=True):
                if part is not piece:
                    part.copy_(piece[: len(part)])

        if self._begun is None or not is_given or self.is_safe:
            end()
        else:
            _follow(self._begun, end)
        return out

    @contextmanager
    def async_gathers(self) -> Iterator[Wait]:
        """Let `gather_rows` with `out` only start exchanges in the block; yield the function that
        waits.

        Other work can be given to the device in the meantime.
        """
        self._begun = begun = deque()
        try:
            yield partial(_end, begun)
        finally:
            self._begun = None

    @torch.no_grad()
    def sum_rows(self, whole: Tensor) -> Callable[[], Tensor]:
        """Start to sum `whole` over all ranks; the result returns this rank's `rows` in float32.

        Rows are sent in the dtype of `whole` to the rank that owns them, which sums them in
        float32.
        """
        sizes = [len(range(len(whole))[self.rows(len(whole), rank)]) for rank in range(self.size)]
        count = sizes[self.rank]
        found = whole.new_empty(self.size * count, *whole.shape[1:])
        wait = self._all_to_all(found, whole.contiguous(), [count] * self.size, sizes)
        self.bytes_moved += whole.nbytes
        if self.is_safe:
            self._noted(wait)

        def rows() -> Tensor:
            if not self.is_safe:
                self._noted(wait)
            return found.view(self.size, count, *whole.shape[1:]).sum(0, dtype=torch.float32)

        return rows

    def defer(self, act: Wait) -> None:
        """Defer `act`, which waits for a sum of rows, until `UNDER_WAY` others have started.

        Actions run in the order that they were given, the last ones in `finish_deferred`.
        """
        if self.is_safe:
            act()
        else:
            _follow(self._deferred, act)

    def finish_deferred(self) -> None:
        """Run all deferred actions."""
        _end(self._deferred)

    def exchange_s(self) -> float | None:
        """Return the seconds since the last call that work waited for exchanges or slower ranks.

        Transfers that overlap with computation are not included. None for a run of one process.
        Synchronizes with the device.
        """
        if self.size == 1:
            return None
        sums = [self._sums.popleft() for _ in range(len(self._sums))]
        return sum(backends.on(self.device).seconds_between(*marks) for marks in sums)

    def copy_from_first(self, values: Tensor) -> Tensor:
        """Return the first rank's `values`; all ranks pass a tensor of the same shape and dtype."""
        if self.size == 1:
            return values
        copied = values.detach().clone(memory_format=torch.contiguous_format)
        dist.broadcast(copied, 0, group=self._group_for(copied))
        return copied

    def texts(self, text: str) -> list[str]:
        """Return the `text` of each rank, in order, on all ranks."""
        if self.size == 1:
            return [text]
        # frombuffer takes no empty buffer
        octets = torch.frombuffer(bytearray(text.encode()) + b"\0", dtype=torch.uint8)[:-1]
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(octets)]), group=self._hosts)
        longest = max(int(length) for length in lengths)  # an all-gather has one shape
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: len(octets)] = octets
        gathered = [torch.zeros_like(mine) for _ in range(self.size)]
        if longest:
            dist.all_gather(gathered, mine, group=self._hosts)
        pairs = zip(gathered, lengths, strict=True)
        return [all_[: int(length)].numpy().tobytes().decode() for all_, length in pairs]

    def sync_errors(self, act: Callable[[], T]) -> T:
        """Return the result of `act` after it has succeeded on every rank.

        Raises:
            QatError: it failed on some rank; all ranks raise the error of the first of these, with
                its number. `OSError` counts as a failure too.
        """
        if self.size == 1:
            return act()
        result, failure = None, ""
        try:
            result = act()
        except (QatError, OSError) as error:
            kind = type(error) if type(error) in vars(errors).values() else ConfigError
            failure = f"{kind.__name__}\n{error}"
        for rank, failed in enumerate(self.texts(failure)):
            if failed:
                kind_name, _, message = failed.partition("\n")
                raise getattr(errors, kind_name)(f"rank {rank}: {message}")
        return result

    def check_same(self, **facts: str) -> None:
        """Check that all ranks were given the same values.

        Raises:
            ConfigError: a rank has another value than the first one.
        """
        for name, value in facts.items():
            gathered = self.texts(value)
            for rank, other in enumerate(gathered):
                if other != gathered[0]:
                    raise ConfigError(
                        f"rank {rank} has {name}={other}, rank 0 has {gathered[0]}; give all ranks "
                        f"the same {name}"
                    )

    def wait(self) -> None:
        """Wait until all ranks are here; only the host waits, not its device."""
        if self.size > 1:
            dist.barrier(group=self._hosts)

    def _noted(self, exchange: Wait) -> None:
        """Run or wait for an exchange, and record how long the device's work was blocked."""
        backend = backends.on(self.device)
        before = backend.mark()
        exchange()
        self._sums.append((before, backend.mark()))

    def _all_reduce(self, flat: Tensor) -> None:
        dist.all_reduce(flat, group=self._group_for(flat))

    def _all_gather(self, out: Tensor | list[Tensor], given: Tensor) -> Wait:
        gather = ALL_GATHER if isinstance(out, Tensor) else dist.all_gather
        return gather(out, given, group=self._group_for(given), async_op=True).wait

    def _all_to_all(
        self, found: Tensor, given: Tensor, found_sizes: list[int], given_sizes: list[int]
    ) -> Wait:
        sizes, group = (found_sizes, given_sizes), self._group_for(given)
        return dist.all_to_all_single(found, given, *sizes, group=group, async_op=True).wait

    def _group_for(self, tensor: Tensor) -> dist.ProcessGroup | None:
        return self._hosts if tensor.device.type == "cpu" else self._devices


ALONE = Ranks(0, 1, torch.device("cpu"))
"""The ranks of a single process."""


class SimulatedRanks(Ranks):
    """The first of several ranks, simulated as if all others held the same data.

    Exchanges use the same memory but no time.
    """

    def _all_reduce(self, flat: Tensor) -> None:
        flat *= self.size

    def _all_gather(self, out: Tensor | list[Tensor], given: Tensor) -> Wait:
        pieces = out.chunk(self.size) if isinstance(out, Tensor) else out
        torch._foreach_copy_(list(pieces), [given] * self.size)
        return lambda: None

    def _all_to_all(
        self, found: Tensor, given: Tensor, found_sizes: list[int], given_sizes: list[int]
    ) -> Wait:
        first = given[: given_sizes[0]]
        torch._foreach_copy_(list(found.split(found_sizes)), [first] * self.size)
        return lambda: given  # keep it alive as long as a real exchange would


@contextmanager
def joined(device: str, *, exchange: bool = True, is_safe: bool = False) -> Iterator[Ranks]:
    """Yield this process's `Ranks` if a launcher started several; else those of a single process.

    With `exchange=False` only host data is exchanged, and the device may be XLA: XLA devices of
    several processes are not connected.

    Raises:
        ConfigError: several ranks cannot use `device`.
    """
    launch = launched()
    if launch.world == 1:
        yield Ranks(0, 1, ALONE.device, is_safe) if is_safe else ALONE
        return
    if device == "xla" and exchange:
        raise ConfigError(
            f"device=xla, but {launch.world} ranks would exchange tensors, expected one process; "
            "start it without the launcher: the XLA devices that it sees share its batches"
        )
    if device not in {"auto", "cuda", "cpu", "xla"}:
        raise ConfigError(
            f"device={device}, but {launch.world} ranks need a device each; use --device auto, "
            "cuda or cpu"
        )
    if launch.rank:
        keep_to_warnings()
    place = backends.select(device).device
    with process_group(launch, place, "env://", is_safe=is_safe) as ranks:
        yield ranks


@contextmanager
def process_group(
    launch: Launch, device: torch.device, place: str, *, is_safe: bool = False
) -> Iterator[Ranks]:
    """Yield the ranks that rendezvous at `place`, an address as for `torch.distributed`."""
    is_gpu = device.type == "cuda"
    store, _, _ = next(rendezvous(place, launch.rank, launch.world, timeout=TIMEOUT))
    options = None
    if is_gpu:
        # a waiting exchange occupies multiprocessors, so none should start late
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=not is_safe)
        options._timeout = TIMEOUT  # torch warns if it differs from the timeout below
        if not is_safe:
            options.config.max_ctas = EXCHANGING
    dist.init_process_group(
        "nccl" if is_gpu else "gloo",
        # a launcher that restarts the ranks keeps the store, with addresses of dead processes
        store=dist.PrefixStore(f"attempt-{launch.attempt}", store),
        rank=launch.rank,
        world_size=launch.world,
        timeout=TIMEOUT,
        device_id=device if is_gpu else None,
        pg_options=options,
    )
    try:
        devices = dist.group.WORLD
        hosts = dist.new_group(backend="gloo", timeout=TIMEOUT) if is_gpu else devices
        yield Ranks(launch.rank, launch.world, device, is_safe, _devices=devices, _hosts=hosts)
    except Exception as error:
        # destroying the group would wait for other ranks' GPUs; the end of the process does not
        if not is_gpu or isinstance(error, Stopped):
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def _follow(begun: deque[Wait], end: Wait) -> None:
    """Append `end` to the exchanges in flight, and finish the oldest if there are too many."""
    begun.append(end)
    if len(begun) > UNDER_WAY:
        begun.popleft()()


def _end(begun: deque[Wait]) -> None:
    while begun:
        begun.popleft()()


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Group the tensors in order into exchanges of one device and dtype and of limited size."""
    bucket: list[Tensor] = []
    held = 0
    for tensor in tensors:
        num_bytes = _exchanged_dtype(tensor).itemsize * tensor.numel()
        kind = tensor.device, _exchanged_dtype(tensor)
        is_other = bool(bucket) and kind != (bucket[0].device, _exchanged_dtype(bucket[0]))
        if bucket and (held + num_bytes > BUCKET_BYTES or is_other):
            yield bucket
            bucket, held = [], 0
        bucket.append(tensor)
        held += num_bytes
    if bucket:
        yield bucket


def _padded(rows: Tensor, count: int) -> Tensor:
    """Return the rows, contiguous and padded with zeros to `count` rows."""
    if len(rows) == count:
        return rows.contiguous()
    return torch.cat([rows, rows.new_zeros(count - len(rows), *rows.shape[1:])])


def _exchanged_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.is_floating_point() else tensor.dtype
