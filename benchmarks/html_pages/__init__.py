"""Comes in: runs, as their files hold them.
Goes out: self-contained HTML pages with charts and tables, and the images of README.md.
May import: pages, records, measure.
"""
