"""Every wrong argument gets an error that names it, says what came and what is wanted."""

import pytest
import torch

from cute_gemma.jit import ScalarArg, TensorArg
from cute_gemma.jit.arguments import check_arguments, compact_strides

SIGNATURE = (
    TensorArg("x", "bf16", ("m", 16)),
    TensorArg("y", "bf16", ("m", 16), strides=("ld", 1)),
    TensorArg("z", "f32", ("n", "m"), align=4),
    ScalarArg("factor", "f32"),
    ScalarArg("count", "i32"),
)


def arguments(**changed):
    values = {
        "x": torch.zeros(5, 16, dtype=torch.bfloat16),
        "y": torch.zeros(5, 24, dtype=torch.bfloat16)[:, :16],
        "z": torch.zeros(3, 5),
        "factor": 1.0,
        "count": 7,
    }
    return list((values | changed).values())


def test_right_arguments_pass():
    checked = check_arguments(SIGNATURE, arguments(factor=2))
    assert [type(value) for value in checked] == [torch.Tensor] * 3 + [float, int]
    assert checked[1].stride() == (24, 1)


@pytest.mark.parametrize(
    "changed, error, message",
    [
        (dict(x=[1.0]), TypeError, "x: got list, expected a torch.Tensor"),
        (dict(x=torch.zeros(5, 16)), TypeError, "x: dtype torch.float32, expected torch.bfloat16"),
        (
            dict(x=torch.zeros(5, 2, 8).bfloat16()),
            ValueError,
            r"x: shape \(5, 2, 8\), expected 2 dimensions, \(m, 16\)",
        ),
        (dict(x=torch.zeros(5, 15).bfloat16()), ValueError, r"x: shape \(5, 15\), expected \(m, 16\)"),
        (
            dict(x=torch.zeros(16, 5).bfloat16().T),
            ValueError,
            r"x: strides \(1, 5\), expected a contiguous tensor",
        ),
        (
            dict(y=torch.zeros(4, 16).bfloat16()),
            ValueError,
            r"y: shape \(4, 16\), expected m = 5 at dimension 0 as in x",
        ),
        (dict(y=torch.zeros(16, 8).bfloat16().T[:5]), ValueError, r"y: strides \(1, 8\), expected \(ld, 1\)"),
        (
            dict(y=torch.zeros(5, 20).bfloat16()[:, :16]),
            ValueError,
            r"y: strides \(20, 1\), expected a multiple of 8 at dimension 0",
        ),
        (
            dict(y=torch.zeros(5, 24).bfloat16()[:, 1:17]),
            ValueError,
            "y: address 0x[0-9a-f]+, expected a multiple of 16",
        ),
        (dict(z=torch.zeros(3, 6)), ValueError, r"z: shape \(3, 6\), expected m = 5 at dimension 1 as in x"),
        (dict(z=torch.zeros(3, 5, device="meta")), ValueError, "z: on meta, expected cpu like x"),
        (dict(factor="1"), TypeError, "factor: got str '1', expected a float"),
        (dict(count=1.5), TypeError, "count: got float 1.5, expected an int"),
        (dict(count=True), TypeError, "count: got bool True, expected an int"),
        (dict(count=2**31), ValueError, "count: got 2147483648, expected an integer that fits i32"),
    ],
)
def test_wrong_arguments_are_named(changed, error, message):
    with pytest.raises(error, match=message):
        check_arguments(SIGNATURE, arguments(**changed))


def test_a_wrong_count_lists_the_names():
    with pytest.raises(TypeError, match="got 2 arguments, expected 5: x, y, z, factor, count"):
        check_arguments(SIGNATURE, arguments()[:2])


def test_extents_beyond_32_bits_are_refused():
    with pytest.raises(ValueError, match="extent 0 exceeds 2147483647"):
        huge = torch.empty(1, dtype=torch.bfloat16).expand(2**31, 16)
        check_arguments(SIGNATURE, arguments(x=huge))


def test_strides_of_extent_one_are_made_row_major():
    x = torch.zeros(64, dtype=torch.bfloat16).as_strided((1, 16), (3, 1))
    assert x.is_contiguous() and x.stride() == (3, 1)
    checked = check_arguments(SIGNATURE[:1], [x])
    assert checked[0].stride() == (16, 1) and checked[0].data_ptr() == x.data_ptr()


def test_unused_strides_of_strided_arguments_are_made_legal():
    y = torch.zeros(1, 16, dtype=torch.bfloat16).as_strided((1, 16), (3, 1))
    assert check_arguments(SIGNATURE[1:2], [y])[0].stride() == (16, 1)
    pair = (
        TensorArg("a", "f32", ("m", 8), strides=("ld", 1)),
        TensorArg("b", "f32", ("n", 8), strides=("ld", 1)),
    )
    a, b = torch.zeros(2, 12)[:, :8], torch.zeros(1, 8)
    assert [tensor.stride() for tensor in check_arguments(pair, [a, b])] == [(12, 1), (12, 1)]


def test_parameters_that_require_gradients_are_detached():
    x = torch.nn.Parameter(torch.zeros(5, 16, dtype=torch.bfloat16))
    assert not check_arguments(SIGNATURE[:1], [x])[0].requires_grad


def test_compact_strides_are_row_major():
    assert compact_strides((2, 3, 4)) == torch.empty(2, 3, 4).stride()
    assert compact_strides(()) == ()
