"""cubin -> machine instructions, by nvdisasm: what the compiler really made of a kernel. Works with no GPU."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import tempfile

from ..errors import UnsupportedError

# An instruction line: its address, a predicate or none, the opcode with its modifiers, the operands.
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+\{?\s*(?:@!?\w+\s+)?([A-Z][\w.]*[^;]*)")
_SECTION = re.compile(r"^\s*\.section\s+\.text\.([\w$]+)")


@functools.cache
def find_nvdisasm() -> str | None:
    """Path of nvdisasm: the wheel nvidia-cuda-nvdisasm, PATH, CUDA_HOME or /usr/local/cuda, in this order; None where there is none."""
    try:
        from cuda.pathfinder import find_nvidia_binary_utility

        found = find_nvidia_binary_utility("nvdisasm")
    except (ImportError, AttributeError, RuntimeError):
        found = None
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)] + ["/usr/local/cuda"]
    candidates = [found, shutil.which("nvdisasm"), *(os.path.join(home, "bin", "nvdisasm") for home in homes)]
    return next((path for path in candidates if path and os.access(path, os.X_OK)), None)


def instructions(code: bytes) -> dict[str, list[str]]:
    """Instructions ("LDSM.16.M88.4 R24, [R86]") without their predicates, in order, of every kernel of a cubin, by symbol. NOPs (padding) are left
    out.

    UnsupportedError with the reason when nvdisasm is not there or cannot read the cubin (one older than the compiler, say).
    """
    tool = find_nvdisasm()
    if tool is None:
        raise UnsupportedError("nvdisasm was not found; pip install nvidia-cuda-nvdisasm, or put a CUDA toolkit on PATH")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        done = subprocess.run([tool, "-c", file.name], capture_output=True, text=True)
    if done.returncode:
        raise UnsupportedError(f"{tool} cannot read this cubin: {done.stderr.strip()[:300]}")
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for line in done.stdout.splitlines():
        section = _SECTION.match(line)
        instruction = _INSTRUCTION.match(line)
        if section:
            current = found.setdefault(section.group(1), [])
        elif instruction and opcode(instruction.group(1)) != "NOP":
            current.append(instruction.group(1).strip())
    return found


def opcode(instruction: str) -> str:
    """Its opcode with modifiers: "LDSM.16.M88.4"."""
    return instruction.split(maxsplit=1)[0]


def opcodes(code: bytes) -> dict[str, list[str]]:
    """The opcodes of `instructions`."""
    return {symbol: [opcode(one) for one in listing] for symbol, listing in instructions(code).items()}
