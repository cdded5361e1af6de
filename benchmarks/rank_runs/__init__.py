"""Comes in: models, and ways to spread them over ranks.
Goes out: a row for each with losses, step time, memory and graphs of training under each backend.
May import: model_runs, records, measure, subjects.
"""
