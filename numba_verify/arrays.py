"""Arrays of any library in, plain (address, shape, strides, dtype, device) out.

Nothing here copies or synchronises. Torch has a path of its own because it is the common caller and its `__cuda_array_interface__`
refuses tensors that require grad and spells bfloat16 as two void bytes; CuPy, numba and JAX come in by `__cuda_array_interface__`;
everything else by DLPack. NumPy arrays (bfloat16 as `ml_dtypes.bfloat16`) and torch CPU tensors are host arrays (`device is None`).
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from .gpu import driver

ITEMSIZE = {
    "bfloat16": 2, "float16": 2, "float32": 4,
    "int32": 4, "int64": 8, "uint32": 4, "uint8": 1, "bool": 1,
}
NUMPY_DTYPE = {name: np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name) for name in ITEMSIZE}
_NAME_OF_NUMPY = {dtype: name for name, dtype in NUMPY_DTYPE.items()}
# "<V2" is what torch exports for bfloat16 through the array interface: two bytes with no type of their own.
_NAME_OF_TYPESTR = {"<f2": "float16", "<f4": "float32", "<V2": "bfloat16", "<i4": "int32", "<i8": "int64", "<u4": "uint32",
                    "|u1": "uint8", "|b1": "bool"}
_NAME_OF_TORCH: dict[Any, str] = {}


class ArrayView(NamedTuple):
    """Where an array lies and how it is laid out; `owner` keeps it alive.

    `strides` count elements, not bytes. `device` is a CUDA ordinal, or None for host memory (`owner` is then a NumPy array).
    `library` says what kind of array a new output has to be: "numpy", "torch", "cupy", "numba" or "jax".
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: int | None
    library: str
    owner: Any
    writable: bool = True


