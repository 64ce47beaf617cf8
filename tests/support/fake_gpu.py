"""A GPU that runs nothing and keeps what it was asked to launch, as the driver would read it: for tests of what happens on the host.

Arrays are descriptions with addresses and no memory. The ordinal of their device is the address divided by DEVICE_BYTES.
"""

from __future__ import annotations

import ctypes
import sys
import time
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from cuda.bindings import driver as bindings

from numba_verify import arrays, memory
from numba_verify.gpu import driver, launch

DEVICE_BYTES = 1 << 40
_TYPESTR = {"bfloat16": "<V2", "float16": "<f2", "float32": "<f4", "int32": "<i4", "int64": "<i8", "uint32": "<u4", "bool": "|b1"}


class Launched(NamedTuple):
    """One launch: the kernel, its grid and stream, and its arguments as numbers."""

    kernel: str
    grid: tuple[int, int]
    stream: int
    arguments: tuple[float, ...]


class Exported:
    """An array with the CUDA array interface. Strides are in elements, as torch has them."""

    def __init__(self, address: int, shape: tuple[int, ...], dtype: str, strides: tuple[int, ...] | None = None, read_only: bool = False,
                 mask: Any = None):
        itemsize = arrays.ITEMSIZE[dtype]
        self.__cuda_array_interface__ = {"version": 3, "shape": shape, "typestr": _TYPESTR[dtype], "data": (address, read_only), "mask": mask,
                                         "strides": strides and tuple(s * itemsize for s in strides)}


class Tensor:
    """What the package asks a torch tensor."""

    def __init__(self, address: int, shape: tuple[int, ...], dtype: str, strides: tuple[int, ...] | None = None):
        self._address, self._strides, self.shape, self.is_cuda = address, strides or arrays.contiguous_strides(shape), shape, True
        self.dtype, self.device = getattr(sys.modules["torch"], dtype), ("cuda", address // DEVICE_BYTES)

    def data_ptr(self) -> int:
        return self._address

    def stride(self) -> tuple[int, ...]:
        return self._strides

    def get_device(self) -> int:
        return self.device[1]


class FakeGpu:
    """The driver's functions that `plan`, `update` and `run` call, and `launched`, what came of them.

    A launch takes `launch_seconds` before it reads its arguments, in which other threads run.
    """

    def __init__(self, patch: pytest.MonkeyPatch):
        self.launched: list[Launched] = []
        self.launch_seconds = 0.0
        self._next, self._sources = DEVICE_BYTES // 2, {}
        api = SimpleNamespace(**{name: value for name, value in vars(bindings).items() if name.startswith("CUlaunch")},
                              cuLaunchKernel=self._launch, cuLaunchKernelEx=self._launch_overlapping)
        info = driver.DeviceInfo(0, "Fake GPU", (9, 0), 4, 232_448, 233_472, 1 << 20)
        for name, value in {"device_info": lambda ordinal: info, "context": lambda ordinal: nullcontext(), "_driver": lambda: api,
                            "unavailable": lambda: "", "is_capturing": lambda stream: False, "StagedUpload": self._staged_upload,
                            "ordinal_of_pointer": lambda address: address // DEVICE_BYTES}.items():
            patch.setattr(driver, name, value)
        patch.setattr(memory.driver, "DeviceBuffer", self._buffer)
        patch.setattr(launch, "load", self._load)
        torch = ModuleType("torch")
        vars(torch).update({name: f"torch.{name}" for name in arrays.ITEMSIZE}, Tensor=Tensor, stream=0,
                           _C=SimpleNamespace(_cuda_getCurrentRawStream=lambda ordinal: torch.stream))
        patch.setitem(sys.modules, "torch", torch)
        patch.setattr(arrays, "_NAME_OF_TORCH", {})
        self.torch = torch

    def array(self, kind: type, shape: tuple[int, ...], dtype: str, address: int | None = None, **layout: Any) -> Any:
        """`kind` is Exported or Tensor; the address is a new one when it is not given."""
        return kind(self.place(int(np.prod(shape)) * 8) if address is None else address, shape, dtype, **layout)

    def place(self, nbytes: int) -> int:
        """An address for so many bytes on GPU 0."""
        address, self._next = self._next, self._next + nbytes + -nbytes % 256 + 256
        return address

    def take(self) -> list[Launched]:
        """What was launched since the last time."""
        taken, self.launched = self.launched, []
        return taken

    def _buffer(self, nbytes: int, ordinal: int) -> SimpleNamespace:
        return SimpleNamespace(nbytes=nbytes, ordinal=ordinal, address=self.place(nbytes))

    def _staged_upload(self, nbytes: int, ordinal: int) -> SimpleNamespace:
        return SimpleNamespace(buffer=self._buffer(nbytes, ordinal), copy=lambda array, stream: None)

    def _load(self, source: Any, ordinal: int) -> SimpleNamespace:
        self._sources[source.name] = source
        return SimpleNamespace(source=source, function=source.name)

    def _launch(self, function, x, y, z, threads, _, __, shared_bytes, stream, parameters, extra) -> tuple[int]:
        assert not self._sources[function].overlaps
        return self._keep(function, (x, y, z), (threads, 1, 1), shared_bytes, stream, parameters, extra)

    def _launch_overlapping(self, config, function, parameters, extra) -> tuple[int]:
        attribute, = config.attrs
        assert self._sources[function].overlaps and config.numAttrs == 1
        assert attribute.id == bindings.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        assert attribute.value.programmaticStreamSerializationAllowed == 1
        grid, block = ([getattr(config, f"{what}Dim{axis}") for axis in "XYZ"] for what in ("grid", "block"))
        return self._keep(function, tuple(grid), tuple(block), config.sharedMemBytes, int(config.hStream), parameters, extra)

    def _keep(self, function, grid, block, shared_bytes, stream, parameters, extra) -> tuple[int]:
        source = self._sources[function]
        assert (grid[2], block, shared_bytes, extra) == (1, (source.threads, 1, 1), source.shared_bytes, 0)
        if self.launch_seconds:
            time.sleep(self.launch_seconds)
        types = {"address": ctypes.c_uint64, "i64": ctypes.c_int64, "f32": ctypes.c_float}
        pointers = (ctypes.c_void_p * len(source.signature)).from_address(parameters)
        arguments = tuple(types[kind].from_address(pointer).value for kind, pointer in zip(source.signature, pointers, strict=True))
        self.launched.append(Launched(function, grid[:2], stream, arguments))
        return 0,
