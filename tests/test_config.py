"""AttentionConfig and its presets."""

import math

import pytest

from cute_gemma.config import MASKED_AT_OR_BELOW, PRESETS, AttentionConfig, preset


def test_defaults_are_workload_047():
    config = AttentionConfig()
    assert (config.hidden, config.heads, config.kv_heads, config.head_dim) == (3072, 24, 8, 128)
    assert (config.softcap, config.eps, config.qk_norm, config.window) == (50.0, 1e-6, True, None)
    assert preset("047") == config


def test_scale_defaults_to_inverse_square_root_of_head_dim():
    assert AttentionConfig(head_dim=256).scale == 1 / 16
    assert AttentionConfig(scale=0.5).scale == 0.5


def test_derived_sizes():
    config = AttentionConfig()
    assert (config.group, config.q_width, config.kv_width) == (3, 3072, 1024)


def test_equal_configs_hash_alike():
    assert hash(AttentionConfig(softcap=50)) == hash(AttentionConfig(softcap=50.0, scale=128**-0.5))


@pytest.mark.parametrize("field", ["hidden", "heads", "kv_heads", "head_dim"])
@pytest.mark.parametrize(
    "value, error", [(0, ValueError), (-8, ValueError), (8.0, TypeError), (True, TypeError)]
)
def test_sizes_have_to_be_positive_ints(field, value, error):
    with pytest.raises(error, match=f"{field}: got .*{value}.*want"):
        AttentionConfig(**{field: value})


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"hidden": 12}, "hidden: got 12, want a multiple of 8"),
        ({"heads": 24, "kv_heads": 5}, r"kv_heads: got 5, want a divisor of heads \(24\)"),
        ({"head_dim": 100}, "head_dim: got 100, want a multiple of 16"),
        ({"head_dim": 272}, "head_dim: got 272, want a multiple of 16 up to 256"),
        ({"softcap": 0.0}, "softcap: got 0.0, want a finite number above 0"),
        ({"softcap": -1}, "softcap: got -1, want"),
        ({"softcap": math.nan}, "softcap: got nan, want"),
        ({"softcap": math.inf}, "softcap: got inf, want"),
        ({"eps": 0.0}, "eps: got 0.0, want"),
        ({"eps": math.nan}, "eps: got nan, want"),
        ({"scale": -0.1}, "scale: got -0.1, want"),
        ({"window": 0}, "window: got 0, want at least 1"),
    ],
)
def test_bad_values_name_the_field_and_what_is_wanted(fields, message):
    with pytest.raises(ValueError, match=message):
        AttentionConfig(**fields)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"softcap": "50"}, "softcap: got str '50', want a number"),
        ({"eps": None}, "eps: got NoneType None, want a number"),
        ({"qk_norm": 1}, "qk_norm: got 1, want True or False"),
        ({"window": 1.5}, "window: got float 1.5, want an int"),
    ],
)
def test_bad_types_name_the_field_and_what_is_wanted(fields, message):
    with pytest.raises(TypeError, match=message):
        AttentionConfig(**fields)


def test_presets_follow_their_generation():
    for name, config in PRESETS.items():
        if name.startswith("gemma2"):
            assert config.softcap == 50.0 and not config.qk_norm
        if name.startswith("gemma3"):
            assert config.softcap is None and config.qk_norm
        assert (config.window is not None) == name.endswith("-local")
    assert preset("gemma2-27b").scale == 144**-0.5
    assert preset("gemma3-27b").scale == 168**-0.5
    assert preset("gemma3-1b-local").window == 512


def test_unknown_preset_lists_the_known_ones():
    with pytest.raises(ValueError, match="preset: got 'gemma9', want one of 047, 051, gemma2-2b"):
        preset("gemma9")


def test_masked_threshold_is_half_of_bfloat16_lowest():
    import torch

    assert MASKED_AT_OR_BELOW == torch.finfo(torch.bfloat16).min / 2
