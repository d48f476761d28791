"""Both workloads on whatever supported GPU there is: the suite's cases, other inputs, and every way to launch."""

import math
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import cute_gemma
from cute_gemma import jit, workspace
from cute_gemma.config import PRESETS
from cute_gemma.jit.target import TARGETS
from cute_gemma.verification import PLANNERS
from cute_gemma.workloads import WORKLOADS, case_for, check_output, suite_cases, workload

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "perf"))

import fuzz  # noqa: E402

TARGET = None
if torch.cuda.is_available():
    capability = torch.cuda.get_device_capability()
    TARGET = next((name for name, target in TARGETS.items() if target.capability == capability), None)
pytestmark = pytest.mark.skipif(TARGET is None, reason="needs a GPU of a known target")

RUNS = 20
SUITE = [(n, case.batch_size, case.seq_len) for n in WORKLOADS for case in suite_cases(n)]
SMALL = {"047": (2, 293), "051": (4, 373)}
LARGE = {"047": (1, 1024), "051": (1, 1024)}
# Their workspaces are small enough to be kept.
SMALLEST = {n: min(((b, s) for m, b, s in SUITE if m == n), key=math.prod) for n in WORKLOADS}


def other_inputs():
    """Structured inputs of both workloads, and masks that are not causal, at a few shapes."""
    found = []
    for number, problem in WORKLOADS.items():
        for kind in set(problem.kinds) - {"suite"}:
            for name in problem.input_sets(kind):
                found += [(number, name, *SMALL[number]), (number, name, *LARGE[number])]
    return sorted(found)


def planned(number, name, batch, seq, seed=0, device="cuda"):
    """Inputs on the device and their plan, all that it writes NaN. 047's suite mask is told by name, too."""
    problem = workload(number)
    inputs = problem.make_inputs(name, batch, seq, seed).to(device)
    plan = PLANNERS[number](inputs, problem.config, target=TARGET)
    plan.poison()
    return inputs, plan


def outputs(plan):
    return plan.output if isinstance(plan.output, tuple) else (plan.output,)


def check(number, inputs, plan, batch, seq):
    """Both rules, for every output. The reference works through attention in chunks."""
    problem, case = workload(number), case_for(number, batch, seq)
    with torch.no_grad():
        eager = problem.reference(inputs, problem.config)
        exact = problem.reference(inputs.to(torch.float64), problem.config)
    for name, out in zip(problem.outputs, outputs(plan), strict=True):
        wanted = getattr(eager, name)
        found = check_output(
            name, out.view_as(wanted), wanted, getattr(exact, name), case.max_atol, case.max_rtol
        )
        assert found.passed, found


