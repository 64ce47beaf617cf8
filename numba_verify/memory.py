"""Memory a plan owns: bytes on the host or on a GPU, with one face."""

from __future__ import annotations

import numpy as np

from .gpu import driver

#: Every sub-array of a workspace starts on such a boundary: 16 B vector accesses and whole 128 B lines both fit.
ALIGNMENT = 256


class Workspace:
    """`nbytes` of memory on `device` (None = host). `address` is 256-byte aligned; `host` is the uint8 array on the host, else None."""

    def __init__(self, nbytes: int, device: int | None):
        self.nbytes, self.device = nbytes, device
        if device is None:
            raw = np.empty(nbytes + ALIGNMENT, np.uint8)
            start = -raw.ctypes.data % ALIGNMENT
            self.host: np.ndarray | None = raw[start:start + nbytes]
            self.address = self.host.ctypes.data
        else:
            self.host = None
            self._buffer = driver.DeviceBuffer(nbytes, device)
            self.address = self._buffer.address


def align(nbytes: int) -> int:
    """`nbytes` rounded up to ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
