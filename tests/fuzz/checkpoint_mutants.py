"""Seeded mutations of checkpoint folders and of TOML configurations: damage, and what an attacker would write."""

import json
import os
import pathlib
import random
import shutil
import struct
from collections.abc import Callable
from typing import Any

from tests import tiny, tiny_families
from tests.checkpoints.gguf_files import write_gguf
from tests.checkpoints.quantised import mlx_layout
from tests.checkpoints.quantised.test_quantised_models import matrix, split
from tests.fuzz.mutations import (
    DIGITS,
    NESTED,
    VALUES,
    SafetensorsFile,
    mutate_bytes,
    mutate_gguf,
    mutate_json,
    mutate_safetensors,
)

_HYBRID = tiny.shape(
    "hidden=64 heads=2 kv_heads=1 head_dim=32 max_positions=64 key_heads=1 value_heads=2 key_dim=16 value_dim=16 "
    "intermediate=64",
    layer_types=["linear_attention", "full_attention"],
    tied=False,
)


def _quantised(name: str) -> Callable[[pathlib.Path], pathlib.Path]:
    """A writer of the hybrid with every matrix in one quantised format."""

    def write(folder: pathlib.Path) -> pathlib.Path:
        source = tiny.write_qwen3_5(folder / "source", dtype="bfloat16", **_HYBRID)
        return split(folder, source, lambda tensor: name if matrix(tensor) else None)[0]

    return write


def _mlx(folder: pathlib.Path) -> pathlib.Path:
    source = tiny.write_qwen3_5(folder.with_name(f"{folder.name}-source"), **{**_HYBRID, "mtp": False})
    made, _ = mlx_layout.convert(folder, source, "qwen3_5")
    return made


def _gguf(write: Callable[[pathlib.Path], pathlib.Path], matrices: str) -> Callable[[pathlib.Path], pathlib.Path]:
    """A writer of a folder with one GGUF file."""

    def write_file(folder: pathlib.Path) -> pathlib.Path:
        source = write(folder.with_name(f"{folder.name}-source"))
        folder.mkdir()
        write_gguf(folder / "model.gguf", source, matrices=matrices)
        return folder

    return write_file


SUBJECTS: dict[str, Callable[[pathlib.Path], pathlib.Path]] = {
    "hybrid": lambda folder: tiny.write_qwen3_5(folder, **_HYBRID),
    "hybrid, vision layout": lambda folder: tiny.write_qwen3_5(folder, vl=True, shards=2, **_HYBRID),
    "llama 3": lambda folder: tiny_families.write_llama(
        folder, max_positions=64, **{**tiny_families.SHAPES["llama"]["llama3-rope"]}
    ),
    "qwen2, yarn": lambda folder: tiny_families.write_qwen2(folder, **tiny_families.SHAPES["qwen2"]["yarn"]),
    "experts": lambda folder: tiny_families.write_qwen3_5_moe(folder, max_positions=64),
    "qwen3 next": lambda folder: tiny_families.write_qwen3_next(folder, max_positions=64),
    "latent, experts": lambda folder: tiny_families.write_deepseek_v3(
        folder, **tiny_families.SHAPES["deepseek_v3"]["yarn-groups"]
    ),
    "glm": lambda folder: tiny_families.write_glm4_moe(folder, max_positions=64),
    "nvfp4": _quantised("nvfp4 packed"),
    "int4": _quantised("int4 g16 zero points"),
    "mlx": _mlx,
    "gguf, hybrid": _gguf(lambda folder: tiny.write_qwen3_5(folder, **_HYBRID), "F32"),
    "gguf, packed": _gguf(lambda folder: tiny_families.write_llama(folder, hidden=64, max_positions=64), "Q8_0"),
    "gguf, experts": _gguf(lambda folder: tiny_families.write_qwen3_5_moe(folder, max_positions=64), "BF16"),
}

# --- folders ---------------------------------------------------------------------------------------------------------


def mutate_folder(rng: random.Random, folder: pathlib.Path) -> str:
    """Damage a checkpoint folder in place; what was done."""
    mutations = (_damage, _hostile_file, _hostile_tokenizer, _hostile_template, _hostile_config)
    of_any = 5 if (folder / "tokenizer.json").exists() else 2  # a GGUF file is alone
    return rng.choices(mutations[:of_any], (12, 3, 3, 1, 3)[:of_any])[0](rng, folder)