def view(array: Any, name: str) -> ArrayView:
    """The layout of `array`. Raises TypeError, naming the argument, when it is no array or its dtype has no meaning here."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return _view_torch(array, name, torch)
    if isinstance(array, np.ndarray):
        return _view_numpy(array, name)
    interface = _cuda_array_interface(array)
    if interface is not None:
        return _view_interface(array, interface, name)
    if hasattr(array, "unsafe_buffer_pointer"):
        return _view_jax(array, name)
    if hasattr(array, "__dlpack__"):
        return _view_dlpack(array, name)
    raise TypeError(
        f"{name}: expected a NumPy, torch, CuPy, numba or JAX array (anything with DLPack or __cuda_array_interface__), got {type(array).__name__}")


def layouts_of(arrays: tuple) -> tuple[list[int], tuple] | None:
    """(addresses, layouts) of several arrays, 0 and None for one that is None. Fast, for torch tensors and the CUDA array interface.

    A layout is all that `view` reads beside the address, so arrays of equal layouts have views that differ in address and owner alone: a check
    that asks for neither and was passed by one holds for the other. It holds no array alive. None for arrays of another kind, and for an
    address off a 16 B boundary: no check asks for more than that.
    """
    torch = sys.modules.get("torch")
    tensor = () if torch is None else torch.Tensor
    addresses, layouts, together = [], [], 0
    for array in arrays:
        if array is None:
            address, layout = 0, None
        elif isinstance(array, tensor):
            address, layout = array.data_ptr(), (array.shape, array.stride(), array.dtype, array.device)
        else:
            interface = None if isinstance(array, np.ndarray) else _cuda_array_interface(array)
            if interface is None:
                return None
            (address, read_only), strides = interface["data"], interface.get("strides")
            address = int(address or 0)
            layout = (type(array), tuple(interface["shape"]), strides if strides is None else tuple(strides), interface["typestr"],
                      bool(read_only), interface.get("mask") is None, _ordinal_of(array, address))
        together |= address
        addresses.append(address)
        layouts.append(layout)
    return None if together % 16 else (addresses, tuple(layouts))


def _cuda_array_interface(array: Any) -> dict | None:
    # A property that raises (JAX does for bfloat16 and for CPU arrays) counts as absent: another protocol may still fit.
    try:
        return getattr(array, "__cuda_array_interface__", None)
    except Exception:
        return None


def _view_numpy(array: np.ndarray, name: str, library: str = "numpy") -> ArrayView:
    dtype = _NAME_OF_NUMPY.get(array.dtype)
    if dtype is None:
        raise _bad_dtype(name, array.dtype)
    itemsize = array.dtype.itemsize
    strides = tuple(stride // itemsize if stride % itemsize == 0 else _bad_stride(name, stride, itemsize) for stride in array.strides)
    return ArrayView(array.ctypes.data, array.shape, strides, dtype, None, library, array, array.flags.writeable)


def _view_torch(tensor: Any, name: str, torch: Any) -> ArrayView:
    if not _NAME_OF_TORCH:
        _NAME_OF_TORCH.update({getattr(torch, key): key for key in ITEMSIZE if hasattr(torch, key)})
    dtype = _NAME_OF_TORCH.get(tensor.dtype)
    if dtype is None:
        raise _bad_dtype(name, tensor.dtype)
    if tensor.is_cuda:
        return ArrayView(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), dtype, tensor.get_device(), "torch", tensor)
    if tensor.device.type != "cpu":
        raise TypeError(f"{name}: expected a CUDA or CPU tensor, got one on {tensor.device}; move it with .cuda() or .cpu()")
    tensor = tensor.detach()
    if dtype == "bfloat16":  # torch hands NumPy no bfloat16: pass the bits and name them again
        return _view_numpy(tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16), name)
    return _view_numpy(tensor.numpy(), name)


def _view_interface(array: Any, interface: dict, name: str) -> ArrayView:
    dtype = _NAME_OF_TYPESTR.get(interface["typestr"])
    if dtype is None:
        raise _bad_dtype(name, interface["typestr"])
    if interface.get("mask") is not None:
        raise TypeError(f"{name}: masked arrays are not supported; fill the array and pass its data")
    shape, itemsize = tuple(interface["shape"]), ITEMSIZE[dtype]
    byte_strides = interface.get("strides")
    if byte_strides is None:
        strides = contiguous_strides(shape)
    else:
        strides = tuple(s // itemsize if s % itemsize == 0 else _bad_stride(name, s, itemsize) for s in byte_strides)
    address = int(interface["data"][0] or 0)
    return ArrayView(address, shape, strides, dtype, _ordinal_of(array, address), _library_of(array), array, not interface["data"][1])


def _view_jax(array: Any, name: str) -> ArrayView:
    dtype = _NAME_OF_NUMPY.get(np.dtype(array.dtype))
    if dtype is None:
        raise _bad_dtype(name, array.dtype)
    platform = next(iter(array.devices()))
    if platform.platform == "cpu":
        return _view_numpy(np.asarray(array), name)
    shape = tuple(array.shape)
    return ArrayView(array.unsafe_buffer_pointer(), shape, contiguous_strides(shape), dtype, int(platform.local_hardware_id), "jax", array)


def _view_dlpack(array: Any, name: str) -> ArrayView:
    device_type, _ = array.__dlpack_device__()
    from cuda.core.utils import StridedMemoryView

    try:
        if device_type == 1:  # kDLCPU
            return _view_numpy(np.from_dlpack(array), name)
        # -1: no synchronisation; ordering is the caller's stream, as contract section 3 item 10 demands
        memory = StridedMemoryView.from_dlpack(array, stream_ptr=-1)
    except (BufferError, TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name}: its DLPack export was refused ({error}); pass a torch, CuPy, numba or JAX array") from error
    dtype = _NAME_OF_NUMPY.get(np.dtype(memory.dtype))
    if dtype is None:
        raise _bad_dtype(name, memory.dtype)
    shape = tuple(memory.shape)
    strides = tuple(memory.strides) if memory.strides is not None else contiguous_strides(shape)
    return ArrayView(int(memory.ptr), shape, strides, dtype, int(memory.device_id), "numba", memory)


def _library_of(array: Any) -> str:
    root = type(array).__module__.partition(".")[0]
    return root if root in ("cupy", "jax") else "jax" if root == "jaxlib" else "numba"


def _ordinal_of(array: Any, address: int) -> int:
    device = getattr(array, "device", None)
    ordinal = getattr(device, "id", None)
    if isinstance(ordinal, int):
        return ordinal
    if address == 0:  # an empty array has no memory and so no device of its own
        return 0
    return driver.ordinal_of_pointer(address)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides of `shape`, in elements."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(int(extent), 1)
    return tuple(reversed(strides))


def is_contiguous(array: ArrayView) -> bool:
    """True when `array` is row-major without gaps; dimensions of size 1 do not count."""
    step = 1
    for extent, stride in zip(reversed(array.shape), reversed(array.strides), strict=True):
        if extent == 0:
            return True
        if extent != 1 and stride != step:
            return False
        step *= extent
    return True


def empty(shape: tuple[int, ...], dtype: str, like: ArrayView, stream: int) -> Any:
    """A new array of the same library and device as `like`, contents undefined, that work on `stream` may fill at once.

    torch and CuPy hand out memory that was freed a moment ago in the order of a stream, so they have to know which stream will write to it.
    """
    if like.device is None:
        return np.empty(shape, NUMPY_DTYPE[dtype])
    if like.library == "torch":
        torch = sys.modules["torch"]
        if stream != current_stream(like.library, like.device):
            with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=like.device)):
                return torch.empty(shape, dtype=getattr(torch, dtype), device=f"cuda:{like.device}")
        return torch.empty(shape, dtype=getattr(torch, dtype), device=f"cuda:{like.device}")
    if like.library == "cupy":
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(like.device), cupy.cuda.ExternalStream(stream, like.device):
            return cupy.empty(shape, NUMPY_DTYPE[dtype])
    if like.library == "jax":
        jax = sys.modules["jax"]
        # device_put of a fresh host buffer: an array nobody else can hold, so that writing to it breaks no promise of JAX. Waited for, since
        # JAX copies on a stream of its own.
        return jax.device_put(np.empty(shape, NUMPY_DTYPE[dtype]), next(iter(like.owner.devices()))).block_until_ready()
    from numba import cuda

    with cuda.gpus[like.device]:
        return cuda.device_array(shape, NUMPY_DTYPE[dtype])


def current_stream(library: str, device: int) -> int:
    """Handle of the stream on which the caller of `library` is working now; asked anew at every call, never kept."""
    if library == "torch":
        torch = sys.modules["torch"]
        handle = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # as torch's compiler asks: no Stream object
        return torch.cuda.current_stream(device).cuda_stream if handle is None else handle(device)
    if library == "cupy":
        return sys.modules["cupy"].cuda.get_current_stream(device).ptr
    return 0  # numba and JAX callers: the legacy default stream


def stream_handle(stream: Any) -> int:
    """The integer handle of a stream object of torch, CuPy, numba, cuda.core, or of an integer. TypeError for anything else."""
    if isinstance(stream, int) and not isinstance(stream, bool):
        return stream
    for attribute in ("cuda_stream", "ptr"):  # torch, CuPy
        handle = getattr(stream, attribute, None)
        if isinstance(handle, int):
            return handle
    if hasattr(stream, "__cuda_stream__"):  # cuda.core and whoever follows its protocol: (version, handle)
        protocol = stream.__cuda_stream__
        return int((protocol() if callable(protocol) else protocol)[1])
    handle = getattr(stream, "handle", None)  # numba
    if handle is not None:
        value = getattr(handle, "value", handle)
        return int(value or 0)
    raise TypeError(f"stream: expected an int handle or a torch, CuPy, numba or cuda.core stream, got {type(stream).__name__}")


def dtype_name(dtype: Any) -> str:
    """"bfloat16", "float16" or "float32" from a string, a NumPy or a torch dtype. TypeError for anything else."""
    name = dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch.")
    if name not in ("bfloat16", "float16", "float32"):
        try:
            name = np.dtype(dtype).name
        except TypeError:
            name = None
    if name not in ("bfloat16", "float16", "float32"):
        raise TypeError(f"dtype: expected bfloat16, float16 or float32 (as text, NumPy or torch dtype), got {dtype!r}")
    return name


def _bad_dtype(name: str, dtype: Any) -> TypeError:
    return TypeError(f"{name}: dtype {dtype} has no use here; expected one of {', '.join(ITEMSIZE)}")


def _bad_stride(name: str, stride: int, itemsize: int) -> int:
    raise ValueError(f"{name}: a stride of {stride} B is no multiple of its {itemsize} B elements; make it contiguous")
