"""Step times by rank, from the heartbeats that each process of a run leaves."""

import re
from pathlib import Path
from statistics import median

from qat.logs import read_json_lines

PATTERN = "heartbeat-rank*.jsonl"


def rank_facts(directory: Path) -> dict[str, object]:
    """Median step seconds by rank, the slowest rank, and how much longer it takes than the fastest.

    None of a run without heartbeats; a rank whose lines have no `step_s` is left out.
    """
    by_rank = {}
    for path in directory.rglob(PATTERN):
        rank = re.search(r"rank(\d+)\.jsonl$", path.name)
        seconds = [line["step_s"] for line in read_json_lines(path) if line.get("step_s")]
        if rank and seconds:
            by_rank[int(rank[1])] = median(seconds)
    slowest = max(by_rank, key=by_rank.get, default=None)
    spread = max(by_rank.values()) / min(by_rank.values()) - 1 if by_rank else None
    return {
        "rank_step_s": [by_rank[rank] for rank in sorted(by_rank)] or None,
        "slowest_rank": slowest,
        "rank_spread": spread,
    }
