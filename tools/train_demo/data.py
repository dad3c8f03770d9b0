"""Training text: documents from four sources, split into training and held-out sets before any training.

Sources: GSM8K (MIT), WikiText-2 (CC BY-SA), the Python standard library (PSF), generated arithmetic.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import random
import re
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

END_OF_TEXT, IM_START, IM_END, THINK, END_THINK = SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
)
PROMPT_CLASSES = ("factual", "thinking", "code", "instruction")
HELD_OUT_SHARE = 0.04
HELD_OUT_SHARE_OF_ARTICLES = 0.10  # few and long: a smaller share would give too few prompts
EMPTY_THINK = f"{THINK}\n\n{END_THINK}\n\n"


@dataclasses.dataclass(frozen=True)
class Document:
    """One training text. The split is by ``origin``, so that no text leaks through a derived document."""

    source: str  # key of MIXTURE
    prompt_class: str  # one of PROMPT_CLASSES
    origin: str
    prompt: str  # the model's input in an evaluation
    completion: str

    @property
    def text(self) -> str:
        return self.prompt + self.completion


# Share of training windows drawn from each source.
MIXTURE = {
    "wiki": 0.09,
    "about": 0.04,
    "topics": 0.05,
    "gsm8k": 0.30,
    "stdlib": 0.30,
    "function": 0.17,
    "arithmetic": 0.05,
}


def chat(question: str, answer: str, opening: str = "") -> tuple[str, str]:
    """A one-turn conversation as (prompt, completion); ``opening`` is the part of the answer given to the model."""
    prompt = f"{IM_START}user\n{question}{IM_END}\n{IM_START}assistant\n{opening}"
    return prompt, f"{answer}{IM_END}\n"


def held_out(origins: Iterable[str], share: float = HELD_OUT_SHARE) -> frozenset[str]:
    """The first ``share`` of the distinct origins (at least one) in order of their SHA-256."""
    ordered = sorted(set(origins), key=lambda origin: hashlib.sha256(origin.encode()).digest())
    return frozenset(ordered[: max(1, round(share * len(ordered)))])


def detokenise(line: str) -> str:
    """Undo WikiText's spacing: ``@-@`` marks, spaces before punctuation and inside brackets and quotes."""
    line = re.sub(r" @(.)@ ", r"\1", line)
    line = re.sub(r" ([,.;:!?%)\]}])", r"\1", line)
    line = re.sub(r"([(\[{$£]) ", r"\1", line)
    line = re.sub(r" '(s|re|ve|ll|d|m|t)\b", r"'\1", line)
    line = line.replace(" n't", "n't").replace(" – ", "–").replace("' '", "''")
    return re.sub(r'" (.*?) "', r'"\1"', line).strip()


def clean_paragraph(line: str) -> str:
    """A WikiText paragraph without the sentences that contain ``<unk>``."""
    sentences = re.split(r"(?<= [.!?]) (?=[A-Z\"])", line.strip())
    return " ".join(detokenise(s) for s in sentences if "<unk>" not in s)


def wiki_articles(path: Path) -> Iterator[tuple[str, list[tuple[str, list[str]]]]]:
    """Yield (title, [(section heading, paragraphs), ...]); the lead section's heading is empty."""
    title = ""
    sections: list[tuple[str, list[str]]] = [("", [])]
    for line in path.read_text(encoding="utf-8").splitlines():
        heading = re.fullmatch(r" ((?:= )+)(.*?)((?: =)+) *", line)
        if heading and heading[1].count("=") == 1:
            if title:
                yield title, sections
            title, sections = detokenise(heading[2]), [("", [])]
        elif heading:
            sections.append((detokenise(heading[2]), []))
        elif paragraph := clean_paragraph(line):
            if len(paragraph) > 60:
                sections[-1][1].append(paragraph)
    if title:
        yield title, sections


def opening_words(text: str, low: int, high: int, rng: random.Random) -> tuple[str, str]:
    """Cut ``text`` before a word, ``low`` to ``high`` words in; the rest keeps its leading space."""
    starts = [m.start() for m in re.finditer(r"\s+", text)]
    if len(starts) <= low:
        return text, ""
    cut = starts[rng.randint(low, min(high, len(starts) - 1))]
    return text[:cut], text[cut:]


