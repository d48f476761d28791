"""Signatures refuse what cannot be meant."""

import pytest

from cute_gemma.jit import ScalarArg, TensorArg


def test_symbols_are_listed_in_order_of_first_use():
    arg = TensorArg("x", "bf16", ("b", "s", 64), strides=("sb", "s", 1))
    assert arg.symbols == ("b", "s", "sb")
    assert arg.itemsize == 2


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(dtype="fp8"), r"x: dtype 'fp8', expected one of \['bf16'"),
        (dict(align=12), "x: align 12, expected a power of two"),
        (dict(align=1), "x: align 1, expected a power of two of at least the 2 bytes"),
        (dict(strides=(1,)), "x: 1 strides for 2 dimensions"),
        (dict(shape=("m", -1)), "x: extent -1, expected an int >= 0 or an identifier"),
        (dict(shape=("m n", 8)), "x: extent 'm n'"),
        (dict(strides=(8.0, 1)), "x: stride 8.0"),
    ],
)
def test_tensor_arguments_that_cannot_be_meant_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        TensorArg(**(dict(name="x", dtype="bf16", shape=("m", 8)) | arguments))


def test_scalar_dtypes_are_checked():
    with pytest.raises(ValueError, match="eps: dtype 'f64', expected one of"):
        ScalarArg("eps", "f64")
