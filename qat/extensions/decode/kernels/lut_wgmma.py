"""Products of four warps at a time with `wgmma`, for `lut_gemm` on Hopper; weights in registers.

Four warps supply 64 rows of weights, 16 each, in the layout of `mma.m16n8k16`, and get the products
with all vectors of a tile. The vectors never pass through registers, and no weight is looked up
twice. The tensor cores read the vectors from shared memory while the next weights are looked up.

    slice     64 inputs of a tile's vectors, as the tensor cores read them: 128 bytes per vector
    chunk     16 bytes of a vector, two per step of the product; chunk q of vector n is at
              `128 n + 16 (q ^ n % 8)`, the 128-byte swizzle of the descriptor: no two lanes that
              are served together use the same bank
    word      word c of chunk q holds the inputs for numbers 2 q and 2 q + 1 of lane c's unit, or,
              where pairs are four apart (2 bits), for `8 (q / 4) + q % 4` and the one four later

A kernel that runs before the product lays slices out in global memory, so that the copy engine
(TMA) copies each of them whole; or a program lays out all of its own slices, if they fit in shared
memory.
"""

from qat.extensions.decode.kernels.launch import gdc_launch_dependents, gdc_wait
from qat.extensions.decode.kernels.lut_mma import asm_values, run_asm
from qat.kernels.dispatch import tl, triton

STAGES = 4
"""Slots for slices: a multiple of the slices per span, so that the compiler knows a slice's
slot."""
BEHIND = tl.constexpr(1)
"""Slices that other warps may lag behind the first warp before it waits for them."""
LAY_BLOCK = 128
"""Threads per program of the layout kernel; each thread lays out 16 bytes of four units."""
MOST_DECLARED = 47 * 1024
"""Shared memory in bytes that a program may declare in addition to its barriers."""
BARRIER_BYTES = 1024
DESCRIBED = tl.constexpr(0x40000040)
"""The upper half of a descriptor: 128-byte swizzle, stride of 1,024 bytes per eight vectors."""
NO_THREAD = tl.constexpr(1 << 20)
INTEGERS_16 = tl.constexpr((tl.int32,) * 16)


