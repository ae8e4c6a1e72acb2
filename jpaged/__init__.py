"""jpaged: a paged-attention LLM inference engine in JAX.

Public names are loaded on first use (PEP 562), so that importing `jpaged` or `jpaged.core` never
imports jax.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jpaged.engine.async_llm_engine import AsyncLLMEngine as AsyncLLMEngine
    from jpaged.engine.engine_args import AsyncEngineArgs as AsyncEngineArgs
    from jpaged.engine.engine_args import EngineArgs as EngineArgs
    from jpaged.engine.llm_engine import LLMEngine as LLMEngine
    from jpaged.engine.outputs import CompletionOutput as CompletionOutput
    from jpaged.engine.outputs import RequestOutput as RequestOutput
    from jpaged.entrypoints.llm import LLM as LLM
    from jpaged.errors import ConfigError as ConfigError
    from jpaged.errors import EngineDeadError as EngineDeadError
    from jpaged.errors import ModelLoadError as ModelLoadError
    from jpaged.errors import RequestError as RequestError
    from jpaged.sampling.params import SamplingParams as SamplingParams

__version__ = "0.1.0"

_OWNERS = {
    "AsyncEngineArgs": "jpaged.engine.engine_args",
    "AsyncLLMEngine": "jpaged.engine.async_llm_engine",
    "CompletionOutput": "jpaged.engine.outputs",
    "ConfigError": "jpaged.errors",
    "EngineArgs": "jpaged.engine.engine_args",
    "EngineDeadError": "jpaged.errors",
    "LLM": "jpaged.entrypoints.llm",
    "LLMEngine": "jpaged.engine.llm_engine",
    "ModelLoadError": "jpaged.errors",
    "RequestError": "jpaged.errors",
    "RequestOutput": "jpaged.engine.outputs",
    "SamplingParams": "jpaged.sampling.params",
}

__all__ = ["__version__", *sorted(_OWNERS)]


def __getattr__(name: str) -> object:
    if name not in _OWNERS:
        raise AttributeError(f"module 'jpaged' has no attribute {name!r}")
    return getattr(importlib.import_module(_OWNERS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
