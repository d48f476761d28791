"""Compiles C sources to shared libraries, once per content, in the user's cache folder."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

_COMPILERS = ("gcc", "clang", "cc")


class CompilerNotFoundError(RuntimeError):
    """No C compiler is installed, and the emulator needs one."""


class BuildError(RuntimeError):
    """The C compiler refused a source; the message carries its output."""


def cache_dir(*parts: str) -> Path:
    """The user's cache folder, created if absent: CUTE_GEMMA_CACHE_DIR, else the platform's place.

    Raises OSError that says how to choose another when it cannot be created.
    """
    if override := os.environ.get("CUTE_GEMMA_CACHE_DIR"):
        root = Path(override)
    elif xdg := os.environ.get("XDG_CACHE_HOME"):
        root = Path(xdg) / "cute_gemma"
    elif sys.platform == "darwin":
        root = Path.home() / "Library" / "Caches" / "cute_gemma"
    elif sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")
        root = Path(local) / "cute_gemma" / "Cache"
    else:
        root = Path.home() / ".cache" / "cute_gemma"
    folder = root.joinpath(*parts)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"cannot create the cache folder {folder} ({error}); set CUTE_GEMMA_CACHE_DIR to a folder that "
            "can be written"
        ) from error
    return folder


@contextlib.contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on `path` against other processes and threads; released if the process dies.

    The lock file stays: removing it would let two processes hold locks on two files of one name.
    """
    import fcntl

    with open(path, "a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(handle, fcntl.LOCK_UN)


def write_atomically(path: Path, content: bytes) -> None:
    """Readers of `path` see the old file or the whole new one, never a part."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as handle:
            handle.write(content)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def find_compiler() -> str:
    """Path of the C compiler: the environment variable CC, else gcc, clang or cc from PATH.

    Raises CompilerNotFoundError when there is none.
    """
    wanted = os.environ.get("CC")
    for name in (wanted,) if wanted else _COMPILERS:
        if path := shutil.which(name):
            return path
    sought = f"CC={wanted}" if wanted else ", ".join(_COMPILERS)
    raise CompilerNotFoundError(
        f"no C compiler found ({sought} not on PATH), and the emulator is written in C. Install one: "
        "`apt install gcc` (Debian, Ubuntu), `dnf install gcc` (Fedora, RHEL), `xcode-select --install` "
        "(macOS), or set CC to a compiler"
    )


@functools.lru_cache(maxsize=8)
def _compiler_identity(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    return f"{version.splitlines()[0]}\n{platform.machine()}"


@functools.lru_cache(maxsize=1)
def cpu_identity() -> str:
    """What code made for this very CPU depends on: its architecture and features."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features = next(line for line in lines if line.startswith(("flags", "Features")))
        model = next((line for line in lines if line.startswith(("model name", "CPU part"))), "")
    except (OSError, StopIteration):
        features, model = platform.processor(), ""
    return f"{platform.machine()} {hashlib.sha256((model + features).encode()).hexdigest()[:16]}"


def build_library(
    sources: Sequence[Path],
    flags: Sequence[str] = ("-O2",),
    *,
    headers: Sequence[Path] = (),
    libs: Sequence[str] = (),
) -> Path:
    """Compiles C `sources` into one shared library and returns its path.

    The library is cached under the hash of the sources', and `headers`', content, the flags and the compiler;
    concurrent builders of one library wait for the first. `headers` names every file the sources include that
    may change; their folders become include paths. `libs` are linker flags, such as "-lm".

    Raises CompilerNotFoundError without a C compiler, BuildError with the compiler's output when it fails.
    """
    compiler = find_compiler()
    digest = hashlib.sha256(_compiler_identity(compiler).encode())
    native = (cpu_identity(),) if any("=native" in flag for flag in flags) else ()
    for part in (*flags, "\0libs", *libs, *native):
        digest.update(part.encode() + b"\0")
    for path in (*sources, *headers):
        content = Path(path).read_bytes()
        digest.update(f"{Path(path).name}\0{len(content)}\0".encode() + content)
    folder = cache_dir("lib")
    library = folder / f"{digest.hexdigest()[:32]}.so"
    if library.exists():
        return library
    with file_lock(library.with_suffix(".lock")):
        if not library.exists():
            includes = dict.fromkeys(f"-I{Path(p).parent}" for p in headers)
            command = [compiler, "-shared", "-fPIC", *flags, *includes, *map(str, sources)]
            _compile(command, library, libs)
    return library


def _compile(command: list[str], library: Path, libs: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        output = Path(scratch) / library.name
        done = subprocess.run([*command, "-o", str(output), *libs], capture_output=True, text=True)
        if done.returncode:
            raise BuildError(f"C compiler failed ({done.returncode}): {' '.join(command)}\n{done.stderr}")
        os.replace(output, library)
