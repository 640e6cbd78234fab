"""A causal language model of a folder or a GGUF file: decoder, tokenizer and chat template."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surge_beam.gpu.encoder import model_folder
from surge_beam.gpu.threads import wait_passively
from surge_beam.records import EngineConfig, SurgeError

if TYPE_CHECKING:
    from surge_beam.gpu.device import Device
    from surge_beam.gpu.models.decoder import Decoder

_GGUF = ".gguf"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")

# Of a configuration that somebody else wrote; no model is near the largest.
_LARGEST_SIZE = 1 << 24
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """Attributes:
    decoder: the model, on its device.
    tokenizer: a fast tokenizer of transformers, neither truncating nor padding.
    context_length: most tokens of a sequence.
    stop_ids: tokens that end a completion, by generation config, config or tokenizer.
    name: what was asked for.
    """

    decoder: Decoder
    tokenizer: Any
    context_length: int
    stop_ids: frozenset[int]
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


def load_language_model(config: EngineConfig) -> LanguageModel:
    """Loads the model of a recipe onto its device.

    ``config.model`` is a folder with ``config.json`` and safetensors, a GGUF file, a folder with
    one, a bundled name or a name on the Hugging Face hub. Asked for bfloat16 or float16 on a CPU
    without 16-bit matrix units, the weights are rounded to that format and the arithmetic is
    float32. No code of the model's own runs.

    Raises:
      SurgeError: if the model, its tokenizer or the device is not there, a file of it is broken,
        or the decoder does not compute its family.
    """
    wait_passively()
    from surge_beam.gpu.device import choose_device, use_all_cores

    path = _find(config.model)
    device = choose_device(config)
    if device.name == "cpu":
        use_all_cores()
    load = _load_gguf if path.suffix == _GGUF else _load_folder
    return load(path, device, config.model)


def _find(name: str) -> Path:
    """The GGUF file or the model folder of a name."""
    path = Path(name)
    if path.suffix == _GGUF and path.is_file():
        return path
    folder = model_folder(name)
    files = sorted(folder.glob(f"*{_GGUF}"))
    if not files or (folder / "config.json").is_file():
        return folder
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise SurgeError(f"{folder} has several GGUF files ({names}); give the path of one")
    return files[0]


def _load_folder(folder: Path, device: Device, name: str) -> LanguageModel:
    from transformers import AutoConfig, AutoTokenizer

    from surge_beam.gpu.models.decoder import (
        MODEL_TYPES,
        PREFIXES,
        Decoder,
        unsupported_error,
    )
    from surge_beam.gpu.models.weights import Weights

    family = _read_json(folder / "config.json").get("model_type")
    if family not in MODEL_TYPES:
        raise unsupported_error(name, family, f"the family is none of {', '.join(MODEL_TYPES)}")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        raise SurgeError(f"{folder / 'config.json'} describes no model: {error}") from error
    _refuse(name, config)
    if any(folder.glob("pytorch_model*.bin")) and not any(folder.glob("*.safetensors")):
        raise unsupported_error(name, family, "its weights are only pickled")
    if not any((folder / file).is_file() for file in _TOKENIZER_FILES):
        raise SurgeError(f"the model folder {folder} has no tokenizer: no {_TOKENIZER_FILES[0]}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        raise SurgeError(f"the tokenizer of {folder} cannot be read: {error}") from error
    stops = [config.eos_token_id]
    if (folder / "generation_config.json").is_file():
        stops.append(_read_json(folder / "generation_config.json").get("eos_token_id"))
    weights = Weights(
        folder,
        dtype=device.compute,
        device=device.torch,
        round_to=device.round_to,
        prefixes=PREFIXES,
    )
    return _assemble(name, config, Decoder(config, weights), tokenizer, stops)


def _load_gguf(path: Path, device: Device, name: str) -> LanguageModel:
    if importlib.util.find_spec("gguf") is None:
        raise SurgeError(f"{path} is a GGUF file, and reading it takes: pip install gguf")
    from transformers import PreTrainedTokenizerFast

    from surge_beam.gpu.models.decoder import Decoder
    from surge_beam.gpu.models.gguf import GgufFile, GgufWeights

    file = GgufFile(path)
    config = file.config()
    _refuse(name, config)
    try:
        # the class by name, since AutoTokenizer would read the file a second time, slowly
        tokenizer = PreTrainedTokenizerFast.from_pretrained(
            path.parent, gguf_file=path.name, add_bos_token=file.adds_bos
        )
    except Exception as error:
        raise SurgeError(f"the tokenizer in {path} cannot be read: {error!r}") from error
    weights = GgufWeights(
        file, config, dtype=device.compute, device=device.torch, round_to=device.round_to
    )
    stops = [config.eos_token_id, file.metadata.get("tokenizer.ggml.eot_token_id")]
    return _assemble(name, config, Decoder(config, weights), tokenizer, stops)


def _assemble(
    name: str, config: Any, decoder: Decoder, tokenizer: Any, stops: list[Any]
) -> LanguageModel:
    from surge_beam.gpu.models.decoder import context_length

    if not getattr(tokenizer, "is_fast", False):
        raise SurgeError(f"the tokenizer of {name} has no tokenizer.json, and is too slow without")
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    ids = [tokenizer.eos_token_id]
    for stop in stops:
        ids += stop if isinstance(stop, list) else [stop]
    wrong = [i for i in ids if not isinstance(i, int | None)]
    if wrong:
        raise SurgeError(f"the end token {wrong[0]!r} of {name} is no token id")
    return LanguageModel(
        decoder=decoder,
        tokenizer=tokenizer,
        context_length=context_length(config),
        stop_ids=frozenset(i for i in ids if i is not None),
        name=name,
    )


def _refuse(name: str, config: Any) -> None:
    from surge_beam.gpu.models.decoder import MODEL_TYPES, unsupported, unsupported_error

    for field in _SIZES if config.model_type in MODEL_TYPES else ():
        size = getattr(config, field, None)
        if field == "head_dim" and size is None:
            continue
        if not isinstance(size, int) or not 0 < size <= _LARGEST_SIZE:
            raise SurgeError(
                f"{name}: {field} in its configuration must be an integer from 1 to "
                f"{_LARGEST_SIZE}, not {size!r}"
            )
    why = unsupported(config)
    if why:
        raise unsupported_error(name, config.model_type, why)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        said = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise SurgeError(f"{path.parent} is no model folder: it has no {path.name}") from None
    except (OSError, RecursionError, ValueError) as error:
        raise SurgeError(f"{path} is no readable JSON: {error}") from error
    if not isinstance(said, dict):
        raise SurgeError(f"{path} holds no JSON object")
    return said
