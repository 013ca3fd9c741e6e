"""Products of four warps at a time, for `lut_gemm` on Hopper: `wgmma`, weights in registers.

Four warps hand in 64 rows of weights, 16 each, as `mma.m16n8k16` wants them, and get the products
with all vectors of a tile: nobody reads the vectors into registers, and no weight is looked up
twice. The tensor cores read the vectors from shared memory while the next weights are looked up.

A slice of 64 inputs of a tile's vectors lies there as the tensor cores want it. A vector's 128
bytes are eight chunks of 16, of which each of four steps takes two. What meets numbers 2 q and
2 q + 1 of lane c's unit lies in word c of chunk q; where numbers are looked up four apart (2 bits),
`8 (q / 4) + q % 4` and the number four behind. Vector n's chunk q lies at `128 n + 16 (q ^ n % 8)`,
which the descriptor calls swizzled by 128 bytes: no two lanes that are served at once need the
same bank.

A kernel before the product lays slices out in memory, so that a copy engine can bring each whole;
or a program lays out all that it needs itself, if there is room. A slot of shared memory has two
barriers. The first opens when a slice has come, the second when all warps are done with it; then
the first warp asks for the slice that takes its place.
"""

from qat.kernels.dispatch import gdc_launch_dependents, gdc_wait, tl, triton

STAGES = 4
"""Slots of slices: a multiple of a span's slices, so that a slice's slot is known to a compiler."""
BEHIND = tl.constexpr(1)
"""Slices that warps may lie behind the first one before it waits for them."""
LAY_BLOCK = 128
"""Threads of a program that lays out, each 16 bytes of four units."""
MOST_DECLARED = 47 * 1024
"""Shared memory that a program may declare beside its barriers."""
BARRIER_BYTES = 1024
DESCRIBED = tl.constexpr(0x40000040)
"""The upper half of a descriptor: swizzled by 128 bytes, eight vectors are 1,024."""
NO_THREAD = tl.constexpr(1 << 20)
INTEGERS_16 = tl.constexpr((tl.int32,) * 16)


@triton.constexpr_function
def _turn(v: int, is_spread: bool) -> str:
    """Assembly: $0-$15 four chunks, from 16 bytes of each of four units; $17 units exist.

    Units lie `32 v` bytes apart from $16 on. Word c of a chunk is unit c's.
    """
    lines = [".reg .pred is; .reg .b32 " + ", ".join(f"w{k}" for k in range(16)) + ";"]
    for c in range(4):
        words = ", ".join(f"w{4 * c + k}" for k in range(4))
        lines += [f"mov.b32 w{4 * c + k}, 0;" for k in range(4)]
        lines += [f"setp.gt.s32 is, $17, {c};"]
        lines += [f"@is ld.global.v4.b32 {{{words}}}, [$16 + {32 * v * c}];"]
    for k in range(4):
        for c in range(4):
            low, high = 4 * c + k // 2, 4 * c + 2 + k // 2
            picked = f"prmt.b32 ${4 * k + c}, w{low}, w{high}, {'0x7632' if k % 2 else '0x5410'};"
            lines += [picked if is_spread else f"mov.b32 ${4 * k + c}, w{4 * c + k};"]
    return "\n".join(["{", *lines, "}"])


TURNED = tl.constexpr(",".join(["=&r"] * 16 + ["l", "r"]))
LAY_FAR = tl.constexpr("st.global.v4.b32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0;")
LAY_NEAR = tl.constexpr("st.shared.v4.b32 [$1], {$2, $3, $4, $5}; mov.b32 $0, $1;")
# tensor cores read past what orders plain accesses
LAID = tl.constexpr("fence.proxy.async.shared::cta; bar.sync 0; mov.b32 $0, $1;")


