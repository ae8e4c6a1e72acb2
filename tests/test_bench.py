"""The benchmark runs as the README shows, and its figures hang together."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
CONFIG = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}


def bench(mode: str, folder: Path) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    command = [
        sys.executable,
        "scripts/bench.py",
        mode,
        "--workload",
        "scripts/workloads/tiny.json",
    ]
    command += ["--model", str(folder), "--load-format", "dummy", "--dtype", "float32"]
    command += ["--max-num-seqs", "4", "--max-num-batched-tokens", "8", "--reps", "2"]
    command += ["--json", str(folder / "report.jsonl"), "--no-use-tqdm"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert json.loads((folder / "report.jsonl").read_text()) == report
    for key in report:
        assert f" {key}  " in done.stdout, "each figure stands in the text, too"
    return report


@pytest.mark.parametrize(
    "mode", ["offline", pytest.param("single", marks=pytest.mark.full), "serve"]
)
def test_a_tiny_workload(mode: str, tmp_path: Path) -> None:
    report = bench(mode, tmp_path)
    assert report["mode"] == mode and report["workload"] == "tiny"
    assert report["output_tok_s"] == pytest.approx(19 / report["wall_s"], rel=0.02)
    assert report["total_tok_s"] == pytest.approx((19 + 62) / report["wall_s"], rel=0.02)
    assert report["wall_s"] == min(report["wall_all_s"]) and len(report["wall_all_s"]) == 2
    assert report["ttft_mean_s"] > 0 and report["time_per_token_ms"] > 0
    assert report["product_float32_gflops"] > 0 and report["product_bfloat16_gflops"] > 0
    assert report["peak_mib"] is None or report["peak_mib"] > 50
    if mode != "serve":
        # 62 prompt tokens and all but the last token of each request, in steps of 8.
        assert report["steps"] >= (62 + 19 - 3) / 8
        assert 0 <= report["padding_share"] < 1
        assert report["preemptions"] == 0


def chunked(status: str, *parts: str, end: bool = True) -> bytes:
    """An answer as a server streams it."""
    head = f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n\r\n"
    pieces = [f"{len(part):x}\r\n{part}\r\n" for part in parts]
    return (head + "".join(pieces) + ("0\r\n\r\n" if end else "")).encode()


@pytest.fixture
def bench_serve(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("bench_serve")


def test_the_tokens_of_a_stream_are_those_of_its_usage(bench_serve: Any) -> None:
    events = ['data: {"choices": []}\n\n', 'data: {"usage": {"completion_tokens": 7}}\n\n']
    # Cut where no event ends, as a connection may cut it.
    text = "".join(events) + "data: [DONE]\n\n"
    for cut in range(1, len(text)):
        assert bench_serve.completion_tokens(chunked("200 OK", text[:cut], text[cut:])) == 7


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"", "ended early"),
        (chunked("200 OK", "data: {}\n\n", end=False), "ended early"),
        (chunked("400 Bad Request", "no such field"), "answered 400: no such field"),
        (chunked("200 OK", 'data: {"error": {}}\n\n'), "instead of .DONE."),
        (chunked("200 OK", "data: {}\n\ndata: [DONE]\n\n"), "no usage"),
        (chunked("200 OK", "data: [DONE]\n\n"), "no usage"),
    ],
)
def test_a_stream_without_tokens_is_an_error(bench_serve: Any, answer: bytes, said: str) -> None:
    with pytest.raises(SystemExit, match=said):
        bench_serve.completion_tokens(answer)


@pytest.mark.parametrize("name", ["mixed", "single", "tiny"])
def test_workloads_are_what_they_say(name: str) -> None:
    workload = json.loads((ROOT / "scripts" / "workloads" / f"{name}.json").read_text())
    requests = workload["requests"]
    assert workload["name"] == name and workload["n"] == len(requests)
    assert workload["prompt_tokens"] == sum(len(r["prompt"]) for r in requests)
    assert workload["output_tokens"] == sum(r["out"] for r in requests)
    if name == "mixed":
        assert len(requests) == 64
        assert all(16 <= len(r["prompt"]) <= 512 and 16 <= r["out"] <= 256 for r in requests)
