"""Planted faults in a shipped kernel are found: a sample of what perf/mutate.py runs in full."""

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("cutlass")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "perf"))

import mutate  # noqa: E402
import mutations  # noqa: E402
from mutation_targets import targets  # noqa: E402

KILLED = (mutate.REPORT, mutate.DEADLOCK, mutate.WRONG)
SCHEDULES = ("lazy", "random:1")
# On one target a kernel with everything: TMA both ways, mbarriers, named barriers, TMEM, several tiles a CTA;
# on the other, one with what differs.
KINDS = {
    "sm_100a": (
        "drop mbarrier wait", "flip parity", "drop tcgen05.wait", "drop griddepcontrol.wait", "drop wait_group",
        "wait_group for one less", "drop expect_tx", "drop arrive", "duplicate expect_tx", "duplicate arrive",
        "arrival count + 1", "drop commit", "duplicate commit", "drop fence", "drop tcgen05.fence",
        "drop bar.sync", "drop bar.warp", "duplicate barrier", "swap two barriers", "drop dealloc",
        "shift tx count", "shift stage index", "shift descriptor offset", "flip swizzle bits",
        "shift TMEM column", "shift TMA coordinate", "shift shared address"),
    "sm_90a": (
        "drop mbarrier wait", "drop wait_group", "wait_group for one less", "drop arrive", "duplicate arrive",
        "drop commit", "drop fence", "drop wgmma.fence", "drop bar.warp", "shift descriptor offset",
        "flip swizzle bits", "shift shared address"),
}  # fmt: skip


def target(arch):
    return targets(arch)["output projection"]


@pytest.fixture(scope="module")
def prepared():
    return {arch: mutate.prepare(target(arch)) for arch in KINDS}


@pytest.fixture(scope="module")
def cases(prepared):
    return prepared["sm_100a"]


@pytest.mark.parametrize(("arch", "kind"), [(arch, kind) for arch in KINDS for kind in KINDS[arch]])
def test_mutants_are_killed(prepared, arch, kind):
    found = [m for m in mutate.mutants_of(prepared[arch], 2, 0) if m.kind == kind]
    assert found, "the kernel has a statement to change"
    known = mutate.equivalences()
    outcomes = [mutate.run_mutant(m, prepared[arch], SCHEDULES) for m in found]
    alive = [
        o for o in outcomes if o.outcome not in KILLED and not any(e.covers(target(arch), o) for e in known)
    ]
    assert not alive
    assert any(o.outcome in KILLED for o in outcomes)


@pytest.mark.parametrize("arch", KINDS)
def test_the_kernel_itself_is_not_reported(prepared, arch):
    schedules = ("lazy", "eager", "random:9")
    assert all(case.run(schedule=schedule) for case in prepared[arch] for schedule in schedules)


def test_a_mutant_that_never_ends_is_stopped(cases):
    site = "mbarrier.try_wait.parity.shared.b64#1"
    (wait,) = [s for s in mutations.statements(cases[0].launch.ptx) if s.site == site]
    passed = wait.text.split()[1].rstrip(",")
    never = mutations.Mutant(
        mutations.SYNC, "spin", wait.site, wait.index + 1, wait.text,
        ((wait.index, wait.line(f"setp.ne.u32 {passed}, 0, 0;")),),
    )  # fmt: skip
    assert mutate.run_mutant(never, cases, ("lazy",)).outcome == mutate.DEADLOCK


def test_every_mutant_differs_from_the_kernel_and_from_every_other(cases):
    ptx = cases[0].launch.ptx
    found = mutations.mutants(ptx)
    texts = {m.apply(ptx) for m in found}
    assert ptx not in texts and len(texts) == len(found)
    assert len({m.key for m in found}) == len(found)


def test_a_sample_holds_every_smaller_one_and_all_of_synchronisation(cases):
    found = mutations.mutants(cases[0].launch.ptx)
    small, large = (set(m.key for m in mutations.sample(found, n)) for n in (3, 7))
    assert small < large
    assert {m.key for m in found if m.group == mutations.SYNC} <= small


def test_equivalent_mutants_name_a_rule_and_a_kernel():
    known = mutate.equivalences()
    assert known
    for line in known:
        assert re.search(r'"[\w .:,:-]+"', line.rule), f"no section of the PTX ISA in quotes: {line.rule}"
        arches = [a for a in ("sm_100a", "sm_90a") if mutate.fnmatch.fnmatchcase(a, line.target)]
        assert any(mutate.fnmatch.fnmatchcase(name, line.kernel) for a in arches for name in targets(a))
