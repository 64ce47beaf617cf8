"""Sets up .venv for the Makefile: `python3 tools/bootstrap.py [--extra test] [--extra bench]`.

Standard library only, and quick when nothing changed. What it does, in this order:

1. Creates .venv, if there is none for this Python. Where the interpreter that runs this already has numba-cuda or torch (a GPU machine
   with its own stack), .venv sees those packages; else it is an empty one.
2. Installs what pyproject.toml asks for and is not there yet. When everything is there already, the network is not touched: the checkout
   is put on the path of .venv with a .pth file.
3. Looks for nvcc, for the CUDA C twin, and nvdisasm, for tests of the machine code; installs the extra that brings one when it is not
   there. The rest works without, so that may fail.
4. Prints what was found and what is missing.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "bootstrap.json"
OLDEST_PYTHON = (3, 10)
# Having one of these, an interpreter belongs to a GPU machine whose own stack should be used rather than downloaded again.
GPU_STACK = ("numba-cuda", "torch")
# Programs of the CUDA toolkit that come as wheels as well: name, the extra that brings it, what is lost without it.
TOOLS = (("nvcc", "nvcc", "the CUDA C twin is not built for a GPU"), ("nvdisasm", "sass", "machine code is not looked at"))
REPORTED = ("numba-cuda", "numba", "numpy", "ml_dtypes", "greenlet", "cuda-core", "pytest", "torch", "cupy-cuda13x")


def main():
    parser = argparse.ArgumentParser(description="Set up .venv for this project.")
    parser.add_argument("--extra", action="append", default=[], metavar="NAME", help="an extra of pyproject.toml, such as test")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)  # run by the .venv, to tell what it has
    arguments = parser.parse_args()
    if arguments.inside:
        versions = {name: installed_version(name) for name in REPORTED}
        print(json.dumps({"missing": missing_requirements(arguments.extra), "versions": versions}))
        return
    if sys.version_info < OLDEST_PYTHON:
        fail("Python {}.{} or later is needed, this is {}; run make PYTHON=/path/to/python".format(*OLDEST_PYTHON, sys.version.split()[0]))
    state = read_stamp()
    if state["key"] == stamp_key() and set(arguments.extra) <= set(state["extras"]) and venv_python().exists():
        return
    extras = sorted({*arguments.extra, *state["extras"]} if state["key"] == stamp_key() else set(arguments.extra))
    create_venv()
    install(extras)
    tools = {name: find_tool(name) or install_tool(name, extra, loss) for name, extra, loss in TOOLS}
    report(tools)
    STAMP.write_text(json.dumps({"key": stamp_key(), "extras": extras}))


def stamp_key():
    """Changes with all that decides what .venv holds: the requirements, this script, the interpreter and its path."""
    content = hashlib.sha256()
    for part in (ROOT / "pyproject.toml", Path(__file__)):
        content.update(part.read_bytes())
    content.update(f"{sys.version} {sys.prefix} {os.environ.get('PYTHONPATH')}".encode())
    return content.hexdigest()


def read_stamp():
    try:
        return json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {"key": None, "extras": []}


def venv_python():
    return VENV / "bin" / "python"


def create_venv():
    if venv_python().exists():
        asked = "import sys; print(*sys.version_info[:2])"
        answer = subprocess.run([venv_python(), "-c", asked], capture_output=True, text=True)
        if answer.stdout.split() == [str(number) for number in sys.version_info[:2]]:
            say("using the .venv that is there")
            return
        say("the .venv that is there belongs to another Python; making it anew")
    if VENV.exists():
        shutil.rmtree(VENV)
    share = [name for name in GPU_STACK if installed_version(name)]
    say(f"creating .venv with Python {sys.version.split()[0]}" + (f", sharing this interpreter's {', '.join(share)}" if share else ""))
    options = ["--system-site-packages"] if share else []
    made = subprocess.run([sys.executable, "-m", "venv", *options, str(VENV)], capture_output=True, text=True)
    if made.returncode:
        # Some distributions ship venv without ensurepip; the interpreter's own pip then serves .venv as well.
        shutil.rmtree(VENV, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--system-site-packages", str(VENV)], check=False)
        share = share or ["pip"]
    if share and sys.prefix != sys.base_prefix:
        # venv links to the interpreter behind an active environment, not to that environment: name its packages as well.
        add_to_path("shared_environment", sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    if run_pip("--version", quiet=True).returncode:
        why = made.stderr.strip() or made.stdout.strip()
        fail(f"could not make a .venv with pip: {why}\nInstall the venv and pip packages of this Python.")


def install(extras):
    direct, behind = ask_venv(extras)["missing"]
    target = f"numba-verify[{','.join(extras)}]" if extras else "numba-verify"
    if behind and not direct and compiles():
        say(f"a CUDA toolkit stands in for {', '.join(behind)}: a kernel compiles without")
        behind = []
    lacking = direct + behind
    if not lacking:
        say(f"everything that {target} needs is there already; putting the checkout on the path of .venv")
        add_to_path("numba_verify_checkout", ROOT)
        return
    say(f"installing {target}; to be fetched: {', '.join(lacking)}")
    if run_pip("install", "--editable", f"{ROOT}[{','.join(extras)}]" if extras else str(ROOT)).returncode == 0:
        return
    report({name: find_tool(name) for name, _, _ in TOOLS})
    fail(
        f"pip could not install: {', '.join(lacking)}\n"
        "On a machine with no network these must be importable from the interpreter that runs this script, or lie on PYTHONPATH."
    )


def install_tool(name, extra, loss):
    """The extra that brings a program of the CUDA toolkit, or None with a word about it: all else works without."""
    say(f"no {name} on PATH, in CUDA_HOME or in .venv; installing the {extra} extra")
    asked = requirements([extra], only_extras=True)
    if run_pip("install", "--retries", "1", *asked).returncode:
        say(f"{name} could not be installed: {loss}, all else works (make clean and make again to retry)")
    return find_tool(name)


def find_tool(name):
    homes = [os.environ[home] for home in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(home)] + ["/usr/local/cuda"]
    candidates = [shutil.which(name), *(os.path.join(home, "bin", name) for home in homes)]
    candidates += VENV.glob(f"lib/python*/site-packages/nvidia/*/bin/{name}")
    return next((str(path) for path in candidates if path and os.access(path, os.X_OK)), None)


def add_to_path(name, *folders):
    """A .pth file in .venv. Python runs its lines when it starts; addsitedir, and not the bare folder, because a shared environment has
    .pth files of its own, and numba-cuda works through one."""
    site = next(VENV.glob("lib/python*/site-packages"))
    lines = [f"import site; site.addsitedir({str(folder)!r})\n" for folder in dict.fromkeys(folders)]
    (site / f"{name}.pth").write_text("".join(lines))


def requirements(extras, only_extras=False):
    """The requirement texts of pyproject.toml, with extras that name other extras of the project resolved."""
    try:
        import tomllib
    except ImportError:  # Python 3.10
        from pip._vendor import tomli as tomllib
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = [] if only_extras else list(project["dependencies"])
    for extra in extras:
        if extra not in project["optional-dependencies"]:
            fail(f"expected an extra of pyproject.toml, one of {', '.join(project['optional-dependencies'])}; got {extra}")
        for text in project["optional-dependencies"][extra]:
            own = text.startswith(f"{project['name']}[")
            found += requirements(text[text.index("[") + 1 : text.index("]")].split(","), only_extras=True) if own else [text]
    return found


def compiles():
    """Whether a kernel compiles in .venv as it is. What an extra of numba-cuda would install may also come from a CUDA toolkit."""
    command = ("from numba_verify.backend import kernel_sources; from numba_verify.gpu.compile import compile_uncached; "
               "from numba_verify.kernels.config import Shape; "
               "compile_uncached(kernel_sources(Shape(128, 64, 'bfloat16'), None, 8, False)['combine'], 'sm_80')")
    answer = subprocess.run([venv_python(), "-c", command], capture_output=True, text=True, cwd=ROOT)
    return answer.returncode == 0


def missing_requirements(extras):
    """Requirements that this interpreter does not meet: (the project's own, those behind a requirement's extras), as texts."""
    from pip._vendor.packaging.requirements import Requirement

    direct, behind = [], []
    seen, queue = set(), [(text, None) for text in requirements(extras)]
    while queue:
        text, through = queue.pop()
        wanted = Requirement(text)
        # "extra" is the one marker variable that only the asking package can give.
        if text in seen or (wanted.marker and not any(wanted.marker.evaluate({"extra": extra}) for extra in through or [""])):
            continue
        seen.add(text)
        version = installed_version(wanted.name)
        if version is None or not wanted.specifier.contains(version, prereleases=True):
            (direct if through is None else behind).append(f"{wanted.name}{wanted.specifier}" + (f" (have {version})" if version else ""))
        elif wanted.extras:
            queue += [(inner, wanted.extras) for inner in metadata.requires(wanted.name) or []]
    return sorted(direct), sorted(behind)


def ask_venv(extras):
    """What .venv lacks for these extras ("missing") and the versions of what it has ("versions")."""
    options = [option for extra in extras for option in ("--extra", extra)]
    answer = subprocess.run([venv_python(), __file__, "--inside", *options], capture_output=True, text=True)
    if answer.returncode:
        fail(answer.stderr.strip())
    return json.loads(answer.stdout)


def installed_version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def run_pip(*arguments, quiet=False):
    command = [venv_python(), "-m", "pip", "--disable-pip-version-check", *arguments]
    if quiet:
        return subprocess.run(command, capture_output=True)
    return subprocess.run([*command, "--quiet"])


def report(tools):
    found = [f"{name} {version}" for name, version in ask_venv([])["versions"].items() if version]
    say("found " + (", ".join(found) or "no package that is used here"))
    say(", ".join(f"{name}: {path or 'none'}" for name, path in tools.items()))


def say(text):
    print(f"bootstrap: {text}", flush=True)


def fail(text):
    sys.exit(f"bootstrap: {text}")


if __name__ == "__main__":
    main()
