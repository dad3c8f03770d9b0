"""The CPU kernels' library: built with any compiler command, kept where nobody else may write, loaded undamaged.

A library that is planted answers 666; the kernels answer 42. What needs two users is played: root gives a file away,
anybody else sees it with another owner.
"""

import ctypes
import errno
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import attrs
import pytest

import specdec
from specdec.backends.cpu import compiler, instruction_sets
from specdec.backends.cpu import library as libraries
from specdec.backends.cpu.backend import CpuBackend
from specdec.backends.cpu.library import Kernels, KernelsUnavailable, load_kernels
from specdec.errors import ConfigError, UnsupportedError
from specdec.files import keeping
from tests.instruction_sets import RUNNABLE, kernels_of
from tests.selection import cases

TRIVIAL = 'extern "C" __attribute__((visibility("default"))) int answer() { return 42; }\n'


@pytest.fixture
def trivial_sources(tmp_path, monkeypatch):
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "answer.cpp").write_text(TRIVIAL)
    monkeypatch.setattr(compiler, "SOURCES", sources)
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("SPECDEC_CPU_KERNELS", raising=False)
    monkeypatch.delenv("SPECDEC_CPU_INSTRUCTION_SET", raising=False)
    monkeypatch.setattr(libraries, "WHEEL", sources / "libraries")
    monkeypatch.setattr(libraries, "_load", libraries._load.__wrapped__)  # without its memory
    return sources


def built(kernels):
    if isinstance(kernels, KernelsUnavailable) and kernels.reason.startswith("no C++ compiler"):
        pytest.skip(kernels.reason)
    assert isinstance(kernels, Kernels), kernels
    return kernels


def test_a_library_is_built_once_and_again_for_new_sources(trivial_sources, tmp_path, caplog):
    """Catches: a stale library after an update, temporary files left in the cache, a silent wait for the compiler."""
    first = built(load_kernels())
    assert "compiling_kernels" in [record.event for record in caplog.records if record.levelname == "WARNING"]
    caplog.clear()
    stamp = first.path.stat().st_mtime_ns
    assert built(load_kernels()).path.stat().st_mtime_ns == stamp
    assert caplog.records == []
    (trivial_sources / "answer.cpp").write_text(TRIVIAL.replace("42", "43"))
    second = built(load_kernels())
    assert second.path != first.path
    assert (first.library.answer(), second.library.answer()) == (42, 43)
    kept = [f"{kernels.path.name}{suffix}" for kernels in (first, second) for suffix in ("", ".sha256")]
    assert sorted(p.name for p in (tmp_path / "cache").iterdir()) == sorted(kept)
    assert first.notice == second.notice == ""


# --- the wheel's libraries -------------------------------------------------------------------------------------------


