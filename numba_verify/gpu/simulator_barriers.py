"""Named barriers, mbarriers and asynchronous copies of a simulated block.

A copy's target holds poison from the start of the copy until it lands. It lands as late as it may: when the thread waits for the copy's
group, or when the phase of an mbarrier that the thread announced it to is complete.
"""

from greenlet import getcurrent

from .simulator_memory import SHARED_BASE, MemoryFault, SimulatorError, u64
from .simulator_report import describe_waiting

#: What the 8 bytes of an mbarrier hold, to notice a kernel that writes over it: "mbarrier" in ASCII.
MAGIC = int.from_bytes(b"mbarrier", "little")
#: The largest count of an mbarrier (PTX: "mbarrier object", valid range of the arrival counts).
MAX_COUNT = (1 << 20) - 1


# --- named barriers -------------------------------------------------------------------------------------------------------


class NamedBarrier:
    """The phase in progress of one barrier number of a block."""

    __slots__ = ("number", "threads", "arrived", "waiting", "places", "clock")

    def __init__(self, number):
        self.number = number
        self.threads = 0
        self.arrived = set()
        self.waiting = []
        # Where the first lane of each warp came to it; bar is .aligned, so the other lanes come to the same place.
        self.places = {}
        self.clock = None  # the race tracker's

    def __str__(self):
        return f"named barrier {self.number}: {len(self.arrived)} of {self.threads} threads have come"


def arrive_named(number, threads, wait, frame):
    """The current thread comes to barrier `number` of its block, by sync (wait) or arrive, called in `frame`."""
    me = getcurrent()
    block = me.block
    barrier = block.named.get(number)
    if barrier is None:
        if not 1 <= number <= 15:
            raise MemoryFault(f"expected the number of a named barrier from 1 to 15, got {number}")
        barrier = block.named[number] = NamedBarrier(number)
    arrived = barrier.arrived
    if not arrived:
        barrier.threads = threads
    elif threads != barrier.threads:
        raise SimulatorError(describe_waiting(block, barrier.waiting, f"{barrier}, and thread {me.tid} says {threads}", me))
    elif me in arrived:
        raise SimulatorError(describe_waiting(block, barrier.waiting, f"{barrier}, and thread {me.tid} comes twice in one phase", me))
    place = (frame.f_code, frame.f_lasti)
    if barrier.places.setdefault(me.warp, place) != place:
        raise SimulatorError(describe_waiting(block, barrier.waiting, f"{barrier}, and lanes of a warp come at two different places", me))
    arrived.add(me)
    races = block.races
    if races is not None:
        races.release_named(me, barrier)
    if len(arrived) == threads:
        if races is not None:
            races.complete_named(barrier, [*barrier.waiting, me] if wait else barrier.waiting)
        block.ready.extend(barrier.waiting)
        barrier.waiting.clear()
        barrier.places.clear()
        arrived.clear()
    elif wait:
        barrier.waiting.append(me)
        block.wait()


# --- mbarriers ------------------------------------------------------------------------------------------------------------


class MBarrier:
    """An mbarrier. Phases are numbered from 0; a phase is complete when `count` arrivals have come in it."""

    __slots__ = ("offset", "count", "phase", "arrivals", "waiting", "copies", "clock")

    def __init__(self, offset, count):
        self.offset = offset
        self.count = count
        self.phase = 0
        self.arrivals = 0
        self.waiting = []
        # Batches of copies that land when the phase in progress is complete.
        self.copies = []
        self.clock = None  # the race tracker's

    def __str__(self):
        return f"mbarrier at byte {self.offset}: phase {self.phase} has {self.arrivals} of {self.count} arrivals"

    def arrive(self, block, frame, count=1):
        if not 1 <= count <= self.count - self.arrivals:
            raise MemoryFault(f"{self}, and {count} more come at once; a count is 1 or more and ends the phase at most")
        self.arrivals += count
        if self.arrivals < self.count:
            return
        self.phase += 1
        self.arrivals = 0
        for batch in self.copies:
            batch.land(block, frame)
        if block.races is not None:
            block.races.complete_mbarrier(self)
        self.copies.clear()
        block.ready.extend(self.waiting)
        self.waiting.clear()

    def wait(self, me):
        """The current thread `me` waits for the phase in progress."""
        phase = self.phase
        self.waiting.append(me)
        me.block.wait()
        if self.phase != phase + 1:
            raise SimulatorError(f"block {me.block.index}: {self}, but thread {me.tid} still waits for phase {phase}: the phase after it was "
                                 "completed without this thread, which on a GPU may miss both")


def init_mbarrier(me, address, count):
    block = me.block
    offset = block.shared.check(address, 8, "mbarrier_init")
    if address in block.mbarriers:
        raise MemoryFault(f"mbarrier_init: {block.mbarriers[address]}, and is made a second time")
    if not 1 <= count <= MAX_COUNT:
        raise MemoryFault(f"mbarrier_init: expected a count from 1 to {MAX_COUNT}, got {count}")
    block.shared.views[u64][offset >> 3] = MAGIC
    barrier = block.mbarriers[address] = MBarrier(offset, count)
    return barrier


def find_mbarrier(block, address, what):
    """The mbarrier at a shared address, intact."""
    barrier = block.mbarriers.get(address)
    if barrier is None:
        block.shared.check(address, 8, what)
        raise MemoryFault(f"{what}: there is no mbarrier at shared address {address} (byte {address - SHARED_BASE}); mbarrier_init comes first")
    if block.shared.views[u64][barrier.offset >> 3] != MAGIC:
        raise MemoryFault(f"{what}: the mbarrier at byte {barrier.offset} was overwritten")
    return barrier


# --- asynchronous copies ----------------------------------------------------------------------------------------------------


class CopyBatch(list):
    """Copies (offset of the target in shared memory, its 16 bytes) of one thread that land together; empty once they have."""

    __slots__ = ("tid", "landed")

    def __init__(self, tid, landed=0):
        super().__init__()
        self.tid = tid
        # The race tracker's time of the last landing of this thread that the batch stands for.
        self.landed = landed

    def land(self, block, frame):
        if not self:
            return
        for target, data in self:
            block.shared.bytes[target:target + 16] = data
        if block.races is not None:
            block.races.land(self, frame)
        self.clear()


class Copies:
    """The asynchronous copies of one thread."""

    __slots__ = ("tid", "open", "sealed", "groups")

    def __init__(self, tid):
        self.tid = tid
        # The batch that new copies join; `sealed` are those before it that were announced to an mbarrier; neither is in a group yet.
        self.open = CopyBatch(tid)
        self.sealed = []
        # Committed groups, oldest first: lists of batches.
        self.groups = []

    def commit(self):
        self.groups.append([*self.sealed, self.open])
        self.open = CopyBatch(self.tid)
        self.sealed = []

    def wait(self, newest, block, frame):
        """Land all groups but the `newest`; returns their batches."""
        done = max(0, len(self.groups) - newest)
        batches = [batch for group in self.groups[:done] for batch in group]
        del self.groups[:done]
        for batch in batches:
            batch.land(block, frame)
        return batches

    def announce(self):
        """Every batch that has not landed; copies that begin from now on are not part of them."""
        sealed, landed = [], 0
        for batch in (*self.sealed, self.open):
            if batch:
                sealed.append(batch)
            else:
                landed = max(landed, batch.landed)
        self.sealed = sealed
        self.open = CopyBatch(self.tid, landed)
        return [batch for group in self.groups for batch in group if batch] + sealed
