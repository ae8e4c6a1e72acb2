"""Runs scripts/serve.py over a fake engine, with jax and transformers out of reach.

What the fake does is chosen with --model: "busy" takes a second a step, "hangs" for ever, "loading" never
gets ready, "no-config" and "no-model" cannot be loaded.
"""

import importlib.abc
import os
import runpy
import sys
import time
import types
from pathlib import Path

from jpaged.errors import ConfigError, ModelLoadError
from tests.entrypoints.server.fake_engine import FakeEngine


class Blocker(importlib.abc.MetaPathFinder):
    """Refuses to import what a server process needs only for a real engine."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in ("jax", "jaxlib", "flax", "transformers", "numba"):
            raise ImportError(f"{name} is imported too early")


class Engine(FakeEngine):
    @classmethod
    def from_engine_args(cls, args: object) -> FakeEngine:
        fraction = os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION")
        sys.stderr.write(f"loading on {args.device} with {fraction}\n")
        sys.stderr.flush()
        if args.model == "loading":
            time.sleep(60)
        if args.model == "no-config":
            raise ConfigError("max_model_len must be at most 100, got 200", field="max_model_len")
        if args.model == "no-model":
            raise ModelLoadError("model 'no-model' was not found")
        engine = cls()
        engine.step_seconds = {"busy": 1.0, "hangs": 1000.0}.get(args.model, 0.01)
        return engine


if __name__ == "__main__":
    sys.meta_path.insert(0, Blocker())
    sys.modules["jpaged.engine.llm_engine"] = types.ModuleType("jpaged.engine.llm_engine")
    sys.modules["jpaged.engine.llm_engine"].LLMEngine = Engine
    script = Path(__file__).parents[3] / "scripts" / "serve.py"
    runpy.run_path(str(script), run_name="__main__")
