"""Endpoints about the server: models, tokens, embeddings, health, metrics."""

from __future__ import annotations

import base64
import time
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from fulgurite.serve.http.admission import Ticket
from fulgurite.serve.http.api.completions import split_prompts
from fulgurite.serve.http.asgi import JsonResponse, while_connected
from fulgurite.serve.http.body import parse_body, read_body
from fulgurite.serve.http.chat import Conversation, prepare_chat
from fulgurite.serve.http.errors import ApiError, invalid
from fulgurite.serve.http.server import Server
from fulgurite.version import VERSION

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


# ---- models ---------------------------------------------------------------------------------------


def describe_model(server: Server, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": server.created,
        "owned_by": "fulgurite",
        "root": server.model_name,
        "max_model_len": server.context,
        # Anthropic's fields
        "type": "model",
        "display_name": name,
        "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(server.created)),
        "max_input_tokens": server.context,
    }


async def list_models(request: Request, server: Server) -> Response:
    names = server.config.model_names
    models = [describe_model(server, name) for name in names]
    page = {"first_id": names[0], "last_id": names[-1], "has_more": False}  # Anthropic's fields
    return JsonResponse({"object": "list", "data": models, **page})


async def get_model(request: Request, server: Server) -> Response:
    name = request.path_params["model"]
    if not name:
        raise ApiError(404, "name a model after /v1/models/, or list them with /v1/models")
    return JsonResponse(describe_model(server, server.check_model(name)))


# ---- tokens ---------------------------------------------------------------------------------------


class TokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """A text, or a conversation that the chat template formats."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None  # True
    add_generation_prompt: bool | None = None  # True
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    tokens: list[int]


async def tokenize(request: Request, server: Server) -> Response:
    limits = server.config.limits
    raw = await read_body(request, limits)
    body = parse_body(raw, TokenizeRequest, limits)
    server.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("give either 'prompt' or 'messages'", "prompt")
    if body.tools and body.messages is None:
        raise invalid("'tools' needs 'messages'", "tools")
    with server.enter(request, len(raw), None):
        ids = await tokenize_body(server, body)
    reply: dict[str, Any] = {"count": len(ids), "max_model_len": server.context, "tokens": ids}
    if body.return_token_strs:
        backend = server.require_tokenizer().backend
        reply["token_strs"] = [backend.id_to_token(id) for id in ids]
    return JsonResponse(reply)


async def tokenize_body(server: Server, body: TokenizeRequest) -> list[int]:
    if body.prompt is not None:
        return await server.encode(body.prompt, body.add_special_tokens is not False)
    conversation = Conversation(
        body.messages or (),
        body.tools or (),
        add_generation_prompt=body.add_generation_prompt is not False,
    )
    ids, _, _ = await prepare_chat(server, conversation)
    return ids


async def detokenize(request: Request, server: Server) -> Response:
    limits = server.config.limits
    raw = await read_body(request, limits)
    body = parse_body(raw, DetokenizeRequest, limits)
    server.check_model(body.model)
    tokenizer = server.require_tokenizer()
    with server.enter(request, len(raw), None):
        check_ids(server, body.tokens)
        text = await server.run_in_pool(tokenizer.decode, body.tokens, False)
    return JsonResponse({"prompt": text})


def check_ids(server: Server, ids: list[int]) -> None:
    vocab_size = server.require_info().vocab_size
    bad = next((one for one in ids if not 0 <= one < vocab_size), None)
    if bad is not None:
        raise invalid(f"token {bad} is not in the vocabulary of {vocab_size} tokens", "tokens")


# ---- embeddings -----------------------------------------------------------------------------------


class EmbeddingRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None  # float
    dimensions: int | None = None
    user: str | None = None
    deadline: Annotated[float, Meta(gt=0)] | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=1)] | None = None


async def create_embeddings(request: Request, server: Server) -> Response:
    limits = server.config.limits
    raw = await read_body(request, limits)
    body = parse_body(raw, EmbeddingRequest, limits)
    model = server.check_model(body.model)
    if not server.require_info().can_embed:
        raise ApiError(501, "embeddings need an engine on a single rank")
    with server.enter(request, len(raw), body.deadline) as ticket:
        prompts = await read_inputs(server, body)
        rows = await while_connected(request, embed(server, prompts, ticket))
    num_tokens = sum(map(len, prompts))
    vectors = [normalize_vector(np.frombuffer(row, dtype="<f4"), body.dimensions) for row in rows]
    return JsonResponse(
        {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": encode_vector(body, vector)}
                for index, vector in enumerate(vectors)
            ],
            "model": model,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
    )


async def embed(server: Server, prompts: list[list[int]], ticket: Ticket) -> list[bytes]:
    await server.admission.acquire(ticket, 1, float(sum(map(len, prompts))), 0)
    client = server.router.choose([])  # embeddings use no prefix cache
    return await ticket.wait(client.embed(prompts))


async def read_inputs(server: Server, body: EmbeddingRequest) -> list[list[int]]:
    prompts = []
    for one in split_prompts(body.input, server.config.limits.batch, "input"):
        ids = await server.encode(one) if isinstance(one, str) else one
        if body.truncate_prompt_tokens is not None:
            ids = ids[-body.truncate_prompt_tokens :]
        server.check_prompt(ids, "input")
        prompts.append(ids)
    return prompts


def normalize_vector(vector: np.ndarray, dimensions: int | None) -> np.ndarray:
    """The first dimensions (Matryoshka embeddings) or all, with length 1 as OpenAI's have.

    Clients take dot products for cosines.
    """
    if dimensions is not None and not 1 <= dimensions <= len(vector):
        raise invalid(f"'dimensions' must be 1 to {len(vector)}", "dimensions")
    cut = vector[:dimensions]
    norm = float(np.linalg.norm(cut))
    return cut / norm if norm else cut


def encode_vector(body: EmbeddingRequest, vector: np.ndarray) -> list[float] | str:
    if body.encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    values: list[float] = vector.tolist()
    return values


# ---- health, metrics ------------------------------------------------------------------------------


async def health(request: Request, server: Server) -> Response:
    """200 while requests can be served: states from the engines' heartbeats, not from this process."""
    now = time.monotonic()
    engines = [
        {
            "state": client.state,
            "steps": client.progress.steps,
            "seconds_since_report": round(now - client.last_report, 3),
            "restarts": client.restarts,
            **({"restarting": reason} if (reason := client.progress.restarting) else {}),
        }
        for client in server.clients
    ]
    states = [client.state for client in server.router.decode_clients]
    usable = any(state in ("idle", "busy") for state in states)
    if server.admission.is_draining:
        status = "draining"
    elif not usable:
        status = next((one for one in ("restarting", "stalled") if one in states), "starting")
    else:
        status = "busy" if "busy" in states else "idle"
    code = 200 if usable and status != "draining" else 503
    uptime = round(now - server.started_at, 1)
    return JsonResponse({"status": status, "uptime_seconds": uptime, "engines": engines}, code)


async def metrics(request: Request, server: Server) -> Response:
    for client in server.clients:
        waiting = server.admission.waiting if client is server.clients[0] else 0
        server.metrics.read_engine(client, waiting)
    for kind, count in server.admission.audit().items():
        held = count if server.admission.entered == 0 else 0
        server.metrics.audit.labels(server.model_name, "server", kind).set(held)
    return Response(server.metrics.render(), media_type=METRICS_TYPE)


async def version(request: Request, server: Server) -> Response:
    return JsonResponse({"version": VERSION})


async def audit(request: Request, server: Server) -> Response:
    """Leaks by place and kind. All are 0 when nothing runs."""
    return JsonResponse(await server.audit())
