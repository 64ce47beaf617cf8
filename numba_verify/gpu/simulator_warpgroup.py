"""`warpgroup`, simulated: products of a warpgroup that go on by themselves until a wait.

A product happens as late as it may: in the wait that ends its group, with what is in shared memory then. Its accumulators hold NaN from its
issue until a wait takes them as its argument; a wait that does not take them ends the reads of shared memory only.
"""
import operator
import sys

import numpy
from greenlet import getcurrent

from . import operands
from .simulator import Together, collective
from .simulator_matrix import WIDEN
from .simulator_memory import MemoryFault
from .simulator_operands import chunks, decode, elements
from .simulator_proxies import WARPGROUP

_frame = sys._getframe
#: What an accumulator holds while products go on: a NaN that is told from all others by its identity.
IN_FLIGHT = float("nan")
ROWS = 64
#: Accumulators that a warpgroup keeps in mind while no product uses them.
_REMEMBERED = 16


class Accumulators:
    """A part of one local array in all threads of a warpgroup, `count` elements from `first` on, as products know it.

    value: the matrix that the ended products have made, None if there was none since the last wait that took it; last: number of the last
    product; line: where it was issued, None while the part is idle; seen: what the arrays held at the last fence, None if there was none
    since that wait.
    """

    __slots__ = ("arrays", "first", "end", "value", "last", "line", "seen")

    def __init__(self, arrays, first, count):
        self.arrays = arrays
        self.first = first
        self.end = first + count
        self.value = self.line = None
        self.last = 0
        self.seen = self.held()

    @property
    def busy(self):
        return self.line is not None

    def held(self):
        """What the threads have in it now."""
        return [array[self.first:self.end] for array in self.arrays]

    def poison(self):
        for array in self.arrays:
            array[self.first:self.end] = [IN_FLIGHT] * (self.end - self.first)

    def take(self):
        """It as a matrix [64, n], in the order of the fragments (see `warpgroup.wgmma_ss`)."""
        held = numpy.array(self.held(), numpy.float64)
        return held.reshape(4, 8, 4, -1, 2, 2).transpose(0, 4, 1, 3, 2, 5).reshape(ROWS, -1)

    def give(self):
        """The matrix back to the threads."""
        rows = self.value.reshape(4, 2, 8, -1, 4, 2).transpose(0, 2, 4, 3, 1, 5).reshape(WARPGROUP, -1)
        for array, row in zip(self.arrays, rows.tolist(), strict=True):
            array[self.first:self.end] = row
        self.value = self.line = self.seen = None

    def check_untouched(self):
        for thread, held in enumerate(self.held()):
            if held.count(IN_FLIGHT) != len(held):
                raise MemoryFault(f"the accumulators of the wgmma at {self.line} were written in thread {thread} of the warpgroup before a "
                                  "wgmma_wait that takes them")


class Product:
    """A wgmma on its way: D = A B (+ D)."""

    __slots__ = ("acc", "a", "b", "accumulate")

    def __init__(self, acc, a, b, accumulate):
        self.acc = acc
        self.a = a
        self.b = b
        self.accumulate = accumulate

    def end(self):
        acc = self.acc
        # Infinities and NaN are data here, not mistakes; the kernel sees them in the result.
        with numpy.errstate(all="ignore"):
            product = self.a() @ self.b().T
            if self.accumulate:
                product += acc.value
            acc.value = product.astype(numpy.float32)


