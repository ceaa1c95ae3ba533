"""What the cluster's benchmark shows: rows that a job reads as its nodes want them, in as many steps for any number."""

from benchmarks.simulated_cluster import ClusterPlan, bench_cluster, simulate
from engine.bench.report import Report


def test_planning_a_row_takes_as_many_steps_for_any_number_of_nodes_and_rows() -> None:
    steps = [simulate(rows, nodes).steps / rows for nodes, rows in ((3, 3_000), (30, 6_000), (150, 15_000))]
    assert max(steps) < 5


def test_a_job_holds_what_its_nodes_answer_soon_and_no_more() -> None:
    few, many = simulate(20_000, 2), simulate(40_000, 2)
    assert many.most_open <= 1.1 * few.most_open < 2_000
    assert min(few.busy, many.busy) > 0.95


def test_the_report_names_each_job() -> None:
    report, said = Report({}), list[str]()
    bench_cluster(ClusterPlan((1, 2), (500,)), report, said.append)
    assert said == ["simulating 500 rows on 1 node", "simulating 500 rows on 2 nodes"]
    assert [each.name for each in report.rows if "steps" in each.name] == [
        "500 rows on 1 node: steps for each row",
        "500 rows on 2 nodes: steps for each row",
    ]
