"""The message tree: whatever is added and chosen, one sound visible path."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.services.chat_store.records import Message
from app.services.chat_store.tree import MessageTree, sound


def message(id_: str, parent: str | None, *, chosen: bool = True) -> Message:
    return Message(id_, "c", parent, "user", f"text {id_}", chosen=chosen)


# A growing tree: each step adds a child under one of the earlier messages, or chooses a message.
steps = st.lists(st.tuples(st.booleans(), st.integers(0, 1000)), max_size=40)


def grown(moves: list[tuple[bool, int]]) -> MessageTree:
    tree, ids = MessageTree(), []
    for adds, number in moves:
        if adds or not ids:
            parent = ([None, *ids])[number % (len(ids) + 1)]
            ids.append(f"m{len(ids)}")
            tree.add(message(ids[-1], parent))
        else:
            tree.choose(ids[number % len(ids)])
    return tree


def check_invariants(tree: MessageTree) -> None:
    messages = tree.messages()
    groups: dict[str | None, list[Message]] = {}
    for m in messages:
        groups.setdefault(m.parent_id, []).append(m)
    for siblings in groups.values():
        assert sum(m.chosen for m in siblings) == 1
        for number, m in enumerate(siblings, 1):
            assert tree.versions(m.id) == (number, len(siblings))
    path = tree.path()
    assert [m.parent_id for m in path] == [None, *(m.id for m in path)][: len(path)]
    assert all(m.id in {n.id for n in messages if n.chosen} for m in path)
    assert tree.leaf_id() not in groups
    for m in path:
        assert tree.lineage(m.id) == path[: path.index(m) + 1]


@given(steps)
def test_a_tree_rebuilt_from_its_messages_is_the_same(moves: list[tuple[bool, int]]) -> None:
    tree = grown(moves)
    check_invariants(tree)
    again = MessageTree(tree.messages())
    assert again.messages() == tree.messages()
    assert again.path() == tree.path()
    assert sound(tree.messages()) == tree.messages()


@given(st.lists(st.tuples(st.integers(0, 12), st.none() | st.integers(0, 12), st.booleans()), max_size=30))
def test_any_rows_become_a_sound_tree_without_losing_one(rows: list[tuple[int, int | None, bool]]) -> None:
    broken = [message(f"m{a}", None if b is None else f"m{b}", chosen=c) for a, b, c in rows]
    repaired = sound(broken)
    assert {m.id for m in repaired} == {m.id for m in broken}
    assert len(repaired) == len({m.id for m in broken})
    check_invariants(MessageTree(repaired))


def test_regenerating_and_leafing_through_versions() -> None:
    tree = MessageTree([message("q", None), message("a1", "q")])
    tree.add(message("a2", "q"))
    assert [m.id for m in tree.path()] == ["q", "a2"]
    assert tree.versions("a2") == (2, 2)
    assert tree.sibling("a2", -1) == "a1"
    assert tree.sibling("a2", 1) is None
    tree.choose("a1")
    tree.add(message("q2", "a1"))
    tree.choose("a2")
    tree.choose("a1")
    assert [m.id for m in tree.path()] == ["q", "a1", "q2"], "a branch is shown as it was left"


def test_an_update_changes_the_text_and_not_the_place() -> None:
    tree = MessageTree([message("q", None), message("a", "q")])
    tree.update(replace(message("a", None), content="new"))
    assert tree["a"].content == "new"
    assert tree["a"].parent_id == "q"


def test_a_message_without_its_parent_is_refused() -> None:
    with pytest.raises(ValueError, match="parent"):
        MessageTree([message("a", "nowhere")])
    with pytest.raises(ValueError, match="already"):
        MessageTree([message("a", None), message("a", None)])
