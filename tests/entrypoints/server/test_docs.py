"""What docs/serving.md shows is run as it stands there, over a fake engine."""

import contextlib
import re
import shlex
import sys
import types
from pathlib import Path

import httpx
import pytest
from fastapi.testclient import TestClient

from tests.entrypoints.server.conftest import serving
from tests.entrypoints.server.fake_engine import FakeEngine

PAGE = (Path(__file__).parents[3] / "docs" / "serving.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
REPLY = "Hello from the fake."


def blocks(language, holding):
    """The text of the blocks in a language that hold some text."""
    found = [text for kind, text in BLOCKS if kind == language and holding in text]
    assert found
    return found


def test_the_app_around_an_async_engine(monkeypatch):
    (source,) = blocks("python", "FastAPI()")
    assert len([line for line in source.splitlines() if line]) <= 10
    module = types.ModuleType("jpaged.engine.llm_engine")
    module.LLMEngine = FakeEngine
    monkeypatch.setitem(sys.modules, "jpaged.engine.llm_engine", module)
    space = {}
    exec(compile(source, "docs/serving.md", "exec"), space)
    with contextlib.closing(space["engine"]), TestClient(space["app"]) as client:
        assert client.get("/answer", params={"prompt": "hi"}).json() == REPLY
        lines = client.get("/stream", params={"prompt": "hi"}).text.splitlines()
        assert lines[-1] == REPLY[:16]
        assert lines == sorted(lines, key=len)


@pytest.fixture(scope="module")
def at_8000():
    """A server, and a way to say its address in place of the page's."""
    with serving(FakeEngine()) as served:
        yield lambda text: text.replace("127.0.0.1:8000", f"127.0.0.1:{served.port}")


def test_the_openai_client(at_8000, capsys):
    (source,) = blocks("python", "OpenAI(")
    space = {}
    exec(compile(at_8000(source), "docs/serving.md", "exec"), space)
    space["client"].close()
    first, second, third = capsys.readouterr().out.splitlines()
    assert (first, second) == (REPLY, REPLY)
    assert third.endswith("tokens")


def test_the_curl_lines(at_8000):
    (source,) = blocks("sh", "curl ")
    commands = [c for c in at_8000(source).replace("\\\n", "").split("\n") if c]
    assert len(commands) == 3
    for command in commands:
        words = [word for word in shlex.split(command) if word != "-N"]
        name, url, header, kind, data, body = words
        assert (name, header, data) == ("curl", "-H", "-d")
        key, _, value = kind.partition(": ")
        response = httpx.post(url, headers={key: value}, content=body)
        assert response.status_code == 200
        assert "Hello" in response.text or '"text":"H"' in response.text


def test_every_error_code_and_route_is_on_the_page(at_8000):
    sources = Path(__file__).parents[3] / "jpaged" / "entrypoints" / "server"
    text = "".join(path.read_text() for path in sources.glob("*.py"))
    codes = set(re.findall(r'code="(\w+)"|code = "(\w+)"|INTERNAL_ERROR = "(\w+)"', text))
    for code in ("".join(groups) for groups in codes):
        assert f"`{code}`" in PAGE, code
    for method, path in re.findall(r'@app\.(get|post)\("([^"{]*?)/?(?:\{|")', text):
        assert f"{method.upper()} {path}" in PAGE, path
