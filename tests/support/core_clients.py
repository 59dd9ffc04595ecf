"""Clients that keep a flow busy, for tests of shares."""

from __future__ import annotations

from engine_svc.types import AdapterRef, FlowKey, ServiceClass
from tests.support.core_world import Heard, World


class Client:
    """Keeps so many requests of one flow alive."""

    def __init__(
        self, world: World, ref: AdapterRef | None, *, depth: int = 3, prompt: int = 4,
        max_tokens: int = 20, tenant: str = "default",
        service_class: ServiceClass = ServiceClass.INTERACTIVE,
    ) -> None:  # fmt: skip
        self.world, self.ref, self.depth, self.tenant = world, ref, depth, tenant
        self.prompt, self.max_tokens, self.service_class = prompt, max_tokens, service_class
        self.sent: list[Heard] = []
        self._living: list[Heard] = []

    @property
    def key(self) -> FlowKey:
        return FlowKey(self.service_class, self.tenant, self.ref.digest if self.ref else "")

    def act(self) -> None:
        self._living = [heard for heard in self._living if heard.ended is None]
        for _ in range(self.depth - len(self._living)):
            heard = self.world.submit(
                self.prompt, self.ref, max_tokens=self.max_tokens, tenant=self.tenant,
                service_class=self.service_class,
            )  # fmt: skip
            self.sent.append(heard)
            self._living.append(heard)

    @property
    def service(self) -> float:
        """Priced, as it was charged until now: computed for the first time."""
        return self.world.charges.total[self.key]


def live(world: World, clients: list[Client], steps: int) -> None:
    for _ in range(steps):
        for client in clients:
            client.act()
        world.step()


def jain(numbers: list[float]) -> float:
    return sum(numbers) ** 2 / (len(numbers) * sum(n * n for n in numbers))
