"""Measurements that are also tests."""
