"""`outrider serve`: the model behind OpenAI's API, and a page to watch it."""

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
from .options import DRAFT, ENGINE, DraftFlags, EngineFlags, unfold

if TYPE_CHECKING:
    from ..llm import LLM

NEEDED = ("starlette", "uvicorn", "msgspec", "prometheus_client")


@unfold
def serve(
    model: Annotated[
        str, typer.Argument(help="Catalog name, hub name, HF folder or GGUF file")
    ] = options.DEFAULT_MODEL,
    host: Annotated[
        str, typer.Option(help="Address to listen at; 0.0.0.0: all of this machine's")
    ] = ServerOptions.host,
    port: Annotated[int, typer.Option(help="Port to listen at; 0: any free one")] = ServerOptions.port,
    served_model_name: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="What requests call the model; may be given several times")
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Answer only who knows it; may be given several times, or as OUTRIDER_KEY"),
    ] = None,
    draft: DraftFlags = DRAFT,
    engine: EngineFlags = ENGINE,
    max_context: Annotated[
        int | None,
        typer.Option("--max-context", "--max-model-len", help="Tokens of prompt and output together at most"),
    ] = None,
    max_requests: Annotated[
        int, typer.Option("--max-requests", "--max-num-seqs", help="Requests that run at once")
    ] = EngineConfig.max_requests,
    max_step_tokens: Annotated[
        int | None, typer.Option("--max-step-tokens", "--max-num-batched-tokens", help="Tokens of one step at most")
    ] = None,
    cache_tokens: Annotated[int | None, typer.Option(help="Tokens that the key/value cache holds")] = None,
    seed: Annotated[int, typer.Option(help="For requests without a seed of their own")] = EngineConfig.seed,
    max_waiting: Annotated[
        int, typer.Option(help="Requests in the queue before newcomers hear 429")
    ] = ServerOptions.max_waiting,
    max_prompt_tokens: Annotated[int | None, typer.Option(help="Tokens of one prompt at most")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens that a request may ask for at most")] = None,
    max_body_bytes: Annotated[int, typer.Option(help="Size of one request at most")] = ServerOptions.max_body_bytes,
    receive_seconds: Annotated[
        float, typer.Option(help="Time for a request to arrive")
    ] = ServerOptions.receive_seconds,
    drain_seconds: Annotated[
        float, typer.Option(help="Time for running requests when told to stop")
    ] = ServerOptions.drain_seconds,
    no_playground: Annotated[bool, typer.Option("--no-playground", help="Without the page at /")] = False,
    no_log_requests: Annotated[bool, typer.Option("--no-log-requests", help="Without a line a request")] = False,
    log_json: Annotated[bool, typer.Option("--log-json", help="Those lines as JSON")] = False,
) -> None:
    """Serve a model over HTTP, as OpenAI does, and at / a page to watch it draft."""
    check_installed()
    with options.importing():
        from ..server.app import build_app
        from ..server.lifetime import listen
        from ..server.lifetime import serve as run

    keys = [*(api_key or ()), *filter(None, [os.environ.get("OUTRIDER_KEY")])]
    asked = ServerOptions(
        host=host,
        port=port,
        names=tuple(served_model_name or (model,)),
        api_keys=tuple(keys),
        max_body_bytes=max_body_bytes,
        max_waiting=max_waiting,
        max_prompt_tokens=max_prompt_tokens,
        max_tokens=max_tokens,
        receive_seconds=receive_seconds,
        drain_seconds=drain_seconds,
        playground=not no_playground,
        log_requests=not no_log_requests,
        log_json=log_json,
    )
    fields = {
        **vars(engine),
        **draft.fields(),
        "max_context": max_context,
        "max_requests": max_requests,
        "max_step_tokens": max_step_tokens,
        "cache_tokens": cache_tokens,
        "seed": seed,
    }
    with listen(asked) as listener:
        llm = load(model, fields)
        from ..async_llm import AsyncLLM

        app = build_app(AsyncLLM(llm), asked)
        greet(llm, asked.names[0], listener.getsockname(), bool(keys), asked.playground)
        status = run(app, asked, listener)
    raise typer.Exit(status)


def check_installed() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"`outrider serve` needs `{missing[0]}`: run `pip install 'outrider[server]'`")


def load(model: str, fields: dict[str, Any]) -> LLM:
    started = time.perf_counter()
    llm = options.open_model(model, **fields)
    plan = llm.resolved
    console.note(
        f"loaded {model} in {time.perf_counter() - started:.1f} s: {plan.backend}, context {plan.max_context}, "
        f"{plan.max_requests} requests at once, {plan.pages * plan.page_size} tokens in the cache"
    )
    return llm


def greet(llm: LLM, name: str, address: tuple[Any, ...], keys: bool, playground: bool) -> None:
    host, port = address[:2]
    shown = f"[{host}]" if ":" in host else host
    base = f"http://{shown}:{port}"
    console.note(f"drafting: {llm.engine.spec_manager.plan.method or 'none, plain decoding'}")
    if playground:
        console.note(f"playground: {base}/")
    key = " -H 'Authorization: Bearer KEY'" if keys else ""
    kind, ask = ("chat/", '"messages": [{"role": "user", "content": "Hello"}]')
    if llm.tokenizer.chat_template is None:
        kind, ask = "", '"prompt": "The sea is"'
    body = f'{{"model": "{name}", {ask}}}'
    console.note(f"try: curl {base}/v1/{kind}completions{key} -H 'Content-Type: application/json' -d '{body}'")
