"""The core's process: model, core and the one loop; frontends connect, the loader is asked."""

from __future__ import annotations

import gc
from pathlib import Path

from engine_svc.compose import build_core, load_engine_model, metered
from engine_svc.messages import ChildReady, CoreHello, FrontendHello, PeerStalled
from engine_svc.model.device_rates import measure_rates
from engine_svc.observing import StepMetrics
from engine_svc.processes.child import Child
from engine_svc.processes.core_loop import CoreLoop
from engine_svc.processes.loader_link import LoaderLink
from engine_svc.processes.socket import Channel, ChannelClosed, Outbox, Peer, serve


def run(child: Child) -> None:
    """Load the model, then loop until the supervisor lets go. Raises: LoraplexError."""
    boot, settings = child.boot, child.boot.settings
    sockets = Path(boot.socket_dir)
    loader = LoaderLink(str(sockets / "loader"), boot.authkey, wake=lambda: None)
    rates = measure_rates(settings.device)
    model = load_engine_model(settings, Path(boot.host_region_path))
    meter = None if rates is None else metered(model, rates)
    parts = build_core(settings, model, loader, meter)
    process = _CoreProcess(child, parts.hello)
    metrics = StepMetrics(settings.max_adapter_series, parts.snapshot)
    if meter is not None:
        meter.observe = metrics.floor
    loop = CoreLoop(parts.core, parts.snapshot, metrics.stepped, process.stalled)
    process.loop = loop
    loader.wake, loader.shares = loop.wake, loop.share
    child.watch(lambda seconds: None, loop.stop)
    loader.start(parts.hello)
    stop_serving = serve(str(sockets / "core"), boot.authkey, process.accepted)
    child.tell(ChildReady({"weights_bytes": parts.hello.weights_bytes,
                           "num_pages": parts.hello.limits.num_pages,
                           "dtype": parts.hello.dtype}))  # fmt: skip
    # what a start leaves stays for ever: the collector took a tenth of a second to walk it, the
    # time of ten steps, whenever enough requests had come
    gc.collect()
    gc.freeze()
    # requests and their sequences come and go by thousands: fewer walks over those that live
    gc.set_threshold(50_000, 10, 10)
    try:
        loop.run()
    finally:
        stop_serving()


class _CoreProcess:
    """Frontends that connect become peers of the loop."""

    loop: CoreLoop

    def __init__(self, child: Child, hello: CoreHello) -> None:
        self._child = child
        self._hello = hello
        self._frontends: dict[Peer, FrontendHello] = {}

    def accepted(self, channel: Channel) -> None:
        """One frontend's connection, on a thread of its own."""
        try:
            hello = channel.receive()
        except ChannelClosed:
            return
        peer = Outbox(channel)
        self._frontends[peer] = hello
        peer.put(self._hello)
        self.loop.attach(peer)
        try:
            while True:
                self.loop.post(peer, channel.receive())
        except ChannelClosed:
            self.loop.detach(peer)
            self._frontends.pop(peer, None)

    def stalled(self, peer: Peer) -> None:
        """The loop gave up on a frontend; the supervisor ends it."""
        hello = self._frontends.get(peer)
        if hello is not None:
            self._child.log.error("frontend.stalled", index=hello.index, pid=hello.pid)
            self._child.tell(PeerStalled(hello.index, hello.pid))