def library_of(sources, answer):
    """A library that gives this answer."""
    source = sources.with_name(f"answer-{answer}.cpp")
    source.write_text(TRIVIAL.replace("42", str(answer)))
    found = compiler.find_compiler(os.environ.get("CXX", ""), os.environ["PATH"])
    library = source.with_suffix(".so")
    subprocess.run([*found.command, "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    return library


def test_the_wheel_s_library_comes_before_the_cache_and_the_compiler(trivial_sources, loaded):
    """One that cannot be loaded, as on a system whose libc is older than the wheel's, does not."""
    cached, library = built(load_kernels()), trivial_sources / "libraries" / f"{RUNNABLE[0]}.so"
    library.parent.mkdir()
    shutil.copy(library_of(trivial_sources, 7), library)
    shipped = built(load_kernels())
    assert (shipped.library.answer(), shipped.path, shipped.origin) == (7, library, "from the wheel")
    assert cached.origin in cached.description
    assert cached.origin != shipped.origin
    library.write_bytes(b"\x7fELF of another system")
    assert built(load_kernels()).library.answer() == 42
    library.unlink()
    assert built(load_kernels()) == cached


# --- damage ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def loaded(tmp_path, monkeypatch):
    """The contents of every library that is loaded. Each is loaded anew: the system takes one path for one library."""
    contents = []
    load = ctypes.CDLL

    def anew(path):
        contents.append(Path(path).read_bytes())
        copy = tmp_path / f"loaded-{len(contents)}.so"
        copy.write_bytes(contents[-1])
        return load(str(copy))

    monkeypatch.setattr(libraries.ctypes, "CDLL", anew)
    return contents


DAMAGES = {
    "empty": lambda data: b"",
    "the last byte": lambda data: data[:-1],
    "a bit": lambda data: data[:5000] + bytes([data[5000] ^ 0x10]) + data[5001:],
}


def test_what_is_damaged_is_not_loaded_and_is_built_again(trivial_sources, loaded):
    """Catches: a library cut short by a full disk or changed by a bad one that ends every later start with a signal."""
    first = built(load_kernels())
    library, beside = first.path, first.path.with_name(f"{first.path.name}.sha256")
    content = library.read_bytes()
    for name, damage in DAMAGES.items():
        data = damage(content)
        os.unlink(library)  # the old one is mapped into this process
        library.write_bytes(data)
        assert built(load_kernels()).library.answer() == 42, name
        assert loaded[-1] == content, name
    for missing in (library, beside):
        os.unlink(missing)
        assert built(load_kernels()).library.answer() == 42
    assert built(load_kernels()).path.stat().st_mtime_ns == library.stat().st_mtime_ns


# --- libraries that somebody else may have written -------------------------------------------------------------------

NOBODY = 65534


@pytest.fixture
def give_away(monkeypatch):
    """``give_away(path)``: from now on it belongs to another user."""
    gone = set()
    examine = os.lstat

    def lstat(path, **options):
        state = examine(path, **options)
        if str(path) not in gone:
            return state
        parts = list(state)
        parts[4] = NOBODY
        return os.stat_result(parts)

    def give(path):
        if os.geteuid() == 0:
            os.lchown(path, NOBODY, NOBODY)
        else:
            gone.add(str(path))
            monkeypatch.setattr(keeping.os, "lstat", lstat)

    monkeypatch.setattr(keeping, "_has_own_group", lambda group: False)
    return give


def plant(library, sources):
    """Put a foreign library in the place of one, with its right checksum beside it."""
    planted = library_of(sources, 666)
    os.unlink(library)
    shutil.copy(planted, library)
    library.with_name(f"{library.name}.sha256").write_bytes(libraries._checksum(planted.read_bytes()))


def a_link(cache):
    """Move the cache and let a link lead there."""
    cache.rename(cache.with_name("elsewhere"))
    cache.symlink_to(cache.with_name("elsewhere"))
    return cache


UNSAFE = {
    "a folder that all may write": lambda cache, file, give: cache.chmod(0o777),
    "a folder of another user": lambda cache, file, give: give(cache),
    "a folder above it that all may write": lambda cache, file, give: cache.parent.chmod(0o777),
    "a link of another user": lambda cache, file, give: give(a_link(cache)),
    "a link into a folder that all may write": lambda cache, file, give: a_link(cache).resolve().chmod(0o777),
    "a library that all may write": lambda cache, file, give: file.chmod(0o666),
    "a library of another user": lambda cache, file, give: give(file),
    "a checksum of another user": lambda cache, file, give: give(file.with_name(f"{file.name}.sha256")),
}


@pytest.mark.parametrize(
    "name", cases(UNSAFE, sample=("a folder that all may write", "a link of another user"), mark="slow")
)
def test_a_planted_library_is_not_loaded(name, trivial_sources, loaded, tmp_path, give_away, monkeypatch):
    cache = tmp_path / "home" / "cache"
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(cache))
    file = built(load_kernels()).path
    plant(file, trivial_sources)
    assert built(load_kernels()).library.answer() == 666  # as long as it is ours
    UNSAFE[name](cache, file, give_away)
    for _ in range(2):
        kernels = built(load_kernels())
        assert kernels.library.answer() == 42
    assert bool(kernels.notice) == ("folder" in name or "link" in name)  # a file alone is replaced
    assert not kernels.notice or kernels.notice.startswith("the CPU kernels are built at every start: ")


@pytest.mark.parametrize("variable", ["XDG_CACHE_HOME", "SPECDEC_CACHE_DIR"])
def test_a_library_below_a_relative_folder_is_not_loaded(variable, trivial_sources, loaded, tmp_path, monkeypatch):
    """Catches: code in somebody's repository that runs because specdec was started there."""
    cache = tmp_path / "repository" / "caches"
    if variable == "XDG_CACHE_HOME":
        cache = cache / "specdec"
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(cache))
    plant(built(load_kernels()).path, trivial_sources)
    monkeypatch.delenv("SPECDEC_CACHE_DIR")
    monkeypatch.chdir(tmp_path / "repository")
    monkeypatch.setenv(variable, "caches")
    kernels = built(load_kernels())
    assert kernels.library.answer() == 42
    assert "relative path" in kernels.notice


