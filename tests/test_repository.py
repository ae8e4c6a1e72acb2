"""The shape of the house: who imports whom, how long files are, what must not be in them."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINKS = ("jpaged/models", "jpaged/pallas_kernels")

# Who may import whom, beside itself, the standard library and packages of other people.
ALLOWED = {
    "jpaged.errors": set(),
    "jpaged.pallas_kernels": set(),
    "jpaged.models": {"jpaged.pallas_kernels", "jpaged.errors"},
    "jpaged.core": {"jpaged.errors"},
    "jpaged.sampling": {"jpaged.errors", "jpaged.pallas_kernels"},
    "jpaged.worker": {
        "jpaged.core",
        "jpaged.errors",
        "jpaged.models",
        "jpaged.pallas_kernels",
        "jpaged.sampling",
    },
    "jpaged.engine": {
        "jpaged.core",
        "jpaged.errors",
        "jpaged.models",
        "jpaged.sampling",
        "jpaged.worker",
    },
    "jpaged.entrypoints": {"jpaged.engine", "jpaged.errors", "jpaged.sampling"},
}
THIRD_PARTY = {
    "jpaged.core": set(),
    "jpaged.errors": set(),
    "jpaged.pallas_kernels": {"jax", "jaxlib", "jaxtyping", "numpy", "numba", "llvmlite"},
}
RISKY = ("allow_pickle", "trust_remote_code")
# Lines. A file may run a fifth over: one that outgrows its budget owns two things.
BUDGETS = {"pallas_kernels": 500, "tests": 400, "scripts": 200}


def python_files(*folders: str) -> list[Path]:
    return [
        path
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "__pycache__" not in path.parts
    ]


def package_files() -> Iterator[tuple[str, Path]]:
    """Each file of jpaged once, with its module name, the linked folders under their package names."""
    for path in python_files("jpaged"):
        if not any(path.is_relative_to(ROOT / link) for link in LINKS):
            yield module_name(path.relative_to(ROOT)), path
    for folder in ("models", "pallas_kernels"):
        for path in python_files(folder):
            yield module_name(Path("jpaged") / path.relative_to(ROOT)), path


def module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer(module: str) -> str:
    return ".".join(module.split(".")[:2])


def imports(module: str, path: Path) -> Iterator[str]:
    """Absolute names of all that a file imports, wherever in it, except for type checkers alone."""
    tree = ast.parse(path.read_text())
    checking = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for node in ast.walk(block)
    }
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if id(node) in checking:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if not node.level:
                yield node.module or ""
                continue
            base = package.split(".")[: len(package.split(".")) - node.level + 1]
            yield ".".join([*base, *([node.module] if node.module else [])])


def test_imports_go_one_way() -> None:
    wrong = []
    for module, path in package_files():
        if module == "jpaged":
            continue
        assert layer(module) in ALLOWED, f"{module} belongs to no layer"
        for name in imports(module, path):
            top = name.split(".")[0]
            if top in ("models", "pallas_kernels"):
                wrong.append(f"{module} imports {name}: write jpaged.{name}")
            elif top == "jpaged":
                if name != "jpaged" and layer(name) not in {layer(module), *ALLOWED[layer(module)]}:
                    wrong.append(f"{module} imports {name}")
            elif top not in sys.stdlib_module_names:
                allowed = THIRD_PARTY.get(layer(module))
                if allowed is not None and top not in allowed:
                    wrong.append(f"{module} imports {name}")
            if top == "torch":
                wrong.append(f"{module} imports torch")
    assert wrong == []


def test_scripts_are_imported_by_nobody() -> None:
    for path in python_files("jpaged", "models", "pallas_kernels"):
        assert not re.search(r"^\s*(from|import) scripts\b", path.read_text(), re.M), path


BLOCK_JAX = """
import importlib, pkgutil, sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("jax", "jaxlib", "flax", "transformers"):
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Block())
"""


def run_python(code: str, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, *args, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_core_and_what_users_configure_import_no_jax() -> None:
    run_python(
        BLOCK_JAX
        + """
import jpaged, jpaged.core, jpaged.errors, jpaged.sampling.params, jpaged.engine.outputs
import jpaged.engine.engine_args
for module in pkgutil.iter_modules(jpaged.core.__path__):
    importlib.import_module("jpaged.core." + module.name)
