"""Equal time instead of equal steps: measured step times turn one recipe's clock into steps."""

import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence

from qat.bench.quality.plan import Plan
from qat.config import fingerprint

ROUNDS = 2

StepTimer = Callable[[Plan], list[list[float]]]
"""Times a recipe alone: seconds of single steps, for each of its stages."""
StepTimes = dict[str, list[float]]
"""Median seconds of a step for each stage, by `time_key`."""


def time_key(plan: Plan) -> str:
    """12 hex digits that change when a recipe's step may take another time."""
    values = plan.model_dump(mode="json", exclude={"name", "seeds", "steps", "equal_time_to"})
    for stage in values["stages"]:
        del stage["steps"]
    return fingerprint(values)


def to_time(plans: Sequence[Plan]) -> list[Plan]:
    """Recipes whose step times are needed: those on equal time and those that they follow."""
    followed = {plan.equal_time_to for plan in plans}
    return [plan for plan in plans if plan.equal_time_to or plan.name in followed]


def measure(plans: Sequence[Plan], timer: StepTimer, rounds: int = ROUNDS) -> StepTimes:
    """Let the recipes take turns, every second round backwards; the median of all their steps."""
    found: dict[str, list[list[float]]] = defaultdict(list)
    for number in range(rounds):
        for plan in plans[:: -1 if number % 2 else 1]:
            found[time_key(plan)].append(timer(plan))
    return {key: _medians(turns) for key, turns in found.items()}


def with_equal_time(plans: Sequence[Plan], times: StepTimes) -> list[Plan]:
    """The plans, those on equal time with as many steps as the other's training time allows."""
    by_name = {plan.name: plan for plan in plans}

    def fitted(plan: Plan) -> Plan:
        if plan.equal_time_to is None:
            return plan
        seconds = training_seconds(by_name[plan.equal_time_to], times)
        own = training_seconds(plan, times) / plan.steps
        return plan.with_steps(max(1, len(plan.stages), round(seconds / own)))

    return [fitted(plan) for plan in plans]


def training_seconds(plan: Plan, times: StepTimes) -> float:
    """What all steps of a recipe take."""
    steps = [stage.steps for stage in plan.stages] or [plan.steps]
    pairs = zip(steps, times[time_key(plan)], strict=True)
    return sum(count * step_s for count, step_s in pairs)


def to_json(times: StepTimes) -> str:
    """The times as a file keeps them."""
    return json.dumps(times, indent=1) + "\n"


def _medians(turns: list[list[list[float]]]) -> list[float]:
    """The median step of each stage over all turns."""
    stages = zip(*turns, strict=True)
    return [statistics.median(step for turn in stage for step in turn) for stage in stages]
