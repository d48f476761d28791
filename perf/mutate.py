"""Mutation testing of the emulator: does it notice when a shipped kernel is changed in one place?

    python perf/mutate.py                           every sm_100a kernel, then the tables
    python perf/mutate.py --target sm_90a --kernel attention --per-kind 20
    python perf/mutate.py --report                  the tables of what was run before
    python perf/mutate.py --unmodified 50           the kernels themselves, 50 random schedules: no reports

A mutant is killed by a report (any fault but a deadlock), by a deadlock (or by running 20 times as long), or
by a wrong result: output bits other than the unmodified kernel's, which are the same under every schedule. It
runs under `lazy` and then under `random:1` to `random:10`, on inputs that reach the changed statement, until it
is killed; a change of a predicate under `lazy` and five of these, a change of rounding, which no schedule matters
to, under `lazy` alone. Results are kept, so that a stopped run goes on where it was; `--retry` runs survivors
anew.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import os
import re
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from mutation_targets import Case, Target, targets
from mutations import ADDRESSING, PREDICATE, ROUNDING, SYNC, Mutant, mutants, sample
from tqdm import tqdm

from cute_gemma import emulator

ROOT = Path(__file__).resolve().parent.parent
EQUIVALENT = ROOT / "tests" / "emulator" / "equivalent_mutants.txt"
STATE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "cute_gemma" / "mutants"
SCHEDULES = ("lazy", *(f"random:{seed}" for seed in range(1, 11)))
FEWER = {PREDICATE: 6, ROUNDING: 1}  # schedules of a group that does not get all
REPORT, DEADLOCK, WRONG, SURVIVED, UNREACHED, INVALID = (
    "report", "deadlock", "wrong result", "survived", "not reached", "invalid",
)  # fmt: skip


@dataclass
class Outcome:
    """What became of a mutant. by: schedule and input set that killed it; detail: the fault."""

    key: str
    group: str
    kind: str
    site: str
    line: int
    original: str
    outcome: str
    detail: str = ""
    by: str = ""
    seconds: float = 0.0


class Overtime(Exception):
    """A mutant used up its processor time."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises Overtime after so many seconds of processor time: other work on the machine does not count."""

    def expire(*_: object) -> None:
        raise Overtime

    before = signal.signal(signal.SIGPROF, expire)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def run_mutant(mutant: Mutant, cases: list[Case], schedules: tuple[str, ...] = SCHEDULES) -> Outcome:
    """Runs a mutant until it is killed."""
    known = mutant.key, mutant.group, mutant.kind, mutant.site, mutant.line, mutant.original
    reached = [(i, case) for i, case in enumerate(cases) if mutant.line in case.executed]
    if not reached:
        return Outcome(*known, UNREACHED)
    ptx = mutant.apply(cases[0].launch.ptx)
    start = time.perf_counter()

    def outcome(what: str, detail: str = "", by: str = "") -> Outcome:
        return Outcome(*known, what, detail, by, round(time.perf_counter() - start, 2))

    for schedule in schedules[: FEWER.get(mutant.group)]:
        for index, case in reached:
            by = f"{schedule}, inputs {index}"
            try:
                with time_limit(case.limit):
                    if not case.run(ptx, schedule):
                        return outcome(WRONG, by=by)
            except (emulator.DeadlockError, Overtime) as error:
                return outcome(DEADLOCK, _first_line(error), by)
            except (emulator.UnsupportedInstruction, emulator.PtxSyntaxError) as error:
                return outcome(INVALID, _first_line(error), by)
            except emulator.EmulationError as error:
                return outcome(REPORT, f"{type(error).__name__}: {_first_line(error)}", by)
    return outcome(SURVIVED)


def _first_line(error: BaseException) -> str:
    return str(error).split("\n")[0][:160]


def prepare(target: Target) -> list[Case]:
    """A case for each of the target's inputs, with the time a mutant may take."""
    cases = []
    for inputs in target.inputs():
        case = Case(target, inputs)
        start = time.process_time()
        if not case.run():
            raise RuntimeError(f"{target.name}: two runs of the unmodified kernel differ")
        if cases and case.text != cases[0].text:
            raise RuntimeError(f"{target.name}: the kernel of other inputs is another one")
        case.limit = 3.0 + 20 * (time.process_time() - start)
        cases.append(case)
    return cases


