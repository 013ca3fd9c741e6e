"""TRL's distillation trainer for prepared students: on-policy, with a teacher that runs beside."""

from typing import Any

from transformers import PreTrainedModel
from trl import DistillationTrainer

from qat.errors import ConfigError
from qat.extensions.integrations.student import unwrapped
from qat.extensions.integrations.transformers import StudentMixin
from qat.nn.lut_embedding import TableHead


class QatDistillationTrainer(StudentMixin, DistillationTrainer):
    """`trl.DistillationTrainer` whose student learns in few bits.

    It takes what that takes, and `rates` as `QatTrainer` does. Its loss multiplies by the weight of
    the head itself, so the head stays in floating point.
    """

    def __init__(self, model: PreTrainedModel, *args: Any, **named: Any) -> None:
        student = unwrapped(model)
        if isinstance(student.prepared.language.head, TableHead):
            raise ConfigError(
                "the head of the student is quantized, but the loss of trl reads its float weight, "
                "expected a float head; use qat.prepare(model, ..., embedding_bits=16)"
            )
        super().__init__(model, *args, **named)
