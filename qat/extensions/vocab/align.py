"""Map a teacher's probabilities to the tokens of another tokenizer by their bytes.

A student's token covers bytes p to q of a text, and the teacher's token that holds byte p begins at
byte a. The teacher's next token there is u with probability P(u); x are the bytes from a to p.

- **Boundaries meet** (x is empty). The mass of u goes to the student's token of the same bytes, or
  else to the first token that the student's tokenizer makes of them.
- **The student's token is longer** than the teacher's token t that really follows: the chain rule.
  The mass of t is divided by what the teacher says next, and so on until q: a token v after it
  gives P(t) P(v) to the first token of the bytes of t and v.
- **The student's token begins within t**: P(u) / sum P over the tokens u that begin with x goes to
  the first token of what is left of u. A teacher that ends a token after x goes on with what is no
  rest of a longer one, so this mass joins the tail, the one outcome for all other tokens.

Each branch of the teacher's words gives its mass to one token or to the tail, so all masses sum to
1. Where t is none of the K tokens that are known, there is no share of it to give: a position
within it is dropped, a longer token stays in the tail.

Shapes: T tokens of the teacher, N of the student, K teacher tokens kept, R positions.
"""

from collections import Counter
from typing import NamedTuple

import numpy as np

from qat.extensions.vocab.texts import Pair
from qat.extensions.vocab.tokens import Vocabulary

LOST = -1
"""In place of the student's token, for a teacher's token that it has no counterpart of."""


class Spoken(NamedTuple):
    """A document of the teacher's cache: its tokens, and what the teacher says after each."""

    ids: np.ndarray
    """`(T,)`."""
    counts: np.ndarray
    """True where the prediction of the next token counts, `(T,)` bool."""
    top_ids: np.ndarray
    """`(T, K)`."""
    top: np.ndarray
    """Their probabilities, `(T, K)` float64."""
    tail: np.ndarray
    """The probability of all other tokens, `(T,)` float64."""


class Heard(NamedTuple):
    """The same document for the student."""

    ids: np.ndarray
    """`(N,)`."""
    counts: np.ndarray
    """`(N,)` bool."""
    top_ids: np.ndarray
    """`(N, K)`, of positions that count the likeliest first; `LOST` where fewer are known."""
    top: np.ndarray
    """`(N, K)` float64."""
    tail: np.ndarray
    """`(N,)` float64."""


