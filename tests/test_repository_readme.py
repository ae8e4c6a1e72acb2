"""What the README and CONTRIBUTING say is so: commands, files, tests and examples."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
OWNERS = re.findall(r"^\| ([^|]+) \| `([^`|]+)` \| `([^`|]+)::(\w+)` \|$", README, re.MULTILINE)
REQUIRED = (
    "page pool",
    "page table",
    "KV cache manager",
    "scheduler",
    "engine",
    "worker",
    "continuous batching",
    "chunked prefill",
    "preemption",
    "sampling",
    "paged attention",
    "kernels",
    "entry points",
    "weights",
    "loading",
)


def names_in(path: Path) -> set[str]:
    """Functions and classes of a file, and names that are assigned in it, at any depth."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


@pytest.mark.parametrize(
    ("concept", "owner", "test", "name"), OWNERS, ids=[row[0] for row in OWNERS]
)
def test_each_owner_and_its_test_exist(concept: str, owner: str, test: str, name: str) -> None:
    assert (ROOT / owner).exists(), f"{concept}: no {owner}"
    assert (ROOT / test).is_file(), f"{concept}: no {test}"
    assert name.lower().startswith("test"), name
    assert name in names_in(ROOT / test), f"{concept}: {test} has no {name}"


def test_the_table_names_every_concept() -> None:
    table = README[README.index("## Where things are") :]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| ")]
    # A row that the pattern above does not read would not be checked.
    owners = table[: table.index("\n## ")] if "\n## " in table else table
    assert len(re.findall(r"^\| ", owners, re.MULTILINE)) == len(OWNERS) + 1
    missing = [concept for concept in REQUIRED if not any(concept in row for row in rows)]
    assert missing == []


def test_what_works_says_how_it_is_known() -> None:
    section = README[README.index("## What works") :].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert rows
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 4, row
        assert re.match(r"(ran on|compiled for|not run)", cells[1]), row
        if cells[1].startswith("not run"):
            continue
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", cells[2]), row
        assert cells[3].startswith("`"), row


def test_commands_set_up_everything_in_one_line() -> None:
    lines = re.findall(r"^python3 -m venv .*$", README, re.MULTILINE)
    assert len(lines) == 3
    for line in lines:
        assert line.startswith("python3 -m venv .venv && .venv/bin/python -m pip install -e ")
    assert lines[0].endswith("&& .venv/bin/python scripts/serve.py")
    assert lines[1].endswith('".[test]" && .venv/bin/python -m pytest tests')
    assert '".[cuda12]"' in lines[2]
    # What .ci/run takes out of here is the second one.
    found = subprocess.run(
        ["grep", "-m", "1", "-E", "^python3 -m venv .* -m pytest tests$", "README.md"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert found.stdout.strip() == lines[1]


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_files_that_are_named_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if "://" not in target:
            assert (ROOT / target).exists(), f"{page} links to {target}"
    for name in re.findall(r"`([\w./-]+\.(?:py|md|toml|json))`", text):
        assert (ROOT / name).exists(), f"{page} names {name}"


def test_the_python_example_runs() -> None:
    """As it stands, with the model that it takes: the default one, from the wheel."""
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert "llm = LLM()" in code
    code = code.replace(
        "LLM()", 'LLM(default_model_source="wheel", max_model_len=128, max_num_seqs=4)'
    )
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning", "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, second, third = done.stdout.splitlines()[:3]
    assert "Paris" in first and first.endswith(("stop", "length"))
    assert " 4, 5, 6" in second
    assert third.strip()


def test_scripts_explain_themselves() -> None:
    for name in ("bench.py", "serve.py"):
        done = subprocess.run(
            [sys.executable, str(ROOT / "scripts" / name), "--help"],
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "--max-model-len" in done.stdout


def test_versions_agree() -> None:
    import jpaged

    assert re.fullmatch(r"\d+\.\d+\.\d+", jpaged.__version__)
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert 'version = { attr = "jpaged.__version__" }' in pyproject
    assert 'requires-python = ">=3.11"' in pyproject
    assert "torch" not in pyproject
