"""Programs that people use, against a server started as a user starts it: the same text as ``specdec generate``."""

import asyncio
import functools
import json

import pytest
from serving import ASK, events, streamed_text

from tests.processes import run_specdec

openai = pytest.importorskip("openai")
QUESTION = ASK["messages"]
SETTINGS = [
    {},
    {"temperature": 0.8, "seed": 7},
    {"temperature": 1.0, "seed": 3, "top_p": 0.9, "presence_penalty": 0.5, "stop": ["\n\n\n", "):"]},
    {"temperature": 0.7, "seed": 11, "logit_bias": {"198": -100, "5": 2.5}, "frequency_penalty": 0.2},
]


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url, api_key="none") as made:
        yield made


@pytest.fixture(scope="module")
def create(client):
    """A chat with the served model, about ``QUESTION`` unless it is told otherwise."""
    return functools.partial(client.chat.completions.create, model="demo", messages=QUESTION)


def expected(lm, settings, **more):
    return lm.generate(messages=QUESTION, max_new_tokens=24, **settings, **more)


def test_the_model_is_listed(client, create):
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").owned_by == "specdec"
    with pytest.raises(openai.NotFoundError, match="only 'demo'"):
        client.models.retrieve("gpt-5")
    with pytest.raises(openai.NotFoundError, match="only 'demo'"):
        create(model="gpt-5")
    with pytest.raises(openai.BadRequestError, match="n: Input should be 1, got 2") as refused:
        create(n=2)
    assert refused.value.param == "n"


@pytest.mark.parametrize("settings", SETTINGS)
def test_an_answer_is_that_of_generate_in_one_piece_and_streamed(create, lm, settings):
    want = expected(lm, settings)
    made = create(max_tokens=24, **settings)
    assert made.choices[0].message.content == want.text
    assert made.choices[0].finish_reason == ("length" if want.finish_reason == "length" else "stop")
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (want.prompt_tokens, len(want.tokens))
    drafts = made.usage.completion_tokens_details
    assert made.specdec["drafted_tokens"]
    # these count a prediction only
    assert (drafts.accepted_prediction_tokens, drafts.rejected_prediction_tokens) == (0, 0)
    assert made.specdec["guarantee"] == "exact"
    chunks = list(create(max_completion_tokens=24, stream=True, stream_options={"include_usage": True}, **settings))
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == want.text
    assert chunks[-1].usage.completion_tokens == len(want.tokens)
    assert chunks[-1].choices == []
    assert chunks[0].choices[0].delta.role == "assistant"


def test_a_seed_that_nobody_gave_is_drawn_and_reported(create):
    asked = {"max_tokens": 24, "temperature": 1.0}
    first, second = (create(**asked) for _ in range(2))
    assert first.specdec["seed"] != second.specdec["seed"]
    again = create(**asked, seed=first.specdec["seed"])
    assert again.choices[0].message.content == first.choices[0].message.content


def test_many_at_once_by_the_asynchronous_client_have_their_own_text(server, lm):
    """In a queue or alone, streamed or not: a request's text depends on the request."""
    seeds = range(6)
    want = [expected(lm, {"temperature": 0.9, "seed": seed}).text for seed in seeds]

    async def one(client, seed):
        settings = {"model": "demo", "messages": QUESTION, "max_tokens": 24, "temperature": 0.9, "seed": seed}
        if seed % 2:
            return (await client.chat.completions.create(**settings)).choices[0].message.content
        stream = await client.chat.completions.create(stream=True, **settings)
        return "".join([choice.delta.content or "" async for chunk in stream for choice in chunk.choices])

    async def everyone():
        async with openai.AsyncOpenAI(base_url=server.url, api_key="none") as client:
            return await asyncio.gather(*(one(client, seed) for seed in seeds))

    assert asyncio.run(everyone()) == want


def test_a_conversation_reuses_its_state_and_keeps_its_text(create, lm):
    messages = [{"role": "system", "content": "Answer in one short sentence."}, *QUESTION]
    cached = []
    for question in ("And three numbers?", "And a list of them?"):
        made = create(messages=messages, max_tokens=32)
        answer = made.choices[0].message.content
        prompt = lm.tokenizer.encode(lm.tokenizer.apply_chat_template(messages), add_special=False)
        assert answer == lm.generate(prompt, max_new_tokens=32).text
        cached.append(made.usage.prompt_tokens_details.cached_tokens)
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
    assert cached[1] > cached[0]


def test_structured_output_is_parsed_by_the_client(client, create):
    pydantic = pytest.importorskip("pydantic")
    pytest.importorskip("llguidance")

    class Area(pydantic.BaseModel):
        width: int = pydantic.Field(ge=1, le=99)
        unit: str = pydantic.Field(pattern="^(cm|inch)$")

    made = client.chat.completions.parse(
        model="demo", messages=QUESTION, max_tokens=64, temperature=0.8, seed=2, response_format=Area
    )
    parsed = made.choices[0].message.parsed
    assert parsed.unit in ("cm", "inch")
    assert 1 <= parsed.width <= 99
    made = create(max_tokens=1, response_format={"type": "json_object"})
    assert made.choices[0].message.content.startswith("{")
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"const": "yes"}}}
    made = create(max_tokens=32, response_format=form, extra_body={"min_tokens": 20})
    assert (made.choices[0].message.content, made.choices[0].finish_reason) == ('"yes"', "stop")