@pytest.fixture(autouse=True)
def full_sums():
    """The eager model at its best: cuBLAS adds in float32 throughout."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_bf16_reduced_precision_reduction = False
    yield
    matmul.allow_bf16_reduced_precision_reduction = before
    torch.cuda.empty_cache()


@pytest.mark.parametrize("number, batch, seq", SUITE)
def test_every_case_of_the_suite_passes_both_rules(number, batch, seq):
    names = ("suite", "causal") if number == "047" else ("suite",)
    for name in names:
        inputs, plan = planned(number, name, batch, seq)
        plan.run()
        check(number, inputs, plan, batch, seq)


@pytest.mark.parametrize("number, name, batch, seq", other_inputs())
def test_structured_inputs_and_other_masks_pass_both_rules(number, name, batch, seq):
    inputs, plan = planned(number, name, batch, seq)
    plan.run()
    check(number, inputs, plan, batch, seq)


@pytest.mark.parametrize(
    "number, name, batch, seq",
    [(n, "suite", *sizes[n]) for n in WORKLOADS for sizes in (SMALL, LARGE)] + [("047", "causal", 1, 8192)],
)
def test_results_have_the_same_bits_every_time(number, name, batch, seq):
    _, plan = planned(number, name, batch, seq)
    plan.run()
    first = [out.clone() for out in outputs(plan)]
    for run in range(1, RUNS):
        plan.poison()
        plan.run()
        same = [torch.equal(out, want) for out, want in zip(outputs(plan), first, strict=True)]
        assert all(same), f"run {run} of {RUNS}"


@pytest.mark.parametrize("number", WORKLOADS)
def test_a_captured_graph_follows_its_inputs(number):
    batch, seq = SMALL[number]
    inputs, plan = planned(number, "suite", batch, seq)
    plan.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.run()
    other = workload(number).make_inputs("suite", batch, seq, seed=1)
    for name, tensor in other.tensors().items():
        getattr(inputs, name).copy_(tensor)
    for _ in range(2):
        plan.poison()
        graph.replay()
        check(number, inputs, plan, batch, seq)


@pytest.mark.parametrize("number", WORKLOADS)
def test_work_waits_for_its_stream(number):
    """Inputs arrive on a side stream behind sleeping work; a call that ran elsewhere would read NaN."""
    batch, seq = SMALL[number]
    inputs, plan = planned(number, "suite", batch, seq)
    plan.run()
    kept = {name: tensor.clone() for name, tensor in inputs.tensors().items()}
    for tensor in inputs.tensors().values():
        tensor.fill_(torch.nan)
    plan.poison()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        for name, tensor in kept.items():
            getattr(inputs, name).copy_(tensor)
        plan.run()
        done = torch.cuda.Event()
        done.record()
    assert not done.query(), "the call did not wait for the sleeping work"
    stream.synchronize()
    check(number, inputs, plan, batch, seq)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("number", WORKLOADS)
def test_a_second_gpu_runs_what_lies_on_it(number):
    batch, seq = SMALL[number]
    results = []
    for device in ("cuda:0", "cuda:1"):
        inputs, plan = planned(number, "suite", batch, seq, device=device)
        plan.run()
        torch.cuda.synchronize(device)
        check(number, inputs, plan, batch, seq)
        assert all(out.device == torch.device(device) for out in outputs(plan))
        results.append([out.cpu() for out in outputs(plan)])
    assert torch.cuda.current_device() == 0
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def called(number, inputs):
    """The outputs of the public function."""
    if number == "051":
        return tuple(cute_gemma.qkv_backward(**inputs.tensors(), target=TARGET))
    config = workload(number).config
    numbers = {"softcap": config.softcap, "eps": config.eps, "head_dim": config.head_dim}
    return (cute_gemma.attention_forward(**vars(inputs), **numbers, target=TARGET),)


def inputs_and_results(number, sizes, seeds):
    """Inputs and what a plan computes from them, for each seed."""
    found = []
    for seed in seeds:
        inputs, plan = planned(number, "suite", *sizes, seed)
        plan.run()
        found.append((inputs, outputs(plan)))
    torch.cuda.synchronize()
    return found


def assert_same_bits(found, wanted):
    assert len(found) == len(wanted) and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("number, sizes", [(n, sizes[n]) for n in WORKLOADS for sizes in (SMALLEST, SMALL, LARGE)])
def test_warm_calls_on_two_streams_give_the_bits_of_a_plan(number, sizes):
    cases = inputs_and_results(number, sizes, (0, 1))
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    results = []
    for run in range(RUNS):
        for which, stream in enumerate(streams):
            inputs, wanted = cases[(run + which) % 2]
            with torch.cuda.stream(stream):
                if run == 0:
                    torch.cuda._sleep(20_000_000)  # so that the streams' work overlaps
                results.append((called(number, inputs), wanted))
    torch.cuda.synchronize()
    for found, wanted in results:
        assert_same_bits(found, wanted)


def test_both_workloads_share_what_is_kept_for_a_stream():
    cases = {n: inputs_and_results(n, SMALLEST[n], (0,))[0] for n in WORKLOADS}
    results = [(called(n, cases[n][0]), cases[n][1]) for _ in range(RUNS) for n in cases]
    torch.cuda.synchronize()
    for found, wanted in results:
        assert_same_bits(found, wanted)


@pytest.mark.parametrize("number", WORKLOADS)
def test_a_graph_of_a_warm_call_leaves_what_is_kept_alone(number):
    sizes = SMALLEST[number]
    (inputs, _), (other, _) = inputs_and_results(number, sizes, (0, 1))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            called(number, inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = called(number, inputs)
    kept = list(workspace.KEPT._blocks.values())
    zeroed = [blocks.zeroed for blocks in kept if blocks.zeroed.size]
    owned = [blocks.scratch for blocks in kept if blocks.scratch.size] + zeroed
    assert owned
    for block in owned:
        block.owner.fill_(0x5A)
    for name, tensor in other.tensors().items():
        getattr(inputs, name).copy_(tensor)
    for _ in range(2):
        for out in results:
            out.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert all((block.owner == 0x5A).all() for block in owned)
        check(number, inputs, SimpleNamespace(output=results), *sizes)
    for block in zeroed:
        block.owner.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        found = called(number, inputs)
    torch.cuda.synchronize()
    assert_same_bits(found, results)


@pytest.mark.parametrize("number", WORKLOADS)
def test_threads_on_one_stream_give_the_bits_of_a_plan(number):
    cases = inputs_and_results(number, SMALLEST[number], (0, 1))
    stream = torch.cuda.Stream()
    results = []

    def work(inputs, wanted):
        with torch.no_grad(), torch.cuda.stream(stream):
            results.extend([(called(number, inputs), wanted) for _ in range(10 * RUNS)])

    threads = [threading.Thread(target=work, args=case) for case in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert len(results) == 20 * RUNS
    for found, wanted in results:
        assert_same_bits(found, wanted)


@pytest.mark.parametrize("number", WORKLOADS)
def test_a_warm_call_allocates_its_outputs_alone_and_does_not_synchronise(number):
    ((inputs, wanted),) = inputs_and_results(number, SMALLEST[number], (0,))
    called(number, inputs)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = called(number, inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before + len(found)
    assert_same_bits(found, wanted)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("number", WORKLOADS)
def test_warm_calls_run_where_their_tensors_lie(number):
    ((inputs, wanted),) = inputs_and_results(number, SMALLEST[number], (0,))
    there = inputs.to("cuda:1")
    for _ in range(3):
        assert_same_bits(called(number, inputs), wanted)
        found = called(number, there)
        assert all(out.device == torch.device("cuda:1") for out in found)
        assert_same_bits([out.cpu() for out in found], [out.cpu() for out in wanted])
    assert torch.cuda.current_device() == 0


def launched():
    """Every kernel that the suite's cases launch on this card, once."""
    if TARGET is None:
        return []
    kernels = {}
    for number, batch, seq in SUITE:
        for name in ("suite", "causal") if number == "047" else ("suite",):
            inputs = workload(number).make_inputs(name, batch, seq).to("cuda")
            plan = PLANNERS[number](inputs, workload(number).config, target=TARGET)
            for step in plan.steps:
                kernels.setdefault(step.kernel, f"{step.stage} of {number} ({batch}, {seq})")
    return list(kernels.items())


