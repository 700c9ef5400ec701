"""Text to token ids by a model's own tokenizer and chat template.

Tokenising holds the interpreter: 8 MB took 4.4 s during which no other thread ran, while `encode_batch` of the same
text releases it. So a prompt that is too long for any tokens is refused before tokenising, a short one is encoded at
once, and a long one goes to a bounded pool.

On the request path only the backend's `encode` and `encode_batch` are called, on an instance whose truncation and
padding were switched off once.
"""

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import orjson

from headrace.errors import ContextLengthError, HeadraceError, InvalidRequestError, StartupError, TooLargeError
from headrace.models.sentence_files import SentenceFiles
from headrace.models.tokenizer_files import NAMED_TOKENS, has_vocabulary, read_tokenizer, tokenizer_errors
from headrace.oip.model_description import TOKEN_TYPE_IDS
from headrace_transformer.processes.body_processes import SLOW_TEMPLATES, TEMPLATES, BodyProcesses
from headrace_transformer.text.answer_parser import AnswerSyntax, syntax_of
from headrace_transformer.text.chat_templates import render
from headrace_transformer.text.detokenizer import Decoder
from headrace_transformer.text.token_bytes import TokenBytes

T = TypeVar("T")

FILES = ("*.json", "*.model", "*.spm", "*.txt", "*.jinja")
_INLINE_BYTES = 8 * 1024
# The tokenizer classes of transformers that make types of the ids of a pair.
_MAKE_TYPES = re.compile(
    "(Bert|ConvBert|Deberta|DebertaV2|Electra|FNet|LayoutLM|Lxmert|MobileBert|SqueezeBert)Tokenizer"
)
_TRIED_TOKENS, _TRIED_S = 1024, 10.0
# The parameters of transformers' `apply_chat_template` itself, which are not variables of the template.
_NOT_TEMPLATE_OPTIONS = re.compile(
    "self|conversation|tools|documents|chat_template|tokenize|sanitize_control_tokens|padding|"
    "truncation|max_length|return_tensors|return_dict|return_assistant_tokens_mask|tokenizer_kwargs|kwargs"
)
Messages = Sequence[tuple[str, str] | tuple[str, str, str]]  # (role, content[, further fields as a JSON object])


class Chat(NamedTuple):
    """What a chat template makes a prompt of: `options` are variables of it, `tools` a JSON list of functions."""

    messages: Messages
    options: Mapping[str, Any] = {}
    tools: str = ""