class Warpgroup(Together):
    """Four warps and their products."""

    def __init__(self, block, number):
        super().__init__("threads of a warpgroup", WARPGROUP)
        self.block = block
        self.number = number
        self.frame = None  # where the thread is that came last to an instruction
        self.fences = 0
        self.issued = self.ended = 0  # numbers of products
        self.open = []
        self.groups = []
        self.accumulators = []

    def fence(self):
        self.fences += 1
        for acc in self.accumulators:
            if not acc.busy:
                acc.seen = acc.held()

    def find(self, arrays, first, count):
        """The accumulators that are these elements of these arrays."""
        end = first + count
        if len(arrays[0]) < end:
            raise MemoryFault(f"wgmma: {2 * count} columns are {count} accumulators a thread, from {first} on, and the array has {len(arrays[0])}")
        for acc in self.parts_of(arrays):
            known = (acc.first, acc.end) == (first, end) and all(map(operator.is_, acc.arrays, arrays))
            if known:
                return acc
            if acc.busy and first < acc.end and acc.first < end:
                raise MemoryFault(f"wgmma: its accumulators, {first} to {end - 1} of their arrays, belong in part to the wgmma at {acc.line}, which "
                                  f"is on its way with {acc.first} to {acc.end - 1}")
        acc = Accumulators(arrays, first, count)
        idle = [old for old in self.accumulators if not old.busy]
        self.accumulators = [old for old in self.accumulators if old.busy] + idle[-_REMEMBERED:] + [acc]
        return acc

    def parts_of(self, arrays):
        return [acc for acc in self.accumulators if acc.arrays[0] is arrays[0]]

    def issue(self, acc, a, b, accumulate, numbers):
        """A product into `acc`. a, b: functions that read the operands, when it ends; numbers: chunks of shared memory they read."""
        if acc.busy:
            acc.check_untouched()
        else:
            if not self.fences or acc.seen is None:
                raise MemoryFault("wgmma: no wgmma_fence " + ("since the wait that took its accumulators" if self.fences else "before the first one"))
            if acc.seen != acc.held():
                raise MemoryFault("wgmma: its accumulators were written after the last wgmma_fence")
            acc.value = acc.take() if accumulate else None
            acc.poison()
        self.issued += 1
        acc.last, acc.line = self.issued, f"{self.frame.f_code.co_filename}:{self.frame.f_lineno}"
        if self.block.races is not None:
            self.block.races.issue_product(self.block, self.number, self.issued, numbers, self.frame)
        self.open.append(Product(acc, a, b, accumulate))

    def commit(self):
        self.groups.append(self.open)
        self.open = []

    def wait(self, newest):
        """End all groups but the `newest`."""
        done = max(0, len(self.groups) - newest)
        products = [product for group in self.groups[:done] for product in group]
        del self.groups[:done]
        for acc in {id(product.acc): product.acc for product in products}.values():
            acc.check_untouched()
        for product in products:
            product.end()
        self.ended += len(products)
        if self.block.races is not None:
            self.block.races.complete_products(self.number, self.ended)

    def hand_back(self, arrays):
        """What the ended products made goes to `arrays`, the argument of a wait."""
        for acc in self.parts_of(arrays):
            if acc.busy and acc.last > self.ended:
                raise MemoryFault(f"wgmma_wait: it takes the accumulators of the wgmma at {acc.line}, whose group it does not wait for")
            if acc.busy:
                acc.give()


def _together(operation, value, frame):
    """The current thread brings `value` to an instruction of its warpgroup, called in `frame`; the last runs operation(warpgroup, values of all)."""
    me = getcurrent()
    block, number = me.block, me.tid // WARPGROUP
    group = block.warpgroups.get(number)
    if group is None:
        if WARPGROUP * (number + 1) > len(block.threads):
            raise MemoryFault(f"threads {WARPGROUP * number} and up of the block are fewer than the {WARPGROUP} of a warpgroup")
        group = block.warpgroups[number] = Warpgroup(block, number)
    group.frame = frame
    collective(me, operation, value, frame, group)


