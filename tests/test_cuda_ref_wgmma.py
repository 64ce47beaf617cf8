"""wgmma in CUDA C: every case in any order of the threads, beside the twin; tiles; what is refused; what the compiler makes of it."""

import functools
import hashlib
import itertools
from pathlib import Path

import pytest
from support import cases, machine, mma_cases, twin
from support.grids import check_lets_combine_start, check_waits
from support.twin import H200_SHARED
from support.units import needs_nvcc

import cuda_ref.backend
import numba_verify.backend
from cuda_ref import binding, build, toolchain
from cuda_ref.binding import Status
from numba_verify.gpu import sass
from numba_verify.kernels.config import Shape
from numba_verify.kernels.mma_config import Registers
from numba_verify.kernels.wgmma_config import WGMMA_TILES, WgmmaTile

CASES = [case for case in cases.ALL + mma_cases.ALL
         if machine.takes("cuda_ref", "wgmma", case.latent_dim, case.rope_dim, case.dtype) and (machine.HAS_GPU or case.size != "gpu")]
#: Q that does not fit in registers, rows without rope, steps that are cut, masked from anywhere, or outgrow the peak.
SAME_BITS = ("full_row_heads", "no_rope", "cut_aside", "random_heads", "rise_again")
#: What else a tile can be: every number of keys, a ring of two, all of Q in registers or hardly any, value warpgroups that wait.
SHAPES = (WgmmaTile(64, 3, 9, Registers(168, 160, 24)), WgmmaTile(48, 2, 1, Registers(168, 160, 24), delayed=1),
          WgmmaTile(32, 5, 6, Registers(168, 160, 24), delayed=2))
#: Borders of tiles and steps, bits of 64 keys, more steps than a ring has slots, pieces, a peak that moves, poison, every row layout.
SHAPE_NAMES = ("rows_21", "rows_63", "borders", "random_70", "rounds", "one_step_each", "cut_aside", "rise_again", "nan_hidden_word", "inf_hidden",
               "full_row_heads", "no_rope_heads", "latent_256", "ragged_deterministic")
SHAPE_CASES = [case for case in CASES if case.name in SHAPE_NAMES]
WGMMA_ONLY = Path(__file__).parent / "support" / "wgmma_only.cu"


@pytest.fixture(autouse=True)
def whole_gpu(monkeypatch):
    """Of the host build: wgmma has as much shared memory as a Hopper GPU gives it."""
    monkeypatch.delenv("CUDA_REF_HOST_SHARED", raising=False)


def arguments(tile):
    """Template arguments of WgmmaTile."""
    return f"{tile.keys}, {tile.slots}, {tile.q_segments}, {', '.join(map(str, tile.registers))}, {tile.delayed}"


@pytest.mark.kernel
@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case, monkeypatch):
    twin.skip_if_refused("wgmma", 1)
    twin.check_in_all_orders(case, "wgmma", WGMMA_TILES[0], monkeypatch)


@pytest.mark.kernel
@pytest.mark.parametrize("case", [case for case in CASES if case.name in SAME_BITS], ids=str)
@pytest.mark.parametrize("tile", WGMMA_TILES, ids=str)
def test_same_algorithm(case, tile, monkeypatch):
    twin.check_same_algorithm(case, "wgmma", tile, monkeypatch)


@pytest.fixture(scope="module")
def shapes_library():
    """The host build of wgmma with the tiles of SHAPES."""
    tiles = ",".join(f"WgmmaTile<{arguments(tile)}>" for tile in SHAPES)
    # The name of the build folder is a hash of sources and flags: let the stand-ins be one of them.
    stand_ins = hashlib.sha256(WGMMA_ONLY.read_bytes()).hexdigest()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "HOST_FLAGS", (*build.HOST_FLAGS, f"-I{build.SOURCE_DIR}", f"-DNVR_WGMMA_TILES={tiles}", f"-DSTAND_INS={stand_ins}"))
        patch.setattr(build, "KERNEL_SOURCES", (str(WGMMA_ONLY), "wgmma_bf16.cu", "wgmma_fp16.cu", "wgmma.cu", "schedule.cu", "combine.cu",
                                                "capi.cu", "validate.cu", "device.cu"))  # fmt: skip
        yield binding.load(build.build_host())


@pytest.mark.kernel
@pytest.mark.skipif(machine.HAS_GPU, reason="these would not fit a GPU's registers, or run slower")
@pytest.mark.parametrize("tile", SHAPES, ids=str)
@pytest.mark.parametrize("case", SHAPE_CASES, ids=str)
def test_any_tile(case, tile, shapes_library, monkeypatch):
    monkeypatch.setattr(cuda_ref.backend, "library_of", lambda device: shapes_library)
    monkeypatch.setitem(cuda_ref.backend.TILES, "wgmma", SHAPES)
    twin.check_in_all_orders(case, "wgmma", tile, monkeypatch)


@pytest.mark.parametrize("dims", machine.TWIN_LAYOUTS, ids=str)
def test_tiles_are_the_twins(dims, shapes_library, monkeypatch):
    """Counted from 1 on; shared memory tells that keys, slots and segments are the same. There are no more."""
    def sizes(tiles):
        return [twin.shared_bytes("wgmma", tile=1 + i, latent_dim=dims[0], rope_dim=dims[1]) for i in range(len(tiles))]

    shape = Shape(*dims, "bfloat16")
    assert sizes(WGMMA_TILES) == [tile.shared_bytes(shape) for tile in WGMMA_TILES]
    assert twin.can_run("wgmma", tile=1 + len(WGMMA_TILES)) == (Status.OPTION, f"unknown tile configuration {1 + len(WGMMA_TILES)}")
    monkeypatch.setattr(cuda_ref.backend, "library_of", lambda device: shapes_library)
    assert sizes(SHAPES) == [tile.shared_bytes(shape) for tile in SHAPES]