@triton.jit
def _turned(
    x, vector, unit, half, num_vectors, units, V: tl.constexpr, IS_SPREAD: tl.constexpr
):  # fmt: skip
    """Half of the chunks of a vector's slice whose first unit this is, four words each."""
    there = tl.where(vector < num_vectors, (units - unit + V - 1) // V, 0)
    place = tl.where(there > 0, (vector.to(tl.int64) * units + unit) * 8 + half * 4, 0)
    return tl.inline_asm_elementwise(
        _turn(V, IS_SPREAD), TURNED, [(x + place).to(tl.int64), there],
        dtype=INTEGERS_16, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _chunk(begin, n, half, k: tl.constexpr):
    """Where chunk `4 half + k` of vector n lies in a slice."""
    return begin + (n * 128 + (4 * half + k ^ n % 8) * 16)


@triton.jit(do_not_specialize=["num_vectors", "units", "spans", "tasks"])
def lay_kernel(
    laid, x, num_vectors, units, spans, tasks, N: tl.constexpr, V: tl.constexpr,
    IS_SPREAD: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Lay all slices of tiles of N vectors out in memory, tile by tile."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    task = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    task = tl.where(task < tasks, task, 0)  # those beyond repeat the first
    half, v, n = task % 2, task // 2 % V, task // (2 * V) % N
    span, tile = task // (2 * V * N) % spans, task // (2 * V * N) // spans
    words = _turned(
        x, tile * N + n, span * (4 * V) + v, half, num_vectors, units, V, IS_SPREAD
    )  # fmt: skip
    begin = laid + ((tile * spans + span) * V + v).to(tl.int64) * (N * 128)
    for k in tl.static_range(4):
        at = _chunk(begin, n, half, k).to(tl.int64)
        tl.inline_asm_elementwise(
            LAY_FAR, "=r,l,r,r,r,r",
            [at, words[4 * k], words[4 * k + 1], words[4 * k + 2], words[4 * k + 3]],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def lay_own(
    x, shared, first, count, column, num_vectors, lane, units, V: tl.constexpr,
    IS_SPREAD: tl.constexpr, NT: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Lay so many slices out in shared memory, from a span on."""
    for k in range(0, tl.cdiv(count * (16 * NT), 32 * W)):
        task = k * (32 * W) + lane
        task = tl.where(task < count * (16 * NT), task, 0)
        half, n, index = task % 2, task // 2 % (8 * NT), task // (16 * NT)
        unit = (first + index // V) * (4 * V) + index % V
        words = _turned(x, column + n, unit, half, num_vectors, units, V, IS_SPREAD)
        for c in tl.static_range(4):
            tl.inline_asm_elementwise(
                LAY_NEAR, "=r,r,r,r,r,r",
                [_chunk(shared + index * (1024 * NT), n, half, c), words[4 * c],
                 words[4 * c + 1], words[4 * c + 2], words[4 * c + 3]],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
    tl.inline_asm_elementwise(LAID, "=r,r", [shared], dtype=tl.int32, is_pure=False, pack=1)


# Where things lie. What a program declares is limited; more, Triton must ask for.


def room_for(num_bytes: int) -> tuple[str, int]:
    """Assembly that tells where slices are, and what `asked_for` takes; 0: the slices are declared.

    Behind the barriers, which are declared, comes what Triton asked for.
    """
    if num_bytes <= MOST_DECLARED:
        declared = f".shared .align 1024 .b8 slices[{num_bytes}]"
        return f"{{{declared}; bar.warp.sync 0xffffffff; mov.u32 $0, slices;}}", 0
    is_askew = "and.b32 rest, $0, 1023; setp.ne.u32 is, rest, 0; @is trap;"
    asked = f"{{.reg .pred is; .reg .b32 rest; mov.u32 $0, global_smem; {is_askew}}}"
    return asked, triton.next_power_of_2(num_bytes) // 4


@triton.jit
def asked_for(out, WORDS: tl.constexpr):
    """A choice that no program makes: Triton asks for shared memory for all words to choose from.

    Triton's product would do too, but there ptxas lets no product of ours run beside look-ups.
    """
    words = tl.arange(0, WORDS) * tl.program_id(0)
    found = tl.gather(words, tl.arange(0, 128) * tl.program_id(1), 0)
    tl.store(out + tl.arange(0, 128), found.to(out.dtype.element_ty))


# The barriers: those of slot s lie at `16 s` and `16 s + 8`.

BARRIERS = tl.constexpr(
    f"{{.shared .align 1024 .b8 barriers[{BARRIER_BYTES}]; mov.u32 $0, barriers;}}"
)
THREAD = tl.constexpr("mov.u32 $0, %tid.x;")


@triton.constexpr_function
def _set_up(stages: int, warps: int) -> str:
    """Assembly: what opens the barriers from $1 on: one warp and a slice's bytes; all warps."""
    lines = [".reg .pred is; .reg .b32 t;", "mov.u32 t, %tid.x; setp.eq.u32 is, t, 0;"]
    for s in range(stages):
        lines += [f"@is mbarrier.init.shared::cta.b64 [$1 + {16 * s}], 1;"]
        lines += [f"@is mbarrier.init.shared::cta.b64 [$1 + {16 * s + 8}], {warps};"]
    lines += ["fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta; bar.sync 0;"]
    return "\n".join(["{", *lines, "mov.b32 $0, $1;", "}"])


@triton.jit
def barriers(STAGES: tl.constexpr, W: tl.constexpr):
    """Where they are, set up; and a thread's number."""
    found = tl.inline_asm_elementwise(BARRIERS, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    tl.inline_asm_elementwise(
        _set_up(STAGES, W), "=r,r", [found], dtype=tl.int32, is_pure=False, pack=1
    )
    # a number, not one a lane, so that what follows from it is asked once a warp
    thread = tl.inline_asm_elementwise(THREAD, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    return found, thread


@triton.constexpr_function
def _fetch(num_bytes: int) -> str:
    """Assembly of the first warp: once barrier $3 + 8 was opened $4 times (modulo two), copy.

    From $2 to $1; barrier $3 waits for the bytes. $5 is the thread, or more than any where there is
    nothing to copy.
    """
    return f"""{{
.reg .pred is, q; .reg .b64 state;
setp.ge.u32 q, $5, 32;
@q bra.uni DONE;
WAIT:
mbarrier.try_wait.parity.shared::cta.b64 q, [$3 + 8], $4;
@!q bra.uni WAIT;
elect.sync _|is, 0xffffffff;
@is mbarrier.arrive.expect_tx.shared::cta.b64 state, [$3], {num_bytes};
@is cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$1], [$2], {num_bytes}, [$3];
DONE:
mov.b32 $0, $1;
}}"""


ARRIVED = tl.constexpr("""{
.reg .pred q;
WAIT:
mbarrier.try_wait.parity.shared::cta.b64 q, [$1], $2;
@!q bra.uni WAIT;
mov.b32 $0, $1;
}""")
RELEASE = tl.constexpr("""{
.reg .pred is; .reg .b64 state;
setp.eq.s32 is, $2, 0;
@is mbarrier.arrive.shared::cta.b64 state, [$1 + 8];
mov.b32 $0, $1;
}""")


@triton.jit
def fetch(
    source, shared, bars, slot, index, parity, thread, is_due, SLICE: tl.constexpr
):  # fmt: skip
    """Ask for a slice, once every warp is done with what lay in its slot."""
    tl.inline_asm_elementwise(
        _fetch(SLICE), "=r,r,l,r,r,r",
        [shared + slot * SLICE, source + index * SLICE, bars + 16 * slot, parity,
         tl.where(is_due, thread, NO_THREAD)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def arrived(bars, slot, parity):
    """Wait until a slot's slice is there."""
    tl.inline_asm_elementwise(
        ARRIVED, "=r,r,r", [bars + 16 * slot, parity], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def release(bars, slot, thread, is_done):
    """A warp is done with a slot's slice."""
    tl.inline_asm_elementwise(
        RELEASE, "=r,r,r", [bars + 16 * slot, tl.where(is_done, thread % 32, 1)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


# The products.


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