@triton.constexpr_function
def _turn(v: int, is_spread: bool) -> str:
    """Return assembly: $0-$15 four chunks, from 16 bytes of each of four units; $17 units exist.

    The units are `32 v` bytes apart from address $16 on. Word c of a chunk comes from unit c.
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
# the tensor cores' async proxy is not ordered with plain stores: a fence is needed
LAID = tl.constexpr("fence.proxy.async.shared::cta; bar.sync 0; mov.b32 $0, $1;")


@triton.jit
def _turned(
    x, vector, unit, half, num_vectors, units, V: tl.constexpr, IS_SPREAD: tl.constexpr
):  # fmt: skip
    """Load half of the chunks of a vector's slice that starts at `unit`, four words each."""
    there = tl.where(vector < num_vectors, (units - unit + V - 1) // V, 0)
    place = tl.where(there > 0, (vector.to(tl.int64) * units + unit) * 8 + half * 4, 0)
    return asm_values(
        _turn(V, IS_SPREAD), TURNED, ((x + place).to(tl.int64), there), INTEGERS_16, False
    )  # fmt: skip


@triton.jit
def _chunk(begin, n, half, k: tl.constexpr):
    """Return the address of chunk `4 half + k` of vector n in a slice."""
    return begin + (n * 128 + (4 * half + k ^ n % 8) * 16)


@triton.jit(do_not_specialize=["num_vectors", "units", "spans", "tasks"])
def lay_kernel(
    laid, x, num_vectors, units, spans, tasks, N: tl.constexpr, V: tl.constexpr,
    IS_SPREAD: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Lay out all slices of tiles of N vectors in global memory, tile by tile."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    task = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    task = tl.where(task < tasks, task, 0)  # surplus threads repeat the first task
    half, v, n = task % 2, task // 2 % V, task // (2 * V) % N
    span, tile = task // (2 * V * N) % spans, task // (2 * V * N) // spans
    words = _turned(
        x, tile * N + n, span * (4 * V) + v, half, num_vectors, units, V, IS_SPREAD
    )  # fmt: skip
    begin = laid + ((tile * spans + span) * V + v).to(tl.int64) * (N * 128)
    for k in tl.static_range(4):
        at = _chunk(begin, n, half, k).to(tl.int64)
        run_asm(
            LAY_FAR, "=r,l,r,r,r,r",
            (at, words[4 * k], words[4 * k + 1], words[4 * k + 2], words[4 * k + 3])
        )  # fmt: skip


@triton.jit
def lay_own(
    x, shared, first, count, column, num_vectors, lane, units, V: tl.constexpr,
    IS_SPREAD: tl.constexpr, NT: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Lay out `count` slices in shared memory, from span `first` on."""
    for k in range(0, tl.cdiv(count * (16 * NT), 32 * W)):
        task = k * (32 * W) + lane
        task = tl.where(task < count * (16 * NT), task, 0)
        half, n, index = task % 2, task // 2 % (8 * NT), task // (16 * NT)
        unit = (first + index // V) * (4 * V) + index % V
        words = _turned(x, column + n, unit, half, num_vectors, units, V, IS_SPREAD)
        for c in tl.static_range(4):
            run_asm(
                LAY_NEAR, "=r,r,r,r,r,r", (_chunk(shared + index * (1024 * NT), n, half, c),
                words[4 * c], words[4 * c + 1], words[4 * c + 2], words[4 * c + 3])
            )  # fmt: skip
    run_asm(LAID, "=r,r", (shared,))


# Shared memory. A program may declare only so much; beyond that, Triton must request it.


def declared(num_bytes: int) -> str:
    """Return assembly that puts the address of a program's shared memory into $0."""
    room = f".shared .align 1024 .b8 slices[{num_bytes}]"
    return f"{{{room}; bar.warp.sync 0xffffffff; mov.u32 $0, slices;}}"


def room_for(num_bytes: int) -> tuple[str, int]:
    """Return assembly for the address of slices, and WORDS of `asked_for`; 0: slices are declared.

    Memory that Triton requests comes after the barriers, which are always declared.
    """
    if num_bytes <= MOST_DECLARED:
        return declared(num_bytes), 0
    is_askew = "and.b32 rest, $0, 1023; setp.ne.u32 is, rest, 0; @is trap;"
    asked = f"{{.reg .pred is; .reg .b32 rest; mov.u32 $0, global_smem; {is_askew}}}"
    return asked, triton.next_power_of_2(num_bytes) // 4


@triton.jit
def asked_for(out, WORDS: tl.constexpr):
    """Make Triton request shared memory for WORDS words, by a gather that no program executes.

    A `tl.dot` would request it too, but with one in the kernel ptxas does not overlap the `wgmma`
    products with look-ups.
    """
    words = tl.arange(0, WORDS) * tl.program_id(0)
    found = tl.gather(words, tl.arange(0, 128) * tl.program_id(1), 0)
    tl.store(out + tl.arange(0, 128), found.to(out.dtype.element_ty))


# The barriers of slot s are at `16 s` and `16 s + 8`. The first completes when a slice has arrived,
# the second when all warps have finished with it; then the first warp requests the slice that
# replaces it.

BARRIERS = tl.constexpr(
    f"{{.shared .align 1024 .b8 barriers[{BARRIER_BYTES}]; mov.u32 $0, barriers;}}"
)
THREAD = tl.constexpr("mov.u32 $0, %tid.x;")


@triton.constexpr_function
def _set_up(stages: int, warps: int) -> str:
    """Return assembly that initializes the barriers at $1: one warp plus bytes, and all warps."""
    lines = [".reg .pred is; .reg .b32 t;", "mov.u32 t, %tid.x; setp.eq.u32 is, t, 0;"]
    for s in range(stages):
        lines += [f"@is mbarrier.init.shared::cta.b64 [$1 + {16 * s}], 1;"]
        lines += [f"@is mbarrier.init.shared::cta.b64 [$1 + {16 * s + 8}], {warps};"]
    lines += ["fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta; bar.sync 0;"]
    return "\n".join(["{", *lines, "mov.b32 $0, $1;", "}"])


@triton.jit
def barriers(STAGES: tl.constexpr, W: tl.constexpr):
    """Initialize the barriers; return their address and the thread's index."""
    found = run_asm(BARRIERS, "=r", ())
    run_asm(_set_up(STAGES, W), "=r,r", (found,))
    # a scalar, so that what depends on it is computed once per warp
    thread = run_asm(THREAD, "=r", ())
    return found, thread


@triton.constexpr_function
def _fetch(num_bytes: int) -> str:
    """Return assembly for the first warp: wait for phase $4 of barrier $3 + 8, then copy $2 to $1.

    Barrier $3 waits for the bytes. $5 is the thread, or `NO_THREAD` if there is nothing to copy.
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
    """Request a slice once every warp has finished with the previous one in its slot."""
    run_asm(
        _fetch(SLICE), "=r,r,l,r,r,r", (shared + slot * SLICE, source + index * SLICE,
        bars + 16 * slot, parity, tl.where(is_due, thread, NO_THREAD))
    )  # fmt: skip


@triton.jit
def arrived(bars, slot, parity):
    """Wait until a slot's slice has arrived."""
    run_asm(ARRIVED, "=r,r,r", (bars + 16 * slot, parity))


@triton.jit
def release(bars, slot, thread, is_done):
    """Signal that a warp has finished with a slot's slice."""
    run_asm(RELEASE, "=r,r,r", (bars + 16 * slot, tl.where(is_done, thread % 32, 1)))


# The products.


@triton.constexpr_function
def _begin(kind: str, nt: int) -> str:
    """Return assembly that starts to add four steps of products to the sums from $0 on.

    Further operands: 16 registers of weights, for two rows per lane, and the lower half of a
    descriptor.
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
    """Return assembly that waits until at most `pending` products are in flight."""
    return f"wgmma.wait_group.sync.aligned {pending};"


@triton.constexpr_function
def _tied(nt: int, others: int) -> str:
    """Return constraints: sums that stay in their registers, and `others` that are only read."""
    count = 4 * nt
    return ",".join(["=f"] * count + ["r"] * others + [str(k) for k in range(count)])


@triton.constexpr_function
def _floats(count: int) -> tuple[object, ...]:
    return (tl.float32,) * count


@triton.jit
def begin(sums, weights, room, KIND: tl.constexpr, NT: tl.constexpr):
    """Start to multiply 64 rows by a slice; sums and weights stay in use until `end`."""
    return asm_values(
        _begin(KIND, NT), _tied(NT, 17), weights + ((room & 0x3FFFF) >> 4 | 1 << 16,) + sums,
        _floats(4 * NT), False
    )  # fmt: skip


@triton.jit
def end(sums, weights, PENDING: tl.constexpr, NT: tl.constexpr):
    """Return the sums once at most PENDING later products are in flight."""
    return asm_values(_end(PENDING), _tied(NT, 16), weights + sums, _floats(4 * NT), False)
