"""The command line: `python -m numba_verify <command>`."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence

from .commands import bench, cache, check, demo, env, show_tree
from .commands.console import one_line

COMMANDS = {"env": env, "demo": demo, "check": check, "show-tree": show_tree, "bench": bench, "cache": cache}
#: Exit status of a call that was refused or could not run; 1 is a check that failed.
REFUSED = 2


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    top = argparse.ArgumentParser(prog="python -m numba_verify", description="Tree-verify MLA attention: look, try, check and measure.")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--traceback", action="store_true", help="show where an error came from")
    commands = top.add_subparsers(dest="command", metavar="command", required=True)
    for name, module in COMMANDS.items():
        summary = module.__doc__.splitlines()[0]
        module.add_arguments(commands.add_parser(name, parents=[shared], help=summary, description=summary))
    return top


def parents_are_no_option(argument: str) -> str:
    """`-1,0,0,1` as argparse takes it: a list of parents looks like an option, but not with a blank before it."""
    return f" {argument}" if re.match(r"-\d", argument) else argument


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. Errors of the library are one line on stderr."""
    given = sys.argv[1:] if arguments is None else arguments
    chosen = parser().parse_args([parents_are_no_option(argument) for argument in given])
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that has no box-drawing characters shows question marks, not an error
            stream.reconfigure(errors="replace")
    try:
        return COMMANDS[chosen.command].run(chosen)
    except BrokenPipeError:  # `| head` has seen enough; what is still buffered must not fail again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except (ValueError, TypeError, LookupError, RuntimeError, OSError) as error:
        if chosen.traceback:
            raise
        sys.stdout.flush()
        print(f"numba_verify {chosen.command}: {one_line(error, 2000)}", file=sys.stderr)
        return REFUSED


if __name__ == "__main__":
    sys.exit(main())
