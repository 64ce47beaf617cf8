"""The warp's matrix instructions on the CPU: what the 32 lanes bring becomes matrices, and back."""
import struct

import numpy

from .simulator_memory import SHARED_BASE

#: One lane's operands of an mma: a0..a3, b0, b1 as words, c0..c3 as doubles (they hold a Python float exactly).
OPERANDS = struct.Struct("=6I4d")
_OPERAND_TYPE = numpy.dtype([("words", "<u4", 6), ("c", "<f8", 4)])


def _bf16(bits):
    return (bits.astype(numpy.uint32) << 16).view(numpy.float32).astype(numpy.float64)


def _f16(bits):
    return bits.view(numpy.float16).astype(numpy.float64)


#: dtype -> 16-bit patterns as doubles
WIDEN = {"bfloat16": _bf16, "float16": _f16}


def _multiply(values, widen):
    """32 packed operands -> 32 lists of 4 results. Sums in float64, rounded to float32 once."""
    lanes = numpy.frombuffer(b"".join(values), _OPERAND_TYPE)
    words, c = lanes["words"], lanes["c"]
    # Lane = 4 g + t. Word a[2 k_half + row_half] holds A[g + 8 row_half, 2t + 8 k_half] and the element after it.
    a = words[:, :4].reshape(8, 4, 2, 2).transpose(3, 0, 2, 1).reshape(16, 8).view(numpy.uint16)
    # Word b[k_half] holds B[2t + 8 k_half, g] and the element below it: rows of B transposed.
    b = numpy.ascontiguousarray(words[:, 4:].reshape(8, 4, 2).transpose(0, 2, 1)).reshape(8, 8).view(numpy.uint16)
    # Infinities and NaN are data here, not mistakes; the kernel sees them in the result.
    with numpy.errstate(all="ignore"):
        product = widen(a) @ widen(b).T
        # C[g + 8 row_half, 2t + i] is c[2 row_half + i].
        product = product.reshape(2, 8, 4, 2).transpose(1, 2, 0, 3).reshape(32, 4)
        return (product + c).astype(numpy.float32).tolist()


def mma_bf16(values, block):
    return _multiply(values, _bf16)


def mma_f16(values, block):
    return _multiply(values, _f16)


def _rows(values, block):
    """The 32 rows that the lanes' shared addresses name: [32, 4] words, four matrices of eight rows."""
    starts = (numpy.array(values) - SHARED_BASE) >> 2
    words = numpy.frombuffer(block.shared.bytes, numpy.uint32)
    return words[starts[:, None] + numpy.arange(4)]


def ldmatrix(values, block):
    """32 shared addresses -> 32 lists of 4 words: word l % 4 of row l // 4 of each matrix."""
    return _rows(values, block).reshape(4, 32).T.tolist()


def ldmatrix_trans(values, block):
    """32 shared addresses -> 32 lists of 4 words: elements 2 (l % 4) and the next of column l // 4 of each matrix."""
    elements = _rows(values, block).view(numpy.uint16).reshape(4, 8, 8)
    columns = numpy.ascontiguousarray(elements.transpose(0, 2, 1))
    return columns.view(numpy.uint32).reshape(4, 32).T.tolist()
