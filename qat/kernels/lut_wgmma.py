"""Products of four warps at a time, for `lut_gemm` on Hopper: `wgmma`, weights in registers.

Four warps hand in 64 rows of weights, 16 each, as `mma.m16n8k16` wants them, and get the products
with all vectors of a tile: nobody reads the vectors into registers, and no weight is looked up
twice. The tensor cores read the vectors from shared memory while the next weights are looked up.

A slice of 64 inputs of a vector is 128 bytes, of which each of four steps takes 32. In a step's
place `2 c + i + 8 h` lies what meets the number `4 step + 2 h + i` of lane c's unit. So a thread
reads 8 bytes of each of the four units, and writes what they say of h = 0 and of h = 1 as 16
bytes each. Vector n's 16 bytes q lie at `128 n + 16 (q ^ n % 8)`, which the descriptor calls
swizzled by 128 bytes: no two lanes that are served at once need the same bank.
"""

from qat.kernels.dispatch import tl, triton

STAGES = 3
"""Slices in shared memory, no fewer: one is read, one may still be, and one is written."""
PARTS = tl.constexpr(4)
"""Threads that copy a vector's slice: a step each."""
DESCRIBED = tl.constexpr(0x40000040)
"""The upper half of a descriptor: swizzled by 128 bytes, eight vectors are 1,024."""
INTEGERS_8 = tl.constexpr((tl.int32,) * 8)


def _take(distance: int) -> str:
    """$0-$7: 8 bytes of each of four units that lie so far apart, from $8 on; $9 of them exist."""
    lines = [".reg .pred is;"]
    for c in range(4):
        words = f"${2 * c}, ${2 * c + 1}"
        lines += [f"mov.b32 ${2 * c + half}, 0;" for half in (0, 1)]
        lines += [f"setp.gt.s32 is, $9, {c};"]
        lines += [f"@is ld.global.v2.b32 {{{words}}}, [$8 + {distance * c}];"]
    return "\n".join(["{", *lines, "}"])


TAKE_2, TAKE_4 = tl.constexpr(_take(64)), tl.constexpr(_take(128))
LAY = tl.constexpr(
    "st.shared.v4.b32 [$1], {$3, $5, $7, $9}; st.shared.v4.b32 [$2], {$4, $6, $8, $10}; "
    "mov.b32 $0, $1;"
)
# tensor cores read past what orders plain accesses
LAID = tl.constexpr("fence.proxy.async.shared::cta; bar.sync 0; mov.b32 $0, $1;")


@triton.constexpr_function
def _begin(kind: str, nt: int) -> str:
    """Assembly: begin to add four steps of products to the sums $0 and on.

    Then come the 16 registers of weights, of two rows a lane, and the lower half of a descriptor.
    """
    count = 4 * nt
    sums = "{" + ", ".join(f"${k}" for k in range(count)) + "}"
    lines = [".reg .b64 vectors; .reg .b32 lower;", "wgmma.fence.sync.aligned;"]
    for step in range(4):
        first, second = count + 2 * step, count + 8 + 2 * step
        weights = f"{{${first}, ${second}, ${first + 1}, ${second + 1}}}"
        lines += [f"add.u32 lower, ${count + 16}, {2 * step};"]
        lines += [f"mov.b64 vectors, {{lower, {DESCRIBED.value}}};"]
        lines += [
            f"wgmma.mma_async.sync.aligned.m64n{8 * nt}k16.f32.{kind}.{kind} "
            f"{sums}, {weights}, vectors, 1, 1, 1, 0;"
        ]
    return "\n".join(["{", *lines, "wgmma.commit_group.sync.aligned;", "}"])


@triton.constexpr_function
def _end(pending: int) -> str:
    """Assembly: of all that was begun, no more than so many are still under way."""
    return f"wgmma.wait_group.sync.aligned {pending};"


@triton.constexpr_function
def _tied(nt: int, others: int) -> str:
    """Sums that stay in their registers, and other registers that are only read."""
    count = 4 * nt
    return ",".join(["=f"] * count + ["r"] * others + [str(k) for k in range(count)])


@triton.constexpr_function
def _floats(count: int) -> tuple[object, ...]:
    return (tl.float32,) * count


@triton.jit
def take(
    x, span, v: tl.constexpr, column, num_vectors, lane, units,
    V: tl.constexpr, NT: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """A thread's part of slice v of a span, or of a span after it: eight words a round."""
    found = ()
    for k in tl.static_range((8 * NT * PARTS + 32 * W - 1) // (32 * W)):
        n, step = _task(lane, k, NT, W)
        unit = (span + v // V) * (4 * V) + v % V
        there = tl.where(column + n < num_vectors, (units - unit + V - 1) // V, 0)
        place = tl.where(there > 0, (column + n).to(tl.int64) * units + unit, 0) * 8 + step * 2
        words = tl.inline_asm_elementwise(
            TAKE_4 if V == 4 else TAKE_2, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,l,r",
            [(x + place).to(tl.int64), there], dtype=INTEGERS_8, is_pure=False, pack=1,
        )  # fmt: skip
        found = found + (words,)
    return found


@triton.jit
def lay(taken, room, lane, NT: tl.constexpr, W: tl.constexpr):
    """Write it to a slice of shared memory."""
    for k in tl.static_range(len(taken)):
        n, step = _task(lane, k, NT, W)
        at = room + _place(n, step)
        tl.inline_asm_elementwise(
            LAY, "=r,r,r,r,r,r,r,r,r,r,r", (at, at ^ 16) + taken[k],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _task(lane, k: tl.constexpr, NT: tl.constexpr, W: tl.constexpr):
    """Vector and step that a thread copies; threads beyond repeat others."""
    task = (lane + k * 32 * W) % (8 * NT * PARTS)
    return task // PARTS, task % PARTS


@triton.jit
def _place(n, step):
    """Where a step of a vector begins in a slice: 16 bytes of h = 0; those of h = 1 at `^ 16`."""
    return n * 128 + (2 * step ^ n % 8) * 16


@triton.jit
def laid(room):
    """Where a slice is that every warp has written; what was read two slices ago is free."""
    return tl.inline_asm_elementwise(LAID, "=r,r", [room], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def begin(sums, weights, room, KIND: tl.constexpr, NT: tl.constexpr):
    """Begin to multiply 64 rows with a slice; sums and weights are in use until `end`."""
    return tl.inline_asm_elementwise(
        _begin(KIND, NT), _tied(NT, 17), weights + ((room & 0x3FFFF) >> 4 | 1 << 16,) + sums,
        dtype=_floats(4 * NT), is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def end(sums, weights, PENDING: tl.constexpr, NT: tl.constexpr):
    """The sums, once no more than PENDING later products are under way."""
    return tl.inline_asm_elementwise(
        _end(PENDING), _tied(NT, 16), weights + sums,
        dtype=_floats(4 * NT), is_pure=False, pack=1,
    )  # fmt: skip
