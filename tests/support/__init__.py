"""Helpers that several rooms' tests share: jobs and programs, small networks, values that differ by rank and position.

A helper of one room stays in that room: in its ``conftest.py`` if it is a fixture.
"""
