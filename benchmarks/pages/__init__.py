"""Comes in: runs, as their files hold them.
Goes out: text for the terminal, Markdown for README.md and docs/.
May import: records, measure.
"""
