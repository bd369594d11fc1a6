"""The Ray Serve application: replicas with one engine each, gateways, and the router between them."""

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
from starlette.types import Message

from ..async_llm import AsyncLLM
from ..server import logs
from ..server.admission import AdmissionMiddleware, RequestChecks
from ..server.api.errors import ApiError
from ..server.app import build_app
from .gateway import (
    REPLICA_HEADER,
    ForwardedRequest,
    Gateway,
    ReplicaLostError,
    Reply,
    collect_response,
    stream_response,
)
from .router import PrefixTable, RoutingHints, choose
from .settings import ScaleSettings

ASK_ALL_SECONDS = 5.0  # time-out of a request to all replicas
CLOSE_SECONDS = 5.0  # time that the engine gets to end when its replica is stopped
RESERVE = 16  # request slots of a full replica that remain for requests to all replicas, such as `/metrics`
GATEWAY_RESERVE = 64  # the same for a gateway


class PrefixRouter(RequestRouter):
    """Ray Serve's request router with `choose` as its policy.

    Each gateway has its own. The gateway passes the blocks of the prompt in the argument `hints` of the call.
    """

    def initialize_state(self, limit: int, imbalance: int, table_blocks: int) -> None:
        """Set the settings. limit: requests of this gateway at one replica, below the limit that Serve enforces."""
        self._limit, self._imbalance = limit, imbalance
        self._table = PrefixTable(table_blocks)
        self._random = random.Random()
        self._running: Counter[str] = Counter()  # requests of this gateway, by replica

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        if pending_request is not None:
            # If all replicas are full, Serve calls this again; without backoff it would do so without a pause.
            pending_request.routing_context.should_backoff = True
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        loads = {
            name: self._load(name, replica) for name, replica in replicas.items() if self._running[name] < self._limit
        }
        order = choose(self._table, hints_of(pending_request), loads, self._imbalance, self._random)
        return [[replicas[name]] for name in order]  # one rank each: Serve takes the first that is not full

    def on_send_request(self, replica_id: Any) -> None:
        super().on_send_request(replica_id)
        self._running[replica_id.unique_id] += 1

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        """Count a request as ended. Serve also calls this for requests that the replica rejected."""
        self._running[replica_id.unique_id] -= 1

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        self._table.remember(hints_of(pending_request).blocks, replica_id.unique_id)

    def on_replica_actor_died(self, replica_id: Any) -> None:
        super().on_replica_actor_died(replica_id)
        self._forget(replica_id.unique_id)

    def update_replicas(self, replicas: list[Any]) -> None:
        before = {replica_id.unique_id for replica_id in self.curr_replicas}
        super().update_replicas(replicas)
        for name in before - {replica_id.unique_id for replica_id in self.curr_replicas}:
            self._forget(name)

    def _forget(self, name: str) -> None:
        self._table.forget(name)
        self._running.pop(name, None)

    def _load(self, name: str, replica: Any) -> int:
        """Return the larger of the replica's own report, which may be old, and the count of this gateway."""
        return max(self.replica_queue_len_cache.get(replica.replica_id) or 0, self._running[name])


def hints_of(pending_request: Any) -> RoutingHints:
    hints = pending_request.kwargs.get("hints") if pending_request is not None else None
    return hints if isinstance(hints, RoutingHints) else RoutingHints()


