"""What a sentence-transformers folder says, read without torch."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from surge_beam.records import SurgeError

POOLING_MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
_OLD_POOLING_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_TRANSFORMER_KINDS = (
    "bert",
    "roberta",
    "distilbert",
    "camembert",
    "albert",
    "xlm-roberta",
    "xlnet",
)
_TRANSFORMER_CONFIGS = tuple(f"sentence_{kind}_config.json" for kind in _TRANSFORMER_KINDS)
_PLAIN_TEXT = {
    "text": {"method": "forward", "method_output_name": "last_hidden_state"},
}
_IGNORED_DIRECTORIES = frozenset({"onnx", "openvino", ".git", ".cache"})


@dataclasses.dataclass(frozen=True)
class PoolingStage:
    """Attributes:
    modes: some of ``POOLING_MODES``, put side by side.
    include_prompt: whether the prompt's tokens are pooled too.
    """

    modes: tuple[str, ...] = ("mean",)
    include_prompt: bool = True


@dataclasses.dataclass(frozen=True)
class DenseStage:
    """A linear layer after pooling; its weights lie in ``folder``."""

    folder: Path
    activation: str
    use_residual: bool = False


@dataclasses.dataclass(frozen=True)
class NormalizeStage:
    """Vectors are scaled to length 1."""


Stage = DenseStage | NormalizeStage


@dataclasses.dataclass(frozen=True)
class ModelFolder:
    """A model folder's recipe.

    Attributes:
      path: the folder that holds ``modules.json``.
      transformer: the folder with ``config.json``, weights and tokenizer.
      max_seq_length: tokens kept of a text; None leaves it to the tokenizer and the config.
      do_lower_case: lower the text's case before the tokenizer's own normaliser.
      pooling: from tokens to one vector.
      stages: what follows pooling, in order.
      prompts: by name.
      default_prompt_name: the prompt used where none was asked for.
      unusual: why the lean models cannot compute this folder; empty if they may.
    """

    path: Path
    transformer: Path
    max_seq_length: int | None = None
    do_lower_case: bool = False
    pooling: PoolingStage = PoolingStage()
    stages: tuple[Stage, ...] = ()
    prompts: dict[str, str] = dataclasses.field(default_factory=dict)
    default_prompt_name: str | None = None
    unusual: str = ""

    @property
    def default_prompt(self) -> str | None:
        """The text put before every row where none was asked for."""
        if self.default_prompt_name is None:
            return None
        return self.prompts.get(self.default_prompt_name)

    @property
    def normalizes(self) -> bool:
        """True if the model scales its vectors to length 1."""
        return any(isinstance(stage, NormalizeStage) for stage in self.stages)


def read_folder(path: Path) -> ModelFolder:
    """Reads a model folder.

    Raises:
      SurgeError: if a JSON file is missing or unreadable, or weights exist only as pickles.
    """
    refuse_pickles(path)
    settings = _json(path / "config_sentence_transformers.json", {})
    prompts = {k: v for k, v in (settings.get("prompts") or {}).items() if isinstance(v, str)}
    common: dict[str, Any] = {
        "path": path,
        "prompts": prompts,
        "default_prompt_name": settings.get("default_prompt_name"),
    }
    listed = _json(path / "modules.json", None)
    if listed is None:
        _json(path / "config.json")
        return ModelFolder(transformer=path, unusual=_adapter(path), **common)
    kinds = [str(module["type"]) for module in listed]
    names = [kind.rpartition(".")[2] for kind in kinds]
    foreign = [kind for kind in kinds if not kind.startswith("sentence_transformers.")]
    if foreign:
        return ModelFolder(transformer=path, unusual=f"module {foreign[0]}", **common)
    if settings.get("model_type", "SentenceTransformer") != "SentenceTransformer":
        return ModelFolder(transformer=path, unusual=str(settings["model_type"]), **common)
    if names[:2] != ["Transformer", "Pooling"]:
        return ModelFolder(transformer=path, unusual=" + ".join(names), **common)
    transformer = path / listed[0].get("path", "")
    config = _transformer_config(transformer)
    pooling, why = _pooling(path / listed[1]["path"])
    stages: list[Stage] = []
    why = why or _unusual_transformer(config) or _adapter(transformer)
    for name, module in zip(names[2:], listed[2:], strict=True):
        folder = path / module["path"]
        if name == "Normalize" and _json(folder / "config.json", {}) in (
            {},
            {"module_input_name": "sentence_embedding"},
            {
                "module_input_name": "sentence_embedding",
                "module_output_name": "sentence_embedding",
            },
        ):
            stages.append(NormalizeStage())
        elif name == "Dense":
            dense, reason = _dense(folder)
            stages.append(dense)
            why = why or reason
        elif name != "Dropout":
            why = why or f"module {name}"
    return ModelFolder(
        transformer=transformer,
        max_seq_length=config.get("max_seq_length"),
        do_lower_case=bool(config.get("do_lower_case", False)),
        pooling=pooling,
        stages=tuple(stages),
        unusual=why,
        **common,
    )


def refuse_pickles(path: Path) -> None:
    """Raises SurgeError if a module's weights exist only as a pickled file."""
    for pickled in sorted(path.rglob("pytorch_model*.bin")):
        if _IGNORED_DIRECTORIES.intersection(pickled.relative_to(path).parts):
            continue
        if not any(pickled.parent.glob("*.safetensors")):
            raise SurgeError(
                f"the weights {pickled.relative_to(path)} of {path} are pickled, and a pickle can "
                "run code; load the model once where you trust it and save it with "
                "safe_serialization=True, then give that folder"
            )


