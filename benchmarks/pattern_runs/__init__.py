"""Comes in: pieces of work.
Goes out: a row for each with the times, memory and errors of all contenders, and
comparisons of two revisions.
May import: command_line, records, measure, workloads, pages.
"""
