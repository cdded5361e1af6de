"""Comes in: graphs of the foreign code, and what the contenders are told.
Goes out: a row for each, measured by processes that share one GPU, and the summary of all rows.
May import: command_line, processes, records, measure, model_runs, foreign_code.
"""
