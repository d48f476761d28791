"""Both workloads once, at small shapes, for tools that watch every instruction.

    compute-sanitizer --tool memcheck python perf/one_call.py
    python perf/one_call.py 047 1x131,2x293

Every input set of a workload runs at every size, its outputs NaN beforehand. Exit status 1 if a result is not
finite: whether it is right is for other programs to say.
"""

import sys

import torch
from bench import as_tuple, card_target
from prepare import choose_cases

from cute_gemma.verification import PLANNERS
from cute_gemma.workloads import WORKLOADS, workload

SIZES = "1x131,2x293"
KINDS = {"047": ("suite", "causal", "random-bias", "masked-row"), "051": ("suite",)}


def main(arguments: list[str]) -> int:
    if not torch.cuda.is_available():
        print("one_call: there is no GPU here", file=sys.stderr)
        return 2
    target, wrong = card_target(None), 0
    numbers = arguments[:1] or list(WORKLOADS)
    for number in numbers:
        for _, batch, seq in choose_cases(number, arguments[1] if len(arguments) > 1 else SIZES, False):
            for kind in KINDS[number]:
                problem = workload(number)
                inputs = problem.make_inputs(kind, batch, seq).to("cuda")
                plan = PLANNERS[number](inputs, problem.config, target=target)
                plan.poison()
                plan.run()
                torch.cuda.synchronize()
                finite = all(bool(torch.isfinite(out).all()) for out in as_tuple(plan.output))
                print(f"{number} {kind} ({batch}, {seq}): {'ran' if finite else 'NOT FINITE'}", flush=True)
                wrong += not finite
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
