"""What `weft.parallelize` needs: which layers a plan names, this rank's parts of them, and what layers share."""
