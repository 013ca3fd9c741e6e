"""The exam at the end of `qat run` and `qat demo`: the same table on the terminal and on the page.

It is measured once, by `qat eval`, and written to `eval.json`: whoever shows it reads that.
"""

from collections.abc import Mapping

COLUMNS = ("", "KD", "KL", "top-1", "perplexity", "bits", "of all", "MB")
KEYS = {
    "kd_nats": 4,
    "kl_nats": 4,
    "top1_frac": 4,
    "ppl": 2,
    "bits_per_weight": 2,
    "whole_bits_per_weight": 2,
    "megabytes": 2,
}
"""The numbers of a row, and how many digits stand behind their points."""
CAPTION = (
    "On all held-out text. KD and KL in nats a token: KD over the teacher's top K at temperature "
    "2, KL over the whole vocabulary. Bits per weight where quantized, and of all weights."
)

Exams = Mapping[str, Mapping[str, float]]


def exam_rows(exams: Exams) -> list[list[str]]:
    """The cells of `COLUMNS` for each model in `exams`; empty where nothing was measured."""
    return [
        [name, *("" if found.get(k) is None else f"{found[k]:.{d}f}" for k, d in KEYS.items())]
        for name, found in exams.items()
    ]
