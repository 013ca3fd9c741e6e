"""Tuning within a decoded token: the best few tiles of each linear are tried in a whole token.

The tile that is fastest alone need not be the fastest between its neighbours, where each kernel
begins while the one before it ends. From the defaults on, one linear at a time takes its tiles in
turns in a recorded token while the others keep theirs. A change stays by the rule of `tune`, with
the tiles chosen so far as the default. The search ends with a round that changes nothing. At last
the tiles chosen, and those that are fastest alone, are compared with the defaults as a whole.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from qat.extensions.bench.config import MeasureConfig
from qat.extensions.bench.measure import Clock, Row
from qat.extensions.bench.student import quantize_at_random_, random_model
from qat.extensions.decode.step import DecodeStep
from qat.extensions.lab.kernels.gates import FAULTS, MESSAGE, difference
from qat.extensions.lab.kernels.tune import Timed, Tuned, compiling_only, faster, timed_in_turns
from qat.kernels import tuned
from qat.kernels.dispatch import computing_by
from qat.models.language_model import LanguageModel
from qat.nn.swap import with_tables
from qat.quant.spec import PRESETS

PRESET, TABLE_BITS = "q2a4", 4
"""The student's formats, which are those of `cases.token_cases`."""
DEFAULT, ALONE, WITHIN = "default", "fastest alone", "chosen within the token"
FEW, ROUNDS = 3, 3
"""Tiles of a linear that are tried, the default among them; the most rounds over all linears."""
POSITION, ROOM = 64, 256
"""The token's position, and the positions of its caches."""

Token = Callable[[], Tensor]
"""Computes a token's logits `(1, V)`, the same at each call."""
Site = tuple[str, tuned.Key]
"""A kernel and the sizes of one linear, at which a tile is chosen."""
Tiles = dict[Site, tuple]


@torch.no_grad()
def token_of(shape: str, device: str) -> Token | None:
    """Return a token of a published shape with random codes; None if its layers do not fit.

    Its caches hold random keys and values: a prompt would compile kernels that are not timed.
    """
    model = random_model(shape, MeasureConfig(device=device))
    quantize_at_random_(model, with_tables(PRESETS[PRESET], model, TABLE_BITS))
    language = LanguageModel(model)
    if not DecodeStep.fits(language):
        return None
    step = DecodeStep(language)
    caches, angles = step.new_caches(1, ROOM), step.angles(ROOM)
    for tensor in (tensor for cache in caches for tensor in cache):
        tensor.normal_()
    ids, position = (torch.tensor([n], device=language.device) for n in (0, POSITION))
    return lambda: step.logits(ids, position, caches, angles)


@dataclass(frozen=True)
class TunedToken:
    """The result of a search within a token."""

    shape: str
    default: Tiles
    chosen: Tiles
    """The adopted tiles, with the default of each linear that keeps it."""
    times: dict[str, Timed]
    """The token with the default tiles, those fastest alone, and those found in it, in turns."""
    adopted: str | None
    """The name in `times` of the adopted tiles; None if the default ones stay."""
    refused: dict[str, str]
    """Tiles that did not compile or gave other logits, with the reason."""

    @property
    def ratio(self) -> float:
        """The speedup of a token by the adopted tiles; 1 if the default ones stay."""
        return 1.0 if self.adopted is None else self.times[self.adopted].ratio.median

    def entries(self) -> dict[Site, tuple | None]:
        """Return the entries of the device's table; None where the default stays."""
        return {s: None if c == self.default[s] else c for s, c in self.chosen.items()}

    def row(self) -> Row:
        """Return the columns of a row of results."""
        return {
            "kind": "token",
            "case": f"token of {self.shape}, tuned",
            "shape": self.shape,
            "unit": "s",
            "samples": list(self.times[self.adopted or DEFAULT].seconds),
            "over_default": self.ratio,
            "adopted": self.adopted,
            "tried": [
                {"tiles": name, "median_s": each.median_s, **asdict(each.ratio)}
                for name, each in self.times.items()
            ],
            "effective": {name_of(site): t._asdict() for site, t in self.chosen.items()},
            "refused": self.refused,
        }


