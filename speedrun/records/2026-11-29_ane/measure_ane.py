"""Judge students of tables for 16 rows beside those of block scales, and beside plain k-means.

python measure_ane.py TEACHER CACHE DIR --trained ane blocks blocks96 --figures figures.jsonl

DIR/NAME are converted students and DIR/run_NAME what became of them by `qat train` on CACHE.
`k-means` is what Apple's coreai-opt and coremltools do: levels for each 16 rows by scikit-learn,
without inputs, scales or training. KL in nats a token over the whole vocabulary, float32, on the
held-out sequences of the cache, at every place.
"""

import argparse
import sys
from pathlib import Path

import torch
from sklearn.cluster import KMeans
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from figures import record

from qat.data.reader import TeacherCache
from qat.models.cost import linear_bits
from qat.models.load import load_model
from qat.nn.swap import linear_names

ROWS, BATCH = 16, 8
FIGURE = "ane_palette_kl_ratio"
EQUAL_BITS = 0.02  # bits of linears that differ by so little are called equal


def palettes(weight: Tensor, bits: int) -> Tensor:
    """Return `weight` with each 16 rows rounded to levels of their own, by Lloyd's k-means."""
    parts = []
    for part in weight.split(ROWS):
        kmeans = KMeans(2**bits, n_init=1, random_state=0, max_iter=50)
        place = kmeans.fit_predict(part.reshape(-1, 1).double().numpy())
        levels = torch.from_numpy(kmeans.cluster_centers_[:, 0]).float()
        parts.append(levels[torch.from_numpy(place).long()].view(part.shape))
    return torch.cat(parts)


@torch.no_grad()
def log_p(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the log-probabilities `(B, S, V)`."""
    return model(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)


def main() -> None:
    """Print and record the KL of each student."""
    parser = argparse.ArgumentParser()
    parser.add_argument("teacher")
    parser.add_argument("cache", type=Path)
    parser.add_argument("students", type=Path)
    parser.add_argument("--trained", nargs="*", default=[])
    parser.add_argument("--converted", nargs="*", default=[])
    parser.add_argument("--sequences", type=int, default=0)
    parser.add_argument("--kmeans-bits", type=int, nargs="*", default=[])
    parser.add_argument("--figures", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    teacher = load_model(given.teacher, device="cpu", dtype="fp32").model.eval()
    cache = TeacherCache.open(given.cache)
    count = cache.num_sequences("held_out")
    ids = cache.batch(range(min(given.sequences or count, count)), "held_out", targets=()).input_ids
    name = Path(given.teacher).stem
    found: dict[str, float] = {}
    bits_of: dict[str, float] = {}

    def judge(what: str, model: nn.Module, bits: float) -> None:
        total = 0.0
        for some in ids.split(BATCH):
            before, after = log_p(teacher, some), log_p(model, some)
            total += (before.exp() * (before - after)).sum(dtype=torch.float64).item()
        found[what], bits_of[what] = total / ids.numel(), bits
        print(f"{name}, {what}: {found[what]:.4f} nats, {bits:.3f} bits of linears", flush=True)
        record(
            given.figures,
            f"ane_kl {name}, {what}",
            found[what],
            "nats",
            "none",
            measured={"linear_bits": bits, "tokens": ids.numel()},
        )

    for each in given.kmeans_bits:
        model = load_model(given.teacher, device="cpu", dtype="fp32").model.eval()
        for linear in linear_names(model):
            weight = model.get_submodule(linear).weight
            weight.data = palettes(weight.data, each)
        judge(f"k-means {each} bits", model, float(each))
    paths = {f"{n} converted": given.students / n for n in (*given.converted, *given.trained)}
    paths |= {f"{n} trained": given.students / f"run_{n}" for n in given.trained}
    for what, path in paths.items():
        loaded = load_model(str(path), device="cpu", dtype="fp32").model.eval()
        judge(what, loaded, linear_bits(loaded))
    if not given.trained:
        return
    first, *others = given.trained
    for other, stage in ((o, s) for o in others for s in ("converted", "trained")):
        ratio = found[f"{first} {stage}"] / found[f"{other} {stage}"]
        share = bits_of[f"{first} {stage}"] / bits_of[f"{other} {stage}"]
        is_goal = stage == "trained" and share > 1 - EQUAL_BITS
        record(
            given.figures,
            FIGURE if is_goal else f"{FIGURE} {name}, over {other}, {stage}",
            ratio,
            "1",
            "<= 1.15" if is_goal else "none",
            measured={"model": name, "over": other},
        )


if __name__ == "__main__":
    main()
