"""Keeps compiled kernels on disk, under a key that changes with everything that shapes the code."""

from __future__ import annotations

import ast
import contextlib
import ctypes
import dataclasses
import enum
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from cute_gemma.emulator.build import cache_dir, cpu_identity, file_lock

FORMAT = 1
# The modules of these packages that shape the generated code; the others run it or keep it.
_OWN_PACKAGES = ("cute_gemma.jit", "cute_gemma.emulator")
_OWN_MODULES = ("cute_gemma.jit.compiler", "cute_gemma.jit.signature")


def disk_cache_enabled() -> bool:
    """Whether compiled kernels are kept on disk: unless CUTE_GEMMA_NO_CACHE is set to something but 0."""
    return os.environ.get("CUTE_GEMMA_NO_CACHE", "0") in ("", "0")


def describe(value: Any) -> str:
    """A text that is equal for equal configurations and the same in every process.

    Raises TypeError, naming the type, for a value it cannot describe so.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (f"{f.name}={describe(getattr(value, f.name))}" for f in dataclasses.fields(value))
        return f"{_qualified(type(value))}({', '.join(fields)})"
    if isinstance(value, enum.Enum):
        return f"{_qualified(type(value))}.{value.name}"
    if value is None or isinstance(value, (bool, int, str, bytes)):
        return repr(value)
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(describe, value))}]"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(describe, value)))}}}"
    if isinstance(value, dict):
        return f"{{{', '.join(sorted(f'{describe(k)}: {describe(v)}' for k, v in value.items()))}}}"
    if isinstance(value, type):
        return _qualified(value)
    raise TypeError(
        f"a kernel's field holds {type(value).__name__} {value!r}, which has no stable description"
    )


def content_name(content: bytes) -> str:
    """A file name for this content."""
    return hashlib.sha256(content).hexdigest()[:32]


def _qualified(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def cache_key(kernel: Any, target: str, options: str) -> str:
    """The key of a kernel's compiled form: its configuration, every first-party source file its module
    imports directly or not and where it lies (line information names it), the compiler's version and settings,
    the target and options, and the CPU that the host code is made for."""
    files = source_files(type(kernel).__module__)
    parts = {
        "format": FORMAT,
        "kernel": describe(kernel),
        "sources": sorted((name, str(path), _digest(path)) for name, path in files.items()),
        "dsl": dsl_version(),
        "toolkit": toolkit(),
        "environment": sorted(item for item in os.environ.items() if item[0].startswith("CUTE_DSL_")),
        "target": target,
        "options": options,
        "cpu": cpu_identity(),
        "system": platform.system(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:40]


@lru_cache(maxsize=1)
def dsl_version() -> str:
    """Versions of the compiler's packages, without importing it."""
    names = ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-cu13", "apache-tvm-ffi")
    versions = []
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name}=={importlib.metadata.version(name)}")
    return " ".join(versions)


@lru_cache(maxsize=1)
def toolkit() -> str:
    """The CUDA flavour of its libraries that the compiler picks: the newest, unless the driver is too old."""
    version = ctypes.c_int(0)
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) == 0:
            return "cu12" if version.value < 13000 else "newest"
    except (OSError, AttributeError):
        pass
    return "newest"


def source_files(module: str) -> dict[str, Path]:
    """First-party source files reachable by imports from `module`, by module name.

    First-party is everything outside the standard library and the installed packages, and cute_gemma wherever
    it is.
    """
    found: dict[str, Path] = {}
    pending = [module, *_OWN_MODULES]
    while pending:
        name = pending.pop()
        own = any(name == package or name.startswith(f"{package}.") for package in _OWN_PACKAGES)
        if name in found or (own and name not in _OWN_MODULES) or (path := _source_of(name)) is None:
            continue
        found[name] = path
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        pending.extend(_imported_names(ast.parse(path.read_bytes()), package))
    return found


def source_digests(module: str) -> dict[str, str]:
    """Digest of each of a module's `source_files`."""
    return {name: _digest(path) for name, path in source_files(module).items()}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _imported_names(tree: ast.AST, package: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                anchor = package.rsplit(".", node.level - 1)[0]
                base = f"{anchor}.{base}".strip(".")
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _source_of(name: str) -> Path | None:
    loaded = sys.modules.get(name)
    origin = getattr(loaded, "__file__", None)
    if loaded is None:
        parent = name.rpartition(".")[0]
        if parent and not hasattr(sys.modules.get(parent), "__path__"):
            return None  # an attribute of a module, or a package that was never imported
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(name)
            origin = spec.origin if spec else None
    if not origin or not origin.endswith(".py"):
        return None
    path = Path(origin).resolve()
    installed = any(path.is_relative_to(folder) for folder in _installed_folders())
    return path if name.partition(".")[0] == "cute_gemma" or not installed else None


@lru_cache(maxsize=1)
def _installed_folders() -> tuple[Path, ...]:
    """The standard library's folders, and those an installer keeps: they hold distributions' metadata."""
    folders = {
        Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")
    }
    for entry in filter(None, sys.path):
        path = Path(entry)
        if path.is_dir() and any(path.glob("*.dist-info")):
            folders.add(path.resolve())
    return tuple(folders)


class Entry:
    """A folder of named files that appear together or not at all."""

    def __init__(self, key: str) -> None:
        self.folder = cache_dir("compiled") / key
        self._lock = self.folder.with_suffix(".lock")

    def load(self) -> dict[str, bytes] | None:
        """The files, or None when the entry is absent or damaged."""
        try:
            manifest = json.loads((self.folder / "manifest.json").read_text())
            files = {name: (self.folder / name).read_bytes() for name in manifest["files"]}
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if any(
            hashlib.sha256(files[name]).hexdigest() != digest for name, digest in manifest["files"].items()
        ):
            return None
        return files

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Held while compiling, so that processes wanting one kernel compile it once."""
        with file_lock(self._lock):
            yield

    def store(self, files: dict[str, bytes]) -> None:
        """Writes the files; the caller holds the lock."""
        scratch = Path(tempfile.mkdtemp(dir=self.folder.parent, prefix=self.folder.name))
        try:
            for name, content in files.items():
                (scratch / name).write_bytes(content)
            manifest = {
                "files": {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
            }
            (scratch / "manifest.json").write_text(json.dumps(manifest))
            if self.folder.exists():  # damaged, or load() would have found it
                shutil.rmtree(self.folder)
            os.rename(scratch, self.folder)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
