"""A teacher's probabilities over another tokenizer's tokens: enumerated, and as a cache."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from cache_case import build, contents, info, texts
from cli_case import call, said
from tiny import tiny_model, tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from qat.data.cache import read_manifest
from qat.data.reader import TeacherCache
from qat.data.text import text_ids, tokenizer_hash
from qat.extensions.vocab.align import LOST, Aligner, Heard, Spoken
from qat.extensions.vocab.realign import _top_k
from qat.extensions.vocab.texts import foreign, pairs
from qat.extensions.vocab.tokens import Vocabulary

END = "<|end|>"


def words_tokenizer(*merges: str) -> Vocabulary:
    """A byte-level tokenizer of the letters a, b and c, and of pairs written `left right`."""
    words = [END, "a", "b", "c", *(merge.replace(" ", "") for merge in merges)]
    model = models.BPE(
        {word: i for i, word in enumerate(words)}, [tuple(m.split()) for m in merges]
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    found = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    return Vocabulary(found, "words")


def pieces_tokenizer(**special: object) -> PreTrainedTokenizerFast:
    """A tokenizer as SentencePiece makes them: spaces before words, bytes for other characters."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", *"abcdefghijklmnopqrstuvwxyz", "▁t", "he", "▁the", "at", "▁cat"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("a", "t"), ("▁c", "at")]
    words.insert(-1, "▁c")
    merges.insert(-1, ("▁", "c"))
    ids = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(ids, merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", **special
    )


def spoken_by(teacher: Vocabulary, text: str, next_of: np.ndarray) -> Spoken:
    """What a teacher says along a text if a token's successor depends on that token alone."""
    ids = np.array([*text_ids(text, teacher.tokenizer), teacher.end])
    room = 4  # for tokens that only the student has; the teacher's head is padded so far
    padded = np.pad(next_of, ((0, 0), (0, room)))[ids]
    order = np.argsort(-padded, axis=1)
    return Spoken(
        ids=ids,
        counts=np.arange(len(ids)) < len(ids) - 1,
        top_ids=order,
        top=np.take_along_axis(padded, order, 1),
        tail=np.zeros(len(ids)),
    )


def aligned(teacher: Vocabulary, student: Vocabulary, spoken: Spoken) -> tuple[Aligner, Heard]:
    aligner = Aligner(teacher, student)
    (pair,) = pairs([spoken.ids.tolist()], teacher, student)
    return aligner, aligner.align(spoken, pair)


