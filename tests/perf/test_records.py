"""What a benchmark's file holds, and what is read off it."""

import json

import pytest
from perf_cases import made_case, made_result, timed

import records

from cute_gemma.workloads import suite_cases


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
