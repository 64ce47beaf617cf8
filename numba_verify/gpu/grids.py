"""The part of the device vocabulary that orders a grid and the one before it in the stream. sm_90 and later.

Names of `ptx`, which imports them. A grid launched with `KernelSource.overlaps` (programmatic dependent launch) may start as soon as every
block of the grid before it has said `griddepcontrol_launch_dependents` or ended. Until it has come back from `griddepcontrol_wait` it knows
nothing of that grid's work, only of what was complete when that grid started. Every thread has to wait, also one with nothing to do: the
grid after this one starts when this one has ended, and takes all before it for ended too.
"""

from .intrinsics import instruction


@instruction("griddepcontrol.launch_dependents;", memory=True)
def griddepcontrol_launch_dependents() -> None:
    """"griddepcontrol", .launch_dependents: as far as this block is concerned the next grid may start, where there is room for its blocks."""


@instruction("griddepcontrol.wait;", memory=True)
def griddepcontrol_wait() -> None:
    """"griddepcontrol", .wait: returns when the grid before this one has ended and what it wrote is visible; at once after any other launch."""
