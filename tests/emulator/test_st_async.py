"""st.async: stores to a CTA of the cluster that complete on an mbarrier there."""

import numpy as np
import pytest
from gemm_ptx import MODULE, aligned
from ptx_runner import run

from cute_gemma import emulator

# Each of two CTAs sends four words to the other, which waits for them and writes them out. smem: 16 bytes to
# receive, an mbarrier.
BODY = """
ld.param.u64 %d1, [p0]; mov.u32 %r1, %tid.x; mov.u32 %r2, smem; mov.u32 %r3, %cluster_ctarank;
setp.ne.u32 %p1, %r1, 0; @%p1 bra INIT; mbarrier.init.shared.b64 [%r2+16], 1;
fence.mbarrier_init.release.cluster; mbarrier.arrive.expect_tx.shared.b64 _, [%r2+16], 16;
INIT: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
@%p1 bra END;
xor.b32 %r4, %r3, 1; mapa.shared::cluster.u32 %r5, %r2, %r4; add.u32 %r6, %r5, 16; mul.lo.u32 %r7, %r3, 100;
{ .reg .v4 .s32 abcd; mov.s32 abcd.x, %r7; add.s32 abcd.y, %r7, 1; add.s32 abcd.z, %r7, 2; add.s32 abcd.w, %r7, 3;
st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.s32 [%r5], abcd, [%r6]; }
WAIT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [%r2+16], 0; @!%p2 bra WAIT;
ld.shared.v4.u32 {%r10, %r11, %r12, %r13}, [%r2];
mul.wide.u32 %d2, %r3, 16; add.u64 %d3, %d1, %d2; st.global.v4.u32 [%d3], {%r10, %r11, %r12, %r13};
END: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
"""
TWO_CTAS = {"block": 32, "grid": 2, "cluster": 2, "module": MODULE, "dynamic_smem": 32}


@pytest.mark.parametrize("schedule", ["lazy", "eager", "random:1"])
def test_words_arrive_in_the_other_cta(schedule):
    seen = aligned(8, np.uint32)
    run(BODY, seen, schedule=schedule, **TWO_CTAS)
    assert seen.tolist() == [100, 101, 102, 103, 0, 1, 2, 3]


@pytest.mark.parametrize("schedule", ["lazy", "eager"])
@pytest.mark.parametrize(
    "old, new, error",
    [
        ("@!%p2 bra WAIT;", "", emulator.EmulationError),
        ("[%r2+16], 16;\nINIT", "[%r2+16], 8;\nINIT", emulator.DeadlockError),
        ("abcd, [%r6]", "abcd, [%r2+16]", emulator.BarrierError),
        ("[%r5], abcd", "[%r5+8], abcd", emulator.MisalignedAccess),
    ],
)
def test_faults_are_found(schedule, old, new, error):
    assert BODY.count(old) == 1
    with pytest.raises(error):
        run(BODY.replace(old, new), aligned(8, np.uint32), schedule=schedule, **TWO_CTAS)


@pytest.mark.parametrize("words", ["v4.b64 [%r5], {%d1, %d1, %d1, %d1}", "b16 [%r5], %h1", "v2.s32 [%r5], %r7"])
def test_other_forms_are_refused(words):
    body = f"{{ .reg .b64 x; }} st.async.shared::cluster.mbarrier::complete_tx::bytes.{words}, [%r6];"
    with pytest.raises(emulator.UnsupportedInstruction):
        run(body, **TWO_CTAS)