jpaged.SamplingParams(), jpaged.RequestOutput, jpaged.EngineArgs, jpaged.ConfigError
"""
    )


def test_public_names_are_lazy_and_all_there() -> None:
    out = run_python(
        """
import sys, jpaged
assert "jax" not in sys.modules
for name in jpaged.__all__:
    assert getattr(jpaged, name) is not None, name
assert set(jpaged.__all__) <= set(dir(jpaged))
try:
    jpaged.nothing
except AttributeError as error:
    print(error)
"""
    )
    assert "has no attribute 'nothing'" in out


def test_importing_changes_no_environment_variable_and_no_jax_setting() -> None:
    run_python(
        """
import os
import jax
before = dict(os.environ), dict(jax.config.values)
import jpaged
for name in jpaged.__all__:
    getattr(jpaged, name)
assert (dict(os.environ), dict(jax.config.values)) == before
"""
    )


@pytest.mark.parametrize("link", LINKS)
def test_links_are_relative_and_committed(link: str) -> None:
    path = ROOT / link
    assert path.is_symlink()
    target = path.readlink()
    assert not target.is_absolute() and (path.parent / target).resolve() == ROOT / path.name
    if (ROOT / ".git").exists():
        listed = subprocess.run(
            ["git", "ls-files", "--stage", link],
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=True,
        ).stdout
        assert listed.startswith("120000 "), "not committed as a link"


def test_files_keep_to_their_line_budget() -> None:
    over = []
    for path in python_files("jpaged", "models", "pallas_kernels", "scripts", "tests"):
        budget = BUDGETS.get(path.relative_to(ROOT).parts[0], 300)
        lines = len(path.read_text().splitlines())
        if lines > 1.2 * budget:
            over.append(f"{path.relative_to(ROOT)}: {lines} lines, budget {budget}")
    assert over == []


def test_each_module_of_the_package_says_what_it_is_for() -> None:
    for module, path in package_files():
        assert ast.get_docstring(ast.parse(path.read_text())), f"{module} has no docstring"


FOLDERS = ("jpaged", "models", "pallas_kernels", "scripts", "tests", "docs", "constraints", ".ci")


def texts() -> Iterator[tuple[str, str]]:
    """Names and texts of all that is committed, or would be in a copy without git."""
    paths = [path for path in ROOT.iterdir() if path.is_file()]
    for folder in FOLDERS:
        paths += (ROOT / folder).rglob("*")
    if (ROOT / ".git").exists():
        command = ["git", "ls-files", "-z"]
        listed = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
        paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    for path in paths:
        plain = path.is_file() and not path.is_symlink() and "__pycache__" not in path.parts
        if plain and path.suffix not in (".npz", ".gguf", ".safetensors"):
            yield str(path.relative_to(ROOT)), path.read_text(errors="replace")


def test_nothing_names_a_machine_or_unfinished_work() -> None:
    # Put together here, so that this file does not hold what it looks for.
    machine = re.compile(
        "|".join(["/" + "work/", "/ho" + "me/", "/ro" + "ot/", "/tm" + "p/w", r"\.lib" + "rary"])
    )
    unfinished = re.compile(r"\b(TO" + "DO|FIX" + "ME|XX" + "X)" + r"\b")
    found = []
    for name, text in texts():
        for number, line in enumerate(text.splitlines(), start=1):
            if machine.search(line):
                found.append(f"{name}:{number}: {line.strip()[:80]}")
            if name.endswith(".py") and unfinished.search(line):
                found.append(f"{name}:{number}: {line.strip()[:80]}")
    assert found == []


def test_no_code_that_runs_data() -> None:
    """Nothing unpickles, evaluates or loads tensors in a form that can hold code."""
    wrong = []
    for path in python_files("jpaged", "models", "pallas_kernels"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                if name in ("eval", "exec", "yaml.load", "torch.load") or "pickle" in name:
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {name}")
            risky = isinstance(node, ast.keyword) and node.arg in RISKY
            if risky and ast.unparse(node.value) != "False":
                wrong.append(f"{path.relative_to(ROOT)}: {node.arg}")
    assert wrong == []
