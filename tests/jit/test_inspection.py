"""What `inspect` reads from a cubin."""

import pytest
from tiny_kernels import LocalMemory, RowScale

from cute_gemma import jit
from cute_gemma.jit import inspection
from cute_gemma.jit.inspection import count_instructions, tmem_columns


@pytest.fixture(scope="module")
def row_scale():
    (report,) = jit.inspect(RowScale())
    return report


def test_a_plain_kernel_has_no_stack_and_counted_instructions(row_scale):
    assert row_scale.target == "sm_100a" and row_scale.ptxas >= (13, 0)
    assert 0 < row_scale.registers <= 255
    assert not row_scale.spills and row_scale.stack_bytes == 0
    assert row_scale.threads == 64 and row_scale.tmem_columns is None and row_scale.static_smem == 0
    assert row_scale.count("FFMA") == 8, "one fused multiply-add a column"
    assert row_scale.count("STG") + row_scale.count("LDG") > 0
    assert row_scale.count("MUFU") == 0


def test_the_paths_hold_what_was_inspected(row_scale):
    compiled = jit.compile(RowScale())
    assert row_scale.ptx_path.read_text() == compiled.ptx
    assert row_scale.cubin_path.read_bytes() == compiled.cubin
    assert row_scale.name in row_scale.sass_path.read_text()


def test_local_memory_is_found():
    (report,) = jit.inspect(LocalMemory())
    assert report.spills
    assert report.stack_bytes >= 64 * 4
    assert report.local_loads > 0 and report.local_stores > 0
    assert report.count("MUFU.EX2") == report.count("MUFU") > 0


def test_mnemonics_are_counted_by_whole_words(row_scale):
    counts = count_instructions(
        ".text.first:\n        /*0000*/                   MUFU.EX2 R1, R2 ;\n"
        "        /*0010*/             @!UP0 UTCHMMA.2CTA gdesc[UR4], gdesc[UR6], tmem[UR8] ;\n"
        "        /*0020*/              @P0  MUFU.TANH R1, R2 ;\n"
        "        /*0030*/                   NOP;\n"
        ".text.second:\n        /*0000*/                   MUFUX R1 ;\n"
    )
    assert counts == {"first": {"MUFU.EX2": 1, "UTCHMMA.2CTA": 1, "MUFU.TANH": 1}, "second": {"MUFUX": 1}}


def test_tensor_memory_columns_come_from_constants():
    alloc = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], {};"
    assert tmem_columns(alloc.format("512")) == 512
    assert tmem_columns("mov.b32 %r7, 256;\n" + alloc.format("%r7")) == 256
    assert tmem_columns(alloc.format("%r7")) is None
    assert tmem_columns("ret;") is None


def test_without_the_disassembler_the_error_says_what_to_install(monkeypatch, tmp_path):
    def missing(name):
        raise inspection.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(inspection.importlib.metadata, "files", missing)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    with pytest.raises(jit.DisassemblerNotFoundError, match="pip install nvidia-cuda-nvdisasm"):
        inspection.find_disassembler()


def test_a_file_that_is_no_cubin_is_refused(tmp_path):
    (tmp_path / "x.cubin").write_bytes(b"nothing")
    with pytest.raises(RuntimeError, match="nvdisasm failed on .*x.cubin"):
        inspection.disassemble(tmp_path / "x.cubin")
