"""Hosts of their own in network namespaces, behind links that a test can slow, make lossy, or cut.

Each host has one link to this machine: a TUN device on either side, and a thread between them that passes the packets
on. So delay and loss need no support of the kernel but TUN's, and they apply to each direction. A namespace has no
name: it ends with the last process in it and with the descriptor of its `Host`, however the tests end, and so do its
devices.
Addresses are of 198.18.0.0/16, which is reserved for measurements between networks (RFC 2544).
"""

import ctypes
import fcntl
import heapq
import os
import random
import selectors
import shutil
import struct
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TUN_WITHOUT_INFO = 0x0001 | 0x1000
_MAX_PACKET = 65_536
_MOST_HELD = 10_000  # Packets under way on one link.
_IDLE_S = 1.0
WIRE = "wire"

_libc = ctypes.CDLL(None, use_errno=True)


def why_not() -> str:
    """Why this process can make no hosts; "" if it can."""
    if shutil.which("ip") is None:
        return "no `ip` (iproute2)"
    try:
        with Host():
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"network namespaces and TUN devices cannot be made here: {error}"


def enter_namespace(path: str) -> None:
    """Moves this thread, and the threads and processes that it starts, into a network namespace. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _check(_libc.setns(descriptor, _CLONE_NEWNET))
    finally:
        os.close(descriptor)


class Host:
    """A network namespace; its `address` is reached from here, `gateway` is this machine for it.

    `namespace` is a path for `enter_namespace`. `delay_s` and `loss` (0 to 1) are those of each direction of the link,
    and may be changed at any time; `seed` chooses the packets that are lost, whose number is `lost`. A context manager.
    Raises OSError or CalledProcessError if the system does not allow it.
    """

    def __init__(self, seed: int = 1) -> None:
        self.delay_s = self.loss = 0.0
        self.lost = 0
        self._random = random.Random(seed)
        self._descriptors: list[int] = []
        self._is_closed = threading.Event()
        self._relay: threading.Thread | None = None
        try:
            near, name = self._tun("headrace%d")
            number = int(name.removeprefix("headrace"))
            network = f"198.18.{number // 64}.{{}}"
            self.gateway, self.address = (network.format(number % 64 * 4 + host) for host in (1, 2))
            with ThreadPoolExecutor(1) as thread:  # A thread of its own, because a namespace is a thread's.
                far = thread.submit(self._make).result()
            _ip("address", "add", f"{self.gateway}/30", "dev", name)
            _ip("link", "set", name, "up")
            self._relay = threading.Thread(target=self._pass_on, args=(near, far), name=f"link-{name}", daemon=True)
            self._relay.start()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Cuts the link for ever; the processes in the namespace are for the caller to end."""
        self._is_closed.set()
        if self._relay is not None:
            self._relay.join(5 * _IDLE_S)
        while self._descriptors:
            os.close(self._descriptors.pop())

    def __enter__(self) -> "Host":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ip(self, *arguments: str) -> None:
        """Runs `ip` on the host."""
        command = ("nsenter", f"--net={self.namespace}", "ip", *arguments)
        subprocess.run(command, check=True, capture_output=True)

    def _make(self) -> int:
        """The far end of the link, in a new namespace."""
        _check(_libc.unshare(_CLONE_NEWNET))
        descriptor = os.open(f"/proc/self/task/{threading.get_native_id()}/ns/net", os.O_RDONLY)
        self._descriptors.append(descriptor)
        self.namespace = f"/proc/{os.getpid()}/fd/{descriptor}"
        far, name = self._tun("uplink")
        _ip("link", "set", "lo", "up")
        _ip("address", "add", f"{self.address}/30", "dev", name)
        _ip("link", "set", name, "up")
        return far

    def _tun(self, name: str) -> tuple[int, str]:
        """A new device of the calling thread's namespace and its name; `%d` in it is a number that is free."""
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        self._descriptors.append(descriptor)
        made = fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN_WITHOUT_INFO))
        return descriptor, made[:16].rstrip(b"\0").decode()

    def _pass_on(self, near: int, far: int) -> None:
        """The thread of the link, until `close`."""
        under_way: list[tuple[float, int, int, bytes]] = []  # When it arrives, a number, where, and the packet.
        sent = 0
        with selectors.DefaultSelector() as selector:
            selector.register(near, selectors.EVENT_READ, far)
            selector.register(far, selectors.EVENT_READ, near)
            while not self._is_closed.is_set():
                wait_s = under_way[0][0] - time.monotonic() if under_way else _IDLE_S
                for key, _ in selector.select(max(0.0, min(wait_s, _IDLE_S))):
                    with suppress(BlockingIOError):
                        packet = os.read(key.fd, _MAX_PACKET)
                        if self._random.random() < self.loss or len(under_way) >= _MOST_HELD:
                            self.lost += 1
                        else:
                            sent += 1
                            heapq.heappush(under_way, (time.monotonic() + self.delay_s, sent, key.data, packet))
                while under_way and under_way[0][0] <= time.monotonic():
                    _, _, descriptor, packet = heapq.heappop(under_way)
                    with suppress(OSError):  # A packet that the kernel refuses is lost.
                        os.write(descriptor, packet)


def join(one: Host, other: Host) -> tuple[str, str]:
    """Connects two hosts by a link of their own, the device WIRE in each, and returns their addresses on it."""
    addresses = ("198.18.255.1", "198.18.255.2")
    ends = ("link", "add", WIRE, "netns", one.namespace, "type", "veth", "peer", "name", WIRE, "netns", other.namespace)
    _ip(*ends)
    for host, address in zip((one, other), addresses, strict=True):
        host.ip("address", "add", f"{address}/30", "dev", WIRE)
        host.ip("link", "set", WIRE, "up")
    return addresses


def _ip(*arguments: str) -> None:
    subprocess.run(("ip", *arguments), check=True, capture_output=True)


def _check(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
