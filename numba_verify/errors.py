"""The exceptions of the package that are not plain ValueError, TypeError or IndexError.

Both implementations (``numba_verify`` and ``cuda_ref``) raise these same classes, so a caller writes one ``except`` for either.
"""


class UnsupportedError(RuntimeError):
    """The call is well formed, but the kernel that was asked for cannot run here.

    The text names the limit ("needs 102,400 B of shared memory, this device has 101,376 B") and a kernel that would run.
    """


class NoDeviceError(RuntimeError):
    """The call makes sense on a GPU only (``warmup``, ``bench``), and no usable GPU was found.

    The text says what was looked for and what the driver answered.
    """
