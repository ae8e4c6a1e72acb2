"""The body of an HTTP request, read within limits and parsed as a JSON object."""

import json
from collections.abc import Mapping

from fastapi import Request

from jpaged.entrypoints.server.errors import ApiError
from jpaged.errors import RequestError

MAX_BODY_BYTES = 16 * 2**20


async def read_json(request: Request) -> Mapping[str, object]:
    """The JSON object in the body. ApiError or RequestError if it is none, or too large."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise ApiError(415, f"content-encoding {encoding[:64]!r} is not supported")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > MAX_BODY_BYTES:
        raise _too_large()
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise _too_large()
        chunks.append(chunk)
    data = b"".join(chunks)
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise RequestError(f"the body is not JSON: {reason[:200]}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object", code="invalid_json")
    # Half of a surrogate pair can only be written as an escape.
    if b"\\u" in data:
        for name, value in body.items():
            if not (_is_text(name) and _is_text(value)):
                raise RequestError(
                    "the body holds half of a surrogate pair, which is no character",
                    field=name if _is_text(name) else None,
                )
    return body


def _too_large() -> ApiError:
    return ApiError(
        413, f"the body is larger than {MAX_BODY_BYTES} bytes", code="request_too_large"
    )


def _is_text(value: object) -> bool:
    """Whether every string inside can be written as UTF-8."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return False
        return True
    if isinstance(value, dict):
        return all(_is_text(k) and _is_text(v) for k, v in value.items())
    return not isinstance(value, list) or all(map(_is_text, value))
