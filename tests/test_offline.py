"""What the compiler makes of every shipped kernel, for three architectures, with no GPU: resources, emitted instructions, refusals.

Which variants. The full product (3 dtypes x 3 tiles x 4 row layouts x deterministic or not x 3 architectures) is some 600 compiles of
about 2 s. Registers and spills are decided in the tile loop, whose live values depend on the tile (accumulators, partial scores), on the
columns a thread owns (latent_dim) and, for `paged`, on the work list that stays live around it. The dtype only changes how 16-byte chunks
are widened before the loop and narrowed after it. So every tile is compiled in bfloat16 at 512/64; at 16 x 16 alone, the tile with the
most registers, also the deterministic kernels, the other dtypes, and the layouts without rope and with one column a thread (128/64 is the
latter with another constant). NUMBA_VERIFY_ALL_VARIANTS=1 compiles the whole product instead.

`wgmma` is for sm_90a alone; there its tile also deterministic, in float16, without rope and with 128 rope values.

`mma` takes 3 s a variant. Every tile is compiled for the architectures with a GPU that can run it (shared memory; 64 rows need setmaxnreg);
the tile of 64 rows, which leaves no register free, also deterministic, in float16 and without rope (narrower rows need fewer).
"""

import itertools
import os
import re

import pytest
from support import recorded
from support.grids import check_lets_combine_start, check_waits

from asv_bench.benchmarks import common, resources
from numba_verify.backend import WGMMA_ARCH, kernel_sources, mma_sources, wgmma_sources
from numba_verify.errors import UnsupportedError
from numba_verify.gpu import driver, sass
from numba_verify.gpu.compile import OFFLINE_ARCHITECTURES, compile_kernel
from numba_verify.kernels import work
from numba_verify.kernels.config import SMALLEST_SHARED_BYTES, TILE_CONFIGS, Shape, TileConfig, choose_tile, unsupported_shape
from numba_verify.kernels.mma_config import MMA_TILES, MmaConfig, MmaTile, Registers, choose_mma_tile, layout
from numba_verify.kernels.wgmma_config import WGMMA_TILES

DTYPES = ("bfloat16", "float16", "float32")
LAYOUTS = ((512, 64), (512, 0), (256, 64), (128, 64))
TUNED, LARGEST, REGISTERS = Shape(512, 64, "bfloat16"), TileConfig(16, 16), Registers(144, 168, 32)
#: Registers of one SM on every architecture here, and the unit in which a thread gets them.
SM_REGISTERS, REGISTER_UNIT = 65_536, 8
#: Registers are ptxas's affair and differ by architecture; which instructions a kernel is made of does not, and disassembling costs 0.5 s.
SASS_ARCHITECTURE = "sm_120"


def shipped_variants():
    """Name -> KernelSource of every variant compiled here, see the module docstring."""
    if os.environ.get("NUMBA_VERIFY_ALL_VARIANTS"):
        grid = [
            (Shape(*layout, dtype), tile, fixed)
            for layout, dtype, tile, fixed in itertools.product(LAYOUTS, DTYPES, TILE_CONFIGS, (False, True))
        ]
    else:
        grid = [(TUNED, tile, False) for tile in TILE_CONFIGS] + [(TUNED, LARGEST, True)]
        grid += [(Shape(512, 64, dtype), LARGEST, False) for dtype in DTYPES[1:]]
        grid += [(Shape(*layout, "bfloat16"), LARGEST, False) for layout in LAYOUTS[1:3]]
    sources = [source for shape, tile, fixed in grid for source in kernel_sources(shape, tile, 16, fixed).values()]
    return {source.variant: source for source in sources}


