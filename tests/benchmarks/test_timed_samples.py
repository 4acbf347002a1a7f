"""What benchmarks measure with: samples of chat-like lengths, and figures of timed steps."""

import pytest
from bench.figures import figures
from bench.samples import CHAT, MAX_ID, digest, random_samples


def test_rates_are_tokens_over_intervals_without_the_warm_up():
    found = figures([7.0, 1.0, 1.0, 2.0, 1.0], [7, 7, 7, 100, 200], [1, 1, 1, 50, 60])
    assert found["tokens_per_s"] == 300 / 3
    assert found["label_tokens_per_s"] == 110 / 3
    assert found["launch_to_first_step_s"] == 7.0
    assert found["step_p50_s"] == 1.5
    assert found["step_p95_s"] == 2.0


def test_chat_samples_are_seeded_by_group():
    ids, loss_mask, lengths = random_samples(2, 151936)
    assert lengths.tolist() == CHAT.group(0) + CHAT.group(1)
    assert min(lengths) >= 32
    assert max(lengths) <= 2048
    assert max(random_samples(2, 151936, max_tokens=100)[2]) == 100
    assert ids.min() >= 4
    assert ids.max() < MAX_ID
    assert loss_mask.sum() / len(loss_mask) == pytest.approx(0.6, abs=0.01)
    # the first token of a sample has nothing before it
    assert not loss_mask[lengths.cumsum() - lengths].any()
    other = random_samples(2, 151936)
    assert digest(ids, loss_mask) == digest(other[0], other[1])
    loss_mask[-1] = False
    assert digest(ids, loss_mask) != digest(other[0], other[1])
