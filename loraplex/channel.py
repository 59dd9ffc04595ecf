"""How every client and service of this repository opens a gRPC channel."""

from __future__ import annotations

from typing import Any

import grpc

from loraplex.address import is_loopback

#: Largest message either way; a page of 1,000 adapters with their labels fits.
MAX_MESSAGE_BYTES = 16 * 1024 * 1024

ChannelOptions = list[tuple[str, Any]]


def loopback_options() -> ChannelOptions:
    """No HTTP proxy (gRPC would use `http_proxy` even for 127.0.0.1), and our message limits."""
    return [("grpc.enable_http_proxy", 0), *_size_options()]


def channel_options(address: str) -> ChannelOptions:
    """Options for a channel to `address`; the proxy stays out of loopback connections only."""
    return loopback_options() if is_loopback(address) else _size_options()


def insecure_channel(address: str) -> grpc.Channel:
    """A blocking channel without TLS; the caller closes it."""
    return grpc.insecure_channel(address, options=channel_options(address))


def insecure_aio_channel(address: str) -> grpc.aio.Channel:
    """An asyncio channel without TLS; the caller closes it."""
    return grpc.aio.insecure_channel(address, options=channel_options(address))


def _size_options() -> ChannelOptions:
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ]
