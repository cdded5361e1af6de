"""Comes in: small graphs.
Goes out: the host's microseconds a call under each contender, by layer, and what the generated code
launches and allocates.
May import: command_line, records, measure, subjects, launches.
"""
