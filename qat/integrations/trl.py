"""The distillation trainer of trl for prepared students, which an extension has."""

from qat.hooks import extension


def __getattr__(name: str) -> object:
    if name != "QatDistillationTrainer":
        raise AttributeError(f"module 'qat.integrations.trl' has no attribute {name!r}")
    return extension("qat.python", "load_trl")().QatDistillationTrainer
