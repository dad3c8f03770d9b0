"""Load the library of C++ kernels for an instruction set: from the wheel, from the cache, or compiled on first use.

A library runs with the user's rights. The one of the wheel is trusted like the package's other code. Any other is
compiled in a private temporary folder and kept in the user's cache; one from the cache is loaded only if no other user
could have written it (``exposed``) and its checksum is that in the file beside it. Its name covers sources, flags and
compiler version.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import attrs

from specdec.backends.cpu import compiler, instruction_sets
from specdec.backends.cpu.compiler import CompileError, Compiler
from specdec.backends.cpu.instruction_sets import InstructionSet
from specdec.errors import ConfigError, UnsupportedError
from specdec.files.keeping import exposed, make_folder, replacing
from specdec.files.reading import read_bytes
from specdec.logs import get_logger
from specdec.records.store import cache_folder

log = get_logger(__name__)

WHEEL = Path(__file__).with_name("libraries")  # only in wheels that were built where a compiler is
SWITCH = "SPECDEC_CPU_KERNELS"  # auto, torch (never build) or native (unavailable is an error)
INSTRUCTION_SET = "SPECDEC_CPU_INSTRUCTION_SET"  # the default of target.instruction_set
_LARGEST = 2**26  # bytes of a library


@attrs.frozen
class KernelsUnavailable:
    """Why the native kernels cannot be used."""

    reason: str  # one line
    detail: str = ""  # the end of the compiler's output


@attrs.frozen
class Kernels:
    """The loaded library."""

    path: Path
    instruction_set: str
    origin: str  # "from the wheel", or the compiler's version
    library: ctypes.CDLL = attrs.field(repr=False, eq=False)
    notice: str = ""  # why a narrower instruction set is used, or why the library is not kept for later starts

    @property
    def description(self) -> str:
        return f"native C++ ({self.instruction_set}, {self.origin})"

    def function(self, name: str, arguments: str, result: Any = None) -> Any:
        """Return a C function. ``arguments`` has one letter per argument: p pointer, i int64, f float."""
        kinds = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}
        found = getattr(self.library, name)
        found.argtypes = [kinds[letter] for letter in arguments]
        found.restype = result
        return found


def load_kernels(instruction_set: str = "auto") -> Kernels | KernelsUnavailable:
    """Return the native kernels, compiled if necessary, or the reason why they are unavailable.

    Args:
        instruction_set: the one to use; ``auto`` takes SPECDEC_CPU_INSTRUCTION_SET, else the widest that this processor
            has and for which there is a library.

    Raises: ConfigError for an instruction set that this processor lacks; UnsupportedError when
        SPECDEC_CPU_KERNELS=native asks for kernels and they are unavailable.
    """
    wanted = os.environ.get(SWITCH, "auto")
    if wanted not in ("auto", "torch", "native"):
        raise ConfigError(f"{SWITCH} takes auto, torch or native, got {wanted!r}")
    candidates = candidate_sets(instruction_set)
    if wanted == "torch":
        return KernelsUnavailable(f"{SWITCH}=torch")
    environment = (os.environ.get(name, "") for name in ("CXX", "PATH"))
    try:
        cache = str(cache_folder())
    except UnsupportedError:  # no home
        cache = ""
    kernels = _load(candidates, *environment, cache)
    if wanted == "native" and isinstance(kernels, KernelsUnavailable):
        raise UnsupportedError(
            f"{SWITCH}=native, but the native kernels are unavailable: {kernels.reason}",
            output=kernels.detail or None,
            try_="a C++20 compiler on PATH (or in CXX), or SPECDEC_CPU_KERNELS=auto",
        )
    return kernels


def candidate_sets(instruction_set: str = "auto") -> tuple[InstructionSet, ...]:
    """The instruction sets that may be used, in order of preference. Raises: ConfigError as ``load_kernels``."""
    asked_for_by = "target.instruction_set"
    if instruction_set == "auto":
        instruction_set, asked_for_by = os.environ.get(INSTRUCTION_SET) or "auto", INSTRUCTION_SET
    available = instruction_sets.available()
    if instruction_set == "auto":
        return available
    for one in available:
        if one.name == instruction_set:
            return (one,)
    known = instruction_set in instruction_sets.NAMES
    takes = f"auto, {', '.join(one.name for one in available)}"
    raise ConfigError(
        f"this processor does not have the instruction set {instruction_set!r}"
        if known
        else f"no instruction set is called {instruction_set!r}",
        asked_for_by=asked_for_by,
        takes=takes,
    )


@functools.cache  # one attempt per process and environment; a failed build is not repeated for every model
def _load(candidates: tuple[InstructionSet, ...], cxx: str, path: str, cache: str) -> Kernels | KernelsUnavailable:
    failure = None
    for one in candidates:
        try:
            kernels = _from_the_wheel(one) or _from_the_compiler(one, cxx, path, Path(cache) if cache else None)
        except CompileError as error:
            failure = failure or KernelsUnavailable(error.reason, error.detail)
        else:
            if failure is None:
                return kernels
            widest = f"the CPU kernels for {candidates[0].name} are unavailable: {failure.reason}"
            return attrs.evolve(kernels, notice="; ".join(filter(None, (widest, kernels.notice))))
    assert failure is not None
    return failure


def _from_the_wheel(one: InstructionSet) -> Kernels | None:
    library = WHEEL / f"{one.name}.so"
    try:
        return Kernels(library, one.name, "from the wheel", ctypes.CDLL(str(library))) if library.exists() else None
    except OSError as error:  # a libc older than the wheel's
        log.warning("kernels_of_the_wheel_unusable", path=str(library), error=str(error))
        return None


def _from_the_compiler(one: InstructionSet, cxx: str, path: str, cache: Path | None) -> Kernels:
    """Return the library that the compiler has made on an earlier start, or makes now. Raises: CompileError."""
    found = compiler.find_compiler(cxx, path)
    unusable = "there is no folder for caches, as the system does not know this user's home"
    if cache is not None:
        unusable = _unusable(cache)
    kept = None if cache is None or unusable else cache / f"cpu-kernels-{one.name}-{_key(found, one)}.so"
    return (kept and _cached(kept, one, found)) or _compile(one, found, kept, unusable)


def _unusable(cache: Path) -> str:
    """Create the cache. Return why libraries cannot be kept there, or ""."""
    try:
        if cache.is_absolute():
            make_folder(cache)
        return exposed(cache) or ""
    except OSError as error:
        return f"{error.filename}: {error.strerror}" if error.strerror else str(error)


def _cached(kept: Path, one: InstructionSet, found: Compiler) -> Kernels | None:
    """The library of an earlier start; None if it must be built, because it is absent, damaged or not trusted."""
    try:
        beside = _checksum_file(kept)
        if reason := exposed(kept) or exposed(beside):
            raise ValueError(reason)
        checksum = read_bytes(beside, 1024).split()
        if checksum[:1] != [_checksum(read_bytes(kept, _LARGEST))]:
            raise ValueError("its checksum is another one")
        return Kernels(kept, one.name, found.version, ctypes.CDLL(str(kept)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # a library that was built for another libc cannot be loaded
        log.warning("cached_kernels_unusable", path=str(kept), error=str(error))
        return None


def _checksum_file(library: Path) -> Path:
    return library.with_name(f"{library.name}.sha256")


def _checksum(library: bytes) -> bytes:
    return hashlib.sha256(library).hexdigest().encode()


def _compile(one: InstructionSet, found: Compiler, kept: Path | None, unusable: str) -> Kernels:
    """Compile in a private temporary folder and keep the library in ``kept``, if possible. Raises: CompileError."""
    # a warning, to be seen: meanwhile there is nothing else
    because = unusable or "first use: later starts load them from the cache"
    log.warning("compiling_kernels", instruction_set=one.name, takes="about half a minute", reason=because)
    started = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory(prefix="specdec-kernels-") as name:
            folder = Path(name)
            if reason := exposed(folder):
                raise CompileError(f"there is no private folder to build the kernels in: {reason}")
            library = folder / f"{one.name}.so"
            compiler.compile_libraries(found, {library: one.flags})
            if kept is not None:
                unusable = _keep(library, kept)
            log.info("kernels_built", path=str(kept or ""), elapsed_s=round(time.perf_counter() - started, 1))
            notice = f"the CPU kernels are built at every start: {unusable}" if unusable else ""
            path = kept if kept is not None and not unusable else library
            return Kernels(path, one.name, found.version, ctypes.CDLL(str(path)), notice)  # once loaded, it may go
    except OSError as error:
        raise CompileError(f"the kernels cannot be built or loaded: {error}") from None


def _keep(library: Path, kept: Path) -> str:
    """Copy a library to the cache, with its checksum beside it. Return why that is impossible, or ""."""
    content = library.read_bytes()
    try:
        for path, data in ((kept, content), (_checksum_file(kept), _checksum(content) + f"  {kept.name}\n".encode())):
            with replacing(path, mode=0o600) as new:
                new.write_bytes(data)
    except OSError as error:
        return f"{error.filename}: {error.strerror}" if error.strerror else str(error)
    return ""


def _key(found: Compiler, one: InstructionSet) -> str:
    digest = hashlib.sha256()
    for source in sorted(compiler.SOURCES.iterdir()):
        if source.suffix in (".cpp", ".h"):
            digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    for part in (*found.command, *compiler.FLAGS, *one.flags, found.version):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:20]
