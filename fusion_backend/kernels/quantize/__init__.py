"""Rows as int8 with a scale each."""
