"""`headrace chat`: prints a text model's answers while they are generated."""

import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc

from headrace.errors import StartupError
from headrace_protos import headrace_pb2 as pb
from headrace_runner.gateway import Gateway
from headrace_runner.terminal import BOLD, DIM, Painter, printable

_HELP = "an empty line or Ctrl-D ends, /new clears the conversation, Ctrl-C ends an answer"


@dataclass
class Conversation:
    """A conversation with a model: messages, or single prompts if it has no chat template.

    `sampling` are sampling parameters, fields of GenerateRequest; others have the model's defaults.
    """

    model: str
    has_template: bool
    system: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    _messages: list[pb.ChatMessage] = field(default_factory=list)

    def request(self, text: str) -> pb.GenerateRequest:
        """The request for the user's message `text`."""
        if not self.has_template:
            return pb.GenerateRequest(model=self.model, prompt=text, **self.sampling)
        system = [pb.ChatMessage(role="system", content=self.system)] if self.system else []
        messages = [*system, *self._messages, pb.ChatMessage(role="user", content=text)]
        return pb.GenerateRequest(model=self.model, messages=messages, **self.sampling)

    def answered(self, text: str, answer: str) -> None:
        """Adds one turn."""
        if self.has_template:
            self._messages += [
                pb.ChatMessage(role="user", content=text),
                pb.ChatMessage(role="assistant", content=answer),
            ]

    def forget(self) -> None:
        self._messages.clear()


def choose_model(gateway: Gateway, name: str) -> str:
    """The model of this name, or the first one that generates text; raises StartupError if there is none."""
    if name:
        if not gateway.generates_text(name):
            raise StartupError(f"{name} does not generate text; `headrace smoke {name}` shows what it answers")
        return name
    found = next((model for model in gateway.ready_models() if gateway.generates_text(model)), None)
    if found is None:
        raise StartupError(f"no model that generates text is ready at {gateway.address}")
    return found


def talk(gateway: Gateway, conversation: Conversation, paint: Painter) -> None:
    """Answers each line of the user, until an empty one or the end of input."""
    kind = "chat" if conversation.has_template else "completion, for it has no chat template"
    print(f"{paint(BOLD, conversation.model)} ({kind}); {_HELP}")
    with suppress(ImportError):
        import readline  # noqa: F401  # Adds editing to input().
    while True:
        try:
            text = input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not text.strip():
            return
        if text.strip() == "/new":
            conversation.forget()
            continue
        try:
            answer(gateway, conversation, text, paint)
        except StartupError as error:
            sys.stderr.write(f"{error}\n")


def answer(gateway: Gateway, conversation: Conversation, text: str, paint: Painter) -> None:
    """Prints an answer while it is generated, and on a terminal a summary; raises StartupError if it fails."""
    started = time.monotonic()
    parts: list[str] = []
    usage, reason = pb.Usage(), "cancelled"
    with gateway.errors():
        call = gateway.text.Generate(conversation.request(text))
        try:
            for response in call:
                parts.append(response.text)
                _write(printable(response.text))
                if response.HasField("finish_reason"):
                    reason, usage = response.finish_reason, response.usage
        except KeyboardInterrupt:
            call.cancel()
        finally:
            if parts:
                _write("\n")
    conversation.answered(text, "".join(parts))
    if sys.stderr.isatty():
        seconds = time.monotonic() - started
        sys.stderr.write(paint(DIM, f"[{_about(call, reason, usage, seconds)}]") + "\n")


def _about(call: Any, reason: str, usage: pb.Usage, seconds: float) -> str:
    metadata = {} if reason == "cancelled" else _trailing(call)
    items = [reason]
    if usage.completion_tokens:
        items.append(f"{usage.completion_tokens} tokens in {seconds:.1f} s")
    if first := metadata.get("x-ttft-ms"):
        items.append(f"the first after {float(first):.0f} ms")
    if request_id := metadata.get("x-request-id"):
        items.append(f"headrace trace {request_id}")
    return ", ".join(items)


def _trailing(call: grpc.Call) -> dict[str, str]:
    return {key: value for key, value in call.trailing_metadata() or () if isinstance(value, str)}


def _write(text: str) -> None:
    print(text, end="", flush=True)