def mma_variants():
    """(KernelSource, architecture) of the variants of mma, see the module docstring."""
    runs = [(tile, arch) for tile in MMA_TILES for arch in OFFLINE_ARCHITECTURES
            if tile.shared_bytes(TUNED) <= resources.SHARED_BYTES[arch] and (arch == "sm_90a" or tile.registers is None)]
    grid = [(TUNED, tile, False, arch) for tile, arch in runs]
    if os.environ.get("NUMBA_VERIFY_ALL_VARIANTS"):
        grid = [(Shape(*layout, dtype), tile, fixed, arch)
                for (tile, arch), layout, dtype, fixed in itertools.product(runs, LAYOUTS, DTYPES[:2], (False, True))]
    else:
        full = MMA_TILES[0]
        grid += [(TUNED, full, True, "sm_90a"), (Shape(512, 64, "float16"), full, False, "sm_90a")]
        grid += [(Shape(*LAYOUTS[1], "bfloat16"), full, False, "sm_90a")]
    return [(mma_sources(shape, tile, fixed, arch != "sm_80")["mma"], arch) for shape, tile, fixed, arch in grid]


def wgmma_variants():
    """(KernelSource, architecture) of the variants of wgmma, see the module docstring."""
    grid = [(TUNED, tile, False) for tile in WGMMA_TILES]
    full = WGMMA_TILES[0]
    grid += [(TUNED, full, True), (Shape(512, 64, "float16"), full, False), (Shape(512, 0, "bfloat16"), full, False),
             (Shape(512, 128, "bfloat16"), full, False)]
    return [(wgmma_sources(*one)["wgmma"], WGMMA_ARCH) for one in grid]


VARIANTS = shipped_variants()
TENSOR_VARIANTS = mma_variants() + wgmma_variants()
CASES = [pytest.param(variant, arch, id=f"{variant}-{arch}") for variant in VARIANTS for arch in OFFLINE_ARCHITECTURES]


