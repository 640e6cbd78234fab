"""Tiny random models, saved as sentence-transformers folders."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules as st_modules
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TEXTS = [
    "",
    " ",
    "a",
    "Hello, World!",
    "  padded with spaces  ",
    "The quick brown fox jumps over the lazy dog.",
    "naïve café — ÉCOLE ß straße",
    "床前明月光,疑是地上霜。举头望明月,低头思故乡。",
    "emoji 🎉👩‍👩‍👧‍👦 and control \x00\x07\x1b characters\t\r\n",
    "[CLS] [SEP] [PAD] <s> </s> <pad> <mask> written out",
    "one two three four five six seven eight nine ten " * 2,
    "Lists the sites that are failing in the Abusive Experience Report. " * 4,
    "x" * 150,
    "long " * 400,
    "αβγδ ελληνικά и русский текст " * 5,
    "Hello, World!",
]


def shared_data() -> Path:
    """The shared data folder, from $SURGE_SHARED or beside the repository."""
    root = Path(__file__).resolve().parents[2]
    return Path(os.environ.get("SURGE_SHARED", root.parent / "shared")) / "data"


def train_tokenizer(kind: str) -> transformers.PreTrainedTokenizerFast:
    """A small tokenizer of a kind: ``wordpiece``, ``bytes`` (RoBERTa), ``unigram``, ``qwen``
    (an end token is put last), ``llama`` (a begin token is put first).
    """
    texts = TEXTS * 3
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    names = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "mask_token": "<mask>",
    }
    if kind == "wordpiece":
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        names = {
            "pad_token": "[PAD]",
            "unk_token": "[UNK]",
            "cls_token": "[CLS]",
            "sep_token": "[SEP]",
            "mask_token": "[MASK]",
        }
        backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        backend.normalizer = normalizers.BertNormalizer(lowercase=False)
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=special)
        head, tail = "[CLS]", "[SEP]"
    elif kind == "unigram":
        backend = Tokenizer(models.Unigram())
        backend.normalizer = normalizers.NFKC()
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        backend.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=300, special_tokens=special, unk_token="<unk>", show_progress=False
        )
        head, tail = "<s>", "</s>"
    else:
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        head, tail = {"qwen": ("", "</s>"), "llama": ("<s>", "")}.get(kind, ("<s>", "</s>"))
    backend.train_from_iterator(texts, trainer)
    tokens = [(t, backend.token_to_id(t)) for t in (head, tail) if t]
    template = f"{head} $A {tail}".strip()
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=tokens)
    side = "left" if kind == "qwen" else "right"
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, model_max_length=10**30, padding_side=side, **names
    )


SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "initializer_range": 0.3,
}


def tiny_transformer(family: str, folder: Path, **changes: object) -> Path:
    """A plain transformers folder of a family with random weights."""
    kind = {"bert": "wordpiece", "mpnet": "wordpiece", "xlm-roberta": "unigram", "qwen3": "qwen"}
    tokenizer = train_tokenizer(kind.get(family, "bytes"))
    base: dict[str, object] = {**SIZES, "vocab_size": len(tokenizer)}
    base |= {"pad_token_id": tokenizer.pad_token_id, "max_position_embeddings": 80}
    if family == "modernbert":
        base |= {"local_attention": 16, "max_position_embeddings": 512}
        base |= {"bos_token_id": 0, "eos_token_id": 2, "cls_token_id": 0, "sep_token_id": 2}
        base["num_hidden_layers"] = 4
    if family == "qwen3":
        base |= {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}
    if family == "distilbert":
        base |= {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}
    base |= changes
    config = transformers.AutoConfig.for_model(family, **base)
    torch.manual_seed(sum(map(ord, family)))
    model = transformers.AutoModel.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'nobody' %}"
    "{{ raise_exception('nobody may not speak') }}{% endif %}"
    "<s>{{ message.role }}: {{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


def tiny_decoder(family: str, folder: Path, **changes: object) -> Path:
    """A folder of a causal language model with random weights and a chat template.

    ``shard`` among the changes is the size of a weights file, as save_pretrained takes it.
    """
    shard = changes.pop("shard", "1GB")
    tokenizer = train_tokenizer("llama")
    tokenizer.chat_template = CHAT_TEMPLATE
    base: dict[str, object] = {**SIZES, "vocab_size": len(tokenizer) + 5, "pad_token_id": 1}
    base |= {"bos_token_id": 0, "eos_token_id": 2, "max_position_embeddings": 256}
    base |= {"num_key_value_heads": 2, "head_dim": 8}
    base |= changes
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(family, **base)
    )
    torch.manual_seed(sum(map(ord, family)))
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(noise * 0.3 if parameter.ndim > 1 else 1.0 + noise * 0.2)
    model.save_pretrained(folder, max_shard_size=shard)
    tokenizer.save_pretrained(folder)
    return folder


def sentence_model(
    transformer: Path,
    folder: Path,
    *,
    pooling: str | tuple[str, ...] = "mean",
    include_prompt: bool = True,
    dense: tuple[int, torch.nn.Module, bool] | None = None,
    normalize: bool = True,
    max_seq_length: int | None = 64,
    **settings: object,
) -> Path:
    """Saves a transformers folder as a sentence-transformers one."""
    first = st_modules.Transformer(str(transformer), max_seq_length=max_seq_length)
    width = first.get_embedding_dimension()
    parts = [first, st_modules.Pooling(width, pooling_mode=pooling, include_prompt=include_prompt)]
    width = parts[1].get_embedding_dimension()
    if dense is not None:
        torch.manual_seed(7)
        size, activation, residual = dense
        layer = st_modules.Dense(width, size, activation_function=activation, use_residual=residual)
        parts.append(layer)
    if normalize:
        parts.append(st_modules.Normalize())
    model = SentenceTransformer(modules=parts, device="cpu", **settings)
    model.save(str(folder))
    return folder
