"""The benchmarks' logic, without a GPU: what is counted, what is checked before timing, what files hold."""

import csv
import json
import math
import pickle
import sys
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "perf"))

import bench
import bounds
import contest
import measure
import peers
import prepare
import records
import roofline
import sweep

from cute_gemma.config import AttentionConfig
from cute_gemma.verification import PLANNERS
from cute_gemma.workloads import WORKLOADS, Case, suite_cases, workload

SMALL = {
    "047": AttentionConfig(hidden=64, heads=6, kv_heads=2, head_dim=32),
    "051": AttentionConfig(hidden=64, heads=4, kv_heads=1, head_dim=32, softcap=None),
}


def small_workload(number):
    return replace(WORKLOADS[number], config=SMALL[number])


def small_inputs(number, batch=2, seq=37):
    problem = small_workload(number)
    return problem, problem.make_inputs("suite", batch, seq, config=problem.config)


class FakeTimer:
    """Calls on the CPU in place of replays; every time is a microsecond."""

    def __init__(self):
        self.sampled = []

    def capture(self, call):
        outputs = tuple(out.clone() for out in call())

        def run():
            for out, new in zip(outputs, call(), strict=True):
                out.copy_(new)

        return measure.Replay(run, outputs)

    def sample(self, replays):
        self.sampled += replays
        return {name: measure.Times(1.0, 1.0, 1.0, 15) for name in replays}, "fake"


# --- bounds


@pytest.mark.parametrize("number", ["047", "051"])
def test_bytes_are_those_of_every_input_but_the_mask_and_of_every_output(number):
    problem, inputs = small_inputs(number)
    stages = problem.reference(inputs, problem.config)
    tensors = [t for name, t in inputs.tensors().items() if name != "attention_mask"]
    tensors += [getattr(stages, name) for name in problem.outputs]
    moved = sum(t.numel() * t.element_size() for t in tensors)
    assert bounds.call_work(number, problem.config, 2, 37).bytes == moved


def test_operations_of_the_largest_cases():
    forward = bounds.call_work("047", WORKLOADS["047"].config, 1, 8192)
    attention = 4 * 8192 * 8192 // 2 * 24 * 128
    assert forward.flops == 2 * 8192 * 3072 * (24 + 16 + 24) * 128 + attention
    assert bounds.call_work("051", WORKLOADS["051"].config, 1, 8192).flops == 4 * 8192 * 1536 * 640


def test_stages_are_the_launches_of_a_plan():
    for number in WORKLOADS:
        works = bounds.stage_work(number, WORKLOADS[number].config, 1, 16)
        inputs = WORKLOADS[number].make_inputs("suite", 1, 16)
        plan = PLANNERS[number](inputs, WORKLOADS[number].config, target="sm_100a")
        assert {step.stage for step in plan.steps} == set(works)


def test_the_longer_of_two_times_binds():
    work = bounds.Work(flops=2_000_000, bytes=1_000_000)
    assert work.bound_us(1.0, 1.0) == pytest.approx(2.0) and work.bound_by(1.0, 1.0) == "tensor"
    assert work.bound_us(4.0, 1.0) == pytest.approx(1.0) and work.bound_by(4.0, 1.0) == "dram"


# --- checking before timing


def _contest(outputs_by_name, number="051"):
    """Times contestants that return what `outputs_by_name` makes of the eager model's outputs."""
    problem, inputs = small_inputs(number)
    judge = contest.case_judge(problem, inputs, Case(2, 37, 0.02, 0.05))
    right = peers.PEERS[number]["eager"](inputs, problem.config)
    timer = FakeTimer()
    contestants = {
        name: contest.Contestant(lambda make=make: tuple(make(right())), judge)
        for name, make in outputs_by_name.items()
    }
    return contest.time_contestants(timer, contestants)[0], timer


def test_a_right_result_is_timed():
    entries, timer = _contest({"ours": list, "eager": list})
    assert timer.sampled == ["ours", "eager"]
    assert entries["ours"]["passed"] and entries["ours"]["us"] == 1.0


@pytest.mark.parametrize("index", range(6))
def test_a_result_with_one_wrong_output_is_not_timed(index):
    def spoil(outputs):
        outputs = [out.clone() for out in outputs]
        outputs[index] += 1
        return outputs

    entries, timer = _contest({"ours": spoil, "eager": list})
    assert timer.sampled == ["eager"]
    assert entries["ours"]["passed"] is False and "us" not in entries["ours"]
    failed = [check["name"] for check in entries["ours"]["checks"] if check["matched_ratio"] < 0.99]
    assert failed == [WORKLOADS["051"].outputs[index]]


