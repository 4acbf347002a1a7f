"""The order of samples as a pure function of (seed, epoch, position): constant memory, random access."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

NUM_ROUNDS = 16
MAX_SAMPLES = 1 << 48

# multipliers of the splitmix64 finalizer (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators")
_MULTIPLIERS = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def permute(
    positions: ArrayLike, num_samples: int, *, seed: int, epoch: int, purpose: str = "order"
) -> NDArray[np.int64]:
    """Apply a keyed permutation of [0, num_samples) to positions of an epoch; returns int64 of the same shape.

    A generalised Feistel network over Z_a x Z_b with a * b just above `num_samples`, cycle-walked into the range
    (Black and Rogaway 2002, "Ciphers with arbitrary finite domains"; used for shuffling by Mitchell et al. 2021,
    arXiv:2106.06161). `a` is even, so that odd permutations occur too. The keys are a hash of (purpose, seed, epoch);
    numpy's generators are not used, as their streams may change between versions.
    Raises ValueError for a position outside [0, num_samples).
    """
    values = np.atleast_1d(np.asarray(positions, dtype=np.int64))
    if not 0 < num_samples <= MAX_SAMPLES:
        raise ValueError(f"num_samples is {num_samples}; expected 1 to {MAX_SAMPLES}")
    if values.size and (values.min() < 0 or values.max() >= num_samples):
        raise ValueError(f"a position is outside [0, {num_samples})")
    if num_samples == 1:
        return np.zeros(np.shape(positions), dtype=np.int64)
    digest = hashlib.shake_128(f"{purpose}:{seed}:{epoch}".encode()).digest(8 * NUM_ROUNDS)
    keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
    bits = max(1, (num_samples - 1).bit_length() // 2)
    result = _rounds(values.astype(np.uint64).ravel(), num_samples, bits, keys)
    outside = np.flatnonzero(result >= num_samples)
    while outside.size:
        result[outside] = _rounds(result[outside], num_samples, bits, keys)
        outside = outside[result[outside] >= num_samples]
    return result.astype(np.int64).reshape(np.shape(positions))


@dataclass(frozen=True, eq=False)
class Families:
    """Consecutive samples that an epoch takes one after the other, such as the questions of one conversation.

    `starts` int64 (R + 1,) are the positions at which they begin, and the number of samples. A permutation of families
    takes 8 bytes a sample, kept for one epoch.
    """

    starts: NDArray[np.int64]

    @classmethod
    def of(cls, row_keys: ArrayLike) -> Families:
        keys = np.asarray(row_keys)
        return cls(np.concatenate([[0], np.flatnonzero(np.diff(keys)) + 1, [len(keys)]]).astype(np.int64))

    def permute(self, positions: ArrayLike, *, seed: int, epoch: int) -> NDArray[np.int64]:
        """Return the samples at positions of an epoch, as the function `permute` does for samples alone."""
        return _family_order(self, seed, epoch)[np.asarray(positions, dtype=np.int64)]


@lru_cache(maxsize=1)
def _family_order(families: Families, seed: int, epoch: int) -> NDArray[np.int64]:
    num_families = len(families.starts) - 1
    order = permute(np.arange(num_families), num_families, seed=seed, epoch=epoch)
    sizes = np.diff(families.starts)[order]
    first = families.starts[order] - (np.cumsum(sizes) - sizes)
    return np.repeat(first, sizes) + np.arange(families.starts[-1])


def _rounds(values: NDArray[np.uint64], num_samples: int, bits: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply all rounds to x = right * 2^bits + left, with left in Z_a (a = 2^bits) and right in Z_b."""
    shift, mask = np.uint64(bits), np.uint64((1 << bits) - 1)
    modulus = np.uint64(-(-num_samples // (1 << bits)))
    left, right = values & mask, values >> shift
    for index, key in enumerate(keys):
        mixed = (left if index % 2 else right) * _MULTIPLIERS[0]
        mixed += key
        mixed ^= mixed >> np.uint64(30)
        mixed *= _MULTIPLIERS[1]
        mixed ^= mixed >> np.uint64(27)
        mixed *= _MULTIPLIERS[2]
        mixed ^= mixed >> np.uint64(31)
        if index % 2 == 0:
            left += mixed & mask
            left &= mask
        else:
            # the top 32 bits scaled into [0, b): no division (Lemire 2019, arXiv:1805.10941); bias below b / 2^32
            right += ((mixed >> np.uint64(32)) * modulus) >> np.uint64(32)
            np.subtract(right, modulus, out=right, where=right >= modulus)
    return (right << shift) | left