class Replica:
    """One process with one engine: the whole server without its socket."""

    def __init__(self, settings: ScaleSettings) -> None:
        logs.configure()
        self.name = serve.get_replica_context().replica_id.unique_id
        self.llm = AsyncLLM(settings.model, **settings.engine_options)
        self.app = build_app(self.llm, settings.server)

    async def respond(self, request: ForwardedRequest, hints: RoutingHints) -> AsyncIterator[list[Message]]:
        """Stream the response, after an empty batch that accepts the request.

        `hints` is an argument for the router, which reads it before this call.
        """
        yield []
        async with aclosing(stream_response(self.app, request)) as batches:
            async for batch in batches:
                for message in batch:
                    if message["type"] == "http.response.start":
                        message["headers"] = [*message.get("headers", ()), (REPLICA_HEADER, self.name.encode())]
                yield batch

    async def answer(self, request: ForwardedRequest) -> Reply:
        return await collect_response(self.app, request, self.name)

    async def check_health(self) -> None:
        """Raise if the engine is not working; after three failures in a row Ray replaces the replica."""
        health = self.app.state.context.health
        if not health.ok:
            raise RuntimeError(health.reason)

    def __del__(self) -> None:
        """Close the engine; Serve calls this when all requests have ended, or their time is up."""
        if hasattr(self, "llm"):  # absent if the constructor failed
            self.llm.close(timeout=CLOSE_SECONDS)


class RayReplicas:
    """The replicas behind a deployment handle of Ray Serve."""

    def __init__(self, handle: Any, settings: ScaleSettings) -> None:
        self.handle, self.settings = handle, settings
        self.streams = handle.options(stream=True)

    @asynccontextmanager
    async def stream(
        self, request: ForwardedRequest, hints: RoutingHints
    ) -> AsyncIterator[AsyncIterator[list[Message]]]:
        batches = self.streams.respond.remote(request, hints=hints)
        try:
            yield batches
        except RayActorError as error:
            raise ReplicaLostError from error
        except BackPressureError:
            message = f"{self.settings.max_queued_requests} requests are waiting already: retry later"
            headers = {"Retry-After": "1"}
            raise ApiError(429, message, code="queue_full", kind="rate_limit_error", headers=headers) from None
        except DeploymentUnavailableError:
            message = "no replica could be started: see the log of the deployment"
            raise ApiError(503, message, kind="server_error") from None
        except BaseException:
            batches.cancel()
            raise

    async def ask_all(self, request: ForwardedRequest) -> list[Reply]:
        try:
            responses = self.handle.broadcast("answer", request)
            replies = await responses.results_async(timeout_s=ASK_ALL_SECONDS, return_exceptions=True)
        except (DeploymentUnavailableError, TimeoutError):
            return []
        return [reply for reply in replies if isinstance(reply, Reply)]


class GatewayProcess:
    """The gateway in a process of its own, as Ray Serve's ingress."""

    def __init__(self, replicas: Any, settings: ScaleSettings) -> None:
        gateway = Gateway(RayReplicas(replicas, settings), settings.block)
        self.app = AdmissionMiddleware(gateway, RequestChecks(settings.server))

    def __serve_build_asgi_app__(self) -> AdmissionMiddleware:
        return self.app


def build(settings: ScaleSettings) -> Any:
    """Build the application, without starting it."""
    replicas = replica_deployment(settings).bind(settings)
    return gateway_deployment(settings).bind(replicas, settings)


def replica_deployment(settings: ScaleSettings) -> Any:
    scaling: dict[str, Any] = {"num_replicas": settings.max_replicas}
    if settings.scales:
        scaling = {
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
        max_ongoing_requests=settings.requests_per_gateway * settings.gateways + RESERVE,
        max_queued_requests=settings.max_queued_requests,
        health_check_period_s=settings.health_period_seconds,
        health_check_timeout_s=settings.health_timeout_seconds,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=settings.server.drain_seconds,
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter,
            request_router_kwargs={
                "limit": settings.requests_per_gateway,
                "imbalance": settings.imbalance,
                "table_blocks": settings.table_blocks,
            },
        ),
        logging_config=LoggingConfig(enable_access_log=False),  # the server has its own request log
        **scaling,
    )


def gateway_deployment(settings: ScaleSettings) -> Any:
    # Requests wait for a replica in the gateway, so its limit is above the sum of the limits of all replicas.
    running = settings.max_replicas * settings.max_ongoing_requests
    return serve.deployment(
        serve.ingress()(GatewayProcess),
        name="Gateway",
        num_replicas=settings.gateways,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=running + settings.max_queued_requests + GATEWAY_RESERVE,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=settings.server.drain_seconds,
    )