@pytest.mark.parametrize("variant, arch", CASES)
def test_resources(variant, arch):
    """Registers, not arrays: no local memory, no spills, and what launches on sm_120 launches everywhere."""
    source = VARIANTS[variant]
    got = compile_kernel(source, arch).resources
    assert (got.stack_bytes, got.spill_store_bytes, got.spill_load_bytes) == (0, 0, 0), f"{variant} {arch}: {got}"
    assert got.shared_bytes <= SMALLEST_SHARED_BYTES, f"{variant}: {got.shared_bytes:,} B of shared memory"
    allocated = -(-got.registers // REGISTER_UNIT) * REGISTER_UNIT
    budget = SM_REGISTERS // (source.threads * source.min_blocks)
    assert 0 < allocated <= budget, f"{variant} {arch}: {got.registers} registers, {budget} leave room for {source.min_blocks} blocks an SM"
    if arch == SASS_ARCHITECTURE:
        check_instructions(variant, got_opcodes(variant, arch))


@pytest.mark.parametrize("source, arch", TENSOR_VARIANTS, ids=lambda value: getattr(value, "variant", value))
def test_resources_on_tensor_cores(source, arch):
    """The same of mma and wgmma, one block of which fills an SM: its shared memory fits the architecture, and 512 threads share its registers."""
    got = compile_kernel(source, arch).resources
    assert (got.stack_bytes, got.spill_store_bytes, got.spill_load_bytes) == (0, 0, 0), f"{source.variant} {arch}: {got}"
    assert got.shared_bytes <= resources.SHARED_BYTES[arch]
    assert 0 < got.registers <= SM_REGISTERS // source.threads
    instructions = instructions_of(source, arch)
    opcodes = [sass.opcode(one) for one in instructions]
    check_instructions(source.variant, opcodes)
    if instructions and source.variant.startswith("mma"):
        check_fragments(source.variant, instructions)
        check_rare_steps(source.variant, opcodes)
    handed_over = [name for name in opcodes if "SETMAXREG" in name]
    assert len(handed_over) == (3 if opcodes and source.config.tile.registers else 0), f"{source.variant} {arch}: {handed_over}"


def got_opcodes(variant, arch):
    return [sass.opcode(one) for one in instructions_of(VARIANTS[variant], arch)]


def instructions_of(source, arch):
    """Instructions of the variant's one kernel; an empty list where nvdisasm is missing, which test_nvdisasm reports."""
    if sass.find_nvdisasm() is None:
        return []
    variant, cubin = source.variant, compile_kernel(source, arch)
    listing = sass.instructions(cubin.code)
    assert list(listing) == [cubin.symbol], f"{variant}: expected one kernel in the cubin and no function beside it, got {list(listing)}"
    return listing[cubin.symbol]


def check_instructions(variant, opcodes):
    double = sorted({name for name in opcodes if re.match(r"D(ADD|MUL|FMA|SETP|MNMX|MMA)\b|[FI]2F\.(\w+\.)*F64|F2F\.F64", name)})
    assert not double, f"{variant}: 64-bit floats, a literal or a cast widened one: {double}"
    local = sorted({name for name in opcodes if re.match(r"(LDL|STL)\b", name)})
    assert not local, f"{variant}: local memory: {local}"
    if opcodes and variant.startswith(("flash", "paged")):
        # One site each for queries and keys (an unrolled loop has more), through the read-only path.
        wide = [name for name in opcodes if name.startswith("LDG.E.128")]
        assert len(wide) >= 2, f"{variant}: KV and q must be fetched 16 bytes at a time, got {sorted(set(opcodes) & set(wide))}"
    if opcodes and variant.startswith("wgmma"):
        products = sum(name.startswith("HGMMA") for name in opcodes)
        assert products >= 24, f"{variant}: {products} products"
        assert any(re.match(r"LDGSTS\.E\.\S*128", name) for name in opcodes), f"{variant}: no asynchronous copies of 16 bytes"
        # Descriptors live in uniform registers: two moves there for each would be twice as many as products.
        moved = sum(name == "R2UR" for name in opcodes)
        assert moved < products, f"{variant}: {moved} moves to uniform registers for {products} products"
    if opcodes and variant.startswith("mma"):
        for pattern, what in ((r"HMMA\.16816\.F32", "products on tensor cores"), (r"LDSM\.16\.M88\.4", "fragments of keys and weights"),
                              (r"LDSM\.16\.MT88\.4", "transposed fragments of values"), (r"LDGSTS\.E\.\S*128", "asynchronous copies of 16 bytes")):
            assert any(re.match(pattern, name) for name in opcodes), f"{variant}: {what}: no {pattern}"


def check_fragments(variant, instructions):
    """Fragments are fetched ahead: where ptxas had no registers for that, it filled the same ones again and again, each time just before the mma
    that reads them (docs/facts.md, 484 us instead of 404). Neither the count of registers nor spills show it. Of values (MT88) the value warps
    have as many as fit; those that hold back should be slow at taking the tensor cores from the score warps."""
    for kind, fewest in (("M88", 12), ("MT88", 1 if "_m64" in variant else 4)):
        targets = {match.group(1) for match in (re.match(rf"LDSM\.16\.{kind}\.4 (R\d+),", one) for one in instructions) if match}
        assert len(targets) >= fewest, f"{variant}: {len(targets)} sets of registers for fragments ({kind}), expected {fewest}"


def check_rare_steps(variant, opcodes):
    """What only masked steps need is worked out in them. LLVM likes to do that in every step, between the scores and their softmax, where all wait
    for it: 59 instructions, 1.5 % of the time (docs/facts.md). Additions of accumulators have to be there."""
    last = max(i for i, name in enumerate(opcodes) if name.startswith("HMMA"))
    branch = next(i for i in range(last, len(opcodes)) if opcodes[i].startswith("BRA"))
    between = [name for name in opcodes[last + 1:branch] if name != "FADD"]
    assert len(between) <= 30, f"{variant}: {len(between)} instructions between the last product and the branch for masked steps: {between}"


@pytest.mark.parametrize("kernel, arch", [("mma", "sm_80"), ("mma", "sm_90a"), ("mma", "sm_120"), ("wgmma", "sm_90a")])
def test_combine_starts_early_and_waits(kernel, arch):
    sources = wgmma_sources(TUNED, WGMMA_TILES[0], False) if kernel == "wgmma" else mma_sources(TUNED, MMA_TILES[-1], False, arch != "sm_80")
    attends, merges = ([sass.opcode(one) for one in instructions_of(sources[name], arch)] for name in (kernel, "combine"))
    if not merges:
        pytest.skip("no nvdisasm")
    assert sources["combine"].overlaps == ("PREEXIT" in attends) == ("ACQBULK" in merges) == (arch != "sm_80") and not sources[kernel].overlaps
    if arch != "sm_80":
        check_lets_combine_start(attends)
        check_waits(merges, 3 + work.MERGE_FIELDS)


def test_nvdisasm():
    """Says so when no emitted instruction was looked at; and that the check would see what it looks for."""
    if sass.find_nvdisasm() is None:
        pytest.skip("nvdisasm was not found (pip install nvidia-cuda-nvdisasm): emitted instructions were not checked")
    for wrong in ("DADD", "DFMA.RM", "F2F.F64.F32", "LDL.64", "STL"):
        with pytest.raises(AssertionError, match=re.escape(wrong)):
            check_instructions("naive", ["MOV", wrong])
    with pytest.raises(AssertionError, match="16 bytes"):
        check_instructions("flash_x", ["LDG.E.64", "LDG.E.128", "LDG.E"])
    with pytest.raises(AssertionError, match="transposed"):
        check_instructions("mma_x", ["HMMA.16816.F32.BF16", "LDSM.16.M88.4"])
    with pytest.raises(AssertionError, match="2 sets of registers"):
        check_fragments("mma_x", ["LDSM.16.M88.4 R24, [R86]", "LDSM.16.M88.4 R28, [R86]", "HMMA.16816.F32.BF16 R4, R24, R28, R4"] * 20)


def test_the_naive_kernel_shares_nothing():
    source = VARIANTS["naive_512_64_bfloat16"]
    assert source.shared_bytes == 0
    assert not any(name.startswith(("LDS", "STS", "BAR")) for name in got_opcodes(source.variant, SASS_ARCHITECTURE))


@pytest.mark.slow
def test_registers_beside_the_twin(capsys, tmp_path):
    """Both implementations side by side, and nothing worse than in the last commit with a record (tools/regressions.py). With a GPU its
    architecture, for which the library is built anyway."""
    if not common.find_nvcc():
        pytest.skip("no nvcc: the CUDA C twin cannot be compiled here")
    architectures = (driver.device_info(0).arch,) if driver.device_count() else OFFLINE_ARCHITECTURES
    rows = resources.numba_resources(architectures) + resources.cuda_ref_resources(architectures)
    ours, twins = ({(row.kernel, row.arch) for row in rows if row.impl == impl} for impl in common.IMPLEMENTATIONS)
    assert ours == twins, "a kernel of one implementation has no counterpart in the other"
    assert {kernel for kernel, _ in ours} == set(resources.COMPILED)
    with capsys.disabled():
        print("\n" + resources.format_resources(rows))
        commit, worse = recorded.worse_than_recorded(rows, tmp_path)
        print(f"compared with {commit}" if commit else "not compared: no record of these compilers")
    assert not worse, ("\n".join(f"{change.label}: {change.before:,.4g} -> {change.after:,.4g}" for change in worse)
                       + f"\nworse than recorded for {commit}. If that is the price of something better: commit it, say so in the message, run "
                         "`make bench BENCH_ARGS='--bench offline'` and commit the record.")


# --- configurations ---------------------------------------------------------------------------------------------------------


def test_the_three_tilings_of_the_design():
    assert [(tile.head_tile, tile.kv_tile) for tile in TILE_CONFIGS] == [(8, 16), (16, 16), (8, 32)]
    assert [tile.shared_bytes(TUNED) for tile in TILE_CONFIGS] == [55_872, 74_880, 93_248]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout[0]}_{layout[1]}")
