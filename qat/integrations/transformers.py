"""The trainer of transformers for prepared students, which an extension has."""

from qat.hooks import extension

QatTrainer = extension("qat.python", "QatTrainer")
CacheDataset = extension("qat.python", "CacheDataset")
