"""What the cluster's benchmark shows: rows that a job reads as its nodes want them, in as many steps for any number."""

from benchmarks.simulated_cluster import simulate


def test_planning_a_row_takes_as_many_steps_for_any_number_of_nodes_and_rows() -> None:
    steps = [simulate(rows, nodes).steps / rows for nodes, rows in ((3, 3_000), (30, 6_000), (150, 15_000))]
    assert max(steps) < 5


def test_a_job_holds_what_its_nodes_answer_soon_and_no_more() -> None:
    few, many = simulate(20_000, 2), simulate(40_000, 2)
    assert many.most_open <= 1.1 * few.most_open < 2_000
    assert min(few.busy, many.busy) > 0.95
