"""Building cuda_ref: the header from C, the sanitizer lane, the cache, parallel builds, nvcc for three architectures."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.units import needs_nvcc

from cuda_ref import binding, build, resources, toolchain
from cuda_ref.binding import Status
from cuda_ref.toolchain import BuildError

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "cuda_ref"
# What a block may have on sm_86, sm_89 and sm_120, and of each architecture (CUDA C++ Programming Guide, technical specifications).
SMALLEST_SHARED = 101_376
SHARED = {"80": 166_912, "90a": 232_448, "120": SMALLEST_SHARED}


def run(*command, **options):
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)


@pytest.fixture
def tiny_library(tmp_path, monkeypatch):
    """A project of one source file in place of cuda_ref's, so that a build takes a moment; its cache is empty."""
    (tmp_path / "src").mkdir()
    source = tmp_path / "src" / "one.cu"
    source.write_text('extern "C" int one() { return 1; }\n')
    monkeypatch.setattr(build, "SOURCE_DIR", source.parent)
    monkeypatch.setattr(build, "KERNEL_SOURCES", ("one.cu",))
    monkeypatch.setattr(build, "HOST_SOURCES", ())
    monkeypatch.setenv("CUDA_REF_CACHE_DIR", str(tmp_path / "cache"))
    return source


def test_header_compiles_as_c99(tmp_path):
    program = tmp_path / "user.c"
    program.write_text('#include "verify_attn.h"\nint main(void) { return NVR_OK; }\n')
    done = run("gcc", "-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", f"-I{SOURCES}", "-fsyntax-only", program)
    assert done.returncode == 0, done.stderr


def test_structs_match_the_header(tmp_path):
    """Sizes and offsets of every ctypes field against the C compiler's."""
    structs = {"nvr_plan_config": binding.PlanConfig, "nvr_index_array": binding.IndexArray, "nvr_tree": binding.Tree,
               "nvr_indices": binding.Indices, "nvr_tensors": binding.Tensors}  # fmt: skip
    lines, want = [], []
    for name, struct in structs.items():
        lines.append(f'printf("%zu\\n", sizeof({name}));')
        want.append(str(binding.ctypes.sizeof(struct)))
        for field, _ in struct._fields_:
            lines.append(f'printf("%zu\\n", offsetof({name}, {field}));')
            want.append(str(getattr(struct, field).offset))
    program = tmp_path / "offsets.c"
    includes = "#include <stddef.h>\n#include <stdio.h>\n" + '#include "verify_attn.h"\n'
    program.write_text(includes + "int main(void) {\n" + "\n".join(lines) + "\nreturn 0; }\n")
    assert run("gcc", f"-I{SOURCES}", program, "-o", tmp_path / "offsets").returncode == 0
    assert run(tmp_path / "offsets").stdout.split() == want