def _damage(rng: random.Random, folder: pathlib.Path) -> str:
    """One to three files lose their meaning a little."""
    done = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        files = sorted(path for path in folder.iterdir() if path.is_file())
        file = rng.choice([path for path in files if path.suffix == rng.choice((".json", ".safetensors"))] or files)
        data = file.read_bytes()
        try:
            if file.suffix == ".safetensors":
                mutant = mutate_safetensors(rng, data)
            elif file.suffix == ".gguf":
                mutant = mutate_gguf(rng, data)
            elif rng.random() < 0.2:
                mutant = mutate_bytes(rng, data)
            else:
                mutant = mutate_json(rng, json.loads(data))
        except (ValueError, LookupError, TypeError, RecursionError, struct.error):  # mutated before
            mutant = mutate_bytes(rng, data)
        file.write_bytes(mutant.data)
        done.append(f"{file.name}: {mutant.what}")
    return "; ".join(done)


def _hostile_file(rng: random.Random, folder: pathlib.Path) -> str:
    """Something else than a file where a file is read, or a file of another size."""
    names = (*(path.name for path in sorted(folder.iterdir())), "chat_template.jinja", "special_tokens_map.json")
    name = rng.choice((*names, "mtp.safetensors", "generation_config.json", "chat_template.json"))
    file = folder / name
    data = file.read_bytes() if file.exists() else b"{}"
    file.unlink(missing_ok=True)
    match rng.randrange(7):
        case 0:
            os.mkfifo(file)
            what = "a named pipe"
        case 1:
            file.mkdir()
            what = "a folder"
        case 2:
            target = rng.choice(("/dev/zero", "/dev/stdin", "/nonexistent", str(file), "/proc/self/mem"))
            file.symlink_to(target)
            what = f"a link to {target}"
        case 3:
            file.write_bytes(data)
            os.truncate(file, 2**40)
            what = "a terabyte long"
        case 4:
            file.write_bytes(rng.choice((b"", b"\xff\xfe", b"\xef\xbb\xbf" + data, b"\x00" * 4096, data[::-1])))
            what = "other bytes"
        case 5 if file.suffix == ".safetensors":
            empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
            names = rng.choice(([f"model.layers.{i}.x.weight" for i in range(200_000)], ["x" * 100_000]))
            file.write_bytes(SafetensorsFile(dict.fromkeys(names, empty), bytearray()).pack())
            what = f"{len(names)} empty tensors"
        case _:
            what = "missing"
    return f"{name}: {what}"


# --- tokenizers ------------------------------------------------------------------------------------------------------


def _replace(found: str, content: str, *, regex: bool = False) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"Regex" if regex else "String": found}, "content": content}


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


_PATTERNS = ("(a+)+$", "(?:e+e+e+e+)[^e]zz", "(.*)*(.*)*[^h]x", "(?:.{0,1000}){0,1000}$", "(((", "")


