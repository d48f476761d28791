"""clusterlaunchcontrol: running CTAs take over those that have not started, each exactly once."""

import numpy as np
import pytest
from gemm_ptx import MODULE, aligned
from ptx_runner import run

BODY = """
ld.param.u64 %d1, [p0]; mov.u32 %r1, %tid.x; mov.u32 %r2, smem; mov.u32 %r3, %ctaid.x; mov.u32 %r9, 0;
setp.ne.u32 %p1, %r1, 0; @%p1 bra INIT; mbarrier.init.shared.b64 [%r2+16], 1;
fence.mbarrier_init.release.cluster; INIT: bar.sync 0;
NEXT:
@%p1 bra WORKED; mul.wide.u32 %d2, %r3, 4; add.u64 %d3, %d1, %d2; red.relaxed.gpu.global.add.u32 [%d3], 1;
mbarrier.arrive.expect_tx.shared.b64 _, [%r2+16], 16;
clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r2], [%r2+16]; WORKED:
WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r2+16], %r9; @!%p2 bra WAIT;
ld.shared.v2.b64 {%d4, %d5}, [%r2]; mov.b128 %q1, {%d4, %d5};
clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p3, %q1; @!%p3 bra END;
clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r3, %q1;
xor.b32 %r9, %r9, 1; bar.sync 0; bra NEXT;
END:
"""


@pytest.mark.parametrize("schedule", ["lazy", "eager", "random:1"])
@pytest.mark.parametrize("sms", [1, 3, 100])
def test_every_cta_is_worked_on_once(schedule, sms):
    seen = aligned(40, np.uint32)
    run(BODY, seen, block=64, grid=40, module=MODULE, dynamic_smem=32, sm_count=sms, schedule=schedule)
    assert (seen == 1).all()
