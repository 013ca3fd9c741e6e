"""What jobs share, each made once: caches and first conversions."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from qat.backend.device import select
from qat.bench.quality.config import QualityRecipe, Table
from qat.bench.quality.plan import Places, Plan, cache_config, convert_config
from qat.bench.quality.resolve import Unmade, made, shared_facts
from qat.convert.convert import convert_checkpoint
from qat.data.reader import TeacherCache
from qat.data.sources import open_source
from qat.errors import CacheError, ConfigError
from qat.files import check_free, write_atomically
from qat.models.teacher_cache import build_teacher_cache

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Workshop:
    """A recipe file, its directory, and the device to work on."""

    recipe: QualityRecipe
    places: Places
    device: str

    def claim(self) -> None:
        """Make the directory this recipe's, or see that it is.

        Raises:
            ConfigError: it holds another recipe's results, or something else.
        """
        facts, out = shared_facts(self.recipe).model_dump(mode="json"), self.places.out
        if not self.places.shared.exists():
            check_free(out)
            out.mkdir(parents=True, exist_ok=True)
            write_atomically(self.places.shared, json.dumps(facts, indent=1) + "\n")
            return
        old = json.loads(self.places.shared.read_text())
        for key, value in facts.items():
            if old.get(key) != value:
                raise ConfigError(
                    f"out={out} holds results of {old['name']!r} with another {key}, expected "
                    f"those of {self.recipe.name!r}; choose another --out"
                )

    def prepare(self, plans: Sequence[Plan]) -> tuple[list[Plan], Unmade]:
        """Build every cache and make every first conversion that is not there yet.

        Returns:
            The plans that this was possible for, and why not for the others.

        Raises:
            ConfigError: it was for none.
        """
        for table in [self.recipe.cache, *(plan.cache for plan in plans)]:
            self._build_cache(table)

        def convert(plan: Plan) -> None:
            if plan.convert is not None:
                self.convert(plan.convert, plan.cache)

        found = made(plans, convert)
        select(self.device).free_memory()  # it is the jobs' now
        return found

    def convert(self, convert: Table, cache: Table) -> None:
        """Convert the teacher, unless it was done; it may calibrate on that cache."""
        out = self.places.student(convert, cache)
        if not out.exists():
            logger.info("converting the teacher: %s", convert)
            config = convert_config(convert, self.places.cache(cache), self.device)
            convert_checkpoint(self.recipe.teacher, config, out)

    def _build_cache(self, table: Table) -> None:
        out = self.places.cache(table)
        try:
            TeacherCache.open(out)
        except CacheError:  # not there, or not finished
            logger.info("building a cache: %s", table)
            config = cache_config(self.recipe, table, self.device)
            source = open_source(config.data, config.format, config.text_field)
            build_teacher_cache(config, source, out)
