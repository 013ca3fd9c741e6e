"""The processes that work on one thing together, a device each, and what they tell each other.

Sums of tensors go through NCCL between GPUs and through gloo between CPUs; what concerns the hosts
goes through gloo always. Nothing that travels is ever unpickled.
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
"""How long a rank waits for the others: an evaluation on the first one takes its time."""
BUCKET_BYTES = 2**28
"""Most bytes in one exchange, and of memory that it needs beside the tensors."""
MOST_SUMS = 2**16
"""Exchanges whose times are kept until somebody asks."""
UNDER_WAY = 7
"""Exchanges of rows that nobody waits for yet: those of a dense layer's linears. A compiled layer
gives all gradients at once, and they travel while the layer before runs backward."""
EXCHANGING = 8
"""Multiprocessors at most that an exchange takes from what computes beside it."""
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Of one tensor, as torch 2.13 calls it or as it did before."""

T = TypeVar("T")
Wait = Callable[[], object]
"""Ends an exchange that was begun: what the device is given next comes behind it."""


@dataclass(eq=False)
class Ranks:
    """All processes of a run as one of them sees them; a run of one process exchanges nothing."""

    rank: int
    """The number of this one, from 0."""
    size: int
    """How many there are."""
    device: torch.device
    """Where this one computes."""
    bytes_moved: int = 0
    """Bytes that this one gave to sums and to others' rows."""
    _begun: deque[Wait] | None = None
    """What is to be waited for behind a block of `ahead`; None outside."""
    _behind: deque[Wait] = field(default_factory=deque)
    """What is still to be done with sums of rows, oldest first."""
    _sums: deque[tuple] = field(default_factory=lambda: deque(maxlen=MOST_SUMS))
    """Marks of the device's time before and after each exchange that was not yet asked for."""
    _devices: dist.ProcessGroup | None = None
    _hosts: dist.ProcessGroup | None = None

    @property
    def is_first(self) -> bool:
        """Whether this one writes what there is once: recipe, metrics, checkpoints."""
        return self.rank == 0

    def apart(self) -> "Ranks":
        """The same ranks in a conversation of their own, on the hosts, for another thread.

        All ranks call it at the same place.
        """
        if self.size == 1:
            return self
        hosts = dist.new_group(backend="gloo", timeout=TIMEOUT)
        return Ranks(self.rank, self.size, torch.device("cpu"), _devices=hosts, _hosts=hosts)

    @torch.no_grad()
    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all ranks.

        The sums of floats are taken in float32, those of integers as they are. The tensors travel
        joined, `BUCKET_BYTES` at a time, in the order that they come in, which must be the same on
        all ranks. Does not wait for a GPU.
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
        """Which of `count` rows are this rank's, or `rank`'s: as even as can be, in order."""
        rank = self.rank if rank is None else rank
        return slice(count * rank // self.size, count * (rank + 1) // self.size)

    @torch.no_grad()
    def gather_rows(self, mine: Tensor, count: int, out: Tensor | None = None) -> Tensor:
        """All of `count` rows, of which each rank gives its own (`rows`), in the dtype of `mine`.

        Written into `out`, which is contiguous, if it is given; `mine` may be its rows. That is
        only begun inside `ahead`.
        """
        is_given = out is not None
        out = mine.new_empty(count, *mine.shape[1:]) if out is None else out.detach()
        most = -(-count // self.size)
        given = _padded(mine, most)
        parts = [out[self.rows(count, rank)] for rank in range(self.size)]
        pieces = [part if len(part) == most else torch.empty_like(given) for part in parts]
        wait = self._all_gather(out if count == most * self.size else pieces, given)
        self.bytes_moved += given.nbytes

        def end() -> None:
            self._noted(wait)
            for part, piece in zip(parts, pieces, strict=True):
                if part is not piece:
                    part.copy_(piece[: len(part)])

        if self._begun is None or not is_given:
            end()
        else:
            _follow(self._begun, end)
        return out

    @contextmanager
    def ahead(self) -> Iterator[Wait]:
        """A block in which `gather_rows` into given memory is only begun; what it yields ends it.

        So other work is given to the device meanwhile.
        """
        self._begun = begun = deque()
        try:
            yield partial(_end, begun)
        finally:
            self._begun = None

    @torch.no_grad()
    def sum_rows(self, whole: Tensor) -> Callable[[], Tensor]:
        """Begin to sum all ranks' `whole`; the result gives this rank's `rows` of it in float32.

        The rows travel in the dtype of `whole`, each to the rank that adds them up in float32.
        """
        sizes = [len(range(len(whole))[self.rows(len(whole), rank)]) for rank in range(self.size)]
        count = sizes[self.rank]
        found = whole.new_empty(self.size * count, *whole.shape[1:])
        wait = self._all_to_all(found, whole.contiguous(), [count] * self.size, sizes)
        self.bytes_moved += whole.nbytes

        def rows() -> Tensor:
            self._noted(wait)
            return found.view(self.size, count, *whole.shape[1:]).sum(0, dtype=torch.float32)

        return rows

    def behind(self, act: Wait) -> None:
        """Call `act`, which waits for a sum of rows, once `UNDER_WAY` others have begun.

        All of them in the order that they come in, and the last ones in `catch_up`.
        """
        _follow(self._behind, act)

    def catch_up(self) -> None:
        """Do now what was to come `behind` sums of rows."""
        _end(self._behind)

    def exchange_s(self) -> float | None:
        """Seconds that work waited for exchanges since it was last asked, and so for slower ranks.

        What travels while the device computes is not in it. None for a run of one process. Waits
        for the device.
        """
        if self.size == 1:
            return None
        sums = [self._sums.popleft() for _ in range(len(self._sums))]
        return sum(backends.on(self.device).seconds_between(*marks) for marks in sums)

    def copy_from_first(self, values: Tensor) -> Tensor:
        """The first rank's `values`; all ranks give a tensor of its shape and dtype."""
        if self.size == 1:
            return values
        copied = values.detach().clone(memory_format=torch.contiguous_format)
        dist.broadcast(copied, 0, group=self._group_for(copied))
        return copied

    def texts(self, text: str) -> list[str]:
        """What each rank says, in their order; every rank learns all."""
        if self.size == 1:
            return [text]
        octets = torch.frombuffer(bytearray(text.encode()) + b"\0", dtype=torch.uint8)[:-1]
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(octets)]), group=self._hosts)
        longest = max(int(length) for length in lengths)
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: len(octets)] = octets
        said = [torch.zeros_like(mine) for _ in range(self.size)]
        if longest:
            dist.all_gather(said, mine, group=self._hosts)
        pairs = zip(said, lengths, strict=True)
        return [all_[: int(length)].numpy().tobytes().decode() for all_, length in pairs]

    def together(self, act: Callable[[], T]) -> T:
        """What `act` gives, once it has succeeded on every rank.

        Raises:
            QatError: it failed on some; each rank raises what the first of these met, and says
                which that is. An `OSError` counts as a failure too.
        """
        if self.size == 1:
            return act()
        result, trouble = None, ""
        try:
            result = act()
        except (QatError, OSError) as error:
            kind = type(error) if type(error) in vars(errors).values() else ConfigError
            trouble = f"{kind.__name__}\n{error}"
        for rank, said in enumerate(self.texts(trouble)):
            if said:
                kind_name, _, message = said.partition("\n")
                raise getattr(errors, kind_name)(f"rank {rank}: {message}")
        return result

    def check_same(self, **facts: str) -> None:
        """Raise ConfigError where a rank was given another value than the first one."""
        for name, value in facts.items():
            said = self.texts(value)
            for rank, other in enumerate(said):
                if other != said[0]:
                    raise ConfigError(
                        f"rank {rank} has {name}={other}, rank 0 has {said[0]}; give all ranks "
                        f"the same {name}"
                    )

    def wait(self) -> None:
        """Go on when all ranks are here; a host waits, not its device."""
        if self.size > 1:
            dist.barrier(group=self._hosts)

    def _noted(self, exchange: Wait) -> None:
        """Exchange, or wait for an exchange, and note how long the device's work stood still."""
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
"""A process that has nobody to talk to."""


