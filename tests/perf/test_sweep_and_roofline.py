"""Tunings against each other, a profiler's rows, models and pictures."""

import csv
from dataclasses import replace
from types import SimpleNamespace

import pytest
from perf_cases import made_case, made_result

import bounds
import records
import roofline
import sweep

from cute_gemma.verification import PLANNERS
from cute_gemma.workloads import WORKLOADS, suite_cases, workload


# --- sweeps


def test_fields_become_every_combination_and_refused_ones_say_why():
    from cute_gemma.kernels.sm90.tuning import GemmTuning

    fields = sweep.parse_fields(["tile_n=128,100", "stages=None,4"])
    assert fields == {"tile_n": [128, 100], "stages": [None, 4]}
    found = dict(sweep.tunings(GemmTuning(), fields))
    assert len(found) == 4 and found["tile_n=128 stages=4"].stages == 4
    assert "tile_n: 100" in str(found["tile_n=100 stages=None"])
    with pytest.raises(TypeError):
        list(sweep.tunings(GemmTuning(), {"tyle": [1]}))
    with pytest.raises(ValueError, match="NAME=VALUE"):
        sweep.parse_fields(["tile_n"])


def test_fields_may_follow_the_stage():
    """As README.md writes its commands."""
    options = sweep.parse(["051", "1x131,1x997", "--stage", "gradients", "tile_n=64,128", "stages=4"])
    assert options.fields == {"tile_n": [64, 128], "stages": [4]} and options.stage == "gradients"
    assert options.sizes == [("051", 1, 131), ("051", 1, 997)] and options.inputs == "suite"
    profiled = sweep.parse(["047", "1x128", "--ncu", "out.csv"])
    assert profiled.fields == {} and profiled.ncu.name == "out.csv" and profiled.inputs == "causal"


@pytest.mark.parametrize("target", ["sm_100a", "sm_90a"])
def test_another_tuning_keeps_the_tensors_and_gets_scratch_of_its_own_size(target):
    inputs = workload("047").make_inputs("causal", 1, 131)
    plan = PLANNERS["047"](inputs, workload("047").config, target=target)
    step = next(step for step in plan.steps if step.stage == "output projection")
    base = replace(step.kernel.tuning, stream_k=False, **({"share": 1} if target == "sm_90a" else {}))
    for stream_k in (False, True):
        other = sweep.retuned(plan, step, replace(base, stream_k=stream_k, cluster_m=1)).steps[0]
        scratch = [
            arg.name for arg in other.kernel.signature() if arg.name not in ("attn", "o_proj_weight", "out")
        ]
        assert bool(scratch) == stream_k
        assert other.tensors["out"].data_ptr() == plan.output.data_ptr()
        for arg in other.kernel.signature():
            assert sweep._fits(other.tensors[arg.name].shape, arg.shape)


def ncu_text(rows, units=None):
    """Nsight Compute's raw page for rows of values by column of sweep.METRICS."""
    units = {"duration_us": "us", "sm_ghz": "Ghz", "dram_bytes": "Mbyte"} | (units or {})
    header = ["ID", "Kernel Name", *sweep.METRICS.values()]
    lines = [header, ["", "", *(units.get(column, "%") for column in sweep.METRICS)]]
    lines += [[str(i), f"kernel_{i}(int)", *row] for i, row in enumerate(rows)]
    return "==PROF== Connected\n" + "\n".join(",".join(f'"{cell}"' for cell in line) for line in lines)


FIGURES = ["1,234.5", "1.7", "70", "35", "22", "40", "43", "33", "5", "2.5"]
LAUNCH = {"workload": "047", "batch": 1, "seq": 128, "inputs": "causal", "stage": "attention"}