def test_fields_without_effect_are_taken(create, lm):
    made = create(
        messages=[{**QUESTION[0], "name": "me"}],
        max_tokens=24,
        n=1,
        tools=[],
        tool_choice="auto",
        parallel_tool_calls=False,
        store=True,
        user="me",
        metadata={"a": "b"},
        reasoning_effort="low",
        response_format={"type": "text"},
        prediction={"type": "content", "content": "def add(a, b):"},
        extra_body={"speculation": {"depth": 0}},
    )
    assert made.choices[0].message.content == expected(lm, {}).text
    assert made.specdec["drafted_tokens"] == 0


INTEGER = {"type": "integer", "minimum": 0, "maximum": 99}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} two numbers",
            "parameters": {
                "properties": {"a": {"$ref": "#/$defs/number"}, "b": {"$ref": "#/$defs/number"}},
                "required": ["a", "b"],
                "$defs": {"number": INTEGER},
            },
        },
    }
    for name in ("add", "multiply")
]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "multiply"}}])
def test_a_tool_is_called_and_its_result_answered(client, create, choice):
    pytest.importorskip("llguidance")
    settings = {"tools": TOOLS, "max_tokens": 64, "temperature": 1.0, "seed": 4}
    messages = [{"role": "user", "content": "What is 3 times 4?"}]
    made = create(messages=messages, tool_choice=choice, **settings).choices[0]
    assert (made.finish_reason, made.message.content) == ("tool_calls", None)
    (call,) = made.message.tool_calls
    assert call.function.name in ({"add", "multiply"} if choice == "required" else {"multiply"})
    arguments = json.loads(call.function.arguments)
    assert arguments.keys() == {"a", "b"}
    assert all(0 <= number <= 99 for number in arguments.values())
    with client.chat.completions.stream(model="demo", messages=messages, tool_choice=choice, **settings) as stream:
        streamed = stream.get_final_completion().choices[0].message
    assert streamed.tool_calls[0].function.arguments == call.function.arguments
    assert not streamed.content
    messages += [made.message, {"role": "tool", "tool_call_id": call.id, "content": "12"}]
    answer = create(messages=messages, tool_choice="none", **settings)
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content
    without = create(messages=[*messages[:1], messages[2]], tool_choice="none", **settings)
    assert answer.usage.prompt_tokens > without.usage.prompt_tokens + 8  # the call was part of the prompt


def test_tokenize_and_detokenize(server, lm):
    assert server.post("/tokenize", {"prompt": "def add("})[2]["tokens"] == lm.tokenizer.encode("def add(")
    told = server.post("/tokenize", {"messages": QUESTION})[2]
    text = lm.tokenizer.apply_chat_template(QUESTION)
    assert told["tokens"] == lm.tokenizer.encode(text, add_special=False)
    assert told["count"] == len(told["tokens"])
    assert server.post("/detokenize", {"tokens": told["tokens"]})[2] == {"prompt": text}


@pytest.mark.parametrize("settings", SETTINGS[1:])
def test_log_probabilities_are_those_of_generate(server, create, lm, settings):
    want = expected(lm, settings, logprobs=3)
    asked = {"messages": QUESTION, "max_tokens": 24, "logprobs": True, "top_logprobs": 3, **settings}
    found = create(**asked).choices[0].logprobs.content
    shown = want.logprobs[: len(found)]
    assert [entry.logprob for entry in found] == [entry.logprob for entry in shown]
    assert [[top.logprob for top in entry.top_logprobs] for entry in found] == [
        [logprob for _, logprob in entry.top] for entry in shown
    ]
    spelled = b"".join(bytes(entry.bytes) for entry in found if not entry.token.startswith("<"))
    special = lm.tokenizer.special_ids
    held = [entry for entry in shown if entry.token in special]
    assert spelled.decode(errors="replace").startswith(want.text) or held
    if want.finish_reason == "length":
        assert len(found) == len(want.tokens)
    else:  # neither the end token nor what follows a stop string
        assert len(found) < len(want.tokens)
    chunks = events(server.request("POST", "/v1/chat/completions", *_json({**asked, "stream": True}))[2])
    streamed = [
        entry
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    assert [entry["logprob"] for entry in streamed] == [entry.logprob for entry in found]
    assert streamed_text(chunks) == want.text


def _json(data):
    return json.dumps(data), {"Content-Type": "application/json"}


def test_completions_take_text_and_token_ids(client, lm):
    ids = lm.tokenizer.encode("def add(")
    want = lm.generate("def add(", max_new_tokens=16, temperature=0.6, seed=4, logprobs=2)
    for prompt in ("def add(", ids, ["def add("], [ids]):
        made = client.completions.create(
            model="demo", prompt=prompt, max_tokens=16, temperature=0.6, seed=4, logprobs=2
        )
        choice = made.choices[0]
        assert choice.text == want.text
        assert choice.logprobs.token_logprobs == [entry.logprob for entry in want.logprobs]
        assert "".join(choice.logprobs.tokens) == want.text
        assert choice.logprobs.text_offset == [
            len("".join(choice.logprobs.tokens[:n])) for n in range(len(want.tokens))
        ]
    with pytest.raises(openai.BadRequestError, match="one prompt for each request, got 2"):
        client.completions.create(model="demo", prompt=["a", "b"])


@pytest.mark.slow
def test_the_server_agrees_with_itself_under_audit(server):
    servers = ("--server", server.url, "--server", server.url)
    told = json.loads(run_specdec("audit", *servers, "--ignore-eos", "--json", "-n", "12", "-p", "def add(").stdout)
    assert (told["requests"], told["tokens"]) == (1, 12)
    assert (told["differ"]["count"], told["control"]["count"], told["logprobs_apart"]) == (0, 0, 0.0)