def test_without_a_private_temporary_folder_nothing_is_built(trivial_sources, tmp_path, monkeypatch, give_away):
    built(load_kernels()).path.unlink()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "open"))
    failed = load_kernels()
    assert isinstance(failed, KernelsUnavailable)
    assert "open can be written by other users" in failed.reason


# --- caches that cannot be written -----------------------------------------------------------------------------------


def read_only(cache, monkeypatch):
    """Root may write anywhere, so the system's answer is played."""
    real = os.open

    def refuse(path, flags, *mode, **options):
        if flags & os.O_CREAT and str(path).startswith(str(cache)):
            raise OSError(errno.EROFS, "Read-only file system")
        return real(path, flags, *mode, **options)

    monkeypatch.setattr(keeping.os, "open", refuse)


def absent(cache, monkeypatch):
    cache.with_name("file").write_text("")
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(cache.with_name("file") / "cache"))


def homeless(cache, monkeypatch):
    def unknown():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("SPECDEC_CACHE_DIR")
    monkeypatch.setattr(Path, "home", unknown)


UNWRITABLE = {read_only: "Read-only file system", absent: "file", homeless: "does not know this user's home"}


@pytest.mark.parametrize("happens", UNWRITABLE, ids=lambda happens: happens.__name__)
def test_without_a_cache_the_kernels_are_built_and_the_reason_is_said(happens, trivial_sources, tmp_path, monkeypatch):
    """Catches: a traceback or slow kernels on a read-only home directory or a full disk."""
    built(load_kernels()).path.unlink()
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with monkeypatch.context() as patch:
        happens(tmp_path / "cache", patch)
        kernels = built(load_kernels())
        assert kernels.library.answer() == 42
    assert UNWRITABLE[happens] in kernels.notice
    left = [path.name for path in (tmp_path / "cache").iterdir()]
    assert all(name.endswith(".sha256") for name in left), left  # nothing half written, and no old checksum is believed
    assert built(load_kernels()).notice == ""


def test_a_notice_reaches_the_result_once(monkeypatch):
    reason = "the CPU kernels are built at every start: for a test"
    told = attrs.evolve(kernels_of(), notice=reason)
    monkeypatch.setattr("specdec.backends.cpu.backend.load_kernels", lambda instruction_set: told)
    draft = {"name": "draft_model", "model": "demo"}
    for drafter in ("none", draft):
        result = specdec.load("demo", drafter=drafter, depth=2).generate("x", max_new_tokens=2)
        assert [notice for notice in result.notices if reason in notice] == [reason]


# --- compilers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["{folder}/a compiler", "'{folder}/a compiler' -O1", "env {found}"])
def test_the_compiler_may_be_a_command(form, trivial_sources, tmp_path, monkeypatch):
    built(load_kernels())
    found = compiler.find_compiler("", os.environ["PATH"]).command[0]
    (tmp_path / "a compiler").symlink_to(found)
    monkeypatch.setenv("CXX", form.format(folder=tmp_path, found=found))
    assert built(load_kernels()).library.answer() == 42


@pytest.mark.parametrize("given", ["c++ '", '"" -O2', "/", "no-such-compiler -O9"])
def test_a_command_that_is_none_is_a_reason(given, trivial_sources, monkeypatch):
    monkeypatch.setenv("CXX", given)
    failed = load_kernels()
    assert isinstance(failed, KernelsUnavailable)
    assert f"CXX={given!r} is not " in failed.reason


