"""Texts of the simulator's error reports: who waits where, and what a failed line tried to access."""
import ast
import linecache
import sys
import traceback

from .simulator_memory import MemoryFault


def _is_own(frame):
    """Is this a frame of the simulator itself, and not of a kernel?"""
    return frame.f_globals.get("__name__", "").startswith(f"{__package__}.simulator")


def _user_line(frame):
    """(what, where): the vocabulary function that `frame` is in, and the kernel lines that called it, innermost first."""
    what = "running"
    while frame is not None and _is_own(frame):
        what = frame.f_code.co_name
        frame = frame.f_back
    places = []
    while frame is not None and not _is_own(frame):
        places.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        frame = frame.f_back
    return what, ", called from ".join(places)


def _threads(numbers):
    """"threads 0-31, 40": sorted thread numbers with runs joined."""
    runs = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    word = "thread" if len(numbers) == 1 else "threads"
    return f"{word} " + ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _awaited(block, thread):
    """Which named barrier or mbarrier a suspended thread waits for, and how far that is; nothing for bar_sync and collectives."""
    for barrier in (*block.named.values(), *block.mbarriers.values()):
        if thread in barrier.waiting:
            return f" ({barrier})"
    return ""


def describe_waiting(block, waiting, headline, arriving=None):
    """A report of every group of threads that waits, of the one that just came elsewhere, and of those that have left.

    waiting: suspended threads; arriving: the current thread, if it is the one that cannot join them.
    """
    groups = {}
    for thread in waiting:
        groups.setdefault((*_user_line(thread.gr_frame), _awaited(block, thread)), []).append(thread.tid)
    if arriving is not None:
        groups.setdefault((*_user_line(sys._getframe(1)), ""), []).append(arriving.tid)
    lines = [f"block {block.index}: {headline}"]
    for (what, where, awaited), threads in sorted(groups.items(), key=lambda item: min(item[1])):
        lines.append(f"  {_threads(threads)} in {what} at {where}{awaited}")
    left = [thread.tid for thread in block.threads if thread.returned]
    if left:
        lines.append(f"  {_threads(left)} returned")
    return "\n".join(lines)


def describe_failure(thread, error):
    """A report of an exception in a kernel, with pointer and index where it was an access out of bounds."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    kernel_frames = [(i, frame) for i, frame in enumerate(frames) if not _is_own(frame)]
    where, access = "unknown place", None
    if kernel_frames:
        index, frame = kernel_frames[-1]
        entry = traceback.extract_tb(error.__traceback__)[index]
        where = f"{entry.filename}:{entry.lineno}"
        access = _access(frame, entry) if isinstance(error, (IndexError, ValueError)) else None
    plain = str(error) if isinstance(error, MemoryFault) else f"{type(error).__name__}: {error}"
    text = plain if access is None else access
    return f"block {thread.block.index}, thread {thread.tid}, at {where}: {text}"


def _access(frame, entry):
    """What the failed `p[i]` in a traceback entry was, by evaluating its two halves again; None if it was none."""
    if getattr(entry, "colno", None) is None:
        return None  # Python 3.10 does not know where in its line an expression stands
    source = linecache.getline(entry.filename, entry.lineno).encode()[entry.colno:entry.end_colno].decode()
    try:
        node = ast.parse(source.strip(), mode="eval").body
        if not isinstance(node, ast.Subscript):
            return None
        pointer, index = (eval(compile(ast.Expression(half), "<kernel>", "eval"), frame.f_globals, frame.f_locals)
                          for half in (node.value, node.slice))
        length = len(pointer)
    except Exception:
        # The report is a courtesy: an expression that cannot be read again must not hide the error itself.
        return None
    name, asked = ast.unparse(node.value), ast.unparse(node.slice)
    if isinstance(index, int) and 0 <= index < length:
        return f"{name}[{asked}] with index {index}: the value does not fit the element type (mask it with uint32(...))"
    return f"{name}[{asked}] out of bounds: index {index}, but {name} has {length} elements"
