"""Copies from the memory of another process, by the kernel (``process_vm_readv`` of Linux)."""

from __future__ import annotations

import ctypes
import os


class _Piece(ctypes.Structure):
    """The C type ``struct iovec``."""

    _fields_ = (("address", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)
if hasattr(_libc, "process_vm_readv"):
    _pieces = ctypes.POINTER(_Piece)
    _libc.process_vm_readv.argtypes = [ctypes.c_int, _pieces, ctypes.c_ulong, _pieces, ctypes.c_ulong, ctypes.c_ulong]
    _libc.process_vm_readv.restype = ctypes.c_ssize_t


def read(pid: int, source: int, destination: int, num_bytes: int) -> None:
    """Copy from an address in another process to an address in this process.

    Raise OSError if the kernel refuses (ESRCH: the process has ended), and AttributeError if the C library lacks the
    function.
    """
    while num_bytes:  # The kernel copies at most about 2 GiB per call.
        here, there = _Piece(destination, num_bytes), _Piece(source, num_bytes)
        count = _libc.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if count <= 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        source, destination, num_bytes = source + count, destination + count, num_bytes - count
