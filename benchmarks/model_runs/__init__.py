"""Comes in: whole models.
Goes out: a row for each with compile time, step time, memory, errors and kernels of all contenders.
May import: command_line, processes, records, measure, subjects, pages.
"""
