"""A server of OpenAI's API whose answers follow from their prompts, and that fails as it is told to.

It stands for engines of other makers, as neighbours of the transformer: the tokens of an answer are a function of those
before it, so an answer that goes on elsewhere can be compared token by token. `fails` decides, by how many tokens a
request has answered, what happens next.
"""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from aiohttp import web
from tokenizers import Tokenizer

CLOSE, HALF, STALL, ERROR, END = "close", "half an event", "stall", "an error event", "an end without a reason"
NO_DONE, JUNK = "no [DONE]", "no JSON"
Fails = Callable[[int], str]
BOM = b"\xef\xbb\xbf"


def answers(count: int) -> str:
    """Never fails."""
    return ""


def event(data: bytes) -> bytes:
    """An event of a stream, as most servers write it."""
    return b"data: " + data + b"\n\n"


def text_of(ids: Sequence[int]) -> str:
    """The text of tokens, whatever they are to the model's own tokenizer."""
    return "".join(f"<{token_id}>" for token_id in ids)


class ScriptedEngine:
    """`async with ScriptedEngine(folder) as engine`; `kind` is what it says it is, "" for nothing.

    `salt` makes its answers its own; `writes` makes an event of data, and `begins` comes before the first one. With
    `holds_back` the text of some tokens comes with that of the next one.
    """

    def __init__(self, folder: str, kind: str = "vllm", salt: str = "", ids: Sequence[int] = ()) -> None:
        self.fails: Fails = answers
        self.running = 0
        self.requests: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.refuses: tuple[int, dict[str, Any]] | None = None
        self.delay_s = 0.0
        self.writes = event
        self.begins = b""
        self.unfinished: str | None = None  # The reason of a choice that goes on.
        self.reason = "length"  # Of one that has ended.
        self.context = 2048
        self.holds_back = False
        self.detokenizes = True
        self.port = 0
        self._kind = kind
        self._served = "org/served" if kind == "tgi" else "served"
        self.salt = salt
        self._tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
        # Letters, and bytes of characters of several tokens.
        self._ids = ids or [*range(100, 400)]
        self._runner: web.AppRunner | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def start(self) -> None:
        """Listens, on the port that it had before where it had one."""
        app = web.Application(client_max_size=64 << 20)
        for prefix in ("", "/openai"):  # KServe's runtime for Hugging Face has the latter.
            app.router.add_get(f"{prefix}/v1/models", self._models)
            app.router.add_post(f"{prefix}/v1/completions", self._answer)
        app.router.add_get("/info", self._information)
        app.router.add_post("/detokenize", self._detokenize)
        for path in ("/v1/chat/completions", "/v1/embeddings", "/v1/responses", "/v1/messages"):
            app.router.add_post(path, self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def __aenter__(self) -> "ScriptedEngine":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def ids_after(self, ids: Sequence[int], count: int) -> list[int]:
        """The next tokens of an answer."""
        made = list(ids)
        for _ in range(count):
            digest = hashlib.blake2b(f"{self.salt}{made[-8:]}".encode(), digest_size=4).digest()
            made.append(self._ids[int.from_bytes(digest, "big") % len(self._ids)])
        return made[len(ids) :]

    async def _models(self, _: web.Request) -> web.Response:
        card = {"id": self._served}
        if self._kind == "tgi":
            card |= {"object": "model", "created": 0, "owned_by": self._served}
        elif self._kind:
            card |= {"object": "model", "owned_by": self._kind, "max_model_len": self.context, "root": "/nowhere"}
        return web.json_response({"object": "list", "data": [card]})

    async def _information(self, _: web.Request) -> web.Response:
        """What text-generation-inference says of itself, in part."""
        if self._kind != "tgi":
            raise web.HTTPNotFound
        limits = {"max_concurrent_requests": 128, "max_total_tokens": self.context}
        return web.json_response({"model_id": self._served, "router": "text-generation-router", **limits})

    async def _detokenize(self, request: web.Request) -> web.Response:
        if not self.detokenizes:
            raise web.HTTPNotFound
        return web.json_response({"prompt": text_of((await request.json())["tokens"])})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        is_probe = body.get("prompt") == "a" and body.get("max_tokens") == 1
        if not is_probe:
            self.requests.append((request.path, body, dict(request.headers)))
        self.running += 1
        try:
            if self._kind == "tgi" and (body["model"] != "tgi" or isinstance(body.get("prompt"), list)):
                return web.json_response({"error": "no such adapter", "error_type": "validation"}, status=422)
            if self.refuses is not None:
                status, error = self.refuses
                return web.json_response(error, status=status)
            if request.path.endswith("embeddings"):
                return web.json_response({"object": "list", "model": "served", "data": [{"embedding": [0.5]}]})
            if request.path.endswith(("responses", "messages")):
                return await self._other(request, body)
            return await self._completion(request, body, is_probe)
        finally:
            self.running -= 1

    async def _other(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        """An API of which the transformer knows nothing."""
        if not body.get("stream"):
            return web.json_response({"id": "r", "model": "served", "output": ["a"]})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for at in range(4):
            if self.fails(at):
                request.transport.close()
                return response
            event = {"type": "piece", "model": "served", "at": at}
            await response.write(b"event: piece\ndata: " + json.dumps(event).encode() + b"\n\n")
        return response

    async def _completion(self, request: web.Request, body: dict[str, Any], is_probe: bool) -> web.StreamResponse:
        is_chat = request.path.endswith("chat/completions")
        prompt = json.dumps(body["messages"]) if is_chat else body["prompt"]
        if is_chat and body["messages"][-1]["role"] == "assistant":
            prompt = json.dumps(body["messages"][:-1]) + body["messages"][-1]["content"]
        begun = list(prompt) if isinstance(prompt, list) else self._tokenizer.encode(prompt).ids
        count = int(body.get("max_tokens") or 16)
        ids = self.ids_after(begun, count)
        usage = {"prompt_tokens": 99999, "completion_tokens": len(ids), "total_tokens": 1}  # Wrong on purpose.
        if not body.get("stream"):
            if self.fails(0) == STALL:
                await asyncio.sleep(3600)
            if not is_probe and self.fails(0):
                request.transport.close()
            choices = [self._choice(body, index, ids, is_chat, whole=True) for index in range(body.get("n") or 1)]
            return web.json_response({"id": "w", "model": self._served, "choices": choices, "usage": usage})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await self._stream(request, response, body, ids, is_chat, usage, begun)
        return response

    async def _stream(self, request, response, body, ids, is_chat, usage, begun) -> None:
        async def send(value: dict[str, Any]) -> None:
            head = {"id": f"id-{self.port}", "object": "chunk", "created": 5, "model": self._served}
            await response.write(self.writes(json.dumps(head | value).encode()))

        if self.begins:
            await response.write(self.begins)
        held: list[int] = []
        prompt_ids = {"prompt_token_ids": begun} if body.get("return_token_ids") else {}
        for at in range(len(ids) + 1):
            failure = self.fails(at)
            if failure == STALL:
                await asyncio.sleep(3600)
            if failure == HALF:
                await response.write(b'data: {"id": "x", "choices": [{"index": 0, "te')
            if failure == ERROR:
                await response.write(b'data: {"error": {"message": "EngineCore died", "code": 500}}\n\n')
            if failure == JUNK:
                await response.write(b"data: <html>\n\n")
            if failure in (CLOSE, HALF, ERROR, JUNK):
                await asyncio.sleep(0)
                request.transport.close()
                return
            if failure == END or at == len(ids):
                await self._end(response, failure)
                return
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            is_last = at == len(ids) - 1
            held.append(ids[at])
            shown = [] if self.holds_back and not is_last and ids[at] % 2 else held
            held = [] if shown else held
            for index in range(body.get("n") or 1):
                choice = self._choice(body, index, [ids[at]], is_chat, text=text_of(shown))
                choice["finish_reason"] = self.reason if is_last else self.unfinished
                await send({"choices": [choice], **(prompt_ids if at == 0 else {})})
            if is_last and (body.get("stream_options") or {}).get("include_usage"):
                await send({"choices": [], "usage": usage})

    async def _end(self, response: web.StreamResponse, failure: str) -> None:
        if failure != NO_DONE:
            await response.write(self.writes(b"[DONE]"))

    def _choice(self, body, index, ids, is_chat, whole=False, text=None) -> dict[str, Any]:
        text = text_of(ids) if text is None else text
        choice: dict[str, Any] = {"index": index, "finish_reason": self.reason if whole else None}
        if is_chat and body.get("tools"):
            function = {"arguments": text} | ({"name": "find"} if whole or ids else {})
            choice["delta"] = {"tool_calls": [{"index": 0, "id": f"call-{self.port}", "function": function}]}
        elif is_chat:
            choice["message" if whole else "delta"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        if body.get("return_token_ids"):
            choice["token_ids"] = ids
        if body.get("logprobs") is not None and not is_chat:
            scores = [-(token_id % 7) / 8 for token_id in ids]
            tops = [{f"token_id:{token_id}": score} for token_id, score in zip(ids, scores, strict=True)]
            names = [f"token_id:{token_id}" for token_id in ids]
            choice["logprobs"] = {"tokens": names, "token_logprobs": scores, "top_logprobs": tops}
        return choice


@asynccontextmanager
async def scripted_engines(folder: str, *kinds: str) -> AsyncIterator[list[ScriptedEngine]]:
    """An engine of each kind; those of the same kind give the same answers."""
    async with AsyncExitStack() as running:
        yield [await running.enter_async_context(ScriptedEngine(folder, kind)) for kind in kinds]
