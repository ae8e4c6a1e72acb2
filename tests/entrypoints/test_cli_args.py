"""The command line says what EngineArgs says, and nothing else."""

import argparse
import dataclasses

import pytest

from jpaged import AsyncEngineArgs, ConfigError, EngineArgs
from jpaged.entrypoints.cli_args import byte_count, flagged, parse_serve_args, serve_parser

# A value for each flag, in words and as the field has it.
GIVEN = {
    "model": ("some/model", "some/model"),
    "tokenizer": ("tok", "tok"),
    "revision": ("main", "main"),
    "download_dir": ("dir", "dir"),
    "load_format": ("dummy", "dummy"),
    "default_model_source": ("wheel", "wheel"),
    "dtype": ("bfloat16", "bfloat16"),
    "max_model_len": ("512", 512),
    "max_num_seqs": ("8", 8),
    "max_num_batched_tokens": ("64", 64),
    "max_num_queued_reqs": ("100", 100),
    "max_num_queued_tokens": ("100000", 100_000),
    "scheduling_policy": ("priority", "priority"),
    "admission_policy": ("max", "max"),
    "async_scheduling": (None, False),
    "enable_prefix_caching": (None, False),
    "page_size": ("32", 32),
    "memory_utilization": ("0.5", 0.5),
    "kv_cache_memory_bytes": ("2GiB", 2 * 2**30),
    "seed": ("-3", -3),
    "served_model_name": ("name", "name"),
    "device": ("cpu", "cpu"),
    "attention": ("xla", "xla"),
    "compilation_cache": (None, False),
    "use_tqdm": (None, False),
}


def test_every_field_has_a_flag():
    fields = {f.name for f in dataclasses.fields(EngineArgs) if f.metadata["cli"]}
    assert fields == set(GIVEN)
    argv = []
    for name, (text, _) in GIVEN.items():
        flag = name.replace("_", "-")
        argv += [f"--no-{flag}"] if text is None else [f"--{flag}={text}"]
    _, args = parse_serve_args(argv)
    assert args == AsyncEngineArgs(**{name: value for name, (_, value) in GIVEN.items()})


def test_the_defaults_are_those_of_the_fields():
    server, args = parse_serve_args([])
    assert args == AsyncEngineArgs()
    assert (server.host, server.port) == ("127.0.0.1", 8000)


def test_help_tells_every_default():
    text = " ".join(serve_parser().format_help().split())
    for field in dataclasses.fields(EngineArgs):
        if field.metadata["cli"]:
            assert " ".join(field.metadata["help"].split()) in text
    for default in ("127.0.0.1", "8000", "(default: 16)", "(default: 0.9)", "(default: auto)"):
        assert default in text


@pytest.mark.parametrize(
    ("text", "number"),
    [("5", 5), ("2G", 2 * 10**9), ("1.5GiB", 3 * 2**29), ("64 MiB", 2**26), ("10kb", 10**4)],
)
def test_byte_count(text, number):
    assert byte_count(text) == number


@pytest.mark.parametrize("text", ["", "G", "-5", "5X", "1e9", "i", "5i"])
def test_byte_count_refuses(text):
    with pytest.raises(argparse.ArgumentTypeError):
        byte_count(text)


@pytest.mark.parametrize(
    "argv",
    [
        ["--page-size", "0"],
        ["--memory-utilization", "1.1"],
        ["--memory-utilization", "nan"],
        ["--max-num-seqs", "0"],
        ["--max-num-seqs", "64", "--max-num-batched-tokens", "32"],
        ["--port", "-1"],
        ["--port", "99999"],
        ["--dtype", "int8"],
        ["--max-model", "5"],
        ["--kv-cache-memory-bytes", "many"],
        ["--shutdown-timeout", "-1"],
        ["--shutdown-timeout", "inf"],
        ["--model", ""],
        ["some-model"],
    ],
)
def test_wrong_flags_end_with_status_2_and_one_line(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        parse_serve_args(argv)
    assert caught.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert argv[0] in message or argv[-2:][0] in message


def test_errors_name_flags():
    error = ConfigError("max_model_len 9 is more than fits; lower it or max_num_seqs")
    assert str(flagged(error)) == "--max-model-len 9 is more than fits; lower it or --max-num-seqs"
    error = ConfigError("device 'gpu' is not available; this device", field="device")
    assert str(flagged(error)) == "--device 'gpu' is not available; this device"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", ""),
        ("model", 5),
        ("dtype", "int8"),
        ("dtype", 5),
        ("load_format", "pickle"),
        ("default_model_source", "web"),
        ("device", "cuda"),
        ("attention", "flash"),
        ("max_model_len", 1),
        ("max_model_len", 2.0),
        ("max_num_seqs", True),
        ("max_num_batched_tokens", 0),
        ("page_size", 12),
        ("page_size", 2048),
        ("memory_utilization", 0),
        ("memory_utilization", "0.5"),
        ("memory_utilization", float("nan")),
        ("kv_cache_memory_bytes", 0),
        ("seed", "x"),
        ("compilation_cache", 1),
        ("use_tqdm", None),
        ("config", {}),
        ("devices", []),
    ],
)
def test_engine_args_name_the_field(field, value):
    with pytest.raises(ConfigError, match=field) as caught:
        EngineArgs(**{field: value})
    assert caught.value.field == field


def test_engine_args_take_dtypes_of_numpy_and_jax():
    import jax.numpy as jnp
    import numpy as np

    assert EngineArgs(dtype=np.float32).dtype == "float32"
    assert EngineArgs(dtype=np.dtype("float16")).dtype == "float16"
    assert EngineArgs(dtype=jnp.bfloat16).dtype == "bfloat16"
    with pytest.raises(ConfigError, match="float64"):
        EngineArgs(dtype=np.float64)
