"""A safetensors file is read as the safetensors package reads it, and a broken one is refused by name."""

import json
import struct
from pathlib import Path

import hypothesis
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import strategies as st

from jpaged.errors import ModelLoadError
from jpaged.models.loading.safetensors_file import SafetensorsFile


def build(header: object, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def item(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


GOOD = build(
    {
        "__metadata__": {"format": "pt"},
        "x": item("F32", [2, 2], 0, 16),
        "y": item("I8", [3], 16, 19),
    },
    np.arange(4, dtype="<f4").tobytes() + b"\x01\x02\xff",
)


def opened(path: Path, raw: bytes) -> SafetensorsFile:
    path.write_bytes(raw)
    return SafetensorsFile.open(path)


def test_reads_what_the_package_writes(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    values = {
        "f32": random.standard_normal((3, 5), np.float32),
        "f16": random.standard_normal((4,), np.float32).astype(np.float16),
        "bf16": random.standard_normal((2, 3, 4), np.float32).astype(ml_dtypes.bfloat16),
        "scalar": np.full((), 3, np.float32),
        "empty": np.zeros((0, 4), np.float32),
        "i64": np.arange(-3, 3),
        "bool": np.array([True, False]),
    }
    path = tmp_path / "m.safetensors"
    safetensors.numpy.save_file(values, path)
    file = SafetensorsFile.open(path)
    assert set(file.names()) == set(values)
    for name, expected in values.items():
        found = file.read(name)
        assert found.dtype == expected.dtype == file.specs()[name].dtype
        assert found.shape == expected.shape == file.specs()[name].shape
        np.testing.assert_array_equal(found, expected)
    assert file.read("f32").flags.writeable, "the caller owns what it is given"


def test_a_truncated_file_is_always_refused(tmp_path: Path) -> None:
    for length in range(len(GOOD)):
        with pytest.raises(ModelLoadError, match=r"m\.safetensors"):
            opened(tmp_path / "m.safetensors", GOOD[:length])


FAULTS: dict[str, tuple[bytes, str]] = {
    "lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
    "another format": (b"PK\x03\x04" + b"\x09" * 60, "not a safetensors file"),
    "header beyond the file": (struct.pack("<Q", 5000) + b"{}", "truncated"),
    "header not JSON": (build(b"{nope}"), "header is not JSON"),
    "header not an object": (build([1]), "header is not an object"),
    "entry not an object": (build({"x": 3}), "tensor x"),
    "unsupported dtype": (build({"x": item("F4", [2], 0, 1)}, b"0"), "dtype 'F4' is not supported"),
    "no dtype": (build({"x": {"shape": [1], "data_offsets": [0, 1]}}, b"0"), "dtype None"),
    "negative shape": (build({"x": item("I8", [-1], 0, 1)}, b"0"), "malformed"),
    "boolean shape": (build({"x": item("I8", [True], 0, 1)}, b"0"), "malformed"),
    "three offsets": (
        build({"x": {"dtype": "I8", "shape": [1], "data_offsets": [0, 1, 2]}}, b"0"),
        "malformed",
    ),
    "size and shape differ": (build({"x": item("F32", [2], 0, 4)}, bytes(8)), "8 bytes"),
    "backwards": (build({"x": item("I8", [1], 1, 0)}, b"00"), "span -1"),
    "data beyond the end": (build({"x": item("I8", [9], 0, 9)}, bytes(8)), "tensor x ends"),
    "overlap": (
        build({"x": item("I8", [4], 0, 4), "y": item("I8", [4], 3, 7)}, bytes(7)),
        "y and x overlap",
    ),
    "twice": (
        build(b'{"x":{"dtype":"I8","shape":[1],"data_offsets":[0,1]},"x":{}}', b"0"),
        "names x twice",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(fault: str, tmp_path: Path) -> None:
    raw, said = FAULTS[fault]
    with pytest.raises(ModelLoadError, match=r"m\.safetensors") as caught:
        opened(tmp_path / "m.safetensors", raw)
    assert said in str(caught.value)


def test_a_file_cut_after_it_was_opened(tmp_path: Path) -> None:
    file = opened(tmp_path / "m.safetensors", GOOD)
    (tmp_path / "m.safetensors").write_bytes(GOOD[:-1])
    with pytest.raises(ModelLoadError, match="truncated"):
        file.read("y")


@hypothesis.given(at=st.integers(0, len(GOOD) - 1), value=st.integers(0, 255))
@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_any_changed_byte_is_read_or_refused(at: int, value: int, tmp_path: Path) -> None:
    raw = bytearray(GOOD)
    raw[at] = value
    try:
        file = opened(tmp_path / "m.safetensors", bytes(raw))
    except ModelLoadError as error:
        assert "m.safetensors" in str(error)
        return
    for name, spec in file.specs().items():
        assert file.read(name).shape == spec.shape
