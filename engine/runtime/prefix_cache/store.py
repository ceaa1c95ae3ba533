"""Prompts and answers whose keys and values are there already: found by their content, wherever they were computed.

What the last answer left stays where it is, in the cache that computed it.  While nobody is being answered it is
written to disk, block by block, if it is a chat's; a request that needs the cache for something else first copies what
is not there yet into RAM.  So no token is held twice by this, nothing is copied for a chat that goes on, and no answer
is slowed down.  What lies in RAM is found by everybody, what lies on disk by the chat that it is of.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import NamedTuple

import psutil
import torch

from engine.common.files import is_full
from engine.devices.host_memory import available_ram
from engine.runtime.prefix_cache.blocks import BLOCK_TOKENS, BlockLayout, CopyBlock, PagedState, block_keys, state_keys
from engine.runtime.prefix_cache.files import Key, SpillFiles, Writing

_READERS = max(1, min(4, os.cpu_count() or 1))
_NICE = 10
_SPARE_SHARE = 20
"""One part in so many of the machine's RAM is left to other programs."""
_LOOK_AGAIN_S = 0.5
_log = logging.getLogger(__name__)


class Reused(NamedTuple):
    """Tokens of a prompt that did not have to be read: those still in the cache or in pages, and kept ones."""

    held: int = 0
    ram: int = 0
    disk: int = 0

    @property
    def tokens(self) -> int:
        return sum(self)