class TextTokenizer:
    """One model's tokenizer; `pool` is shared by all models."""

    def __init__(self, name: str, folder: Path, pool: ThreadPoolExecutor) -> None:
        try:
            files = read_tokenizer(folder)
        except (ValueError, OSError) as error:
            raise StartupError(f"model {name}: {error}") from None
        self.backend: Any = files.backend
        self._files = files
        self.end_ids = files.end_ids
        self._templates = dict(files.templates)
        self.decoder = Decoder(self.backend)
        self._name = name
        self._has_slow_template: bool | None = None  # Not known before the first rendering, which others wait for.
        self._first_rendering = asyncio.Lock()
        self._pool = pool

    async def encode(self, text: str, max_tokens: int, add_special_tokens: bool = True) -> list[int]:
        """The text's ids, at most `max_tokens` of them; raises InvalidRequestError."""
        self._refuse_oversize(_bytes_of(text), max_tokens)
        ids = await self.ids(text, add_special_tokens)
        check_token_count(len(ids), max_tokens)
        return ids

    async def ids(self, text: str, add_special_tokens: bool) -> list[int]:
        """The text's ids, however many; raises InvalidRequestError for a text that the tokenizer cannot read."""
        with tokenizer_errors("the prompt", InvalidRequestError):
            if _bytes_of(text) <= _INLINE_BYTES:
                encoded = self.backend.encode(text, add_special_tokens=add_special_tokens)
            else:
                encode = partial(self.backend.encode_batch, [text], add_special_tokens=add_special_tokens)
                (encoded,) = await self._on_thread(encode)
        ids: list[int] = encoded.ids
        return ids

    async def row(
        self, texts: Sequence[str], max_tokens: int, cut_side: str | None = None, add_special_tokens: bool = True
    ) -> tuple[list[int], list[int]]:
        """The ids of a text, or of two as one row, and the type of each id; raises InvalidRequestError.

        With `cut_side` (left, right) tokens beyond `max_tokens` are left out, of the longer text first, as transformers
        does by `longest_first`.
        """
        size = sum(map(_bytes_of, texts))
        if cut_side is None:
            self._refuse_oversize(size, max_tokens)
        encode = partial(self._encode_row, texts, max_tokens, cut_side, add_special_tokens)
        encoded = encode() if size <= _INLINE_BYTES else await self._on_thread(encode)
        check_token_count(len(encoded.ids), max_tokens)
        return encoded.ids, encoded.type_ids

    def _encode_row(self, texts: Sequence[str], max_tokens: int, cut_side: str | None, add_special_tokens: bool) -> Any:
        with tokenizer_errors("the text", InvalidRequestError):
            parts = self.backend.encode_batch(list(texts), add_special_tokens=False)
        if cut_side is not None:
            special = self.backend.num_special_tokens_to_add(len(texts) == 2) if add_special_tokens else 0
            if special > max_tokens:
                raise InvalidRequestError(f"{max_tokens} tokens have no room for the model's {special} special tokens")
            lengths = _cut_lengths([len(part.ids) for part in parts], max_tokens - special)
            for part, length in zip(parts, lengths, strict=True):
                part.truncate(length, direction=cut_side)
        return self.backend.post_process(*parts, add_special_tokens=add_special_tokens)

    def make_lower_case(self) -> None:
        """Lowers the case of every text first, as sentence-transformers' `do_lower_case` does."""
        from tokenizers import normalizers

        present: Any = self.backend.normalizer
        is_list = isinstance(present, normalizers.Sequence)
        steps = list(present) if is_list else [present] if present is not None else []
        if not any(isinstance(step, normalizers.Lowercase) for step in steps):
            self.backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *steps])

    @property
    def makes_types(self) -> bool:
        """Whether the model is meant to get the types of a pair's ids."""
        config = self._files.config
        if "model_input_names" in config:
            return TOKEN_TYPE_IDS in config["model_input_names"]
        name = config.get("tokenizer_class")
        return name is None or _MAKE_TYPES.fullmatch(str(name).removesuffix("Fast")) is not None

    async def bad_word_ids(self, words: Sequence[str]) -> list[list[int]]:
        """The ids of each word as vLLM reads bad words: at the beginning of a text, and after a space."""
        texts = [prefix + word.lstrip() for word in words for prefix in ("", " ")]
        with tokenizer_errors("bad_words", InvalidRequestError):
            encoded = await self._on_thread(partial(self.backend.encode_batch, texts, add_special_tokens=False))
        return [list(ids) for ids in dict.fromkeys(tuple(one.ids) for one in encoded) if ids]

    async def strings(self, ids: Sequence[int]) -> list[str | None]:
        """The vocabulary's own strings; None for an id that has none."""
        return await self._on_thread(lambda: list(map(self.backend.id_to_token, ids)))

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    @property
    def description(self) -> dict[str, Any]:
        """The attributes in the tokenizer's files."""
        return {
            "tokenizer_class": self._files.config.get("tokenizer_class"),
            "chat_template": self.chat_template,
            "vocab_size": self.backend.get_vocab_size(with_added_tokens=True),
            **{name: self._files.special_tokens.get(name) for name in NAMED_TOKENS},
        }

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """The bytes of each token."""
        return TokenBytes(self.backend)

    def most_bytes(self, tokens: int) -> int:
        """How many bytes so many tokens stand for at most."""
        return tokens * self.decoder.longest_token_bytes

    def _refuse_oversize(self, size: int, max_tokens: int) -> None:
        if size > self.most_bytes(max_tokens):
            raise ContextLengthError(f"the prompt has {size} bytes, more than fit a context of {max_tokens} tokens")

    def set_chat_templates(self, templates: Mapping[str, str]) -> None:
        """Replaces the chat templates of the tokenizer's own files."""
        self._templates = dict(templates)

    @property
    def chat_template(self) -> str | Mapping[str, str] | None:
        """The template, or several by name."""
        return self._templates.get("default") if len(self._templates) < 2 else self._templates

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    def template_reads(self, variable: str) -> bool:
        """Whether the chat template mentions a variable."""
        return any(variable in template for template in self._templates.values())

    async def render(self, chat: Chat, max_tokens: int, bodies: BodyProcesses) -> str:
        """The prompt that the model's chat template makes of a chat; raises InvalidRequestError.

        What cannot fit `max_tokens` tokens is refused unread. Where the template refuses the messages, it gets the
        texts of all system messages as one before the others: many templates know a system message only there, and
        agents send further ones later.
        """
        try:
            return await self._in_turn(chat, max_tokens, bodies)
        except ContextLengthError:
            raise
        except InvalidRequestError:
            others = [message for message in chat.messages if message[0] != "system"]
            system = "\n\n".join(message[1] for message in chat.messages if message[0] == "system")
            if list(chat.messages[1:]) == others or not system:
                raise
            merged = chat._replace(messages=[("system", system), *others])
            return await self._in_turn(merged, max_tokens, bodies)

    async def _in_turn(self, chat: Chat, max_tokens: int, bodies: BodyProcesses) -> str:
        """A template that was slow once no longer delays those of other models; the first rendering finds out."""
        arguments = self._template_arguments(chat, max_tokens)
        conversation = orjson.dumps([chat.messages, chat.tools])
        if self._has_slow_template is None:
            async with self._first_rendering:
                if self._has_slow_template is None:
                    return await self._rendered(conversation, arguments, bodies)
        return await self._rendered(conversation, arguments, bodies)

    async def try_template(self, bodies: BodyProcesses) -> None:
        """Renders a message: one that is always slow is known before a chat of another model waits for it."""
        if self.has_chat_template and self._has_slow_template is None:
            with suppress(Exception):  # Whatever it is, a chat shows it, and completions work without.
                async with asyncio.timeout(_TRIED_S):
                    await self.render(Chat([("user", "a")]), _TRIED_TOKENS, bodies)

    async def _rendered(self, conversation: bytes, arguments: tuple[Any, ...], bodies: BodyProcesses) -> str:
        lane = SLOW_TEMPLATES if self._has_slow_template else TEMPLATES
        try:
            is_slow, text = await bodies.run(render, arguments, conversation, lane=lane)
        except TooLargeError:
            self._has_slow_template = True
            raise InvalidRequestError(
                f"the chat template of {self._name!r} takes too much time or memory for these messages"
            ) from None
        self._has_slow_template = bool(self._has_slow_template) or is_slow
        return text.decode()

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        text: str = self.backend.decode(ids, skip_special_tokens=False)
        return text

    @cached_property
    def answer_syntax(self) -> AnswerSyntax:
        """How the model writes calls and reasoning, as far as its files show."""
        texts = list(self._templates.values())
        return syntax_of(texts, lambda token: self.backend.token_to_id(token) is not None)

    def _template_arguments(self, chat: Chat, max_tokens: int) -> tuple[str, str, dict[str, Any]]:
        """The model's name, its template and the template's variables; raises InvalidRequestError."""
        messages, options, tools = chat
        size = sum(sum(map(len, message)) for message in messages) + len(tools)
        self._refuse_oversize(size + (len(json.dumps(options)) if options else 0), max_tokens)
        if not self.has_chat_template:
            raise InvalidRequestError(f"model {self._name!r} has no chat template; use completions with a prompt")
        for name in options:
            if _NOT_TEMPLATE_OPTIONS.fullmatch(name):
                raise InvalidRequestError(
                    f"{name!r} is not a variable of a chat template", param="chat_template_kwargs"
                )
        template = self._templates.get("tool_use" if tools else "default") or self._templates.get("default")
        if template is None:
            names = ", ".join(sorted(self._templates))
            raise InvalidRequestError(f"model {self._name!r} has several chat templates and no default one: {names}")
        return self._name, template, {**self._files.special_tokens, **options}


