"""Load and unload LoRA adapters while requests run: vLLM's endpoints."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from ...adapters import LoRARequest
from ...errors import UserError
from ..context import Context, context_of
from .errors import ApiError
from .requests import RequestStruct, read_body


class LoadLoraRequest(RequestStruct, kw_only=True):
    """`POST /v1/load_lora_adapter`"""

    lora_name: str
    lora_path: str
    load_inplace: bool = False  # replace an adapter of this name


class UnloadLoraRequest(RequestStruct, kw_only=True):
    """`POST /v1/unload_lora_adapter`"""

    lora_name: str
    lora_int_id: int | None = None


async def load(http_request: Request) -> Response:
    """Load an adapter from a folder of this machine, or from the hub."""
    context = allowed(http_request)
    request = await read_body(http_request, LoadLoraRequest)
    for field in ("lora_name", "lora_path"):
        if not getattr(request, field):
            raise ApiError(400, f"`{field}` is empty: write at least one character", param=field)
    name, llm = request.lora_name, context.llm
    if name in context.names:
        raise ApiError(400, f"`lora_name` is `{name}`, the name of the model: pick another", param="lora_name")
    if name in llm.engine.adapters.loaded and not request.load_inplace:
        raise ApiError(400, f"the adapter `{name}` is loaded already: unload it first", param="lora_name")
    try:
        await llm.add_lora(LoRARequest(name, lora_path=request.lora_path), replace=request.load_inplace)
    except UserError as error:
        raise ApiError(400, str(error), param="lora_path") from None
    return Response(f"Success: LoRA adapter '{name}' added successfully.", media_type="text/plain")


async def unload(http_request: Request) -> Response:
    """Unload an adapter. Its unfinished requests go on with it."""
    context = allowed(http_request)
    request = await read_body(http_request, UnloadLoraRequest)
    name = request.lora_name
    try:
        await context.llm.remove_lora(name)
    except UserError as error:
        raise ApiError(404, str(error), param="lora_name", kind="not_found_error") from None
    return Response(f"Success: LoRA adapter '{name}' removed successfully.", media_type="text/plain")


def allowed(http_request: Request) -> Context:
    """Return the context; raise 403 if clients may not change the adapters, or 400 if there are none."""
    context = context_of(http_request)
    if not context.options.allow_lora_updates:
        raise ApiError(
            403, "clients may not load adapters here: start the server with `--allow-lora-updates`", code="not_allowed"
        )
    if not context.llm.engine.adapters.enabled:
        raise ApiError(400, "adapters are off: start the server with `--enable-lora`")
    return context
