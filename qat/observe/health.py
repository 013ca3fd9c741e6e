"""Health checks of a run: one line per question, with a number, its limit and a verdict."""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from qat.models.attention import load_sparse_attention
from qat.observe.runs import SCORES, TrainingRun, score
from qat.process import GAPS

State = Literal["ok", "look", "bad"]
LEAST_BEATS = 10  # fewest heartbeats from which speed, memory and waiting can be judged
SPREAD_FRAC, GROWTH_FRAC, WAIT_FRAC = 0.1, 0.05, 0.05  # limits of speed, memory, data wait
SLOW_TIMES = 1.2  # limit of the slowest rank's own time, relative to the median of the others
LEAST_GROWTH_MIB = 64.0  # smaller growth is ignored
LEAST_LOSSES = 40  # fewest logged losses from which a trend can be judged
TO_ERROR = 1.4826 * 1.2533
"""Factor from a median absolute deviation to the standard error of a median times sqrt(n): 1.4826
gives the standard deviation of a normal distribution, 1.2533 = sqrt(pi / 2) the error of a median
relative to that of a mean."""
LEAST_FALL_FRAC, LEAST_FOLLOWED_FRAC = 0.02, 0.25
"""Over-fitting: the training loss falls by more than its noise and the first fraction of itself,
and the held-out score by less than the second fraction of that fall."""
WARM_C, HOT_C = 80, 90  # limits in degrees Celsius; GPUs throttle somewhere above 80


class Check(NamedTuple):
    """The answer to one question about a run."""

    name: str
    state: State  # `ok`, `look` (worth a look), or `bad`
    found: str
    limit: str


EVENTS: tuple[tuple[str, str, State], ...] = (  # kind, name, state that one causes
    ("not_finite", "not finite", "bad"),
    ("stall", "stalls", "bad"),
    ("throughput_drop", "drops of speed", "look"),
    ("slow_rank", "slow ranks", "look"),
    ("fallback_checkpoint", "damaged checkpoints", "look"),
)


def health(run: TrainingRun) -> list[Check]:
    """Return the checks of `run`; a question that its files cannot answer is left out."""
    beats = run.heartbeats
    devices = [beat for beat in beats if beat.get("mem_reserved_mib") is not None]
    # share of logged steps whose float16 gradients overflowed
    skipped = sum(row.get("grad_norm") == 0 for row in run.steps) / max(len(run.steps), 1)
    forced = ", ".join(run.forced)
    found = [
        _spread(beats),
        _growth("device memory", devices, "mem_alloc_mib"),
        _growth("host memory", beats, "host_rss_mib"),
        _retries(run),
        _waiting(beats),
        _slowest(run),
        *(_events(run, *kind) for kind in EVENTS),
        _loss(run),
        _gain(run),
        _parting(run),
        Check("skipped steps", "ok" if skipped <= 0.01 else "look", percent(skipped), "1 %"),
        _recompiles(beats),
        _on_host(beats),
        _plain(beats),
        _temperature(beats),
        *_sparse(run),
        Check("resumed", "ok", _at(run.resumed) if run.resumed else "never", "-"),
        Check("forced", "look" if forced else "ok", forced or "nothing", "nothing"),
    ]
    return [check for check in found if check is not None]


def worst(checks: Sequence[Check]) -> State:
    """Return the worst state: `bad`, else `look`, else `ok`."""
    states = {check.state for check in checks}
    return "bad" if "bad" in states else "look" if "look" in states else "ok"


def _spread(beats: list[dict]) -> Check | None:
    """Check the speed: the distance from the median within which nine of ten heartbeats lie."""
    speeds = _values(beats[1:], "tokens_per_s")
    if len(speeds) < LEAST_BEATS:
        return None
    usual = statistics.median(speeds)
    off = sorted(abs(speed / usual - 1) for speed in speeds)
    spread = off[int(0.9 * (len(off) - 1))]
    state = "ok" if spread <= SPREAD_FRAC else "look"
    return Check("speed", state, f"within {percent(spread)} of its median", percent(SPREAD_FRAC))