def tune_token(shape: str, token: Token, linears: list[Tuned], clock: Clock) -> TunedToken:
    """Choose the tiles of the linears of a token among their best few."""
    default = {_site(each): each.space.default for each in linears}
    alone = {_site(each): each.adopted.configuration for each in linears if each.adopted}
    chosen, refused = dict(default), {}
    with torch.no_grad():
        trial = Trial.of(token, default, clock)
        for _ in range(ROUNDS):
            before = dict(chosen)
            for linear in linears:
                site = _site(linear)
                tiles = dict.fromkeys((chosen[site], *few_of(linear)))
                best, wrong = trial.ranked({tile: {**chosen, site: tile} for tile in tiles})
                refused |= {f"{linear.case}, {tile}": why for tile, why in wrong.items()}
                found = faster(best, chosen[site])
                if found is not None:
                    chosen[site] = found.configuration
            if chosen == before:
                break
        named = {(DEFAULT,): default, (ALONE,): default | alone, (WITHIN,): chosen}
        last, wrong = trial.ranked(named)
    found = faster(last, (DEFAULT,))
    adopted = None if found is None else found.configuration[0]
    return TunedToken(
        shape,
        default,
        named[(adopted or DEFAULT,)],
        {each.configuration[0]: each for each in last},
        adopted,
        refused | {name: why for (name,), why in wrong.items()},
    )


def few_of(linear: Tuned) -> list[tuple]:
    """Return the default and the fastest others of a linear, `FEW` in all."""
    default = linear.space.default
    others = [each.configuration for each in linear.best if each.configuration != default]
    return [default, *others[: FEW - 1]]


@dataclass(frozen=True)
class Trial:
    """A token, ready to run with several tiles, and the logits to compare with."""

    token: Token
    clock: Clock
    wanted: Tensor
    """Logits with the default tiles."""
    exact: Tensor
    """Logits of plain PyTorch in float32, as float64."""
    slack: float
    """Error allowed beyond that of the default tiles.

    Another order of sums may round a new key to its neighbour, which all later layers see: the
    error may be twice that of the default tiles.
    """

    @classmethod
    def of(cls, token: Token, default: Tiles, clock: Clock) -> "Trial":
        """Compute both logits."""
        with computing_by(False):
            exact = token().double()
        with forcing_all(default):
            wanted = token()
        error, largest = (t.abs().max().item() for t in (wanted - exact, exact))
        return cls(token, clock, wanted, exact, error + 2e-6 * largest)

    def ranked(self, settings: dict[tuple, Tiles]) -> tuple[tuple[Timed, ...], dict[tuple, str]]:
        """Time the token with each of `settings` that is correct, in turns; fastest first.

        The others are compared with the first, which has run before.
        """
        if self.clock.backend.records:
            # a tile changes the kernel behind it too, whose norm sums as many parts as there are
            with compiling_only():
                for tiles in settings.values():
                    self._logits(tiles)
        runs: dict[tuple, Callable[[], object]] = {}
        refused: dict[tuple, str] = {}
        for name, tiles in settings.items():
            wrong = self.refusal(tiles) if runs else None
            if wrong is None:
                runs[name] = self._run(tiles)
            else:
                refused[name] = wrong
        return timed_in_turns(runs, self.clock, calls=1), refused

    def refusal(self, tiles: Tiles) -> str | None:
        """Return what is wrong with a token's logits; None if they are correct."""
        try:
            found = self._logits(tiles)
        except FAULTS as error:
            return f"{type(error).__name__}: {error}"[:MESSAGE]
        return difference(found, self.wanted, self.exact, self.slack)

    def _logits(self, tiles: Tiles) -> Tensor:
        with forcing_all(tiles):
            return self.token()

    def _run(self, tiles: Tiles) -> Callable[[], object]:
        backend = self.clock.backend
        if not backend.records:
            return lambda: self._logits(tiles)
        with forcing_all(tiles):
            replay, _ = backend.record(self.token)
        replay()
        return replay


@contextmanager
def forcing_all(tiles: Tiles) -> Iterator[None]:
    """Force several configurations inside the block."""
    with ExitStack() as stack:
        for (kernel, key), tile in tiles.items():
            stack.enter_context(tuned.forcing(kernel, key, tile))
        yield


def name_of(site: Site) -> str:
    """Return a site as results and tables name it, such as `lut_mma 4096x1024x4`."""
    kernel, key = site
    return f"{kernel} {tuned.named(key)}"


def _site(linear: Tuned) -> Site:
    return linear.space.kernel, linear.space.key
