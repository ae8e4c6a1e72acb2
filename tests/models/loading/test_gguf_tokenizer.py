"""A tokenizer rebuilt from GGUF metadata splits text as the vocabulary's own kind of tokenizer does."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
import tokenizers
from hypothesis import strategies as st
from tokenizers import trainers

from jpaged.errors import ModelLoadError
from jpaged.models.loading.gguf_file import GGUFFile, MetaValue
from jpaged.models.loading.gguf_tokenizer import build_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_NORMAL, _UNKNOWN, _CONTROL, _USER, _BYTE = 1, 2, 3, 4, 6
_CORPUS = [
    "The quick brown fox jumps over the lazy dog. Don't we'll they've 12 345 6789!",
    "def f(x):\n    return x + 1\n\n\nclass A:\n\tpass\n",
    "  leading and   inner spaces, trailing  \n\n",
    "naïve café Ünïcode — 漢字 かな 한국어 😀 e\u0301",
] * 4
TEXTS = [
    *_CORPUS[:4],
    "",
    " ",
    "a",
    "\n\n\n\t\t x",
    "0123456789",
    "x" * 50,
    "\x00\x7f \u00a0\u2003",
    "٣ ½ ²",
    "<|im_start|>user\nhi<|im_end|>\n",
    "no<|im_end|>gap <|im_end|> x",
]


def metadata_file(metadata: Mapping[str, MetaValue]) -> GGUFFile:
    keys = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    if "chat_template" in metadata:
        keys["tokenizer.chat_template"] = metadata["chat_template"]
    return GGUFFile(Path("m.gguf"), keys, {})


def byte_level_metadata(pre: str, trained: tokenizers.Tokenizer, **more: MetaValue) -> GGUFFile:
    """What a converter writes for a trained byte-level BPE."""
    import json

    model = json.loads(trained.to_str())["model"]
    tokens = sorted(model["vocab"], key=lambda token: model["vocab"][token])
    kinds = [_CONTROL if token.startswith("<|") else _NORMAL for token in tokens]
    metadata: dict[str, MetaValue] = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": kinds,
        "merges": [" ".join(merge) for merge in model["merges"]],
        "eos_token_id": tokens.index("<|im_end|>"),
        **more,
    }
    return metadata_file(metadata)


# What the original tokenizer.json files of these models have before their byte-level step.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ORIGINALS = {
    "gpt-2": [],
    "smollm": [tokenizers.pre_tokenizers.Digits(individual_digits=True)],
    "llama-bpe": [tokenizers.pre_tokenizers.Split(tokenizers.Regex(_LLAMA3), "isolated")],
    "qwen2": [
        tokenizers.pre_tokenizers.Split(
            tokenizers.Regex(_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")), "isolated"
        )
    ],
}


def original(pre: str) -> tokenizers.Tokenizer:
    """A byte-level BPE with the pre-tokenizer of `pre`, trained on a few lines."""
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(ignore_merges=pre == "llama-bpe", fuse_unk=False)
    )
    if pre == "qwen2":
        tokenizer.normalizer = tokenizers.normalizers.NFC()
    steps = _ORIGINALS[pre]
    use_regex = pre in ("gpt-2", "smollm")
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            *steps,
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex),
        ]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.train_from_iterator(
        _CORPUS,
        trainers.BpeTrainer(
            vocab_size=500,
            special_tokens=["<|im_start|>", "<|im_end|>"],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer


@pytest.mark.parametrize("pre", _ORIGINALS)
def test_byte_level_is_the_original(pre: str) -> None:
    trained = original(pre)
    rebuilt = build_tokenizer(byte_level_metadata(pre, trained, add_bos_token=False))
    for text in TEXTS:
        ids = rebuilt(text)["input_ids"]
        assert ids == trained.encode(text).ids, text
        if pre != "qwen2":
            assert rebuilt.decode(ids) == text

    @hypothesis.given(st.text())
    def any_text(text: str) -> None:
        assert rebuilt(text)["input_ids"] == trained.encode(text).ids

    any_text()


def spm_metadata(**more: MetaValue) -> dict[str, MetaValue]:
    """A SentencePiece vocabulary whose scores do not follow from the pieces' lengths."""
    pieces = [
        "\u2581",
        *"abcdeé",
        "ab",
        "bc",
        "abc",
        "\u2581a",
        "\u2581ab",
        "de",
        "cde",
        "aa",
        "aaa",
    ]
    scores = [-20.0, *[-21.0] * 6, -3.0, -1.0, -2.0, -6.0, -4.0, -5.0, -2.5, -8.0, -7.0]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "\n\n", "\u2581\u2581"]
    kinds = [_UNKNOWN, _CONTROL, _CONTROL, *[_BYTE] * 256, _USER, _USER]
    return {
        "model": "llama",
        "tokens": tokens + pieces,
        "scores": [0.0] * len(tokens) + scores,
        "token_type": kinds + [_NORMAL] * len(pieces),
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **more,
    }


def naive_spm(metadata: Mapping[str, MetaValue], text: str) -> list[str]:
    """SentencePiece's own way: user-defined pieces first, then the best-scored neighbours are joined."""
    tokens, scores, kinds = (metadata[key] for key in ("tokens", "scores", "token_type"))
    assert isinstance(tokens, list) and isinstance(scores, list) and isinstance(kinds, list)
    of = {str(t): float(s) for t, s, k in zip(tokens, scores, kinds, strict=True) if k == _NORMAL}
    users = sorted((str(t) for t, k in zip(tokens, kinds, strict=True) if k == _USER), key=len)
    text = text.replace(" ", "\u2581")
    done: list[str] = []
    run: list[str] = []

    def flush() -> None:
        while True:
            joins = [
                (-of[run[i] + run[i + 1]], i)
                for i in range(len(run) - 1)
                if run[i] + run[i + 1] in of
            ]
            if not joins:
                break
            at = min(joins)[1]
            run[at : at + 2] = [run[at] + run[at + 1]]
        for piece in run:
            done.extend([piece] if piece in of else [f"<0x{b:02X}>" for b in piece.encode()])
        run.clear()

    while text:
        user = next((u for u in reversed(users) if text.startswith(u)), None)
        if user is not None:
            flush()
            done.append(user)
        else:
            run.append(text[0])
        text = text[len(user or text[0]) :]
    flush()
    return done