def _growth(name: str, beats: list[dict], key: str) -> Check | None:
    """Check memory: the last tenth against the first, after a tenth of warm-up."""
    sizes = _values(beats[len(beats) // 10 :], key)
    if len(sizes) < LEAST_BEATS:
        return None
    tenth = len(sizes) // 10
    first, last = statistics.median(sizes[:tenth]), statistics.median(sizes[-tenth:])
    is_flat = last - first <= max(GROWTH_FRAC * first, LEAST_GROWTH_MIB)
    text = f"{first:,.0f} to {last:,.0f} MiB"
    limit = f"+{percent(GROWTH_FRAC)} or {LEAST_GROWTH_MIB:.0f} MiB"
    return Check(name, "ok" if is_flat else "look", text, limit)


def _retries(run: TrainingRun) -> Check | None:
    """Check that the GPU's allocator always found room: a retry frees its cache, which waits."""
    last = [beats[-1] for beats in (run.heartbeats, *run.others) if beats]
    counts = [
        (beat["alloc_retries"], beat["alloc_failures"])
        for beat in last
        if beat.get("alloc_retries") is not None
    ]
    if not counts:
        return None
    retries, failures = map(sum, zip(*counts, strict=True))
    if not retries + failures:
        return Check("allocator retries", "ok", "none", "none")
    found = f"{retries}, {failures} in vain: lower the batch, or set {GAPS}"
    return Check("allocator retries", "look", found, "none")


def _waiting(beats: list[dict]) -> Check | None:
    waits, steps = _values(beats, "data_wait_s"), _values(beats, "step_s")
    if len(waits) < LEAST_BEATS:
        return None
    share = statistics.median(waits) / statistics.median(steps)
    state = "ok" if share <= WAIT_FRAC else "look"
    return Check("waiting for data", state, f"{percent(share)} of a step", percent(WAIT_FRAC))


def _slowest(run: TrainingRun) -> Check | None:
    """Check the rank with the most time outside the exchange against the median of the others."""
    own = []
    for beats in (run.heartbeats, *run.others):
        timed = [beat for beat in beats if beat.get("exchange_s") is not None]
        if timed:
            own.append(statistics.median(beat["step_s"] - beat["exchange_s"] for beat in timed))
    if len(own) < 2:
        return None
    slowest = max(range(len(own)), key=own.__getitem__)
    usual = statistics.median(own[:slowest] + own[slowest + 1 :])
    times = own[slowest] / max(usual, 1e-9)
    state = "ok" if times <= SLOW_TIMES else "look"
    found = f"rank {slowest}: {times:.2f} x the others"
    return Check("slowest rank", state, found, f"{SLOW_TIMES} x")


def _events(run: TrainingRun, kind: str, name: str, state: State) -> Check:
    steps = [event["step"] for event in run.events if event["kind"] == kind]
    if not steps:
        return Check(name, "ok", "none", "none")
    return Check(name, state, _at(steps), "none")


def _loss(run: TrainingRun) -> Check | None:
    """Check whether the loss still falls: the last quarter of the run against the second one."""
    if (moved := _moved(run)) is None:
        return None
    before, last, noise = moved
    fall = before - last
    word = "" if fall > noise else ", rises" if fall < -noise else ", no longer moves"
    found = f"{before:.4g} to {last:.4g} nats{word}"
    return Check("loss", "look" if word else "ok", found, f"falls by {noise:.2g}")


def _gain(run: TrainingRun) -> Check | None:
    """Check whether the student is better than it was before it learned, on held-out text."""
    judged = [row for row in run.evals if any(row.get(name) is not None for name in SCORES)]
    if len(judged) < 2 or judged[0]["step"]:
        return None
    before, last = score(judged[0]), score(judged[-1])
    found = f"{before:.4g} to {last:.4g} nats"
    return Check("held-out", "ok" if last <= before else "look", found, "no rise since step 0")


def _moved(run: TrainingRun) -> tuple[float, float, float] | None:
    """Return the median losses of the run's second and last quarter, and the noise between them.

    The loss moves if they differ by more than the noise: twice the standard error of the difference
    between medians of that many losses. None if there are too few losses.
    """
    losses = [row["loss_nats"] for row in run.steps]
    if len(losses) < LEAST_LOSSES:
        return None
    quarter = len(losses) // 4
    parts = losses[quarter : 2 * quarter], losses[-quarter:]
    before, last = map(statistics.median, parts)
    spread = max(
        statistics.median(abs(x - statistics.median(part)) for x in part) for part in parts
    )
    return before, last, 2 * TO_ERROR * spread * (2 / quarter) ** 0.5


def _parting(run: TrainingRun) -> Check | None:
    """Check over-fitting: from the second to the last quarter, held-out text follows training."""
    if (moved := _moved(run)) is None:
        return None
    before, last, noise = moved
    end = run.steps[-1]["step"]
    judged = [row for row in run.evals if any(row.get(name) is not None for name in SCORES)]
    parts = [
        [score(row) for row in judged if first < row["step"] / end <= first + 0.25]
        for first in (0.25, 0.75)
    ]
    if not all(parts):
        return None
    earlier, later = map(statistics.median, parts)
    fall, followed = before - last, earlier - later
    falls = fall > max(noise, LEAST_FALL_FRAC * before)
    parted = falls and followed < LEAST_FOLLOWED_FRAC * fall
    found = f"training {before:.4g} to {last:.4g}, held-out {earlier:.4g} to {later:.4g} nats"
    if (epochs := run.epochs()) is not None:
        found += f", text read {epochs:.3g} times"
    found += ": learn from more text" if parted else ""
    limit = f"held-out falls by {percent(LEAST_FOLLOWED_FRAC)} of it"
    return Check("over-fitting", "look" if parted else "ok", found, limit)


def _recompiles(beats: list[dict]) -> Check | None:
    if not beats or "recompiles" not in beats[-1]:
        return None
    last = beats[-1]
    if last.get("fallback"):
        return Check("compiler", "look", "layers run as written", "compiled")
    count = last["recompiles"]
    return Check("compiler", "look" if count else "ok", f"{count} graphs recompiled", "none")


def _on_host(beats: list[dict]) -> Check | None:
    """Check which operators an XLA device lacks, so that they run on the host."""
    if not beats or "host_fallbacks" not in beats[-1]:
        return None
    names = ", ".join(beats[-1]["host_fallbacks"])
    return Check("on the host", "look" if names else "ok", names or "nothing", "nothing")


def _plain(beats: list[dict]) -> Check | None:
    """Check which kernels ran as plain PyTorch on a GPU, and whether they still do."""
    counts = [beat["plain_kernels"] for beat in beats if "plain_kernels" in beat]
    if not counts:
        return None
    last, middle = counts[-1], sum(counts[len(counts) // 2].values())
    found = ", ".join(f"{name} {count} times" for name, count in last.items()) or "none"
    rises = ", and more and more" if sum(last.values()) > middle else ""
    return Check("plain kernels", "look" if last else "ok", f"{found}{rises}", "none")


def _temperature(beats: list[dict]) -> Check | None:
    found = _values(beats, "gpu_temp_c")
    if not found:
        return None
    top = max(found)
    state = "ok" if top < WARM_C else "look" if top < HOT_C else "bad"
    return Check("GPU, hottest", state, f"{top:.0f} C", f"{WARM_C} C")


def _sparse(run: TrainingRun) -> Iterable[Check]:
    layers = run.evals[-1].get("nsa_layers") if run.evals else None
    if layers:
        yield from load_sparse_attention().checks(layers)
    if any("nsa_blocks_read" in row for row in run.steps):
        yield _events(run, "blocks_read", "blocks read in steps", "bad")


def _at(steps: Sequence[int]) -> str:
    """Return the number of events and their steps: `2 (step 40, 80)`."""
    more = ", ..." if len(steps) > 5 else ""
    return f"{len(steps)} (step {', '.join(map(str, steps[:5]))}{more})"


def _values(beats: list[dict[str, Any]], key: str) -> list[float]:
    return [beat[key] for beat in beats if beat.get(key) is not None]


def percent(fraction: float) -> str:
    """Return a fraction as a percentage: `98 %`."""
    return f"{100 * fraction:.{3 if fraction >= 0.995 else 2}g} %"
