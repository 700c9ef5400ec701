"""What a model's chat template makes of messages, rendered in the test's own process."""

from headrace_transformer.text.chat_templates import rendered
from headrace_transformer.text.tokenizer import Chat


def chat_prompt(tokenizer, messages, max_tokens, options=None):
    return rendered(messages, "", *tokenizer._template_arguments(Chat(messages, options or {}), max_tokens))
