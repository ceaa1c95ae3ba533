"""Rows handed out to many nodes: each is answered once, whatever joins, leaves, dies or is late."""

import pytest

from engine.remote.ray_blocks import MOST_HELD, SUSPECTED, Blocks


def filled(rows: int, *, is_read: bool = True) -> Blocks[int]:
    blocks = Blocks[int]()
    for row in range(rows):
        blocks.add(row)
    blocks.is_read = is_read
    return blocks


def rows_of(block: list[tuple[int, int]]) -> list[int]:
    return [row for _ticket, row in block]


def test_an_answer_counts_once() -> None:
    blocks = filled(1)
    blocks.join("a", 1, 0.0)
    ((ticket, _row),) = blocks.hand_out("a", 0.0)
    assert blocks.answered("a", [ticket, ticket], 1.0) == [ticket]
    assert blocks.answered("a", [ticket], 2.0) == []
    assert blocks.open_rows == 0


def test_what_a_dead_node_held_comes_first() -> None:
    blocks = filled(6)
    blocks.join("a", 1, 0.0)
    held = rows_of(blocks.hand_out("a", 0.0))
    assert blocks.leave("a", died=True) == []
    blocks.join("b", 6, 1.0)
    assert rows_of(blocks.hand_out("b", 1.0))[: len(held)] == held


def test_a_late_answer_of_a_dead_node_counts_if_it_is_the_first() -> None:
    blocks = filled(1)
    blocks.join("a", 1, 0.0)
    ((ticket, _row),) = blocks.hand_out("a", 0.0)
    blocks.leave("a", died=True)
    assert blocks.answered("a", [ticket], 1.0) == [ticket]
    blocks.join("b", 1, 2.0)
    assert blocks.hand_out("b", 2.0) == []


def test_a_node_shows_what_it_can_do_before_it_gets_more() -> None:
    blocks = filled(1000)
    blocks.join("a", 8, 0.0)
    first = blocks.hand_out("a", 0.0)
    assert len(first) == 8
    assert blocks.hand_out("a", 1.0) == []
    blocks.answered("a", [ticket for ticket, _row in first], 2.0)
    assert len(blocks.hand_out("a", 2.0)) == 80  # 4 rows per second


def test_a_predicted_rate_counts_until_answers_come() -> None:
    blocks = filled(5000, is_read=False)
    blocks.join("a", 8, 0.0, rate=10.0)
    first = blocks.hand_out("a", 0.0)
    assert len(first) == 200
    blocks.answered("a", [ticket for ticket, _row in first], 200.0)  # one a second
    assert blocks.rate("a", 200.0) == pytest.approx(1.0, rel=0.05)


def test_blocks_follow_rates_and_are_bounded() -> None:
    blocks = Blocks[int]()
    for name, each_s in (("fast", 0.001), ("middle", 0.1), ("slow", 10.0)):
        blocks.join(name, 4, 0.0)
        for row in range(4):
            blocks.add(row)
        tickets = [ticket for ticket, _row in blocks.hand_out(name, 0.0)]
        blocks.answered(name, tickets, each_s * 4)
    for row in range(10 * MOST_HELD):
        blocks.add(row)
    sizes = [len(blocks.hand_out(name, 40.0)) for name in ("fast", "middle", "slow")]
    assert sizes == [MOST_HELD, 200, 4]


def test_blocks_shrink_at_the_end() -> None:
    blocks = filled(400)
    for name in ("a", "b"):
        blocks.join(name, 100, 0.0)
    now, sizes = 0.0, list[int]()
    while blocks.open_rows:
        now += 1
        for name in ("a", "b"):
            block = blocks.hand_out(name, now)
            sizes.append(len(block))
            blocks.answered(name, [ticket for ticket, _row in block], now + 0.5)
    assert sizes[0] == 100
    assert [size for size in sizes if size][-1] == 1
    assert sizes == sorted(sizes, reverse=True)


def test_something_is_left_for_nodes_that_are_about_to_join() -> None:
    blocks = filled(100)
    blocks.coming = 3
    blocks.join("a", 512, 0.0)
    assert len(blocks.hand_out("a", 0.0)) == 13


def test_an_idle_node_helps_a_slow_one() -> None:
    blocks = filled(40)
    blocks.join("slow", 20, 0.0)
    blocks.join("fast", 20, 0.0)
    slow = blocks.hand_out("slow", 0.0)
    now, helped = 0.0, list[int]()
    while block := blocks.hand_out("fast", now):
        now += 0.1 * len(block)
        helped += [row for row in rows_of(block) if row in rows_of(slow)]
        blocks.answered("fast", [ticket for ticket, _row in block], now)
    assert sorted(helped) == sorted(rows_of(slow))  # it is silent
    assert sorted(blocks.in_vain("slow")) == [ticket for ticket, _row in slow]


def test_nobody_helps_a_node_that_is_as_fast() -> None:
    blocks, handed, now = filled(101), list[int](), 0.0
    for name in ("a", "b"):
        blocks.join(name, 20, 0.0)
    while blocks.open_rows:
        now += 1.0
        for name, block in [(name, blocks.hand_out(name, now)) for name in ("a", "b")]:
            handed += rows_of(block)
            blocks.answered(name, [ticket for ticket, _row in block], now + 1.0)
    assert sorted(handed) == list(range(101))


def test_a_row_that_ends_every_node_is_found_and_given_up() -> None:
    blocks, given_up, lives = filled(200), list[int](), 0
    while blocks.open_rows:
        lives += 1
        assert lives < 100
        blocks.join("a", 64, 0.0)
        while block := blocks.hand_out("a", 0.0):
            if 77 in rows_of(block):
                given_up += blocks.leave("a", died=True)
                break
            blocks.answered("a", [ticket for ticket, _row in block], 1.0)
        else:
            blocks.leave("a", died=False)
    assert given_up == [77]
    assert lives > SUSPECTED