class Aligner:
    """Re-divides a teacher's probabilities over a student's tokens, and counts how."""

    def __init__(self, teacher: Vocabulary, student: Vocabulary) -> None:
        self.teacher, self.student = teacher, student
        self.counts: Counter[str] = Counter()
        """Positions: `exact`, `chained`, `dropped`. Mass of the positions that are not dropped, in
        positions: `same` of tokens of the same bytes, `split` of the teacher's that are longer or
        shorter, `lost` that only joined the tail here, `tail` of the teacher's own."""
        ids = range(teacher.size)
        self._first = np.array([self._counterpart(u) for u in ids])
        self._is_same = np.array(
            [
                i != LOST and (u in teacher.special or student.octets[i] == teacher.octets[u])
                for u, i in zip(ids, self._first.tolist(), strict=True)
            ]
        )

    def align(self, spoken: Spoken, pair: Pair) -> Heard:
        """Return the document for the student."""
        N, K, teacher = len(pair.student_ids), spoken.top.shape[1], pair.teacher
        heard = Heard(
            ids=pair.student_ids,
            counts=np.zeros(N, bool),
            top_ids=np.full((N, K), LOST),
            top=np.zeros((N, K)),
            tail=np.ones(N),
        )
        p, q = pair.student.begins[1:], pair.student.ends[1:]
        # the teacher's token that holds byte p, or the end of the text
        i = np.searchsorted(teacher.begins, p, side="right") - 1
        is_held = (p < teacher.ends[i]) | ((p == q) & (p == teacher.begins[i]))
        is_asked = (i > 0) & spoken.counts[np.maximum(i - 1, 0)]  # by the position before it
        has_said = is_asked & is_held & teacher.is_whole[i]
        meets = has_said & (teacher.begins[i] == p) & (teacher.ends[i] >= q)
        self._direct(heard, spoken, np.flatnonzero(meets), i)
        for j in np.flatnonzero(has_said & ~meets).tolist():
            self._chain(heard, spoken, pair, (j, i[j]))
        kept = heard.counts[:-1]
        is_exact = kept & meets & (teacher.ends[i] == q)
        self.counts["exact"] += int(is_exact.sum())
        self.counts["chained"] += int((kept & ~is_exact).sum())
        self.counts["dropped"] += int((is_asked & ~kept).sum())
        return heard

    def _counterpart(self, u: int) -> int:
        """Return the student's token for the mass of `u` where boundaries meet, or `LOST`."""
        teacher, student = self.teacher, self.student
        if u in teacher.special:
            own = student.end if u == teacher.end else LOST
            return student.by_special.get(teacher.words[u], own)
        octets = teacher.octets[u]
        if not octets:
            return LOST
        namesake = student.tokenizer.convert_tokens_to_ids(teacher.words[u])
        if namesake is not None and namesake < student.size and student.octets[namesake] == octets:
            return namesake  # of several tokens of the same bytes
        return student.first(octets)

    def _direct(
        self, heard: Heard, spoken: Spoken, places: np.ndarray, holders: np.ndarray
    ) -> None:
        """Fill in positions where boundaries meet and no other token of the teacher is asked."""
        if not len(places):
            return
        rows, K = holders[places] - 1, spoken.top.shape[1]
        u_RK, mass_RK = spoken.top_ids[rows], spoken.top[rows]
        is_known_RK = u_RK < len(self._first)  # not one of a padded vocabulary
        safe_RK = np.where(is_known_RK, u_RK, 0)
        ids_RK = np.where(is_known_RK, self._first[safe_RK], LOST)
        is_same_RK = is_known_RK & self._is_same[safe_RK]
        # what really follows is divided as the student's tokenizer did, which saw the whole text
        follows_RK = u_RK == spoken.ids[holders[places]][:, None]
        ids_RK = np.where(follows_RK, heard.ids[places + 1][:, None], ids_RK)
        order_RK = ids_RK.argsort(1, kind="stable")
        ids_RK, mass_RK = (np.take_along_axis(x, order_RK, 1) for x in (ids_RK, mass_RK))
        is_same_RK = np.take_along_axis(is_same_RK, order_RK, 1)
        slot_RK = np.pad((np.diff(ids_RK) != 0).cumsum(1), ((0, 0), (1, 0)))
        found_RK = np.full(ids_RK.shape, LOST)
        np.put_along_axis(found_RK, slot_RK, ids_RK, 1)
        flat_RK = slot_RK + K * np.arange(len(rows))[:, None]
        total_RK = np.bincount(flat_RK.ravel(), mass_RK.ravel(), minlength=flat_RK.size)
        total_RK = total_RK.reshape(flat_RK.shape)
        lost_R = np.where(found_RK == LOST, total_RK, 0.0).sum(1)
        total_RK = np.where(found_RK == LOST, 0.0, total_RK)
        order_RK = np.lexsort((found_RK, -total_RK), axis=1)
        heard.top_ids[places] = np.take_along_axis(found_RK, order_RK, 1)
        heard.top[places] = np.take_along_axis(total_RK, order_RK, 1)
        heard.tail[places] = spoken.tail[rows] + lost_R
        heard.counts[places] = is_known = total_RK.any(1)
        is_same_RK &= is_known[:, None]
        same = float(mass_RK[is_same_RK].sum())
        self.counts["same"] += same
        self.counts["split"] += float(total_RK[is_known].sum()) - same
        self.counts["lost"] += float(lost_R[is_known].sum())
        self.counts["tail"] += float(spoken.tail[rows][is_known].sum())

    def _chain(self, heard: Heard, spoken: Spoken, pair: Pair, place: tuple[int, int]) -> None:
        """Fill in a position whose token begins within one of the teacher's, or is longer."""
        (j, i), teacher, found = place, pair.teacher, Counter()
        p, q = pair.student.begins[j + 1], pair.student.ends[j + 1]
        weight, path, before = 1.0, b"", pair.octets[teacher.begins[i] : p]
        own_tail = 0.0
        while i < len(spoken.ids) and teacher.is_whole[i]:
            share, branches, known = self._branches(spoken, i, before)
            if before:
                if not share:
                    return
                weight /= known
            else:
                own_tail += weight * spoken.tail[i - 1]
            for u, rest, mass in branches:
                within = path or before
                found[self.student.first(path + rest) if within else self._of(u)] += weight * mass
            weight *= share
            if teacher.ends[i] >= q:
                found[int(heard.ids[j + 1])] += weight
                break
            path, before, i = pair.octets[p : teacher.ends[i]], b"", i + 1
        del found[LOST]
        kept = sorted(found.items(), key=lambda pair: (-pair[1], pair[0]))[: spoken.top.shape[1]]
        mass = sum(mass for _, mass in kept)
        if not mass:
            return
        heard.top_ids[j, : len(kept)] = [first for first, _ in kept]
        heard.top[j, : len(kept)] = [mass for _, mass in kept]
        heard.tail[j] = max(1 - mass, own_tail)
        heard.counts[j] = True
        self.counts["split"] += mass
        self.counts["lost"] += heard.tail[j] - own_tail
        self.counts["tail"] += own_tail

    def _branches(
        self, spoken: Spoken, i: int, before: bytes
    ) -> tuple[float, list[tuple[int, bytes, float]], float]:
        """Return what the teacher says in the place of its token `i`, of words on `before`.

        That is the mass of the token itself, all others with what is left of them and their mass,
        and the mass of all that begin with `before`, or end there.
        """
        share = ended = 0.0
        branches = []
        for u, mass in zip(spoken.top_ids[i - 1].tolist(), spoken.top[i - 1].tolist(), strict=True):
            is_text = u < self.teacher.size and u not in self.teacher.special
            word = self.teacher.octets[u] if is_text else b""
            if u == spoken.ids[i]:
                share = mass
            elif before and word == before:
                ended += mass
            elif word.startswith(before):
                branches.append((u, word[len(before) :], mass))
        return share, branches, share + ended + sum(mass for *_, mass in branches)

    def _of(self, u: int) -> int:
        return int(self._first[u]) if u < len(self._first) else LOST
