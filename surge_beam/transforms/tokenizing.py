"""From prompts to requests of token ids, in batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from surge_beam.gpu.text_tokenizer import PromptTokenizer, load_text_tokenizer
from surge_beam.records import EngineConfig, Request, SurgeError
from surge_beam.transforms.prompts import Prompt, Refusal


class Tokenizing:
    """Tokenizes prompts with the tokenizer of an engine's model.

    Args:
      config: the engine's recipe.

    Raises:
      SurgeError: if the model or its tokenizer is not there.
    """

    def __init__(self, config: EngineConfig):
        self._tokenizer: PromptTokenizer = load_text_tokenizer(config)
        self._context = min(
            self._tokenizer.context_length, config.max_context or self._tokenizer.context_length
        )

    def text(self, ids: list[int]) -> str:
        """The text of tokens."""
        return self._tokenizer.decode(ids)

    def requests(self, prompts: Sequence[Prompt | Refusal]) -> list[Request | Refusal]:
        """The request of every prompt, or why there is none; refusals pass through."""
        texts = [p.text for p in prompts if isinstance(p, Prompt) and p.text is not None]
        encoded = iter(self._tokenizer.encode_batch(texts))
        return [p if isinstance(p, Refusal) else self._request(p, encoded) for p in prompts]

    def _request(self, prompt: Prompt, encoded: Any) -> Request | Refusal:
        if prompt.text is not None:
            ids = next(encoded)
        elif prompt.token_ids is not None:
            ids = prompt.token_ids
            beyond = [i for i in ids if not 0 <= i < self._tokenizer.vocabulary]
            if beyond:
                return Refusal(
                    "invalid_request",
                    f"token id {beyond[0]} lies outside the vocabulary of"
                    f" {self._tokenizer.vocabulary}",
                )
        else:
            assert prompt.messages is not None
            try:
                ids = self._tokenizer.chat(prompt.messages)
            except SurgeError as error:
                return Refusal("invalid_request", str(error))
        if not len(ids):
            return Refusal("empty_prompt", "the prompt has no tokens")
        if len(ids) >= self._context:
            return Refusal(
                "context_length_exceeded",
                f"the prompt has {len(ids)} tokens, which fills the context of {self._context}",
            )
        return Request(custom_id=prompt.custom_id, prompt_ids=tuple(ids), sampling=prompt.sampling)
