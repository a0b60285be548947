"""Common to all tests."""
