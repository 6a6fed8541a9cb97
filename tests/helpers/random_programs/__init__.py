"""Models that are built from plain data, and the statements that hypothesis draws them from."""
