"""The tokenizer of a folder or a GGUF file.

Knows where a tokenizer's parts lie. Knows nothing of weights.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from jpaged.errors import ModelLoadError
from jpaged.models.loading.files import read_json, read_json_if_there
from jpaged.models.loading.gguf_file import GGUFFile
from jpaged.models.loading.gguf_tokenizer import build_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def load_tokenizer(path: Path) -> "PreTrainedTokenizerFast":
    """The fast tokenizer of a folder or GGUF file, with its chat template."""
    if path.is_dir():
        return _of_folder(path)
    return build_tokenizer(GGUFFile.open(path))


def has_tokenizer(path: Path) -> bool:
    """Whether there is a tokenizer to load."""
    return path.is_file() or (path / "tokenizer.json").is_file()


def tokenizer_eos_id(folder: Path) -> int | None:
    """The id of the eos token that tokenizer_config.json names, if both can be found."""
    token = read_json_if_there(folder / "tokenizer_config.json").get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if not isinstance(token, str):
        return None
    added = read_json_if_there(folder / "tokenizer.json").get("added_tokens")
    for item in added if isinstance(added, list) else ():
        if isinstance(item, dict) and item.get("content") == token:
            value = item.get("id")
            return value if isinstance(value, int) else None
    return None


def _of_folder(folder: Path) -> "PreTrainedTokenizerFast":
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelLoadError(
            f"{path}: no such file; a tokenizer can be given from elsewhere: "
            "tokenizer=<folder or Hugging Face id>"
        )
    # Broken files get our words for it; transformers' would not name the file.
    read_json(path)
    read_json_if_there(folder / "tokenizer_config.json")
    from transformers import PreTrainedTokenizerFast

    # Not AutoTokenizer: some of the classes it picks by name build a pre-tokenizer of their own in place of
    # the file's (GPT2Tokenizer, which SmolLM2 names, joins digits that the file keeps apart).
    try:
        tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(
            folder, local_files_only=True
        )
    except Exception as error:
        raise ModelLoadError(f"{folder}: the tokenizer cannot be loaded: {error}") from error
    return tokenizer
