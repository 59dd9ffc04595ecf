"""Addresses as text: `host:port`, and whether they stay on this machine. Imports no gRPC."""

from __future__ import annotations

import ipaddress

FORM = "host:port with port 0 to 65535"


def split_address(address: str) -> tuple[str, int]:
    """Host and port. Raises: ValueError with the form that it must have."""
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(FORM)
    return host.strip("[]"), int(port)


def is_loopback(address: str) -> bool:
    """Whether `host:port` (or a Unix socket) never leaves this machine."""
    if address.startswith("unix:"):
        return True
    host = address.removeprefix("dns:///").rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
