"""Measure students with static 8-bit inputs in LiteRT, and bundles in LiteRT-LM.

`static` compares with what one float32 rounding does to our own program, and with outputs of 8
bits. `bundle` compares logits of an exported bundle, and greedy texts of LiteRT-LM itself.

python speedrun/records/2026-11-29_engines/litert.py static STUDENT --calibration FILE.txt \\
    --text FILE.txt --figures FILE.jsonl
python speedrun/records/2026-11-29_engines/litert.py bundle STUDENT EXPORTED --text FILE.txt \\
    --figures FILE.jsonl
"""

import sys
import tempfile
import time
from pathlib import Path

import torch
from cyclopts import App
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from figures import record
from measure_engines import KL, TOP1
from measure_llamacpp import compared, logits, tokens

from qat.cli import run_verb
from qat.export.dense import dense_state_dict
from qat.export.parts import float_model, quantize_inputs
from qat.extensions.targets import litert, litertlm
from qat.models.checkpoint import load_checkpoint
from qat.models.load import load_tokenizer
from qat.models.noise import disturbed
from qat.nn.quant_linear import quant_linears

SEQUENCES, LENGTH, CALIBRATION = 4, 128, 16
PROMPTS, PROMPT, NEW = 8, 16, 32
EPS = torch.finfo(torch.float32).eps
app = App(help=__doc__)


@app.command
def static(student: Path, *, text: Path, calibration: Path, figures: Path | None = None) -> None:
    """Record LiteRT, one float32 rounding in our own program, and outputs of 8 bits."""
    torch.set_num_threads(1)
    model, tokenizer = load_checkpoint(student, torch.float32), load_tokenizer(str(student))
    ids = tokens(tokenizer, text.read_text(encoding="utf-8"), SEQUENCES, LENGTH)
    known = tokens(tokenizer, calibration.read_text(encoding="utf-8"), CALIBRATION, LENGTH)
    ours = logits(model, ids)
    with tempfile.TemporaryDirectory() as place:
        out = str(Path(place, "out"))
        run_verb(["export", str(student), "--to", "litert", "--dtype", "fp32", "--out", out])
        found = {"litert": litert.read_logits(model, Path(out), ids)}
    plain = float_model(model, dense_state_dict(model, torch.float32), torch.float32)
    found["float_inputs"] = logits(plain, ids)
    quantize_inputs(plain, model)
    with disturbed(plain, EPS, every_product=True, seed=0):
        found["eps"] = logits(plain, ids)
    linears = quant_linears(model)
    most = largest_outputs(model, linears, known)
    for name, left_out in (("outputs8", "none"), ("outputs8_but_down", "down_proj")):
        hooks = [
            linear.register_forward_hook(rounded(most[key] / 127))
            for key, linear in linears.items()
            if left_out not in key
        ]
        found[name] = logits(model, ids)
        for hook in hooks:
            hook.remove()
    for name, theirs in found.items():
        said = compared(ours, theirs)
        print(name, said, flush=True)
        for part, value, unit in (
            ("top1", said.agrees, "share of places"),
            ("kl", said.kl, "nats"),
        ):
            record(figures, f"static8_{name}_{part}", value, unit, "", runs=ids.numel())


@app.command
def bundle(student: Path, exported: Path, *, text: Path, figures: Path | None = None) -> None:
    """Record logits of a bundle's program, and whether LiteRT-LM continues texts as the student."""
    import litert_lm

    torch.set_num_threads(1)
    model, tokenizer = load_checkpoint(student, torch.float32), load_tokenizer(str(student))
    engine = litert_lm.Engine(
        str(exported / litertlm.FILE_NAME),
        backend=litert_lm.Backend.CPU(thread_count=1),
        cache_dir=":nocache",
    )
    whole = text.read_text(encoding="utf-8")
    greedy = litert_lm.SamplerConfig(top_k=1, top_p=1.0, temperature=0.0)
    same, seconds = 0, 0.0
    for row in tokens(tokenizer, whole, PROMPTS, PROMPT):
        prompt = tokenizer.decode(row).strip()
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        ours = model.generate(ids, do_sample=False, max_new_tokens=NEW, pad_token_id=0)
        with engine.create_session(
            apply_prompt_template=False, sampler_config=greedy, max_output_tokens=NEW
        ) as session:
            session.run_prefill([prompt])
            began = time.perf_counter()
            (said,) = session.run_decode().texts
            seconds += time.perf_counter() - began
        same += said == tokenizer.decode(ours[0, ids.shape[1] :], skip_special_tokens=True)
        print(same, repr(said), flush=True)
    how = {"runs": PROMPTS}
    record(figures, "litertlm_same_text", same / PROMPTS, "share of texts", "", **how)
    record(figures, "litertlm_tok_s", PROMPTS * NEW / seconds, "tokens/s", "", **how)
    ids = tokens(tokenizer, whole, SEQUENCES, LENGTH)
    found = compared(logits(model, ids), litertlm.read_logits(model, exported, ids))
    print(found)
    for part, value, unit, goal in (
        ("top1", found.agrees, "share of places", f">= {TOP1}"),
        ("kl", found.kl, "nats", f"<= {KL}"),
    ):
        name = f"engine_litertlm_exact_{part}"
        record(figures, name, value, unit, goal, runs=ids.numel())


def largest_outputs(model: nn.Module, linears: dict[str, nn.Module], ids: Tensor) -> dict:
    """Return the largest output of each linear over the tokens `ids`."""
    most = dict.fromkeys(linears, 0.0)

    def keep(name: str) -> object:
        def hook(_module: nn.Module, _args: tuple, output: Tensor) -> None:
            most[name] = max(most[name], output.abs().max().item())

        return hook

    hooks = [linear.register_forward_hook(keep(name)) for name, linear in linears.items()]
    logits(model, ids)
    for hook in hooks:
        hook.remove()
    return most


def rounded(step: float) -> object:
    """Return a hook that rounds an output to 8 bits, as a product of integers in LiteRT does."""
    return lambda _module, _args, output: (output / step).round().clamp(-128, 127) * step


if __name__ == "__main__":
    app()
