"""The tokenizer that a GGUF file describes, rebuilt as a fast transformers tokenizer.

Knows the two kinds of vocabulary (byte-level BPE, SentencePiece BPE), the pre-tokenizers behind the names in
`tokenizer.ggml.pre`, and the defaults of flags that a file leaves out. Needs no torch.
"""

import dataclasses
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from jpaged.errors import ModelLoadError
from jpaged.models.loading.gguf_file import GGUFFile

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6
_SPACE = "\u2581"

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclasses.dataclass(frozen=True)
class _ByteLevel:
    """A pre-tokenizer of byte-level BPE. `pattern` None: GPT-2's own."""

    pattern: str | None = None
    single_digits: bool = False
    nfc: bool = False
    # A word that is in the vocabulary as a whole is one token, whatever the merges would make of it.
    whole_words: bool = False
    add_bos: bool = False


_LLAMA3 = _ByteLevel(_WORDS.replace("DIGITS", "{1,3}"), whole_words=True, add_bos=True)
_QWEN2 = _ByteLevel(_WORDS.replace("DIGITS", ""), nfc=True)
_DIGITS = _ByteLevel(single_digits=True)
_BYTE_LEVELS = {
    "gpt-2": _ByteLevel(),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _ByteLevel(_TEKKEN, whole_words=True, add_bos=True),
}


def build_tokenizer(file: GGUFFile) -> "PreTrainedTokenizerFast":
    """Builds the file's tokenizer with its special tokens, flags and chat template."""
    from transformers import PreTrainedTokenizerFast

    vocabulary = _Vocabulary(file)
    kind = vocabulary.text("model", None)
    if kind == "gpt2":
        tokenizer, add_bos = _byte_level(vocabulary)
    elif kind == "llama":
        tokenizer, add_bos = _sentencepiece(vocabulary), True
    else:
        raise vocabulary.fault("model", f"is {kind!r}; supported are gpt2, llama")
    specials = {
        name: vocabulary.special(key)
        for name, key in (
            ("bos_token", "bos"),
            ("eos_token", "eos"),
            ("unk_token", "unknown"),
            ("pad_token", "padding"),
        )
    }
    _add_ends(
        tokenizer,
        specials["bos_token"] if vocabulary.flag("add_bos_token", add_bos) else None,
        specials["eos_token"] if vocabulary.flag("add_eos_token", False) else None,
    )
    template = file.metadata.get("tokenizer.chat_template")
    # transformers would copy the tokenizer, through JSON: seconds for a large vocabulary. Nobody else has it.
    vars(tokenizer)["__deepcopy__"] = lambda memo: tokenizer
    built: PreTrainedTokenizerFast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        **{name: token for name, token in specials.items() if token is not None},
    )
    del vars(tokenizer)["__deepcopy__"]
    if isinstance(template, str):
        built.chat_template = template
    return built


class _Vocabulary:
    """The `tokenizer.ggml.*` part of the metadata, checked."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.tokens = self.strings("tokens")
        kinds = file.metadata.get("tokenizer.ggml.token_type")
        self.kinds = kinds if isinstance(kinds, list) else [1] * len(self.tokens)
        if len(self.kinds) != len(self.tokens):
            raise self.fault("token_type", f"has {len(self.kinds)} of {len(self.tokens)} entries")
        self.ids = {token: i for i, token in enumerate(self.tokens)}

    def fault(self, key: str, message: str) -> ModelLoadError:
        return ModelLoadError(
            f"{self.file.path}: metadata tokenizer.ggml.{key} {message}; a tokenizer can be given "
            "from elsewhere: tokenizer=<folder or Hugging Face id>"
        )

    def strings(self, key: str) -> list[str]:
        value = self.file.metadata.get(f"tokenizer.ggml.{key}")
        if not isinstance(value, list) or not value or not isinstance(value[0], str):
            raise self.fault(key, "is missing or no list of strings")
        return [str(item) for item in value]

    def text(self, key: str, default: str | None) -> str:
        value = self.file.metadata.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(value, str):
            raise self.fault(key, "is missing or no string")
        return value

    def flag(self, key: str, default: bool) -> bool:
        return bool(self.file.metadata.get(f"tokenizer.ggml.{key}", default))

    def special(self, key: str) -> str | None:
        value = self.file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < len(self.tokens):
            raise self.fault(f"{key}_token_id", f"is {value!r}, outside the vocabulary")
        return self.tokens[value]

    def added(self, *, normalized: bool) -> list[AddedToken]:
        """Tokens found in text before anything else: control tokens and user-defined ones."""
        return [
            AddedToken(
                token, special=kind == _CONTROL, normalized=normalized and kind == _USER_DEFINED
            )
            for token, kind in zip(self.tokens, self.kinds, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]


def _byte_level(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    name = vocabulary.text("pre", "default")
    kind = _BYTE_LEVELS.get(name)
    if kind is None:
        raise vocabulary.fault("pre", f"is {name!r}; supported are {', '.join(_BYTE_LEVELS)}")
    merges: list[tuple[str, str]] = []
    for merge in vocabulary.strings("merges"):
        left, space, right = merge.partition(" ")
        if not space or left not in vocabulary.ids or right not in vocabulary.ids:
            raise vocabulary.fault("merges", f"has {merge!r}, which does not join two known tokens")
        if left + right not in vocabulary.ids:
            raise vocabulary.fault("merges", f"has {merge!r}, which makes no known token")
        merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocabulary.ids, merges, ignore_merges=kind.whole_words))
    if kind.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if kind.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if kind.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(kind.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(vocabulary.added(normalized=False))
    return tokenizer, kind.add_bos


def _sentencepiece(vocabulary: _Vocabulary) -> Tokenizer:
    unknown = vocabulary.special("unknown")
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary.ids,
            _merges(vocabulary),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=_BYTE in vocabulary.kinds,
        )
    )
    spaces = normalizers.Replace(" ", _SPACE)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.flag("add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
        steps.append(decoders.Strip(content=" ", left=1))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(steps)
    # SentencePiece finds user-defined pieces in the text after spaces became its own mark.
    tokenizer.add_tokens(vocabulary.added(normalized=True))
    return tokenizer


def _merges(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Merges that join pieces in the order SentencePiece does: best score first.

    SentencePiece joins any two neighbours that make a piece, so each piece gives one merge for every way to
    split it in two pieces.
    """
    scores = vocabulary.file.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(vocabulary.tokens):
        raise vocabulary.fault("scores", "is missing or not as long as tokens")
    normal = {
        token: i
        for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
        if kind not in (_CONTROL, _USER_DEFINED, _BYTE)
    }
    order = sorted(normal, key=lambda token: (-float(scores[normal[token]]), normal[token]))
    return [
        (token[:cut], token[cut:])
        for token in order
        for cut in range(1, len(token))
        if token[:cut] in normal and token[cut:] in normal
    ]


def _add_ends(tokenizer: Tokenizer, bos: str | None, eos: str | None) -> None:
    """Makes encoding with special tokens put these around a text, or around each of a pair."""
    ends = [token for token in (bos, eos) if token is not None]
    if not ends:
        return
    first = [*([f"{bos}:0"] if bos else []), "$A:0", *([f"{eos}:0"] if eos else [])]
    second = [*([f"{bos}:1"] if bos else []), "$B:1", *([f"{eos}:1"] if eos else [])]
    tokenizer.post_processor = TemplateProcessing(
        single=first,
        pair=first + second,
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in ends],
    )
