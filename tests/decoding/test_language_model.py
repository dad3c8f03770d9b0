"""The library as a program or a notebook uses it: typed settings, messages, async iteration, readable objects."""

import asyncio
import inspect
import typing

import attrs
import pytest

import specdec
from specdec.config import GenerationConfig, GenerationSettings
from specdec.decoding.parts import CallSettings
from specdec.errors import PromptError, SpecdecError

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a colour."}]


@pytest.fixture(scope="module")
def lm():
    return specdec.load(depth=3)


def test_the_typed_settings_are_the_fields_of_the_configuration():
    assert set(GenerationSettings.__annotations__) == {field.name for field in attrs.fields(GenerationConfig)}
    for function in (specdec.LanguageModel.generate, specdec.Session.generate):
        kind = typing.get_type_hints(inspect.unwrap(function))["settings"]
        assert typing.get_args(kind) == (CallSettings,)
    parameters = inspect.signature(specdec.Session.stream).parameters
    assert set(CallSettings.__annotations__) == {*GenerationSettings.__annotations__, "prediction", "depth"}
    assert {"prediction", "depth"} < set(parameters)


def test_a_model_is_loaded_for_shorter_sessions():
    short = specdec.load(depth=0, drafter="none", capacity=8)
    assert short.capacity == 8
    with pytest.raises(PromptError, match="too long"):
        short.generate(list(range(9)))


def test_a_conversation_is_rendered_by_the_template(lm):
    want = lm.tokenizer.encode(lm.tokenizer.apply_chat_template(MESSAGES), add_special=False)
    made = lm.generate(messages=MESSAGES, max_new_tokens=8, seed=2, temperature=0.7)
    assert made.prompt == want
    assert made.tokens == lm.generate(want, max_new_tokens=8, seed=2, temperature=0.7).tokens
    thinking = lm.generate(messages=MESSAGES, template={"enable_thinking": True}, max_new_tokens=1)
    assert len(thinking.prompt) > len(want)
    for call, message in (
        ({"messages": []}, "there are no messages"),
        ({}, "takes a prompt or messages: give one"),
        ({"prompt": "x", "messages": MESSAGES}, "takes a prompt or messages: give one"),
        ({"prompt": "x", "template": {"enable_thinking": True}}, "which a prompt does not go through"),
        ({"messages": MESSAGES, "template": {"messages": []}}, "'messages' of the chat template is the conversation's"),
    ):
        with pytest.raises(PromptError, match=message):
            lm.generate(**call)


def test_a_stream_is_read_by_an_event_loop_which_goes_on_meanwhile(lm):
    async def read():
        pieces = [piece async for piece in lm.stream("def f(", max_new_tokens=24)]
        stream = lm.stream("def f(", max_new_tokens=4000, ignore_eos=True)
        async for _ in stream:
            break
        task = asyncio.create_task(stream.__anext__())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return pieces, stream

    pieces, stream = asyncio.run(read())
    assert "".join(pieces) == lm.generate("def f(", max_new_tokens=24).text
    assert stream.stopping


def test_a_session_is_a_context_manager(lm):
    with lm.session() as session:
        stream = session.stream("def f(", max_new_tokens=1000, ignore_eos=True)
        next(stream)
    assert stream.finished
    assert stream.result.finish_reason == "interrupted"
    assert "tokens of 8192" in repr(session)


def test_a_batch_names_a_bad_prompt(lm):
    prompts = ["def add(a, b):", [5, 6, 7], "Once upon a time"]
    for bad, message in (
        ("", "the prompt is empty"),
        ([10**9], "outside the vocabulary"),
        ([5] * 9000, "too long"),
        (None, "takes a string or a list"),
        ({"role": "user", "content": "x"}, "takes a string or a list"),
    ):
        with pytest.raises(PromptError, match=message) as raised:
            lm.generate_batch([*prompts, bad])
        assert raised.value.facts["prompt"] == "number 3"
    with pytest.raises(PromptError, match="max_batch is at least 1"):
        lm.generate_batch(prompts, max_batch=0)
    assert lm.generate_batch([]) == []
    with pytest.raises(SpecdecError) as failed:
        lm.generate_batch(prompts, top_p=7.0)
    assert failed.value.__notes__ == ["in the generation of prompt number 0"]


def test_objects_are_readable(lm):
    result = lm.generate("<b>x</b>", max_new_tokens=12)
    for made in (lm, result, result.stats):
        assert len(repr(made)) < 500
    assert "drafter ngram, mtp," in repr(lm)
    assert "exact, with bitwise parity" in repr(result)
