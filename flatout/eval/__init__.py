"""Scores a trained model: lm-eval's tasks, and own questions with exact match."""