def _hostile_part(rng: random.Random) -> dict[str, Any]:
    """One key of tokenizer.json."""
    many = rng.choice((2, 8, 40, 3000))
    pattern = rng.choice(_PATTERNS)
    added = {**dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False), "special": True}
    single = [{"Sequence": {"id": "A", "type_id": 0}}] * many
    key, part = rng.choice(
        (
            ("normalizer", {"type": "Sequence", "normalizers": [_replace("e", "ee")] * many}),
            ("normalizer", _replace("", "y")),
            ("normalizer", _replace(pattern, "q", regex=True)),
            ("normalizer", {"type": "Prepend", "prepend": "p" * 10**5}),
            ("normalizer", {"type": "Precompiled", "precompiled_charsmap": rng.choice(("AAAA", "", "/////w=="))}),
            ("pre_tokenizer", _split(pattern)),
            ("pre_tokenizer", {"type": "Sequence", "pretokenizers": [_split(pattern)] * min(many, 40)}),
            ("pre_tokenizer", {"type": "FixedLength", "length": rng.choice((0, 1, 2**63))}),
            ("decoder", {"type": "Sequence", "decoders": [_replace("e", "ee")] * many}),
            ("decoder", _replace(pattern, "q", regex=True)),
            ("decoder", {"type": "Strip", "content": "e", "start": 2**62, "stop": 2**62}),
            ("model", {"type": "WordLevel", "vocab": {"the": 2**32 - 1}, "unk_token": "the"}),
            ("model", {"type": "WordLevel", "vocab": {}, "unk_token": "absent"}),
            ("model", {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["t", -1e308], ["e", 0.0]]}),
            ("post_processor", {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": {}}),
            ("truncation", {"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 2**60}),
            ("added_tokens", [{"id": rng.choice((5, 2**32 - 1)), "content": rng.choice(("", "e", "\ud800")), **added}]),
        )
    )
    return {key: part}


def _hostile_tokenizer(rng: random.Random, folder: pathlib.Path) -> str:
    file = folder / "tokenizer.json"
    part = _hostile_part(rng)
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | part), encoding="utf-8")
    return f"tokenizer.json: {str(part)[:150]}"


# --- templates and numbers -------------------------------------------------------------------------------------------

# a template may take time and memory, as any program of the checkpoint's author; these fail at once
TEMPLATES = (
    "{{ 'a' * 10**12 }}",
    "{{ 9 ** 999999999 }}",
    "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ 'x'.ljust(10**12) }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ raise_exception('x' * 10**6) }}",
    "{{ messages[0]['content'] * 1000 }}",
    "{% include '/etc/passwd' %}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{{ undefined.attribute }}",
    "{% if",
    "\ud800",
    "{{ '\\ud800' }}",
    "x" * 10**6,
)


def _hostile_template(rng: random.Random, folder: pathlib.Path) -> str:
    template = rng.choice(TEMPLATES)
    if rng.random() < 0.5:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8", errors="surrogatepass")
    else:
        file = folder / "tokenizer_config.json"
        settings = json.loads(file.read_text(encoding="utf-8"))
        named = rng.choice(
            (template, [{"name": "default", "template": template}], [{"name": "x", "template": template}])
        )
        file.write_text(json.dumps(settings | {"chat_template": named}), encoding="utf-8")
    return f"the template {template[:80]!r}"


_NUMBERS = (0, 1, 2, 3, -1, 2**16, 2**31 - 1, 2**31, 2**53, 10**12, 10**30, 10**400, 1e-320, 1e308, 0.5)


def _hostile_config(rng: random.Random, folder: pathlib.Path) -> str:
    """Numbers of config.json and generation_config.json, wherever they stand."""
    file = folder / rng.choice(("config.json", "config.json", "config.json", "generation_config.json"))
    config = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    holders = [config, *(value for value in config.values() if isinstance(value, dict))]
    holders += [value for holder in holders[1:] for value in holder.values() if isinstance(value, dict)]
    done = []
    for _ in range(rng.choice((1, 1, 2, 4))):
        holder = rng.choice(holders)
        keys = [key for key, value in holder.items() if type(value) in (int, float)] or ["max_position_embeddings"]
        key = rng.choice((*keys, "eos_token_id", "num_hidden_layers", "max_position_embeddings", "bos_token_id"))
        holder[key] = rng.choice(_NUMBERS)
        if key == "eos_token_id" and rng.random() < 0.3:
            holder[key] = [holder[key]] * 3
        done.append(f"{key} = {holder[key]!r}"[:60])
    file.write_text(json.dumps(config), encoding="utf-8")
    return f"{file.name}: {', '.join(done)}"


# --- configurations --------------------------------------------------------------------------------------------------

_CONFIGURATION = """\
[target]
model = "{model}"
backend = "cpu"
dtype = "float32"
capacity = 40

[drafter]
name = "ngram"
max_order = 3

[verifier]
name = "strict"

[depth]
name = "fixed"
depth = 2

[generation]
max_new_tokens = 3
temperature = 0.5
top_p = 0.9
stop = ["END", "\\n\\n"]
banned = [1, 2]
logit_bias = {{"42" = -5.0}}
seed = 7
"""
_TOML_VALUES = (
    *("1" * DIGITS, "0x" + "f" * DIGITS, "-0x1", "9223372036854775808", "1e999", "inf", "nan"),
    *("[" * NESTED + "]" * NESTED, "{a=" * 900 + "1" + "}" * 900, "[" * NESTED, "[[]]", "{a = 1, a = 2}", ""),
    *("1979-05-27T07:32:00Z", "07:32:00", '"""a\nb"""', '"\\ud800"', '"' + "a" * 100_000 + '"'),
)


def write_configuration(rng: random.Random, file: pathlib.Path, model: pathlib.Path) -> str:
    """Write a mutated TOML configuration for ``model``; what was done to it."""
    lines = _CONFIGURATION.format(model=model).splitlines()
    number = rng.choice([number for number, line in enumerate(lines) if "=" in line])
    key, _, value = lines[number].partition(" = ")
    match rng.randrange(4):
        case 0 | 1:
            values = [json.dumps(value) for value in VALUES if value is not None]
            new = rng.choice((rng.choice(_TOML_VALUES), rng.choice(values)))
            lines[number] = what = f"{key} = {new}"
        case 2:
            name = rng.choice((f"{key}x", "a" * 100_000, ".".join("a" * 3000), '""', f"{key}.{key}", f'"{key}\\u0000"'))
            lines.insert(number, what := f"{name} = {value}")
        case _:
            mutant = mutate_bytes(rng, "\n".join(lines).encode())
            file.write_bytes(mutant.data)
            return f"TOML: {mutant.what}"
    file.write_text("\n".join(lines), encoding="utf-8")
    return f"TOML: {what[:60]}"


def copy(source: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
    """A copy of a subject, to be mutated."""
    shutil.rmtree(target, ignore_errors=True)
    return pathlib.Path(shutil.copytree(source, target))
