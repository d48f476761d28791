"""A kernel is compiled once for a target and every size, kept on disk, and compiled again when anything
changes."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tiny_kernels import Batched, RowScale

from cute_gemma import jit
from cute_gemma.emulator.capture import capture_launches
from cute_gemma.jit import cache, compiler
from cute_gemma.jit.cache import describe, source_digests

HERE = Path(__file__).parent


def test_the_toolchain_is_cuda_13():
    compiled = jit.compile(RowScale())
    assert compiled.ptxas_version >= (13, 0)
    version = next(line for line in compiled.ptx.splitlines() if line.startswith(".version"))
    assert int(version.split()[1].split(".")[0]) >= 9
    assert ".target sm_100a" in compiled.ptx


def test_an_older_toolchain_is_warned_about(monkeypatch, fresh_cache):
    monkeypatch.setattr(compiler, "ptxas_version", lambda cubin: (12, 9))
    for _ in ("compiled", "from the disk cache"):
        with pytest.warns(jit.ToolchainWarning, match=r"ptxas 12.9.*nvidia-cutlass-dsl\[cu13\]"):
            jit.compile(RowScale())
        compiler.forget()


def test_the_cubin_is_the_one_in_the_object_that_is_launched():
    compiled = jit.compile(RowScale())
    assert compiled.object_code.count(compiled.cubin) == 1


def test_source_lines_are_kept():
    assert str(HERE / "tiny_kernels.py") in jit.compile(RowScale()).ptx


def test_one_compile_serves_every_size():
    compiled = jit.compile(Batched())
    assert jit.compile(Batched()) is compiled
    for b, s in ((1, 1), (2, 293), (3, 7)):
        x = torch.zeros(b, s, 16, dtype=torch.bfloat16)
        (launch,) = capture_launches(
            compiled, x, torch.empty_like(x), torch.zeros(4, dtype=torch.int32), 1, 2**40
        )
        assert launch.grid == (s, b, 1)


def test_targets_and_options_are_kept_apart():
    compiled = jit.compile(RowScale())
    hopper = jit.compile(RowScale(), "sm_90a")
    assert ".target sm_90a" in hopper.ptx
    unoptimised = jit.compile(RowScale(), options="--opt-level 0")
    assert unoptimised.cubin != compiled.cubin
    assert jit.compile(RowScale(32)).ptx != compiled.ptx


def test_a_warm_disk_cache_compiles_nothing(fresh_cache, monkeypatch):
    compiled = jit.compile(RowScale())
    monkeypatch.setattr(compiler, "_memory", {})
    monkeypatch.setattr(compiler, "_compile", lambda *args: pytest.fail("compiled again"))
    again = jit.compile(RowScale())
    assert again is not compiled
    assert (again.ptx, again.cubin, again.object_code) == (compiled.ptx, compiled.cubin, compiled.object_code)
    with pytest.raises(pytest.fail.Exception):
        jit.compile(RowScale(32))


@pytest.mark.parametrize("damage", ["truncate", "drop", "manifest"])
def test_a_damaged_entry_is_compiled_again(fresh_cache, monkeypatch, damage):
    compiled = jit.compile(RowScale())
    file = compiled.folder / ("manifest.json" if damage == "manifest" else "host.o")
    if damage == "drop":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1])
    monkeypatch.setattr(compiler, "_memory", {})
    again = jit.compile(RowScale())
    assert again.object_code == compiled.object_code or again.object_code.count(again.cubin) == 1
    assert cache.Entry(compiled.folder.name).load() is not None


def test_the_disk_cache_can_be_turned_off(fresh_cache, monkeypatch):
    monkeypatch.setenv("CUTE_GEMMA_NO_CACHE", "1")
    compiled = jit.compile(RowScale())
    assert compiled.folder is None
    assert not (fresh_cache / "compiled").exists()
    x = torch.ones(3, 8)
    assert len(capture_launches(compiled, x, torch.zeros(8), torch.empty(3, 8), 1.0)) == 1


def test_concurrent_processes_compile_a_kernel_once(fresh_cache):
    script = (
        f"import sys; sys.path.insert(0, {str(HERE)!r})\n"
        "from cute_gemma.jit import compiler\nfrom tiny_kernels import RowScale\n"
        "compile_, compiled = compiler._compile, []\n"
        "compiler._compile = lambda *args: compiled.append(1) or compile_(*args)\n"
        "print(len(compiler.compile(RowScale()).cubin), len(compiled))\n"
    )
    environment = os.environ | {"CUTE_GEMMA_CACHE_DIR": str(fresh_cache)}
    workers = [
        subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    outputs = [worker.communicate()[0].split() for worker in workers]
    assert len({size for size, _ in outputs}) == 1
    assert sorted(count for _, count in outputs) == ["0", "0", "1"]


def test_an_edit_anywhere_in_the_kernels_imports_changes_its_key(tmp_path, monkeypatch):
    package = tmp_path / "somewhere"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "kernel.py").write_text(
        "import cutlass\nfrom . import helper\nfrom .inner.deep import thing\n"
    )
    (package / "helper.py").write_text("def f():\n    import somewhere.lazy\n")
    (package / "lazy.py").write_text("")
    (package / "inner" / "__init__.py").write_text("")
    (package / "inner" / "deep.py").write_text("from .. import sibling\nthing = 1\n")
    (package / "sibling.py").write_text("")
    (package / "unrelated.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    __import__("somewhere.kernel")
    before = source_digests("somewhere.kernel")
    own = {name for name in before if name.startswith("somewhere")}
    assert own == {
        "somewhere", "somewhere.kernel", "somewhere.helper", "somewhere.lazy", "somewhere.inner.deep",
        "somewhere.sibling",
    }  # fmt: skip
    assert before.keys() - own == {"cute_gemma.jit.compiler", "cute_gemma.jit.signature"}, (
        "no package, none of ours besides"
    )
    (package / "sibling.py").write_text("# edited\n")
    assert {k for k, v in source_digests("somewhere.kernel").items() if before[k] != v} == {
        "somewhere.sibling"
    }


def test_the_same_sources_elsewhere_have_another_key(tmp_path, monkeypatch):
    before, files = cache.cache_key(RowScale(), "sm_100a", ""), cache.source_files(RowScale.__module__)
    moved = Path(shutil.copy(files["tiny_kernels"], tmp_path))
    monkeypatch.setattr(cache, "source_files", lambda module: files | {"tiny_kernels": moved})
    assert cache.cache_key(RowScale(), "sm_100a", "") != before, "line information names the file"


def test_the_key_depends_on_configuration_target_options_compiler_and_cpu(monkeypatch):
    def key(kernel=RowScale(), target="sm_100a", options=""):
        return cache.cache_key(kernel, target, options)

    keys = [key(), key(RowScale(32)), key(Batched()), key(target="sm_90a"), key(options="--opt-level 2")]
    monkeypatch.setattr(cache, "cpu_identity", lambda: "another cpu")
    keys.append(key())
    monkeypatch.undo()
    monkeypatch.setattr(cache, "dsl_version", lambda: "4.9.0")
    keys.append(key())
    monkeypatch.undo()
    monkeypatch.setattr(cache, "toolkit", lambda: "cu12")
    keys.append(key())
    monkeypatch.undo()
    monkeypatch.setenv("CUTE_DSL_ENABLE_ASSERTIONS", "1")
    keys.append(key())
    monkeypatch.undo()
    assert len(set(keys)) == len(keys)
    assert key() == keys[0]


def test_descriptions_tell_configurations_apart_and_refuse_the_rest():
    @dataclass(frozen=True)
    class Config:
        a: object = 1

    values = [
        1,
        1.0,
        True,
        "1",
        None,
        (1,),
        (1, 2),
        0.1,
        float("nan"),
        b"1",
        int,
        {"a": 1},
        frozenset((1,)),
        Config(2),
    ]
    texts = [describe(Config(value)) for value in values]
    assert len(set(texts)) == len(texts)
    with pytest.raises(TypeError, match="object .* has no stable description"):
        describe(Config(object()))


def test_unknown_targets_are_refused():
    with pytest.raises(jit.UnsupportedTargetError, match="target: got 'sm_80', expected one of sm_100a"):
        jit.compile(RowScale(), "sm_80")


def test_importing_the_package_is_light(tmp_path):
    """Neither torch nor the DSL nor a driver is touched, and the environment stays as it is."""
    script = (
        "import os, sys; before = dict(os.environ)\nimport cute_gemma, cute_gemma.jit, cute_gemma.emulator\n"
        "loaded = {'torch', 'cutlass', 'tvm_ffi', 'cuda'} & set(sys.modules)\n"
        "assert not loaded, loaded\nassert dict(os.environ) == before\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