def test_profiler_rows_are_read_with_their_units():
    (row,) = sweep.parse_ncu(ncu_text([FIGURES]), [LAUNCH])
    assert row["kernel"] == "kernel_0" and row["stage"] == "attention"
    assert (row["duration_us"], row["sm_ghz"], row["tensor_pct"]) == (1234.5, 1.7, 70.0)
    assert row["dram_bytes"] == pytest.approx(2.5e6)
    (row,) = sweep.parse_ncu(ncu_text([FIGURES], {"duration_us": "ns", "sm_ghz": "cycle/second"}), [LAUNCH])
    assert row["duration_us"] == pytest.approx(1.2345) and row["sm_ghz"] == pytest.approx(1.7e-9)


@pytest.mark.parametrize(
    "text, launches, message",
    [
        (ncu_text([FIGURES, FIGURES]), [LAUNCH], "profiled 2 launches, want 1"),
        (ncu_text([["1", ""] + FIGURES[2:]]), [LAUNCH], "gave no sm__cycles"),
        (ncu_text([FIGURES], {"duration_us": "fortnight"}), [LAUNCH], "fortnight"),
        ("==ERROR== no counters", [LAUNCH], "no table"),
    ],
)
def test_a_profile_that_is_not_whole_is_an_error(text, launches, message):
    with pytest.raises(RuntimeError, match=message):
        sweep.parse_ncu(text, launches)


# --- roofline


@pytest.mark.parametrize(
    "opcode, special, lanes",
    [
        ("ex2.approx.ftz.f32", True, 0), ("tanh.approx.f32", True, 0), ("div.rn.f32", True, 0),
        ("div.s32", False, 0), ("fma.rn.f32x2", False, 2), ("add.f32", False, 1), ("mul.rn.bf16x2", False, 1),
        ("mul.lo.s32", False, 1), ("add.s32", False, 0), ("mov.b64", False, 0),
        ("cvt.rn.bf16x2.f32", False, 0),
    ],
)  # fmt: skip
def test_opcodes_take_their_units(opcode, special, lanes):
    assert roofline.is_special(opcode) == special
    assert roofline.fma_lanes(opcode) == lanes


def counts(**given):
    zero = dict.fromkeys(("warp_instructions", "issued", "mufu", "fma", "mma_flops", "operand_bytes"), 0)
    zero |= dict.fromkeys(("wavefronts", "tma_bytes", "sectors"), 0)
    return roofline.Counts(**({"stage": "attention", "kernel": "K", "ctas": 148} | zero | given))


CARD = bounds.CARDS["sm_100a"]


@pytest.mark.parametrize(
    "given, unit",
    [
        ({"mma_flops": 8192 * 1000 * 148}, "tensor"),
        ({"mufu": 16 * 1000 * 148}, "mufu"),
        ({"fma": 128 * 1000 * 148}, "fma"),
        ({"issued": 4 * 1000 * 148}, "issue"),
        ({"wavefronts": 1000 * 148}, "smem"),
        ({"operand_bytes": 128 * 1000 * 148}, "smem"),
    ],
)
def test_a_thousand_cycles_on_every_sm(given, unit):
    times = roofline.unit_times(counts(**given), CARD, 1.0)
    assert times[unit] == pytest.approx(1.0) and roofline.binding(times) == unit
    assert roofline.unit_times(counts(**given), CARD, 2.0)[unit] == pytest.approx(0.5)
    assert roofline.unit_times(counts(ctas=74, **given), CARD, 1.0)[unit] == pytest.approx(2.0)
    assert roofline.unit_times(counts(ctas=1000, **given), CARD, 1.0)[unit] == pytest.approx(1.0)


