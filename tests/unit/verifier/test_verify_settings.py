"""What a step has of its own by its settings is compared like with like."""

from __future__ import annotations

from flatout.verifier.run import verify


def test_a_smoothed_loss_and_noise_are_compared_with_plain_torch(tiny, tmp_path):
    config = tiny.config(
        tmp_path / "run",
        model={"name": str(tiny.model_dir), "precision": "fp32", "neftune_alpha": 5.0},
        objective={"label_smoothing": 0.1, "z_loss": 0.01},
        optim={"lr_ratio": 4.0},
        lora={"init": "gaussian"},
    )
    rows, notes = verify(config, num_ranks=1)
    assert {row.case for row in rows} > {"packed", "each sample alone"}
    assert [row for row in rows if row.verdict != "ok"] == []
    assert any(note.startswith("model.neftune_alpha is 0 here") for note in notes)
