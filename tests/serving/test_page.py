"""The page in a real browser: headless Chromium, of the system."""

import json
import re
import shutil

import pytest

from specdec.decoding.origins import Origins
from specdec.serving.page import page, policy
from tests.processes import HUNG, run_specdec

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")]
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]
HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'><!-- &lt;b&gt;"


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as run:
        chromium = run.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def opened(browser):
    """``opened(url, width=..., scheme=...)``: a page; what went wrong on it fails the test."""
    contexts, wrong = [], []

    def open_page(url, *, width=1000, scheme="light"):
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme))
        made = contexts[-1].new_page()
        made.on("pageerror", lambda error: wrong.append(str(error)))
        made.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
        made.goto(url)
        return made

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


def fill(shown, **fields):
    for name, value in fields.items():
        if name == "kind":
            shown.select_option("#kind", value)
        else:
            shown.fill(f"#{name}", str(value))
    shown.click("#run")


def ended(shown, text=("reached", "end of text")):
    status = shown.locator("#status")
    playwright.expect(status).not_to_have_text("generating", timeout=1000 * HUNG)
    assert status.inner_text().startswith(text)


def test_tokens_are_coloured_by_their_origin_and_a_second_prompt_starts_anew(opened, server):
    import specdec

    lm = specdec.load(depth=3)
    shown = opened(server.url.removesuffix("/v1"))
    seen = set()
    prompts = ["class Stack:\n    def __init__(self):\n", "Name three colours."]
    for prompt, kind in zip(prompts, ("text", "chat"), strict=True):
        fill(shown, prompt=prompt, kind=kind, tokens=48, temperature=0.5, seed=3)
        ended(shown)
        assert shown.inner_text("#turns") == (prompt if kind == "chat" else "")  # the question of the text below it
        assert shown.inner_text("#detail").startswith("Point at a token")  # nothing of the run before
        origins, want = Origins(lm.tokenizer), []
        asked = {"messages": [{"role": "user", "content": prompt}]} if kind == "chat" else {"prompt": prompt}
        stream = lm.stream(**asked, max_new_tokens=48, temperature=0.5, seed=3, logprobs=4)
        stream.on_cycle = lambda record, want=want, origins=origins: want.extend(origins.add(record))
        assert stream.result.text == shown.inner_text("#output") or len(stream.result.text.strip())
        found = shown.eval_on_selector_all("#output .t", "all => all.map(one => [one.textContent, one.className])")
        assert found == [[one.text, f"t {one.origin}"] for one in want]
        shown.focus("#output")
        shown.keyboard.press("End")
        seen |= {one.origin for one in want}
    assert seen >= {"drafted", "corrected", "bonus"}
    figures = shown.inner_text("#figures")
    assert re.search(r"[\d.]+\s+times plain decoding", figures)


# in the page, because a click from here may come after the last token
STOP_AT_THE_FIRST_TOKEN = """
const output = document.querySelector("#output");
new MutationObserver((_, observer) => {
  if (!output.querySelector(".t")) return;
  observer.disconnect();
  document.querySelector("#stop").click();
}).observe(output, {childList: true, subtree: true});
"""


def test_stop_ends_the_generation_on_the_server(opened, server):
    shown = opened(server.url.removesuffix("/v1"))
    before = server.metric('specdec_finished_total{reason="interrupted"}')
    shown.evaluate(STOP_AT_THE_FIRST_TOKEN)
    fill(shown, prompt="class A:\n" * 30, kind="text", tokens=4000, temperature=1, seed=1)
    ended(shown, "stopped")
    assert shown.is_enabled("#run")
    fill(shown, prompt="x", tokens=4)
    ended(shown)
    assert server.metric('specdec_finished_total{reason="interrupted"}') in (before, before + 1)
    assert shown.locator("#output .t").count() <= 4


def test_an_error_of_the_server_is_shown(server, browser):
    shown = browser.new_page()  # the browser itself reports the status as an error on the console
    shown.goto(server.url.removesuffix("/v1"))
    fill(shown, prompt="x", tokens=4, seed=2**64)
    ended(shown, "seed: Input should be less than or equal to 9223372036854775807, got 18446744073709552000")
    shown.close()


def cycle(text):
    token = {"token": 1, "text": text, "origin": "corrected", "position": 0, "guess_text": text, "piece": text}
    token |= {"logprob": -0.5, "top": [[text, -0.5]]}
    return {"offered": 2, "accepted": 0, "draft_ms": 1, "verify_ms": 2, "commit_ms": 0.1, "tokens": [token]}


def recorded(tmp_path, text=HOSTILE):
    data = {"about": text, "promise": text, "prompt": text, "plain_ms": 1, "ended": text}
    file = tmp_path / "page.html"
    file.write_text(page({**data, "cycles": [cycle(text), cycle("two")]}), encoding="utf-8")
    return file.as_uri()


def test_a_script_in_the_models_text_stays_text(opened, tmp_path):
    shown = opened(recorded(tmp_path))
    shown.hover("#output .t")
    assert shown.evaluate("window.hacked") is None
    assert shown.locator("#output .t").first.text_content() == HOSTILE
    assert HOSTILE in shown.text_content("#about")
    assert json.dumps(HOSTILE)[1:10] in shown.text_content("#detail")
    assert shown.locator("img").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [340, 1000])
def test_it_fits_every_window_and_a_checker_of_accessibility_finds_nothing(opened, tmp_path, scheme, width):
    checker = pytest.importorskip("axe_playwright_python.sync_playwright")
    shown = opened(recorded(tmp_path, "some text "), width=width, scheme=scheme)
    assert shown.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    found = checker.Axe().run(shown).response["violations"]
    assert [(one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")] == []


def test_it_works_by_keyboard(opened, server):
    shown = opened(server.url.removesuffix("/v1"))
    shown.fill("#prompt", "def add(a, b):")
    shown.fill("#tokens", "12")
    shown.focus("#prompt")
    shown.keyboard.press("Control+Enter")
    ended(shown)
    shown.focus("#output")
    shown.keyboard.press("End")
    shown.keyboard.press("ArrowLeft")
    assert "cycle" in shown.text_content("#detail")
    assert shown.locator("#output .t.on").count() == 1


@pytest.mark.sample
def test_the_page_needs_nothing_else(server):
    status, headers, body = server.request("GET", "/")
    assert status == 200
    assert headers["content-security-policy"] == policy()
    text = body.decode()
    assert not re.search(r"""(src|href)=["']|url\(|@import""", text)


def test_generate_writes_the_page(opened, tmp_path):
    file = tmp_path / "run.html"
    done = run_specdec("generate", "--html", file, "--depth", 3, "-n", 24, "--json")
    shown = opened(file.as_uri())
    assert shown.locator("#output .t").count() == len(json.loads(done.stdout)["tokens"])
    assert shown.text_content("#output") == json.loads(done.stdout)["text"]
