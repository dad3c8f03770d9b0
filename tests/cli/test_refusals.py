"""One table of what the command line refuses: status 2, a sentence, no traceback, and nothing on standard output."""

import json
import shlex

import pytest

from specdec.cli import main
from tests.completion_stub import Toy, stub

SERVERS = "audit --server {url} --server {url}"
HUGE = "9" * 30

BEFORE_LOADING = [
    ("generate --prompt x --prompt-tokens 1", "--prompt and --prompt-tokens: give one prompt only"),
    ("generate --prompt-tokens 1,x", "number 2 is 'x'"),
    ("generate --prompt-tokens 1 --chat", "--chat and --system take text"),
    ("generate -p x --raw --system y", "--raw and --system: a system message needs the chat template"),
    ("generate --model a/b", "Give a/b a prompt"),
    ("generate binary -p x", "'binary' cannot be read as TOML: it is not UTF-8: byte 0xff at offset 0 try: a folder"),
    ("generate 'def add(a, b):'", "Did you mean --prompt 'def add(a, b):'?"),
    ("generate demo 'write a poem'", "extra argument 'write a poem'. Did you mean --prompt 'write a poem'?"),
    ("generate gpt2", 'a hub id with its organization, as in "openai-community/gpt2"'),
    ("generate --prompt x -s top_p=0.9", "key top_p is unknown. Did you mean 'generation.top_p'?"),
    ("generate --prompt x --stop \udcff", "not valid UTF-8"),
    ("generate --prompt-file /dev/zero", "'/dev/zero' has no end within"),
    ("accept --trace /dev/zero --drafter ngram", "the trace cannot be read: it is a device, not a file"),
    ("generate --model demo other/model", "give one model"),
    ("generate /no/such/folder", "there is no folder '/no/such/folder'"),
    ("generate --model model.gguf --prompt x", "GGUF"),
    ("generate --drafter ''", "takes the name of a plugin"),
    ("generate --prompt-file /no/such/file", "cannot read '/no/such/file'"),
    ("generate --prompt-file binary", "is not UTF-8: byte 0xff at offset 0"),
    ("generate --prompt x -s depth.dept", "an override is key.path=value, got 'depth.dept'"),
    ("generate no-such.toml", "there is no file 'no-such.toml'"),
    ("generat", "Did you mean 'generate'?"),
    ("accept --classes coding", "there is no prompt class 'coding'"),
    ("accept --prompts missing.txt", "the prompt file cannot be read: No such file"),
    ("accept --prompts blank", "the prompt file has no prompt"),
    ("accept --prompts broken.jsonl", "a line of the prompt file is not JSON"),
    ("accept --ablate gate-slu", "there is no ablation 'gate-slu'. Did you mean 'gate-silu'"),
    ("generate -p x --trace none/t", "there is no folder to write the file into"),
    ("accept --html .", "there is no folder to write the file into, or it is a folder itself"),
    ("accept --depth 0", "0 is not in the range"),
    ("accept -s depth.depth=3", "-s depth.depth=3: the depth is fixed here, give it with --depth"),
    ("accept --trace trace.jsonl", "name the drafter to judge"),
    ("accept --trace trace.jsonl --drafter mtp", "cannot run in recorded traffic: it needs an MTP head"),
    ("accept --trace trace.jsonl --drafter ngram --passive", "--passive: with --trace no model runs"),
    ("accept --trace trace.jsonl --drafter ngram --verifier rejection", "--verifier: with --trace no model runs"),
    ("accept --trace trace.jsonl --drafter ngram -s target.weights=int4", "-s target.weights=int4: with --trace no"),
    ("bench --synthetic mixd", "Did you mean 'mixed'?"),
    ("bench --synthetic 0.5,0.9", "never rise"),
    (f"bench --repeats {HUGE}", "--repeats"),
    (f"{SERVERS} -t -1", "generation.temperature takes 0.0 to 100.0"),
    ("audit --tolerance inf", "is not a finite number"),
    ("audit --server {url}", "give two, a plain and a speculative one, got 1"),
    ("audit --server {url} --server nonsense", "'nonsense' is not the URL of a server"),
    ("audit --server {url} --server http://127.0.0.1:9", "cannot be reached: Connection refused"),
    ("audit --server {url} --server {url}/other", "answers 404 to /models: 'Not Found'"),
    (f"{SERVERS} -m toys", "no model 'toys'. Did you mean 'toy'?"),
    (f"{SERVERS} -t 1 --tolerance 1", "these requests are sampled"),
    (f"{SERVERS} -p a --per-class 1", "leave them out"),
    ("chat --template x", "--template takes KEY=VALUE, such as enable_thinking=false got: 'x'"),
    ("batch demo --prompts text -o text", "the results would replace the prompts"),
    ("vocab demo -o v.json", "either --text or --generate"),
    ("vocab demo -o v.json --text text --chat", "--chat and --raw go with --generate"),
    ("vocab demo -o v.json --text text --size 0", "--size"),
    ("doctor -s target.backend=cpu", "--set: it needs a MODEL"),
    ("doctor --context 3", "--context: it needs a MODEL"),
    ("doctor demo -s drafter.name=ngram", "so drafter.name has no effect"),
    ("doctor demo -s target.model=other", "MODEL says"),
    ("doctor demo -s target.backend=metl", "Did you mean 'metal'?"),
    ("new draftr far-away", "no kind of plugin 'draftr'. Did you mean 'drafter'?"),
    ("new drafter ../far", "lower-case letters"),
    ("new drafter " + "a" * 41, "at most 40"),
    ("new drafter ngram", "'ngram' is taken"),
]