def mutants_of(cases: list[Case], per_kind: int | None, seed: int) -> list[Mutant]:
    return sample(mutants(cases[0].launch.ptx), per_kind, seed)


# ---------------------------------------------------------------- kept results
def state_file(target: Target) -> Path:
    return STATE / target.arch / (re.sub(r"\W+", "-", target.name) + ".jsonl")


def load(target: Target) -> dict[str, Outcome]:
    path = state_file(target)
    if not path.exists():
        return {}
    outcomes = (Outcome(**json.loads(line)) for line in path.read_text().splitlines())
    return {outcome.key: outcome for outcome in outcomes}


def run_target(target: Target, options: argparse.Namespace) -> dict[str, Outcome]:
    """Runs what has not been run yet. Returns the outcomes of this kernel's mutants."""
    cases = prepare(target)
    known, chosen = load(target), mutants_of(cases, options.per_kind, options.seed)
    if options.kind:
        chosen = [m for m in chosen if fnmatch.fnmatch(m.kind, options.kind)]
    open_ = (SURVIVED, UNREACHED, INVALID)
    todo = [m for m in chosen if m.key not in known or options.retry and known[m.key].outcome in open_]
    path = state_file(target)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as out:
        for mutant in tqdm(todo, desc=target.name, unit="mutant", mininterval=5):
            outcome = known[mutant.key] = run_mutant(mutant, cases)
            out.write(json.dumps(asdict(outcome)) + "\n")
            out.flush()
    current = {m.key for m in chosen}
    path.with_suffix(".current").write_text(json.dumps(sorted(current)))
    return {key: outcome for key, outcome in known.items() if key in current}


def kept(target: Target) -> dict[str, Outcome]:
    """Outcomes of the last run's mutants."""
    path = state_file(target).with_suffix(".current")
    current = set(json.loads(path.read_text())) if path.exists() else set()
    return {key: outcome for key, outcome in load(target).items() if key in current}


# ---------------------------------------------------------------- equivalent mutants
@dataclass(frozen=True)
class Equivalence:
    """A line of equivalent_mutants.txt: globs of target, kernel, kind and site, and the PTX ISA's rule."""

    target: str
    kernel: str
    kind: str
    site: str
    rule: str

    def covers(self, target: Target, outcome: Outcome) -> bool:
        pairs = (
            (target.arch, self.target), (target.name, self.kernel),
            (outcome.kind, self.kind), (outcome.site, self.site),
        )  # fmt: skip
        return all(fnmatch.fnmatchcase(value, pattern) for value, pattern in pairs)


def equivalences(path: Path = EQUIVALENT) -> list[Equivalence]:
    """Raises ValueError for a line without five fields."""
    found = []
    for number, line in enumerate(path.read_text().splitlines() if path.exists() else (), 1):
        if line.strip() and not line.startswith("#"):
            fields = [f.strip() for f in line.split(" | ")]
            if len(fields) != 5 or not all(fields):
                raise ValueError(f"{path.name}, line {number}: want target | kernel | kind | site | rule")
            found.append(Equivalence(*fields))
    return found


# ---------------------------------------------------------------- tables
_COLUMNS = ("report", "deadlock", "wrong result", "survived", "equivalent", "not reached")


def tally(
    results: dict[str, tuple[Target, dict[str, Outcome]]], known: list[Equivalence]
) -> dict[tuple[str, str, str], Counter]:
    """Outcomes by kernel, group and kind; a survivor declared equal to the original counts as that."""
    counts: dict[tuple[str, str, str], Counter] = defaultdict(Counter)
    for name, (target, outcomes) in results.items():
        for outcome in outcomes.values():
            what = outcome.outcome
            if what in (SURVIVED, UNREACHED) and any(e.covers(target, outcome) for e in known):
                what = "equivalent"
            if what != INVALID:
                counts[name, outcome.group, outcome.kind][what] += 1
    return counts


