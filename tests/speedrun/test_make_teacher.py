"""The teacher that is trained from scratch: its texts, their splits, its rows, and a small run."""

import gzip
import json
import lzma
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from qat.data.packing import NO_LABEL

SPEEDRUN = Path(__file__).parents[2] / "speedrun"
WORDS = "the ship sails over a calm sea while old men tell tales of wind and salt to boys".split()


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.syspath_prepend(str(SPEEDRUN))
    import make_teacher

    return make_teacher


@pytest.fixture
def read(script: object) -> object:
    import teacher_texts

    return teacher_texts


@pytest.fixture
def rows(script: object) -> object:
    import teacher_rows

    return teacher_rows


def sentences(count: int, seed: int) -> str:
    draw = random.Random(seed)
    return " ".join(f"{' '.join(draw.choices(WORDS, k=9)).capitalize()}." for _ in range(count))


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    for name in ("novel", "speeches", "tasks", "other"):
        (folder / name).mkdir(parents=True)
    chapters = (f"CHAPTER {i}\n\n{sentences(40, i)}\n\n" for i in range(1, 41))
    (folder / "novel" / "novel.txt").write_text("".join(chapters))
    (folder / "novel" / "SOURCE.txt").write_text("Where the novel comes from.")
    speeches = "\n\n".join(sentences(60, 100 + i) for i in range(30))
    (folder / "speeches" / "all.txt.xz").write_bytes(lzma.compress(speeches.encode()))
    rows = [
        {"prompt": f"{sentences(6, 200 + i // 4)}\u2028What is {i}?\n", "completion": f"It is {i}."}
        for i in range(160)
    ]
    lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in [*rows, rows[0]])
    (folder / "tasks" / "rows.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (folder / "other" / "other.txt").write_text(sentences(50, 999))
    return folder


def in_splits(read: object, texts: Path, **settings: object) -> dict:
    settings = {"leave_out": ("other",), "validate": 0.05, "report": 0.1, "seed": 0} | settings
    return read.split(read.read_pieces(texts), **settings)


# ---- texts


def test_chapters_are_told_by_headings_verses_and_long_lines(read: object) -> None:
    book = "Title\n\nCHAPTER I\n\nOne line\nand more.\n\nNext.\n\nCHAPTER II\n\nLast."
    assert read.chapters(book) == [
        "Title",
        "CHAPTER I\n\nOne line and more.\n\nNext.",
        "CHAPTER II\n\nLast.",
    ]
    verses = "Ge1:1 In the beginning.\nGe1:1 In the beginning.\nGe1:2 And.\n1Jn2:1 My children.\n"
    assert read.chapters(verses) == ["In the beginning.\nAnd.", "My children."]
    assert read.chapters(f"{'a' * 3000}\n\n{'b' * 3000}") == ["a" * 3000, "b" * 3000]


def test_cutting_loses_nothing_and_ends_pieces_with_sentences(read: object) -> None:
    text = sentences(100, 0)
    pieces = read.cut_text(text, 500)
    assert " ".join(pieces) == text
    assert all(piece.endswith(".") and len(piece) < 700 for piece in pieces)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"question": "Q?", "answer": "A."}, "Question: Q?\nAnswer: A."),
        ({"prompt": "P\n", "completion": "C<|endoftext|>"}, "P\nC"),
        ({"instruction": "I", "input": "", "output": "O"}, "I\n\nO"),
        ({"instruction": "I", "instances": [{"input": "X", "output": "O"}]}, "I\n\nX\n\nO"),
        ({"text": " T "}, "T"),
    ],
)
def test_rows_of_known_data_sets_become_text(read: object, row: dict, text: str) -> None:
    assert read.row_text(row) == text


def test_rows_that_quote_the_same_passage_are_one_unit(read: object, texts: Path) -> None:
    units: dict[str, list[str]] = {}
    for piece in read.read_pieces(texts):
        if piece.source == "tasks":
            units.setdefault(piece.unit, []).append(piece.text)
    assert sorted(map(len, units.values())) == [4] * 40
    kept = read.without_repetition(read.read_pieces(texts), 1)
    assert sum(piece.source == "tasks" for piece in kept) == 40
    assert sum(piece.source == "speeches" for piece in kept) == 2 * 30


def test_splits_are_disjoint_by_unit_and_complete(read: object, texts: Path) -> None:
    pieces, splits = read.read_pieces(texts), in_splits(read, texts)
    assert sorted(p for chosen in splits.values() for p in chosen) == sorted(pieces)
    units = [{(p.source, p.unit) for p in chosen} for chosen in splits.values()]
    assert sum(map(len, units)) == len(set.union(*units))
    assert {p.source for p in splits["report_other"]} == {"other"}
    for name, share in (("validate", 0.05), ("report", 0.1)):
        assert {p.source for p in splits[name]} == {"novel", "speeches", "tasks"}
        size, held_out = (sum(len(p.text) for p in ps) for ps in (pieces, splits[name]))
        assert held_out == pytest.approx(share * size, rel=0.4)


def test_splits_come_from_the_seed(read: object, texts: Path) -> None:
    assert in_splits(read, texts) == in_splits(read, texts)
    assert in_splits(read, texts)["report"] != in_splits(read, texts, seed=1)["report"]


def test_bundle_holds_the_same_pieces(script, read, texts, tmp_path, capsys) -> None:
    script.pack(texts, tmp_path / "bundle.jsonl.xz")
    assert json.loads(capsys.readouterr().out)["speeches"] > 0
    assert read.read_pieces(tmp_path / "bundle.jsonl.xz") == read.read_pieces(texts)