BY_THE_MODEL = [
    ("generate --prompt ''", "PromptError: the prompt is empty"),
    ("accept --drafter ngram --ablate all", "the drafter 'ngram' uses none"),
    ("accept --drafter none", "so there is nothing to measure"),
    ("accept --depth 99", "the depth is 1 to 15 on this backend, got 99"),
    ("bench --per-class 1 --drafter none", "nothing to measure"),
    ("bench --per-class 1 --depth 0", "depth 0 drafts nothing"),
    ("bench --per-class 1 -n 9000", "do not fit"),
    ("doctor demo --context 8192", "--context 8192 leaves no room"),
    ("generate -p x --drafter medusa", "no drafter is called 'medusa'. asked for by"),
    ("generate run.toml -p x -s drafter.max_ordr=3", "Known keys: max_order, min_order. asked for by: -s drafter"),
    ("generate -p x --depth 1.5", "no depth policy is called '1.5'. asked for by: --depth"),
    ("generate -p x --depth nope", "available: auto, adaptive (built in)"),
    ("vocab demo -o v.json --text blank --size 600", "has no text"),
    ("vocab demo -o v.json --text text --size 3", "3"),
]

FILES = {
    "binary": b"\xff\xfe",
    "blank": b" \n\n",
    "broken.jsonl": b'{"class": "a", "prompt": "b"}\n{"class": \n',
    "run.toml": b'drafter = { name = "ngram", min_order = 2 }',
    "text": b"def f(x):\n    return x\n",
    "trace.jsonl": b'{"specdec":"trace","version":1,"vocab_size":9}\n{"request":0,"prompt":[1]}\n'
    b'{"request":0,"position":1,"depth":2,"draft":[]}\n{"request":0,"commit":[2]}\n',
}


@pytest.fixture(scope="module")
def url():
    with stub(Toy()) as url:
        yield url


@pytest.fixture
def refused(invoke, url, tmp_path, monkeypatch):
    """Check that a command line is refused with a text, in a folder of prepared files."""

    def refused(line, text):
        done = invoke(*shlex.split(line.format(url=url)), stdin="Hello\n" if line.startswith("chat") else None)
        assert done.exit_code == 2, done.output
        assert text in " ".join(done.stderr.split())
        assert "Traceback" not in done.output
        assert {path.name for path in tmp_path.iterdir()} == set(FILES)  # nothing was written
        return done

    monkeypatch.chdir(tmp_path)
    for name, data in FILES.items():
        (tmp_path / name).write_bytes(data)
    return refused


@pytest.mark.usefixtures("no_load")
@pytest.mark.parametrize(("line", "text"), BEFORE_LOADING, ids=lambda value: value[:50])
def test_a_mistake_is_refused_before_anything_is_loaded(refused, line, text):
    assert refused(line, text).stdout == ""


@pytest.mark.usefixtures("loaded_once")
@pytest.mark.parametrize(("line", "text"), BY_THE_MODEL, ids=lambda value: value[:50])
def test_what_the_model_cannot_do_is_refused(refused, line, text):
    refused(line, text)


@pytest.mark.usefixtures("no_load")
@pytest.mark.parametrize("command", ["accept --classes coding", "bench --synthetic mixd"])
def test_with_json_the_error_is_the_object(refused, command):
    done = refused(f"{command} --json", "")
    error = json.loads(done.stdout)["error"]
    assert error["type"] in done.stderr
    assert error["message"] in done.stderr


FILE_OPTIONS = [
    f"{name} {option.opts[-1]} ''"
    for name, command in main.commands.items()
    for option in command.params
    if option.type.__class__.__name__ == "_Name" and option.opts[-1].startswith("-")
]
MODELS = [f"{name} ''" for name in ("accept", "bench", "chat", "check", "doctor", "generate", "info", "vocab")]


@pytest.mark.usefixtures("no_load")
@pytest.mark.parametrize("line", [*FILE_OPTIONS, *MODELS])
def test_an_empty_name_is_refused_by_its_option(refused, line):
    done = refused(line, "Error: Invalid value for ")
    assert done.stderr.startswith("Usage:")
    option = line.split()[1]
    assert not option.startswith("--") or option in done.stderr
