"""The disk cache of cubins: found again, keyed by all that changes code, repaired when damaged, dispensable, safe under many processes.

Most tests put a counted stand-in in the compiler's place; the real compiler runs where its time, its options or its output is the question.
"""

import ast
import json
import os
import re
import stat
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

import numba_verify
from numba_verify import backend
from numba_verify.gpu import compile as compiler
from numba_verify.gpu.compile import Cubin, KernelSource, Resources, compile_kernel
from numba_verify.kernels.config import Shape
from numba_verify.kernels.mma_config import MMA_TILES
from numba_verify.kernels.wgmma_config import WGMMA_TILES

ARCH = "sm_90a"
PACKAGE = Path(numba_verify.__file__).parent
#: Contract: 3 s cold, 0.2 s from disk. CI machines differ by about 2 and share memory with other workers, hence the factor; waiting for a
#: core is not counted at all (processor time of this process). The longest is the 64-row tile of `mma`, half of it the linker's.
COLD_SECONDS, WARM_SECONDS, BUSY = 3.0, 0.2, 3


def build_store(lang, config):
    """The least kernel there is: `config` into every word."""
    pointer, f32, tid, value = lang.pointer, lang.f32, lang.tid_x, lang.float32(config)

    def store(address):
        pointer(address, f32)[tid()] = value

    return store


SOURCE = KernelSource("cache_test", build_store, 1.5, ("address",), 64)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_VERIFY_CACHE_DIR", str(tmp_path / "cubin"))
    new_process(monkeypatch)
    return tmp_path / "cubin"


def new_process(monkeypatch):
    """Forget what this process has compiled, as a new one would."""
    monkeypatch.setattr(compiler, "_memory", {})


@pytest.fixture
def compiled(monkeypatch):
    """The sources that were really compiled, in order, by a compiler that takes no time."""
    sources = []

    def stand_in(source, arch):
        sources.append(source)
        time.sleep(0.01)
        return Cubin(f"{source.variant} {arch}".encode() * 100, "symbol", arch, Resources(32, 0, 0, 0, source.shared_bytes), cached=False)

    monkeypatch.setattr(compiler, "compile_uncached", stand_in)
    return sources


def files(folder):
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def test_hit_after_a_miss(folder, compiled, monkeypatch):
    first = compile_kernel(SOURCE, ARCH)
    assert not first.cached and compiled == [SOURCE]
    assert compile_kernel(SOURCE, ARCH) is first
    key = compiler.cache_key(SOURCE, ARCH)
    assert files(folder) == [f"{key}.cubin", f"{key}.json"] and (folder / f"{key}.cubin").read_bytes() == first.code
    assert json.loads((folder / f"{key}.json").read_text())["variant"] == "cache_test_1.5"
    new_process(monkeypatch)
    second = compile_kernel(SOURCE, ARCH)
    assert second == replace(first, cached=True) and len(compiled) == 1


