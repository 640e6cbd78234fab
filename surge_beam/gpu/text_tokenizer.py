"""From texts and conversations to token ids and back, without the weights of a model."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from surge_beam.gpu.dummy import is_dummy
from surge_beam.gpu.encoder import model_folder
from surge_beam.gpu.gguf_file import GgufFile
from surge_beam.records import EngineConfig, SurgeError

GGUF = ".gguf"
_LENGTHS = ("max_position_embeddings", "seq_length", "max_seq_len", "n_positions")
_NO_LIMIT = 1 << 31
_KV_BYTES = 1 << 15
# Of a configuration that somebody else wrote; no model is near the largest.
LARGEST_SIZE = 1 << 24
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


class PromptTokenizer(Protocol):
    """What turns prompts into token ids.

    Attributes:
      context_length: most tokens of a sequence.
      vocabulary: token ids lie below it.
    """

    @property
    def context_length(self) -> int: ...

    @property
    def vocabulary(self) -> int: ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of raw prompts, with the special tokens that the tokenizer adds."""

    def chat(self, messages: Iterable[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation up to where the assistant speaks.

        Raises:
          SurgeError: if there is no chat template, or it fails on the messages.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, without special ones."""


@dataclasses.dataclass(frozen=True)
class TextTokenizer:
    """A model's tokenizer and chat template.

    Attributes:
      tokenizer: a fast tokenizer of transformers, neither truncating nor padding.
      context_length: most tokens of a sequence.
      vocabulary: token ids lie below it.
      name: the model that was asked for.
    """

    tokenizer: Any
    context_length: int
    vocabulary: int
    name: str

    def encode(self, text: str) -> list[int]:
        """Token ids of a raw prompt, with the special tokens that the tokenizer adds."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of many raw prompts; tokenized on several threads."""
        encodings = self.tokenizer.backend_tokenizer.encode_batch_fast(list(texts))
        return [encoding.ids for encoding in encodings]

    def chat(self, messages: Iterable[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation up to where the assistant speaks.

        Args:
          messages: what the chat template takes, mostly mappings with ``role`` and ``content``.

        Raises:
          SurgeError: if the model has no chat template, or the template fails on the messages.
        """
        if not self.tokenizer.chat_template:
            raise SurgeError(
                f"the tokenizer of {self.name} has no chat template; give prompts as plain text"
            )
        try:
            text = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except Exception as error:
            raise SurgeError(
                f"the chat template of {self.name} fails: {type(error).__name__}: {error}"
            ) from error
        backend = self.tokenizer.backend_tokenizer
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        text: str = self.tokenizer.backend_tokenizer.decode(list(ids), skip_special_tokens=True)
        return text


class DummyTokenizer:
    """A token a byte, for the stand-in model."""

    context_length = 8192
    vocabulary = 256

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The bytes of each text as UTF-8."""
        return [list(text.encode()) for text in texts]

    def chat(self, messages: Iterable[Mapping[str, Any]]) -> list[int]:
        """Every message as ``role: content`` on a line of its own."""
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return list(("".join(lines) + "assistant: ").encode())

    def decode(self, ids: Sequence[int]) -> str:
        """A letter a token, as ``DummyRunner`` does."""
        return "".join(chr(0x100 + i) for i in ids)


def load_text_tokenizer(config: EngineConfig) -> PromptTokenizer:
    """The tokenizer of a recipe's model; loads none of its weights.

    Raises:
      SurgeError: if the model or its tokenizer is not there, or broken.
    """
    if is_dummy(config.model):
        return DummyTokenizer()
    path = find_model(config.model)
    if path.suffix == GGUF:
        file = GgufFile(path)
        described = file.config()
        tokenizer = gguf_tokenizer(path, adds_bos=file.adds_bos)
    else:
        described, tokenizer = folder_config(path), folder_tokenizer(path)
    check_fast(tokenizer, config.model)
    return TextTokenizer(
        tokenizer=tokenizer,
        context_length=context_length(described, exact=config.engine == "native"),
        vocabulary=int(described.vocab_size),
        name=config.model,
    )


def find_model(name: str) -> Path:
    """The GGUF file or the model folder of a name.

    Raises:
      SurgeError: if it is not there, or a folder holds several GGUF files.
    """
    path = Path(name)
    if path.suffix == GGUF and path.is_file():
        return path
    folder = model_folder(name)
    files = sorted(folder.glob(f"*{GGUF}"))
    if not files or (folder / "config.json").is_file():
        return folder
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise SurgeError(f"{folder} has several GGUF files ({names}); give the path of one")
    return files[0]


def folder_config(folder: Path) -> Any:
    """The transformers config of a model folder. Raises SurgeError if there is none."""
    from transformers import AutoConfig

    read_json(folder / "config.json")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        raise SurgeError(f"{folder / 'config.json'} describes no model: {error}") from error
    return config.get_text_config()


def folder_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder, one a process. Raises SurgeError if none can be read."""
    if not any((folder / file).is_file() for file in _TOKENIZER_FILES):
        raise SurgeError(f"the model folder {folder} has no tokenizer: no {_TOKENIZER_FILES[0]}")
    return _folder_tokenizer(folder, _versions(folder.iterdir()))


def gguf_tokenizer(path: Path, *, adds_bos: bool) -> Any:
    """The tokenizer inside a GGUF file, one a process. Raises SurgeError if it cannot be read."""
    if importlib.util.find_spec("gguf") is None:
        raise SurgeError(f"{path} is a GGUF file, and reading it takes: pip install gguf")
    return _gguf_tokenizer(path, adds_bos, _versions([path]))


def _versions(files: Iterable[Path]) -> tuple[Any, ...]:
    """What changes when a file does."""
    found = ((file.name, file.stat()) for file in files if file.is_file())
    return tuple(sorted((name, said.st_mtime_ns, said.st_size) for name, said in found))


# The engine and the step that tokenizes, in one process, take a second each to load one.
@functools.lru_cache(maxsize=4)
def _folder_tokenizer(folder: Path, versions: tuple[Any, ...]) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        raise SurgeError(f"the tokenizer of {folder} cannot be read: {error}") from error


@functools.lru_cache(maxsize=4)
def _gguf_tokenizer(path: Path, adds_bos: bool, versions: tuple[Any, ...]) -> Any:
    from transformers import PreTrainedTokenizerFast

    try:
        # the class by name, since AutoTokenizer would read the file a second time, slowly
        return PreTrainedTokenizerFast.from_pretrained(
            path.parent, gguf_file=path.name, add_bos_token=adds_bos
        )
    except Exception as error:
        raise SurgeError(f"the tokenizer in {path} cannot be read: {error!r}") from error


def check_fast(tokenizer: Any, name: str) -> None:
    """Raises SurgeError if a tokenizer is not a fast one; else makes it keep whole texts."""
    if not getattr(tokenizer, "is_fast", False):
        raise SurgeError(f"the tokenizer of {name} has no tokenizer.json, and is too slow without")
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()


def context_length(config: Any, *, exact: bool = True) -> int:
    """Tokens of a sequence for which the config's rotary positions are exact; a very large number
    for a family that has no limit.

    Dynamic scaling is constant up to ``max_position_embeddings``, longrope up to the original
    length. Yarn (arXiv 2309.00071) reaches ``factor`` times the original length; some configs keep
    that length in ``max_position_embeddings``.

    Args:
      exact: without it, longrope's whole length counts, as vLLM takes it.
    """
    named = (getattr(config, name, None) for name in _LENGTHS)
    length = int(next((value for value in named if value), _NO_LIMIT))
    rope = getattr(config, "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings")
    if exact and original and rope["rope_type"] == "longrope":
        return min(length, int(original))
    if original and rope["rope_type"] == "yarn":
        return max(length, int(original * (rope.get("factor") or 1.0)))
    return length


def kv_bytes_per_token(config: EngineConfig) -> int:
    """Bytes of keys and values that a token takes in 16-bit numbers, a guess where the model's
    files do not say it in the usual words.

    Reads no more than the files' own words, so that a submitter needs no model library.

    Raises:
      SurgeError: if the model is not there, or is a GGUF file that is not computed here.
    """
    if is_dummy(config.model):
        return 4
    path = find_model(config.model)
    said = GgufFile(path).settings() if path.suffix == GGUF else read_json(path / "config.json")
    inner = said.get("text_config")
    said = inner if isinstance(inner, dict) else said
    heads: Any = said.get("num_attention_heads")
    keys: Any = said.get("num_key_value_heads") or heads
    layers: Any = said.get("num_hidden_layers")
    size: Any = said.get("head_dim")
    width = said.get("hidden_size")
    if not size and isinstance(width, int) and isinstance(heads, int) and heads > 0:
        size = width // heads
    if not all(isinstance(n, int) and 0 < n < LARGEST_SIZE for n in (layers, keys, size)):
        # no attention, or one that is described in other words
        return _KV_BYTES
    return int(layers * 2 * keys * size * 2)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a model folder. Raises SurgeError if there is none."""
    try:
        said = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise SurgeError(f"{path.parent} is no model folder: it has no {path.name}") from None
    except (OSError, RecursionError, ValueError) as error:
        raise SurgeError(f"{path} is no readable JSON: {error}") from error
    if not isinstance(said, dict):
        raise SurgeError(f"{path} holds no JSON object")
    return said
