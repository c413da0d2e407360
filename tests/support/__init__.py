"""Helpers that several rooms' tests share: jobs, small networks, values that differ by rank and place, a late device.

A helper of one room stays in that room: in its ``conftest.py`` if it is a fixture.
"""