def _bytes_of(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


async def start_rendering(bodies: BodyProcesses) -> None:
    """Starts the process of the chat templates, so that the first chat does not wait for it."""
    with suppress(HeadraceError):  # Then the first chat shows it.
        await bodies.run(render, ("", "", {}), orjson.dumps([[], ""]), lane=TEMPLATES)


def check_token_count(count: int, max_tokens: int) -> None:
    """Refuses a prompt of no tokens and one of more than `max_tokens`."""
    if count > max_tokens:
        raise ContextLengthError(f"the prompt has {count} tokens, the context is {max_tokens}")
    if not count:
        raise InvalidRequestError("the prompt is empty")


def row_tokenizer(name: str, files: SentenceFiles, pool: ThreadPoolExecutor) -> TextTokenizer | None:
    """The tokenizer of an encoder or classifier; None where its folder has none, because ids suffice; blocks.

    It lies beside the weights, which sentence-transformers may put into a folder of their own.
    """
    for place in (files.inner, files.folder):
        if has_vocabulary(place):
            tokenizer = TextTokenizer(name, place, pool)
            if files.transformer.get("do_lower_case"):
                tokenizer.make_lower_case()
            return tokenizer
    return None


def _cut_lengths(lengths: list[int], room: int) -> list[int]:
    """The lengths to which a text or two are cut, the longer first: the algorithm of the library tokenizers."""
    if sum(lengths) <= room or len(lengths) == 1:
        return [min(length, room) for length in lengths]
    shorter = min(lengths)
    if 2 * shorter > room:
        halves = [room // 2, room - room // 2]
        return halves if lengths[0] <= lengths[1] else halves[::-1]
    return [shorter if length == shorter else room - shorter for length in lengths]
