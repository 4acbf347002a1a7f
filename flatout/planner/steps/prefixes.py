"""Prefixes that samples share: found in the tokens once, before step 0, and grouped again in every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from flatout.planner.steps.units import Integers, Item

# a shorter prefix costs more in attention's second part than it saves
MIN_PREFIX_TOKENS = 64
# samples are compared in blocks of at most so many tokens together, and of a width between these
_BLOCK_TOKENS, _MIN_WIDTH, _MAX_WIDTH = 1 << 22, 16, 4096
# tokens that are copied at once to make a block
_COPIED_TOKENS = 1 << 20
# a group is cut into parts whose tokens are at least so many times its prefix, so that little is computed again
_LEAST_PART = 5


class Indexable(Protocol):
    """An array, or what reads one from disk: indexed by integers of any shape."""

    def __len__(self) -> int: ...
    def __getitem__(self, where: NDArray[np.int64], /) -> NDArray[Any]: ...


class PrefixGroup(NamedTuple):
    """Items of a list, by their indices, whose first `num_tokens` tokens are the same and predict no label."""

    num_tokens: int
    members: list[int]


class Bundle(NamedTuple):
    """Whole units of a list, by the indices of their items, that are placed together: what a plan deals and packs.

    `num_tokens` counts their prefix once. `group` is the number of their group, -1 without a common prefix. Bundles of
    one group that end up in one micro-batch share its prefix, too.
    """

    members: list[int]
    num_tokens: int
    prefix_tokens: int = 0
    group: int = -1


@dataclass(frozen=True, eq=False)
class PrefixIndex:
    """Samples sorted by their tokens, so that what any of them share is a minimum over neighbours.

    `places` int64 (N,) is each sample's place in that order, or -1 if it shares with none; `shared` int32 (M,) the
    tokens that the sample at a place shares with the one before it, 0 below MIN_PREFIX_TOKENS.
    """

    places: NDArray[np.int64]
    shared: NDArray[np.int32]

    def groups(self, sample_ids: Sequence[int]) -> list[PrefixGroup]:
        """Group those of these samples that share a prefix; each is in at most one group, of at least two.

        Neighbours are joined from the longest common prefix to the shortest. A group of n samples saves (n - 1) P of
        its P shared tokens; it is dissolved into one with a shorter prefix where that saves more.
        """
        places = self.places[np.asarray(sample_ids, dtype=np.int64)]
        order = np.argsort(places, kind="stable")
        order = order[np.searchsorted(places[order], 0) :]
        if len(order) < 2:
            return []
        common = self.common(places[order[:-1]], places[order[1:]])
        # clusters of neighbours, each with what it shares with the next one, which increases
        stack: list[tuple[_Cluster, int]] = []
        for item, with_next in zip(order.tolist(), [*common.tolist(), 0], strict=True):
            cluster = _Cluster([item], [])
            while stack and stack[-1][1] >= with_next:
                before, with_this = stack.pop()
                cluster = _join(before, cluster, with_this)
            stack.append((cluster, with_next))
        return [PrefixGroup(num_tokens, sorted(members)) for num_tokens, members in stack[0][0].groups]

    def common(self, first: NDArray[np.int64], last: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the tokens that all samples from `first` to `last` share, as arrays of places, first < last."""
        bounds = np.stack([first + 1, last + 1], axis=1).ravel()
        return np.minimum.reduceat(self._bounded, bounds)[::2]

    @cached_property
    def _bounded(self) -> NDArray[np.int32]:
        """`shared` and one more place, at which the last span may end."""
        return np.append(self.shared, np.int32(0))


class _Cluster(NamedTuple):
    """Neighbours: those in no group, and groups as (tokens, members)."""

    loose: list[int]
    groups: list[tuple[int, list[int]]]


def _join(first: _Cluster, second: _Cluster, num_tokens: int) -> _Cluster:
    """Join two clusters that share `num_tokens` tokens: as one more group, where that saves tokens."""
    loose, groups = first.loose + second.loose, first.groups + second.groups
    if not num_tokens:
        return _Cluster([], groups)
    dissolved = [group for group in groups if len(group[1]) * num_tokens > (len(group[1]) - 1) * group[0]]
    gain = (len(loose) - 1) * num_tokens
    gain += sum(len(members) * num_tokens - (len(members) - 1) * prefix_tokens for prefix_tokens, members in dissolved)
    if gain <= 0:
        return _Cluster(loose, groups)
    remaining = [group for group in groups if group not in dissolved]
    members = loose + [member for _, group_members in dissolved for member in group_members]
    return _Cluster([], [*remaining, (num_tokens, members)])


