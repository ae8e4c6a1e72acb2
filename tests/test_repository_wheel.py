"""The wheel: built from the sources, installed alone and outside the checkout, it has all of jpaged."""

import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a venv that has the wheel, and this environment's other packages."""
    work = tmp_path_factory.mktemp("wheel")
    source = work / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("jpaged", "models", "pallas_kernels"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=skip)
    # No isolation: setuptools is in the test extra, and nothing is fetched.
    build = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir"]
    run(sys.executable, "-m", "pip", *build, str(work), str(source))
    (wheel,) = work.glob("jpaged-*.whl")
    environment = work / "venv"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    target = next((environment / "lib").glob("python*/site-packages"))
    install = ["install", "--no-deps", "--no-index", "--quiet", "--target"]
    run(sys.executable, "-m", "pip", *install, str(target), str(wheel))
    # What jpaged depends on, but not jpaged itself: an editable install is a finder in this folder.
    others = Path(sysconfig.get_paths()["purelib"])
    linked = work / "others"
    linked.mkdir()
    for entry in others.iterdir():
        if "jpaged" not in entry.name and entry.suffix != ".pth":
            (linked / entry.name).symlink_to(entry)
    (target / "others.pth").write_text(f"{linked}\n")
    return python


def run(*command: str | Path, cwd: Path | None = None) -> str:
    environment = {"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_has_the_linked_packages_and_installs_nothing_else(site: Path) -> None:
    code = """
import importlib.util, pathlib, jpaged
import jpaged.models, jpaged.models.loading, jpaged.pallas_kernels
import jpaged.pallas_kernels.paged_attention, jpaged.pallas_kernels.matmul
root = pathlib.Path(jpaged.__file__).parent
assert "site-packages" in str(root), root
assert (root / "py.typed").exists()
assert not (root / "models").is_symlink()
assert importlib.util.find_spec("models") is None, "a top-level package called models"
assert importlib.util.find_spec("pallas_kernels") is None
assert importlib.util.find_spec("tests") is None and importlib.util.find_spec("scripts") is None
print(root)
"""
    out = run(site, "-c", code, cwd=site.parent)
    root = Path(out.strip())
    ours = {
        p.relative_to(ROOT) for p in (ROOT / "models").rglob("*") if p.suffix in (".py", ".json")
    }
    for path in ours:
        if "__pycache__" not in path.parts:
            assert (root / path).exists(), f"{path} is not in the wheel"


def test_every_module_of_the_wheel_can_be_found(site: Path) -> None:
    code = """
import pkgutil, jpaged
print("\\n".join(m.name for m in pkgutil.walk_packages(jpaged.__path__, "jpaged.")))
"""
    found = set(run(site, "-c", code, cwd=site.parent).split())
    want = set()
    for folder in ("jpaged", "models", "pallas_kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            parts = parts if parts[0] == "jpaged" else ("jpaged", *parts)
            want.add(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    want.discard("jpaged")
    assert want <= found, want - found
