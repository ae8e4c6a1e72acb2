"""The runnable examples, run as a user runs them."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent

TWO_DEVICES = """
import jax
from tests.engine import tiny
from jpaged import SamplingParams

first, second = jax.devices()
params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
with tiny.llm(devices=[second], max_num_seqs=1, max_num_batched_tokens=4) as llm:
    ids = [10, 20, 30, 40, 50]
    output = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)[0].outputs[0]
    assert output.token_ids == tiny.greedy(ids, 6), output
    runner = llm.engine._worker.runner
    for array in jax.tree.leaves((runner.params, runner._kv, runner._rows)):
        assert array.devices() == {second}, array.devices()
print("all on the second device")
"""


def run(*arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_training_and_sampling_from_ones_own_weights(tmp_path: Path) -> None:
    """The loss falls, and the engine says more and more of the text as its weights are swapped."""
    out = run("scripts/train_and_sample.py", "--rounds", "2", JPAGED_CACHE=str(tmp_path))
    said = [line for line in out.splitlines() if line.startswith("weights ")]
    assert [line.split(":")[0] for line in said] == ["weights 0", "weights 1", "weights 2"]
    learned = "holds pages of keys and values"
    assert learned not in said[0] and learned in said[2]


def test_an_engine_keeps_to_the_devices_it_is_given(tmp_path: Path) -> None:
    flags = "--xla_force_host_platform_device_count=2"
    out = run("-c", TWO_DEVICES, XLA_FLAGS=flags, JPAGED_CACHE=str(tmp_path))
    assert "all on the second device" in out