def test_without_a_compiler_the_reason_is_recorded(trivial_sources, tmp_path, monkeypatch):
    """Catches: a silent fallback. SPECDEC_CPU_KERNELS=native turns the reason into an error."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    missing = load_kernels()
    assert isinstance(missing, KernelsUnavailable)
    assert "no C++ compiler" in missing.reason
    monkeypatch.setenv("SPECDEC_CPU_KERNELS", "native")
    with pytest.raises(UnsupportedError, match="no C"):
        load_kernels()


def test_a_failed_build_keeps_what_the_compiler_said(trivial_sources, monkeypatch):
    """Catches: an unexplained fallback after a compiler error."""
    built(load_kernels())
    (trivial_sources / "answer.cpp").write_text("#error kernels of tomorrow\n")
    failed = load_kernels()
    assert isinstance(failed, KernelsUnavailable)
    assert "exit status" in failed.reason
    assert "kernels of tomorrow" in failed.detail
    monkeypatch.setenv("SPECDEC_CPU_KERNELS", "native")
    with pytest.raises(UnsupportedError) as error:
        load_kernels()
    assert "kernels of tomorrow" in str(error.value)


# --- instruction sets ------------------------------------------------------------------------------------------------


def test_the_widest_instruction_set_is_taken_and_a_setting_takes_another(trivial_sources, monkeypatch):
    """Catches: a library for one instruction set found under the key of another; a setting that is not obeyed."""
    paths = {built(load_kernels(name)).path for name in RUNNABLE}
    assert len(paths) == len(RUNNABLE)
    assert built(load_kernels()).instruction_set == RUNNABLE[0]
    for name in RUNNABLE:
        monkeypatch.setenv("SPECDEC_CPU_INSTRUCTION_SET", name)
        kernels = built(load_kernels())
        assert kernels == built(load_kernels(name))
        assert (kernels.instruction_set, kernels.notice) == (name, "")
        assert f"({name}, " in kernels.description
        assert name in CpuBackend().device
        assert CpuBackend().choose_dtype("auto", "bfloat16")[0] == "bfloat16"  # the faster one on every processor
        assert built(load_kernels(RUNNABLE[-1])).instruction_set == RUNNABLE[-1]  # before the environment


def test_what_the_processor_lacks_is_refused(trivial_sources, monkeypatch):
    """Catches: a narrower set in silence, or an illegal instruction."""
    for name in set(instruction_sets.NAMES) - set(RUNNABLE):
        with pytest.raises(ConfigError, match=f"does not have the instruction set '{name}'"):
            specdec.load("demo", instruction_set=name)
    with pytest.raises(ConfigError, match="no instruction set is called 'axv2'") as refused:
        specdec.load("demo", instruction_set="axv2")
    assert f"auto, {', '.join(RUNNABLE)}" in str(refused.value)
    monkeypatch.setenv("SPECDEC_CPU_INSTRUCTION_SET", "axv2")
    with pytest.raises(ConfigError, match="SPECDEC_CPU_INSTRUCTION_SET"):
        load_kernels()


@pytest.mark.skipif(len(RUNNABLE) < 2, reason="this processor has one instruction set")
def test_a_compiler_that_does_not_know_the_widest_makes_a_narrower_one(trivial_sources):
    """Catches: slow kernels where a narrower set would do; a narrower one that nobody hears of."""
    built(load_kernels())
    only = {"avx512-bf16": "__AVX512BF16__", "amx": "__AMX_TILE__", "avx512": "__AVX512F__", "avx2": "__AVX2__"}
    only["avx-vnni"] = "__AVXVNNI__"
    macro = only.get(RUNNABLE[0], "__ARM_FEATURE_DOTPROD")
    (trivial_sources / "answer.cpp").write_text(f"#ifdef {macro}\n#error of tomorrow\n#endif\n{TRIVIAL}")
    kernels = built(load_kernels())
    assert kernels.library.answer() == 42
    assert kernels.instruction_set in RUNNABLE[1:]
    assert kernels.notice.startswith(f"the CPU kernels for {RUNNABLE[0]} are unavailable: ")
    failed = load_kernels(RUNNABLE[0])  # by name, that one or none
    assert isinstance(failed, KernelsUnavailable)
    assert "of tomorrow" in failed.detail