class Rehearsal(Ranks):
    """The first of several ranks, as if all others held what it holds.

    Exchanges of tensors take the memory that they would, and nobody's time.
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
        return lambda: given  # an exchange holds it as long


@contextmanager
def joined(device: str, *, exchange: bool = True) -> Iterator[Ranks]:
    """This process among those that the launcher started; `ALONE` without one.

    Ranks that `exchange` nothing but what lies on the hosts may have XLA devices: those of several
    processes are not made to meet. ConfigError if all ranks would take the same device.
    """
    launch = launched()
    if launch.world == 1:
        yield ALONE
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
    with meeting(launch, backends.select(device).device, "env://") as ranks:
        yield ranks


@contextmanager
def meeting(launch: Launch, device: torch.device, place: str) -> Iterator[Ranks]:
    """The ranks that meet at `place`, an address as `torch.distributed` takes it."""
    is_gpu = device.type == "cuda"
    store, _, _ = next(rendezvous(place, launch.rank, launch.world, timeout=TIMEOUT))
    options = None
    if is_gpu:
        # what waits for another rank holds multiprocessors meanwhile, so none should begin late
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = TIMEOUT  # torch warns of any other
        options.config.max_ctas = EXCHANGING
    dist.init_process_group(
        "nccl" if is_gpu else "gloo",
        # a launcher that starts the ranks anew keeps the store, with the addresses of the dead
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
        yield Ranks(launch.rank, launch.world, device, _devices=devices, _hosts=hosts)
    except Exception as error:
        # GPUs would wait for those that do not leave with this one; the end of the process does not
        if not is_gpu or isinstance(error, Stopped):
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def _follow(begun: deque[Wait], end: Wait) -> None:
    """Put `end` behind what was begun before, of which no more than `UNDER_WAY` go on."""
    begun.append(end)
    if len(begun) > UNDER_WAY:
        begun.popleft()()


def _end(begun: deque[Wait]) -> None:
    while begun:
        begun.popleft()()


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors in order, as many together as fit into one exchange and are of one kind."""
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
    """The rows, and zeros up to `count` of them; contiguous."""
    if len(rows) == count:
        return rows.contiguous()
    return torch.cat([rows, rows.new_zeros(count - len(rows), *rows.shape[1:])])


def _exchanged_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.is_floating_point() else tensor.dtype
