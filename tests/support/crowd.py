"""Clients that ask again as soon as they are answered: a crowd that saturates an engine."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import grpc

from loraplex.tenants import DEFAULT_TENANT
from tests.support.engine_stack import Stack


@dataclass
class Crowd:
    """One thread a client; `stop` ends them after their present answer."""

    stack: Stack
    max_tokens: int = 12
    answers: Counter[str] = field(default_factory=Counter)
    #: tokens of each adapter; errors of anybody
    tokens: Counter[str] = field(default_factory=Counter)
    tokens_of_tenant: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    stopping: threading.Event = field(default_factory=threading.Event)
    threads: list[threading.Thread] = field(default_factory=list)

    def start(
        self, name: str, clients: int = 1, max_tokens: int = 0, tenant: str = DEFAULT_TENANT
    ) -> None:
        for _ in range(clients):
            arguments = (name, max_tokens or self.max_tokens, tenant)
            thread = threading.Thread(target=self._ask, args=arguments)
            self.threads.append(thread)
            thread.start()

    def stop(self) -> None:
        self.stopping.set()
        for thread in self.threads:
            thread.join(60)

    def _ask(self, name: str, max_tokens: int, tenant: str) -> None:
        while not self.stopping.is_set():
            try:
                answer = self.stack.generate(name, max_tokens=max_tokens, tenant=tenant)
            except grpc.RpcError as error:
                self.errors.append(str(error))
                return
            self.answers[name] += 1
            self.tokens[name] += len(answer.token_ids)
            self.tokens_of_tenant[tenant] += len(answer.token_ids)


@contextlib.contextmanager
def crowd(stack: Stack, max_tokens: int = 12) -> Iterator[Crowd]:
    people = Crowd(stack, max_tokens)
    try:
        yield people
    finally:
        people.stop()
