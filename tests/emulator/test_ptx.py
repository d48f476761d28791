"""The PTX parser: what it reads from a module, and what it refuses with a line number."""

import pytest

from cute_gemma.emulator import PtxSyntaxError, ptx

MODULE = """//
.version 9.4
.target sm_100a
.address_size 64
.extern .shared .align 1024 .b8 dynamic[];
.global .align 4 .b8 table[8] = {1, 2, 0xff};
.const .align 8 .b64 pair[2] = {-1, 5};
.extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);
.func (.param .b32 r) helper (.param .b64 a) { .reg .b32 %x; ret; }

.visible .entry kernel(
	.param .align 64 .b8 kernel_param_0[128],
	.param .u8 kernel_param_1,
	.param .u64 .ptr .global .align 16 kernel_param_2,
	.param .f32 kernel_param_3
)
.reqntid 128, 1, 1
.explicitcluster
.reqnctapercluster 2
{
	.reg .pred 	%p<3>;
	.reg .b32 	%r<10>;
	.reg .b64 	%rd<4>;
	.shared .align 16 .b8 fixed[256];
	.loc	1 17 5
	@!%p1 ld.shared.v2.b32 	{%r1, _}, [%r2+-8];
$L__BB0_1: add.s32 %r3, %r1, -0x10; setp.lt.s32 %p1|%p2, %r3, 5;
	{ .reg .pred P1; .reg .b32 %r2;
	WAIT: mov.b32 %r2, 0f3F800000;
	@P1 bra.uni WAIT; }
	cp.async.bulk.tensor.2d.shared::cluster.global.tile [%r4], [%rd1, {%r5, %r6}], [%r7];
	/* two
	   lines */ mov.u64 %rd2, kernel_param_2+4; mov.b64 %rd3, 0d3FF0000000000000;
	and.pred %p1, !%p2, %p1;
	st.shared.b32 [dynamic+12], 010;
	ret;
}
.file	1 "/src/kernel.py"
"""


@pytest.fixture(scope="module")
def module():
    return ptx.parse(MODULE)


@pytest.fixture(scope="module")
def instructions(module):
    return module.kernels["kernel"].instructions


def test_header_and_variables(module):
    assert (module.version, module.target, module.files) == ("9.4", "sm_100a", {1: "/src/kernel.py"})
    assert module.variables["dynamic"].extern and module.variables["dynamic"].align == 1024
    assert module.variables["table"].data == bytes([1, 2, 255, 0, 0, 0, 0, 0])
    assert module.variables["pair"].data == b"\xff" * 8 + (5).to_bytes(8, "little")
    assert list(module.kernels) == ["kernel"]


def test_parameters_are_packed_at_their_alignment(module):
    kernel = module.kernels["kernel"]
    assert [(p.offset, p.size) for p in kernel.params.values()] == [(0, 128), (128, 1), (136, 8), (144, 4)]
    assert kernel.param_bytes == 148
    assert kernel.directives == {"reqntid": (128, 1, 1), "explicitcluster": (), "reqnctapercluster": (2,)}
    assert kernel.variables["fixed"].size == 256


def test_guards_vectors_and_addresses(instructions):
    load = instructions[0]
    assert load.guard.name == "%p1" and load.guard_neg and load.loc == (1, 17)
    vector, address = load.operands
    assert vector.items[0].name == "%r1" and vector.items[1] is ptx.SINK
    assert address.base.name == "%r2" and address.offset == -8
    assert instructions[1].operands[2] == ptx.Imm(-16)
    pair = instructions[2].operands[0]
    assert (pair.first.name, pair.second.name) == ("%p1", "%p2")


def test_blocks_scope_registers_and_labels(instructions):
    outer, inner = instructions[0].operands[1].base, instructions[3].operands[0]
    assert outer.name == inner.name == "%r2" and outer.id != inner.id
    branch = instructions[4]
    assert branch.guard.name == "P1" and branch.scope.label("WAIT") == 3
    assert instructions[0].scope.label("WAIT") is None and branch.scope.label("$L__BB0_1") == 1
    assert instructions[3].operands[1] == ptx.Imm(0x3F800000, "f32")


def test_tensor_addresses_symbols_and_literals(instructions):
    copy = instructions[5]
    assert copy.operands[1].base.name == "%rd1" and [r.name for r in copy.operands[1].coords] == [
        "%r5",
        "%r6",
    ]
    assert copy.words[-2:] == ("global", "tile") and "shared::cluster" in copy.words
    assert instructions[6].operands[1] == ptx.Symbol("kernel_param_2", 4)
    assert instructions[7].operands[1] == ptx.Imm(0x3FF0000000000000, "f64")
    assert isinstance(instructions[8].operands[1], ptx.Not)
    store = instructions[9]
    assert store.operands[0].offset == 12 and store.operands[1] == ptx.Imm(8)


def test_lines_are_those_of_the_text(instructions):
    lines = MODULE.split("\n")
    for ins in instructions:
        assert ins.op in lines[ins.line - 1]


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("add.s32 %r1, %r2 %r3;", "expected"),
        ("mov.b32 %r1, #;", "unexpected character"),
        (".frobnicate 3;", "directive not understood"),
        ("@%r1 ret;", "guard is not a predicate"),
        (".reg .b7 %x;", "register type"),
    ],
)
def test_errors_name_the_line(statement, message):
    text = ".version 9.0\n.target sm_100a\n.entry k()\n{\n.reg .b32 %r<4>;\n" + statement + "\nret;\n}\n"
    with pytest.raises(PtxSyntaxError, match=message) as caught:
        ptx.parse(text)
    assert caught.value.line == 6


def test_an_unfinished_kernel_is_refused():
    with pytest.raises(PtxSyntaxError):
        ptx.parse(".version 9.0\n.target sm_100a\n.entry k()\n{\nret;\n")
