"""Both workloads on whatever supported GPU there is: the suite's cases, other inputs, and every way to launch."""

from dataclasses import replace

import pytest
import torch

from cute_gemma import jit
from cute_gemma.jit.target import TARGETS
from cute_gemma.verification import PLANNERS
from cute_gemma.workloads import WORKLOADS, case_for, check_output, suite_cases, workload

TARGET = None
if torch.cuda.is_available():
    capability = torch.cuda.get_device_capability()
    TARGET = next((name for name, target in TARGETS.items() if target.capability == capability), None)
pytestmark = pytest.mark.skipif(TARGET is None, reason="needs a GPU of a known target")

RUNS = 20
SUITE = [(n, case.batch_size, case.seq_len) for n in WORKLOADS for case in suite_cases(n)]
SMALL = {"047": (2, 293), "051": (4, 373)}
LARGE = {"047": (1, 1024), "051": (1, 1024)}


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
