import pytest


@pytest.fixture
def fresh_cache(tmp_path, monkeypatch):
    """An empty disk cache and nothing compiled in memory."""
    from cute_gemma.jit import compiler

    monkeypatch.setenv("CUTE_GEMMA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "_memory", {})
    return tmp_path / "cache"