@pytest.mark.parametrize("tile", TILE_CONFIGS, ids=str)
def test_every_tile_fits_the_smallest_device(tile, layout, dtype):
    shape = Shape(*layout, dtype)
    floats = (tile.head_tile + tile.kv_tile) * sum(layout) + tile.head_tile * tile.kv_tile + 2 * tile.head_tile
    assert tile.shared_bytes(shape) == 4 * floats
    tile.check_device(shape, SMALLEST_SHARED_BYTES, "sm_120")


@pytest.mark.parametrize(
    "head_tile, kv_tile, message",
    [
        (8, 8, "kv_tile: expected 16 or 32 (a softmax row is one warp wide, whole keys a warp), got 8"),
        (8, 64, "kv_tile: expected 16 or 32 (a softmax row is one warp wide, whole keys a warp), got 64"),
        (12, 16, "head_tile: expected a multiple of the 8 warps of a block, got 12"),
        (0, 16, "head_tile: expected a multiple of the 8 warps of a block, got 0"),
        (-8, 16, "head_tile: expected a multiple of the 8 warps of a block, got -8"),
        (16, 32, "head_tile 16 x kv_tile 32: a warp's scores must be 16 or 32 to reduce into one score a lane, got 64"),
        (24, 16, "head_tile 24 x kv_tile 16: a warp's scores must be 16 or 32 to reduce into one score a lane, got 48"),
    ],
)
def test_a_tile_that_does_not_add_up_refuses_itself(head_tile, kv_tile, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        TileConfig(head_tile, kv_tile)


def test_a_device_too_small_is_refused_with_the_numbers_and_what_would_run():
    with pytest.raises(UnsupportedError) as caught:
        TileConfig(8, 32).check_device(TUNED, 65_536, "a small GPU")
    assert str(caught.value) == (
        "head_tile=8, kv_tile=32 needs 93,248 B of shared memory, a small GPU has 65,536 B; would run: head_tile=8, kv_tile=16"
    )
    with pytest.raises(
        UnsupportedError, match=re.escape("needs 55,872 B of shared memory, a tiny GPU has 49,152 B; kernel='naive' needs none")
    ):
        TileConfig(8, 16).check_device(TUNED, 49_152, "a tiny GPU")
    TileConfig(8, 16).check_device(TUNED, 55_872, "one that just fits")


@pytest.mark.parametrize(
    "latent, rope, message",
    [
        (100, 64, "latent_dim=100: the kernels take multiples of 32 from 32 to 512"),
        (544, 64, "latent_dim=544: the kernels take multiples of 32 from 32 to 512"),
        (0, 64, "latent_dim=0: the kernels take multiples of 32 from 32 to 512"),
        (512, 16, "rope_dim=16: the kernels take multiples of 32 from 0 to 128"),
        (512, 160, "rope_dim=160: the kernels take multiples of 32 from 0 to 128"),
        (512, -32, "rope_dim=-32: the kernels take multiples of 32 from 0 to 128"),
    ],
)
def test_a_row_layout_no_kernel_takes_is_refused(latent, rope, message):
    assert message in unsupported_shape(latent, rope)
    with pytest.raises(UnsupportedError, match=re.escape(message)):
        Shape(latent, rope, "bfloat16")


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout[0]}_{layout[1]}")
def test_the_promised_layouts_are_taken(layout):
    assert unsupported_shape(*layout) == ""


