"""Triton functions that turn packed indices into levels, 16 at a time, for `lut_matvec`.

The levels are exact. A GPU reads weights of few bits faster than it can name their levels: what
counts is integer instructions a weight, 2 with assembled loads (`lut_mma_triton` has fewer).
"""

from qat.kernels.dispatch import tl, triton

GATHER, SELECT, ASSEMBLED_GATHER = 0, 1, 2
"""Ways to look levels up: a load from the codebook, comparisons between four.

The assembled load is the same to a GPU, but the compiler does not move its words between threads.
"""


def _four_bits() -> str:
    """Assembly of `_gathered_by_four`: $8 the word, $9 the codebook."""
    lines = [".reg .b32 low, high, at;", ".reg .b64 place;", "mov.b64 {low, high}, $9;"]
    for k in range(8):
        shift = "shl.b32 at, $8, 2;" if k == 0 else f"shr.u32 at, $8, {4 * k - 2};"
        lines += [shift, "lop3.b32 at, at, 60, low, 0xEA;", "mov.b64 place, {at, high};"]
        lines.append(f"ld.global.nc.f32 ${k}, [place];")
    return "\n".join(["{", *lines, "}"])


FOUR_BITS, OUTPUTS_8 = tl.constexpr(_four_bits()), tl.constexpr("=&f," * 8)
FLOATS_8 = tl.constexpr((tl.float32,) * 8)


@triton.jit
def levels_of(words, codebook, BITS: tl.constexpr, LOOKUP: tl.constexpr):
    """The 16 levels of each unit, `(R, U)` float32 each."""
    if LOOKUP == 2 and BITS == 4:
        first = _gathered_by_four(words[0].to(tl.int32), codebook)
        return first + _gathered_by_four((words[0] >> 32).to(tl.int32), codebook)
    else:
        found = ()
        for j in tl.static_range(16):
            code = (words[j * BITS // 64] >> (j * BITS % 64)).to(tl.int32) & (2**BITS - 1)
            if LOOKUP == 1:
                zero, one = tl.load(codebook), tl.load(codebook + 1)
                two, three = tl.load(codebook + 2), tl.load(codebook + 3)
                is_odd = (code & 1) != 0
                level = tl.where(
                    (code & 2) != 0, tl.where(is_odd, three, two), tl.where(is_odd, one, zero)
                )
            else:
                level = _gathered(codebook, code) if LOOKUP == 2 else tl.load(codebook + code)
            found = found + (level,)
        return found


@triton.jit
def _gathered(codebook, code):
    """`codebook[code]`, from the few lines that all threads read: the first-level cache's."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b64 place;
        mad.wide.u32 place, $2, 4, $1;
        ld.global.nc.f32 $0, [place];
        }
        """,
        "=f,l,r",
        args=[codebook, code],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _gathered_by_four(word, codebook):
    """The levels of eight indices of 4 bits; each table of 16 levels lies at a multiple of 64."""
    return tl.inline_asm_elementwise(
        FOUR_BITS, OUTPUTS_8 + "r,l", [word, codebook], dtype=FLOATS_8, is_pure=True, pack=1
    )
