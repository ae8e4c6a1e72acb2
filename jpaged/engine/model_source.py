"""Where an engine's model comes from: a checkpoint, or the arrays of the program it runs in."""

import dataclasses
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jpaged.engine.engine_args import EngineArgs
from jpaged.errors import ConfigError
from jpaged.models.config import ModelConfig
from jpaged.models.loading import open_checkpoint
from jpaged.models.loading.tokenizer import load_tokenizer
from jpaged.models.weights import flatten_public
from jpaged.worker.worker import WeightSource, WorkerArgs

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Everything that is known of a model before its weights are read."""

    name: str
    source: str
    config: ModelConfig
    checkpoint_dtype: str | None
    weights: WeightSource
    tokenizer: Any  # a transformers tokenizer, whose class is a matter of the checkpoint
    eos_token_ids: tuple[int, ...]

    def worker_args(self, args: EngineArgs) -> WorkerArgs:
        """What the worker is told of the engine's arguments."""
        return WorkerArgs(
            dtype=self._dtype(args),
            checkpoint_dtype=self.checkpoint_dtype,
            max_model_len=args.max_model_len,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            page_size=args.page_size,
            memory_utilization=args.memory_utilization,
            kv_cache_memory_bytes=args.kv_cache_memory_bytes,
            device=args.device,
            devices=args.devices,
            attention=args.attention,
            compilation_cache=args.compilation_cache,
            progress=args.use_tqdm,
        )

    def _dtype(self, args: EngineArgs) -> str:
        """Live weights are served in their own dtype unless another is asked for."""
        if args.params is not None and args.dtype == "auto" and self.checkpoint_dtype is not None:
            return self.checkpoint_dtype
        return args.dtype


class LiveWeights:
    """The arrays of a running program as a weight source."""

    def __init__(self, arrays: Mapping[str, jax.Array]) -> None:
        self._arrays = dict(arrays)

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        return {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in self._arrays.items()}

    def tensors(self, *, progress: bool) -> Iterable[tuple[str, jax.Array]]:
        """Each array once; nothing is kept, so that the caller's copy is the only other one."""
        for name in list(self._arrays):
            yield name, self._arrays.pop(name)


def resolve_model(args: EngineArgs) -> ModelSource:
    """Finds the model that `args` name. Raises ConfigError or ModelLoadError."""
    if args.params is not None:
        return _live(args)
    checkpoint = open_checkpoint(
        args.model,
        load_format=args.load_format,
        revision=args.revision,
        download_dir=args.download_dir,
        tokenizer=args.tokenizer if isinstance(args.tokenizer, str) else None,
        default_model_source=args.default_model_source,
    )
    tokenizer = args.tokenizer
    if tokenizer is None or isinstance(tokenizer, str):
        tokenizer = checkpoint.load_tokenizer()
    dtype = checkpoint.hf_config.get("dtype", checkpoint.hf_config.get("torch_dtype"))
    logger.info("model %s from %s", checkpoint.name, checkpoint.source)
    return ModelSource(
        name=checkpoint.name,
        source=checkpoint.source,
        config=ModelConfig.from_hf(checkpoint.hf_config),
        checkpoint_dtype=dtype if isinstance(dtype, str) else None,
        weights=checkpoint,
        tokenizer=tokenizer,
        eos_token_ids=tuple(checkpoint.eos_token_ids),
    )


def _live(args: EngineArgs) -> ModelSource:
    """The model of a running program: a tree of arrays with its config, or an nnx module that has one."""
    given = args.config if args.config is not None else getattr(args.params, "config", None)
    if given is None:
        raise ConfigError(
            "config must be given with params: a ModelConfig, or a config.json as a dict",
            field="config",
        )
    eos: object = None
    if isinstance(given, Mapping):
        config = ModelConfig.from_hf(dict(given))
        eos = given.get("eos_token_id")
    elif isinstance(given, ModelConfig):
        config = given
    else:
        raise ConfigError(
            f"config must be a ModelConfig or a dict, got {type(given).__name__}", field="config"
        )
    arrays = flatten_public(args.params)
    dtypes = {str(x.dtype) for x in arrays.values() if jnp.issubdtype(x.dtype, jnp.floating)}
    if args.dtype == "auto" and len(dtypes) != 1:
        raise ConfigError(
            f"params hold {', '.join(sorted(dtypes)) or 'no floats'}: say in which dtype to compute",
            field="dtype",
        )
    tokenizer = args.tokenizer
    if isinstance(tokenizer, str):
        tokenizer = load_tokenizer(Path(tokenizer))
    return ModelSource(
        name=args.model or config.model_type,
        source="params of this program",
        config=config,
        checkpoint_dtype=dtypes.pop() if len(dtypes) == 1 else None,
        weights=LiveWeights(arrays),
        tokenizer=tokenizer,
        eos_token_ids=_eos_ids(eos, tokenizer),
    )


def _eos_ids(given: object, tokenizer: object) -> tuple[int, ...]:
    """End-of-sequence ids of a config, or else the tokenizer's."""
    if given is None:
        given = getattr(tokenizer, "eos_token_id", None)
    if given is None:
        return ()
    return tuple(given) if isinstance(given, (list, tuple)) else (int(str(given)),)