def score(count: Counter) -> str:
    """Share killed of those that are not equivalent; a mutant that no input reaches counts as alive."""
    killed = sum(count[c] for c in (REPORT, DEADLOCK, WRONG))
    alive = count[SURVIVED] + count[UNREACHED]
    return f"{100 * killed / (killed + alive):.1f}%" if killed + alive else "-"


def print_table(title: str, rows: dict[str, Counter]) -> None:
    width = max([len(title), *map(len, rows)])
    print(f"\n{title:<{width}} {'mutants':>8} " + " ".join(f"{c:>12}" for c in _COLUMNS) + f" {'killed':>8}")
    for name, count in rows.items():
        cells = " ".join(f"{count[c]:>12}" for c in _COLUMNS)
        print(f"{name:<{width}} {sum(count.values()):>8} {cells} {score(count):>8}")


def print_report(results: dict[str, tuple[Target, dict[str, Outcome]]]) -> None:
    """The tables, and every survivor."""
    known = equivalences()
    counts = tally(results, known)
    for title, of in (("kernel", 0), ("kind", 2)):
        for group in (SYNC, ADDRESSING, PREDICATE, ROUNDING):
            rows: dict[str, Counter] = defaultdict(Counter)
            for key, count in counts.items():
                if key[1] == group:
                    rows[key[of]].update(count)
            rows["all"] = sum(rows.values(), Counter())
            print_table(f"{group}, by {title}", rows)
    total = sum(counts.values(), Counter())
    print_table("all groups", {"all": total})
    print(f"equivalent: {100 * total['equivalent'] / max(1, sum(total.values())):.1f}% of all")
    print("\nsurvivors")
    for name, (target, outcomes) in results.items():
        for outcome in sorted(outcomes.values(), key=lambda o: (o.group, o.line)):
            alive = outcome.outcome in (SURVIVED, UNREACHED) and not any(
                e.covers(target, outcome) for e in known
            )
            if alive:
                print(
                    f"  {name} | {outcome.kind} | {outcome.site} | {outcome.outcome} | "
                    f"line {outcome.line}: {outcome.original[:110]}"
                )


# ---------------------------------------------------------------- the kernels themselves
def check_unmodified(target: Target, count: int) -> int:
    """Reports on the unmodified kernel under lazy, eager and `count` random schedules, all of them false."""
    wrong = 0
    for index, case in enumerate(prepare(target)):
        for schedule in tqdm(
            ("lazy", "eager", *(f"random:{s}" for s in range(count))), desc=target.name, mininterval=5
        ):
            try:
                if case.run(schedule=schedule):
                    continue
                message = "other output bits"
            except emulator.EmulationError as error:
                message = f"{type(error).__name__}: {error}"
            wrong += 1
            tqdm.write(f"{target.name}, inputs {index}, {schedule}: {message}")
    print(f"{target.arch} {target.name}: {wrong} reports", flush=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="sm_100a", choices=("sm_100a", "sm_90a"))
    parser.add_argument("--kernel", action="append", help="name or glob; may be repeated (all)")
    parser.add_argument("--kind", help="only mutants of this kind, a glob")
    parser.add_argument(
        "--per-kind", type=int, default=25, help="of each kind that is not of synchronisation"
    )
    parser.add_argument("--seed", type=int, default=0, help="of that choice")
    parser.add_argument("--retry", action="store_true", help="run survivors again")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument(
        "--unmodified", type=int, metavar="N", help="run the kernels themselves, N random schedules"
    )
    options = parser.parse_args()
    chosen = {
        name: target
        for name, target in targets(options.target).items()
        if not options.kernel or any(fnmatch.fnmatch(name, pattern) for pattern in options.kernel)
    }
    if options.unmodified is not None:
        return 1 if sum(check_unmodified(target, options.unmodified) for target in chosen.values()) else 0
    run = kept if options.report else lambda target: run_target(target, options)
    print_report({name: (target, run(target)) for name, target in chosen.items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
