"""build_app(): the routes, each from a parsed body to respond()."""

import time
import uuid

from fastapi import FastAPI, Request, Response

import jpaged
from jpaged.engine.async_llm_engine import AsyncLLMEngine
from jpaged.engine.output_processor import BackendDecoder
from jpaged.entrypoints.server.body import read_json
from jpaged.entrypoints.server.errors import (
    ApiError,
    error_response,
    install_error_handlers,
)
from jpaged.entrypoints.server.metrics import Metrics
from jpaged.entrypoints.server.protocol import Body, ChatBody, CompletionBody, GenerateBody
from jpaged.entrypoints.server.respond import respond
from jpaged.entrypoints.server.writers import ChatWriter, CompletionWriter, GenerateWriter


def build_app(engine: AsyncLLMEngine) -> FastAPI:
    """The server's ASGI app over a running engine. Closing the engine is the caller's."""
    app = FastAPI(title="jpaged", version=jpaged.__version__)
    install_error_handlers(app)
    metrics = Metrics(engine)
    created = int(time.time())

    def check_model(model: str | None) -> None:
        if model and model != engine.model_name:
            raise ApiError(
                404,
                f"the model {model[:200]!r} is not served here; this is {engine.model_name!r}",
                param="model",
                code="model_not_found",
            )

    def model_card() -> dict[str, object]:
        return {
            "id": engine.model_name,
            "object": "model",
            "created": created,
            "owned_by": "jpaged",
            "root": engine.model_name,
            "parent": None,
            "max_model_len": engine.max_model_len,
            "source": engine.model_source,
            "permission": [],
        }

    @app.post("/v1/completions", openapi_extra=_described("/v1/completions", CompletionBody))
    async def completions(request: Request) -> Response:
        """Text that goes on from one or several prompts."""
        body = CompletionBody.parse(await read_json(request))
        check_model(body.model)
        params, prompts = body.params(), body.prompts()
        writer = CompletionWriter(
            f"cmpl-{uuid.uuid4().hex}",
            params.n,
            model=engine.model_name,
            include_usage=body.includes_usage,
            decode=(lambda ids: _text(engine, ids)) if body.echo else None,
        )
        return await respond(
            request,
            engine,
            metrics,
            writer,
            prompts=[body.salted(prompt) for prompt in prompts],
            params=params,
            stream=bool(body.stream),
            **body.scheduling(),
        )

    @app.post("/v1/chat/completions", openapi_extra=_described("/v1/chat/completions", ChatBody))
    async def chat_completions(request: Request) -> Response:
        """The assistant's next message."""
        body = ChatBody.parse(await read_json(request))
        check_model(body.model)
        params, messages = body.params(), body.template_messages()
        continues = bool(body.continue_final_message)
        generates = body.add_generation_prompt
        prompt = await engine.apply_chat_template(
            messages,
            chat_template_kwargs=body.chat_template_kwargs,
            add_generation_prompt=not continues if generates is None else generates,
            continue_final_message=continues,
        )
        writer = ChatWriter(
            f"chatcmpl-{uuid.uuid4().hex}",
            params.n,
            model=engine.model_name,
            include_usage=body.includes_usage,
            num_top=body.top_logprobs or 0,
        )
        return await respond(
            request,
            engine,
            metrics,
            writer,
            prompts=[body.salted(prompt)],
            params=params,
            stream=bool(body.stream),
            **body.scheduling(),
        )

    @app.post("/generate", openapi_extra=_described("/generate", GenerateBody))
    async def generate(request: Request) -> Response:
        """Samples of one prompt, in jpaged's own form."""
        body = GenerateBody.parse(await read_json(request))
        params = body.params()
        writer = GenerateWriter(f"gen-{uuid.uuid4().hex}", params.n, prompt=body.prompt)
        return await respond(
            request,
            engine,
            metrics,
            writer,
            prompts=[body.salted(body.prompt)],
            params=params,
            stream=bool(body.stream),
            **body.scheduling(),
        )

    @app.get("/v1/models")
    async def models() -> dict[str, object]:
        """The model that is served, and where its weights came from."""
        return {"object": "list", "data": [model_card()]}

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, object]:
        """The model, by its name."""
        check_model(model)
        return model_card()

    @app.get("/health")
    async def health() -> Response:
        """200 while requests are served, 503 afterwards."""
        if engine.is_running:
            return Response()
        return error_response(ApiError(503, "the engine is dead", code="engine_dead"))

    @app.get("/metrics")
    async def prometheus() -> Response:
        """Metrics for Prometheus."""
        return Response(metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/version")
    async def version() -> dict[str, str]:
        """The version of jpaged."""
        return {"version": jpaged.__version__}

    return app


def _described(path: str, body: type[Body]) -> dict[str, object]:
    """The body's schema for /docs; the body itself is read within limits, not by the framework."""
    place = f"#/paths/{path.replace('/', '~1')}/post/requestBody/content/application~1json/schema"
    schema = body.model_json_schema(ref_template=place + "/$defs/{model}")
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _text(engine: AsyncLLMEngine, token_ids: list[int]) -> str:
    """The text of a prompt that was given as ids."""
    if engine.tokenizer is None:
        return ""
    return BackendDecoder(engine.tokenizer).decode(token_ids)
