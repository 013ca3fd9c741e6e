"""The distillation trainer of trl for prepared students, which an extension has."""

from qat.hooks import extension

QatDistillationTrainer = extension("qat.python", "load_trl")().QatDistillationTrainer
