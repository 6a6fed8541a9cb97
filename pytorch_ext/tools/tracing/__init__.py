"""What every rank does and when: `weft.trace`."""