@pytest.mark.parametrize("heads, tile", [(1, (8, 16)), (8, (8, 16)), (9, (16, 16)), (16, (16, 16)), (128, (16, 16))])
def test_the_number_of_heads_chooses_the_tile(heads, tile):
    """More than 8 heads share a fetch by 16; up to 8, half of a tile of 16 would be padding."""
    assert choose_tile(heads) == TileConfig(*tile)


def test_the_tiles_of_mma():
    """Their shared memory at 512/64, counted by hand, and the device that it is meant for."""
    row = 2 * 576
    for tile, limit in zip(MMA_TILES, ("sm_90a", "sm_90a", "sm_80", "sm_120", "sm_90a", "sm_80", "sm_120"), strict=True):
        weights = 2 * tile.groups * tile.rows * tile.keys
        floats, marks, barriers = 4 * tile.rows * (1 + 4 * tile.groups), 2 * 16 + 9 * 32, 8 * (tile.full_barriers + tile.blocks)
        barriers += 8 * (tile.groups + tile.scored_steps * tile.row_warps) if tile.holds_back else 0
        counted = (tile.rows + 16 * tile.blocks) * row + weights + floats + marks + barriers
        assert 0 <= tile.shared_bytes(TUNED) - counted <= 64, "padding"
        assert tile.shared_bytes(TUNED) <= resources.SHARED_BYTES[limit]
    assert len(set(map(str, MMA_TILES))) == len(MMA_TILES)