def test_nothing_to_read_and_nothing_to_hold_out_are_errors(read, tmp_path) -> None:
    with pytest.raises(ValueError, match="holds no text"):
        read.read_pieces(tmp_path)
    pieces = [read.Piece("One.", "a", "a 0")]
    with pytest.raises(ValueError, match="validate would hold no document"):
        read.split(pieces, leave_out=(), validate=0.1, report=0.1, seed=0)


# ---- rows


def test_rows_hold_every_token_once_and_never_predict_across(rows: object) -> None:
    documents = [[*range(100 * i, 100 * i + length)] for i, length in enumerate((3, 9, 20, 1, 5))]
    ids, labels = rows.pack_rows(documents, 8)
    predicted = {pair for doc in documents for pair in zip(doc, doc[1:], strict=False)}
    places = labels != NO_LABEL
    assert {*zip(ids[places].tolist(), labels[places].tolist(), strict=True)} == predicted
    assert places.sum() == len(predicted)
    assert len(ids) == 5


def test_rows_are_filled_best(rows: object) -> None:
    found = rows.fill_rows([5, 8, 3, 4, 4], 8)
    assert sorted(sorted(row) for row in found) == [[0, 2], [1], [3, 4]]


def test_an_epoch_has_each_row_once_in_an_order_of_its_own(rows: object) -> None:
    batches = rows.endless_batches(10, 3, 0)
    epochs = [torch.cat([next(batches) for _ in range(3)]).tolist() for _ in range(2)]
    assert all(len(set(epoch)) == 9 for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_empty_rows_say_nothing(rows: object) -> None:
    ids, labels = rows.with_empty_rows((torch.ones(5, 3).long(), torch.ones(5, 3).long()), 4)
    assert ids.shape == labels.shape == (8, 3)
    assert (labels != NO_LABEL).sum() == 15


# ---- Muon


def test_orthogonal_keeps_directions_and_evens_out_sizes(script: object) -> None:
    import muon

    torch.manual_seed(0)
    for shape in ((3, 8, 20), (2, 20, 8)):
        x = torch.randn(shape)
        U, S, Vh = torch.linalg.svd(x, full_matrices=False)
        sizes = (U.mT @ muon.orthogonal(x) @ Vh.mT).diagonal(dim1=1, dim2=2)
        assert 0.6 < sizes.min() and sizes.max() < 1.25


def test_muon_moves_by_the_learning_rate_and_decays(script: object) -> None:
    import muon

    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(16, 64)) for _ in range(2)]
    stack = torch.nn.Parameter(torch.cat([*parameters]).detach())  # two experts
    parameters.append(stack)
    before = [p.detach().clone() for p in parameters]
    mover = muon.Muon(parameters, experts={stack: 2}, weight_decay=0.5, dtype=torch.float32)
    for p in parameters:
        p.grad = torch.randn_like(p)
    stack.grad = torch.cat([p.grad for p in parameters[:2]])
    mover.step(0.1)
    torch.testing.assert_close(stack, torch.cat(parameters[:2]))
    for old, new in zip(before, parameters, strict=True):
        update = (new.detach() - 0.95 * old) / 0.1
        assert update.square().mean().sqrt().item() == pytest.approx(0.2, rel=0.15)
        assert (update * new.grad).sum() < 0


# ---- the whole


def test_small_run_writes_teacher_and_texts(script, read, texts, tmp_path, capsys) -> None:
    out = tmp_path / "teacher"
    config = script.TeacherConfig(
        hidden=64, layers=1, ffn=64, vocabulary=512, row=64, rows=4, max_seconds=2, evaluations=2,
        validate_share=0.05, leave_out=("other",), device="cpu",
    )  # fmt: skip
    script.main(texts=texts, out=out, config=config)
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert printed[-1]["perplexity"].keys() >= {"validate", "report", "report_other"}
    assert [line["step"] for line in printed[1:-1]] == sorted(
        line["step"] for line in printed[1:-1]
    )
    assert printed[-2]["seconds"] >= 2
    files = {name: out / "texts" / f"{name}.jsonl" for name in read.SPLITS}
    documents = {
        name: {json.loads(line)["text"] for line in file.read_text().splitlines()}
        for name, file in files.items()
    }
    assert sum(map(len, documents.values())) == len(set.union(*documents.values()))
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out)
    text = "Old men tell 12 tales;\n\n caf\u00e9!"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert model.config.vocab_size == 512 and model.config.max_position_embeddings >= 512
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert "| report_other |" in (out / "README.md").read_text()


@pytest.mark.slow
def test_a_mixture_is_a_teacher_too(script, texts, tmp_path) -> None:
    out = tmp_path / "teacher"
    config = script.TeacherConfig(
        hidden=64, layers=2, ffn=64, experts=8, chosen=2, vocabulary=512, row=64, rows=4,
        max_seconds=4, evaluations=2, validate_share=0.05, leave_out=("other",), device="cpu",
    )  # fmt: skip
    script.main(texts=texts, out=out, config=config)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert model.config.model_type == "qwen3_moe" and model.config.num_experts == 8
    assert model.model.layers[1].mlp.experts.down_proj.shape == (8, 64, 64)
    rows = AutoTokenizer.from_pretrained(out)(sentences(30, 7), return_tensors="pt").input_ids
    with torch.no_grad():
        routed = model(rows, output_router_logits=True)
    for logits in routed.router_logits:
        used = logits.topk(2).indices.flatten().bincount(minlength=8)
        assert (used > 0).sum() >= 4, used  # not the same two for every token
    assert routed.logits.softmax(2).max() > 0.05  # of 512 words: it learned something
