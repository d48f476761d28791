"""C sources become shared libraries once per content, safely under concurrent processes."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cute_gemma.emulator import build
from cute_gemma.emulator.build import BuildError, CompilerNotFoundError, build_library, cache_dir


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CUTE_GEMMA_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "answer.c"
    path.write_text('#include "answer.h"\nint answer(void) { return ANSWER; }\n')
    (tmp_path / "answer.h").write_text("#define ANSWER 41\n")
    return path


def answer(library: Path) -> int:
    return ctypes.CDLL(str(library)).answer()


def test_a_library_is_built_once_and_rebuilt_when_any_input_changes(source, tmp_path, monkeypatch):
    header = tmp_path / "answer.h"
    first = build_library([source], headers=[header])
    assert answer(first) == 41
    monkeypatch.setattr(build, "_compile", lambda *args: pytest.fail("compiled again"))
    assert build_library([source], headers=[header]) == first
    monkeypatch.undo()
    monkeypatch.setenv("CUTE_GEMMA_CACHE_DIR", str(tmp_path / "cache"))
    header.write_text("#define ANSWER 42\n")
    changed_header = build_library([source], headers=[header])
    assert answer(changed_header) == 42
    changed_flags = build_library([source], ("-O0",), headers=[header])
    source.write_text(source.read_text() + "int other;\n")
    changed_source = build_library([source], headers=[header])
    assert len({first, changed_header, changed_flags, changed_source}) == 4


def test_objects_link_with_sources(source, tmp_path):
    subprocess.run(["cc", "-c", "-fPIC", str(source), "-o", str(tmp_path / "answer.o")], check=True)
    caller = tmp_path / "caller.c"
    caller.write_text("int answer(void);\nint twice(void) { return 2 * answer(); }\n")
    assert ctypes.CDLL(str(build_library([caller, tmp_path / "answer.o"]))).twice() == 82


def test_without_a_compiler_the_error_says_what_to_install(source, monkeypatch, tmp_path):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CompilerNotFoundError, match=r"apt install gcc.*dnf install gcc"):
        build_library([source])


def test_a_cc_that_is_not_there_is_named(source, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(CompilerNotFoundError, match="CC=no-such-compiler"):
        build_library([source])


def test_compiler_errors_carry_the_compilers_words_and_leave_nothing_behind(tmp_path, cache):
    broken = tmp_path / "broken.c"
    broken.write_text("int f(void) { return undeclared; }\n")
    with pytest.raises(BuildError, match="undeclared"):
        build_library([broken])
    assert [path.suffix for path in (cache / "lib").iterdir()] == [".lock"]


def test_concurrent_processes_compile_a_library_once(source, tmp_path, cache):
    log = tmp_path / "compilations"
    compiler = tmp_path / "logging-cc"
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *--version*) ;; *) echo x >> {log}; sleep 0.5;; esac\nexec cc "$@"\n'
    )
    compiler.chmod(0o755)
    script = (
        "import sys; from pathlib import Path; from cute_gemma.emulator.build import build_library;"
        f"print(build_library([Path({str(source)!r})], headers=[Path({str(tmp_path / 'answer.h')!r})]))"
    )
    environment = os.environ | {"CC": str(compiler), "CUTE_GEMMA_CACHE_DIR": str(cache)}
    workers = [
        subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    paths = {worker.communicate()[0].strip() for worker in workers}
    assert [worker.returncode for worker in workers] == [0] * 4
    assert log.read_text() == "x\n"
    assert len(paths) == 1 and answer(Path(paths.pop())) == 41


def test_a_killed_builder_leaves_no_half_library(source, cache, tmp_path):
    """The library's name appears by rename alone, so what a killed compiler wrote is never taken for it."""
    (cache / "lib").mkdir(parents=True)
    path = build_library([source], headers=[tmp_path / "answer.h"])
    path.unlink()
    (cache / "lib" / "tmp-leftover").mkdir()
    (cache / "lib" / "tmp-leftover" / path.name).write_bytes(b"half")
    assert answer(build_library([source], headers=[tmp_path / "answer.h"])) == 41


def test_the_cache_folder_follows_the_platform_and_can_be_moved(monkeypatch, tmp_path):
    assert cache_dir("lib") == tmp_path / "cache" / "lib"
    monkeypatch.delenv("CUTE_GEMMA_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir("lib") == tmp_path / "xdg" / "cute_gemma" / "lib"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    if sys.platform == "linux":
        assert cache_dir() == tmp_path / "home" / ".cache" / "cute_gemma"


def test_a_cache_folder_that_cannot_be_made_says_how_to_choose_another(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUTE_GEMMA_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(OSError, match="cannot create the cache folder .*set CUTE_GEMMA_CACHE_DIR"):
        cache_dir("lib")


def test_native_code_is_kept_apart_by_cpu(source, tmp_path, monkeypatch):
    headers = [tmp_path / "answer.h"]
    here = build_library([source], ("-O1", "-march=native"), headers=headers)
    portable = build_library([source], ("-O1",), headers=headers)
    monkeypatch.setattr(build, "cpu_identity", lambda: "another cpu")
    assert build_library([source], ("-O1", "-march=native"), headers=headers) != here
    assert build_library([source], ("-O1",), headers=headers) == portable
