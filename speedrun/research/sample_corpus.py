"""Sample a corpus from a teacher: text in its own domain, for teachers whose data is not at hand.

    python speedrun/research/sample_corpus.py --teacher DIR --documents 20000 --out corpus.jsonl

Each document starts from the teacher's BOS token, at temperature 1: with `--top-p 1` the text is
distributed exactly as the teacher believes text to be. Writes JSON lines with one field, `text`,
which begins with the BOS token where the tokenizer would not put it there itself: some models talk
nonsense without it.
"""

import json
import zlib
from pathlib import Path

import torch
from cyclopts import App

from qat.backend.device import seeded
from qat.logs import progress
from qat.models.language_model import LanguageModel
from qat.models.load import load_teacher, load_tokenizer

app = App(help=__doc__)

LEAST_VARIETY = 0.25
"""Share of its bytes that zlib leaves of a document worth learning from."""


@app.default
def sample_corpus(
    *,
    teacher: str,
    out: Path,
    documents: int = 20000,
    max_tokens: int = 255,
    top_p: float = 1.0,
    batch_size: int = 1024,
    seed: int = 0,
    device: str = "auto",
) -> None:
    """Write DOCUMENTS sampled texts to OUT, none that only repeats itself."""
    model = load_teacher(teacher, device=device, dtype="fp32")
    tokenizer = load_tokenizer(teacher)
    reads_bos = tokenizer("a").input_ids[0] == tokenizer.bos_token_id
    start = "" if reads_bos else tokenizer.bos_token
    texts: list[str] = []
    with seeded(seed), progress("sampling", documents, "documents") as ticker:
        while len(texts) < documents:
            count = min(batch_size, documents - len(texts))
            rows = sample(model, tokenizer.bos_token_id, count, max_tokens=max_tokens, top_p=top_p)
            written = map(str.strip, tokenizer.batch_decode(rows, skip_special_tokens=True))
            kept = [text for text in written if text and variety(text) >= LEAST_VARIETY]
            texts += kept
            ticker.advance(len(kept))
    lines = (json.dumps({"text": start + text}) for text in texts)
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def sample(
    model: LanguageModel, bos: int, count: int, *, max_tokens: int, top_p: float
) -> list[list[int]]:
    """`count` token rows after `bos`, each cut where the teacher ends its document."""
    stops = {bos, model.model.config.eos_token_id}
    start = torch.full((count, 1), bos, device=model.device)
    with torch.no_grad():
        out = model.model.generate(
            input_ids=start,
            attention_mask=torch.ones_like(start),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=top_p,
            max_new_tokens=max_tokens,
            eos_token_id=list(stops),
            pad_token_id=bos,
        )
    return [_until(row, stops) for row in out[:, 1:].tolist()]


def variety(text: str) -> float:
    """How little of its bytes zlib can save: near 0 for what repeats itself."""
    found = text.encode()
    return len(zlib.compress(found)) / len(found)


def _until(row: list[int], stops: set[int]) -> list[int]:
    end = next((i for i, token in enumerate(row) if token in stops), len(row))
    return row[:end]


if __name__ == "__main__":
    app()