def test_folder(tmp_path, monkeypatch):
    """NUMBA_VERIFY_CACHE_DIR, else the user's cache folder; asked at every use."""
    monkeypatch.setenv("NUMBA_VERIFY_CACHE_DIR", str(tmp_path / "own"))
    assert compiler.cache_directory() == tmp_path / "own"
    monkeypatch.setenv("NUMBA_VERIFY_CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert compiler.cache_directory() == tmp_path / "xdg" / "numba_verify" / "cubin"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert compiler.cache_directory() == tmp_path / ".cache" / "numba_verify" / "cubin"


@pytest.mark.parametrize("what, changed, arch", [
    ("config", replace(SOURCE, config=2.5), ARCH), ("architecture", SOURCE, "sm_90"), ("threads", replace(SOURCE, threads=128), ARCH),
    ("blocks per SM", replace(SOURCE, min_blocks=2), ARCH), ("name", replace(SOURCE, name="other"), ARCH),
    ("signature", replace(SOURCE, signature=("address", "i64")), ARCH)], ids=lambda value: value if isinstance(value, str) else "")
def test_key_changes_with_the_variant(folder, compiled, what, changed, arch):
    compile_kernel(SOURCE, ARCH)
    assert not compile_kernel(changed, arch).cached and len(compiled) == 2 and len(files(folder)) == 4


def test_key_changes_with_the_sources(folder, compiled, monkeypatch):
    """numba's own cache misses edits of imported modules; this one hashes every file that makes code."""
    compile_kernel(SOURCE, ARCH)
    new_process(monkeypatch)
    monkeypatch.setattr(compiler, "_source_digest", lambda: b"another")
    assert not compile_kernel(SOURCE, ARCH).cached and len(compiled) == 2


def test_digest_sees_every_source(tmp_path, monkeypatch):
    """An edit, a new file and a renamed file of kernels/ or gpu/ each change the digest; the rest of the package does not count."""
    root = tmp_path / "numba_verify"
    for part in ("kernels", "gpu"):
        (root / part).mkdir(parents=True)
        for path in (PACKAGE / part).glob("*.py"):
            (root / part / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(compiler, "__file__", str(root / "gpu" / "compile.py"))
    digest = compiler._source_digest.__wrapped__
    seen = [digest()]
    for part in ("kernels", "gpu"):
        edited = root / part / ("tile.py" if part == "kernels" else "ptx.py")
        edited.write_text(edited.read_text() + "\n# edited\n")
        seen.append(digest())
        (root / part / "new.py").write_text("")
        seen.append(digest())
        (root / part / "new.py").rename(root / part / "renamed.py")
        seen.append(digest())
    assert len(set(seen)) == len(seen)
    (root / "api.py").write_text("x = 1\n")
    assert digest() == seen[-1]


@pytest.mark.parametrize("package", ["python", *compiler._TOOLCHAIN])
def test_key_changes_with_the_toolchain(package, monkeypatch):
    versions, before = compiler.toolchain_versions(), compiler.cache_key(SOURCE, ARCH)
    assert package in versions
    monkeypatch.setattr(compiler, "toolchain_versions", lambda: versions | {package: "0.0.1"})
    assert compiler.cache_key(SOURCE, ARCH) != before


@pytest.mark.parametrize("variable", ["OPT", "CUDA_DEBUGINFO_DEFAULT"])
def test_numba_settings_of_a_debugging_session_stay_there(variable, monkeypatch):
    """NUMBA_OPT=0 and NUMBA_CUDA_DEBUGINFO=1 change what numba compiles: either they do not here, or they are part of the key."""
    from numba.cuda.core import config

    def code():
        return re.sub(r"B\d+v\d+B\w+", "", compiler.lower(SOURCE, ARCH, "ptx"))  # numba numbers its compilations in the symbol

    key, before = compiler.cache_key(SOURCE, ARCH), code()
    assert code() == before
    monkeypatch.setattr(config, variable, 0 if variable == "OPT" else 1)
    assert compiler.cache_key(SOURCE, ARCH) != key or code() == before


# what happens to the two files of an entry
DAMAGE = {
    "cubin cut off": lambda cubin, info: cubin.write_bytes(cubin.read_bytes()[:-7]),
    "cubin with a flipped bit": lambda cubin, info: cubin.write_bytes(bytes([cubin.read_bytes()[0] ^ 1]) + cubin.read_bytes()[1:]),
    "cubin empty": lambda cubin, info: cubin.write_bytes(b""),
    "cubin gone": lambda cubin, info: cubin.unlink(),
    "json gone": lambda cubin, info: info.unlink(),
    "json empty": lambda cubin, info: info.write_bytes(b""),
    "json cut off": lambda cubin, info: info.write_text(info.read_text()[:-9]),
    "json of another shape": lambda cubin, info: info.write_text("[1, 2]"),
    "json that is null": lambda cubin, info: info.write_text("null"),
    "json without resources": lambda cubin, info: info.write_text(info.read_text().replace('"resources"', '"other"')),
    "json of an older layout": lambda cubin, info: info.write_text(info.read_text().replace("registers", "regs")),
    "json that is no text": lambda cubin, info: info.write_bytes(b"\xff\xfe\x00"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_entry_is_compiled_again(folder, compiled, damage, monkeypatch):
    first = compile_kernel(SOURCE, ARCH)
    key = compiler.cache_key(SOURCE, ARCH)
    DAMAGE[damage](folder / f"{key}.cubin", folder / f"{key}.json")
    new_process(monkeypatch)
    assert compile_kernel(SOURCE, ARCH) == first and len(compiled) == 2
    new_process(monkeypatch)
    assert compile_kernel(SOURCE, ARCH).cached and len(compiled) == 2 and len(files(folder)) == 2


def test_read_only_folder(folder, compiled, monkeypatch):
    """An image with a filled cache and no right to write: hits are hits, misses are compiled, and nobody complains."""
    compile_kernel(SOURCE, ARCH)
    for path in (*folder.iterdir(), folder):
        path.chmod(stat.S_IREAD | (stat.S_IEXEC if path == folder else 0))
    if os.geteuid() == 0:  # root may write anyway: say no in the folder's place
        def refuse(*_, **__):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(compiler.tempfile, "mkstemp", refuse)
    try:
        new_process(monkeypatch)
        assert compile_kernel(SOURCE, ARCH).cached
        assert not compile_kernel(replace(SOURCE, config=9.0), ARCH).cached and len(files(folder)) == 2
    finally:
        folder.chmod(stat.S_IRWXU)


@pytest.mark.parametrize("obstacle", ["a file in its place", "a file above it", "a full disk", "no home"])
def test_no_folder_at_all(tmp_path, compiled, obstacle, monkeypatch):
    """The result does not depend on a disk; no half-written file stays behind."""
    new_process(monkeypatch)
    (tmp_path / "taken").write_text("")
    place = {"a file in its place": tmp_path / "taken", "a file above it": tmp_path / "taken" / "cubin"}.get(obstacle, tmp_path / "cubin")
    monkeypatch.setenv("NUMBA_VERIFY_CACHE_DIR", str(place))
    if obstacle == "a full disk":
        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(compiler.os, "replace", full)
    if obstacle == "no home":  # a container's user with no entry in passwd
        def homeless():
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.delenv("NUMBA_VERIFY_CACHE_DIR")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(compiler.Path, "home", homeless)
        monkeypatch.setattr(compiler.tempfile, "tempdir", str(tmp_path))  # where the cache may go instead
    assert compile_kernel(SOURCE, ARCH).code and len(compiled) == 1
    assert files(tmp_path / "cubin") == []


def test_clear(folder, compiled, monkeypatch):
    compile_kernel(SOURCE, ARCH)
    (folder / "notes.txt").write_text("not ours")
    assert compiler.clear_cache() == 2 and files(folder) == ["notes.txt"]
    assert not compile_kernel(SOURCE, ARCH).cached and len(compiled) == 2
    monkeypatch.setenv("NUMBA_VERIFY_CACHE_DIR", str(folder / "nowhere"))
    assert compiler.clear_cache() == 0


def test_threads_compile_a_kernel_once(folder, compiled):
    results = []
    threads = [threading.Thread(target=lambda: results.append(compile_kernel(SOURCE, ARCH))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiled) == 1 and len(results) == 8 and all(result is results[0] for result in results)


def child():
    """One of many processes: wait for the others, compile, print what came out."""
    import hashlib

    go = Path(os.environ["NUMBA_VERIFY_CACHE_DIR"] + ".go")
    while not go.exists():
        time.sleep(0.005)
    cubin = compile_kernel(SOURCE, ARCH)
    print(hashlib.sha256(cubin.code).hexdigest(), cubin.symbol, cubin.resources, sep="|")


def test_eight_processes_on_an_empty_cache(folder, monkeypatch):
    """Everybody gets the same code, and the files left behind are whole, whoever wrote last."""
    tests = Path(__file__).parent
    code = f"import sys; sys.path[:0] = [{str(tests)!r}, {str(tests.parent)!r}]; import test_cache; test_cache.child()"
    children = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(8)]
    time.sleep(0.5)
    Path(f"{folder}.go").touch()
    answers = [process.communicate(timeout=300) for process in children]
    assert [process.returncode for process in children] == [0] * 8, [error[-500:] for _, error in answers]
    assert len({out for out, _ in answers}) == 1
    key = compiler.cache_key(SOURCE, ARCH)
    assert files(folder) == [f"{key}.cubin", f"{key}.json"]
    assert compile_kernel(SOURCE, ARCH).cached


def shipped_variants():
    """One of every kernel, at the tuned shape."""
    sources = backend.kernel_sources(Shape(512, 64, "bfloat16"), None, 64, False)
    deterministic = backend.kernel_sources(Shape(512, 64, "bfloat16"), None, 64, True)
    mma = [backend.mma_sources(Shape(512, 64, "bfloat16"), tile, False, True)["mma"] for tile in (MMA_TILES[0], MMA_TILES[-1])]
    wgmma = backend.wgmma_sources(Shape(512, 64, "bfloat16"), WGMMA_TILES[0], False)["wgmma"]
    return [*sources.values(), deterministic["paged"], *mma, wgmma]


def timed(function, *arguments):
    """Result, seconds of the processor, seconds of the clock."""
    clock, processor = time.perf_counter(), time.process_time()
    result = function(*arguments)
    return result, time.process_time() - processor, time.perf_counter() - clock


@pytest.fixture(scope="module")
def loaded_compiler():
    """numba and the linker, imported and used once."""
    compiler.compile_uncached(SOURCE, ARCH)


@pytest.mark.slow
@pytest.mark.usefixtures("loaded_compiler")
@pytest.mark.parametrize("source", shipped_variants(), ids=lambda source: source.variant)
def test_time_to_first_call(source, folder, monkeypatch, record_property):
    """Contract promise 13. What a process loads once for all its kernels (numba, the linker) does not count as a variant's time."""
    cold, cold_seconds, cold_clock = timed(compile_kernel, source, ARCH)
    new_process(monkeypatch)
    warm, warm_seconds, warm_clock = timed(compile_kernel, source, ARCH)
    print(f"{source.variant}: {cold_seconds:.2f} s cold ({cold_clock:.2f} s by the clock), {1000 * warm_clock:.1f} ms from disk")
    record_property("cold_seconds", cold_clock)
    record_property("warm_seconds", warm_clock)
    assert not cold.cached and warm.cached and warm.code == cold.code
    assert cold_seconds <= BUSY * COLD_SECONDS
    assert warm_seconds <= BUSY * WARM_SECONDS


SOURCES = sorted([*PACKAGE.glob("kernels/*.py"), *PACKAGE.glob("gpu/*.py")])


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_code_makers_import_nothing_else_of_the_package(path):
    """The cache's key hashes kernels/ and gpu/: what they import from outside, but for error classes, would change code unseen."""
    package = ["numba_verify", path.parent.name]
    for node in ast.walk(ast.parse(path.read_text())):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[:len(package) - node.level + 1]) if node.level else ""
            start = ".".join(part for part in (base, node.module) if part)
            modules = [start] if node.module else [f"{start}.{alias.name}" for alias in node.names]
        for module in modules:
            parts = module.split(".")
            assert parts[0] not in ("cuda_ref", "tests"), f"line {node.lineno}: {module}"
            assert parts[0] != "numba_verify" or parts[1:2] and parts[1] in ("kernels", "gpu", "errors"), f"line {node.lineno}: {module}"


def test_no_subfolders_hold_code():
    """The digest's patterns are flat."""
    for part in ("kernels", "gpu"):
        assert not [path for path in (PACKAGE / part).rglob("*.py") if path.parent != PACKAGE / part]