@pytest.mark.parametrize("seq, mask", [(293, "random"), (1100, "causal")])
@pytest.mark.parametrize("kind", ["forward", "qkv backward"])
@pytest.mark.parametrize("model", ["gemma2-2b", "gemma3-1b", "gemma3-27b"])
def test_sizes_of_other_models_match_the_reference(model, kind, seq, mask):
    """Widths and heads, and a head_dim in either direction, that the suite has not."""
    layer = PRESETS[model]
    sizes = {name: getattr(layer, name) for name in ("heads", "kv_heads", "head_dim", "hidden", "softcap")}
    assert fuzz.check(fuzz.Problem(kind, batch=2, seq=seq, mask=mask, **sizes), TARGET, "cuda") <= 1


def test_no_cubin_that_ran_has_a_stack_or_local_memory():
    wrong = []
    for kernel, what in launched():
        compiled = jit.compile(kernel, TARGET)
        assert compiled.cubin in compiled.object_code  # what is loaded, not another compilation
        for report in jit.inspect(compiled):
            if report.stack_bytes or report.local_loads or report.local_stores:
                wrong.append(f"{what}: {report.stack_bytes} bytes")
    assert wrong == []


def test_uncapped_attention_passes_both_rules():
    problem = workload("047")
    config = replace(problem.config, softcap=None)
    inputs = problem.make_inputs("causal", 2, 293).to("cuda")
    plan = PLANNERS["047"](inputs, config, target=TARGET)
    plan.poison()
    plan.run()
    eager = problem.reference(inputs, config).output
    exact = problem.reference(inputs.to(torch.float64), config).output
    case = case_for("047", 2, 293)
    found = check_output("output", plan.output, eager, exact, case.max_atol, case.max_rtol)
    assert found.passed, found
