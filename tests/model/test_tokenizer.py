"""Tokenising never blocks the event loop for long, and refuses too long prompts without reading them."""

import asyncio
import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tokenizers import models

from headrace.errors import ContextLengthError, InvalidRequestError
from headrace.models.sentence_files import read_sentence_files
from headrace_transformer.processes import body_processes
from headrace_transformer.processes.body_processes import BodyProcesses
from headrace_transformer.text.tokenizer import Chat, TextTokenizer, row_tokenizer
from tests.random_encoders import save_pooling, save_random_encoder, save_words_tokenizer
from tests.support.chat_prompts import chat_prompt
from tests.support.loop_lag import loop_lag

MODELS = Path(__file__).parents[2] / "models"


@pytest.fixture(scope="module")
def pool():
    with ThreadPoolExecutor(1) as executor:
        yield executor


@pytest.fixture(scope="module")
def storyteller(pool):
    return TextTokenizer("storyteller", MODELS / "storyteller", pool)


async def test_short_and_long_prompts_are_tokenised_equally(storyteller):
    text = "Once upon a time there was a fox. " * 400  # 13 KiB: longer than prompts that are tokenised in one piece.
    long = await storyteller.encode(text, 100_000)
    assert long == storyteller.backend.encode(text).ids
    assert (await storyteller.encode(text[:100], 100_000)) == long[: len(await storyteller.encode(text[:100], 100_000))]
    assert (
        await storyteller.encode("A fox", 10, add_special_tokens=False) == (await storyteller.encode("A fox", 10))[1:]
    )


async def test_a_prompt_that_cannot_fit_is_refused_unread(storyteller):
    begun = time.process_time()
    with pytest.raises(InvalidRequestError, match="20000000 bytes, more than fit a context of 1024"):
        await storyteller.encode("x" * 20_000_000, 1024)
    assert time.process_time() - begun < 1


async def test_a_prompt_of_more_tokens_than_fit_or_of_none_is_refused(storyteller):
    text = "Once upon a time"
    ids = await storyteller.encode(text, 1024)
    assert await storyteller.encode(text, len(ids)) == ids
    with pytest.raises(ContextLengthError, match=f"has {len(ids)} tokens, the context is {len(ids) - 1}"):
        await storyteller.encode(text, len(ids) - 1)
    with pytest.raises(InvalidRequestError, match="the prompt is empty"):
        await storyteller.encode("", 1024, add_special_tokens=False)


async def test_the_event_loop_runs_while_a_long_prompt_is_tokenised(storyteller):
    turns = 0

    async def turn():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    turning = asyncio.create_task(turn())
    await asyncio.sleep(0)
    before = turns
    await storyteller.encode("Once upon a time there was a fox. " * 5_000, 10_000_000)
    turning.cancel()
    assert turns - before > 100


@pytest.mark.parametrize("length", [1, 9000])
async def test_a_text_that_the_tokenizer_cannot_read_is_refused(pool, length):
    model = TextTokenizer("known words only", MODELS / "storyteller", pool)
    model.backend.model = models.Unigram([("a", 0.0)], unk_id=None)
    assert await model.encode("a" * length, 10_000, add_special_tokens=False)
    calls = [model.encode("b" * length, 10_000), model.row(["b" * length], 10_000), model.bad_word_ids(["b" * length])]
    for call in calls:
        with pytest.raises(InvalidRequestError, match=r"cannot be read: .*unk_id"):
            await call


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.role }}:{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}"
        "{% endfor %}; {% endfor %}",
        "{% for m in messages %}{{ m.role }}:{% for p in m.content | selectattr('type', 'equalto', 'text') %}"
        "{{ p['text'] }}{% endfor %}; {% endfor %}",
        "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{{ p.text }}!{% endfor %}{% endif %}; {% endfor %}",
    ],
)
def test_a_template_of_images_gets_texts_in_the_form_that_it_writes(pool, template):
    messages = [("system", "be kind"), ("user", "a fox"), ("assistant", "a"), ("user", "")]
    images = moody_like(TextTokenizer("images", MODELS / "storyteller", pool), template)
    assert chat_prompt(images, messages, 99) == "system:be kind; user:a fox; assistant:a; user:; "
    assert chat_prompt(images, messages[:3], 99, {"continue_final_message": True}).endswith("assistant:a")