def test_a_replay_that_leaves_an_output_unwritten_is_not_timed():
    problem, inputs = small_inputs("047")
    judge = contest.case_judge(problem, inputs, Case(2, 37, 0.1, 0.05))
    timer = FakeTimer()
    outputs = peers.forward_eager(inputs, problem.config)()
    timer.capture = lambda call: measure.Replay(lambda: None, outputs)
    entries, _ = contest.time_contestants(timer, {"ours": contest.Contestant(lambda: outputs, judge)})
    assert entries["ours"]["passed"] is False and timer.sampled == []


def test_ours_has_to_be_as_close_to_float64_as_the_eager_model_and_a_peer_has_not():
    def blur(outputs):
        noise = torch.Generator().manual_seed(0)
        return [out * (1 + 0.015 * torch.randn(out.shape, generator=noise)) for out in outputs]

    entries, timer = _contest({"ours": blur, "peer": blur})
    assert timer.sampled == ["peer"]
    assert entries["ours"]["passed"] is False and entries["peer"]["passed"] is True


def test_a_contestant_that_raises_is_named_with_its_reason():
    def fail():
        raise RuntimeError("no such kernel")

    contestants = {"fa4": contest.Contestant(peers.Unavailable("not here")), "ours": contest.Contestant(fail)}
    entries, state = contest.time_contestants(FakeTimer(), contestants)
    assert entries["fa4"] == {"unavailable": "Unavailable: not here"}
    assert entries["ours"] == {"unavailable": "RuntimeError: no such kernel"}
    assert state == "nothing was timed"


def test_a_launch_has_to_repeat_the_bits_that_were_found_right():
    tensor = torch.randn(5)
    judge = contest.bits_judge({"out": tensor})
    assert all(check.passed for check in judge([tensor.clone()]))
    other = tensor.clone()
    other[3] = math.nextafter(other[3].item(), math.inf)
    assert not any(check.passed for check in judge([torch.nextafter(tensor, tensor + 1)]))
    assert not any(check.passed for check in judge([torch.full_like(tensor, math.nan)]))


# --- timing


def test_spans_run_from_the_first_start_to_the_last_end_of_each_call():
    activities = [
        ("flush", 0, 5), ("a", 10, 14), ("b", 11, 20), ("a", 16, 18),
        ("flush", 30, 35), ("c", 40, 43),
    ]  # fmt: skip
    assert measure.split_spans(list(reversed(activities)), 2) == [10, 3]


@pytest.mark.parametrize(
    "activities", [[("flush", 0, 1), ("a", 2, 3)], [("flush", 0, 1), ("flush", 2, 3), ("a", 4, 5)], []]
)
def test_spans_that_cannot_be_told_apart_are_an_error(activities):
    with pytest.raises(RuntimeError, match="want 2 calls"):
        measure.split_spans(activities, 2)


def test_percentiles_bracket_the_median():
    times = measure.Times.of([5.0, 1.0, 3.0, 2.0, 4.0, 100.0, 6.0, 7.0, 8.0, 9.0, 0.5])
    assert (times.p10, times.us, times.p90, times.samples) == (1.0, 5.0, 9.0, 11)


# --- peers