@pytest.mark.skipif(machine.HAS_GPU, reason="of a GPU only one answer can be asked")
def test_default_tile_is_the_first_that_fits(shapes_library, monkeypatch):
    """And the last one when none does."""
    monkeypatch.setattr(cuda_ref.backend, "library_of", lambda device: shapes_library)
    sizes = [tile.shared_bytes(Shape(128, 64, "bfloat16")) for tile in SHAPES]
    for shared in (*sizes, *(size - 1 for size in sizes), H200_SHARED):
        monkeypatch.setenv("CUDA_REF_HOST_SHARED", str(shared))
        first = next((size for size in sizes if size <= shared), sizes[-1])
        assert twin.shared_bytes("wgmma", latent_dim=128) == first


@pytest.mark.skipif(machine.HAS_GPU, reason="the imaginary GPU's numbers")
def test_refusals(monkeypatch):
    dtypes, can_run = binding.DTYPES, functools.partial(twin.can_run, "wgmma")
    assert can_run() == can_run(tile=1) == (Status.OK, "")
    assert can_run(dtype=dtypes["float32"]) == (Status.DTYPE, "dtype float32: wgmma takes bfloat16 and float16; paged would run")
    assert can_run(latent_dim=384) == (
        Status.UNSUPPORTED_DIMS, "latent_dim is 384 and rope_dim 64; wgmma is compiled for 512/64, 512/0, 256/64 and 128/64, paged would run")
    for plan, kernel in itertools.permutations(machine.TENSOR):
        assert twin.library().nvr_can_run(twin.config(plan), twin.NUMBERS[kernel]) == Status.OPTION
        assert "mma and wgmma cut work into tiles of their own" in twin.library().nvr_last_error().decode()
    need = WGMMA_TILES[0].shared_bytes(Shape(512, 64, "bfloat16"))
    monkeypatch.setenv("CUDA_REF_HOST_SHARED", str(need))
    assert can_run() == (Status.OK, "")
    monkeypatch.setenv("CUDA_REF_HOST_SHARED", str(need - 1))
    assert can_run() == (Status.SHARED_MEMORY, f"the wgmma tile of 64 rows x 48 keys needs {need} B of shared memory, this device has {need - 1} B; "
                         "mma would run")


def test_support_speaks_like_the_twin():
    for given in ((8, 512, 64, "float32"), (8, 96, 64, "bfloat16"), (8, 512, 32, "float16")):
        ours, theirs = (module.support("wgmma", *given, 1, None) for module in (numba_verify.backend, cuda_ref.backend))
        assert theirs == ours != ""
    assert "wgmma is compiled for 512/64" in cuda_ref.backend.support("wgmma", 8, 256, 0, "bfloat16", 1, None)


def opcodes_of(source, tmp_path):
    """Opcodes of every kernel that nvcc makes of a file of cuda_ref for sm_90a, by mangled name."""
    nvcc, cubin = toolchain.find_nvcc(), tmp_path / "code.cubin"
    toolchain.run([str(nvcc.path), *build.NVCC_FLAGS, *nvcc.flags, "-arch=sm_90a", "-cubin", str(build.SOURCE_DIR / source), "-o", str(cubin)],
                  "compiling failed")  # fmt: skip
    return sass.opcodes(cubin.read_bytes())


@needs_nvcc
@pytest.mark.slow
@pytest.mark.skipif(sass.find_nvdisasm() is None, reason="needs nvdisasm")
def test_products_follow_each_other(tmp_path):
    """In the kernel of 512/64: between two products of a step nothing but a few uniform instructions, which make descriptors."""
    (code,) = (code for name, code in opcodes_of("wgmma_bf16.cu", tmp_path).items() if "DimsILi512ELi64E" in name)
    # Scores are made at two places: plain steps and all others.
    for product, count, sites in (("HGMMA.64x48x16.F32.BF16", 36, 2), ("HGMMA.64x128x16.F32.BF16", 6, 1)):
        places = [i for i, name in enumerate(code) if name == product]
        assert len(places) == count * sites
        for site in range(sites):
            between = [code[first + 1:last] for first, last in itertools.pairwise(places[site * count:(site + 1) * count])]
            # Behind the first there may be something that needs no result of them.
            assert all(len(names) <= 4 and all(name.startswith(("U", "R2UR")) for name in names) for names in between[1:]), between
    # A wait for each array of accumulators, of which the scores are one a site and the output two, one a site for all segments of the scores but the
    # last, and none that ptxas put in.
    waits = [name for name in code if name.startswith("WARPGROUP.DEPBAR")]
    assert len(waits) == 6
    check_lets_combine_start(code)


@needs_nvcc
@pytest.mark.slow
@pytest.mark.skipif(sass.find_nvdisasm() is None, reason="needs nvdisasm")
def test_combine_waits(tmp_path):
    """Every variant, for the GPUs on which it may start before the partials are there."""
    kernels = opcodes_of("combine.cu", tmp_path)
    assert len(kernels) == 12  # three dtypes, four widths
    for code in kernels.values():
        check_waits(code, 2 + 5)