@pytest.mark.parametrize(("trims", "end"), [("", "It is "), ("| trim", "It is")])
def test_an_answer_continues_behind_the_space_that_the_template_leaves(pool, trims, end):
    model = TextTokenizer("trims", MODELS / "storyteller", pool)
    moody_like(model, "{% for m in messages %}{{ m.role }}:{{ m.content " + trims + " }}</s>{% endfor %}")
    assert chat_prompt(model, [("assistant", "It is ")], 99, {"continue_final_message": True}) == f"assistant:{end}"


def test_an_answer_that_the_template_writes_twice_cannot_be_continued(pool):
    model = moody_like(TextTokenizer("twice", MODELS / "storyteller", pool), "{{ messages[0].content * 2 }}")
    with pytest.raises(InvalidRequestError, match="cannot be continued"):
        chat_prompt(model, [("assistant", "It is")], 99, {"continue_final_message": True})


def test_tojson_takes_transformers_arguments(pool):
    template = "{{ {'b': 'é', 'a': 1} | tojson(true, 1, none, true) }}"
    model = moody_like(TextTokenizer("json", MODELS / "storyteller", pool), template)
    assert chat_prompt(model, HELLO, 99) == '{\n "a": 1,\n "b": "\\u00e9"\n}'


def test_messages_that_the_template_refuses_are_refused(storyteller):
    with pytest.raises(InvalidRequestError, match="refuses the messages"):
        chat_prompt(storyteller, [("robot", "beep")], 1024)


@pytest.fixture(scope="module")
def moody(pool, tmp_path_factory):
    """The storyteller's tokenizer with a chat template that has its own variables."""
    folder = tmp_path_factory.mktemp("moody")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODELS / "storyteller" / name, folder / name)
    template = (
        "{{ 1 / (divisor or 1) }} {{ mood }}: {{ messages[0].content }}{% if add_generation_prompt %} >{% endif %}"
    )
    (folder / "chat_template.jinja").write_text(template)
    return TextTokenizer("moody", folder, pool)


HELLO = [("user", "hello")]


def test_a_chat_templates_variables_can_be_set(moody):
    assert chat_prompt(moody, HELLO, 1024) == "1.0 : hello >"
    assert chat_prompt(moody, HELLO, 1024, {"mood": "glad"}) == "1.0 glad: hello >"
    assert chat_prompt(moody, HELLO, 1024, {"add_generation_prompt": False}) == "1.0 : hello"


@pytest.mark.parametrize("name", ["chat_template", "tools", "self"])
def test_unknown_variables_of_the_template_are_refused(moody, name):
    with pytest.raises(InvalidRequestError, match=f"'{name}' is not a variable of a chat template") as raised:
        chat_prompt(moody, HELLO, 1024, {name: "{{ 1 }}"})
    assert raised.value.param == "chat_template_kwargs"


@pytest.mark.parametrize("options", [{"messages": []}, {"divisor": "x"}, {"divisor": [1]}])
def test_variables_that_break_the_template_are_the_callers_error(moody, options):
    with pytest.raises(InvalidRequestError, match="refuses the messages"):
        chat_prompt(moody, HELLO, 1024, options)


CALL = '{"tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}'


async def test_tools_and_calls_are_objects_to_the_template(moody, bodies):
    called = moody_like(
        moody, "{{ tools[0].f }} {{ messages[1].tool_calls[0].function.arguments.x }}{{ messages[0].content }}"
    )
    for content in ("hello", "hello " * 3000):
        messages = [("user", content), ("assistant", "", CALL)]
        text = await called.render(Chat(messages, tools='[{"f": "g"}]'), 100_000, bodies)
        assert text == f"g 1{content}"
    with pytest.raises(ContextLengthError, match="more than fit a context"):
        await called.render(Chat([("user", "hello")], tools=f'["{"x" * 1_000_000}"]'), 10, bodies)


def test_variables_too_large_for_the_context_are_refused_unread(moody):
    with pytest.raises(ContextLengthError, match="more than fit a context of 10 tokens"):
        chat_prompt(moody, HELLO, 10, {"mood": "x" * 1_000_000})


