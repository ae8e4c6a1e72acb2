"""Errors on their way to an HTTP client: always the OpenAI error form, never a traceback."""

import http
import json
import logging

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from jpaged.engine.outputs import RequestOutput
from jpaged.errors import EngineDeadError, QueueFullError, RequestError

logger = logging.getLogger("jpaged")

INTERNAL_ERROR = "internal_error"


class ApiError(Exception):
    """An answer that is an error, with its HTTP status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers
        self.param = param
        self.code = code


def as_api_error(error: BaseException) -> ApiError:
    """What a client is told of an exception."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=error.field, code=error.code)
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full", headers={"retry-after": "1"})
    if isinstance(error, EngineDeadError):
        return ApiError(503, str(error), code="engine_dead")
    return ApiError(500, "an error inside the server; its log says more", code=INTERNAL_ERROR)


def failure(output: RequestOutput) -> ApiError | None:
    """What a client is told whose request did not end by itself; None if it did, or has not ended."""
    reasons = {part.finish_reason for part in output.outputs}
    if "error" in reasons:
        return ApiError(500, "the request failed inside the server", code=INTERNAL_ERROR)
    if "abort" not in reasons:
        return None
    if any(part.stop_reason == "deadline" for part in output.outputs):
        return ApiError(504, "the request's timeout has passed", code="timeout", param="timeout")
    return ApiError(503, "the request was aborted by the server", code="request_aborted")


def error_body(error: ApiError) -> dict[str, object]:
    """The OpenAI error form."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    if error.status == 429:
        kind = "rate_limit_error"
    return {
        "error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}
    }


def error_event(error: ApiError) -> bytes:
    """The error as an event of a stream whose status has been sent."""
    return b"data: " + json.dumps(error_body(error)).encode() + b"\n\n"


def error_response(error: ApiError, headers: dict[str, str] | None = None) -> JSONResponse:
    """The error as a whole answer."""
    return JSONResponse(error_body(error), error.status, headers)


def install_error_handlers(app: FastAPI) -> None:
    """Gives every error of `app`, routing's included, the OpenAI form."""

    async def on_known(request: Request, error: Exception) -> JSONResponse:
        told = as_api_error(error)
        return error_response(told, told.headers)

    async def on_http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        message, code = str(error.detail), None
        if error.status_code == 404:
            message = f"there is no {request.url.path} here"
            code = "not_found"
        elif error.status_code == 405:
            message = f"{request.url.path} does not take {request.method}"
            code = "method_not_allowed"
        elif not message:
            message = http.HTTPStatus(error.status_code).phrase
        headers = dict(error.headers) if error.headers else None
        return error_response(ApiError(error.status_code, message, code=code), headers)

    for kind in (ApiError, RequestError, QueueFullError, EngineDeadError, Exception):
        app.add_exception_handler(kind, on_known)
    app.add_exception_handler(HTTPException, on_http)