@dataclass(frozen=True, eq=False)
class UnitPrefixes:
    """Units of several samples share the prefix of their own; single samples share what `index` has.

    `numbers` int64 (N,) is the unit of each sample; `tokens` int (U,) what the samples of a unit begin with in common,
    0 for less than MIN_PREFIX_TOKENS and for units of one.
    """

    numbers: NDArray[np.int64]
    tokens: NDArray[np.integer]
    index: PrefixIndex | None = None

    @classmethod
    def of(
        cls, unit_offsets: NDArray[np.int64], declared: NDArray[np.integer] | None, index: PrefixIndex | None
    ) -> UnitPrefixes:
        """Take the prefixes that a store declares of its units (U,), or else those that `index` has of their samples.

        Units begin at `unit_offsets` (U + 1,).
        """
        sizes = np.diff(unit_offsets)
        lengths = np.zeros(len(sizes), np.int64) if declared is None else np.array(declared, np.int64)
        if declared is None and index is not None:
            first = np.minimum.reduceat(index.places, unit_offsets[:-1])
            last = np.maximum.reduceat(index.places, unit_offsets[:-1])
            known = np.flatnonzero((first >= 0) & (first < last))
            lengths[known] = index.common(first[known], last[known])
        lengths[(sizes < 2) | (lengths < MIN_PREFIX_TOKENS)] = 0
        return cls(np.repeat(np.arange(len(sizes)), sizes), lengths, index)

    def groups(self, sample_ids: Sequence[int]) -> list[PrefixGroup]:
        """Group whole units that have a prefix, and single samples as `PrefixIndex` does."""
        ids, members = np.asarray(sample_ids, dtype=np.int64), dict[int, list[int]]()
        for index, unit in enumerate(self.numbers[ids].tolist()):
            members.setdefault(unit, []).append(index)
        # of a unit that is parted, one sample may be alone here
        several = {unit: group for unit, group in members.items() if self.tokens[unit] and len(group) > 1}
        groups = [PrefixGroup(int(self.tokens[unit]), group) for unit, group in several.items()]
        single = [group[0] for group in members.values() if len(group) == 1]
        shared = [] if self.index is None else self.index.groups(ids[single].tolist())
        return groups + [PrefixGroup(tokens, [single[index] for index in group]) for tokens, group in shared]


# what says which samples of a list share their first tokens; the second where units have several samples
Prefixes = PrefixIndex | UnitPrefixes


def make_bundles(items: Sequence[Item], groups: Sequence[PrefixGroup] = (), most_tokens: int = 0) -> list[Bundle]:
    """Cut groups of items into bundles of about `most_tokens`, except units; other units are bundles of their own."""
    units: dict[int, list[int]] = {}
    for index, item in enumerate(items):
        units.setdefault(index if item.unit is None else item.unit, []).append(index)
    bundles, lengths = [], [item.length for item in items]
    for number, (prefix_tokens, members) in enumerate(groups):
        unit = items[members[0]].unit
        if unit is not None and len(units[unit]) > 1:
            num_again = len(members) - 1
            total = sum([lengths[member] for member in members])
            bundles.append(Bundle(units.pop(unit), total - num_again * prefix_tokens, prefix_tokens, number))
            continue
        for member in members:
            own_unit = items[member].unit
            del units[member if own_unit is None else own_unit]
        limit, part, num_tokens = min(most_tokens, _LEAST_PART * prefix_tokens), [members[0]], lengths[members[0]]
        for member in members[1:]:
            more = lengths[member] - prefix_tokens
            if num_tokens + more > limit:
                bundles.append(Bundle(part, num_tokens, prefix_tokens, number))
                part, num_tokens = [], prefix_tokens
            part.append(member)
            num_tokens += more
        bundles.append(Bundle(part, num_tokens, prefix_tokens, number))
    for unit_members in units.values():
        bundles.append(Bundle(unit_members, sum([lengths[member] for member in unit_members])))
    return sorted(bundles, key=lambda bundle: bundle.members[0])