@pytest.mark.parametrize("layout_of_rows", LAYOUTS, ids=lambda layout: f"{layout[0]}_{layout[1]}")
@pytest.mark.parametrize("tile", MMA_TILES, ids=str)
def test_arrays_of_mma_do_not_overlap(tile, layout_of_rows):
    shape = Shape(*layout_of_rows, "bfloat16")
    at = layout(shape, tile)
    used = at if tile.holds_back else (*at[:-3], at.end)  # without the barriers that only such a tile has
    assert list(used) == sorted(set(used)) and all(offset % 16 == 0 for offset in at)
    assert at.q % 128 == at.ring % 128 == 0, "the swizzle counts from there"
    assert at.weights - at.ring == 2 * shape.row_dim * 16 * tile.blocks and at.ring - at.q == 2 * shape.row_dim * tile.rows
    assert at.empty - at.full >= 8 * tile.full_barriers and tile.full_barriers >= tile.groups * tile.key_blocks


@pytest.mark.parametrize("rows, h200, a100, sm120", [
    (1, "m16k32b11", "m16k32b7", "m16k16b4"), (16, "m16k32b11", "m16k32b7", "m16k16b4"), (17, "m32k32b9", "m32k32b6", "m32k16b3"),
    (32, "m32k32b9", "m32k32b6", "m32k16b3"), (33, "m64k32b8", "m32k32b6", "m32k16b3"), (100_000, "m64k32b8", "m32k32b6", "m32k16b3")])
def test_rows_and_device_choose_the_tile_of_mma(rows, h200, a100, sm120):
    for expected, arch in ((h200, "sm_90a"), (a100, "sm_80"), (sm120, "sm_120")):
        assert str(choose_mma_tile(TUNED, rows, resources.SHARED_BYTES[arch], arch == "sm_90a")) == expected
    assert choose_mma_tile(TUNED, rows, 95_000, True) is None


@pytest.mark.parametrize("arguments, message", [
    ((48, 32, 8, 2), "rows: expected 16, 32 or 64, got 48"),
    ((32, 64, 8, 2), "keys: expected 16 or 32, got 64"),
    ((64, 32, 8, 1, REGISTERS), "row_warps: expected 1 or 2, for 16 or 32 rows a warp, got 1 for 64 rows"),
    ((16, 32, 8, 2), "row_warps: expected 1 or 2, for 16 or 32 rows a warp, got 2 for 16 rows"),
    ((32, 32, 1, 1), "blocks: expected at least 2 (for steps of 32 keys), got 1"),
    ((64, 32, 3, 2, REGISTERS, True), "blocks: expected at least 4 (for steps of 32 keys), got 3"),
    ((64, 32, 8, 2), "rows=64: the output takes 128 registers a thread of the value warps, so registers must be handed over"),
])  # fmt: skip
def test_a_tile_of_mma_that_does_not_add_up_refuses_itself(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        MmaTile(*arguments)


def test_rows_that_mma_does_not_take_are_refused():
    """Whoever builds the kernel without asking `can_run`, whose texts test_errors has."""
    for shape, message in ((Shape(512, 64, "float32"), "dtype float32"), (Shape(96, 64, "float16"), "latent_dim=96"),
                           (Shape(512, 32, "bfloat16"), "rope_dim=32")):
        with pytest.raises(UnsupportedError, match=f"{message}: kernel='mma' takes .*; kernel='paged' would run"):
            MmaConfig(shape, MMA_TILES[0], False, True)


def test_configurations_are_frozen():
    configs = [source.config for source in VARIANTS.values()] + [source.config for source, _ in TENSOR_VARIANTS]
    for config in (TUNED, LARGEST, *MMA_TILES, *WGMMA_TILES, *configs):
        with pytest.raises(AttributeError):
            config.tile = 1
        assert hash(config) is not None