def wiki_documents(data_dir: Path, rng: random.Random) -> Iterator[Document]:
    for name in ("wikitext2_valid.txt", "wikitext2_test.txt"):
        for title, sections in wiki_articles(data_dir / name):
            if "<unk>" in title:
                title = ""
            origin = f"wiki:{title or sections[0][1][:1]}"
            for heading, paragraphs in sections:
                if not paragraphs:
                    continue
                top = f"{title}: {heading}" if heading and title else heading or title
                for first in range(0, len(paragraphs), 4):
                    body = "\n\n".join(paragraphs[first : first + 4])
                    head, tail = opening_words(body, 12, 30, rng)
                    prefix = f"# {top}\n\n" if top and "<unk>" not in top and first == 0 else ""
                    yield Document("wiki", "factual", origin, prefix + head, tail + "\n")
                if title and "<unk>" not in heading:
                    topic = f"{title} ({heading})" if heading else title
                    answer = "\n\n".join(paragraphs[:2])[:1200].rsplit(". ", 1)[0].rstrip(".") + "."
                    opening = EMPTY_THINK if rng.random() < 0.2 else ""
                    prompt, completion = chat(f"Tell me about {topic}.", answer, opening)
                    yield Document("about", "factual", origin, prompt, completion)


def gsm8k_documents(data_dir: Path, rng: random.Random) -> Iterator[Document]:
    for line in (data_dir / "gsm8k_train.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        steps, _, result = re.sub(r"<<.*?>>", "", row["answer"]).partition("####")
        question, steps, result = row["question"].strip(), steps.strip(), result.strip()
        if rng.random() < 0.2:
            prompt, completion = chat(question, f"{steps}\nThe answer is {result}.", EMPTY_THINK)
        else:
            answer = f"{steps}\n{END_THINK}\n\nThe answer is {result}."
            prompt, completion = chat(question, answer, f"{THINK}\n")
        yield Document("gsm8k", "thinking", f"gsm8k:{question}", prompt, completion)


def stdlib_files() -> Iterator[tuple[str, str]]:
    """Yield (relative path, source) of the standard library, without tables, generated files and most of its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = re.compile(
        r"site-packages|__pycache__|idlelib/|lib2to3/|encodings/|turtledemo|pydoc_data|config-|ensurepip/_bundled"
        r"|_sysconfigdata|lib-dynload|__phello__|/tests?/(?!test_[abcdfst])"
    )
    seen: set[str] = set()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if skip.search("/" + name):
            continue
        try:
            source = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        digest = hashlib.sha256(source.encode()).hexdigest()
        letters = sum(c.isalpha() and c.isascii() for c in source)
        if digest in seen or not 400 < len(source) < 250_000 or letters < 0.45 * len(source):
            continue
        seen.add(digest)
        yield name, source.expandtabs(8)


def split_source(source: str, size: int = 6000) -> Iterator[str]:
    """Pieces of about ``size`` characters that start at top-level statements."""
    start = 0
    for match in re.finditer(r"\n\n(?=(?:def|class|async def|@|[A-Za-z_#]))", source):
        if match.end() - start >= size:
            yield source[start : match.end()].rstrip("\n") + "\n"
            start = match.end()
    if source[start:].strip():
        yield source[start:].rstrip("\n") + "\n"


def dedent_lines(lines: list[str]) -> str:
    """Lines of a definition without the first line's indentation."""
    margin = len(lines[0]) - len(lines[0].lstrip(" "))
    return "\n".join(line[margin:] if not line[:margin].strip() else line for line in lines)


def function_tasks(source: str) -> Iterator[tuple[str, str]]:
    """Yield (instruction, source) for each short documented function of a module."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return
    lines = source.split("\n")
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        summary = (ast.get_docstring(node) or "").strip().split("\n\n")[0].replace("\n", " ").rstrip(".")
        code = dedent_lines(lines[node.lineno - 1 : node.end_lineno])
        if 12 <= len(summary) <= 160 and 60 < len(code) < 1600:
            signature = f"{node.name}({ast.unparse(node.args)})"
            yield f"Write a Python function `{signature}` that: {summary}", code


def code_opening(piece: str, rng: random.Random) -> tuple[str, str]:
    """Cut a piece of source at a line end, 3 to 12 lines in; the newline belongs to the completion."""
    ends = [m.start() for m in re.finditer(r"\n", piece)]
    cut = ends[min(rng.randint(3, 12), len(ends) - 1)]
    return piece[:cut], piece[cut:]


def code_documents(rng: random.Random) -> Iterator[Document]:
    seen: set[str] = set()
    for name, source in stdlib_files():
        for piece in split_source(source):
            prompt, completion = code_opening(piece, rng)
            yield Document("stdlib", "code", f"stdlib:{name}", prompt, completion)
        for task, code in function_tasks(source):
            if code in seen:
                continue
            seen.add(code)
            opening = EMPTY_THINK if rng.random() < 0.2 else ""
            prompt, completion = chat(task, f"```python\n{code}\n```", opening)
            yield Document("function", "instruction", f"stdlib:{name}", prompt, completion)


def topic_documents(rng: random.Random) -> Iterator[Document]:
    """The help texts that ship with the standard library: the language reference as plain prose."""
    source = (Path(sysconfig.get_paths()["stdlib"]) / "pydoc_data" / "topics.py").read_text(encoding="utf-8")
    topics = ast.literal_eval(source[source.index("{") :])
    for name, text in sorted(topics.items()):
        for number, piece in enumerate(split_source(text, 4000)):
            prompt, completion = opening_words(piece, 12, 30, rng)
            yield Document("topics", "factual", f"topics:{name}:{number}", prompt, completion)


def arithmetic_documents(rng: random.Random, count: int = 12_000) -> Iterator[Document]:
    """Small sums in a few phrasings, answered with the equation and a sentence."""
    operations = {
        "+": (("What is {a} + {b}?", "Add {a} and {b}.", "Compute the sum of {a} and {b}."), "The sum is {r}."),
        "-": (("What is {a} - {b}?", "Subtract {b} from {a}.", "How much is {a} minus {b}?"), "The difference is {r}."),
        "*": (
            ("What is {a} * {b}?", "Multiply {a} by {b}.", "Compute the product of {a} and {b}."),
            "The product is {r}.",
        ),
    }
    for _ in range(count):
        sign = rng.choice("++--*")
        a, b = (rng.randint(2, 20), rng.randint(2, 12)) if sign == "*" else (rng.randint(1, 200), rng.randint(1, 100))
        if sign == "-" and a < b:
            a, b = b, a
        result = {"+": a + b, "-": a - b, "*": a * b}[sign]
        phrasings, closing = operations[sign]
        question = rng.choice(phrasings).format(a=a, b=b)
        opening = EMPTY_THINK if rng.random() < 0.2 else ""
        prompt, completion = chat(question, f"{a} {sign} {b} = {result}. {closing.format(r=result)}", opening)
        yield Document("arithmetic", "instruction", f"arithmetic:{a}{sign}{b}", prompt, completion)


def load_documents(data_dir: Path) -> tuple[list[Document], list[Document]]:
    """All documents as (training, held out). Deterministic for one data folder and one Python version."""
    rng = random.Random(20)
    training: list[Document] = []
    reserved: list[Document] = []
    families = [
        list(wiki_documents(data_dir, rng)),
        list(topic_documents(rng)),
        list(gsm8k_documents(data_dir, rng)),
        list(code_documents(rng)),
        list(arithmetic_documents(rng)),
    ]
    for family in families:
        share = HELD_OUT_SHARE_OF_ARTICLES if family[0].source == "wiki" else HELD_OUT_SHARE
        kept_back = held_out((document.origin for document in family), share)
        for document in family:
            (reserved if document.origin in kept_back else training).append(document)
    return training, reserved


def held_out_prompts(reserved: list[Document], per_class: int, seed: int = 7) -> dict[str, list[str]]:
    """``per_class`` distinct prompts of each class, always the same for the same arguments.

    Instruction prompts are three quarters functions and one quarter sums; factual ones half prose, half chat.
    """
    rng = random.Random(seed)
    shares = {
        "factual": {"wiki": 0.5, "about": 0.5},
        "thinking": {"gsm8k": 1.0},
        "code": {"stdlib": 1.0},
        "instruction": {"function": 0.75, "arithmetic": 0.25},
    }
    chosen: dict[str, list[str]] = {}
    for name, sources in shares.items():
        chosen[name] = []
        for source, share in sources.items():
            pool = sorted({d.prompt for d in reserved if d.source == source and len(d.completion) > 20})
            pool = [p for p in pool if len(p) < 1500]
            chosen[name] += rng.sample(pool, min(len(pool), round(per_class * share)))
    return chosen


class WindowSampler:
    """Draw windows of ``length`` tokens from the sources' streams, half of them aligned to a document's start."""

    def __init__(
        self, streams: dict[str, NDArray[np.uint16]], starts: dict[str, NDArray[np.int64]], length: int
    ) -> None:
        self._streams, self._starts, self._length = streams, starts, length
        names = [name for name in MIXTURE if name in streams]
        weights = np.array([MIXTURE[name] for name in names])
        self._names, self._weights = names, weights / weights.sum()

    def draw(self, batch: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Token ids ``[batch, length]``."""
        rows = []
        for name in rng.choice(self._names, size=batch, p=self._weights):
            stream, starts = self._streams[name], self._starts[name]
            start = int(rng.choice(starts)) if rng.random() < 0.5 else int(rng.integers(len(stream)))
            start = min(start, len(stream) - self._length)
            rows.append(stream[start : start + self._length])
        return np.stack(rows).astype(np.int64)

    def draw_openings(self, batch: int, length: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """The first ``length`` tokens of ``batch`` documents, ``[batch, length]``."""
        rows = []
        for name in rng.choice(self._names, size=batch, p=self._weights):
            stream = self._streams[name]
            start = min(int(rng.choice(self._starts[name])), len(stream) - length)
            rows.append(stream[start : start + length])
        return np.stack(rows).astype(np.int64)
