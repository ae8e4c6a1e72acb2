"""Tiny tokenizers of the two kinds whose tokens can end inside a character, with their own decoders."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from jpaged.engine.output_processor import BackendDecoder


class Backend:
    """What `BackendDecoder` wants of a transformers tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.backend_tokenizer = tokenizer


def byte_level() -> Tokenizer:
    """A token for each byte, some merges across and inside characters, and a special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(alphabet)}
    # "é" is C3 A9, "€" E2 82 AC, an emoji F0 9F 98 80: as letters of the byte-level alphabet.
    words = {
        word: pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(word)[0][0]
        for word in "é€😀"
    }
    merges = [(word[0], word[1]) for word in words.values()]
    merges += [("h", "e"), ("Ġ", "a"), (words["😀"][:2], words["😀"][2])]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Letters and words with a metaspace, and bytes for all else, as in Llama's tokenizer."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += ["▁", *"abcdefgh.,", "▁a", "▁the", "é"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[("▁", "a")],
            byte_fallback=True,
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    return tokenizer


def decoder(tokenizer: Tokenizer) -> BackendDecoder:
    return BackendDecoder(Backend(tokenizer))
