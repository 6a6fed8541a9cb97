"""What `weft.explain` says, and how it is shown."""