def test_eager_forward_is_the_reference():
    problem, inputs = small_inputs("047")
    wide = inputs.to(torch.float64)
    ours, theirs = (
        peers.forward_eager(wide, problem.config)()[0],
        problem.reference(wide, problem.config).output,
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_flex_attention_computes_the_same_uncompiled():
    problem, inputs = small_inputs("047")
    config = replace(problem.config, softcap=2.0)  # low, so that the cap matters
    out = peers.forward_flex(inputs, config, compiler=lambda function, **_: function)()[0]
    exact = problem.reference(inputs.to(torch.float64), config).output
    eager = problem.reference(inputs, config).output
    judge = contest.reference_judge([("output", eager, exact)], Case(2, 37, 0.05, 0.05))
    assert judge([out])[0].suite_pass


def test_projection_of_weights_side_by_side_is_the_reference():
    problem, inputs = small_inputs("047")
    wide = inputs.to(torch.float64)
    for ours, name in zip(
        peers.project(*peers._projection_arguments(wide), problem.config), "qkv", strict=True
    ):
        torch.testing.assert_close(ours, getattr(problem.reference(wide, problem.config), name))


def test_a_missing_flash_attention_is_unavailable(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(peers.Unavailable, match="not installed"):
        peers.flash_attention()


# --- cases and kernels


def test_all_32_cases_are_chosen_unless_told_otherwise():
    assert len(prepare.choose_cases(None, None, False)) == 32
    assert prepare.choose_cases("047", "1x128,2x293", False) == [("047", 1, 128), ("047", 2, 293)]
    for number, batch, seq in prepare.choose_cases(None, None, True):
        assert (batch, seq) in {(case.batch_size, case.seq_len) for case in suite_cases(number)}


@pytest.mark.parametrize("target", ["sm_100a", "sm_90a"])
def test_what_is_compiled_beforehand_is_what_the_calls_launch(target):
    for number, kinds in (("047", ("suite", "causal")), ("051", ("suite",))):
        compiled = prepare.kernels_of(number, 1, 131, target)
        for kind in kinds:
            inputs = workload(number).make_inputs(kind, 1, 131)
            plan = PLANNERS[number](inputs, workload(number).config, target=target)
            assert {step.kernel for step in plan.steps} <= set(compiled)
        assert pickle.loads(pickle.dumps(compiled)) == compiled  # they travel to the processes that compile


def test_a_compilation_that_fails_is_named_and_the_rest_goes_on(monkeypatch, capsys):
    class Now:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def submit(self, function, *arguments):
            done = Future()
            try:
                done.set_result(function(*arguments))
            except Exception as error:
                done.set_exception(error)
            return done

    compiled = []

    def compile_kernel(kernel, target):
        compiled.append(kernel)
        if kernel == "bad":
            raise RuntimeError("does not fit")

    monkeypatch.setattr(prepare, "pool", Now)
    monkeypatch.setattr(prepare, "kernels_of", lambda *_: ["good", "bad", "good"])
    monkeypatch.setattr(prepare, "compile_kernel", compile_kernel)
    monkeypatch.setattr(peers, "warm", lambda number, name, *_, **__: f"{name} has no GPU")
    prepare.compile_all([("051", 1, 131), ("047", 1, 128)], "sm_90a", ["eager", "compile", "fa4"])
    out = capsys.readouterr().out
    assert sorted(compiled) == ["bad", "good"]
    assert "bad: RuntimeError: does not fit" in out
    assert "compile ('051', 1, 131): compile has no GPU" in out and "fa4 ('047', 1, 128)" in out
    assert "2 kernels and 2 cases of peers" in out


def test_without_a_gpu_nothing_is_timed(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench.py", "--quick"])
    assert bench.main() == 2
    captured = capsys.readouterr()
    assert "no GPU" in captured.err and captured.out == ""


@pytest.mark.parametrize("number", ["051", pytest.param("047", marks=pytest.mark.slow)])
def test_a_whole_run_on_emulated_kernels_leaves_a_checked_result(number, monkeypatch, tmp_path, capsys):
    """Times are made up; everything else, the kernels' results and their checks included, is as on a GPU."""
    monkeypatch.setattr(bench, "LARGEST", (1, 16))
    path = tmp_path / "result.json"
    asked = ["--workload", number, "--cases", "1x16", "--peers", "eager", "--json", str(path)]
    options = bench.parse(asked)
    options.target = "sm_100a"

    class FakeSpans:
        def sample(self, calls):
            for call in calls.values():
                assert all(torch.isfinite(out).all() for out in call())
            return {name: measure.Times(2.0, 2.0, 2.0, 3) for name in calls}, "fake"

    card = {"facts": {"gpu": "none"}, "peaks": {"gemm_tflops": 783.0, "copy_tbps": 4.29}}
    run = bench.Bench(options, FakeTimer(), FakeSpans(), card, device="cpu")
    with torch.no_grad():
        for case in options.cases:
            run.graph_case(case)
        run.launches(number)
        run.span_cases()
    cases = records.load(path)["cases"]
    assert [case for case in cases if not records.ours_right(case)] == []
    names = {"051": {"eager", "ours"}, "047": {"eager", "ours", "ours, mask tensor"}}
    assert set(cases[0]["contestants"]) == names[number]
    assert [case["protocol"] for case in cases if not case["launch"]] == ["graph", "span"]
    launches = {
        "051": ["norm backward", "gradients"],
        "047": ["qkv projection", "output projection", "attention", "attention, no softcap"],
    }
    assert [case["launch"] for case in cases if case["launch"]] == launches[number]
    assert "WRONG" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["--peers", "cublas"], ["--workload", "052"], ["--protocol", "events"]]
)
def test_options_that_mean_nothing_are_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        bench.parse(arguments)
    assert arguments[1] in capsys.readouterr().err


# --- records


def timed(us, passed=True):
    return {"us": us, "p10": us * 0.9, "p90": us * 1.1, "samples": 15, "passed": passed, "checks": []}


def made_case(number="051", batch=1, seq=131, **contestants):
    work = bounds.call_work(number, WORKLOADS[number].config, batch, seq)
    return {
        "workload": number, "batch": batch, "seq": seq, "launch": None, "protocol": "graph",
        "flops": work.flops, "bytes": work.bytes,
        "bound_us": work.bound_us(783, 4.29), "bound_by": work.bound_by(783, 4.29),
        "state": "", "contestants": contestants or {"ours": timed(10.0), "compile": timed(20.0)},
    }  # fmt: skip


def made_result(*cases):
    return {
        "schema": records.SCHEMA, "made": "2000-01-01", "seed": 0, "protocols": measure.PROTOCOLS,
        "facts": {"gpu": "made up"}, "peaks": {"gemm_tflops": 783.0, "copy_tbps": 4.29},
        "cases": list(cases), "summary": {},
    }  # fmt: skip


def test_a_result_survives_its_file(tmp_path):
    result = made_result(made_case())
    records.save(result, tmp_path / "results" / "r.json")
    assert records.load(tmp_path / "results" / "r.json") == result
    assert result["summary"]["graph"]["051"]["cases"] == 1


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda r: r.pop("peaks"), "lacks 'peaks'"),
        (lambda r: r.update(extra=1), "unknown 'extra'"),
        (lambda r: r.update(schema=0), "schema"),
        (lambda r: r["cases"][0].update(batch="1"), r"cases\[0\]\['batch'\]: got str"),
        (lambda r: r["cases"][0].update(protocol="wall"), "'wall'"),
        (lambda r: r["cases"][0]["contestants"]["ours"].update(p10=11.0), "p10"),
        (lambda r: r["cases"][0]["contestants"]["ours"].update(passed=False), "wrong and has times"),
        (lambda r: r["cases"][0]["contestants"]["ours"].pop("checks"), "lacks 'passed' or 'checks'"),
    ],
)
def test_a_result_of_another_form_is_refused(spoil, message, tmp_path):
    result = made_result(made_case())
    spoil(result)
    (tmp_path / "r.json").write_text(json.dumps(result))
    with pytest.raises(ValueError, match=message):
        records.load(tmp_path / "r.json")


