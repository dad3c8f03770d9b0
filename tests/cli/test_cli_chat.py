"""Conversations: what a turn may reuse, how it ends, what survives; and ``specdec chat`` over them."""

import pathlib

import attrs
import pytest

import specdec
from specdec.decoding.conversation import Conversation
from specdec.errors import PluginError, PromptError, SessionFileError, StateError
from specdec.text import ChatTemplate

STRIPPING = """\
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' -}}
{%- if m.role == 'assistant' and not loop.last -%}{{- m.content.split('</think>')[-1] | trim -}}
{%- else -%}{{- m.content -}}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n<think>\\n' -}}{%- endif -%}
"""
"""As Qwen's: what old answers thought is left out, and a new one begins with a thought."""


@pytest.fixture(scope="module", autouse=True)
def loaded_once(demo):
    """``specdec.load`` gives the embedded model with the configuration asked for."""
    load = specdec.load

    def cached(model=None, *, config=None, **others):
        if config is None or config.target != demo.config.target or config.drafter.name != "auto":
            return load(model, config=config, **others)
        return attrs.evolve(demo, config=config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(vars(specdec), "load", cached)
        yield


def plain(demo, prompt, count):
    """What a new session says after ``prompt``."""
    return demo.generate(list(prompt), max_new_tokens=count).tokens


# --- conversations ---------------------------------------------------------------------------------------------------


def test_a_turn_runs_only_what_is_new(demo):
    talk = Conversation(demo)
    first = talk.ask("Hello", max_new_tokens=40).result
    assert first.stats.prefilled == len(first.prompt) - 1
    for text in ("What is a list?", "And a set?"):
        held = talk.tokens
        result = talk.ask(text, max_new_tokens=40).result
        assert talk.kept == len(held)  # the whole conversation so far, tokens as the model wrote them
        assert result.prompt[: len(held)] == list(held)
        assert result.stats.prefilled == len(result.prompt) - len(held)
        assert result.tokens == plain(demo, result.prompt, 40)
        rendered = demo.tokenizer.apply_chat_template(talk.messages[:-1])
        assert demo.tokenizer.decode(result.prompt, skip_special=False) == rendered
    assert [message["role"] for message in talk.messages] == ["user", "assistant"] * 3
    assert talk.turns == 3


def test_a_template_that_renders_old_turns_anew_keeps_the_common_prefix(demo, monkeypatch):
    """Thinking is stripped from the old answer: all before that answer stays, and little runs twice."""
    monkeypatch.setattr(demo.tokenizer, "_chat_templates", {"default": ChatTemplate(STRIPPING, pathlib.Path("t"))})
    talk = Conversation(demo, system="You are a parrot that repeats what people say, twice.")
    first = talk.ask("Tell me about lists, sets, and dictionaries.", max_new_tokens=20).result
    second = talk.ask("Go on.", max_new_tokens=20).result
    assert second.prompt[: len(first.prompt)] != first.prompt
    shared = talk.kept
    assert len(first.prompt) - 8 < shared < len(first.prompt)
    assert second.prompt[:shared] == first.prompt[:shared]
    assert second.stats.prefilled <= len(second.prompt) - shared + 8
    assert second.tokens == plain(demo, second.prompt, 20)
    assert second.prompt == demo.tokenizer.encode(
        demo.tokenizer.apply_chat_template(talk.messages[:-1]), add_special=False
    )
    talk.rewind(1)  # to a turn that has been rendered anew since
    third = talk.ask("Go on.", max_new_tokens=20).result
    assert (third.prompt, third.tokens) == (second.prompt, second.tokens)


def test_rewind_forgets_and_goes_another_way(demo):
    talk = Conversation(demo, system="Be brief.")
    asked = [talk.ask(text, max_new_tokens=15).result for text in ("One", "Two", "Three")]
    assert talk.turns == 3
    talk.rewind(2)
    assert [message["content"] for message in talk.messages[:2]] == ["Be brief.", "One"]
    assert talk.turns == 1
    assert len(talk.tokens) == len(asked[0].prompt) + len(asked[0].tokens)
    again = talk.ask("Two", max_new_tokens=15).result
    assert (again.prompt, again.tokens) == (asked[1].prompt, asked[1].tokens)
    for turns in (0, -1, 3):
        with pytest.raises(StateError, match="rewind takes 1 to 2"):
            talk.rewind(turns)
    talk.rewind(2)
    assert (talk.tokens, talk.turns, len(talk.messages)) == ((), 0, 1)
    with pytest.raises(StateError, match="there is no turn yet"):
        talk.rewind()
    assert talk.ask("One", max_new_tokens=15).result.tokens == asked[0].tokens


@pytest.mark.parametrize("template", [{}, {"enable_thinking": False}])
def test_save_and_load_go_on_as_if_it_had_never_stopped(template, demo, tmp_path):
    talk = Conversation(demo, system="Be brief.", template=template)
    list(talk.ask("One", max_new_tokens=15))
    talk.save(tmp_path / "c")
    other = Conversation(demo)
    other.load(tmp_path / "c")
    assert (other.messages, other.tokens, other.stats) == (talk.messages, talk.tokens, talk.stats)
    ours, theirs = (one.ask("Two", max_new_tokens=15).result for one in (other, talk))
    assert (ours.prompt, ours.tokens) == (theirs.prompt, theirs.tokens)
    assert other.stats == talk.stats
    if not template:
        assert ours.stats.prefilled == theirs.stats.prefilled == len(ours.prompt) - other.kept
    # how the prompt ends is the template's doing; an empty thought further up may be the model's own
    ending = demo.tokenizer.decode(ours.prompt, skip_special=False).rstrip()
    assert ending.endswith("<think>\n\n</think>") == bool(template)


def test_a_file_that_is_no_conversation_changes_nothing(demo, tmp_path):
    talk = Conversation(demo)
    list(talk.ask("One", max_new_tokens=5))
    before = talk.messages, talk.tokens
    session = demo.session()
    session.feed("Hello")
    sound = {"messages": [], "ends": [], "template": {}}
    for saved in (
        None,
        7,
        {**sound, "messages": [{"role": "user", "content": "x"}]},
        {**sound, "messages": [{"role": "system", "content": 7}]},
        {**sound, "ends": [99]},
        {**sound, "template": [["a", 1]]},
    ):
        session.extra = {"conversation": saved}
        session.save(tmp_path / "s")
        with pytest.raises(SessionFileError, match="conversation"):
            talk.load(tmp_path / "s")
        assert (talk.messages, talk.tokens) == before
    list(talk.ask("Two", max_new_tokens=5))


def test_an_exception_in_a_pass_forgets_the_turn_and_the_conversation_goes_on(demo, monkeypatch):
    talk = Conversation(demo)
    list(talk.ask("One", max_new_tokens=10))
    before = talk.messages
    decode, passes = type(demo.target).decode, []

    def failing(self, state, tokens):
        passes.append(1)
        if len(passes) == 8:
            raise ZeroDivisionError
        return decode(self, state, tokens)

    with monkeypatch.context() as patch:
        patch.setattr(type(demo.target), "decode", failing)
        answer = talk.ask("Two", ignore_eos=True, max_new_tokens=50)
        with pytest.raises(PluginError):
            list(answer)
    assert talk.messages == before
    result = talk.ask("Three", max_new_tokens=10).result
    assert result.tokens == plain(demo, result.prompt, 10)


def test_a_refused_message_changes_nothing(demo):
    talk = Conversation(demo)
    list(talk.ask("One", max_new_tokens=10))
    before = talk.messages, talk.tokens
    for text, settings, reason in (
        (" \n", {}, "message is empty"),
        ("word " * 9000, {}, "too long"),
        ("x", {"banned": (10**9,)}, "banned"),
        ("x", {"sed": 1}, "Did you mean 'seed'"),
        ("a \ud800 b", {}, "lone surrogate"),
    ):
        with pytest.raises(PromptError, match=reason):
            talk.ask(text, **settings)
        assert (talk.messages, talk.tokens) == before
    result = talk.ask("Two", max_new_tokens=10).result
    assert result.tokens == plain(demo, result.prompt, 10)


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def chat(invoke):
    def chat(stdin, *args):
        return invoke("chat", *args, stdin=stdin)

    return chat


def test_answers_go_to_stdout_and_everything_else_to_stderr(chat, demo):
    done = chat("Hello\nWhat is a list?\n", "-n", "12")
    assert done.exit_code == 0, done.stderr
    talk = Conversation(demo)
    answers = [talk.ask(text, max_new_tokens=12).result.text.lstrip("\n") for text in ("Hello", "What is a list?")]
    assert done.stdout == "".join(f"{answer}\n" for answer in answers)
    told = " ".join(done.stderr.split())
    for part in (
        f"model demo: qwen3_5, computes in {demo.info.dtype} on",
        "drafter ngram, mtp, fixed depth",
        "output the tokens of plain decoding (exact, with bitwise parity)",
        "/help lists the commands",
    ):
        assert part in told
    assert "accumulators" not in told


SAID = {
    "settings": (
        "/set max_new_tokens=3\n/set generation.seed=5\nOne\n/set\n/clear\n/stats",
        "max_new_tokens is 3; cut after 3 tokens; set so far: max_new_tokens=3, seed=5; conversation is empty; 0, 0 of",
    ),
    "turns": (
        "One\nTwo\n/stats\n/rewind\n/rewind 1\n/rewind",
        "turns 2, ; accepted ; ran through the model; speculation active, drafter ngram, mtp; 1 turn left "
        "0 turns left; StateError: there is no turn yet",
    ),
    "files": (
        "One\nTwo\n/save a b\n/save a b\n/save junk\n/rewind\n/load a b\n/save! junk\n/save junk\n"
        "/clear\n/save junk\n/save .\n/set seed=99999999999999999999",
        "saved 2 turns saved 2 turns; there is a file 'junk' already; try: /save! junk, which replaces it; "
        "loaded 2 turns > Two; saved 2 turns saved 2 turns the conversation is empty; there is a file 'junk' already; "
        "a folder has this name; 64 bits",
    ),
    "system": (
        "One\n/system\n/system Be brief.\nTwo\n/system\n/system none\nThree\n/system",
        "system message: none; system message: Be brief.; system message: Be brief.; system message: none; "
        "system message: none",
    ),
    "regenerate": (
        "/regenerate\nOne\n/regenerate\n/set temperature=0.9\n/regenerate\n/stats",
        "there is no turn yet; greedy decoding gives the same answer; turns 1, ; sampled temperature 0.9, seed ",
    ),
    "mistakes": (
        "/save\n/save ~\0\n/save /no/such/folder/file\n/load\n/load missing\n/load junk\n/rewind two\n/rewind 3\n"
        "/rewnd\n/exi\n/\n/set nonsense=1\n/set temperature=200\n/set x\n" + "word " * 9000 + "\n\n   \nHello",
        "/save takes a file name; session could not be written: No such file; /load takes a file name; "
        "session file cannot be read: No such file or directory; not a complete session file; "
        "/rewind takes a number of turns, got 'two'; there is no turn yet; no command /rewnd. Did you mean rewind?; "
        "no command /exi. Did you mean exit?; generation has no setting 'nonsense'; temperature takes 0.0 to 100.0; "
        "/set takes KEY=VALUE, such as temperature=0.8; the prompt is too long; /set max_new_tokens=N allows more)",
    ),
    "help": ("/help\n/bye\nnever", "/rewind [N] forget the last N turns; /quit leave (also /exit, /bye and Ctrl-D)"),
}


@pytest.mark.parametrize("story", SAID)
def test_commands(chat, story, tmp_path, monkeypatch):
    """What is said comes in this order; no hint is about the command line, and no mistake ends the conversation."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "junk").write_text("junk")
    lines, parts = SAID[story]
    done = chat(lines, "-n", "8")  # and no line end at the end
    assert done.exit_code == 0, done.stderr
    told, at = " ".join(done.stderr.split()), 0
    for part in parts.split("; "):
        assert part.strip() in told[at:], part
        at = told.index(part.strip(), at)
    assert " -s " not in told
    assert "Traceback" not in told


def test_system_message_and_template_variables(chat, demo):
    """And a message of two lines, and one that begins with a slash."""
    options = ("-n", "6", "--system", "Be brief.", "--template", "enable_thinking=false")
    done = chat("def f(x):\\\n    return x\n//help me\n", *options)
    talk = Conversation(demo, system="Be brief.", template={"enable_thinking": False})
    texts = ("def f(x):\n    return x", "/help me")
    answers = [talk.ask(text, max_new_tokens=6).result.text.lstrip("\n") for text in texts]
    assert done.stdout == "".join(f"{answer}\n" for answer in answers)


def test_ctrl_c_stops_the_answer_and_keeps_it(chat, ctrl_c):
    """In the middle of the first answer."""
    ctrl_c(4)
    done = chat("Hello\nAnd?\n/stats\n", "-n", "300", "-s", "generation.ignore_eos=true")
    assert done.exit_code == 0
    assert done.stderr.count("(stopped; the answer so far is kept)") == 1
    assert "(cut after 300 tokens" in done.stderr
    assert "turns        2" in done.stderr
