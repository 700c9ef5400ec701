"""Texts to rows of token ids, as sentence-transformers makes them: with prompts, in a chat template, cut on demand.

Token ids of a caller are a row as they are.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import orjson

from headrace.errors import InvalidRequestError
from headrace_transformer.models.models import RowModel
from headrace_transformer.processes.body_processes import BodyProcesses
from headrace_transformer.text.tokenizer import Chat, Messages, TextTokenizer, check_token_count

_UNSTATED_LENGTH = 128 * 1024  # Tokens of a row where the predictor reports no limit: it refuses longer ones.
_PAIR = ("query", "document")  # The roles of a pair's messages.
_PROBES = (("alpha", "bravo"), ("charlie", "bravo"), ("alpha", "foxtrot"))
# The prompts that a kind of input has, the first that the model knows.
_INPUT_TYPES = {
    "query": ("query",),
    "document": ("document", "passage", "corpus"),
    "passage": ("passage", "document", "corpus"),
    "search_query": ("search_query", "query"),
    "search_document": ("search_document", "document", "passage", "corpus"),
}

Text = str | Sequence[int]


class Row(NamedTuple):
    """The token ids of a text or of a pair of texts, in a pair the type of each, and how many are not pooled."""

    ids: Sequence[int]
    type_ids: Sequence[int] | None = None
    not_pooled: int = 0


@dataclass(frozen=True)
class RowReader:
    """Reads the texts of one request. `cut`: rows end after so many tokens, -1: after as many as the model takes."""

    model: RowModel
    bodies: BodyProcesses
    cut: int | None = None

    def prompt(self, name: str | None = None, input_type: str | None = None) -> str:
        """The text before each text: of this name, of this kind of input, or the model's default."""
        prompts, default = self.model.files.prompts, self.model.files.config.get("default_prompt_name")
        if name is not None and input_type is not None:
            raise InvalidRequestError("give prompt_name or input_type, not both", param="input_type")
        if input_type is not None:
            found = next((one for one in _INPUT_TYPES.get(input_type, (input_type,)) if one in prompts), None)
            if found is None:
                known = ", ".join(dict.fromkeys([*_INPUT_TYPES, *prompts]))
                raise InvalidRequestError(f"input_type {input_type[:64]!r} is not one of {known}", param="input_type")
            return prompts[found]
        if name is not None and name not in prompts:
            known = ", ".join(prompts) or "none"
            raise InvalidRequestError(f"the model has no prompt {name[:64]!r}; it has {known}", param="prompt_name")
        return prompts.get(name or default or "", "")

    async def row(self, text: Text, where: str, param: str, prompt: str = "", verbatim: bool = False) -> Row:
        """The row of a text; an error names it as `where`. `verbatim`: in no template."""
        with _named(where, param):
            if isinstance(text, str):
                return await self._read((text,), prompt, verbatim)
            await asyncio.sleep(0)
            ids = text if self.cut is None else text[: self._length]
            check_token_count(len(ids), self._length)
            return Row(ids)

    async def pair(self, first: str, second: str, where: str, param: str, prompt: str = "") -> Row:
        """As `row`, of two texts that the model reads together."""
        with _named(where, param):
            return await self._read((first, second), prompt, verbatim=False)

    @property
    def _length(self) -> int:
        most = self.model.context_length or _UNSTATED_LENGTH
        return most if self.cut in (None, -1) else min(most, self.cut or 0)

    async def _read(self, texts: tuple[str, ...], prompt: str, verbatim: bool) -> Row:
        await asyncio.sleep(0)  # Others have their turn after each.
        if not any(texts):
            raise InvalidRequestError("the prompt is empty")
        model, files = self.model, self.model.files
        tokenizer, is_pair = model.tokenizer, len(texts) == 2
        form = None if verbatim else files.message_format(tokenizer.chat_template)
        if form is not None and is_pair and await self._drops_pairs(form):
            if files.modules:
                raise InvalidRequestError("its chat template does not carry a query and a document", param="model")
            form = None
        if form is not None:
            if self.cut is not None:
                raise InvalidRequestError("texts in a chat template are not cut", param="truncate_prompt_tokens")
            rendered = await self._render(_messages(texts, prompt, form))
            ids, _ = await tokenizer.row((rendered,), self._length, add_special_tokens=False)
            return Row(ids)
        side = None if self.cut is None else files.truncation_side
        texts = (prompt + texts[0], *texts[1:])
        ids, types = await tokenizer.row(texts, self._length, side, add_special_tokens=not files.is_static)
        skipped = await self._length_of(prompt) if prompt and model.takes_pooling_mask else 0
        return Row(ids, types if is_pair and model.takes_types else None, skipped)

    async def _render(self, messages: Messages) -> str:
        options = {"add_generation_prompt": False, **self.model.files.template_options}
        return await self.model.tokenizer.render(Chat(messages, options), self._length, self.bodies)

    async def _drops_pairs(self, form: str) -> bool:
        """Whether the chat template leaves a text of a pair out, as those of chats do; sentence-transformers' test."""
        tokenizer = self.model.tokenizer
        if tokenizer not in _DROPS_PAIRS:
            try:
                base, *others = [await self._render(_messages(probe, "", form)) for probe in _PROBES]
                _DROPS_PAIRS[tokenizer] = base in others
            except InvalidRequestError:
                _DROPS_PAIRS[tokenizer] = True
        return _DROPS_PAIRS[tokenizer]

    async def _length_of(self, prompt: str) -> int:
        """How many of a row's first tokens are the prompt's, without the special tokens behind a text."""
        ids = await self.model.tokenizer.ids(prompt, add_special_tokens=True)
        bare = await self.model.tokenizer.ids(prompt, add_special_tokens=False)
        return len(ids) - (bool(bare) and ids[-1] != bare[-1])


_DROPS_PAIRS: WeakKeyDictionary[TextTokenizer, bool] = WeakKeyDictionary()


def _messages(texts: Sequence[str], prompt: str, form: str) -> Messages:
    roles = _PAIR if len(texts) == 2 else ("user",)
    said = [*([("system", prompt)] if prompt else []), *zip(roles, texts, strict=True)]
    if form == "flat":
        return said
    parts = [orjson.dumps({"content": [{"type": "text", "text": text}]}).decode() for _, text in said]
    return [(role, "", part) for (role, _), part in zip(said, parts, strict=True)]


@contextmanager
def _named(where: str, param: str) -> Iterator[None]:
    """The same words as for a prompt, and which of the texts it is."""
    try:
        yield
    except InvalidRequestError as error:
        raise type(error)(f"{where}: {error.message}", param=error.param or param) from None