def _json(path: Path, default: Any = ...) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        if default is not ...:
            return default
        raise SurgeError(f"{path.parent} is no model folder: it has no {path.name}") from None
    except ValueError as error:
        raise SurgeError(f"{path} is no readable JSON: {error}") from error


def _transformer_config(folder: Path) -> dict[str, Any]:
    for name in _TRANSFORMER_CONFIGS:
        config = _json(folder / name, {})
        if config:
            return dict(config)
    return {}


def _unusual_transformer(config: dict[str, Any]) -> str:
    known = {"max_seq_length", "do_lower_case", "transformer_task", "modality_config"}
    known |= {"module_output_name", "unpad_inputs", "query_length", "document_length"}
    odd = [key for key, value in config.items() if key not in known and value]
    if odd:
        return f"transformer setting {odd[0]}"
    if config.get("transformer_task", "feature-extraction") != "feature-extraction":
        return f"task {config['transformer_task']}"
    if config.get("modality_config", _PLAIN_TEXT) != _PLAIN_TEXT:
        return "modalities other than plain text"
    if config.get("module_output_name", "token_embeddings") != "token_embeddings":
        return f"module output {config['module_output_name']}"
    return ""


def _adapter(folder: Path) -> str:
    return "adapter weights" if (folder / "adapter_config.json").is_file() else ""


def _pooling(folder: Path) -> tuple[PoolingStage, str]:
    config = _json(folder / "config.json", {})
    named = config.get("pooling_mode")
    if named is None:
        old = tuple(mode for key, mode in _OLD_POOLING_KEYS.items() if config.get(key, False))
        named = old or ("mean",)
    modes = (named,) if isinstance(named, str) else tuple(named)
    bad = [mode for mode in modes if mode not in POOLING_MODES]
    return (
        PoolingStage(modes, bool(config.get("include_prompt", True))),
        f"pooling mode {bad[0]}" if bad else "",
    )


def _dense(folder: Path) -> tuple[DenseStage, str]:
    config = _json(folder / "config.json")
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    own = "sentence_embedding"
    inputs = config.get("module_input_name", own)
    output = config.get("module_output_name", inputs)
    why = ""
    if inputs != own or output not in (own, None):
        why = f"a dense layer from {inputs} to {output}"
    elif not activation.startswith("torch.nn."):
        why = f"activation {activation}"
    return DenseStage(folder, activation, bool(config.get("use_residual", False))), why
