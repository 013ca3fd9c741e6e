"""Which recipes of a file can be made: asked of the teacher's shapes before any work.

A recipe that cannot is a row of the table with its reason; the others go on without it.
"""

import logging
from collections.abc import Callable, Sequence

import torch
from transformers import AutoModelForCausalLM

from qat.bench.quality.config import QualityRecipe
from qat.bench.quality.plan import Plan, convert_config
from qat.bench.quality.resolve import ANYWHERE
from qat.convert.convert import check_conversion
from qat.errors import ConfigError, QatError
from qat.models.language_model import LanguageModel
from qat.models.load import load_config

logger = logging.getLogger(__name__)

Unmade = dict[str, str]
"""Why a recipe cannot be made, by its name."""


def check_shapes(recipe: QualityRecipe, plans: Sequence[Plan]) -> tuple[list[Plan], Unmade]:
    """The plans whose formats and budgets fit the teacher; no weight is read.

    Raises:
        ConfigError: none does.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_config(recipe.teacher))
    teacher = LanguageModel(model)

    def check(plan: Plan) -> None:
        for table in (plan.convert, *(stage.convert for stage in plan.stages)):
            if table is not None:
                check_conversion(teacher, convert_config(table, ANYWHERE))

    return made(plans, check)


def made(plans: Sequence[Plan], make: Callable[[Plan], None]) -> tuple[list[Plan], Unmade]:
    """The plans that `make` takes, and why it refuses the others and those that follow them.

    Raises:
        ConfigError: it takes none.
    """
    unmade: Unmade = {}
    for plan in plans:
        try:
            make(plan)
        except QatError as error:
            unmade[plan.name] = str(error)
    for plan in plans:
        if plan.equal_time_to in unmade and plan.name not in unmade:
            unmade[plan.name] = f"equal_time_to={plan.equal_time_to!r} cannot be made"
    for name, reason in unmade.items():
        logger.warning("recipe %r cannot be made: %s", name, reason)
    if len(unmade) == len(plans):
        name, reason = next(iter(unmade.items()))
        raise ConfigError(f"no recipe can be made; the first, {name!r}: {reason}")
    return [plan for plan in plans if plan.name not in unmade], unmade
