"""Lines and tables of the command line."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

#: Steps shorter than this are shown without their time.
SHORT_SECONDS = 1.0
#: While a step goes on, a dot is printed each time.
DOT_SECONDS = 2.0
#: What is said while runners are looked for: this may take long the first time.
MAKING_READY = "making ready (the first time cuda_ref is built, with nvcc or g++)"


def say(text: str = "") -> None:
    """One line, seen at once also through a pipe."""
    print(text, flush=True)


def duration(seconds: float) -> str:
    """" (3.1 s)" for a step somebody had to wait for, else nothing."""
    return f" ({seconds:.1f} s)" if seconds >= SHORT_SECONDS else ""


@contextmanager
def step(text: str) -> Iterator[None]:
    """Says what is being done before it is done, and on the same line that it is."""
    with begun(text) as end:
        yield
        end("done")


@contextmanager
def begun(text: str) -> Iterator[Callable[[str], None]]:
    """Prints `text` before the body and dots while it lasts; the body ends the line with what came out. A line is never left open."""
    print(f"{text} ...", end="", flush=True)
    begin, over = time.perf_counter(), threading.Event()

    def tick() -> None:
        with suppress(BrokenPipeError):  # nobody reads on: the main thread meets that as well, and ends the command
            while not over.wait(DOT_SECONDS):
                print(".", end="", flush=True)

    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()

    def end(outcome: str) -> None:
        over.set()
        ticker.join()
        say(f" {outcome}{duration(time.perf_counter() - begin)}")

    try:
        yield end
    finally:
        if not over.is_set():
            end("failed")


def table(headers: Sequence[str], rows: Sequence[Sequence[object]], right: Sequence[str] = ()) -> str:
    """Columns as wide as their widest entry; those named in `right` (numbers) end at the same place."""
    cells = [list(headers), *[[str(cell) for cell in row] for row in rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headers))]
    lines = []
    for row in cells:
        fields = [cell.rjust(width) if header in right else cell.ljust(width)
                  for cell, width, header in zip(row, widths, headers, strict=True)]
        lines.append("  ".join(fields).rstrip())
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def one_line(error: BaseException, limit: int = 400) -> str:
    """The text of an error without line breaks; a compiler's pages are cut."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else f"{text[:limit]} ..."


def count(number: int, noun: str) -> str:
    """"1 check", "2 checks"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
