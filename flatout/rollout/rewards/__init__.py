"""Rewards of answers: functions of a person's own file, and ready ones, in child processes with limits."""