@pytest.mark.kernel
@pytest.mark.parametrize("seed", ["0", "1"])
def test_smoke_program_is_clean_under_the_sanitizers(seed):
    """With room for every tile of mma and wgmma, and the threads in two orders."""
    place = {"CUDA_REF_HOST_SHARED": str(SHARED["90a"]), "CUDA_REF_HOST_SEED": seed}
    done = run(build.build_smoke(), env={**os.environ, **place, "ASAN_OPTIONS": "detect_leaks=1", "UBSAN_OPTIONS": "print_stacktrace=1"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert done.stdout.count("error") == 9 + 2 * (7 + 1), "three problems, three kernels; two of them, seven tiles of mma and one of wgmma"


# Kernels that must fail, each with what the report says. Parameters: int pointer.
BAD_KERNELS = {
    "half of a block at a barrier": ("if (threadIdx.x < 32) __syncthreads();", "32 of 64 threads wait at __syncthreads, 0 for the rest"),
    "half of a warp in a shuffle": ("if (threadIdx.x % 32 < 8) __shfl_sync(~0u, 1, 0);", "0 of 64 threads wait at __syncthreads, 16 for"),
    "shared memory out of bounds": ("nvr::shared_memory()[64] = 1;", "heap-buffer-overflow"),
    "shared memory not written": ("if (nvr::shared_memory()[threadIdx.x] == 0) *p.data = 1;", "nothing"),
}


@pytest.fixture(scope="module")
def bad_kernels(tmp_path_factory):
    """One sanitized program that runs the bad kernel of the given number."""
    folder = tmp_path_factory.mktemp("bad")
    kernels = "".join(f"void bad{i}(P p) {{ (void)p; {body} }}\n" for i, (body, _) in enumerate(BAD_KERNELS.values()))
    calls = "".join(f"if (*argv[1] == '{i}') status = nvr::launch<bad{i}>({{}}, \"bad\", dim3(2), 64, 256, nullptr, p);\n"
                    for i in range(len(BAD_KERNELS)))  # fmt: skip
    source = folder / "bad.cpp"
    source.write_text(
        f'#include <stdio.h>\n#include "device.cuh"\nstruct P {{ int* data; }};\n{kernels}'
        f"int main(int, char** argv) {{ int x = 0, status = 0; P p = {{&x}};\n{calls}"
        'puts(status ? nvr::last_error_text() : x ? "something" : "nothing"); return status; }\n'
    )
    path, _ = build.find_host_compiler()
    sources = [source, "-x", "c++", SOURCES / "device.cu", *(SOURCES / name for name in build.HOST_SOURCES)]
    flags = [*build.HOST_FLAGS, *build.SANITIZE_FLAGS]
    done = run(path, *flags, f"-I{SOURCES}", *sources, "-o", folder / "bad")
    assert done.returncode == 0, done.stderr
    return folder / "bad"


@pytest.mark.parametrize("name", BAD_KERNELS)
def test_bad_kernel_is_reported_and_does_not_hang(bad_kernels, name):
    number = list(BAD_KERNELS).index(name)
    done = run(bad_kernels, number, timeout=60)
    text = BAD_KERNELS[name][1]
    assert text in done.stdout + done.stderr
    if "barrier" in name or "shuffle" in name:
        assert done.returncode == Status.BARRIER


def test_builds_only_when_something_changed(tiny_library, monkeypatch):
    first = build.build_host()
    stamp = first.stat().st_mtime_ns
    assert build.build_host() == first and first.stat().st_mtime_ns == stamp
    assert build.build_host(force=True) == first and first.stat().st_mtime_ns > stamp
    tiny_library.write_text('extern "C" int one() { return 2; }\n')
    second = build.build_host()
    assert second != first
    (tiny_library.parent / "new.cuh").write_text("// a header more\n")
    third = build.build_host()
    assert third not in (first, second)
    monkeypatch.setattr(build, "HOST_FLAGS", (*build.HOST_FLAGS, "-g"))
    fourth = build.build_host()
    assert fourth not in (first, second, third)
    monkeypatch.setattr(build, "find_host_compiler", lambda: (shutil.which("g++"), "g++ of another version"))
    assert build.build_host() not in (first, second, third, fourth)
    assert not list(build.cache_dir().glob("*.tmp")), "scratch folders are removed"


def test_compile_error_carries_the_compilers_text(tiny_library):
    tiny_library.write_text("this is no C++\n")
    with pytest.raises(BuildError, match="compiling failed.*ended with 1") as error:
        build.build_host()
    assert "one.cu:1:1: error:" in str(error.value)
    assert not list(build.cache_dir().glob("*.tmp"))


def test_missing_compilers_are_named(monkeypatch):
    monkeypatch.setattr(toolchain, "_candidates", list)
    with pytest.raises(BuildError, match=r"no nvcc on PATH, in CUDA_HOME or among the PyPI wheels; install .*cuda-toolkit\[nvcc"):
        toolchain.find_nvcc.__wrapped__()
    monkeypatch.setenv("PATH", "")
    for variable in ("CC", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(BuildError, match="no g\\+\\+ on PATH"):
        toolchain.find_host_compiler.__wrapped__()
    with pytest.raises(BuildError, match="no gcc on PATH"):
        toolchain.find_c_compiler()


def test_nvcc_of_the_wheels_gets_their_folders(tmp_path, monkeypatch):
    nvcc = tmp_path / "cu13" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\necho Cuda compilation tools, release 13.9\n")
    nvcc.chmod(0o755)
    monkeypatch.setattr(toolchain, "_wheel_roots", lambda: [tmp_path / "cu13"])
    monkeypatch.setenv("PATH", "/bin:/usr/bin")
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    found = toolchain.find_nvcc.__wrapped__()
    assert found.path == nvcc and found.version.endswith("13.9")
    assert found.flags == (f"-I{tmp_path / 'cu13' / 'include'}", f"-L{tmp_path / 'cu13' / 'lib'}")


def test_bad_architecture_is_refused():
    with pytest.raises(ValueError, match="expected compute capabilities such as '80,90a,120', got 'hopper'"):
        build.build("hopper")


BUILD_TINY = """
import pathlib, sys
from cuda_ref import build
build.SOURCE_DIR, build.KERNEL_SOURCES, build.HOST_SOURCES = pathlib.Path(sys.argv[1]), ("one.cu",), ()
print(build.build_host(force="force" in sys.argv))
"""


def start_build(source, *arguments):
    return subprocess.Popen([sys.executable, "-c", BUILD_TINY, str(source.parent), *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_processes_that_build_at_once_agree(tiny_library):
    builders = [start_build(tiny_library) for _ in range(4)]
    paths = {builder.communicate(timeout=60)[0].strip() for builder in builders}
    assert all(builder.returncode == 0 for builder in builders)
    assert len(paths) == 1 and Path(paths.pop()).is_file()
    assert not list(build.cache_dir().glob("*.tmp"))


def test_lock_of_a_dead_process_is_free(tiny_library, monkeypatch):
    """A compiler that never ends, its builder killed: the next builder neither waits nor finds half a product."""
    fake = tiny_library.parent / "slow-g++"
    fake.write_text('#!/bin/sh\ncase "$*" in *--version*) echo slow;; *) echo $$ > "$0.pid"; exec sleep 600;; esac\n')
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", str(fake))
    dead = start_build(tiny_library)
    compiler = Path(f"{fake}.pid")
    deadline = time.monotonic() + 30
    while not (compiler.exists() and compiler.read_text().endswith("\n")) and time.monotonic() < deadline:
        time.sleep(0.02)
    dead.kill()
    dead.communicate()
    fake.write_text('#!/bin/sh\ncase "$*" in *--version*) echo slow;; *) exec g++ "$@";; esac\n')
    try:
        alive = start_build(tiny_library)
        path = Path(alive.communicate(timeout=60)[0].strip())
    finally:
        os.kill(int(compiler.read_text()), signal.SIGKILL)  # it outlives its builder
    assert alive.returncode == 0 and path.is_file()
    assert not list(build.cache_dir().glob("*.tmp")), "what the dead builder left is removed"


def test_command_line(tiny_library, capsys):
    assert build.main(["--host"]) == 0
    assert Path(capsys.readouterr().out.strip()).is_file()
    tiny_library.write_text("this is no C++\n")
    assert build.main(["--host"]) == 1
    assert "one.cu:1:1: error:" in capsys.readouterr().err


PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN3nvr14combine_kernelINS_4Bf16EEEvNS_12VerifyParamsE' for 'sm_90a'
ptxas info    : Function properties for _ZN3nvr12flash_kernelI
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 96 registers, used 1 barriers, 8 bytes cumulative stack size, 1024 bytes smem
"""


# A kernel of mma whose tile no sm_120 has room for, one that it has, and one of wgmma, which it does not have.
PTXAS_MMA = """\
ptxas info    : Compiling entry function '_ZN3nvr10mma_kernelINS_4Bf16ENS_7MmaTileILi64ELi32ELi8ELi2EEENS_4DimsILi512ELi64EEEEEvNS_12VerifyParamsE' for 'sm_120'
ptxas info    : Used 4 registers, used 0 barriers
ptxas info    : Compiling entry function '_ZN3nvr10mma_kernelINS_4Bf16ENS_7MmaTileILi16ELi16ELi4ELi1EEENS_4DimsILi512ELi64EEEEEvNS_12VerifyParamsE' for 'sm_120'
ptxas info    : Used 128 registers, used 16 barriers
ptxas info    : Compiling entry function '_ZN3nvr12wgmma_kernelINS_4Bf16ENS_9WgmmaTileILi48ELi3ELi6ELi168ELi160ELi24ELi0EEENS_4DimsILi512ELi64EEEEEvNS_12VerifyParamsE' for 'sm_120'
ptxas info    : Used 4 registers, used 0 barriers
"""  # noqa: E501


def test_kernels_that_only_trap_are_left_out():
    (row,) = resources.parse(PTXAS_MMA)
    assert row["kernel"].startswith("mma<Bf16, MmaTile<16, 16, 4, 1>, Dims<512, 64>") and row["registers"] == 128


@needs_nvcc
def test_wgmma_that_the_compiler_makes_wait_is_refused(tiny_library, tmp_path):
    """Here because its accumulators are read before the wait."""
    tiny_library.write_text(
        f'#include "{SOURCES}/wgmma_ptx.cuh"\n__global__ void early(float* out) {{\n    float acc[4] = {{}};\n'
        "    nvr::ptx::wgmma_fence();\n    nvr::ptx::wgmma_ss<false, nvr::Bf16>(acc, 1, 2, true);\n    out[threadIdx.x] = acc[0];\n"
        "    nvr::ptx::wgmma_commit();\n    nvr::ptx::wgmma_wait<0>(acc);\n}\n")
    with pytest.raises(BuildError, match=r"the compiler put waits between wgmma: .*C75\d\d"):
        build.build("90a")
    assert not list(build.cache_dir().glob("*.tmp"))


def test_resource_text_is_understood():
    row = {"arch": "90a", "kernel": "combine<Bf16>", "registers": 96, "spill_stores": 4, "spill_loads": 12,
           "stack": 8, "static_shared": 1024, "dynamic_shared": 0}  # fmt: skip
    assert resources.parse(PTXAS) == [row]
    assert "90a     96    16     8    1024  combine<Bf16>" in resources.table([row])


@needs_nvcc
@pytest.mark.slow
def test_every_kernel_fits_every_architecture():
    """No spill, no stack, shared memory within the smallest device; no GPU is needed."""
    rows = build.resource_report(build.DEFAULT_ARCHITECTURES)
    tuned = [row for row in rows if "Dims<512, 64>" in row["kernel"]]
    # Per architecture and dtype: naive, and flash and paged in three tiles. mma: two dtypes, and the tiles that a GPU has room for. wgmma: Hopper.
    assert len(tuned) == 3 * 3 * (1 + 2 * 3) + 2 * (7 + 4 + 2) + 2
    assert {row["arch"] for row in rows} == set(build.DEFAULT_ARCHITECTURES)
    bad = [row for row in rows if row["spill_stores"] or row["spill_loads"] or row["stack"]]
    assert not bad, resources.table(bad)
    # 32 keys and rows of 512 + 128 are refused on the smallest devices, with numbers; everything else has to fit, mma on its architecture's.
    limits = [SHARED[row["arch"]] if row["kernel"].startswith(("mma", "wgmma")) else SMALLEST_SHARED for row in rows]
    large = [row for row, limit in zip(rows, limits, strict=True) if row["static_shared"] + row["dynamic_shared"] > limit]
    assert all("Tile<8, 32>, Dims<0, 0>" in row["kernel"] for row in large), resources.table(large)
    assert all(row["dynamic_shared"] for row in rows if row["kernel"].startswith(("mma", "wgmma", "paged", "flash")))
    path = build.build(build.DEFAULT_ARCHITECTURES).parent / "resources.json"
    assert len(json.loads(path.read_text())) == len(rows)


@needs_nvcc
@pytest.mark.slow
def test_gpu_library_without_a_driver_says_so():
    library = binding.load(build.build(build.DEFAULT_ARCHITECTURES))
    config = binding.PlanConfig(device=99, num_heads=16, latent_dim=512, rope_dim=64, page_size=1)
    assert library.nvr_can_run(config, binding.KERNELS["paged"]) == Status.NO_DEVICE
    assert "CUDA device 99" in library.nvr_last_error().decode()
