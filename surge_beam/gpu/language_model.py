"""A causal language model of a folder or a GGUF file: decoder, tokenizer and chat template."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surge_beam.gpu.gguf_file import GgufFile
from surge_beam.gpu.refusals import unsupported_error
from surge_beam.gpu.text_tokenizer import (
    GGUF,
    LARGEST_SIZE,
    TextTokenizer,
    check_fast,
    context_length,
    find_model,
    folder_config,
    folder_tokenizer,
    gguf_tokenizer,
    read_json,
)
from surge_beam.records import EngineConfig, SurgeError

if TYPE_CHECKING:
    from surge_beam.gpu.device import Device
    from surge_beam.gpu.models.decoder import Decoder

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
class LanguageModel(TextTokenizer):
    """Attributes:
    decoder: the model, on its device.
    stop_ids: tokens that end a completion, by generation config, config or tokenizer.
    """

    decoder: Decoder
    stop_ids: frozenset[int]


def load_language_model(config: EngineConfig) -> LanguageModel:
    """Loads the model of a recipe onto its device.

    ``config.model`` is a folder with ``config.json`` and safetensors, a GGUF file, a folder with
    one, a bundled name or a name on the Hugging Face hub. Asked for bfloat16 or float16 on a CPU
    without 16-bit matrix units, the weights are rounded to that format and the arithmetic is
    float32; numbers of bfloat16 stay in 16 bits (``CompiledLinear``). No code of the model's own
    runs.

    Raises:
      SurgeError: if the model, its tokenizer or the device is not there, a file of it is broken,
        or the decoder does not compute its family.
    """
    from surge_beam.gpu.device import choose_device, use_all_cores

    path = find_model(config.model)
    device = choose_device(config)
    if device.name == "cpu":
        use_all_cores()
    load = _load_gguf if path.suffix == GGUF else _load_folder
    return load(path, device, config.model, config.kernels)


def _load_folder(folder: Path, device: Device, name: str, kernels: str) -> LanguageModel:
    from surge_beam.gpu.models.decoder import MODEL_TYPES, PREFIXES, Decoder
    from surge_beam.gpu.models.weights import Weights

    family = read_json(folder / "config.json").get("model_type")
    if family not in MODEL_TYPES:
        raise unsupported_error(name, family, f"the family is none of {', '.join(MODEL_TYPES)}")
    config = folder_config(folder)
    _refuse(name, config)
    if any(folder.glob("pytorch_model*.bin")) and not any(folder.glob("*.safetensors")):
        raise unsupported_error(name, family, "its weights are only pickled")
    tokenizer = folder_tokenizer(folder)
    stops = [config.eos_token_id]
    if (folder / "generation_config.json").is_file():
        stops.append(read_json(folder / "generation_config.json").get("eos_token_id"))
    weights = Weights(
        folder,
        dtype=device.compute,
        device=device.torch,
        round_to=device.round_to,
        prefixes=PREFIXES,
    )
    return _assemble(name, config, Decoder(config, weights, kernels), tokenizer, stops)


def _load_gguf(path: Path, device: Device, name: str, kernels: str) -> LanguageModel:
    if importlib.util.find_spec("gguf") is None:
        raise SurgeError(f"{path} is a GGUF file, and reading it takes: pip install gguf")
    from surge_beam.gpu.models.decoder import Decoder
    from surge_beam.gpu.models.gguf import GgufWeights

    file = GgufFile(path)
    config = file.config()
    _refuse(name, config)
    tokenizer = gguf_tokenizer(path, adds_bos=file.adds_bos)
    weights = GgufWeights(
        file, config, dtype=device.compute, device=device.torch, round_to=device.round_to
    )
    stops = [config.eos_token_id, file.metadata.get("tokenizer.ggml.eot_token_id")]
    return _assemble(name, config, Decoder(config, weights, kernels), tokenizer, stops)


def _assemble(
    name: str, config: Any, decoder: Decoder, tokenizer: Any, stops: list[Any]
) -> LanguageModel:
    check_fast(tokenizer, name)
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
        vocabulary=decoder.vocab,
        stop_ids=frozenset(i for i in ids if i is not None),
        name=name,
    )


def _refuse(name: str, config: Any) -> None:
    from surge_beam.gpu.models.decoder import MODEL_TYPES, unsupported

    for field in _SIZES if config.model_type in MODEL_TYPES else ():
        size = getattr(config, field, None)
        if field == "head_dim" and size is None:
            continue
        if not isinstance(size, int) or not 0 < size <= LARGEST_SIZE:
            raise SurgeError(
                f"{name}: {field} in its configuration must be an integer from 1 to "
                f"{LARGEST_SIZE}, not {size!r}"
            )
    why = unsupported(config)
    if why:
        raise unsupported_error(name, config.model_type, why)