def tokens_together(bundles: Sequence[Bundle]) -> int:
    """Return the tokens of bundles in one micro-batch, with each group's prefix once."""
    prefixes = {bundle.group: bundle.prefix_tokens for bundle in bundles}
    return sum([bundle.num_tokens - bundle.prefix_tokens for bundle in bundles]) + sum(prefixes.values())


def find_prefixes(
    token_ids: Indexable, loss_mask: Indexable, offsets: Integers, sample_ids: Integers | None = None
) -> PrefixIndex:
    """Sort samples by the tokens that they could share; those are all before the last one ahead of the first label.

    `token_ids` and `loss_mask` (T,) hold sample i at [offsets[i], offsets[i + 1]); memory-mapped arrays stay on disk.
    Reads a few tokens of every sample, and more only of samples that share all tokens so far with another. A million
    samples that share 200 tokens take about 10 s, and samples that share nothing 1 s.
    """
    order = np.arange(len(offsets) - 1) if sample_ids is None else np.array(sample_ids, dtype=np.int64)
    shared = np.zeros(len(order), np.int32)
    # places still to be compared; samples of one class share all tokens before `start`
    places, classes, start = np.arange(len(order)), np.zeros(len(order), np.int32), 0
    while len(places) > 1:
        width = int(np.clip(_BLOCK_TOKENS // len(places), _MIN_WIDTH, _MAX_WIDTH))
        block = _block(token_ids, loss_mask, offsets, order[places], start, width)
        is_same_class = classes[1:] == classes[:-1]
        differs = is_same_class & (block[1:] != block[:-1]).any(axis=1)
        mixed = np.isin(classes, classes[1:][differs])
        if mixed.any():
            # by class, then by the bytes of tokens; equal rows keep their order
            keys = np.column_stack([classes[mixed].astype(">i4").view(np.int32), block[mixed]])
            row = np.dtype((np.void, keys.itemsize * keys.shape[1]))
            by_tokens = np.argsort(keys.view(row).ravel(), kind="stable")
            order[places[mixed]] = order[places[mixed]][by_tokens]
            block[mixed] = block[mixed][by_tokens]
        agrees = (block[1:] == block[:-1]) & (block[1:] >= 0)
        count = np.where(agrees.all(axis=1), width, agrees.argmin(axis=1))
        shared[places[1:][is_same_class]] = start + count[is_same_class]
        goes_on = is_same_class & (count == width)
        in_group = np.pad(goes_on, (1, 0)) | np.pad(goes_on, (0, 1))
        classes = np.cumsum(~np.pad(goes_on, (1, 0)), dtype=np.int32)[in_group]
        places, start = places[in_group], start + width
    shared[shared < MIN_PREFIX_TOKENS] = 0
    is_member = (shared > 0) | np.pad(shared[1:] > 0, (0, min(1, len(shared))))
    placed = np.full(len(offsets) - 1, -1, np.int64)
    placed[order[is_member]] = np.arange(np.count_nonzero(is_member))
    return PrefixIndex(placed, shared[is_member])


def _block(
    token_ids: Indexable, loss_mask: Indexable, offsets: Integers, ids: NDArray[np.int64], start: int, width: int
) -> NDArray[np.int32]:
    """Return tokens [start, start + width) of each sample, int32 (n, width), with -1 from where it can share no more.

    A token can be shared if the next one exists and no token up to the next one has a label.
    """
    block = np.empty((len(ids), width), np.int32)
    rows = max(1, _COPIED_TOKENS // width)
    for first in range(0, len(ids), rows):
        chunk = ids[first : first + rows]
        at = offsets[chunk][:, None] + np.arange(start, start + width + 1)
        can_share = at < offsets[chunk + 1][:, None]
        at = np.minimum(at, len(token_ids) - 1)
        can_share &= ~loss_mask[at]
        can_share = np.logical_and.accumulate(can_share, axis=1)[:, 1:]
        block[first : first + rows] = np.where(can_share, token_ids[at[:, :-1]].astype(np.int32), -1)
    return block
