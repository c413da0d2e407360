"""Delay of packets in user space, for kernels without netem: ``relay.py PORT TAP SECONDS`` in the switch's namespace.

A frame that arrives at ``port``, the switch's end of a host's link, is held for some time and then written to a new
TAP device, which is the host's port of the bridge; a frame from the bridge goes to the host at once. Frames keep the
header of virtio, which says that a checksum is still to be filled in and into which segments a large frame is to be
cut. So frames of 64 KiB pass as one, as they do between veth devices, and a few hundred in a second carry 200 Mbit/s.
"""

import collections
import contextlib
import fcntl
import os
import select
import socket
import struct
import sys
import time

_TUNSETIFF, _TUNSETOFFLOAD, _TUNSETVNETHDRSZ = 0x400454CA, 0x400454D0, 0x400454D8
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_CHECKSUM, _TSO4, _TSO6, _TSO_ECN = 1, 2, 4, 8
_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 263, 15, 23
_ETH_P_ALL = 0x0003
_HEADER_BYTES, _FRAME_BYTES = 10, 1 << 17
_BUFFER_BYTES = 64 << 20
_MOST_AT_ONCE = 64  # frames of one direction before the other one has its turn


def open_tap(name: str) -> int:
    """A new TAP device; the descriptor carries its frames, each behind a header of virtio."""
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR))
    fcntl.ioctl(tap, _TUNSETVNETHDRSZ, struct.pack("i", _HEADER_BYTES))
    fcntl.ioctl(tap, _TUNSETOFFLOAD, _CHECKSUM | _TSO4 | _TSO6 | _TSO_ECN)
    return tap


def open_port(name: str) -> socket.socket:
    """A socket for all frames that arrive at a device, and for frames that are to leave it."""
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    port.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    port.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    for force in (33, 32):  # SO_RCVBUFFORCE, SO_SNDBUFFORCE
        port.setsockopt(socket.SOL_SOCKET, force, _BUFFER_BYTES)
    port.bind((name, _ETH_P_ALL))
    port.setblocking(False)
    return port


def _frames(descriptor: int):
    """The frames that wait at a descriptor; none while its device is down."""
    for _ in range(_MOST_AT_ONCE):
        try:
            yield os.read(descriptor, _FRAME_BYTES)
        except OSError:
            return


def relay(port: int, tap: int, delay_seconds: float) -> None:
    """Pass frames on, for ever."""
    held: collections.deque[tuple[float, bytes]] = collections.deque()
    while True:
        wait = max(0.0, held[0][0] - time.monotonic()) if held else None
        select.select([port, tap], [], [], wait)
        due = time.monotonic() + delay_seconds
        held.extend((due, frame) for frame in _frames(port))
        now = time.monotonic()
        while held and held[0][0] <= now:
            with contextlib.suppress(OSError):  # dropped, as by a switch whose port is down
                os.write(tap, held.popleft()[1])
        for frame in _frames(tap):
            with contextlib.suppress(OSError):
                os.write(port, frame)


if __name__ == "__main__":
    opened = open_tap(sys.argv[2]), open_port(sys.argv[1])
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))  # in time, on a machine whose cores are all busy
    print("ready", flush=True)
    relay(opened[1].fileno(), opened[0], float(sys.argv[3]))
