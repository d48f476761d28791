"""What a benchmark counts, what it checks before timing, and how a run copes with what fails."""

import math
import pickle
import sys
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch
from perf_cases import FakeTimer, small_inputs

import bench
import bounds
import contest
import measure
import peers
import prepare
import records

from cute_gemma.verification import PLANNERS
from cute_gemma.workloads import WORKLOADS, Case, suite_cases, workload


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
        assert run.run(options.cases)
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


class Spans:
    """The protocol "span" without a GPU."""

    def sample(self, calls):
        return {name: measure.Times(2.0, 2.0, 2.0, 3) for name in calls}, "fake"


def small_run(tmp_path, monkeypatch, timer=None, before=None, peers_asked="eager", spans=None):
    """A bench of two cases of 051 whose calls are the eager model's, on the CPU."""
    monkeypatch.setattr(
        bench,
        "our_calls",
        lambda problem, inputs, target: {records.OURS: peers.backward_eager(inputs, problem.config)},
    )
    asked = ["--workload", "051", "--cases", "1x8,2x5", "--no-launches", "--peers", peers_asked]
    options = bench.parse([*asked, "--json", str(tmp_path / "r.json"), "--resume"])
    options.target = "sm_90a"
    card = {"facts": {"gpu": "none"}, "peaks": {"gemm_tflops": 783.0, "copy_tbps": 4.29}}
    run = bench.Bench(options, timer or FakeTimer(), spans or Spans(), card, device="cpu", before=before)
    monkeypatch.setattr(bench, "host_us", host_times)
    return run, options


def host_times(calls):
    return {name: measure.HostTimes(30.0, 20.0) for name in calls}


def kept(tmp_path):
    cases = records.load(tmp_path / "r.json")["cases"]
    return {(case["seq"], case["protocol"]): case["contestants"] for case in cases}


class FailsOnce(FakeTimer):
    """Raises in the first sample, as a GPU out of memory does."""

    def sample(self, replays):
        self.sampled.append("asked")
        if self.sampled == ["asked"]:
            raise torch.OutOfMemoryError("out of memory")
        return super().sample(replays)


def test_a_case_that_fails_is_kept_as_its_reason_and_the_rest_goes_on(tmp_path, monkeypatch):
    run, options = small_run(tmp_path, monkeypatch, FailsOnce())
    assert run.run(options.cases)
    found = kept(tmp_path)
    assert found[8, "graph"] == {"ours": {"unavailable": "OutOfMemoryError: out of memory"}}
    assert found[5, "graph"]["ours"]["passed"] and found[5, "span"]["ours"]["passed"]
    assert "unavailable" in found[8, "span"]["ours"]


def test_a_profiler_that_fails_costs_the_spans_alone(tmp_path, monkeypatch):
    class NoProfiler:
        def sample(self, calls):
            raise RuntimeError("CUPTI is missing")

    run, options = small_run(tmp_path, monkeypatch, spans=NoProfiler())
    assert run.run(options.cases)
    found = kept(tmp_path)
    assert found[8, "graph"]["ours"]["passed"]
    assert found[8, "span"] == {"ours": {"unavailable": "RuntimeError: CUPTI is missing"}}


def test_a_run_that_was_cut_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    run, options = small_run(tmp_path, monkeypatch)
    run.graph_case(options.cases[0])
    before = bench.earlier(options, dict.fromkeys(bench._SAME) | {"gpu": "none"})
    timer = FakeTimer()
    rest, _ = small_run(tmp_path, monkeypatch, timer, before)
    assert rest.run(options.cases)
    assert timer.sampled == ["eager", "ours"], "the case that is there is not timed again"
    found = kept(tmp_path)
    assert set(found) == {(8, "graph"), (5, "graph"), (8, "span"), (5, "span")}
    assert set(found[8, "span"]) == {"eager", "ours"}, "calls of a run before are built anew"
    assert len(records.load(tmp_path / "r.json")["facts"]["resumed"]) == 1
    assert list(rest.tasks(options.cases)) == []


def test_another_cards_result_is_not_gone_on_with(tmp_path, monkeypatch):
    run, options = small_run(tmp_path, monkeypatch)
    run.graph_case(options.cases[0])
    with pytest.raises(ValueError, match="has gpu 'none', this run 'other'"):
        bench.earlier(options, dict.fromkeys(bench._SAME) | {"gpu": "other"})
    options.resume = False
    assert bench.earlier(options, {}) is None


def test_no_case_is_begun_once_time_is_up(tmp_path, monkeypatch, capsys):
    run, options = small_run(tmp_path, monkeypatch)
    assert not run.run(options.cases, until=-math.inf)
    assert "time is up before ('051', 1, 8)" in capsys.readouterr().out
    assert run.result["cases"] == []


def test_a_gpu_that_answers_no_more_ends_the_run_with_what_there_is(tmp_path, monkeypatch, capsys):
    def tidy():
        raise RuntimeError("an illegal memory access was encountered")

    run, options = small_run(tmp_path, monkeypatch)
    run.tidy = tidy
    assert not run.run(options.cases)
    assert list(kept(tmp_path)) == [(8, "graph")]
    assert "illegal memory access" in capsys.readouterr().out


def test_the_cpu_time_of_calls_is_kept_and_printed(tmp_path, monkeypatch, capsys):
    run, options = small_run(tmp_path, monkeypatch)
    assert run.run(options.cases)
    cost = records.load(tmp_path / "r.json")["facts"]["host_us"]["051"]
    assert cost["launches"] == 2
    assert set(cost["calls"]) == {"call", "call with out", "jit.launch", "plan", "torch add_", "torch empty_like"}
    assert cost["calls"]["plan"] == {"idle": 30.0, "in_a_row": 20.0}
    assert "call with out         30.0    20.0    10.0\n" in capsys.readouterr().out


def test_cpu_time_is_measured_of_every_call_in_turn(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: made.append("wait"))
    made = []
    times = measure.host_us({"a": lambda: made.append("a"), "b": lambda: made.append("b")}, rounds=2)
    one, row = ["wait", "{}"], ["wait", *["{}"] * 20]
    in_turn = [x.format(name) for name in "ab" for x in (*one, *row)]
    assert made == ["wait", "a", "a", "wait", "b", "b", *in_turn, *in_turn, "wait"]
    assert all(0 < taken.in_a_row < 1e6 and taken.idle > 0 for taken in times.values())


def test_a_task_that_fails_as_a_whole_is_named_in_the_file(tmp_path, monkeypatch):
    def host_cost(number):
        raise RuntimeError("no clock")

    run, options = small_run(tmp_path, monkeypatch)
    run.host_cost = host_cost
    assert run.run(options.cases)
    failed = records.load(tmp_path / "r.json")["facts"]["failed"]
    assert failed == {"host cost of 051": "RuntimeError: no clock"}
