"""When a completion ends: end tokens, stop strings, loops, the token limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from surge_beam.policy.repetition import loop_period
from surge_beam.records import SamplingParams

_LOOP_CHECK = 32  # tokens between two looks for a loop
_MARGIN = 8  # characters at a window's start that a decoder may show differently there
_UNFINISHED = "\ufffd"
_MAX_UNFINISHED = 16  # pushes after which text that ends so will not be completed any more


class StopChecker:
    """Watches one sequence's output.

    Stop strings are searched in the text of the tokens, wherever token borders fall. A character
    whose bytes are spread over tokens decodes to U+FFFD as long as some are missing, so U+FFFD at
    the end of the text is left out of the search. Special tokens have no text: a stop string
    spelled by one does not count.

    A push decodes a window of recent tokens only: it begins where the text was complete, and its
    text is longer than the longest stop string. What the window shows counts once the text of the
    whole output shows it too. Without stop strings nothing is decoded until ``text``.

    Args:
      tokenizer_decode: the text of token ids, without special tokens.
      params: of the request; its own end tokens come on top of ``stop_ids``.
      stop_ids: the model's end tokens, unless ``params.ignore_eos``.
      max_new_tokens: most output tokens; what ``params.max_tokens`` says is not looked at.
    """

    def __init__(
        self,
        tokenizer_decode: Callable[[list[int]], str],
        params: SamplingParams,
        stop_ids: frozenset[int],
        max_new_tokens: int,
    ) -> None:
        self._decode = tokenizer_decode
        self._ends = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            self._ends |= stop_ids
        self._stops = params.stop
        self._limit = max_new_tokens
        self._watch_loops = params.end_on_repetition
        self._ids: list[int] = []
        self._reach = max(map(len, self._stops), default=0) + _MARGIN
        # Window: its tokens and their text; a border in it where the text was complete, by tokens
        # and characters before it; pushes since the text last was.
        self._window: list[int] = []
        self._text = ""
        self._mark = self._mark_chars = 0
        self._unfinished = 0

    def push(self, token_id: int) -> str | None:
        """Takes an output token; returns why the sequence ends with it, or None.

        Where several reasons meet: ``stop``, then ``repetition``, then ``length``. A loop is
        noticed up to 31 tokens late.
        """
        self._ids.append(token_id)
        if token_id in self._ends:
            return "stop"
        if self._stops and self._brings_stop(token_id):
            return "stop"
        count = len(self._ids)
        if self._watch_loops and count % _LOOP_CHECK == 0 and loop_period(self._ids):
            return "repetition"
        return "length" if count >= self._limit else None

    def resume(self, output_ids: Sequence[int]) -> str | None:
        """Takes, in a new checker, the output of a sequence so far.

        Decisions from here on are those of a checker that had them pushed one by one.

        Returns:
          Why the sequence has ended with the last of them, or None.
        """
        if not output_ids:
            return None
        self._ids = list(output_ids[:-1])
        self._window = list(self._ids) if self._stops else []
        return self.push(output_ids[-1])

    def text(self) -> str:
        """Text of the output without special tokens, cut before the earliest stop string."""
        text = self._decode(self._ids)
        return text[: self._cut(text)]

    def _brings_stop(self, token_id: int) -> bool:
        self._window.append(token_id)
        text = self._decode(self._window)
        if text == self._text and not self._decode([token_id, token_id]):
            self._window.pop()  # a special token
            return False
        self._text = text
        if self._cut(text) is not None and self._cut(self._decode(self._ids)) is not None:
            return True
        self._unfinished = self._unfinished + 1 if text.endswith(_UNFINISHED) else 0
        if self._unfinished % _MAX_UNFINISHED == 0 and len(text) - self._mark_chars >= self._reach:
            del self._window[: self._mark]
            self._text = self._decode(self._window)
            self._mark, self._mark_chars = len(self._window), len(self._text)
        return False

    def _cut(self, text: str) -> int | None:
        """Where the earliest stop string begins, in text whose end may still be completed."""
        text = text.rstrip(_UNFINISHED)
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        return min(found, default=None)