def test_an_embedding_models_tokenizer_is_in_its_folder(pool, tmp_path):
    save_random_encoder("bert", tmp_path)
    assert row_tokenizer("x", read_sentence_files(tmp_path), pool) is None
    save_pooling(tmp_path, {"pooling_mode_mean_tokens": True})
    part = tmp_path / "0_Transformer"
    modules = json.loads((tmp_path / "modules.json").read_text())
    modules[0]["path"] = part.name
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    save_words_tokenizer(part, "the", "fox")
    found = row_tokenizer("x", read_sentence_files(tmp_path), pool)
    assert found.backend.encode("the fox").ids == [2, 5, 6, 3]


LOOP = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"


@pytest.fixture
def looping(pool, tmp_path):
    """A model whose chat template does not end for certain messages."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODELS / "storyteller" / name, tmp_path / name)
    template = "{{ bos_token }}{{ mood }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    template += "{% if messages[0].content == 'loop' %}" + LOOP + "{% endif %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    return TextTokenizer("looping", tmp_path, pool)


@pytest.fixture(scope="module")
async def bodies():
    """A template may take two seconds of the processor instead of three; the first call's imports take one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(body_processes._LIMITS, body_processes.SLOW_TEMPLATES, (2, 512 * 1024**2, 5))
        made = BodyProcesses()
    yield made
    await made.close()


async def test_conversations_of_any_size_are_rendered_outside_the_event_loop(looping, bodies):
    small = [("user", "hello"), ("assistant", "hi 🦄")]
    large = small * 2000
    options = {"mood": "glad "}
    text = await looping.render(Chat(large, options), 100_000, bodies)
    assert text == chat_prompt(looping, large, 100_000, options)
    assert await looping.render(Chat(small), 1024, bodies) == chat_prompt(looping, small, 1024)
    with pytest.raises(InvalidRequestError, match="refuses the messages: division by zero"):
        await moody_like(looping, "{{ 1 / 0 }}").render(Chat(large), 100_000, bodies)


def moody_like(tokenizer, template):
    tokenizer.set_chat_templates({"default": template})
    return tokenizer


# An endless loop: the next test.
@pytest.mark.parametrize("bomb", ["{{ 9 ** (9 ** n) }}", "{{ 'a' * 10 ** n }}"])
async def test_a_hostile_chat_template_delays_neither_the_event_loop_nor_other_models(looping, moody, bodies, bomb):
    hostile = moody_like(
        looping, "{% set n = messages|length + 9 %}{% if messages[0].content == 'loop' %}" + bomb + "{% endif %}fine"
    )
    async with loop_lag() as lag:
        with pytest.raises(InvalidRequestError, match=r"refuses the messages|takes too much time or memory"):
            await hostile.render(Chat([("user", "loop")]), 1024, bodies)
    assert lag.longest_s < 1
    moody_like(moody, "{{ messages[0].content }}")
    assert await moody.render(Chat(HELLO), 1024, bodies) == "hello"
    assert await hostile.render(Chat(HELLO), 1024, bodies) == "fine"


async def test_a_template_that_is_slow_with_any_message_delays_no_other(looping, moody, bodies):
    moody_like(moody, "{{ messages[0].content }}")
    moody_like(looping, LOOP)
    await looping.try_template(bodies)
    await moody.render(Chat(HELLO), 1024, bodies)  # Starts the next process of the templates that are not slow.
    slow = asyncio.create_task(looping.render(Chat([("user", "loop")]), 1024, bodies))
    await asyncio.sleep(0)
    assert await moody.render(Chat(HELLO), 1024, bodies) == "hello"
    assert not slow.done()
    with pytest.raises(InvalidRequestError, match="takes too much time or memory"):
        await slow


async def test_many_chats_at_once_with_a_slow_template_delay_others_by_one(looping, moody, bodies):
    moody_like(moody, "{{ messages[0].content }}")
    hostile = [asyncio.create_task(looping.render(Chat([("user", "loop")]), 1024, bodies)) for _ in range(8)]
    await asyncio.sleep(0)
    assert await moody.render(Chat(HELLO), 1024, bodies) == "hello"
    assert sum(task.done() for task in hostile) < len(hostile) / 2  # One, and those that end while a process starts.
    for task in hostile:
        task.cancel()
    await asyncio.gather(*hostile, return_exceptions=True)