@hypothesis.given(st.text(alphabet="abcdeé \nx😀", max_size=25))
def test_sentencepiece_follows_scores(text: str) -> None:
    metadata = spm_metadata(add_space_prefix=False, add_bos_token=False)
    tokenizer = _cached(metadata)
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == naive_spm(metadata, text)
    assert tokenizer.decode(ids) == text


_BUILT: dict[str, "PreTrainedTokenizerFast"] = {}


def _cached(metadata: Mapping[str, MetaValue]) -> "PreTrainedTokenizerFast":
    key = repr(metadata)
    if key not in _BUILT:
        _BUILT[key] = build_tokenizer(metadata_file(metadata))
    return _BUILT[key]


def test_space_prefix() -> None:
    with_prefix = build_tokenizer(metadata_file(spm_metadata()))
    assert with_prefix.tokenize("ab c") == ["\u2581ab", "\u2581", "c"]
    assert with_prefix.decode(with_prefix("ab c")["input_ids"], skip_special_tokens=True) == "ab c"
    without = build_tokenizer(metadata_file(spm_metadata(add_space_prefix=False)))
    assert without.tokenize("ab") == ["ab"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, [1, "x", None]),
        ({"add_bos_token": True, "add_eos_token": True}, [1, "x", 2]),
        ({"add_bos_token": False}, ["x"]),
        ({"add_bos_token": False, "add_eos_token": True}, ["x", 2]),
    ],
)
def test_flags_of_sentencepiece(flags: dict[str, MetaValue], expected: list[object]) -> None:
    tokenizer = build_tokenizer(metadata_file(spm_metadata(**flags)))
    inner = tokenizer("abc", add_special_tokens=False)["input_ids"]
    want = [i for item in expected if item is not None for i in (inner if item == "x" else [item])]
    assert tokenizer("abc")["input_ids"] == want
    assert copy.deepcopy(tokenizer)("abc")["input_ids"] == want


@pytest.mark.parametrize(
    ("pre", "flag", "adds"),
    [
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
        ("smollm", None, False),
        ("smollm", True, True),
        ("qwen2", None, False),
    ],
)
def test_bos_flag_of_byte_level(pre: str, flag: bool | None, adds: bool) -> None:
    more: dict[str, MetaValue] = {"bos_token_id": 0}
    if flag is not None:
        more["add_bos_token"] = flag
    tokenizer = build_tokenizer(byte_level_metadata(pre, original(pre), **more))
    assert (tokenizer("fox")["input_ids"][0] == 0) is adds
    assert 0 not in tokenizer("fox", add_special_tokens=False)["input_ids"]


def test_special_tokens_and_template() -> None:
    metadata = spm_metadata(
        padding_token_id=2, chat_template="{{ bos_token }}hi {{ messages[0].content }}"
    )
    tokenizer = build_tokenizer(metadata_file(metadata))
    named = (tokenizer.unk_token, tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token)
    assert named == ("<unk>", "<s>", "</s>", "</s>")
    shown = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    assert shown == "<s>hi a"
    # A template that writes the bos token is not given another one.
    assert tokenizer(shown, add_special_tokens=False)["input_ids"].count(1) == 1
    assert tokenizer.decode([1, 2], skip_special_tokens=True) == ""


def test_no_special_tokens_are_invented() -> None:
    metadata = spm_metadata()
    for key in ("unknown_token_id", "bos_token_id", "eos_token_id"):
        del metadata[key]
    tokenizer = build_tokenizer(metadata_file(metadata))
    assert tokenizer.bos_token is None and tokenizer.eos_token is None
    assert len(tokenizer) == len(metadata["tokens"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert'; supported are gpt2, llama"),
        ({"model": None}, "tokenizer.ggml.model is missing"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": [1, 2]}, "tokenizer.ggml.tokens is missing or no list of strings"),
        ({"scores": [1.0]}, "tokenizer.ggml.scores"),
        ({"token_type": [1]}, "tokenizer.ggml.token_type has 1 of"),
        ({"eos_token_id": 10**6}, "tokenizer.ggml.eos_token_id is 1000000, outside"),
        ({"model": "gpt2", "pre": "alien"}, "tokenizer.ggml.pre is 'alien'; supported are gpt-2"),
        ({"model": "gpt2", "pre": "gpt-2"}, "tokenizer.ggml.merges is missing"),
        ({"model": "gpt2", "pre": "gpt-2", "merges": ["zz y"]}, "'zz y', which does not join"),
        ({"model": "gpt2", "pre": "gpt-2", "merges": ["ab"]}, "'ab', which does not join"),
        ({"model": "gpt2", "pre": "gpt-2", "merges": ["ab ab"]}, "'ab ab', which makes no known"),
    ],
)
def test_faults_are_named(change: dict[str, MetaValue | None], said: str) -> None:
    changed = {k: v for k, v in {**spm_metadata(), **change}.items() if v is not None}
    with pytest.raises(ModelLoadError, match=r"m\.gguf.*tokenizer=") as caught:
        build_tokenizer(metadata_file(changed))
    assert said in str(caught.value)
