"""The measurements of pool and scheduler run, and print what they are for."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def printed(script: str, *arguments: str) -> str:
    """What a script prints."""
    command = [sys.executable, str(ROOT / "scripts" / script), *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    ).stdout


def test_runs_stay_longer_than_those_of_first_free() -> None:
    said = printed("bench_pool.py", "--pages", "1024", "--steps", "3000", "--largest", "1000")
    ratio = float(said.split("ratio ")[1].split()[0])
    mine = next(line for line in said.splitlines() if line.startswith("jpaged"))
    assert ratio >= 2 and float(mine.split()[-1]) >= 4


def test_expected_lengths_spare_preemptions_and_fill_the_pool(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    printed("simulate_scheduler.py", "--requests", "300", "--json", str(figures))
    rows = {(r["admission"], r["reservation"]): r for r in json.loads(figures.read_text())}
    mine, every, most = (rows[name, "yes"] for name in ("expected", "all", "max"))
    assert every["preemptions"] > 0 and most["preemptions"] == 0
    assert mine["preemptions"] <= 0.2 * every["preemptions"]
    assert mine["occupancy"] >= 0.9 * every["occupancy"]
    assert mine["occupancy"] >= 1.3 * most["occupancy"]
    assert all(row["wasted_paged_pages_per_sequence"] < 1 for row in rows.values())


def test_planning_and_overlap_are_measured() -> None:
    said = printed("bench_scheduler.py", "--rows", "4", "--waiting", "8", "--steps", "20")
    assert said.count("planning ") == 3 and said.count("the device is idle") == 2
