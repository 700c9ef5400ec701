"""Text to token ids by a model's own tokenizer and chat template.

Tokenising holds the interpreter: 8 MB took 4.4 s during which no other thread ran, while
`encode_batch` of the same text lets go of it. So a prompt that cannot fit whatever its tokens is
refused unread, a short one is encoded at once, and a long one goes to a bounded pool.

On the request path only the backend's `encode` and `encode_batch` are called, on an instance whose
truncation and padding were switched off once: the wrapper's own settings leak between threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jinja2
from transformers import AutoTokenizer

from millrace.errors import InvalidRequestError, StartupError

FILES = ("*.json", "*.model", "*.txt", "*.jinja")
_INLINE_BYTES = 8 * 1024


class TextTokenizer:
    """One model's tokenizer; `pool` is shared by all models."""

    def __init__(self, name: str, folder: Path, pool: ThreadPoolExecutor) -> None:
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        except (OSError, ValueError) as error:
            raise StartupError(f"model {name}: no tokenizer in {folder}: {str(error).splitlines()[0]}") from None
        self.backend: Any = getattr(self._tokenizer, "backend_tokenizer", None)
        if self.backend is None:
            raise StartupError(f"model {name}: its tokenizer has no fast version")
        self.backend.no_truncation()
        self.backend.no_padding()
        self._name = name
        self._pool = pool
        # In a byte-level vocabulary a character stands for a byte, in others it is one: never too small.
        self._longest_token_bytes = max(len(token.encode()) for token in self.backend.get_vocab())

    async def encode(self, text: str, max_tokens: int, add_special_tokens: bool = True) -> list[int]:
        """The text's ids, at most `max_tokens` of them; raises InvalidRequestError."""
        size = len(text.encode("utf-8", "surrogatepass"))
        self._refuse_oversize(size, max_tokens)
        if size <= _INLINE_BYTES:
            ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        else:
            loop = asyncio.get_running_loop()
            ids = await loop.run_in_executor(self._pool, self._encode_long, text, add_special_tokens)
        if len(ids) > max_tokens:
            raise InvalidRequestError(f"the prompt has {len(ids)} tokens, the context is {max_tokens}")
        if not ids:
            raise InvalidRequestError("the prompt is empty")
        return ids

    def _refuse_oversize(self, size: int, max_tokens: int) -> None:
        if size > max_tokens * self._longest_token_bytes:
            raise InvalidRequestError(f"the prompt has {size} bytes, more than fit a context of {max_tokens} tokens")

    def _encode_long(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self.backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def render_chat(self, messages: Sequence[tuple[str, str]], max_tokens: int) -> str:
        """(role, content) pairs as the prompt that the model's chat template makes of them.

        What cannot fit `max_tokens` tokens is refused unread.
        """
        self._refuse_oversize(sum(len(role) + len(content) for role, content in messages), max_tokens)
        if not self._tokenizer.chat_template:
            raise InvalidRequestError(f"model {self._name!r} has no chat template; use completions with a prompt")
        conversation = [{"role": role, "content": content} for role, content in messages]
        try:
            text: str = self._tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        except (jinja2.TemplateError, ValueError, TypeError, KeyError) as error:
            raise InvalidRequestError(f"the chat template of {self._name!r} refuses the messages: {error}") from None
        return text