@dataclass(slots=True)
class _Block:
    """In RAM.  `wanted_by`: chats on whose part of the disk it is not yet, and can be."""

    index: int
    layout: BlockLayout
    data: torch.Tensor
    wanted_by: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Of a source: the block with this index, or a state behind the blocks before it."""

    key: Key
    index: int
    layout: BlockLayout
    copy: Callable[[torch.Tensor], None]


@dataclass
class _Source:
    """What an answer left in the cache that computed it, in the order in which it is of use.

    Attributes:
        chat: whose it is; empty for what is never written to disk.
    """

    pieces: list[_Piece]
    chat: str
    next: int = 0
    """The first piece that may not be kept yet."""
    is_refused: bool = False
    """Whether the disk has no room for more of it."""

    @cached_property
    def keys(self) -> list[Key]:
        return [piece.key for piece in self.pieces]


class WindowBlocks(NamedTuple):
    """Blocks, by their indices, of layers with a sliding window: those that are there."""

    layout: BlockLayout
    copy: CopyBlock
    there: Sequence[int]


@dataclass
class Found:
    """The beginning of a prompt that is kept: blocks, and for layers that forget tokens what they hold behind it.

    Attributes:
        windows: blocks of layers with a window, where these are apart: the last of them can be brought.
    """

    keys: list[Key]
    layout: BlockLayout
    chat: str
    _store: PrefixCache
    reused: Reused = field(default_factory=Reused)
    state: tuple[Key, BlockLayout] | None = None
    windows: Found | None = None

    @property
    def tokens(self) -> int:
        """How long it is, as far as it turns out to be sound."""
        return self.state[1].tokens if self.state is not None else len(self.keys) * BLOCK_TOKENS

    def bring_state(self, take: Callable[[torch.Tensor], None]) -> bool:
        """After the blocks: gives `take` the state behind all of it; false if its file is damaged."""
        return self._store._bring_state(self, take)

    def bring(self, first: int, take: CopyBlock) -> int:
        """Gives `take` the blocks from the one with index `first` on, in any order and on several threads.

        Returns:
            Tokens that are there now, those before `first` included: fewer than `tokens` if a file is damaged.
        """
        return self._store._bring(self, first, take)


class PrefixCache:
    """What is kept for one loaded model.

    Args:
        root: says which model it is, and how it computes: what is kept for another one is not found.
        ram_bytes: the most that its blocks take in RAM.
        files: where it lies on disk; None keeps nothing there.
        most_tokens: longer contexts are not kept: their beginning depends on what follows it.
    """

    def __init__(
        self, root: Key, ram_bytes: int, files: SpillFiles | None = None, most_tokens: int = sys.maxsize
    ) -> None:
        self.root, self._files, self._folders, self._most_tokens = root, files, files, most_tokens
        if files is not None:
            files.on_key = self._has_key
        self._forgetful_root = hashlib.blake2b(root + b"forgetful", digest_size=16).digest()
        self._windowed_root = hashlib.blake2b(root + b"windowed", digest_size=16).digest()
        self.ram_budget = ram_bytes
        self._changed = threading.Condition()
        self._blocks: OrderedDict[Key, _Block] = OrderedDict()
        self._ram = 0
        self._sources: dict[object, _Source] = {}
        """By who holds what is offered."""
        self._layouts: dict[bytes, BlockLayout | None] = {}
        self._writer: threading.Thread | None = None
        self._answering = 0
        self._is_closed = False
        self._is_writing = False
        self.note = ""
        """A sentence for people on what cannot be kept; empty if all can."""

    @property
    def ram_bytes(self) -> int:
        return self._ram

    @property
    def disk_bytes(self) -> int:
        """What is on disk, of all models."""
        return self._files.nbytes if self._files is not None else 0

    def find(self, ids: Sequence[int], least: int = 0, chat: str = "", window: int = 0) -> Found | None:
        """The longest kept beginning of a prompt, which leaves its last token to be computed.

        Args:
            least: tokens that the caller has; one that is no longer is of no use.
            chat: whose files are looked at, too.
            window: what layers see whose blocks are apart; 0 without any.
        """
        if not BLOCK_TOKENS <= len(ids) - 1 <= self._most_tokens - 1 or least + BLOCK_TOKENS > len(ids) - 1:
            return None
        found, has, is_kept = list[Key](), least // BLOCK_TOKENS, self._look(chat)
        for key in block_keys(self._windowed_root if window else self.root, ids, len(ids) - 1):
            if len(found) >= has and not is_kept(key):
                break
            found.append(key)
        windows = [_of_window(key) for key in found] if window else []
        while window and len(found) > has:
            seen = range(max(has, max(0, len(found) * BLOCK_TOKENS - window + 1) // BLOCK_TOKENS), len(found))
            if all(is_kept(windows[index]) for index in seen):
                break
            found.pop()
        if len(found) * BLOCK_TOKENS <= least:
            return None
        layout = self._layout_of(found[has], chat)
        if layout is None or not window:
            return Found(found, layout, chat, self) if layout is not None else None
        of_windows = self._layout_of(windows[len(found) - 1], chat)
        if of_windows is None:
            return None
        return Found(found, layout, chat, self, windows=Found(windows[: len(found)], of_windows, chat, self))

    def find_state(self, ids: Sequence[int], least: int, chat: str = "") -> Found | None:
        """The same for a cache whose layers forget tokens: it goes on where it was left once, behind `least` tokens."""
        most = min(len(ids) - 1, self._most_tokens)
        if least >= most:
            return None
        keys, is_kept = list[Key](), self._look(chat)
        for key in block_keys(self._forgetful_root, ids, most):
            if not is_kept(key):
                break
            keys.append(key)
        for index in range(len(keys), -1, -1):
            begin = index * BLOCK_TOKENS
            end = min(begin + BLOCK_TOKENS - 1, most)
            if end <= least:
                break
            before = keys[index - 1] if index else self._forgetful_root
            for key in reversed(list(state_keys(before, ids[begin:end]))):
                state = self._layout_of(key, chat) if is_kept(key) else None
                if state is not None and least < state.tokens <= end:
                    blocks = self._layout_of(keys[0], chat) if index else BlockLayout(0, ())
                    return Found(keys[:index], blocks, chat, self, state=(key, state)) if blocks is not None else None
        return None

    def offer(
        self,
        owner: object,
        ids: Sequence[int],
        layout: BlockLayout,
        copy: CopyBlock,
        chat: str = "",
        windows: WindowBlocks | None = None,
    ) -> None:
        """An answer has ended: `copy` gives what its owner holds of these tokens, until `withdraw`.

        Args:
            chat: on whose part of the disk it may be kept; empty: on none.
            windows: of layers with a window, if these are apart.
        """
        if not BLOCK_TOKENS <= len(ids) <= self._most_tokens:
            return
        pieces = _blocks(self.root if windows is None else self._windowed_root, ids, len(ids), layout, copy)
        if windows is not None:
            pieces += [
                _Piece(_of_window(pieces[index].key), index, windows.layout, partial(windows.copy, index))
                for index in windows.there
            ]
        self._offer(owner, _Source(pieces, chat))

    def offer_states(
        self,
        owner: object,
        ids: Sequence[int],
        layout: BlockLayout,
        copy: CopyBlock,
        states: Sequence[PagedState],
        chat: str = "",
    ) -> None:
        """The same of a cache whose layers forget tokens: it can only be gone on with from one of these states.

        Args:
            layout: of blocks of its other layers.
            states: the shortest first.
        """
        if not states or len(ids) > self._most_tokens:
            return
        keys = [self._forgetful_root, *block_keys(self._forgetful_root, ids, len(ids))]
        blocks = _blocks(self._forgetful_root, ids, states[-1].layout.tokens, layout, copy)
        pieces, begun = list[_Piece](), 0
        for state in states:
            index, rest = divmod(state.layout.tokens, BLOCK_TOKENS)
            *_, key = state_keys(keys[index], ids[state.layout.tokens - rest : state.layout.tokens])
            pieces += [*blocks[begun:index], _Piece(key, index, state.layout, state.copy)]
            begun = max(begun, index)
        self._offer(owner, _Source(pieces, chat))

    def _offer(self, owner: object, source: _Source) -> None:
        with self._changed:
            self._sources[owner] = source
            self._changed.notify_all()
        self._begin_writing()

    def is_written(self, owner: object) -> bool:
        """Whether the disk has all that it takes of what was offered: nobody else needs it."""
        with self._changed:
            source = self._sources.get(owner)
            if source is None or self._files is None or not self._files.keeps(source.chat):
                return True
            return source.is_refused or source.next >= len(source.pieces)

    def forget(self, owner: object) -> None:
        with self._changed:
            self._sources.pop(owner, None)

    def keeps(self, chat: str) -> bool:
        """Whether what is read for a chat may reach the disk, now or later."""
        return self._files is not None and self._files.keeps(chat)

    def is_there(self, chat: str) -> bool:
        """Whether a chat has a folder and has not been deleted, though the disk may take nothing more."""
        return self._folders is not None and self._folders.keeps(chat)

    def withdraw(self, owner: object) -> None:
        """What was offered is going to be overwritten: now or never."""
        with self._changed:
            source = self._sources.pop(owner, None)
            if source is not None:
                self._take(source)
                self._changed.notify_all()  # there may be something to write again

    def answering(self, change: int) -> None:
        """One more of those who answer is at work, or one less: nothing is written before all of them rest."""
        with self._changed:
            self._answering = max(0, self._answering + change)
            self._changed.notify_all()

    def settle(self, patience_s: float) -> bool:
        """Waits until all that can be written is; whether it is."""
        self._begin_writing()
        if (files := self._files) is not None:
            files.close(patience_s)
        with self._changed:
            return self._changed.wait_for(lambda: not self._is_writing and self._next() is None, patience_s)

    def give_back(self) -> None:
        with self._changed:
            self._sources.clear()
            self._blocks.clear()
            self._ram = 0

    def close(self, patience_s: float = 1.0) -> None:
        """Writes what is left, for so long at most, and frees everything.  Harmless if repeated."""
        if self._writer is not None and not self._is_closed:
            with self._changed:
                self._answering = 0
                self._changed.notify_all()
            self.settle(patience_s)
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        self.give_back()

    # --- bringing back --------------------------------------------------------------------------------

    def _layout_of(self, key: Key, chat: str) -> BlockLayout | None:
        block = self._blocks.get(key)
        if block is not None:
            return block.layout
        described = self._files.describe(chat, key) if self._files is not None else None
        if described is None:
            return None
        description, nbytes = described
        if description not in self._layouts:
            self._layouts[description] = BlockLayout.read(description)
        layout = self._layouts[description]
        return layout if layout is not None and layout.nbytes == nbytes else None

    def _bring(self, found: Found, first: int, take: CopyBlock) -> int:
        ram, memory = [0] * len(found.keys), threading.local()

        def bring(at: int) -> bool:
            with torch.inference_mode():  # what takes it was made in this mode, which each thread has for itself
                data, is_in_ram = self._data(found.chat, found.keys[at], found.layout, memory)
                if data is not None:
                    take(at, data)
                    ram[at] = BLOCK_TOKENS * is_in_ram
                return data is not None

        with ThreadPoolExecutor(_READERS, "kept-reader") as pool:
            brought = list(pool.map(bring, range(first, len(found.keys))))
        sound = first + (brought.index(False) if False in brought else len(brought))
        from_ram = sum(ram[:sound])
        found.reused = Reused(0, from_ram, (sound - first) * BLOCK_TOKENS - from_ram)
        self._used(found.keys[:sound], found.chat)
        return sound * BLOCK_TOKENS

    def _bring_state(self, found: Found, take: Callable[[torch.Tensor], None]) -> bool:
        assert found.state is not None
        key, layout = found.state
        data, is_in_ram = self._data(found.chat, key, layout, threading.local())
        if data is None:
            return False
        take(data)
        _held, ram, disk = found.reused
        rest = layout.tokens - ram - disk
        found.reused = Reused(0, ram + rest, disk) if is_in_ram else Reused(0, ram, disk + rest)
        self._used([*found.keys, key], found.chat)
        return True

    def _data(
        self, chat: str, key: Key, layout: BlockLayout, memory: threading.local
    ) -> tuple[torch.Tensor | None, bool]:
        """The bytes of a piece, or None, and whether they are in RAM; else they are read into this thread's memory."""
        block = self._blocks.get(key)
        if block is not None and block.layout == layout:
            return block.data, True
        data: torch.Tensor | None = getattr(memory, "data", None)
        if data is None:
            data = memory.data = torch.empty(layout.nbytes, dtype=torch.uint8)
        is_read = self._files is not None and self._files.read_into(chat, key, memoryview(data.numpy()))  # type: ignore[arg-type]
        return data if is_read else None, False

    def _used(self, keys: list[Key], chat: str) -> None:
        with self._changed:
            for key in reversed(keys):
                if key in self._blocks:
                    self._blocks.move_to_end(key)
        if self._files is not None:
            self._files.used(chat, keys)

    # --- keeping in RAM; all of it under the lock -------------------------------------------------------

    def _look(self, chat: str) -> Callable[[Key], bool]:
        on_disk = self._files.look(chat) if self._files is not None else None
        return lambda key: key in self._blocks or (on_disk is not None and on_disk(key))

    def _take(self, source: _Source) -> None:
        keys, chat = source.keys, source.chat
        files = self._files if self._files is not None and self._files.keeps(chat) else None
        may_write = files is not None and not source.is_refused  # else its end would replace its beginning there
        for piece in source.pieces[source.next :]:
            if files is not None and files.has(chat, piece.key):
                continue
            if piece.key not in self._blocks:
                if not self._make_room(piece.layout.nbytes, keys):
                    break
                self._hold(piece)
            if may_write:
                self._blocks[piece.key].wanted_by.add(chat)

    def _hold(self, piece: _Piece) -> None:
        data = torch.empty(piece.layout.nbytes, dtype=torch.uint8)
        piece.copy(data)
        self._blocks[piece.key] = _Block(piece.index, piece.layout, data)
        self._ram += data.nbytes

    def _make_room(self, nbytes: int, spared: Sequence[Key]) -> bool:
        """Frees what was of no use for longest, but nothing of the sequence that wants the room."""
        free = available_ram() - psutil.virtual_memory().total // _SPARE_SHARE
        budget = min(self.ram_budget, self._ram + max(0, free))
        if self._ram + nbytes <= budget:
            return True
        mine = set(spared)
        for is_settled in (True, False):
            for key in [key for key, block in self._blocks.items() if key not in mine]:
                if self._ram + nbytes <= budget:
                    return True
                if bool(self._blocks[key].wanted_by) is not is_settled:
                    self._ram -= self._blocks.pop(key).data.nbytes
        return self._ram + nbytes <= budget

    # --- writing, on a thread of its own ----------------------------------------------------------------

    def _begin_writing(self) -> None:
        with self._changed:
            if self._writer is None and self._files is not None and not self._is_closed:
                self._writer = threading.Thread(target=self._write, name="kept-prefixes", daemon=True)
                self._writer.start()

    def _write(self) -> None:
        _give_way()
        while True:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._is_closed or self._next() is not None)
                if self._is_closed:
                    return
                self._is_writing = True
            try:
                self._write_some()
            except OSError as error:
                self._give_up(error)
                return

    def _write_some(self) -> None:
        """All that there is to write, or until a request comes."""
        files = self._files
        assert files is not None
        with files.writing() as writing:
            if writing is None:
                with self._changed:
                    self._changed.wait(_LOOK_AGAIN_S)
                return
            memory, before = torch.empty(0, dtype=torch.uint8), list[Key]()
            while (wanted := self._wanted(memory)) is not None:
                chat, key, index, layout, memory, spared = wanted
                if spared is not before:
                    writing.spare(chat, spared)
                    before = spared
                self._written(chat, key, self._add(writing, chat, key, index, layout, memory))

    @staticmethod
    def _add(writing: Writing, chat: str, key: Key, index: int, layout: BlockLayout, data: torch.Tensor) -> bool:
        return writing.add(chat, key, index, layout.described, memoryview(data.numpy()))  # type: ignore[arg-type]

    def _wanted(self, memory: torch.Tensor) -> tuple[str, Key, int, BlockLayout, torch.Tensor, list[Key]] | None:
        """The next block to write: its chat, key, index, layout and bytes, and what must not give way to it."""
        with self._changed:
            found = self._next()
            if found is None:
                return None
            chat, key, source = found
            block = self._blocks.get(key)
            if block is not None:
                return chat, key, block.index, block.layout, block.data, [key]
            assert source is not None
            piece = source.pieces[source.next]
            if memory.nbytes != piece.layout.nbytes or any(memory is each.data for each in self._blocks.values()):
                memory = torch.empty(piece.layout.nbytes, dtype=torch.uint8)
            piece.copy(memory)
            return chat, key, piece.index, piece.layout, memory, source.keys

    def _next(self) -> tuple[str, Key, _Source | None] | None:
        files = self._files
        if self._answering or files is None:
            return None
        for key, block in self._blocks.items():
            for chat in tuple(block.wanted_by):
                if files.is_open(chat):
                    return chat, key, None
                if not files.keeps(chat):
                    block.wanted_by.discard(chat)
        for source in self._sources.values():
            if source.is_refused or source.next >= len(source.pieces) or not files.is_open(source.chat):
                continue
            while source.next < len(source.pieces):
                key = source.pieces[source.next].key
                if not files.has(source.chat, key):
                    return source.chat, key, source
                source.next += 1
        return None

    def _written(self, chat: str, key: Key, is_there: bool) -> None:
        with self._changed:
            block = self._blocks.get(key)
            if block is not None:
                block.wanted_by.discard(chat)
            for source in self._sources.values():
                if source.chat == chat and source.next < len(source.pieces) and source.pieces[source.next].key == key:
                    source.next, source.is_refused = source.next + is_there, not is_there

    def _has_key(self, error: OSError | None) -> None:
        if error is not None:
            self._give_up(error)
        with self._changed:
            self._changed.notify_all()

    def _give_up(self, error: OSError) -> None:
        why = "the disk is full" if is_full(error) else error.strerror or str(error)
        self.note = f"What is computed of chats is not kept on disk: {why}."
        _log.warning("kept context cannot be written: %s", error)
        with self._changed:
            self._files, self._is_writing = None, False
            for block in self._blocks.values():
                block.wanted_by.clear()
            self._changed.notify_all()


def _blocks(root: Key, ids: Sequence[int], tokens: int, layout: BlockLayout, copy: CopyBlock) -> list[_Piece]:
    return [_Piece(key, index, layout, partial(copy, index)) for index, key in enumerate(block_keys(root, ids, tokens))]


def _of_window(key: Key) -> Key:
    """The key of the same tokens of layers with a window."""
    return hashlib.blake2b(key + b"window", digest_size=16).digest()


def _give_way() -> None:
    """Lets everything else on this machine go first, as far as the system can tell threads apart."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
