"""`outrider serve`: serve a model with an OpenAI-compatible API."""

from __future__ import annotations

import importlib.util
import os
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..config import EngineConfig
from ..errors import UserError
from ..server.options import ServerOptions
from . import console, options
from .options import DRAFT, ENGINE, LORA, DraftFlags, EngineFlags, LoraFlags, unfold

if TYPE_CHECKING:
    from ..llm import LLM

DEFAULT = f"[default: {options.DEFAULT_MODEL}]"
REQUIRED_PACKAGES = ("starlette", "uvicorn", "msgspec", "prometheus_client")


@unfold
def serve(
    model: Annotated[str | None, typer.Argument(help=f"{options.MODEL_HELP} {DEFAULT}", show_default=False)] = None,
    model_flag: Annotated[str | None, typer.Option("--model", "-m", help="The same as MODEL")] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen at; 0.0.0.0 means all network interfaces")
    ] = ServerOptions.host,
    port: Annotated[int, typer.Option(help="Port to listen at; 0 means any free port")] = ServerOptions.port,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Model name that requests use; may be repeated [default: MODEL]"),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Require this API key from clients; may be repeated, or set as OUTRIDER_KEY"),
    ] = None,
    draft: DraftFlags = DRAFT,
    engine: EngineFlags = ENGINE,
    lora: LoraFlags = LORA,
    allow_lora_updates: Annotated[
        bool,
        typer.Option(
            "--allow-lora-updates",
            help="Let clients load adapters from folders of this machine, and unload them: only if you trust all",
        ),
    ] = ServerOptions.allow_lora_updates,
    max_context: options.MaxContext = None,
    max_requests: Annotated[
        int, typer.Option("--max-requests", "--max-num-seqs", help="Maximum number of requests that run at once")
    ] = EngineConfig.max_requests,
    max_step_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-step-tokens",
            "--max-num-batched-tokens",
            help="Maximum tokens in one engine step [default: chosen for the device]",
        ),
    ] = None,
    cache_tokens: Annotated[
        int | None,
        typer.Option(help="Memory of the KV cache, in tokens kept by all layers [default: chosen for the device]"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed for sampling in requests that set no seed")] = EngineConfig.seed,
    max_waiting: Annotated[
        int, typer.Option(help="Maximum number of queued requests; further ones get status 429")
    ] = ServerOptions.max_waiting,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(help="Maximum tokens of one prompt [default: the context]")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Maximum tokens that one request may generate [default: the context]")
    ] = None,
    max_body_bytes: Annotated[
        int, typer.Option(help="Maximum size of one HTTP request in bytes")
    ] = ServerOptions.max_body_bytes,
    max_stored_responses: Annotated[
        int, typer.Option(help="Responses of /v1/responses kept in memory, for clients to continue; 0: none")
    ] = ServerOptions.max_stored_responses,
    receive_seconds: Annotated[
        float, typer.Option(help="Seconds for the head and for the body of a request to arrive")
    ] = ServerOptions.receive_seconds,
    send_seconds: Annotated[
        float, typer.Option(help="Seconds after which a client that reads nothing of its response is disconnected")
    ] = ServerOptions.send_seconds,
    drain_seconds: Annotated[
        float, typer.Option(help="Seconds that running requests get to finish after SIGTERM or Ctrl-C")
    ] = ServerOptions.drain_seconds,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="Let web pages of this origin call the server, as https://example.com, or * for all; may be repeated",
        ),
    ] = None,
    reasoning_format: Annotated[
        str, typer.Option(help="auto: return <think> blocks as `reasoning_content`; none: leave them in the content")
    ] = ServerOptions.reasoning_format,
    no_playground: Annotated[bool, typer.Option("--no-playground", help="Do not serve the web page at /")] = False,
    no_log_requests: Annotated[
        bool, typer.Option("--no-log-requests", help="Do not log a line for each request")
    ] = False,
    log_json: Annotated[bool, typer.Option("--log-json", help="Log requests as JSON lines")] = False,
    otlp_traces_endpoint: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Send an OpenTelemetry span per request to this collector (OTLP)"),
    ] = None,
) -> None:
    """Serve a model with an OpenAI-compatible HTTP API, and a web page at / that shows its drafts."""
    if model is not None and model_flag is not None and model != model_flag:
        raise typer.BadParameter(f"the model is `{model}` and `--model` is `{model_flag}`: pass one of them")
    model = model or model_flag or options.DEFAULT_MODEL
    check_installed()
    with options.importing():
        from ..server.app import build_app, listen
        from ..server.app import serve as run

    keys = [*(api_key or ()), *filter(None, [os.environ.get("OUTRIDER_KEY")])]
    server_options = ServerOptions(
        host=host,
        port=port,
        names=tuple(served_model_name or (model,)),
        api_keys=tuple(keys),
        max_body_bytes=max_body_bytes,
        max_waiting=max_waiting,
        max_prompt_tokens=max_prompt_tokens,
        max_tokens=max_tokens,
        allow_lora_updates=allow_lora_updates,
        max_stored_responses=max_stored_responses,
        receive_seconds=receive_seconds,
        send_seconds=send_seconds,
        drain_seconds=drain_seconds,
        allow_origins=tuple(allow_origin or ()),
        reasoning_format=reasoning_format,
        playground=not no_playground,
        log_requests=not no_log_requests,
        log_json=log_json,
        otlp_traces_endpoint=otlp_traces_endpoint,
    )
    if otlp_traces_endpoint is not None:
        from ..server import tracing

        tracing.check_installed()  # before the model is loaded
    config = {
        **vars(engine),
        **draft.fields(),
        **lora.fields(),
        "max_context": max_context,
        "max_requests": max_requests,
        "max_step_tokens": max_step_tokens,
        "cache_tokens": cache_tokens,
        "seed": seed,
    }
    with listen(server_options) as listener:
        llm = load(model, config)
        from ..async_llm import AsyncLLM

        app = build_app(AsyncLLM(llm), server_options)
        console.note(draft.drafting(llm))
        print_address(llm, server_options.names[0], listener.getsockname(), bool(keys), server_options.playground)
        status = run(app, server_options, listener)
    raise typer.Exit(status)


def check_installed() -> None:
    missing = [name for name in REQUIRED_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"`outrider serve` needs `{missing[0]}`: run `pip install 'outrider[server]'`")


def load(model: str, config: dict[str, Any]) -> LLM:
    started = time.perf_counter()
    llm = options.open_model(model, **config)
    resolved = llm.resolved
    console.note(
        f"loaded {model} in {time.perf_counter() - started:.1f} s: {resolved.backend}, context {resolved.max_context}, "
        f"{resolved.max_requests} requests at once, {resolved.pages * resolved.page_size} tokens in the KV cache"
    )
    console.note(f"KV cache: {resolved.kv_memory}")
    return llm


def print_address(llm: LLM, name: str, address: tuple[Any, ...], has_keys: bool, playground: bool) -> None:
    host, port = address[:2]
    bracketed = f"[{host}]" if ":" in host else host
    base = f"http://{bracketed}:{port}"
    if playground:
        console.note(f"playground: {base}/")
    key = " -H 'Authorization: Bearer KEY'" if has_keys else ""
    endpoint, question = ("chat/", '"messages": [{"role": "user", "content": "Hello"}]')
    if llm.tokenizer.chat_template is None:
        endpoint, question = "", '"prompt": "The sea is"'
    body = f'{{"model": "{name}", {question}}}'
    console.note(f"try: curl {base}/v1/{endpoint}completions{key} -H 'Content-Type: application/json' -d '{body}'")
