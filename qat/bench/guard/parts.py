"""What the guard watches: each part of the CPU's work beside its frozen twin.

Shapes: O out_features, I in_features, G groups per row, C codebook entries, T tokens,
K teacher tokens kept, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from qat.backend.device import select
from qat.bench.batches import open_source
from qat.bench.config import MeasureConfig
from qat.bench.guard import twins
from qat.bench.student import open_student
from qat.bench.subject import Ours
from qat.data.codec import decode_top_k, encode_top_k, id_bits, pack_bits, top_k
from qat.kernels.lut_weight import form
from qat.quant.codebook import weighted_kmeans
from qat.quant.pack import Packed, pack, unpack
from qat.quant.weight import Scales

O, I, GROUP_SIZE, BITS = 256, 1024, 32, 2
VALUES, LEVELS = 50_000, 4
SEQUENCES, LENGTH, K, V = 8, 64, 64, 4096
STEP = MeasureConfig(device="cpu", dtype="fp32", compile="off", batch_size=8, seq_len=32)
STEP_WIDTH, STEP_WORDS = 64, 512

Work = Callable[[], object]


@dataclass(frozen=True)
class Part:
    """A piece of our work, and a frozen one to hold it against."""

    name: str
    ours: Work
    twin: Work


def all_parts() -> list[Part]:
    """Every guarded part, ready to run."""
    return [*weight_parts(), kmeans_part(), cache_part(), step_part()]


def weight_parts() -> list[Part]:
    """Forming a weight, packing and unpacking its indices."""
    generator = torch.Generator().manual_seed(0)
    indices = torch.randint(2**BITS, (O, I), generator=generator, dtype=torch.uint8)
    codebook = torch.tensor([-1.0, -0.3, 0.3, 1.0])
    scales = torch.rand((O, I // GROUP_SIZE), generator=generator) + 0.5
    octets = pack(indices, BITS)
    source, ours = Packed(octets, BITS, I), Scales(scales=scales)
    return [
        Part(
            "form",
            lambda: form(source, codebook, ours, torch.float32),
            lambda: twins.form(indices, codebook, scales, GROUP_SIZE),
        ),
        Part("pack", lambda: pack(indices, BITS), lambda: twins.pack(indices)),
        Part("unpack", lambda: unpack(octets, BITS, I), lambda: twins.unpack(octets)),
    ]


def kmeans_part() -> Part:
    """The levels of a codebook."""
    rng = np.random.default_rng(0)
    values, weights = rng.normal(size=VALUES), rng.random(VALUES)
    return Part(
        "k-means",
        lambda: weighted_kmeans(values, weights, LEVELS),
        lambda: twins.lloyd(values, weights, LEVELS),
    )


def cache_part() -> Part:
    """Decoding what a teacher cache stores of a few sequences."""
    generator = torch.Generator().manual_seed(0)
    top = top_k(3 * torch.randn((SEQUENCES * LENGTH, V), generator=generator), K)
    rows = encode_top_k(top, SEQUENCES, V)
    bits, count = id_bits(V), LENGTH * K
    octets = pack_bits(top.ids.reshape(SEQUENCES, count), bits).numpy()
    return Part(
        "cache decode",
        lambda: decode_top_k(rows, length=LENGTH, k=K, vocab_size=V),
        lambda: twins.decode(octets, bits, count),
    )


def step_part() -> Part:
    """A training step of the tiny student beside one of plain PyTorch."""
    student = open_student("tiny", STEP)
    source = open_source(STEP, student)
    batches = [source.batch(STEP.batch_size, 0, select("cpu"))]
    subject = Ours(student, STEP).subject()
    twin = twins.training_step(STEP.batch_size, source.seq_len, STEP_WORDS, STEP_WIDTH)
    return Part("training step", lambda: subject(batches, 0), twin)
