"""Holding the gRPC port: one engine a port, whose frontends then share it."""

from __future__ import annotations

import errno
import socket
import sys
from dataclasses import dataclass

from engine_svc.settings import SettingInvalid, split_address


@dataclass(frozen=True, slots=True)
class HeldPort:
    """Keep it open as long as the engine lives. `address` has the real port."""

    address: str
    sockets: tuple[socket.socket, ...]

    def close(self) -> None:
        for held in self.sockets:
            held.close()


def hold_port(key: str, address: str) -> HeldPort:
    """Take host:port for this engine alone; its frontends can still bind it with SO_REUSEPORT.

    gRPC servers share a taken port silently. The held socket never listens, so it gets no
    connections. Two starts in the same moment are told apart by a name in the kernel's abstract
    socket space, which is free again when the process is gone.

    Raises: SettingInvalid naming the port that is taken.
    """
    host, port = split_address(key, address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    held = socket.socket(family, socket.SOCK_STREAM)
    # Connections of an earlier engine in TIME_WAIT do not count; a listener does.
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind((host, port))
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        real_port = held.getsockname()[1]
        sockets = (held, *_lock(real_port))
    except OSError as error:
        held.close()
        if error.errno == errno.EADDRINUSE:
            raise SettingInvalid(
                f"{key} is {address!r}; port {port} is taken by another process; "
                "stop that one or choose another port"
            ) from None
        raise SettingInvalid(f"{key} is {address!r}; cannot listen there: {error}") from None
    shown = f"[{host}]" if ":" in host else host
    return HeldPort(f"{shown}:{real_port}", sockets)


def _lock(port: int) -> tuple[socket.socket, ...]:
    if sys.platform != "linux":
        return ()
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        lock.bind(f"\0loraplex-engine-{port}")
    except OSError:
        lock.close()
        raise
    return (lock,)