def _of_group(function):
    """function(warpgroup, values) as an operation of `collective`."""
    return lambda values, block: function(block.warpgroups[getcurrent().tid // WARPGROUP], values)


# --- order ------------------------------------------------------------------------------------------------------------

_fence = _of_group(lambda group, values: group.fence())
_commit = _of_group(lambda group, values: group.commit())


def wgmma_fence():
    _together(_fence, None, _frame(1))


def wgmma_commit():
    _together(_commit, None, _frame(1))


def wgmma_wait(newest, count):
    operands.check_wgmma_wait(newest, count)

    @_of_group
    def wait(group, values):
        group.wait(newest)
        if count:
            group.hand_back(values)

    def wgmma_wait():
        _together(wait, None, _frame(1))

    def wgmma_wait_for(acc):
        if len(acc) != count:
            raise MemoryFault(f"wgmma_wait: expected an array of {count}, got one of {len(acc)}")
        _together(wait, acc, _frame(1))

    return wgmma_wait_for if count else wgmma_wait


def fence_proxy_async():
    me = getcurrent()
    if me.block.races is not None:
        me.block.races.fence_proxy(me)


# --- operands in shared memory ------------------------------------------------------------------------------------------


def wgmma_descriptor(leading, stride, swizzle):
    operands.check_descriptor(leading, stride, swizzle)
    bits = operands.descriptor_bits(leading, stride, swizzle)

    def descriptor(address):
        if address & 15 or not 0 <= address >> 4 <= operands.DESCRIPTOR_FIELD:
            raise MemoryFault(f"wgmma_descriptor: shared address {address} is no multiple of 16 bytes, or does not fit 18 bits")
        return bits | address >> 4

    return descriptor


# --- products ---------------------------------------------------------------------------------------------------------


def _agreed(values, names):
    """The operands that all threads have to agree on, the first item of what each brings."""
    first = values[0][0]
    for thread, (mine, *_) in enumerate(values):
        if mine != first:
            name = next(name for name, a, b in zip(names, first, mine, strict=True) if a != b)
            raise MemoryFault(f"wgmma: {name} differs between threads 0 and {thread} of the warpgroup")
    return first


def _operand(group, bits, extent, transposed, dtype, what):
    """An operand in shared memory: the chunks it lies in, and a function that reads it as a matrix with K along its columns."""
    shared = group.block.shared
    numbers = chunks(decode(bits, what), extent, transposed, shared, what)
    return numbers.ravel(), lambda: WIDEN[dtype](elements(numbers, transposed, shared))


def wgmma_ss(n, dtype, transpose_b, first=0):
    operands.check_wgmma(n, dtype, transpose_b, first)

    @_of_group
    def issue(group, values):
        a_bits, b_bits, accumulate = _agreed(values, ("descriptor of A", "descriptor of B", "accumulate"))
        a_chunks, a = _operand(group, a_bits, ROWS, False, dtype, "wgmma, A")
        b_chunks, b = _operand(group, b_bits, n, transpose_b, dtype, "wgmma, B")
        group.issue(group.find([acc for _, acc in values], first, n // 2), a, b, accumulate, numpy.concatenate([a_chunks, b_chunks]))

    def wgmma_ss(acc, a_descriptor, b_descriptor, accumulate):
        _together(issue, ((a_descriptor, b_descriptor, accumulate), acc), _frame(1))

    return wgmma_ss


def wgmma_rs(n, dtype, transpose_b):
    operands.check_wgmma(n, dtype, transpose_b, 0)

    @_of_group
    def issue(group, values):
        b_bits, accumulate = _agreed(values, ("descriptor of B", "accumulate"))
        b_chunks, b = _operand(group, b_bits, n, transpose_b, dtype, "wgmma, B")
        # Lane 4 g + t of warp w holds in word 2 k_half + row_half two elements of row 16 w + 8 row_half + g, from column 8 k_half + 2 t on.
        words = numpy.array([words for _, _, words in values], numpy.uint32).reshape(4, 8, 4, 2, 2)
        a = WIDEN[dtype](numpy.ascontiguousarray(words.transpose(0, 4, 1, 3, 2)).reshape(ROWS, -1).view(numpy.uint16))
        group.issue(group.find([acc for _, acc, _ in values], 0, n // 2), lambda: a, b, accumulate, b_chunks)

    def wgmma_rs(acc, a0, a1, a2, a3, b_descriptor, accumulate):
        _together(issue, ((b_descriptor, accumulate), acc, (a0, a1, a2, a3)), _frame(1))

    return wgmma_rs


# --- registers --------------------------------------------------------------------------------------------------------


def set_max_registers(count, increase):
    operands.check_register_count(count)
    return lambda: None
