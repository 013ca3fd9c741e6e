"""What `qat convert --rotate` changes: outliers of what linears read, and what rounding costs.

    python speedrun/measure_rotation.py MODEL=TEXT MODEL=TEXT --rows rows.jsonl \
        --figures figures.jsonl

Each model is taken as it is and rotated by `--seeds` rotations. A row holds:

- of what the linears read that read the stream (`stream`), the values (`values`) or a gated product
  (`down`, which no rotation reaches): the kurtosis over a token's channels (3 for a normal
  distribution), its largest magnitude over the mean one, and the largest of all tokens over the
  mean of all;
- `kl_nats`, the exact KL of the float model from the model with rounded inputs or weights. `token`
  rounds each token to 8 (or 4) bits around 0, `static` each linear's input within the range that it
  had on calibration tokens; `no down` leaves the inputs of down projections as they are. Presets
  are converted with the same calibration.

Documents that are judged on are no part of the calibration.
"""

import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from cyclopts import App
from figures import record
from torch import Tensor

from qat.convert.calibrate import TokenBatch
from qat.convert.config import ConvertConfig
from qat.convert.convert import BATCH, calibration_batches, convert_model
from qat.convert.rotate import rotate
from qat.data.config import CacheSettings
from qat.data.packing import Batch
from qat.data.sources import open_source
from qat.data.stream import divided
from qat.evaluate.divergence import exact_divergence
from qat.evaluate.text import packed_batches
from qat.models.language_model import LanguageModel, judging
from qat.models.load import load_model, load_tokenizer
from qat.nn.swap import linear_names

app = App(help=__doc__)
READS = {"o_proj": "values", "down_proj": "down"}
"""What linears read that do not read the stream."""


@app.default
def measure(
    pairs: tuple[str, ...],
    *,
    to: tuple[str, ...] = ("q4a4", "q2a4", "q2a2"),
    seeds: int = 3,
    sequences: int = 32,
    length: int = 128,
    judged: int = 16,
    rows: Path | None = None,
    figures: Path | None = None,
) -> None:
    """Measure each MODEL=TEXT; the first of its rotations is converted to presets too."""
    for pair in pairs:
        source, text = pair.rsplit("=", 1)
        teacher = load_model(source, device="cpu", dtype="fp32")
        tokenizer = load_tokenizer(source)
        settings = CacheSettings(data=text, sequence_length=length, held_out=0.2)
        parts: dict[str, list] = {"train": [], "held_out": []}
        for document, side in divided(open_source(text).documents, settings):
            parts[side].append(document)
        config = ConvertConfig(
            calibration_sequences=sequences, calibration_length=length, device="cpu"
        )
        calibration = calibration_batches(parts["train"], config, teacher, tokenizer)
        exam = packed_batches(
            parts["held_out"], tokenizer, length=length, max_sequences=judged, batch_size=BATCH
        )
        found: dict[str, dict[bool, list[float]]] = defaultdict(lambda: defaultdict(list))
        for seed in (None, *range(seeds)):
            model = rotated(source, seed)
            kls = rounded_inputs(model, teacher, calibration, exam)
            for preset in to if seed in {None, 0} else ():
                student = rotated(source, seed)
                wished = config.model_copy(update={"to": preset})
                convert_model(student, wished, calibration=calibration)
                kls[preset] = exact_divergence(student, teacher, exam).kl_nats
            shown = {name: round(kl, 6) for name, kl in kls.items()}
            row = {"model": source, "seed": seed, **outliers(model, exam), "kl_nats": shown}
            print(json.dumps(row), flush=True)
            if rows is not None:
                with rows.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
            for name, kl in kls.items():
                found[name][seed is not None].append(kl)
        for name, kls in found.items() if figures is not None else ():
            name = f"rotated_{name.replace(', ', '_').replace(' ', '_')}_kl_{Path(source).stem}"
            ratios = [kl / kls[False][0] for kl in kls[True]]
            spread = round(statistics.stdev(ratios), 4) if len(ratios) > 1 else None
            mean = round(statistics.fmean(ratios), 4)
            record(figures, name, mean, "1", "< 1", runs=len(ratios), spread=spread)


def rotated(source: str, seed: int | None) -> LanguageModel:
    """The model, rotated unless `seed` is None."""
    model = load_model(source, device="cpu", dtype="fp32")
    if seed is not None:
        rotate(model, seed)
    return model


def outliers(model: LanguageModel, exam: Sequence[Batch]) -> dict[str, dict[str, float]]:
    """Kurtosis and largest over mean magnitudes of what linears read, means over linears."""
    seen: dict[str, list[Tensor]] = defaultdict(list)

    def note(name: str, x: Tensor) -> Tensor:
        size = x.abs().flatten(0, -2)
        square = size.square().mean(-1)
        kurtosis = (size.pow(4).mean(-1) / square.square()).mean()
        peak = (size.amax(-1) / size.mean(-1)).mean()
        seen[kind(name)].append(torch.stack([kurtosis, peak, size.max() / size.mean()]))
        return x

    with judging(model), inputs_through(model, note):
        model.hidden(exam[0].input_ids, exam[0].position_ids)
    keys = ("kurtosis", "token_peak", "tensor_peak")
    means = {name: torch.stack(values).mean(0).tolist() for name, values in seen.items()}
    return {
        name: {k: round(v, 2) for k, v in zip(keys, mean, strict=True)}
        for name, mean in means.items()
    }


def rounded_inputs(
    model: LanguageModel,
    teacher: LanguageModel,
    calibration: Sequence[TokenBatch],
    exam: Sequence[Batch],
) -> dict[str, float]:
    """KL of `teacher` from `model` with rounded inputs, by how they are rounded."""
    ranges: dict[str, Tensor] = {}

    def note(name: str, x: Tensor) -> Tensor:
        ranges[name] = torch.maximum(ranges.get(name, x.new_zeros(())), x.abs().max())
        return x

    with judging(model), inputs_through(model, note):
        for batch in calibration:
            model.hidden(batch.input_ids, batch.position_ids)
    ways: dict[str, Callable[[str, Tensor], Tensor]] = {
        "token 8": lambda _name, x: rounded(x, x.abs().amax(-1, keepdim=True), 8),
        "token 4": lambda _name, x: rounded(x, x.abs().amax(-1, keepdim=True), 4),
        "static 8": lambda name, x: rounded(x, ranges[name], 8),
    }
    found = {}
    for name, way in ways.items():
        with inputs_through(model, way):
            found[name] = exact_divergence(model, teacher, exam).kl_nats
        with inputs_through(model, lambda n, x, w=way: x if kind(n) == "down" else w(n, x)):
            found[f"{name}, no down"] = exact_divergence(model, teacher, exam).kl_nats
    return found


def rounded(x: Tensor, largest: Tensor, bits: int) -> Tensor:
    """`x` on `2**bits - 1` evenly spaced values from `-largest` to `largest`."""
    most = 2 ** (bits - 1) - 1
    scale = largest / most
    return (x / scale).round().clamp(-most, most) * scale


def kind(name: str) -> str:
    """What the linear of that name reads."""
    return READS.get(name.rpartition(".")[2], "stream")


@contextmanager
def inputs_through(model: LanguageModel, change: Callable[[str, Tensor], Tensor]) -> Iterator[None]:
    """A block in which `change` sees, by the linear's name, what each reads, and replaces it."""
    handles = [
        model.model.get_submodule(name).register_forward_pre_hook(
            lambda _module, args, name=name: (change(name, args[0]),)
        )
        for name in linear_names(model.model)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


if __name__ == "__main__":
    app()