def test_the_best_peer_is_the_fastest_right_one():
    wrong = {"passed": False, "checks": []}
    case = made_case(
        ours=timed(10.0), eager=timed(50.0), compile=timed(20.0), flex=wrong, fa4={"unavailable": "-"}
    )
    assert records.best_peer(case) == ("compile", 20.0)
    assert records.ratio(case) == pytest.approx(0.5)
    assert records.wrong(case) == ["flex"]
    assert "0.500 x compile" in records.case_line(case) and "flex WRONG" in records.case_line(case)


def test_a_suite_mean_needs_all_16_cases():
    cases = [made_case("051", c.batch_size, c.seq_len) for c in suite_cases("051")]
    assert records.suite_means(cases, "051", "graph") == pytest.approx({"ours": 10.0, "compile": 20.0})
    assert records.suite_means(cases[1:], "051", "graph") == {}
    del cases[3]["contestants"]["compile"]
    assert records.suite_means(cases, "051", "graph") == pytest.approx({"ours": 10.0})


def test_a_case_is_right_only_if_all_of_ours_was_timed():
    assert records.ours_right(made_case())
    assert not records.ours_right(made_case(compile=timed(1.0)))
    assert not records.ours_right(
        made_case(**{"ours": timed(1.0), "ours, mask tensor": {"unavailable": "-"}})
    )


def test_the_table_names_every_case_and_the_mean():
    result = made_result(*(made_case("051", c.batch_size, c.seq_len) for c in suite_cases("051")))
    result["summary"] = records.summarise(result["cases"])
    text = records.tables(result)
    assert "051 (16,541)" in text and "share of compile's: ours 0.500" in text


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