def random_successors(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet(np.ones(size), size)


def as_dict(heard: Heard, place: int) -> dict[int, float]:
    pairs_ = zip(heard.top_ids[place].tolist(), heard.top[place].tolist(), strict=True)
    return {i: mass for i, mass in pairs_ if mass}


def text_of(seed: int) -> str:
    return "".join(np.random.default_rng(seed).choice([*"abc"], 40))


def test_a_longer_token_has_the_mass_of_all_texts_that_begin_with_it() -> None:
    teacher, student = words_tokenizer(), words_tokenizer("a b", "ab b")
    next_of = random_successors(teacher.size, seed=1)
    spoken = spoken_by(teacher, text_of(1), next_of)
    aligner, heard = aligned(teacher, student, spoken)
    assert aligner.counts["chained"] > 3 < aligner.counts["exact"]
    place = 0  # of the teacher's token that the student's begins with
    for n, i in enumerate(heard.ids[1:].tolist()):
        place += len(student.octets[heard.ids[n]])
        said_last = spoken.ids[place - 1]
        masses: dict[int, float] = {}
        size = 1 if i == student.end else len(student.octets[i])
        # every continuation of as many letters, or one that ends before
        for letters in itertools.product(range(teacher.size), repeat=size):
            ended = letters.index(teacher.end) if teacher.end in letters else size
            if any(letters[ended + 1 :]):  # one continuation for all that follow an end
                continue
            mass, last = 1.0, said_last
            for letter in letters[: ended + 1]:
                mass, last = mass * next_of[last, letter], letter
            written = teacher.joined([*letters[:ended]]).decode()
            first = text_ids(written, student.tokenizer)[0] if written else student.end
            masses[first] = masses.get(first, 0.0) + mass
        assert heard.counts[n]
        assert as_dict(heard, n) == pytest.approx(masses)
        assert heard.tail[n] == pytest.approx(0, abs=1e-12)


def test_the_rest_of_a_token_has_what_the_teacher_gives_tokens_that_go_on() -> None:
    teacher, student = words_tokenizer("a b", "ab b", "a a"), words_tokenizer()
    next_of = random_successors(teacher.size, seed=2)
    spoken = spoken_by(teacher, text_of(2), next_of)
    aligner, heard = aligned(teacher, student, spoken)
    assert aligner.counts["dropped"] == 0
    written = [b"" if i == teacher.end else teacher.octets[i] for i in range(teacher.size)]
    begin = len(written[spoken.ids[0]])
    for last, i in itertools.pairwise(spoken.ids.tolist()):
        for done in range(max(1, len(written[i]))):
            before, masses, whole = written[i][:done], {}, 0.0
            for u, v in itertools.product(range(teacher.size), repeat=2):
                if not written[u].startswith(before):
                    continue
                mass = next_of[last, u] * next_of[u, v]
                whole += mass
                if len(written[u]) > done:
                    first = student.by_octets[written[u][done : done + 1]]
                    masses[first] = masses.get(first, 0.0) + mass
                elif not done:  # the end; a token that ended after `before` leaves all to the tail
                    masses[student.end] = masses.get(student.end, 0.0) + mass
            place = begin + done - 1
            expected = {first: mass / whole for first, mass in masses.items()}
            assert as_dict(heard, place) == pytest.approx(expected)
            assert heard.tail[place] == pytest.approx(1 - sum(expected.values()), abs=1e-12)
        begin += len(written[i])


def test_its_own_tokenizer_gets_back_what_the_teacher_said() -> None:
    for tokenizer in (tiny_tokenizer(), pieces_tokenizer()):
        same = Vocabulary(tokenizer, "same")
        rng = np.random.default_rng(4)
        text = "the cat sat on thé mat 猫\n\n the  cat"
        ids = np.array([*text_ids(text, tokenizer), same.end])
        assert same.joined(ids[int(ids[0] == same.begin) : -1].tolist()).decode().strip() == text
        T, K = len(ids), 9
        top_ids = np.stack([rng.permutation(same.size)[:K] for _ in range(T)])
        masses = -np.sort(-rng.dirichlet(np.ones(K + 1), T), 1)
        spoken = Spoken(ids, np.arange(T) < T - 1, top_ids, masses[:, :K], masses[:, K])
        aligner, heard = aligned(same, same, spoken)
        assert aligner.counts["exact"] == T - 1
        assert not aligner.counts["chained"] + aligner.counts["dropped"] + aligner.counts["lost"]
        assert np.array_equal(heard.ids, ids)
        assert np.array_equal(heard.top_ids[:-1], top_ids[:-1])
        assert np.array_equal(heard.top[:-1], spoken.top[:-1])
        assert np.array_equal(heard.tail[:-1], spoken.tail[:-1])


def test_bytes_spaces_and_special_tokens_of_both_kinds_meet() -> None:
    plain, pieces = Vocabulary(tiny_tokenizer(), "plain"), Vocabulary(pieces_tokenizer(), "pieces")
    rng = np.random.default_rng(5)
    text = "the cat é 猫 sat\nthe"
    for teacher, student in ((plain, pieces), (pieces, plain)):
        ids = np.array([*text_ids(text, teacher.tokenizer), teacher.end])
        T = len(ids)
        others = np.stack([rng.permutation(teacher.size)[:30] for _ in range(T)])
        following = np.roll(ids, -1)
        others[(others == following[:, None])] = teacher.size + 5  # a word of a padded head
        spoken = Spoken(
            ids,
            np.arange(T) < T - 1,
            np.concatenate([following[:, None], others], 1),
            np.concatenate([np.full((T, 1), 0.7), np.full((T, 30), 0.009)], 1),
            np.full(T, 0.03),
        )
        aligner, heard = aligned(teacher, student, spoken)
        assert heard.ids.tolist() == [*text_ids(text, student.tokenizer), student.end]
        kept = np.flatnonzero(heard.counts)
        assert len(kept) >= len(heard.ids) - 3 and aligner.counts["lost"] > 0
        sums = heard.top.sum(1) + heard.tail
        np.testing.assert_allclose(sums[kept], 1, rtol=1e-9)
        # what follows is likely wherever the teacher says so in one token
        for place in kept:
            assert as_dict(heard, place)[heard.ids[place + 1]] > 0.3
        assert heard.ids[-1] == student.end and heard.top_ids[kept[-1], 0] == student.end
        top = _top_k(heard, heard.top.shape[1], student.size)
        assert all(len({*row}) == len(row) for row in top.ids.tolist())
        assert LOST not in top.ids and (top.tail_logprob < 0).all()

    # what a template wrote: the same marks for both, each one's own end
    marks = ["<|user|>", "<|assistant|>"]
    marked = Vocabulary(pieces_tokenizer(additional_special_tokens=marks), "marked")
    ids = plain.tokenizer("<|user|>the cat<|assistant|>sat<|end|>")["input_ids"]
    assert foreign(ids, plain, marked) is None and foreign(ids, plain, pieces) == "<|user|>"
    (pair,) = pairs([ids], plain, marked)
    assert marked.tokenizer.decode(pair.student_ids) == "<|user|>the cat<|assistant|>sat</s>"
    begins = [pair.octets[place:] for place in pair.teacher.begins[[0, -1]]]
    assert begins == [pair.octets, b""] == [pair.octets[pair.student.begins[n] :] for n in (0, -1)]


@pytest.mark.slow
def test_a_cache_for_another_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    theirs, mine = tmp_path / "theirs", tmp_path / "mine"
    tiny_model().save_pretrained(theirs)
    tiny_tokenizer().save_pretrained(theirs)
    tiny_model(vocab_size=400).save_pretrained(mine)
    pieces_tokenizer().save_pretrained(mine)
    source, out = tmp_path / "cache", tmp_path / "aligned"
    build(source, info=info(name=str(theirs)), top_k=200)
    words = ["cache", "realign", source, "--tokenizer", mine, "--out", out]
    words += ["--sequence-length", 80]  # letters are more tokens than words
    assert call(monkeypatch, *words) == 0
    numbers = said(capsys)
    assert 0 <= numbers["dropped_frac"] < 0.5 and numbers["sequences"] > 5
    whole = contents(out)
    cache = TeacherCache.open(out)
    assert cache.manifest.tokenizer == tokenizer_hash(pieces_tokenizer())
    assert (
        cache.check_student(cache.manifest.tokenizer, 400, 128) == cache.manifest.teacher.vocab_size
    )
    held_out = {
        text for text in texts() if text in _texts(TeacherCache.open(source), tiny_tokenizer())
    }
    assert held_out and held_out <= _texts(cache, pieces_tokenizer())
    batch = cache.batch(range(4))
    sums = batch.topk_logprobs.exp().sum(-1) + batch.tail_logprob.exp()
    torch.testing.assert_close(sums, torch.ones_like(sums), rtol=1e-5, atol=1e-5)
    # an interrupted run ends in the same bytes
    (out / "train-00001.safetensors").unlink()
    assert call(monkeypatch, *words) == 0
    assert contents(out) == whole
    assert said(capsys) == numbers
    # mistakes
    for flags, name in (
        (["--tokenizer", theirs, "--out", out], "tokenizer"),
        (["--tokenizer", mine, "--teacher", mine, "--out", tmp_path / "b"], "--teacher"),
        (["--tokenizer", mine, "--out", out, "--sequence-length", 9], "--out"),
        (["--tokenizer", mine, "--sequence-length", 1], "--sequence-length"),
    ):
        assert call(monkeypatch, "cache", "realign", source, *flags) == 1
        line = capsys.readouterr().err.strip().splitlines()[-1]
        assert name in line
    assert read_manifest(out).state == "complete"


def _texts(cache: TeacherCache, tokenizer: PreTrainedTokenizerFast) -> set[str]:
    """The held-out documents as text."""
    batch = cache.batch(range(cache.num_sequences("held_out")), "held_out")
    found = set()
    for ids, places in zip(batch.input_ids, batch.position_ids, strict=True):
        begins = [*np.flatnonzero(places == 0), len(ids)]
        for begin, end in itertools.pairwise(begins):
            found.add(tokenizer.decode(ids[begin:end], skip_special_tokens=True).strip())
    return found