def test_memory_does_not_follow_the_clock():
    moved = counts(sectors=8_000_000 // 32)
    assert roofline.unit_times(moved, CARD, 1.5)["dram"] == pytest.approx(1.0)
    assert roofline.unit_times(moved, CARD, 1.85)["dram"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    "tile_m, tile_n, rate",
    [(128, 64, 0.66), (128, 128, 1.0), (256, 64, 0.8), (256, 128, 1.0), (128, 256, 1.0)],
)
def test_operands_bind_narrow_tiles_as_measured_on_the_hardware(tile_m, tile_n, rate):
    """Published rates of tcgen05.mma from shared memory, as shares of the peak."""
    kernel = SimpleNamespace(tuning=SimpleNamespace(tile_m=tile_m, tile_n=tile_n))
    bytes_a_cycle = roofline.operand_bytes_a_flop(kernel, "sm_100a") * CARD.mma_flops
    assert min(1.0, CARD.smem_bytes / bytes_a_cycle) == pytest.approx(rate, abs=0.01)


def test_emulated_counts_cover_the_work(tmp_path):
    path = tmp_path / "counts.json"
    cases = [("051", 1, 16)]
    (case,) = roofline.counted(cases, lambda number: "suite", "sm_100a", path)
    norm, products = (roofline.Counts(**launch) for launch in case["launches"])
    work = bounds.stage_work("051", WORKLOADS["051"].config, 1, 16)
    assert norm.mma_flops == 0 and norm.fma > 0
    assert products.mma_flops >= work["gradients"].flops
    assert products.sectors * 32 >= work["gradients"].bytes * 0.99
    assert norm.sectors * 32 >= work["norm backward"].bytes
    assert 0 < products.issued < products.warp_instructions
    stamp = path.stat().st_mtime_ns
    assert roofline.counted(cases, lambda number: "suite", "sm_100a", path) == [case]
    assert path.stat().st_mtime_ns == stamp  # the same kernels are not emulated again


def modelled_case(number="047", batch=1, seq=128):
    launches = [vars(counts(mma_flops=8192 * 1850 * 148)), vars(counts(mufu=16 * 185 * 148))]
    return {"workload": number, "batch": batch, "seq": seq, "inputs": "causal", "launches": launches}


def test_a_model_says_that_it_is_one_and_adds_up_what_binds():
    result = roofline.model([modelled_case()], CARD)
    assert "MODELLED" in result["what"] and "MODELLED" in roofline.model_table(result)
    assert result["cases"][0]["bound_us"]["1.85"] == pytest.approx(1.1)
    assert [launch["bound_by"]["1.5"] for launch in result["cases"][0]["launches"]] == ["tensor", "mufu"]
    assert result["suite_mean_bound_us"] == {}
    whole = [modelled_case("047", c.batch_size, c.seq_len) for c in suite_cases("047")]
    result = roofline.model(whole, CARD)
    assert result["suite_mean_bound_us"]["047"]["1.85"] == pytest.approx(1.1)
    assert "155.9 and 177.5 us" in roofline.model_table(result)
    assert roofline.model(whole, bounds.CARDS["sm_90a"])["board_b200_us"] is None


def test_measurements_are_set_beside_the_model(tmp_path):
    path = tmp_path / "ncu.csv"
    sweep.write_csv(path, sweep.parse_ncu(ncu_text([FIGURES]), [LAUNCH]))
    assert next(csv.reader(path.open())) == list(sweep.COLUMNS)
    case = modelled_case() | {"launches": [vars(counts(mma_flops=4096 * 1_000_000 * 132))]}
    (row,) = roofline.compare([case], bounds.CARDS["sm_90a"], roofline.measured(path))
    assert row["measured"]["bound_by"] == "tensor" and row["measured"]["share"]["mufu"] == pytest.approx(0.35)
    assert row["modelled_share"]["tensor"] == pytest.approx(1_000_000 / 1700 / 1234.5)
    assert "70% / 48%" in roofline.compare_table([row])
    assert roofline.compare([modelled_case(seq=129)], bounds.CARDS["sm_90a"], roofline.measured(path)) == []


def test_pictures_are_drawn(tmp_path):
    pytest.importorskip("matplotlib").use("Agg")
    import plots

    result = made_result(*(made_case("051", c.batch_size, c.seq_len) for c in suite_cases("051")))
    result["summary"] = records.summarise(result["cases"])
    modelled = roofline.model([modelled_case()], CARD) | {"measured": []}
    drawn = plots.draw(result, tmp_path, "bench") + plots.draw(modelled, tmp_path, "b200")
    assert len(drawn) == 3
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
