"""The Ray Serve application: replicas with an engine each, and a gateway that knows what they hold."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.request_router import RequestRouter
from ray.serve.schema import LoggingConfig

from ..async_llm import AsyncLLM
from ..server import logs
from ..server.api.errors import ApiError
from ..server.app import build_app
from .asgi_bridge import Message, Reply, WebRequest, answer, respond
from .gateway import REPLICA_HEADER, Gateway, ReplicaLostError
from .router import Hints, PrefixTable, choose
from .settings import ScaleSettings


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


ASK_ALL_SECONDS = 5.0
CLOSE_SECONDS = 5.0
RESERVE = 16  # places at a replica for what is asked of all, as `/metrics`, when it is full


class Replica:
    """One process, one engine, the whole server without its socket."""

    def __init__(self, settings: ScaleSettings) -> None:
        logs.configure()
        self.name = serve.get_replica_context().replica_id.unique_id
        self.llm = AsyncLLM(settings.model, **settings.engine_options)
        self.app = build_app(self.llm, settings.server)

    async def respond(self, request: WebRequest, hints: Hints) -> AsyncIterator[list[Message]]:
        """The answer as it comes. `hints` is for the router, which has read it by now."""
        async with aclosing(respond(self.app, request)) as batches:
            async for batch in batches:
                for message in batch:
                    if message["type"] == "http.response.start":
                        message["headers"] = [*message.get("headers", ()), (REPLICA_HEADER, self.name.encode())]
                yield batch

    async def answer(self, request: WebRequest) -> Reply:
        return await answer(self.app, request, self.name)

    async def check_health(self) -> None:
        """Ray replaces a replica that raises here three times in a row."""
        health = self.app.state.context.health
        if not health.ok:
            raise RuntimeError(health.reason)

    def __del__(self) -> None:
        """Called by Serve when the requests are answered, or their time is up."""
        if hasattr(self, "llm"):  # it may not have come so far
            self.llm.close(timeout=CLOSE_SECONDS)


class RayReplicas:
    """The replicas behind a deployment handle."""

    def __init__(self, handle: Any, settings: ScaleSettings) -> None:
        self.handle, self.settings = handle, settings
        self.streams = handle.options(stream=True)

    @asynccontextmanager
    async def stream(self, request: WebRequest, hints: Hints) -> AsyncIterator[AsyncIterator[list[Message]]]:
        batches = self.streams.respond.remote(request, hints=hints)
        try:
            yield batches
        except RayActorError as error:
            raise ReplicaLostError from error
        except BackPressureError:
            sentence = f"{self.settings.max_queued_requests} requests are waiting already: try again later"
            wait = {"Retry-After": "1"}
            raise ApiError(429, sentence, code="queue_full", kind="rate_limit_error", headers=wait) from None
        except DeploymentUnavailableError:
            sentence = "no replica could be started: see the log of the deployment"
            raise ApiError(503, sentence, kind="server_error") from None
        except BaseException:
            batches.cancel()
            raise

    async def ask_all(self, request: WebRequest) -> list[Reply]:
        try:
            asked = self.handle.broadcast("answer", request)
            replies = await asked.results_async(timeout_s=ASK_ALL_SECONDS, return_exceptions=True)
        except (DeploymentUnavailableError, TimeoutError):
            return []
        return [reply for reply in replies if isinstance(reply, Reply)]


class Door:
    """The gateway in a process of its own."""

    def __init__(self, replicas: Any, settings: ScaleSettings) -> None:
        self.gateway = Gateway(RayReplicas(replicas, settings), settings.block, settings.server.max_body_bytes)

    def __serve_build_asgi_app__(self) -> Gateway:
        return self.gateway


def build(settings: ScaleSettings) -> Any:
    """The application, not yet running."""
    return door(settings).bind(replica(settings).bind(settings), settings)


def replica(settings: ScaleSettings) -> Any:
    number: dict[str, Any] = {"num_replicas": settings.max_replicas}
    if settings.scales:
        number = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=settings.min_replicas,
                initial_replicas=max(1, settings.min_replicas),
                max_replicas=settings.max_replicas,
                target_ongoing_requests=settings.target_ongoing_requests,
                upscale_delay_s=settings.upscale_seconds,
                downscale_delay_s=settings.downscale_seconds,
            )
        }
    return serve.deployment(
        Replica,
        name="Replica",
        ray_actor_options={"num_cpus": settings.cpus, "num_gpus": settings.gpus},
        max_ongoing_requests=settings.share * settings.gateways + RESERVE,
        max_queued_requests=settings.max_queued_requests,
        health_check_period_s=settings.health_period_seconds,
        health_check_timeout_s=settings.health_timeout_seconds,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=settings.server.drain_seconds,
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter,
            request_router_kwargs={
                "limit": settings.share,
                "imbalance": settings.imbalance,
                "table_blocks": settings.table_blocks,
            },
        ),
        logging_config=LoggingConfig(enable_access_log=False),  # the server writes its own lines
        **number,
    )


def door(settings: ScaleSettings) -> Any:
    # Whoever waits for a replica waits here, and the limits are the replicas'.
    everybody = settings.max_replicas * settings.max_ongoing_requests + settings.max_queued_requests + 64
    return serve.deployment(
        serve.ingress()(Door),
        name="Gateway",
        num_replicas=settings.gateways,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=everybody,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=settings.server.drain_seconds,
    )
