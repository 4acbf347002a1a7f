"""What benchmarks measure with: samples of chat-like lengths, and figures of timed steps."""

from bench.figures import figures


def test_rates_are_tokens_over_intervals_without_the_warm_up():
    found = figures([7.0, 1.0, 1.0, 2.0, 1.0], [7, 7, 7, 100, 200], [1, 1, 1, 50, 60])
    assert found["tokens_per_s"] == 300 / 3
    assert found["label_tokens_per_s"] == 110 / 3
    assert found["launch_to_first_step_s"] == 7.0
    assert found["step_p50_s"] == 1.5
    assert found["step_p95_s"] == 2.0
