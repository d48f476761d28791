"""`import cute_gemma` is light, and its public names load on first use."""

import subprocess
import sys
from importlib import resources

import pytest

HEAVY = ("torch", "cutlass", "numpy", "cuda", "tqdm")


def _run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_import_loads_neither_torch_nor_the_compiler():
    loaded = _run("import sys, cute_gemma; print(*(m.partition('.')[0] for m in sys.modules))").split()
    assert "cute_gemma" in loaded
    assert not set(HEAVY) & set(loaded)


def test_import_loads_few_modules_of_its_own():
    code = "import sys, cute_gemma; print(*(m for m in sys.modules if m.startswith('cute_gemma')))"
    assert _run(code).split() == ["cute_gemma"]


def test_the_configuration_needs_no_torch():
    code = "import sys, cute_gemma; print(cute_gemma.AttentionConfig().heads, 'torch' in sys.modules)"
    assert _run(code).split() == ["24", "False"]


def test_public_names_load_on_first_use():
    import cute_gemma

    for name in cute_gemma.__all__:
        assert callable(getattr(cute_gemma, name))
        assert name in dir(cute_gemma)
    with pytest.raises(AttributeError, match="has no attribute 'attention_backwards'"):
        cute_gemma.attention_backwards  # noqa: B018


def test_the_package_declares_its_types():
    assert resources.files("cute_gemma").joinpath("py.typed").is_file()
