"""Ray Serve's request router with our choice in it."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from ray.serve.request_router import RequestRouter

from .router import Hints, PrefixTable, choose


class PrefixRouter(RequestRouter):
    """Lives in each gateway. The blocks of a prompt come with the call, in the argument `hints`."""

    def initialize_state(self, limit: int, imbalance: int, table_blocks: int) -> None:
        """`limit` is below what Serve lets a replica take: the rest is for questions to all, which must not wait."""
        self._limit, self._imbalance = limit, imbalance
        self._table = PrefixTable(table_blocks)
        self._dice = random.Random()
        self._sent: Counter[str] = Counter()  # by this gateway, to each replica, and not yet ended

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        if pending_request is not None:
            # Where all are full Serve asks again; without this, without a pause.
            pending_request.routing_context.should_backoff = True
        named = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        loads = {name: self._load(name, replica) for name, replica in named.items() if self._sent[name] < self._limit}
        order = choose(self._table, hints_of(pending_request), loads, self._imbalance, self._dice)
        return [[named[name]] for name in order]  # a rank each: Serve takes the first that has room

    def on_send_request(self, replica_id: Any) -> None:
        super().on_send_request(replica_id)
        self._sent[replica_id.unique_id] += 1

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        """However it ended; also for one that the replica did not take."""
        self._sent[replica_id.unique_id] -= 1

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        self._table.remember(hints_of(pending_request).blocks, replica_id.unique_id)

    def on_replica_actor_died(self, replica_id: Any) -> None:
        super().on_replica_actor_died(replica_id)
        self._forget(replica_id.unique_id)

    def update_replicas(self, replicas: list[Any]) -> None:
        before = {replica_id.unique_id for replica_id in self.curr_replicas}
        super().update_replicas(replicas)
        for gone in before - {replica_id.unique_id for replica_id in self.curr_replicas}:
            self._forget(gone)

    def _forget(self, name: str) -> None:
        self._table.forget(name)
        self._sent.pop(name, None)

    def _load(self, name: str, replica: Any) -> int:
        """What it said last, which counts all gateways but soon grows old, or what this gateway knows itself."""
        return max(self.replica_queue_len_cache.get(replica.replica_id) or 0, self._sent[name])


def hints_of(pending_request: Any) -> Hints:
    hints = pending_request.kwargs.get("hints") if pending_request is not None else None
    return hints if isinstance(hints, Hints) else Hints()
