"""A GGUF file that is broken anywhere is refused with an error that names it; a whole one is read right."""

import math
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jpaged.errors import ModelLoadError
from jpaged.models.loading.gguf_file import GGUFFile

_U32, _STRING, _ARRAY = 4, 8, 9
_F32, _I8, _Q4_0 = 0, 24, 2


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(key: str, kind: int, payload: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + payload


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dims + struct.pack("<IQ", kind, offset)


def build(
    entries: list[bytes], infos: list[bytes], data: bytes = b"", *, version: int = 3
) -> bytes:
    """A file's bytes; data begins at the next multiple of 32."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(infos), len(entries))
    head += b"".join(entries) + b"".join(infos)
    return head + bytes(-len(head) % 32) + data


GOOD = build(
    [entry("a.number", _U32, struct.pack("<I", 5)), entry("a.text", _STRING, text("é"))],
    [tensor("x", (4, 2), _F32, 0), tensor("y", (8,), _F32, 32)],
    np.arange(16, dtype="<f4").tobytes(),
)


def opened(path: Path, raw: bytes) -> GGUFFile:
    path.write_bytes(raw)
    return GGUFFile.open(path)


def test_a_whole_file(tmp_path: Path) -> None:
    file = opened(tmp_path / "m.gguf", GOOD)
    assert file.metadata == {"a.number": 5, "a.text": "é"}
    np.testing.assert_array_equal(file.read("x"), np.arange(8, dtype=np.float32).reshape(2, 4))
    np.testing.assert_array_equal(file.read("y"), np.arange(8, 16, dtype=np.float32))
    assert file.read("x").flags.writeable, "the caller owns what it is given"


def test_every_type_of_metadata(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -100)
    writer.add_uint16("u16", 60_000)
    writer.add_int16("i16", -30_000)
    writer.add_uint32("u32", 4_000_000_000)
    writer.add_int32("i32", -2_000_000_000)
    writer.add_uint64("u64", 2**63)
    writer.add_int64("i64", -(2**62))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_array("ints", [1, 2, 3])
    writer.add_array("floats", [0.5, -0.25])
    writer.add_array("bools", [True, False])
    writer.add_array("strings", ["", "\u2581a", "😀"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert GGUFFile.open(tmp_path / "m.gguf").metadata == {
        "general.architecture": "llama",
        "u8": 200,
        "i8": -100,
        "u16": 60_000,
        "i16": -30_000,
        "u32": 4_000_000_000,
        "i32": -2_000_000_000,
        "u64": 2**63,
        "i64": -(2**62),
        "f32": 0.5,
        "f64": 0.1,
        "yes": True,
        "ints": [1, 2, 3],
        "floats": [0.5, -0.25],
        "bools": [True, False],
        "strings": ["", "\u2581a", "😀"],
    }


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"])
def test_types_without_a_quantiser_follow_the_package(kind: str, tmp_path: Path) -> None:
    qtype = gguf.GGMLQuantizationType[kind]
    block, nbytes = gguf.GGML_QUANT_SIZES[qtype]
    random = np.random.default_rng(3)
    # Scales are halves anywhere in a block; small byte values keep every one of them finite.
    raw = random.integers(0, 60, (3, 2 * nbytes), dtype=np.uint8)
    file = opened(
        tmp_path / "m.gguf",
        build([], [tensor("w", (2 * block, 3), int(qtype), 0)], raw.tobytes()),
    )
    found = file.read("w")
    assert found.shape == (3, 2 * block) and found.dtype == np.float32
    np.testing.assert_array_equal(found, gguf.dequantize(raw, qtype))
    assert np.isfinite(found).all() and np.ptp(found) > 0


def test_a_tensor_is_dequantised_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    qtype = gguf.GGMLQuantizationType.Q8_0
    values = np.random.default_rng(5).standard_normal((3, 7, 64), np.float32)
    raw = gguf.quantize(values, qtype)
    file = opened(
        tmp_path / "m.gguf", build([], [tensor("w", (64, 7, 3), int(qtype), 0)], raw.tobytes())
    )
    whole = file.read("w")
    np.testing.assert_array_equal(whole, gguf.dequantize(raw, qtype))
    for piece in (1, 64, 200, 64 * 21):
        monkeypatch.setattr("jpaged.models.loading.gguf_file._PIECE_ELEMENTS", piece)
        np.testing.assert_array_equal(file.read("w"), whole)


def test_q4_0_nibbles_are_halves_of_a_block(tmp_path: Path) -> None:
    block = struct.pack("<e", 2.0) + bytes((i | (15 - i) << 4) for i in range(16))
    file = opened(tmp_path / "m.gguf", build([], [tensor("w", (32,), _Q4_0, 0)], block))
    low = [2.0 * (i - 8) for i in range(16)]
    np.testing.assert_array_equal(file.read("w"), low + [2.0 * (15 - i - 8) for i in range(16)])


def test_a_truncated_file_is_always_refused(tmp_path: Path) -> None:
    for length in range(len(GOOD)):
        with pytest.raises(ModelLoadError, match=r"m\.gguf"):
            opened(tmp_path / "m.gguf", GOOD[:length])


FAULTS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not a GGUF file"),
    "other format": (b"PK\x03\x04" + bytes(60), "begins with b'PK"),
    "lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
    "version 1": (build([], [], version=1), "GGUF version 1"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "little-endian"),
    "huge counts": (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60), "truncated"),
    "huge string": (build([struct.pack("<Q", 2**62)], []), "truncated"),
    "huge array": (build([entry("k", _ARRAY, struct.pack("<IQ", _U32, 2**61))], []), "truncated"),
    "huge list": (build([entry("k", _ARRAY, struct.pack("<IQ", 8, 2**61))], []), "truncated"),
    "array of arrays": (build([entry("k", _ARRAY, struct.pack("<IQ", 9, 1))], []), "value type 9"),
    "unknown value type": (build([entry("k", 77, b"")], []), "value type 77"),
    "key twice": (build([entry("k", _U32, bytes(4))] * 2, []), "k is there twice"),
    "not UTF-8": (build([entry("k", 8, struct.pack("<Q", 2) + b"\xff\xfe")], []), "k is not UTF-8"),
    "alignment 0": (build([entry("general.alignment", _U32, bytes(4))], []), "power of two"),
    "tensor twice": (build([], [tensor("x", (8,), 0, 0)] * 2, bytes(32)), "x is there twice"),
    "overlap": (
        build([], [tensor("x", (16,), 0, 0), tensor("y", (8,), 0, 32)], bytes(64)),
        "y and x overlap",
    ),
    "data beyond the end": (build([], [tensor("x", (9,), 0, 0)], bytes(32)), "tensor x ends"),
    "offset beyond the end": (build([], [tensor("x", (1,), 0, 2**40)], bytes(32)), "tensor x ends"),
    "unaligned": (build([], [tensor("x", (2,), 0, 8)], bytes(32)), "offset 8"),
    "dimensions": (build([], [tensor("x", (1,) * 5, 0, 0)], bytes(32)), "5 dimensions"),
    "no dimensions": (build([], [tensor("x", (), 0, 0)], bytes(32)), "0 dimensions"),
    "unsupported type": (build([], [tensor("x", (4,), _I8, 0)], bytes(32)), "type I8"),
    "unknown type": (build([], [tensor("x", (4,), 999, 0)], bytes(32)), "type 999"),
    "ragged block": (build([], [tensor("x", (40,), _Q4_0, 0)], bytes(64)), "rows of 40"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(fault: str, tmp_path: Path) -> None:
    raw, said = FAULTS[fault]
    with pytest.raises(ModelLoadError, match=r"m\.gguf") as caught:
        opened(tmp_path / "m.gguf", raw)
    assert said in str(caught.value)


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(ModelLoadError, match="no such file"):
            GGUFFile.open(path)


def test_a_file_cut_after_it_was_opened(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    file = opened(path, GOOD)
    path.write_bytes(GOOD[:-8])
    with pytest.raises(ModelLoadError, match="truncated"):
        file.read("y")


@hypothesis.given(at=st.integers(0, len(GOOD) - 1), value=st.integers(0, 255))
@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_any_changed_byte_is_read_or_refused(at: int, value: int, tmp_path: Path) -> None:
    raw = bytearray(GOOD)
    raw[at] = value
    try:
        file = opened(tmp_path / "m.gguf", bytes(raw))
    except ModelLoadError as error:
        assert "m.gguf" in str(error)
        return
    for name, found in file.tensors.items():
        assert file.read(name).size == math.prod(found.shape)


def test_opening_reads_no_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("tensor data was read")

    reader: Callable[..., object] = refuse
    monkeypatch.setattr("jpaged.models.loading.gguf_file.read_bytes_at", reader)
    assert set(opened(tmp_path / "m.gguf", GOOD).tensors) == {"x", "y"}
